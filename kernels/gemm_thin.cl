// C = epilogue(A B) on GPUs, for an A with few rows (MR). Follows gemm.cl. Every element of B is read once, with loads of VEC elements (WIDE_B) along
// the contiguous direction of B. With WIDE_A, A is read with such loads too, if both matrices are contiguous along k. LANES work-items share each of
// WIDTH columns (or groups of VEC columns), and a tree reduction adds up their partial sums. With PARTS (split-K), PARTS work-groups share a tile, each
// with PART_DEPTH of k. The last group to finish adds up the parts.

#define THREADS (LANES * WIDTH)
#define OWN (B_ALONG_K ? 1 : VEC) // the number of columns of a work-item
#define ALONG (B_ALONG_K ? VEC : 1) // the number of elements of a column that a work-item loads at once
#define COLUMNS (WIDTH * OWN)
#define LANE (B_ALONG_K ? t % LANES : t / WIDTH)
#define COLUMN (B_ALONG_K ? t / LANES : t % WIDTH)
#define NEXT_LANE (B_ALONG_K ? 1 : WIDTH)
#define AT_ONCE (MR > 1 ? 4 : 8) // the number of loads of B that a work-item has in flight

// Element j of a vector load, as ACC. Halves are extracted from words, because otherwise compilers would split the load into pieces
// of 8 bytes.
typedef union { WIDE_B bits; CAT(B, _t) each[VEC]; uint word[(sizeof(WIDE_B) + 3) / 4]; } RightLoad;
#define OF(T, loaded, j)                                                                                               \
    ((ACC)CAT(from_, T)(sizeof(CAT(T, _t)) == 2 && VEC > 1 ? (CAT(T, _t))((loaded).word[(j) / 2] >> (j) % 2 * 16) : (loaded).each[j]))
#ifdef WIDE_A
typedef union { WIDE_A bits; CAT(A, _t) each[VEC]; uint word[(sizeof(WIDE_A) + 3) / 4]; } LeftLoad;
#define LEFT(u, r, j) OF(A, left[u], j)
#define LOAD_LEFT(count, r)                                                                                            \
    LeftLoad left[count];                                                                                              \
    _Pragma("unroll") for (int u = 0; u < count; u++)                                                                  \
        left[u].bits = *(const __global WIDE_A*)(a + at_a + (r) * A_ROW + u * step_a);
#else
#define LEFT(u, r, j) ((ACC)CAT(load_, A)(a, at_a + (r) * A_ROW + u * step_a + (B_ALONG_K ? (j) * A_COL : 0)))
#define LOAD_LEFT(count, r)
#endif

// Multiplies `count` loads of B by the matching elements of A, and adds the products to the accumulators.
#define TAKE(count)                                                                                                    \
    {                                                                                                                  \
        RightLoad right[count];                                                                                        \
        _Pragma("unroll") for (int u = 0; u < count; u++)                                                              \
            right[u].bits = *(const __global WIDE_B*)(b + at_b + u * step_b);                                          \
        _Pragma("unroll") for (int r = 0; r < MR; r++) {                                                               \
            LOAD_LEFT(count, r)                                                                                        \
            _Pragma("unroll") for (int u = 0; u < count; u++)                                                          \
                _Pragma("unroll") for (int j = 0; j < VEC; j++)                                                        \
                    acc[r][j % OWN] = MADD(LEFT(u, r, j), OF(B, right[u], j), acc[r][j % OWN]);                        \
        }                                                                                                              \
        at_a += count * step_a;                                                                                        \
        at_b += count * step_b;                                                                                        \
    }

// Adds up the partial sums `own` of the lanes of each column, and runs STORE for each column e of the group and its `sum`.
#define JOIN(own, STORE)                                                                                               \
    {                                                                                                                  \
        barrier(CLK_LOCAL_MEM_FENCE);                                                                                  \
        for (int j = 0; j < OWN; j++) sums[j][t] = own[j];                                                             \
        for (int half_ = LANES / 2; half_ > 0; half_ /= 2) {                                                           \
            barrier(CLK_LOCAL_MEM_FENCE);                                                                              \
            if (lane < half_)                                                                                          \
                for (int j = 0; j < OWN; j++) sums[j][t] += sums[j][t + half_ * NEXT_LANE];                            \
        }                                                                                                              \
        barrier(CLK_LOCAL_MEM_FENCE);                                                                                  \
        for (int e = t; e < COLUMNS; e += THREADS) {                                                                   \
            const ACC sum = sums[e % OWN][e / OWN * (B_ALONG_K ? LANES : 1)];                                          \
            STORE                                                                                                      \
        }                                                                                                              \
    }
#define STORE_RESULT if (j0 + e < COLS) { FINISH(r, j0 + e, sum) }

__kernel __attribute__((reqd_work_group_size(THREADS, 1, 1)))
void gemm(const __global CAT(A, _t)* restrict a, const __global CAT(B, _t)* restrict b, const params p OPERANDS) {
    __local ACC sums[OWN][THREADS];
    const int t = get_local_id(0), lane = LANE;
#ifdef PARTS
    const long part = get_group_id(0) % PARTS, group = get_group_id(0) / PARTS;
    const long first = part * PART_DEPTH, end = min(DEPTH, first + PART_DEPTH);
#else
    const long group = get_group_id(0), first = 0, end = DEPTH;
#endif
    const long tiles = (COLS + COLUMNS - 1) / COLUMNS, z = group / tiles, j0 = group % tiles * COLUMNS;
    const long column = j0 + COLUMN * OWN, step_a = LANES * ALONG * A_COL, step_b = LANES * ALONG * B_ROW;
    long k = first + lane * ALONG;
    long at_a = p.v[3] + batch_offset(p, z, 9 + BATCH) + k * A_COL;
    long at_b = p.v[6] + batch_offset(p, z, 9 + 2 * BATCH) + k * B_ROW + column * B_COL;
    ACC acc[MR][OWN];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < OWN; j++) acc[r][j] = 0;
    if (column < COLS) {
        for (; k + (AT_ONCE - 1) * LANES * ALONG < end; k += AT_ONCE * LANES * ALONG) TAKE(AT_ONCE)
        for (; k < end; k += LANES * ALONG) TAKE(1)
    }
    OPERAND_OFFSETS(z)
#ifndef PARTS
    #pragma unroll
    for (int r = 0; r < MR; r++) JOIN(acc[r], STORE_RESULT)
#else
    __local uint others;
    __global ACC* parts_of_group = partial + FIRST_PARTIAL + group * PARTS * (MR * COLUMNS);
    #pragma unroll
    for (int r = 0; r < MR; r++) JOIN(acc[r], parts_of_group[(part * MR + r) * COLUMNS + e] = sum;)
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (t == 0) {
        FENCE;
        others = atomic_inc(arrived + FIRST_ARRIVED + group);
        FENCE;
        if (others == PARTS - 1) arrived[FIRST_ARRIVED + group] = 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (others != PARTS - 1) return;
    for (int r = 0; r < MR; r++) {
        ACC all[OWN];
        for (int j = 0; j < OWN; j++) all[j] = 0;
        for (long s = lane; s < PARTS; s += LANES)
            for (int j = 0; j < OWN; j++) all[j] += parts_of_group[(s * MR + r) * COLUMNS + COLUMN * OWN + j];
        JOIN(all, STORE_RESULT)
    }
    barrier(CLK_LOCAL_MEM_FENCE); // see FENCE in prelude.cl
#endif
}

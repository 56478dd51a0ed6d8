// C = epilogue(A B) on GPUs where A has few rows, MR, comes after gemm.cl: every element of B is read once, by neighbours along its
// contiguous direction, LANES work-items along k for each of WIDTH columns. What a lane adds up, a tree joins.

#define LANE (B_ALONG_K ? t % LANES : t / WIDTH)
#define COLUMN (B_ALONG_K ? t / LANES : t % WIDTH)
#define NEXT_LANE (B_ALONG_K ? 1 : WIDTH)
#define AT_ONCE 8 // elements of B on their way to a work-item

// What elements k to k + count * LANES of the column add to the sums.
#define TAKE(count)                                                                                                    \
    {                                                                                                                  \
        ACC right[count];                                                                                              \
        _Pragma("unroll") for (int u = 0; u < count; u++) right[u] = (ACC)CAT(load_, B)(b, at_b + u * step_b);         \
        _Pragma("unroll") for (int u = 0; u < count; u++)                                                              \
            _Pragma("unroll") for (int r = 0; r < MR; r++)                                                             \
                acc[r] = MADD((ACC)CAT(load_, A)(a, at_a + r * A_ROW + u * step_a), right[u], acc[r]);                 \
        at_a += count * step_a;                                                                                        \
        at_b += count * step_b;                                                                                        \
    }

__kernel __attribute__((reqd_work_group_size(LANES * WIDTH, 1, 1)))
void gemm(const __global CAT(A, _t)* restrict a, const __global CAT(B, _t)* restrict b, const params p OPERANDS) {
    __local ACC sums[MR][LANES * WIDTH];
    const int t = get_local_id(0), lane = LANE;
    const long tiles = (COLS + WIDTH - 1) / WIDTH, z = get_group_id(0) / tiles;
    const long j = get_group_id(0) % tiles * WIDTH + COLUMN;
    const long step_a = LANES * A_COL, step_b = LANES * B_ROW;
    long at_a = p.v[3] + batch_offset(p, z, 9 + BATCH) + lane * A_COL;
    long at_b = p.v[6] + batch_offset(p, z, 9 + 2 * BATCH) + lane * B_ROW + j * B_COL;
    ACC acc[MR];
    for (int r = 0; r < MR; r++) acc[r] = 0;
    if (j < COLS) {
        long k = lane;
        for (; k + (AT_ONCE - 1) * LANES < DEPTH; k += AT_ONCE * LANES) TAKE(AT_ONCE)
        for (; k < DEPTH; k += LANES) TAKE(1)
    }
    for (int r = 0; r < MR; r++) sums[r][t] = acc[r];
    for (int half_ = LANES / 2; half_ > 0; half_ /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < half_)
            for (int r = 0; r < MR; r++) sums[r][t] += sums[r][t + half_ * NEXT_LANE];
    }
    OPERAND_OFFSETS(z)
    if (lane == 0 && j < COLS)
        for (int r = 0; r < MR; r++) { FINISH(r, j, sums[r][t]) }
}

// C = epilogue(A B), for matrices of any strides, batched, in one launch.
//
// The host defines the dtypes A and B, and ACC (float, double or ulong, which wraps), the type in which products are computed and
// added. For the epilogue, it defines OPERANDS, OPERAND_OFFSETS, and FINISH, which computes and stores one element. FINISH_WIDE
// does the same for WIDE adjacent elements, in TILED and on tensor cores, if results are contiguous and aligned. STORE_SUM stores
// the sum of a row of A, if A is not contiguous along k. The host chooses one of three kernels and its sizes:
//   TILED  for GPUs: a work-group of 256 stages tiles of both matrices in local memory; a work-item computes MI x NI results.
//   PANEL  for CPUs: a work-item computes HEIGHT rows (at most BLOCK) of NV explicit vectors of W elements. It iterates along k in steps
//          of PANEL_DEPTH, with MR rows at a time in registers, without local memory.
//   DOT    for CPUs, if both matrices are contiguous along k: MR x NR results, each from a vector of W partial sums.
// All numbers that the kernel needs (sizes, offsets and strides, in elements) are in the array p.v.

typedef struct { long v[PARAMS]; } params;

#define ROWS p.v[0]
#define COLS p.v[1]
#define DEPTH p.v[2]
#define A_ROW p.v[4]
#define A_COL p.v[5]
#define B_ROW p.v[7]
#define B_COL p.v[8]

// Returns the offset in an operand of the matrix with batch index z. The operand's batch strides start at v[at], and batch sizes start at v[9].
static inline long batch_offset(const params p, long z, const int at) {
    long offset = 0;
    for (int d = BATCH - 1; d > 0; d--) {
        offset += z % p.v[9 + d] * p.v[at + d];
        z /= p.v[9 + d];
    }
    return BATCH ? offset + z * p.v[at] : 0;
}

#define MADD_float(a, b, c) fma(a, b, c)
#define MADD_double(a, b, c) fma(a, b, c)
#define MADD_ulong(a, b, c) ((a) * (b) + (c))
#define MADD CAT(MADD_, ACC)

#ifdef TILED
// Two k-slices of a tile: rows of A and columns of B, stored k by k, and padded so that writes along k go to different banks.
#define THREADS 256
#define FOUR CAT(ACC, 4) // loaded from local memory in one instruction
#define A_PITCH (TILE_M + 4)
#define B_PITCH (TILE_N + 4)
#define TX (TILE_N / NI)
#define TY (TILE_M / MI)
#define SPLIT (THREADS / (TX * TY)) // parts of a k-slice, one for each part of the work-group; the sums of parts are added up at the end
#define ROW_OF(r) ((r) / 4 * (TY * 4) + ty * 4 + (r) % 4)
#define COL_OF(c) ((c) / 4 * (TX * 4) + tx * 4 + (c) % 4)
#define A_LOADS (TILE_M * TILE_K / THREADS)
#define B_LOADS (TILE_N * TILE_K / THREADS)
#define STAGE (TILE_K * (A_PITCH + B_PITCH))
#define RESULTS (SPLIT > 1 ? SPLIT * TILE_M * TILE_N : 0)

// Consecutive work-items load elements that are consecutive along the contiguous direction of the operand.
#if A_ALONG_K
#define A_M(e) (t / TILE_K + (e) * (THREADS / TILE_K))
#define A_K(e) (t % TILE_K)
#else
#define A_M(e) (t % TILE_M)
#define A_K(e) (t / TILE_M + (e) * (THREADS / TILE_M))
#endif
#if B_ALONG_K
#define B_N(e) (t / TILE_K + (e) * (THREADS / TILE_K))
#define B_K(e) (t % TILE_K)
#else
#define B_N(e) (t % TILE_N)
#define B_K(e) (t / TILE_N + (e) * (THREADS / TILE_N))
#endif

#define FETCH(GUARD)                                                                                                   \
    for (int e = 0; e < A_LOADS; e++) {                                                                                \
        const long i = i0 + A_M(e), k = k0 + A_K(e);                                                                   \
        next_a[e] = !(GUARD) || (i < ROWS && k < DEPTH) ? (ACC)CAT(load_, A)(a, a0 + i * A_ROW + k * A_COL) : 0;        \
    }                                                                                                                  \
    for (int e = 0; e < B_LOADS; e++) {                                                                                \
        const long j = j0 + B_N(e), k = k0 + B_K(e);                                                                   \
        next_b[e] = !(GUARD) || (j < COLS && k < DEPTH) ? (ACC)CAT(load_, B)(b, b0 + k * B_ROW + j * B_COL) : 0;        \
    }

__kernel __attribute__((reqd_work_group_size(THREADS, 1, 1)))
void gemm(const __global CAT(A, _t)* restrict a, const __global CAT(B, _t)* restrict b, const params p OPERANDS) {
    __local ACC shared[STAGE > RESULTS ? STAGE : RESULTS] __attribute__((aligned(32)));
    __local ACC* as = shared;
    __local ACC* bs = shared + TILE_K * A_PITCH;
    const int t = get_local_id(0), tx = t % TX, ty = t / TX % TY, part = t / (TX * TY);

    // Tiles are processed in bands of 8 tile rows, so that work-groups that run at the same time share the operands they read.
    const long tiles_m = (ROWS + TILE_M - 1) / TILE_M, tiles_n = (COLS + TILE_N - 1) / TILE_N;
    const long z = get_group_id(0) / (tiles_m * tiles_n), tile = get_group_id(0) % (tiles_m * tiles_n);
    const long band = tile / (8 * tiles_n), in_band = tile % (8 * tiles_n);
    const long height = min(8L, tiles_m - 8 * band);
    const long i0 = (8 * band + in_band % height) * TILE_M, j0 = in_band / height * TILE_N;
    const long a0 = p.v[3] + batch_offset(p, z, 9 + BATCH), b0 = p.v[6] + batch_offset(p, z, 9 + 2 * BATCH);
    const bool inside = i0 + TILE_M <= ROWS && j0 + TILE_N <= COLS;

    ACC acc[MI][NI], next_a[A_LOADS], next_b[B_LOADS];
#ifdef STORE_SUM
    ACC row_sum = 0; // the sum of those elements of row t % TILE_M that this work-item fetches
#endif
    for (int r = 0; r < MI; r++)
        for (int c = 0; c < NI; c++) acc[r][c] = 0;

    long k0 = 0;
    if (DEPTH > 0) { FETCH(true) }
    while (k0 < DEPTH) {
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int e = 0; e < A_LOADS; e++) as[A_K(e) * A_PITCH + A_M(e)] = next_a[e];
#ifdef STORE_SUM
        for (int e = 0; e < A_LOADS; e++) row_sum += next_a[e];
#endif
        for (int e = 0; e < B_LOADS; e++) bs[B_K(e) * B_PITCH + B_N(e)] = next_b[e];
        barrier(CLK_LOCAL_MEM_FENCE);
        // The next slices are fetched from global memory while this slice is multiplied.
        k0 += TILE_K;
        if (inside && k0 + TILE_K <= DEPTH) { FETCH(false) }
        else if (k0 < DEPTH) { FETCH(true) }
        #pragma unroll
        for (int kk = 0; kk < TILE_K / SPLIT; kk++) {
            const int k = part * (TILE_K / SPLIT) + kk;
            ACC av[MI] __attribute__((aligned(32))), bv[NI] __attribute__((aligned(32)));
            #pragma unroll
            for (int r = 0; r < MI; r += 4) *(FOUR*)(av + r) = *(__local FOUR*)(as + k * A_PITCH + ROW_OF(r));
            #pragma unroll
            for (int c = 0; c < NI; c += 4) *(FOUR*)(bv + c) = *(__local FOUR*)(bs + k * B_PITCH + COL_OF(c));
            #pragma unroll
            for (int r = 0; r < MI; r++) {
                #pragma unroll
                for (int c = 0; c < NI; c++) acc[r][c] = MADD(av[r], bv[c], acc[r][c]);
            }
        }
    }
    OPERAND_OFFSETS(z)
#if SPLIT > 1
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int r = 0; r < MI; r++)
        for (int c = 0; c < NI; c++) shared[(part * TILE_M + ROW_OF(r)) * TILE_N + COL_OF(c)] = acc[r][c];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int e = t; e < TILE_M * TILE_N; e += THREADS) {
        const long i = i0 + e / TILE_N, j = j0 + e % TILE_N;
        ACC sum = shared[e];
        for (int s = 1; s < SPLIT; s++) sum += shared[s * TILE_M * TILE_N + e];
        if (i < ROWS && j < COLS) { FINISH(i, j, sum) }
    }
#else
#ifdef WIDE
    if (inside) {
        #pragma unroll
        for (int r = 0; r < MI; r++) {
            #pragma unroll
            for (int c = 0; c < NI; c += WIDE) { FINISH_WIDE(i0 + ROW_OF(r), j0 + COL_OF(c), (acc[r] + c)) }
        }
    } else
#endif
    #pragma unroll
    for (int r = 0; r < MI; r++) {
        #pragma unroll
        for (int c = 0; c < NI; c++) {
            const long i = i0 + ROW_OF(r), j = j0 + COL_OF(c);
            if (i < ROWS && j < COLS) { FINISH(i, j, acc[r][c]) }
        }
    }
#endif
#ifdef STORE_SUM
    if (j0 == 0) {
        barrier(CLK_LOCAL_MEM_FENCE);
        shared[t] = row_sum;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (t < TILE_M && i0 + t < ROWS) {
            for (int s = 1; s < THREADS / TILE_M; s++) row_sum += shared[s * TILE_M + t];
            STORE_SUM(i0 + t, row_sum)
        }
    }
#endif
}
#endif

#if defined(PANEL) || defined(DOT)
// An explicit vector of 64 bytes of accumulators, because CPU compilers vectorise no loop inside a work-item.
#define VEC CAT(ACC, W)
static inline float16 vector_f32(const __global f32_t* p, ulong i) { return vload16(0, p + i); }
static inline float16 vector_f16(const __global f16_t* p, ulong i) {
    return vload_half16(0, (const __global half*)p + i);
}
static inline float16 vector_bf16(const __global bf16_t* p, ulong i) {
    return as_float16(convert_uint16(vload16(0, p + i)) << 16);
}
#ifdef HAS_F64
static inline double8 vector_f64(const __global f64_t* p, ulong i) { return vload8(0, p + i); }
#endif
#endif

#ifdef PANEL
#define WIDTH (NV * W)

#define PART_DEPTH 128L // products are summed in parts of this depth, so that the error of a sum does not grow with the whole depth

// Multiplies MR rows of the block, from row `i` of the block on, by `count` rows of B, and adds the products to `sums`. LEFT is element k of
// row r, and RIGHT is vector v of row k. Rows past the edge repeat the last row and are not written.
#define MULTIPLY(i, count, LEFT, RIGHT)                                                                                \
    for (long part = 0; part < (count); part += PART_DEPTH) {                                                          \
        long row[MR];                                                                                                  \
        VEC acc[MR][NV];                                                                                               \
        for (int r = 0; r < MR; r++) {                                                                                 \
            row[r] = a0 + (i0 + min((i) + r, rows - 1)) * A_ROW + k0 * a_col;                                          \
            for (int v = 0; v < NV; v++) acc[r][v] = 0;                                                                \
        }                                                                                                              \
        const long end = min(part + PART_DEPTH, (long)(count));                                                        \
        for (long k = part; k < end; k++) {                                                                            \
            VEC bv[NV];                                                                                                \
            _Pragma("unroll") for (int v = 0; v < NV; v++) bv[v] = RIGHT;                                              \
            _Pragma("unroll") for (int r = 0; r < MR; r++) {                                                           \
                const VEC av = LEFT;                                                                                   \
                _Pragma("unroll") for (int v = 0; v < NV; v++) acc[r][v] = MADD(av, bv[v], acc[r][v]);                 \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < MR; r++)                                                                                   \
            for (int v = 0; v < NV; v++) sums[(i) + r][v] += acc[r][v];                                                \
    }
#define AT_A (ACC)CAT(load_, A)(a, row[r] + k * a_col)

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void gemm(const __global CAT(A, _t)* restrict a, const __global CAT(B, _t)* restrict b, const params p OPERANDS) {
    const long tiles_m = (ROWS + HEIGHT - 1) / HEIGHT, tiles_n = (COLS + WIDTH - 1) / WIDTH;
    const long tile = get_global_id(0), z = tile / (tiles_m * tiles_n);
    // Consecutive work-items read the same rows of A, which therefore stay in the cache.
    const long i0 = tile / tiles_n % tiles_m * HEIGHT, first = tile % tiles_n * WIDTH;
    // The last panel is moved left until it is whole. It computes some columns a second time, but writes only its own columns.
    const long j0 = max(0L, min(first, COLS - WIDTH));
    const long a0 = p.v[3] + batch_offset(p, z, 9 + BATCH);
    const long b0 = p.v[6] + batch_offset(p, z, 9 + 2 * BATCH) + j0 * B_COL;
    const int rows = min(HEIGHT, ROWS - i0), cols = min((long)WIDTH, COLS - j0);
    const long depth = DEPTH, a_col = A_COL, b_row = B_ROW, b_col = B_COL;

    VEC sums[BLOCK][NV];
    for (int r = 0; r < (rows + MR - 1) / MR * MR; r++)
        for (int v = 0; v < NV; v++) sums[r][v] = 0;
#if B_UNIT
    if (rows <= MR && cols == WIDTH) {
        const long k0 = 0;
        MULTIPLY(0, depth, AT_A, CAT(vector_, B)(b, b0 + k * b_row + v * W))
    } else
#endif
    for (long k0 = 0; k0 < depth; k0 += PANEL_DEPTH) {
        // The panel of B is packed. Unpacked rows may be at distances in memory at which they evict each other from the cache.
        VEC panel[PANEL_DEPTH][NV];
        const int count = min((long)PANEL_DEPTH, depth - k0);
#if B_UNIT
        if (cols == WIDTH) {
            for (int k = 0; k < count; k++)
                for (int v = 0; v < NV; v++) panel[k][v] = CAT(vector_, B)(b, b0 + (k0 + k) * b_row + v * W);
        } else
#endif
        {
            ACC lane[WIDTH];
            for (int c = 0; c < WIDTH; c++) lane[c] = 0;
            for (int k = 0; k < count; k++) {
                for (int c = 0; c < cols; c++) lane[c] = CAT(load_, B)(b, b0 + (k0 + k) * b_row + c * b_col);
                for (int v = 0; v < NV; v++) panel[k][v] = CAT(vload, W)(v, lane);
            }
        }
        for (int i = 0; i < rows; i += MR) {
#ifdef CONVERT_A
            // Elements are converted before the inner loop, because in the inner loop conversions would take longer than multiplications.
            ACC left[MR][PANEL_DEPTH];
            for (int r = 0; r < MR; r++) {
                const long from = a0 + (i0 + min(i + r, rows - 1)) * A_ROW + k0 * a_col;
                for (int k = 0; k < count; k++) left[r][k] = CAT(load_, A)(a, from + k * a_col);
            }
            MULTIPLY(i, count, left[r][k], panel[k][v])
#else
            MULTIPLY(i, count, AT_A, panel[k][v])
#endif
        }
    }
    OPERAND_OFFSETS(z)
    for (int r = 0; r < rows; r++) {
        ACC lane[WIDTH];
        for (int v = 0; v < NV; v++) CAT(vstore, W)(sums[r][v], v, lane);
        for (int c = first - j0; c < cols; c++) { FINISH(i0 + r, j0 + c, lane[c]) }
    }
}
#endif

#ifdef DOT
#define DOT_DEPTH 1024L // products are summed in parts of this depth
#define SUM2(x) ((x).lo + (x).hi)
#define SUM4(x) SUM2((x).lo + (x).hi)
#define SUM8(x) SUM4((x).lo + (x).hi)
#define SUM16(x) SUM8((x).lo + (x).hi)

__kernel void gemm(const __global CAT(A, _t)* restrict a, const __global CAT(B, _t)* restrict b, const params p OPERANDS) {
    const long tiles_m = (ROWS + MR - 1) / MR, tiles_n = (COLS + NR - 1) / NR;
    const long tile = get_global_id(0), z = tile / (tiles_m * tiles_n);
    const long i0 = tile % tiles_m * MR, j0 = tile / tiles_m % tiles_n * NR;
    const long a0 = p.v[3] + batch_offset(p, z, 9 + BATCH), b0 = p.v[6] + batch_offset(p, z, 9 + 2 * BATCH);
    const int rows = min((long)MR, ROWS - i0), cols = min((long)NR, COLS - j0);
    const long depth = DEPTH, whole = depth / W * W;

    long row[MR], col[NR]; // past the edge, the last row or column is repeated, and results are not written
    VEC acc[MR][NR], sums[MR][NR]; // the sums of a part of the depth, and of all parts
    for (int c = 0; c < NR; c++) col[c] = b0 + (j0 + min(c, cols - 1)) * B_COL;
    for (int r = 0; r < MR; r++) {
        row[r] = a0 + (i0 + min(r, rows - 1)) * A_ROW;
        for (int c = 0; c < NR; c++) sums[r][c] = 0;
    }
    for (long k0 = 0; k0 < whole; k0 += DOT_DEPTH) {
        for (int r = 0; r < MR; r++)
            for (int c = 0; c < NR; c++) acc[r][c] = 0;
        for (long k = k0; k < min(whole, k0 + DOT_DEPTH); k += W) {
            VEC bv[NR];
            #pragma unroll
            for (int c = 0; c < NR; c++) bv[c] = CAT(vector_, B)(b, col[c] + k);
            #pragma unroll
            for (int r = 0; r < MR; r++) {
                const VEC av = CAT(vector_, A)(a, row[r] + k);
                #pragma unroll
                for (int c = 0; c < NR; c++) acc[r][c] = MADD(av, bv[c], acc[r][c]);
            }
        }
        for (int r = 0; r < MR; r++)
            for (int c = 0; c < NR; c++) sums[r][c] += acc[r][c];
    }
    OPERAND_OFFSETS(z)
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) {
            ACC sum = CAT(SUM, W)(sums[r][c]);
            for (long k = whole; k < depth; k++)
                sum = MADD((ACC)CAT(load_, A)(a, row[r] + k), (ACC)CAT(load_, B)(b, col[c] + k), sum);
            FINISH(i0 + r, j0 + c, sum)
        }
}
#endif

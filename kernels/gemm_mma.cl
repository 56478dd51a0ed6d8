// C = epilogue(A B) on tensor cores, for compilers that accept NVIDIA's PTX as inline assembly. Follows gemm.cl, which defines the
// parameters and the epilogue.
//
// A work-group computes a tile of TILE_M x TILE_N results. cp.async copies slices of TILE_K of both matrices to local memory, AHEAD + 1
// slices ahead. Each of WARPS_M x WARPS_N warps multiplies its part of the tile by mma.sync, 16 x 8 x 16 at a time. With SM_90A, groups
// of four warps multiply 64 rows by all columns by wgmma, while the next slices are fetched. The lines of a slice run in the direction
// that is contiguous in global memory (along k or across k). The chunks of 8 elements in a line are swizzled as wgmma requires, which
// avoids bank conflicts. WINDOWS: one of the matrices consists of convolution windows, see windows_mma.cl. ROUNDED ("f16" or "bf16", with
// RESULT_AT, the address of a result): the epilogue only rounds to this type.
//
// PLANES 1: the matrices are f16 or bf16, or with TF32 f32, of which tensor cores read the first 19 bits. PLANES 2 and 3: the matrices are f32, and
// each x is split into 2 or 3 bf16 whose sum approximates x (the sum of 3 has all 24 bits of x). Only the products that affect the result are computed.
// Tensor cores truncate their sums, so sums over 16 of k (with wgmma over a slice) are added up outside the tensor cores.

#ifdef MMA
// Starts this work-item's copies of part `part` of `parts` of a slice of matrix X (A_ or B_). The first `lines` lines and the first
// `length` elements of a line are inside the matrix. Successive copies are `step` bytes apart. Slices of f32 are not swizzled,
// because each work-item reads only its own copies. Lines that are a multiple of eight apart have the same swizzle.
#define COPY_AT(X, e)                                                                                                  \
    (PLANES > 1 ? ((e) * THREADS + t) * 16                                                                            \
     : X##LINE >= 64 && THREADS / X##CHUNKS % 8 == 0 ? X##FIRST_COPY + (e) * (THREADS / X##CHUNKS) * 128             \
     : chunk_at(line + (e) * (THREADS / X##CHUNKS), chunk, X##LINES, X##LINE))
#define A_FIRST_COPY first_copy_a
#define B_FIRST_COPY first_copy_b
#define FETCH(X, part, parts, to, from, step, lines, length)                                                           \
    {                                                                                                                  \
        const uint line = t / X##CHUNKS, chunk = t % X##CHUNKS;                                                      \
        const uint first = X##COPIES * (part) / (parts), end = X##COPIES * ((part) + 1) / (parts);                   \
        if ((lines) >= X##LINES && (length) >= X##LENGTH) {                                                          \
            _Pragma("unroll") for (uint e = first; e < end; e++)                                                       \
                X##WHOLE((to) + COPY_AT(X, e), from, step, e);                                                         \
        } else {                                                                                                       \
            const int bytes = clamp(min((length), (int)X##LENGTH) * BYTES - (int)(chunk * 16), 0, 16);                 \
            _Pragma("unroll") for (uint e = first; e < end; e++)                                                       \
                copy_part((to) + COPY_AT(X, e), X##FROM(from, step, e), X##COPY,                                      \
                          min((int)(line + e * (THREADS / X##CHUNKS)) < (lines) ? bytes : 0, X##INSIDE(e)));           \
        }                                                                                                              \
    }

// FROM: the source address of copy e. INSIDE: the number of its 16 bytes that are inside the matrix (evaluated by all work-items
// together). WHOLE: a copy without bounds checks. FIRST and NEXT: the addresses of the first slice and of the next slices.
#ifndef A_FROM
#define A_FROM(from, step, e) ((from) + (e) * (step))
#define A_INSIDE(e) 16
#define A_WHOLE(to, from, step, e) copy_whole(to, A_FROM(from, step, e), A_COPY)
#define FIRST_A from_a += (i0 * A_ROW + from_k * A_COL) * BYTES + t / A_CHUNKS * line_a + t % A_CHUNKS * 16;
#define AGAIN_A FIRST_A
#define NEXT_A from_a += next_a;
#endif
#ifndef B_FROM
#define B_FROM(from, step, e) ((from) + (e) * (step))
#define B_INSIDE(e) 16
#define B_WHOLE(to, from, step, e) copy_whole(to, B_FROM(from, step, e), B_COPY)
#define NEXT_B from_b += next_b;
#endif
#ifndef FIRST_B
#define FIRST_B from_b += (j0 * B_COL + from_k * B_ROW) * BYTES + t / B_CHUNKS * line_b + t % B_CHUNKS * 16;
#define AGAIN_B FIRST_B
#endif

#define EACH_RESULT                                                                                                    \
    _Pragma("unroll") for (uint mi = 0; mi < MT; mi++) _Pragma("unroll") for (uint ri = 0; ri < 4; ri += 2)            \
        _Pragma("unroll") for (uint ni = 0; ni < NT; ni++) _Pragma("unroll") for (uint r = ri; r < ri + 2; r++)
#define RESULT acc[mi][ni][r]
#define RESULT_ROW (wm + mi * 16 + r / 2 * 8 + lane / 4)
#define RESULT_COL (wn + ni * 8 + lane % 4 * 2 + r % 2)

// The number of floats of one part's partial result in global memory: the tile, and the row sums.
#define PARTIAL (TILE_M * TILE_N + TILE_M)
// The number of pieces (of four results) that a work-item moves, and the index of piece u.
#define PIECES (TILE_M * TILE_N / 4 / THREADS)
#define PIECE ((t + u * THREADS) * 4)
#define PIECE_OF(results) (__local float4*)(results + PIECE / TILE_N * PITCH + PIECE % TILE_N)

__kernel __attribute__((reqd_work_group_size(THREADS, 1, 1)))
void gemm(const __global CAT(A, _t)* restrict a, const __global CAT(B, _t)* restrict b, const params p OPERANDS)
{
    __local uint4 shared[(CUT + STAGES * FETCHED > RESULTS ? CUT + STAGES * FETCHED : RESULTS) / 16] __attribute__((aligned(1024)));
    const uint planes = (uint)(ulong)shared, fetched = planes + CUT;
    const uint t = get_local_id(0), lane = t % 32, warp = t / 32;
    const uint wm = warp % WARPS_M * (TILE_M / WARPS_M), wn = warp / WARPS_M * (TILE_N / WARPS_N);

    // Tiles are processed in bands of tile rows, so that work-groups that run at the same time share the operands they read.
    const uint tiles_m = (ROWS + TILE_M - 1) / TILE_M, tiles_n = (COLS + TILE_N - 1) / TILE_N;
#ifdef PARTS
    const uint part = (uint)get_group_id(0) % (uint)PARTS, index = (uint)get_group_id(0) / (uint)PARTS;
    const long from_k = part * PART_DEPTH;
#else
    const uint index = (uint)get_group_id(0);
    const long from_k = 0;
#endif
    const uint z = BATCH ? index / (tiles_m * tiles_n) : 0, tile = index - z * (tiles_m * tiles_n);
    const uint band = tile / (BAND * tiles_n), in_band = tile % (BAND * tiles_n);
    const uint height = min((uint)BAND, tiles_m - BAND * band);
    const uint column = height == BAND ? in_band / BAND : in_band / height; // with a constant divisor, division is faster
    const long i0 = (long)(BAND * band + in_band - column * height) * TILE_M, j0 = (long)column * TILE_N;
    const int rows = min(ROWS - i0, (long)TILE_M), cols = min(COLS - j0, (long)TILE_N);
#ifdef PARTS
    const int depth = min(DEPTH - from_k, PART_DEPTH);
#else
    const int depth = DEPTH;
#endif

    // Strides in bytes: between lines, between the copies of this work-item, and between slices.
    const long line_a = (A_ALONG_K ? A_ROW : A_COL) * BYTES, line_b = (B_ALONG_K ? B_COL : B_ROW) * BYTES;
    const long step_a = THREADS / A_CHUNKS * line_a, step_b = THREADS / B_CHUNKS * line_b;
    const long next_a = TILE_K * (A_ALONG_K ? BYTES : line_a), next_b = TILE_K * (B_ALONG_K ? BYTES : line_b);
    const ulong start_a = (ulong)a + (p.v[3] + batch_offset(p, z, 9 + BATCH)) * BYTES;
    const ulong start_b = (ulong)b + (p.v[6] + batch_offset(p, z, 9 + 2 * BATCH)) * BYTES;
    ulong from_a = start_a, from_b = start_b;
    FIRST_A
    FIRST_B
    int left = depth; // the length along k that is not fetched yet
    const uint first_copy_a = chunk_at(t / A_CHUNKS, t % A_CHUNKS, A_LINES, A_LINE);
    const uint first_copy_b = chunk_at(t / B_CHUNKS, t % B_CHUNKS, B_LINES, B_LINE);

#define FETCH_PART(slot, part, parts)                                                                                  \
    if (left > 0) {                                                                                                    \
        const uint to = fetched + (slot) * FETCHED;                                                                    \
        FETCH(A_, part, parts, to, from_a, step_a, A_ALONG_K ? rows : left, A_ALONG_K ? left : rows)                    \
        FETCH(B_, part, parts, to + A_FETCHED, from_b, step_b, B_ALONG_K ? cols : left, B_ALONG_K ? left : cols)        \
    }
#define NEXT_SLICE                                                                                                     \
    asm volatile("cp.async.commit_group;");                                                                            \
    NEXT_A                                                                                                             \
    NEXT_B                                                                                                             \
    left -= TILE_K;
#define NEXT_SLOT(slot) slot = slot + 1 == STAGES ? 0 : slot + 1;

    float acc[MT][NT][4];
    EACH_RESULT RESULT = 0;
    #pragma unroll
    for (uint s = 0; s < FIRST; s++) {
        FETCH_PART(s, 0, 1)
        NEXT_SLICE
    }
    WAIT_BUT(AHEAD);
    uint slot = 0, free = FIRST;

#if PLANES == 1 && defined(SM_90A)
    const uint group = warp / 4;
    const uint slices_a = (fetched + group * (A_ALONG_K ? 64 * TILE_K * BYTES : A_LINES * 128)) / 16;
    const uint slices_b = (fetched + A_FETCHED) / 16;
    for (int k = 0; k < depth; k += TILE_K) {
        WAIT_BUT(AHEAD);
        FENCE_WGMMA;
        barrier(CLK_LOCAL_MEM_FENCE);
        const uint at_a = slices_a + slot * (FETCHED / 16), at_b = slices_b + slot * (FETCHED / 16);
        BEGIN_MULTIPLY;
        #pragma unroll
        for (uint s = 0; s < STEPS; s++) MULTIPLY(acc[0], DESCRIBE(A_, at_a, s * 16), DESCRIBE(B_, at_b, s * 16), 1);
        END_MULTIPLY;
        // Fetches to the slot of the slice before the last one, because all warps have finished multiplying that slice.
        FETCH_PART(free, 0, 1)
        NEXT_SLICE
        NEXT_SLOT(free)
        NEXT_SLOT(slot)
        MULTIPLIED_BUT(1, acc[0]);
    }
    MULTIPLIED_BUT(0, acc[0]);
#elif PLANES == 1
#define FRAGMENTS(f, slot, k)                                                                                          \
    {                                                                                                                  \
        const uint at = fetched + (slot) * FETCHED;                                                                    \
        _Pragma("unroll") for (uint i = 0; i < MT; i++) load_a(fa[f][i], at, wm + i * 16, k, lane);                     \
        _Pragma("unroll") for (uint j = 0; j < NT; j += 2) load_b(fb[f][j / 2], at + A_FETCHED, wn + j * 8, k, lane);   \
    }
    uint fa[2][MT][4], fb[2][NT / 2][4];
    barrier(CLK_LOCAL_MEM_FENCE);
    FRAGMENTS(0, 0, 0)
    for (int k = 0; k < depth; k += TILE_K) {
        #pragma unroll
        for (uint s = 0; s < STEPS; s++) {
            // The fragments of the next step are loaded while the fragments of this step are multiplied.
            if (s == STEPS - 1) {
                WAIT_BUT(AHEAD);
                barrier(CLK_LOCAL_MEM_FENCE);
                NEXT_SLOT(slot)
            }
            FRAGMENTS((s + 1) % 2, slot, (s + 1) % STEPS * 16)
            if (s < STEPS - 1) { FETCH_PART(free, s, STEPS - 1) }
            if (s == STEPS - 2) {
                NEXT_SLICE
                NEXT_SLOT(free)
            }
            #pragma unroll
            for (uint i = 0; i < MT; i++) {
                #pragma unroll
                for (uint j = 0; j < NT; j++) {
                    const uint c = i % 2 ? NT - 1 - j : j; // alternating direction, so that successive products share a fragment
                    mma(acc[i][c], fa[s % 2][i], fb[s % 2][c / 2] + c % 2 * 2);
                }
            }
        }
    }
#else
    // Splits what this work-item copied into planes of bf16. `at` (0 or 1) selects the buffer of the planes.
#define CUT_TO(X, e)                                                                                                   \
    chunk_at(t / X##CHUNKS + (e) * (THREADS / X##CHUNKS), t % X##CHUNKS / 2, X##LINES, X##LINE) + t % X##CHUNKS % 2 * 8
#ifdef STORE_SUM
    // The sum of the elements that this work-item splits, for each of its four adjacent rows.
    float row_sum[4] = {0, 0, 0, 0};
#define ADD_ROWS(e, there) if (e < A_COPIES && (there)) for (uint i = 0; i < 4; i++) row_sum[i] += as_float(x[e][i]);
#else
#define ADD_ROWS(e, there)
#endif
#define CUT_COPIES(first, end, slot, at, there)                                                                        \
    {                                                                                                                  \
        const uint from = fetched + (slot) * FETCHED + t * 16, to = planes + (at) * (PLANES * PLANE);                  \
        uint x[COPIES][4];                                                                                             \
        _Pragma("unroll") for (uint e = first; e < (end); e++) load_words(x[e], from + e * (THREADS * 16));            \
        _Pragma("unroll") for (uint e = first; e < (end); e++) { ADD_ROWS(e, there) }                                  \
        _Pragma("unroll") for (uint e = first; e < (end); e++)                                                         \
            cut(x[e], to + (e < A_COPIES ? CUT_TO(A_, e) : A_PLANE + CUT_TO(B_, e - A_COPIES)), PLANE);                \
    }
#define COPIES (A_COPIES + B_COPIES)
#define GROUPS (STEPS * NT / 2)
    uint now = 0;
    CUT_COPIES(0, COPIES, 0, 0, true)
#ifdef SM_90A
    const uint group = warp / 4;
    FENCE_WGMMA;
    barrier(CLK_LOCAL_MEM_FENCE);
    const uint slices_a = (planes + group * (A_ALONG_K ? 64 * TILE_K * 2 : A_LINES * 128)) / 16;
    const uint slices_b = (planes + A_PLANE) / 16;
    for (int k = 0; k < depth; k += TILE_K) {
        const uint at_a = slices_a + now * (PLANES * PLANE / 16), at_b = slices_b + now * (PLANES * PLANE / 16);
        float sum[NT][4];
        BEGIN_MULTIPLY;
        // The products with the smallest terms are added first.
        #pragma unroll
        for (int order = PLANES - 1; order >= 0; order--) {
            #pragma unroll
            for (int q = 0; q <= order; q++) {
                #pragma unroll
                for (uint s = 0; s < STEPS; s++) {
                    MULTIPLY(sum, DESCRIBE(A_, at_a + (order - q) * (PLANE / 16), s * 16),
                             DESCRIBE(B_, at_b + q * (PLANE / 16), s * 16), order == PLANES - 1 && q == 0 && s == 0 ? 0 : 1);
                }
            }
        }
        END_MULTIPLY;
        FETCH_PART(free, 0, 1)
        NEXT_SLICE
        NEXT_SLOT(free)
        NEXT_SLOT(slot)
        WAIT_BUT(AHEAD);
        // The next slice is split into planes while this slice is multiplied.
        CUT_COPIES(0, COPIES, slot, 1 - now, k + TILE_K < depth)
        FENCE_WGMMA;
        MULTIPLIED_BUT(0, sum);
        #pragma unroll
        for (uint j = 0; j < NT; j++) {
            #pragma unroll
            for (uint r = 0; r < 4; r++) acc[0][j][r] += sum[j][r];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        now = 1 - now;
    }
#else
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int k = 0; k < depth; k += TILE_K) {
        FETCH_PART(free, 0, 1)
        NEXT_SLICE
        NEXT_SLOT(free)
        NEXT_SLOT(slot)
        WAIT_BUT(AHEAD);
        #pragma unroll
        for (uint s = 0; s < STEPS; s++) {
            const uint at = planes + now * (PLANES * PLANE);
            uint fa[PLANES][MT][4];
            #pragma unroll
            for (uint q = 0; q < PLANES; q++) {
                #pragma unroll
                for (uint i = 0; i < MT; i++) load_a(fa[q][i], at + q * PLANE, wm + i * 16, s * 16, lane);
            }
            #pragma unroll
            for (uint j = 0; j < NT; j += 2) {
                uint fb[PLANES][4];
                #pragma unroll
                for (uint q = 0; q < PLANES; q++) load_b(fb[q], at + q * PLANE + A_PLANE, wn + j * 8, s * 16, lane);
                // The next slice is split into planes while this slice is multiplied.
                const uint group = s * (NT / 2) + j / 2;
                CUT_COPIES(COPIES * group / GROUPS, COPIES * (group + 1) / GROUPS, slot, 1 - now, k + TILE_K < depth)
                #pragma unroll
                for (uint c = 0; c < 2; c++) {
                    float sum[MT][4];
                    #pragma unroll
                    for (uint i = 0; i < MT; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0;
                    // The products with the smallest terms are added first.
                    #pragma unroll
                    for (int order = PLANES - 1; order >= 0; order--) {
                        #pragma unroll
                        for (int q = 0; q <= order; q++) {
                            #pragma unroll
                            for (uint i = 0; i < MT; i++) mma(sum[i], fa[order - q][i], fb[q] + c * 2);
                        }
                    }
                    #pragma unroll
                    for (uint i = 0; i < MT; i++) {
                        #pragma unroll
                        for (uint r = 0; r < 4; r++) acc[i][j + c][r] += sum[i][r];
                    }
                }
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        now = 1 - now;
    }
#endif

    // An infinity that is split into planes, or a sum that overflows, gives NaN where plain f32 may not. Such tiles are computed again in f32.
    __local uint again;
    float poison = 0;
    EACH_RESULT poison += RESULT * 0;
    if (t == 0) again = 0;
    WAIT_BUT(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (poison != 0) again = 1;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (again) {
        EACH_RESULT RESULT = 0;
        from_a = start_a;
        from_b = start_b;
        AGAIN_A
        AGAIN_B
        left = depth;
        const __local float* raw = (const __local float*)shared + CUT / 4;
#define A_WORD(m, k) raw[A_ALONG_K ? (m) * TILE_K + (k) : (k) * TILE_M + (m)]
#define B_WORD(n, k) raw[A_FETCHED / 4 + (B_ALONG_K ? (n) * TILE_K + (k) : (k) * TILE_N + (n))]
        while (left > 0) {
            const uint slice = min(left, TILE_K);
            FETCH_PART(0, 0, 1)
            NEXT_SLICE
            WAIT_BUT(0);
            barrier(CLK_LOCAL_MEM_FENCE);
            #pragma unroll 1
            for (uint k = 0; k < slice; k++) {
                float x[MT][2], y[NT][2];
                #pragma unroll
                for (uint i = 0; i < MT * 2; i++) x[i / 2][i % 2] = A_WORD(wm + i * 8 + lane / 4, k);
                #pragma unroll
                for (uint j = 0; j < NT * 2; j++) y[j / 2][j % 2] = B_WORD(wn + j / 2 * 8 + lane % 4 * 2 + j % 2, k);
                EACH_RESULT RESULT = fma(x[mi][r / 2], y[ni][r % 2], RESULT);
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
    }
#endif

#ifdef ROUNDED
    // Each warp stages its 16 rows in one of the two slots (of four) that do not hold the last slices, so it need not wait for other
    // warps. If a slot is too small, all warps wait, and the rows of all warps are staged one after another in local memory.
#if FETCHED < 64 * ROUNDED_PITCH
    barrier(CLK_LOCAL_MEM_FENCE);
    const uint staged = fetched + warp * (16 * ROUNDED_PITCH);
#else
    const uint staged = fetched + (slot + group) % STAGES * FETCHED + warp % 4 * (16 * ROUNDED_PITCH);
#endif
    #pragma unroll
    for (uint ni = 0; ni < NT; ni += 2) {
        const uint to = staged + lane % 16 * ROUNDED_PITCH + (ni + lane / 16) * 16;
        store_matrices(to, rounded(acc[0][ni][0], acc[0][ni][1]), rounded(acc[0][ni][2], acc[0][ni][3]),
                       rounded(acc[0][ni + 1][0], acc[0][ni + 1][1]), rounded(acc[0][ni + 1][2], acc[0][ni + 1][3]));
    }
    asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
    OPERAND_OFFSETS(z)
    const __local uchar* own = (const __local uchar*)shared + (staged - fetched);
    uint4 eight[TILE_N / 16];
    #pragma unroll
    for (uint u = 0; u < TILE_N / 16; u++) {
        const uint e = u * 32 + lane;
        eight[u] = *(const __local uint4*)(own + e / (TILE_N / 8) * ROUNDED_PITCH + e % (TILE_N / 8) * 16);
    }
    #pragma unroll
    for (uint u = 0; u < TILE_N / 16; u++) {
        const int e = u * 32 + lane, m = warp * 16 + e / (TILE_N / 8), n = e % (TILE_N / 8) * 8;
        if (m < rows && n + 8 <= cols) *(__global uint4*)RESULT_AT(i0 + m, j0 + n) = eight[u];
    }
    for (uint e = lane; e < 16 * (cols % 8); e += 32) {
        const int m = e % 16, n = cols / 8 * 8 + e / 16;
        if (warp * 16 + m < rows) *RESULT_AT(i0 + warp * 16 + m, j0 + n) = *(const __local ushort*)(own + m * ROUNDED_PITCH + n * 2);
    }
#else
    __local float* results = (__local float*)shared;
    WAIT_BUT(0);
    barrier(CLK_LOCAL_MEM_FENCE);
#ifdef STORE_SUM
    float sum = 0; // the sum of row t of the left matrix
    if (j0 == 0) {
        #pragma unroll
        for (uint i = 0; i < 4; i++) results[t * 4 + i] = row_sum[i];
        barrier(CLK_LOCAL_MEM_FENCE);
        if (t < TILE_M) {
            for (uint s = 0; s < THREADS / A_CHUNKS; s++) sum += results[s * TILE_M + t];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
#endif

    // Results are exchanged through local memory, so that adjacent work-items write adjacent columns.
    #pragma unroll
    for (uint mi = 0; mi < MT; mi++) {
        #pragma unroll
        for (uint ni = 0; ni < NT; ni++) {
            #pragma unroll
            for (uint r = 0; r < 4; r += 2) {
                *(__local float2*)(results + RESULT_ROW * PITCH + RESULT_COL) = (float2)(RESULT, acc[mi][ni][r + 1]);
            }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);

#ifdef PARTS
    // Split-K: every part is written to global memory. The work-group that arrives last adds up all parts, in the order of the parts.
    __local uint others;
    __global float* all = partial + FIRST_PARTIAL + (ulong)index * PARTS * PARTIAL;
    #pragma unroll
    for (uint u = 0; u < PIECES; u++) {
        if (PIECE / TILE_N < rows) *(__global float4*)(all + part * PARTIAL + PIECE) = *PIECE_OF(results);
    }
#ifdef STORE_SUM
    if (j0 == 0 && t < TILE_M) all[part * PARTIAL + TILE_M * TILE_N + t] = sum;
#endif
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (t == 0) {
        FENCE;
        others = atomic_inc(arrived + FIRST_ARRIVED + index);
        FENCE;
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    const uint parts = PARTS;
    if (others != parts - 1) return;
    if (t == 0) arrived[FIRST_ARRIVED + index] = 0;
    float4 total[PIECES];
    #pragma unroll
    for (uint u = 0; u < PIECES; u++) total[u] = 0;
#if PIECES > 8
    #pragma unroll 2
#else
    #pragma unroll 4
#endif
    for (uint s = 0; s < parts; s++) {
        // The loop is unrolled, so that many loads are in flight at once, which hides their latency.
        #pragma unroll
        for (uint u = 0; u < PIECES; u++) {
            if (PIECE / TILE_N < rows) total[u] += *(__global float4*)(all + s * PARTIAL + PIECE);
        }
    }
    #pragma unroll
    for (uint u = 0; u < PIECES; u++) *PIECE_OF(results) = total[u];
#ifdef STORE_SUM
    sum = 0;
    if (j0 == 0 && t < TILE_M) {
        for (uint s = 0; s < parts; s++) sum += all[s * PARTIAL + TILE_M * TILE_N + t];
    }
#endif
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
#ifdef STORE_SUM
    if (j0 == 0 && t < rows) STORE_SUM(i0 + t, sum)
#endif
    OPERAND_OFFSETS(z)
    const bool whole = rows == TILE_M && cols == TILE_N;
#ifdef WIDE
    if (whole) {
        #pragma unroll 4
        for (uint e = t * WIDE; e < TILE_M * TILE_N; e += THREADS * WIDE) {
            float neighbours[WIDE];
            #pragma unroll
            for (uint u = 0; u < WIDE; u += 4) {
                vstore4(*(const __local float4*)(results + e / TILE_N * PITCH + e % TILE_N + u), 0, neighbours + u);
            }
            FINISH_WIDE(i0 + e / TILE_N, j0 + e % TILE_N, neighbours)
        }
        return;
    }
#endif
    for (uint first = t; first < TILE_M * TILE_N; first += 8 * THREADS) {
        float value[8];
        #pragma unroll
        for (uint u = 0; u < 8; u++) {
            const uint e = first + u * THREADS;
            value[u] = results[e / TILE_N * PITCH + e % TILE_N];
        }
        if (whole) {
            #pragma unroll
            for (uint u = 0; u < 8; u++) FINISH(i0 + (first + u * THREADS) / TILE_N, j0 + (first + u * THREADS) % TILE_N, value[u])
        } else {
            #pragma unroll
            for (uint u = 0; u < 8; u++) {
                const int m = (first + u * THREADS) / TILE_N, n = (first + u * THREADS) % TILE_N;
                if (m < rows && n < cols) { FINISH(i0 + m, j0 + n, value[u]) }
            }
        }
    }
#endif
}
#endif

// C = epilogue(A B) on tensor cores, for compilers that take NVIDIA's PTX as inline assembly. Comes after gemm.cl, whose
// parameters and epilogue this is written to.
//
// A work-group computes TILE_M x TILE_N results. Slices of TILE_K of both matrices travel to local memory by cp.async,
// AHEAD + 1 ahead, and each of WARPS_M x WARPS_N warps multiplies its part of them by mma.sync, 16 x 8 x 16 at a time;
// with SM_90A each four warps multiply 64 rows by all columns by wgmma, and fetch the next slices meanwhile. A slice lies
// in lines along the direction that is contiguous in global memory (along k or across), in chunks of 8 elements that are
// permuted within their line so that no load meets a bank twice, as wgmma asks for it.
//
// PLANES 1: f16 or bf16. PLANES 2 and 3: f32, each x cut into as many bf16 of which the sum is x (three hold all of its
// 24 bits), and as many products as matter; those of 16 k are added to the rest outside of the tensor core, which
// truncates its sums.

#ifdef MMA
#define THREADS (32 * WARPS_M * WARPS_N)
#define STEPS (TILE_K / 16)
#define MT (TILE_M / WARPS_M / 16)
#define NT (TILE_N / WARPS_N / 8)
// Lines, elements in one, 16-byte copies in one, copies that a work-item makes of a slice.
#define A_LINES (A_ALONG_K ? TILE_M : TILE_K)
#define B_LINES (B_ALONG_K ? TILE_N : TILE_K)
#define A_LENGTH (A_ALONG_K ? TILE_K : TILE_M)
#define B_LENGTH (B_ALONG_K ? TILE_K : TILE_N)
#define A_CHUNKS (A_LENGTH * BYTES / 16)
#define B_CHUNKS (B_LENGTH * BYTES / 16)
#define A_COPIES (A_LINES * A_CHUNKS / THREADS)
#define B_COPIES (B_LINES * B_CHUNKS / THREADS)
// Bytes of a slice as it is fetched and, two of them, of its planes.
#define A_FETCHED (TILE_M * TILE_K * BYTES)
#define FETCHED ((TILE_M + TILE_N) * TILE_K * BYTES)
#define A_PLANE (TILE_M * TILE_K * 2)
#define PLANE ((TILE_M + TILE_N) * TILE_K * 2)
#define CUT (BYTES == 4 ? 2 * PLANES * PLANE : 0)
#define PITCH (TILE_N + 8)
#define RESULTS (TILE_M * PITCH * 4)
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define FIRST (AHEAD + 1) // slices that are asked for at first

// Where a chunk of 8 elements lies, in bytes: lines longer than 64 elements are folded into slabs of 64.
static inline uint chunk_at(uint line, uint chunk, const uint lines, const uint length)
{
    if (length >= 64) return (chunk / 8 * lines * 8 + line * 8 + (chunk % 8 ^ (line & 7))) * 16;
    return (line * (length / 8) + (chunk ^ (length == 32 ? line >> 1 & 3 : line >> 2 & 1))) * 16;
}

// 16 bytes to local memory, in pieces of `size`.
static inline void copy_whole(uint to, ulong from, const int size)
{
    if (size == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
    } else {
        #pragma unroll
        for (int i = 0; i < 16; i += size) {
            if (size == 8) asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to + i), "l"(from + i));
            else asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + i), "l"(from + i));
        }
    }
}

// The first `bytes` of them, the others 0: three times the instructions, for edges.
static inline void copy_part(uint to, ulong from, const int size, int bytes)
{
    #pragma unroll
    for (int i = 0; i < 16; i += size) {
        const int n = clamp(bytes - i, 0, size);
        if (size == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n));
        else if (size == 8) asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to + i), "l"(from + i), "r"(n));
        else asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + i), "l"(from + i), "r"(n));
    }
}

// Part `part` of `parts` of a slice of matrix X (A_ or B_), of which `lines` lines of `length` elements exist: this work-item's
// copies, `step` bytes from one to the next. What is cut afterwards lies in order, for only its own work-item reads it.
#define COPY_AT(X, e)                                                                                                  \
    (BYTES == 4 ? ((e) * THREADS + t) * 16 : chunk_at(line + (e) * (THREADS / X##CHUNKS), chunk, X##LINES, X##LENGTH))
#define FETCH(X, part, parts, to, from, step, lines, length)                                                           \
    {                                                                                                                  \
        const uint line = t / X##CHUNKS, chunk = t % X##CHUNKS;                                                      \
        const uint first = X##COPIES * (part) / (parts), end = X##COPIES * ((part) + 1) / (parts);                   \
        if ((lines) >= X##LINES && (length) >= X##LENGTH) {                                                          \
            _Pragma("unroll") for (uint e = first; e < end; e++)                                                       \
                copy_whole((to) + COPY_AT(X, e), (from) + e * (step), X##COPY);                                       \
        } else {                                                                                                       \
            const int bytes = clamp(min((length), (int)X##LENGTH) * BYTES - (int)(chunk * 16), 0, 16);                 \
            _Pragma("unroll") for (uint e = first; e < end; e++)                                                       \
                copy_part((to) + COPY_AT(X, e), (from) + e * (step), X##COPY,                                         \
                          (int)(line + e * (THREADS / X##CHUNKS)) < (lines) ? bytes : 0);                             \
        }                                                                                                              \
    }

#define LDMATRIX(suffix, f, from)                                                                                      \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" suffix ".shared.b16 {%0, %1, %2, %3}, [%4];"                          \
                 : "=r"((f)[0]), "=r"((f)[1]), "=r"((f)[2]), "=r"((f)[3])                                              \
                 : "r"(from))

// 16 rows of A from m on and 16 of k from k on; the same of 16 columns of B from n on.
static inline void load_a(uint f[4], uint slice, uint m, uint k, uint lane)
{
#if A_ALONG_K
    LDMATRIX("", f, slice + chunk_at(m + lane % 16, k / 8 + lane / 16, A_LINES, A_LENGTH));
#else
    LDMATRIX(".trans", f, slice + chunk_at(k + lane % 8 + lane / 16 * 8, m / 8 + lane / 8 % 2, A_LINES, A_LENGTH));
#endif
}
static inline void load_b(uint f[4], uint slice, uint n, uint k, uint lane)
{
#if B_ALONG_K
    LDMATRIX("", f, slice + chunk_at(n + lane % 8 + lane / 16 * 8, k / 8 + lane / 8 % 2, B_LINES, B_LENGTH));
#else
    LDMATRIX(".trans", f, slice + chunk_at(k + lane % 16, n / 8 + lane / 16, B_LINES, B_LENGTH));
#endif
}

// c += a b. Read-write operands: separate ones would be read before a loop that is unrolled.
static inline void mma(float c[4], const uint a[4], const uint b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA "." MMA ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four f32, and their planes of bf16. Infinity leaves NaN: see below.
static inline void load_words(uint x[4], uint from)
{
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}
static inline void cut(uint x[4], uint to, const uint plane)
{
    #pragma unroll
    for (uint p = 0; p < PLANES; p++) {
        uint low, high;
        asm volatile("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(low) : "r"(x[0]), "r"(x[1]));
        asm volatile("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(high) : "r"(x[2]), "r"(x[3]));
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + p * plane), "r"(low), "r"(high));
        #pragma unroll
        for (uint i = 0; i < 4; i++) x[i] = as_uint(as_float(x[i]) - as_float(x[i] & 0xffff0000));
    }
}

#ifdef SM_90A
// Four warps multiply 64 rows by all columns, straight from local memory. The target the compiler builds for has no such
// instruction: it sees comments, which the host opens in what has been compiled.
#define TEN(tens) "%" tens "0, %" tens "1, %" tens "2, %" tens "3, %" tens "4, %" tens "5, %" tens "6, %" tens "7, %" tens "8, %" tens "9, "
#define R32 TEN("") TEN("1") TEN("2") "%30, %31"
#define R64 TEN("") TEN("1") TEN("2") TEN("3") TEN("4") TEN("5") "%60, %61, %62, %63"
#define R128 TEN("") TEN("1") TEN("2") TEN("3") TEN("4") TEN("5") TEN("6") TEN("7") TEN("8") TEN("9") TEN("10") TEN("11") \
    "%120, %121, %122, %123, %124, %125, %126, %127"
#define F4(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define F16(d, j) F4(d, j), F4(d, j + 1), F4(d, j + 2), F4(d, j + 3)
#define F32(d, j) F16(d, j), F16(d, j + 4)
#define F64(d, j) F32(d, j), F32(d, j + 8)
#if TILE_N == 256
#define REGISTERS(d) F64(d, 0), F64(d, 16)
#define NAMES R128
#define FROM "%128, %129"
#define ADD "%130"
#elif TILE_N == 128
#define REGISTERS(d) F64(d, 0)
#define NAMES R64
#define FROM "%64, %65"
#define ADD "%66"
#else
#define REGISTERS(d) F32(d, 0)
#define NAMES R32
#define FROM "%32, %33"
#define ADD "%34"
#endif

// Where 16 of k from k on begin, and how the lines lie.
#define DESCRIBE(X, from, k)                                                                                           \
    (((ulong)(((from) + (X##ALONG_K ? (k) * 2 : (k) * 128)) & 0x3ffff) >> 4)                                           \
     | (ulong)(X##ALONG_K ? 1 : X##LINES * 8) << 16 | (ulong)(X##ALONG_K ? X##LENGTH : 64) << 32                        \
     | (ulong)(X##ALONG_K && X##LENGTH == 32 ? 2 : X##ALONG_K && X##LENGTH == 16 ? 3 : 1) << 62)

// d = a b + (add ? d : 0)
#define MULTIPLY(d, a, b, add)                                                                                         \
    asm volatile("//@ {\n//@ .reg .pred add;\n//@ setp.ne.b32 add, " ADD ", 0;\n"                                       \
                 "//@ wgmma.mma_async.sync.aligned.m64n" TEXT(TILE_N) "k16.f32." MMA "." MMA " {" NAMES "}, "             \
                 FROM ", add, 1, 1, " TEXT(A_TURNED) ", " TEXT(B_TURNED) ";\n//@ }"                                     \
                 : REGISTERS(d)                                                                                        \
                 : "l"(a), "l"(b), "r"(add))
#define BEGIN_MULTIPLY asm volatile("//@ wgmma.fence.sync.aligned;")
#define END_MULTIPLY asm volatile("//@ wgmma.commit_group.sync.aligned;")
#define MULTIPLIED_BUT(n, d) asm volatile("//@ wgmma.wait_group.sync.aligned " #n ";" : REGISTERS(d))
// What was written to local memory is seen by wgmma.
#define SHOW asm volatile("fence.proxy.async.shared::cta;")
#endif

#define EACH_RESULT                                                                                                    \
    _Pragma("unroll") for (uint mi = 0; mi < MT; mi++) _Pragma("unroll") for (uint ri = 0; ri < 4; ri += 2)            \
        _Pragma("unroll") for (uint ni = 0; ni < NT; ni++) _Pragma("unroll") for (uint r = ri; r < ri + 2; r++)
#define RESULT acc[mi][ni][r]
#define RESULT_ROW (wm + mi * 16 + r / 2 * 8 + lane / 4)
#define RESULT_COL (wn + ni * 8 + lane % 4 * 2 + r % 2)

#define WAIT_BUT(n) asm volatile("cp.async.wait_group " TEXT(n) ";")

__kernel __attribute__((reqd_work_group_size(THREADS, 1, 1)))
void gemm(const __global CAT(A, _t)* restrict a, const __global CAT(B, _t)* restrict b, const params p OPERANDS)
{
    __local uint4 shared[(CUT + STAGES * FETCHED > RESULTS ? CUT + STAGES * FETCHED : RESULTS) / 16] __attribute__((aligned(1024)));
    const uint planes = (uint)(ulong)shared, fetched = planes + CUT;
    const uint t = get_local_id(0), lane = t % 32, warp = t / 32;
    const uint wm = warp % WARPS_M * (TILE_M / WARPS_M), wn = warp / WARPS_M * (TILE_N / WARPS_N);

    // Bands of tile rows, so that work-groups that run together share what they read.
    const uint tiles_m = (ROWS + TILE_M - 1) / TILE_M, tiles_n = (COLS + TILE_N - 1) / TILE_N;
    const uint z = (uint)get_group_id(0) / (tiles_m * tiles_n), tile = (uint)get_group_id(0) % (tiles_m * tiles_n);
    const uint band = tile / (BAND * tiles_n), in_band = tile % (BAND * tiles_n);
    const uint height = min((uint)BAND, tiles_m - BAND * band);
    const long i0 = (long)(BAND * band + in_band % height) * TILE_M, j0 = (long)(in_band / height) * TILE_N;
    const int rows = min(ROWS - i0, (long)TILE_M), cols = min(COLS - j0, (long)TILE_N), depth = DEPTH;

    // Bytes between lines, from one of this work-item's copies to the next, and from slice to slice.
    const long line_a = (A_ALONG_K ? A_ROW : A_COL) * BYTES, line_b = (B_ALONG_K ? B_COL : B_ROW) * BYTES;
    const long step_a = THREADS / A_CHUNKS * line_a, step_b = THREADS / B_CHUNKS * line_b;
    const long next_a = TILE_K * (A_ALONG_K ? BYTES : line_a), next_b = TILE_K * (B_ALONG_K ? BYTES : line_b);
    const long first_a = p.v[3] + batch_offset(p, z, 9 + BATCH) + i0 * A_ROW;
    const long first_b = p.v[6] + batch_offset(p, z, 9 + 2 * BATCH) + j0 * B_COL;
    ulong from_a = (ulong)a + first_a * BYTES + t / A_CHUNKS * line_a + t % A_CHUNKS * 16;
    ulong from_b = (ulong)b + first_b * BYTES + t / B_CHUNKS * line_b + t % B_CHUNKS * 16;
    int left = depth; // of k, not yet fetched

#define FETCH_PART(slot, part, parts)                                                                                  \
    if (left > 0) {                                                                                                    \
        const uint to = fetched + (slot) * FETCHED;                                                                    \
        FETCH(A_, part, parts, to, from_a, step_a, A_ALONG_K ? rows : left, A_ALONG_K ? left : rows)                    \
        FETCH(B_, part, parts, to + A_FETCHED, from_b, step_b, B_ALONG_K ? cols : left, B_ALONG_K ? left : cols)        \
    }
#define NEXT_SLICE                                                                                                     \
    asm volatile("cp.async.commit_group;");                                                                            \
    from_a += next_a;                                                                                                  \
    from_b += next_b;                                                                                                  \
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

#if BYTES == 2 && defined(SM_90A)
    const uint group = warp / 4;
    for (int k = 0; k < depth; k += TILE_K) {
        WAIT_BUT(AHEAD);
        SHOW;
        barrier(CLK_LOCAL_MEM_FENCE);
        const uint at_a = fetched + slot * FETCHED + group * (A_ALONG_K ? 64 * TILE_K * 2 : A_LINES * 128);
        const uint at_b = fetched + slot * FETCHED + A_FETCHED;
        BEGIN_MULTIPLY;
        #pragma unroll
        for (uint s = 0; s < STEPS; s++) MULTIPLY(acc[0], DESCRIBE(A_, at_a, s * 16), DESCRIBE(B_, at_b, s * 16), 1);
        END_MULTIPLY;
        // Into the slot of the slice before last, which everyone has multiplied.
        FETCH_PART(free, 0, 1)
        NEXT_SLICE
        NEXT_SLOT(free)
        NEXT_SLOT(slot)
        MULTIPLIED_BUT(1, acc[0]);
    }
    MULTIPLIED_BUT(0, acc[0]);
#elif BYTES == 2
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
            // The fragments of the next step are loaded while this one's are multiplied.
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
                    const uint c = i % 2 ? NT - 1 - j : j; // there and back, so that neighbours share a fragment
                    mma(acc[i][c], fa[s % 2][i], fb[s % 2][c / 2] + c % 2 * 2);
                }
            }
        }
    }
#else
    // Copies of this work-item, cut into the planes `at`.
#define CUT_TO(X, e)                                                                                                   \
    chunk_at(t / X##CHUNKS + (e) * (THREADS / X##CHUNKS), t % X##CHUNKS / 2, X##LINES, X##LENGTH) + t % X##CHUNKS % 2 * 8
#define CUT_COPIES(first, end, slot, at)                                                                               \
    {                                                                                                                  \
        const uint from = fetched + (slot) * FETCHED + t * 16, to = planes + (at) * (PLANES * PLANE);                  \
        uint x[COPIES][4];                                                                                             \
        _Pragma("unroll") for (uint e = first; e < (end); e++) load_words(x[e], from + e * (THREADS * 16));            \
        _Pragma("unroll") for (uint e = first; e < (end); e++)                                                         \
            cut(x[e], to + (e < A_COPIES ? CUT_TO(A_, e) : A_PLANE + CUT_TO(B_, e - A_COPIES)), PLANE);                \
    }
#define COPIES (A_COPIES + B_COPIES)
#define GROUPS (STEPS * NT / 2)
    uint now = 0;
    CUT_COPIES(0, COPIES, 0, 0)
#ifdef SM_90A
    const uint group = warp / 4;
    SHOW;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int k = 0; k < depth; k += TILE_K) {
        const uint at_a = planes + now * (PLANES * PLANE) + group * (A_ALONG_K ? 64 * TILE_K * 2 : A_LINES * 128);
        const uint at_b = planes + now * (PLANES * PLANE) + A_PLANE;
        float sum[NT][4];
        BEGIN_MULTIPLY;
        // The smallest products first.
        #pragma unroll
        for (int order = PLANES - 1; order >= 0; order--) {
            #pragma unroll
            for (int q = 0; q <= order; q++) {
                #pragma unroll
                for (uint s = 0; s < STEPS; s++) {
                    MULTIPLY(sum, DESCRIBE(A_, at_a + (order - q) * PLANE, s * 16), DESCRIBE(B_, at_b + q * PLANE, s * 16),
                             order == PLANES - 1 && q == 0 && s == 0 ? 0 : 1);
                }
            }
        }
        END_MULTIPLY;
        FETCH_PART(free, 0, 1)
        NEXT_SLICE
        NEXT_SLOT(free)
        NEXT_SLOT(slot)
        WAIT_BUT(AHEAD);
        // The next slice is cut while this one is multiplied.
        CUT_COPIES(0, COPIES, slot, 1 - now)
        SHOW;
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
                // The next slice is cut while this one is multiplied.
                const uint group = s * (NT / 2) + j / 2;
                CUT_COPIES(COPIES * group / GROUPS, COPIES * (group + 1) / GROUPS, slot, 1 - now)
                #pragma unroll
                for (uint c = 0; c < 2; c++) {
                    float sum[MT][4];
                    #pragma unroll
                    for (uint i = 0; i < MT; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0;
                    // The smallest products first.
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

    // An infinity cut in planes, and a sum that overflows, give NaN where f32 may not: such tiles are computed again, in f32.
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
        const int slices = (depth - left) / TILE_K;
        from_a -= slices * next_a;
        from_b -= slices * next_b;
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

    // Through local memory, so that neighbouring work-items write neighbouring columns.
    __local float* results = (__local float*)shared;
    WAIT_BUT(0);
    barrier(CLK_LOCAL_MEM_FENCE);
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
    PLACES(z)
    const bool whole = rows == TILE_M && cols == TILE_N;
    for (uint first = t; first < TILE_M * TILE_N; first += 8 * THREADS) {
        float value[8];
        #pragma unroll
        for (uint u = 0; u < 8; u++) {
            const uint e = first + u * THREADS;
            value[u] = results[e / TILE_N * PITCH + e % TILE_N];
        }
        if (whole) {
            #pragma unroll
            for (uint u = 0; u < 8; u++) {
                const uint e = first + u * THREADS;
                FINISH(i0 + e / TILE_N, j0 + e % TILE_N, value[u])
            }
        } else {
            #pragma unroll
            for (uint u = 0; u < 8; u++) {
                const int m = (first + u * THREADS) / TILE_N, n = (first + u * THREADS) % TILE_N;
                if (m < rows && n < cols) { FINISH(i0 + m, j0 + n, value[u]) }
            }
        }
    }
}
#endif

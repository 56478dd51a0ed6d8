// Sizes of tiles, loads of fragments, f32 split into bf16 planes, and wgmma with SM_90A. Follows mma.cl, precedes gemm_mma.cl.

#ifdef MMA
#define THREADS (32 * WARPS_M * WARPS_N)
// The number of steps along k. An instruction multiplies 32 bytes of k in each step.
#define STEPS (HALVES(TILE_K) / 16)
#define MT (TILE_M / WARPS_M / 16)
#define NT (TILE_N / WARPS_N / 8)
// The lines of a slice, the elements of a line, the 16-byte chunks of a line, and the number of copies of a slice that each work-item makes.
#define A_LINES (A_ALONG_K ? TILE_M : TILE_K)
#define B_LINES (B_ALONG_K ? TILE_N : TILE_K)
#define A_LENGTH (A_ALONG_K ? TILE_K : TILE_M)
#define B_LENGTH (B_ALONG_K ? TILE_K : TILE_N)
#define A_CHUNKS (A_LENGTH * BYTES / 16)
#define B_CHUNKS (B_LENGTH * BYTES / 16)
#define A_COPIES (A_LINES * A_CHUNKS / THREADS)
#define B_COPIES (B_LINES * B_CHUNKS / THREADS)
// HALVES(n) is the number of halves with the size of n multiplied elements (bf16 if f32 is split into planes). LINE is the halves of a line.
#define HALVES(n) ((n) * (PLANES == 1 ? BYTES : 2) / 2)
#define A_LINE HALVES(A_LENGTH)
#define B_LINE HALVES(B_LENGTH)
// The size in bytes of a fetched slice (FETCHED), of one plane of a slice (PLANE), and of two buffers for all planes (CUT).
#define A_FETCHED (TILE_M * TILE_K * BYTES)
#define FETCHED ((TILE_M + TILE_N) * TILE_K * BYTES)
#define A_PLANE (TILE_M * TILE_K * 2)
#define PLANE ((TILE_M + TILE_N) * TILE_K * 2)
#define CUT (PLANES > 1 ? 2 * PLANES * PLANE : 0)
#define PITCH (TILE_N + 8)
#define RESULTS (TILE_M * PITCH * 4)
#define FIRST (AHEAD + 1) // the number of slices that are fetched before the loop

#ifdef TF32
// Loads element `at` + lane / 4 of a line across k, where `at` is a multiple of 8. A plain load, because ldmatrix does not
// transpose 32-bit words. chunk_at has placed the chunks, so the lowest bits of a chunk's position are its number XOR the line.
static inline uint word_at(uint slice, uint line, uint at, uint lane, const uint lines)
{
    const uint own = slice + line * 128 + (lane / 16 ^ line & 7) * 16 + lane / 4 % 4 * 4;
    uint word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"((own ^ at / 4 % 8 * 16) + at / 32 * (lines * 128)));
    return word;
}
// The line that register r of a fragment holds. Any order works if both matrices use the same order. If both have lines across k,
// this order lets all lanes of a warp read from different banks.
#define LINE_OF(lane, r) (A_ALONG_K || B_ALONG_K ? lane % 4 + r * 4 : lane % 4 * 2 + r)
#endif

// load_a loads the fragment of A with 16 rows from m on and 16 halves of k from k on; load_b loads 16 columns of B from n on.
static inline void load_a(uint f[4], uint slice, uint m, uint k, uint lane)
{
#if A_ALONG_K
    LDMATRIX("", f, slice + chunk_at(m + lane % 16, k / 8 + lane / 16, A_LINES, A_LINE));
#elif defined(TF32)
    #pragma unroll
    for (uint r = 0; r < 4; r++) f[r] = word_at(slice, k / 2 + LINE_OF(lane, r / 2), m + r % 2 * 8, lane, A_LINES);
#else
    LDMATRIX(".trans", f, slice + chunk_at(k + lane % 8 + lane / 16 * 8, m / 8 + lane / 8 % 2, A_LINES, A_LINE));
#endif
}
static inline void load_b(uint f[4], uint slice, uint n, uint k, uint lane)
{
#if B_ALONG_K
    LDMATRIX("", f, slice + chunk_at(n + lane % 8 + lane / 16 * 8, k / 8 + lane / 8 % 2, B_LINES, B_LINE));
#elif defined(TF32)
    #pragma unroll
    for (uint r = 0; r < 4; r++) f[r] = word_at(slice, k / 2 + LINE_OF(lane, r % 2), n + r / 2 * 8, lane, B_LINES);
#else
    LDMATRIX(".trans", f, slice + chunk_at(k + lane % 16, n / 8 + lane / 16, B_LINES, B_LINE));
#endif
}

// load_words loads four f32, and cut stores their bf16 planes. For an infinity, all planes but the first are NaN, which gemm_mma.cl handles.
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
#define REGISTERS(d) CAT(REGISTERS_, TILE_N)(d)

// The wgmma descriptor (address, strides and swizzle) of 16 halves of k from k on, in a slice that begins at `from`, in units of 16
// bytes.
#define DESCRIBE(X, from, k)                                                                                           \
    ((ulong)((uint)(X##ALONG_K ? X##LINE : 64)                                                                         \
             | (uint)(X##ALONG_K && X##LINE == 32 ? 2 : X##ALONG_K && X##LINE == 16 ? 3 : 1) << 30) << 32              \
     | ((from) + (X##ALONG_K ? (k) / 8 : (k) * 8) | (uint)(X##ALONG_K ? 1 : X##LINES * 8) << 16))

// d = a b + (add ? d : 0)
#define MULTIPLY(d, a, b, add) WGMMA(TILE_N, d, a, b, TEXT(A_TRANSPOSED) ", " TEXT(B_TRANSPOSED), add)
#define MULTIPLIED_BUT(n, d) asm volatile(WAIT_MULTIPLIED(n) : REGISTERS(d))

#ifdef ROUNDED
// The number of bytes from one row of staged results to the next.
#define ROUNDED_PITCH (TILE_N * 2 + 16)
static inline uint rounded(float low, float high)
{
    uint both;
    asm("cvt.rn." ROUNDED "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Stores four matrices of 8 x 8 in the layout of wgmma's accumulators. Lane i passes the address of row i % 8 of matrix i / 8.
static inline void store_matrices(uint to, uint a, uint b, uint c, uint d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
#endif
#endif
#endif

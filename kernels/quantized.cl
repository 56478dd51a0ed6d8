// Blocks of quantised weights, and their elements. The fields of blocks are separate planes (dtype/quant.rs). A chunk is 16 bytes of the first
// field, which hold RUNS runs of 16 integers; an element of a run is scale * (integer - BIAS) + offset, where only formats with HAS_OFFSET have
// offsets. The host defines FORMAT_<name>, RUNS, BLOCK (elements of a block), PER (chunks of a block), HEAD (bytes of the second field), and
// FIELDi(b), the address of field i of block b in a weight of `n` blocks at `w`. With UNALIGNED, `w` may be any address.

#define CHUNK (16 * RUNS)

#ifdef UNALIGNED
#define LOAD16(p) as_uint4(vload16(0, p))
#define LOAD4(p) as_uint(vload4(0, p))
#define LOAD2(p) ((uint)(p)[0] | (uint)(p)[1] << 8)
#else
#define LOAD16(p) (*(const __global uint4*)(p))
#define LOAD4(p) (*(const __global uint*)(p))
#define LOAD2(p) ((uint) * (const __global ushort*)(p))
#endif

// Returns the f16 in the low bits.
static inline float half_of(uint bits) {
    const ushort h = (ushort)bits;
#if defined(IS_CPU) && defined(__F16C__)
    return __builtin_load_halff((const half*)&h); // PoCL's vload_half calls a subroutine
#else
    return from_f16(h);
#endif
}

// A chunk, its high bits if those are another field, and the words with its scales.
typedef union { uint4 all; uint w[4]; } Words;
typedef struct { Words q, high; uint s[4]; } Chunk;

// Loads chunk c of the row that begins with block `row`. Loads are kept apart from the arithmetic, so that many are in flight.
static inline Chunk load_chunk(const __global uchar* w, uint n, uint row, uint c) {
    Chunk k;
    const uint b = row + c / PER, i = c % PER;
    k.q.all = LOAD16(w + (ulong)(row * PER + c) * 16);
#if defined(FORMAT_Q5_0)
    k.high.w[0] = LOAD4(FIELD1(b));
    k.s[0] = LOAD2(FIELD2(b));
#elif defined(FORMAT_Q5_1)
    k.s[0] = LOAD4(FIELD1(b));
    k.high.w[0] = LOAD4(FIELD2(b));
#elif defined(FORMAT_Q2_K)
    k.s[0] = LOAD4(FIELD1(b) + i / 2 * 8);
    k.s[1] = LOAD4(FIELD1(b) + i / 2 * 8 + 4);
    k.s[2] = LOAD4(FIELD2(b));
#elif defined(FORMAT_Q6_K)
    k.high.all = LOAD16(FIELD1(b) + i / 4 * 32 + i % 2 * 16);
    k.s[0] = LOAD4(FIELD2(b) + i / 4 * 8);
    k.s[1] = LOAD4(FIELD2(b) + i / 4 * 8 + 4);
    k.s[2] = LOAD2(FIELD3(b));
#elif defined(FORMAT_Q4_K)
    #pragma unroll
    for (int j = 0; j < 3; j++) k.s[j] = LOAD4(FIELD1(b) + 4 * j);
    k.s[3] = LOAD4(FIELD2(b));
#elif defined(FORMAT_Q3_K) || defined(FORMAT_Q5_K)
    k.high.all = LOAD16(FIELD1(b) + i % 2 * 16);
    #pragma unroll
    for (int j = 0; j < 3; j++) k.s[j] = LOAD4(FIELD2(b) + 4 * j);
#ifdef FORMAT_Q3_K
    k.s[3] = LOAD2(FIELD3(b));
#else
    k.s[3] = LOAD4(FIELD3(b));
#endif
#elif HEAD == 2
    k.s[0] = LOAD2(FIELD1(b));
#else
    k.s[0] = LOAD4(FIELD1(b));
#endif
    return k;
}

// Each byte of WORD(k, c, r, j) has one of the integers 4 j to 4 j + 3 of run r, in the bits of MASK from bit SHIFT(r) on. Runs of a chunk
// are SPAN * 16 elements apart, and so are the chunks of different rows of SPAN chunks.
#define LOW(k, j, r, bits, mask) ((k).q.w[j] >> (r) * (bits) & (mask))
#if defined(FORMAT_Q8_0) || defined(FORMAT_G8)
#define SPAN 1
#define MASK 255u
#define SHIFT(r) 0
#if defined(FORMAT_Q8_0) || HEAD == 2
#define WORD(k, c, r, j) ((k).q.w[j] ^ 0x80808080u)
#define BIAS(k) 128
#else
#define WORD(k, c, r, j) ((k).q.w[j])
#endif
#elif defined(FORMAT_Q5_0) || defined(FORMAT_Q5_1)
#define SPAN 1
#define MASK 31u
#define SHIFT(r) 0
#define WORD(k, c, r, j)                                                                                               \
    (LOW(k, j, r, 4, 0x0f0f0f0fu) | (((k).high.w[0] >> ((r) * 16 + (j) * 4) & 15u) * 0x02040810u & 0x10101010u))
#elif defined(FORMAT_Q5_K)
#define SPAN 2
#define MASK 31u
#define SHIFT(r) 0
#define WORD(k, c, r, j) (LOW(k, j, r, 4, 0x0f0f0f0fu) | ((k).high.w[j] >> ((c) / 2 % 4 * 2 + (r)) & 0x01010101u) << 4)
#elif defined(FORMAT_Q6_K)
#define SPAN 4
#define MASK 63u
#define SHIFT(r) 0
#define WORD(k, c, r, j) (LOW(k, j, r, 4, 0x0f0f0f0fu) | ((k).high.w[j] >> ((r) * 4 + (c) % 4 / 2 * 2) & 0x03030303u) << 4)
#define BIAS(k) 32
#elif defined(FORMAT_Q3_K)
#define SPAN 2
#define MASK 7u
#define SHIFT(r) 0
#define WORD(k, c, r, j) (LOW(k, j, r, 2, 0x03030303u) | ((k).high.w[j] >> ((c) / 2 % 2 * 4 + (r)) & 0x01010101u) << 2)
#define BIAS(k) 4
#elif defined(FORMAT_Q2_K)
#define SPAN 2
#define MASK 3u
#define SHIFT(r) ((r) * 2)
#define WORD(k, c, r, j) ((k).q.w[j])
#else
#ifdef FORMAT_Q4_K
#define SPAN 2
#else
#define SPAN 1
#endif
#define MASK 15u
#define SHIFT(r) ((r) * 4)
#define WORD(k, c, r, j) ((k).q.w[j])
#endif
#if defined(FORMAT_Q4_0) || (defined(FORMAT_G4) && HEAD == 2)
#define BIAS(k) 8
#elif defined(FORMAT_Q5_0)
#define BIAS(k) 16
#elif defined(ZERO)
#define BIAS(k) ((short)((k).s[0] >> 16))
#elif !defined(BIAS)
#define BIAS(k) 0
#endif
#if defined(FORMAT_Q4_1) || defined(FORMAT_Q5_1) || defined(FORMAT_Q2_K) || defined(FORMAT_Q4_K) || defined(FORMAT_Q5_K) || defined(MIN)
#define HAS_OFFSET
#endif
// The number, in the row, of the first element of run r.
#define ELEMENT(c, r) ((c) / SPAN * (SPAN * CHUNK) + (r) * (SPAN * 16) + (c) % SPAN * 16)

// Returns the scale and the offset of run r.
static inline float2 scales(Chunk k, uint c, uint r) {
#if defined(FORMAT_Q2_K)
    const uint y = k.s[r / 2] >> (r % 2 * 16 + c % 2 * 8);
    return (float2)(half_of(k.s[2]) * (float)(y & 15), -(half_of(k.s[2] >> 16) * (float)(y >> 4 & 15)));
#elif defined(FORMAT_Q3_K)
    // Number h * 8 + at of the 16 scales: four low bits of byte `at`, and two high bits.
    const uint h = c / 2 % 2, at = r * 2 + c % 2, byte = at % 4 * 8;
    const uint low = k.s[r / 2] >> byte >> h * 4 & 15, high = k.s[2] >> byte >> (h * 4 + r / 2 * 2) & 3;
    return (float2)(half_of(k.s[3]) * (float)((int)(low | high << 4) - 32), 0);
#elif defined(FORMAT_Q4_K) || defined(FORMAT_Q5_K)
    const uint t = c / 2 % 4 * 2 + r, at = t % 4 * 8;
    const uint x = k.s[0] >> at & 255, y = k.s[1] >> at & 255, z = k.s[2] >> at & 255;
    const uint a = t < 4 ? x & 63 : (z & 15) | x >> 6 << 4, b = t < 4 ? y & 63 : z >> 4 | y >> 6 << 4;
    return (float2)(half_of(k.s[3]) * (float)a, -(half_of(k.s[3] >> 16) * (float)b));
#elif defined(FORMAT_Q6_K)
    return (float2)(half_of(k.s[2]) * (float)(char)(k.s[r] >> c % 4 * 8), 0);
#elif defined(HAS_OFFSET)
    return (float2)(half_of(k.s[0]), half_of(k.s[0] >> 16));
#else
    return (float2)(half_of(k.s[0]), 0);
#endif
}

// Integers are converted to float without a conversion: in the low bits of 2^23, an integer is a float's distance from 2^23.
#define MAGIC 0x4B000000u

// Returns the 16 integers of run r, without the bias, as floats.
static inline float16 integers(Chunk k, uint c, uint r) {
    const uint4 words = (uint4)(WORD(k, c, r, 0), WORD(k, c, r, 1), WORD(k, c, r, 2), WORD(k, c, r, 3));
    const uint16 at = SHIFT(r) + (uint16)(0, 8, 16, 24, 0, 8, 16, 24, 0, 8, 16, 24, 0, 8, 16, 24);
    return as_float16((words.xxxxyyyyzzzzwwww >> at & MASK) | MAGIC) - (8388608.0f + BIAS(k));
}

// Returns the elements of run r. The products and the sum are rounded one after another, as on the CPU device.
static inline float16 elements(Chunk k, uint c, uint r) {
    const float2 s = scales(k, c, r);
#ifdef HAS_OFFSET
    return s.x * integers(k, c, r) + s.y;
#else
    return s.x * integers(k, c, r);
#endif
}

#ifdef DEQUANTIZE
// y[p] = row p of the weight, or with INDEX (the dtype of the index) row index[p] of the `rows` rows. A work-item computes the elements of
// one chunk. `first` is the first row's number in the weight, which has `n` blocks. Without WIDE, rows of y may have any alignment.
__kernel void dequantize(__global const uchar* w, ulong w_at, __global CAT(A, _t)* y, ulong y_at, uint n, uint chunks,
                         ulong count, ulong first
#ifdef INDEX
                         , __global const CAT(INDEX, _t)* index, ulong index_at, volatile __global int* word, uint code, ulong rows
#endif
) {
    const IDX p = (IDX)get_global_id(0);
    if (p >= (IDX)count)
        return;
    const uint c = p % (IDX)chunks;
    const IDX line = p / (IDX)chunks;
    ulong row = line;
    bool valid = true;
#ifdef INDEX
    const long given = CAT(load_, INDEX)(index, index_at + line);
    valid = given >= 0 && given < (long)rows;
    row = valid ? given : 0;
    if (!valid && c == 0)
        fault_record(word, code, given, rows);
#endif
    const Chunk k = load_chunk(w + w_at, n, (uint)(first + row) * (chunks / PER), c);
    #pragma unroll
    for (uint r = 0; r < RUNS; r++) {
        const float16 v = valid ? elements(k, c, r) : (float16)(0);
        __global CAT(A, _t)* to = y + y_at + (ulong)line * chunks * CHUNK + ELEMENT(c, r);
#ifdef IS_CPU
        CAT(store16_, A)(to, 0, v);
#else
        union { float16 all; float each[16]; } in;
        union { CAT(A, _t) each[16]; uint4 wide[sizeof(CAT(A, _t))]; } out;
        in.all = v;
        #pragma unroll
        for (int i = 0; i < 16; i++) out.each[i] = CAT(CAT(to_, A), _F32)(in.each[i]);
#ifdef WIDE
        #pragma unroll
        for (int i = 0; i < (int)sizeof(CAT(A, _t)); i++) ((__global uint4*)to)[i] = out.wide[i];
#else
        for (int i = 0; i < 16; i++) to[i] = out.each[i];
#endif
#endif
    }
}
#endif

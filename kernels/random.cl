// Random numbers of DRAWN adjacent elements at once, for CPUs, whose compilers vectorise only explicit vectors. The numbers have
// exactly the bits of those in prelude.cl: number [k % 4][k / 4] belongs to element e + k, where e is a multiple of DRAWN.

#define DRAWN 64

static inline void random_multiply(const uint16 x, const uint factor, uint16 *low, uint16 *high) {
    const ulong16 product = convert_ulong16(x) * (ulong)factor;
    *low = convert_uint16(product);
    *high = convert_uint16(product >> 32);
}

// Computes the words of 16 blocks, from block `first` (a multiple of 16) on.
static inline void random_blocks(ulong key, ulong stream, ulong first, uint16 *x) {
    x[0] = (uint16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) + (uint)first;
    x[1] = (uint16)((uint)(first >> 32));
    x[2] = (uint16)((uint)stream);
    x[3] = (uint16)((uint)(stream >> 32));
    uint k0 = (uint)key, k1 = (uint)(key >> 32);
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        uint16 a_low, a_high, b_low, b_high;
        random_multiply(x[0], 0xD2511F53u, &a_low, &a_high);
        random_multiply(x[2], 0xCD9E8D57u, &b_low, &b_high);
        x[0] = b_high ^ x[1] ^ k0;
        x[1] = b_low;
        x[2] = a_high ^ x[3] ^ k1;
        x[3] = a_low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

static inline void draw_bits(ulong key, ulong stream, ulong first, uint drawn[4][16]) {
    uint16 x[4];
    random_blocks(key, stream, first, x);
    #pragma unroll
    for (int i = 0; i < 4; i++) vstore16(x[i], 0, drawn[i]);
}

static inline void draw_uniform(ulong key, ulong stream, ulong first, float drawn[4][16]) {
    uint16 x[4];
    random_blocks(key, stream, first, x);
    #pragma unroll
    for (int i = 0; i < 4; i++) vstore16(convert_float16(x[i] >> 8) * (1.0f / 16777216.0f), 0, drawn[i]);
}

static inline void draw_normal(ulong key, ulong stream, ulong first, float drawn[4][16]) {
    uint16 words[4];
    random_blocks(key, stream, first, words);
    #pragma unroll
    for (int i = 0; i < 4; i += 2) {
        // t = -2 ln(u)
        const uint16 bits = as_uint16(convert_float16((words[i] >> 8) + 1u)) - 0x3F400000u;
        const float16 e = convert_float16(bits >> 23);
        const float16 z = as_float16((bits & 0x007FFFFFu) + 0x3F400000u) - 1.0f;
        float16 p = (float16)0x1.340c12p-5f;
        p = (p * z - 0x1.74feecp-4f) * z + 0x1.df1c26p-4f;
        p = (p * z - 0x1.04adap-3f) * z + 0x1.24639p-3f;
        p = (p * z - 0x1.5519d2p-3f) * z + 0x1.999764p-3f;
        p = (p * z - 0x1.00006ep-2f) * z + 0x1.55555ap-2f;
        const float16 ln = z + (z * z * z * p - 0.5f * z * z);
        const float16 t = -2.0f * (ln + (e - 24.0f) * 0x1.62e43p-1f);

        // r = sqrt(t)
        float16 y = as_float16(0x5F3759DFu - (as_uint16(t) >> 1));
        const float16 half_t = 0.5f * t;
        for (int step = 0; step < 3; step++) y = y * (1.5f - half_t * y * y);
        const float16 r = t * y;

        // cosine for the even element of a pair, sine for the odd element
        const uint16 n = words[i + 1] >> 8;
        const uint16 quarter = (n + 0x00200000u) >> 22;
        const float16 x = convert_float16(as_int16(n - (quarter << 22))) * 0x1.921fb6p-22f;
        const float16 w = x * x;
        const float16 s = x * w * ((-0x1.9951fap-13f * w + 0x1.110774p-7f) * w - 0x1.555546p-3f) + x;
        const float16 c = w * w * ((0x1.99e816p-16f * w - 0x1.6c0c28p-10f) * w + 0x1.55554ap-5f) - 0.5f * w + 1.0f;
        const int16 odd = (quarter & 1u) != 0u;
        const uint16 even_sign = ((quarter + 1u) & 2u) << 30, odd_sign = (quarter & 2u) << 30;
        vstore16(r * as_float16(as_uint16(select(c, s, odd)) ^ even_sign), 0, drawn[i]);
        vstore16(r * as_float16(as_uint16(select(s, c, odd)) ^ odd_sign), 0, drawn[i + 1]);
    }
}

// Rows that go through registers block by block: LANES work-items share a row, and keep CACHED groups of VEC neighbours each (loaded as
// WIDE_T where VEC is above 1). Comes before cross_entropy.cl and softmax_slices.cl, with the same definitions in front. Where there are
// few rows, groups of their own see `slices` of a row, of `chunk` elements each, and leave what they saw in `of_slices`.

typedef __global const CAT(A, _t) *In;
typedef __global CAT(A, _t) *Out;
typedef CAT(ACC, 2) Two;
#define LOAD CAT(load_, A)
#define STORE CAT(CAT(CAT(store_, A), _), ACC_NAME)
#define PLUS(a, b) ((a) + (b))
#define KEPT (CACHED * VEC)
#define BLOCK (LANES * KEPT)

// A lane's part of a block that ends at `stop`, of which element i is its first; `other` past the end.
static inline void fetch(ACC *v, In x, ulong at, IDX i, IDX stop, long stride, ACC other) {
    #pragma unroll
    for (int k = 0; k < CACHED; ++k, i += LANES * VEC) {
#if VEC > 1
        CAT(A, _t) raw[VEC];
        const bool inside = i < stop;
        CAT(vstore, VEC)(inside ? *(__global const WIDE_T *)(x + at + i) : (WIDE_T)(0), 0, raw);
        #pragma unroll
        for (int j = 0; j < VEC; ++j)
            v[k * VEC + j] = inside ? CAT(from_, A)(raw[j]) : other;
#else
        v[k] = i < stop ? LOAD(x, at + (long)i * stride) : other;
#endif
    }
}

// A NaN need not be found here: the sum has it.
static inline ACC largest_of(const ACC *v) {
    ACC m = -INFINITY;
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        m = fmax(v[k], m);
    return m;
}

static inline ACC sum_exp_of(const ACC *v, ACC m) {
    ACC s = 0;
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        s += exp(v[k] - m);
    return s;
}

// What a lane has seen from element i on is a sum of exp(x - base), of which the base moves with the largest x.
static inline void see(In x, ulong at, IDX i, IDX stop, long stride, ACC *m, ACC *base, ACC *s) {
    ACC v[KEPT];
    for (; i < stop; i += BLOCK) {
        fetch(v, x, at, i, stop, stride, -INFINITY);
        const ACC above = fmax(*m, largest_of(v)), next = isinf(above) ? 0 : above;
        *s = (*s == 0 ? 0 : *s * exp(*base - next)) + sum_exp_of(v, next);
        *m = above;
        *base = next;
    }
}

// Sums of a row with an infinity have inf - inf, but for logsumexp, of which it is the answer.
#ifdef LOGSUMEXP
#define IF_INFINITE(s) (s)
#else
#define IF_INFINITE(s) NAN
#endif

// The largest of all lanes of a row, `most`, and their sum of exp(x - m), s.
#define COMBINE(most)                                                                                                  \
    FOLD(fmax, m);                                                                                                     \
    const ACC most = m;                                                                                                \
    if (most == INFINITY)                                                                                              \
        s = IF_INFINITE(s);                                                                                            \
    m = isinf(most) ? 0 : most;                                                                                        \
    s = s == 0 ? 0 : s * exp(base - m);                                                                                \
    FOLD(PLUS, s)

// What a lane takes up of the slices of row r.
#define TAKE_SLICE(r, there)                                                                                           \
    const Two own = there ? of_slices[of_slices_at + (ulong)(r) * slices + lane] : (Two)(-INFINITY, 0);                \
    ACC m = own.x, s = own.y, base = isinf(m) ? 0 : m

// Stores a lane's part of a block.
static inline void write(const ACC *v, Out y, ulong at, IDX i, IDX stop, long stride) {
    #pragma unroll
    for (int k = 0; k < CACHED; ++k, i += LANES * VEC) {
        if (i < stop) {
#if VEC > 1
            CAT(A, _t) raw[VEC];
            #pragma unroll
            for (int j = 0; j < VEC; ++j)
                raw[j] = CAT(CAT(CAT(to_, A), _), ACC_NAME)(v[k * VEC + j]);
            *(__global WIDE_T *)(y + at + i) = CAT(vload, VEC)(0, raw);
#else
            STORE(y, at + (long)i * stride, v[k]);
#endif
        }
    }
}

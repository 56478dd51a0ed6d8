// Rows that are read block by block into registers. LANES work-items share a row, and of each block, each lane has CACHED groups of VEC adjacent
// elements (loaded as WIDE_T if VEC is above 1). Precedes cross_entropy.cl and softmax_slices.cl, which both use these definitions. If there are few
// rows, a row is cut into `slices` of `chunk` elements. A separate group processes each slice and writes a partial result to `slice_parts`.

typedef __global const CAT(A, _t) *In;
typedef __global CAT(A, _t) *Out;
typedef CAT(ACC, 2) Two;
#define LOAD CAT(load_, A)
#define STORE CAT(CAT(CAT(store_, A), _), ACC_NAME)
#define PLUS(a, b) ((a) + (b))
#define KEPT (CACHED * VEC)
#define BLOCK (LANES * KEPT)

// Loads a lane's part of a block, from element i on. Elements from `stop` on are set to `other`.
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

// fmax may drop a NaN, but the NaN still reaches the sum of exponentials.
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

// Online softmax of a lane's elements from i on: *m is the maximum, *s the sum of exp(x - *base), and *base the maximum, or 0 if *m is
// infinite.
static inline void sum_online(In x, ulong at, IDX i, IDX stop, long stride, ACC *m, ACC *base, ACC *s) {
    ACC v[KEPT];
    for (; i < stop; i += BLOCK) {
        fetch(v, x, at, i, stop, stride, -INFINITY);
        const ACC above = fmax(*m, largest_of(v)), next = isinf(above) ? 0 : above;
        *s = (*s == 0 ? 0 : *s * exp(*base - next)) + sum_exp_of(v, next);
        *m = above;
        *base = next;
    }
}

// In a row that contains an infinity, exp(x - m) would contain inf - inf, so the result is NaN. Only for logsumexp, it is the infinity.
#ifdef LOGSUMEXP
#define IF_INFINITE(s) (s)
#else
#define IF_INFINITE(s) NAN
#endif

// Combines the lanes of a row: `most` becomes the maximum of the row, and s the sum of exp(x - most) over the row.
#define COMBINE(most)                                                                                                  \
    FOLD(fmax, m);                                                                                                     \
    const ACC most = m;                                                                                                \
    if (most == INFINITY)                                                                                              \
        s = IF_INFINITE(s);                                                                                            \
    m = isinf(most) ? 0 : most;                                                                                        \
    s = s == 0 ? 0 : s * exp(base - m);                                                                                \
    FOLD(PLUS, s)

// Loads the partial results of row r: each lane loads one slice's result.
#define TAKE_SLICE(r, there)                                                                                           \
    const Two own = there ? slice_parts[of_slices_at + (ulong)(r) * slices + lane] : (Two)(-INFINITY, 0);                \
    ACC m = own.x, s = own.y, base = isinf(m) ? 0 : m

// Stores a lane's part of a block, from element i to before `stop`.
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

// Loads and stores of VEC adjacent elements at once: 16 bytes, or one element if VEC is 1. The host defines A (dtype), ACC and ACC_NAME,
// and WIDE_T if VEC is above 1. A Raw (the loaded bytes) takes four registers, but VEC halves converted to float take eight. Kernels
// that load far ahead therefore keep the Raw until they compute.

typedef __global const CAT(A, _t) *In;
typedef __global CAT(A, _t) *Out;
#if VEC > 1
typedef uint4 Raw;
#else
typedef CAT(A, _t) Raw;
#endif

static inline Raw raw_at(In x, ulong at) { return *(__global const Raw *)(x + at); }

static inline void widen(ACC *v, Raw raw) {
#if VEC > 1
    CAT(A, _t) each[VEC];
    CAT(vstore, VEC)(CAT(as_, WIDE_T)(raw), 0, each);
    #pragma unroll
    for (int j = 0; j < VEC; ++j)
        v[j] = CAT(from_, A)(each[j]);
#else
    v[0] = CAT(from_, A)(raw);
#endif
}

static inline void get(ACC *v, In x, ulong at) { widen(v, raw_at(x, at)); }

static inline void put(Out y, ulong at, const ACC *v) {
#if VEC > 1
    CAT(A, _t) each[VEC];
    #pragma unroll
    for (int j = 0; j < VEC; ++j)
        each[j] = CAT(CAT(CAT(to_, A), _), ACC_NAME)(v[j]);
    *(__global WIDE_T *)(y + at) = CAT(vload, VEC)(0, each);
#else
    CAT(CAT(CAT(store_, A), _), ACC_NAME)(y, at, v[0]);
#endif
}

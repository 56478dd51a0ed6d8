// Offsets in strided tensors, loads of 16 elements, and FOLD. Follows prelude.cl, precedes reduce.cl, softmax.cl and gather.cl. IDX
// is uint if every count fits in 31 bits, otherwise ulong, because 64-bit division is slow on GPUs.

// Returns the index along dim k of the linear position i, and divides i by the size of dim k. Dim 0 is the outermost and needs no division.
#define NEXT(i, size, k) ((k) == 0 ? (i) : next_index(&(i), (IDX)(size)[k]))
static inline IDX next_index(IDX *i, IDX n) {
    const IDX q = *i / n, r = *i - q * n;
    *i = q;
    return r;
}

// Declares the struct NAME of N sizes and strides. `at_NAME(d, i)` returns the element offset of position i.
#define STRIDED_DIMS(NAME, N)                                                                                          \
    typedef struct {                                                                                                   \
        ulong size[N];                                                                                                 \
        long stride[N];                                                                                                \
    } NAME;                                                                                                            \
    static inline long CAT(at_, NAME)(const NAME *d, IDX i) {                                                          \
        long at = 0;                                                                                                   \
        for (int k = N - 1; k >= 0; --k)                                                                               \
            at += (long)NEXT(i, d->size, k) * d->stride[k];                                                            \
        return at;                                                                                                     \
    }

// Loads sixteen adjacent elements in the compute type. Vectors are explicit, because PoCL vectorises no loop inside a work-item.
#ifdef IS_CPU
#define load16_f32(p, i) vload16(0, (p) + (i))
#define load16_f64(p, i) vload16(0, (p) + (i))
#define load16_f16(p, i) vload_half16(0, (const __global half *)((p) + (i)))
#define load16_bf16(p, i) as_float16(convert_uint16(vload16(0, (p) + (i))) << 16)
#define load16_i64(p, i) vload16(0, (p) + (i))
#define load16_i32(p, i) convert_long16(vload16(0, (p) + (i)))
#define load16_u32(p, i) convert_long16(vload16(0, (p) + (i)))
#define load16_i16(p, i) convert_long16(vload16(0, (p) + (i)))
#define load16_i8(p, i) convert_long16(vload16(0, (p) + (i)))
#define load16_u8(p, i) convert_long16(vload16(0, (p) + (i)))
#define load16_bool(p, i) convert_long16(vload16(0, (p) + (i)))
#define store16_f32(p, i, v) vstore16(v, 0, (p) + (i))
#define store16_f64(p, i, v) vstore16(v, 0, (p) + (i))
#define store16_f16(p, i, v) vstore_half16_rte(v, 0, (__global half *)((p) + (i)))
static inline void store16_bf16(__global bf16_t *p, ulong i, float16 v) {
    const uint16 u = as_uint16(v);
    const uint16 r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vstore16(convert_ushort16(v != v ? (u >> 16) | 0x40u : r), 0, p + i);
}
#endif

// FOLD reduces v over the `lanes` lanes of a row, which are work-items `step` apart; every lane gets the result. First, 256 lanes
// combine the values of the other lanes, then sixteen lanes combine these 256 values, and finally every lane combines these sixteen
// values. The loops are unrolled by hand so that loads overlap, because a macro cannot contain a loop pragma. Every work-item of
// the group must reach FOLD, with lid, lane and scratch[GROUP] in scope; GROUP is at most 1024. FOLD_IN uses another array than
// `scratch`, which no work-item may have read since its last barrier; alternating between two arrays ensures this. On NVIDIA GPUs,
// whole warps of 32 adjacent lanes first exchange values through registers.
#ifndef IS_CPU
#define TAKE(OP, v, scratch, at, i)                                                                                    \
    if ((i) < lanes)                                                                                                   \
        v = OP(v, scratch[(at) + (i) * step]);
#define TAKE_15(OP, v, s, at, from, by)                                                                                \
    TAKE(OP, v, s, at, from + by)                                                                                      \
    TAKE(OP, v, s, at, from + 2 * by) TAKE(OP, v, s, at, from + 3 * by) TAKE(OP, v, s, at, from + 4 * by)              \
    TAKE(OP, v, s, at, from + 5 * by) TAKE(OP, v, s, at, from + 6 * by) TAKE(OP, v, s, at, from + 7 * by)              \
    TAKE(OP, v, s, at, from + 8 * by) TAKE(OP, v, s, at, from + 9 * by) TAKE(OP, v, s, at, from + 10 * by)             \
    TAKE(OP, v, s, at, from + 11 * by) TAKE(OP, v, s, at, from + 12 * by) TAKE(OP, v, s, at, from + 13 * by)           \
    TAKE(OP, v, s, at, from + 14 * by) TAKE(OP, v, s, at, from + 15 * by)
#define FOLD(OP, v)                                                                                                    \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                                      \
    FOLD_IN(OP, v, scratch)
#define FOLD_IN_MEMORY(OP, v, scratch)                                                                                 \
    scratch[lid] = v;                                                                                                  \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                                      \
    if (lanes > 256) {                                                                                                 \
        if (lane < 256) {                                                                                              \
            TAKE(OP, v, scratch, lid, 256) TAKE(OP, v, scratch, lid, 512) TAKE(OP, v, scratch, lid, 768)               \
            scratch[lid] = v;                                                                                          \
        }                                                                                                              \
        barrier(CLK_LOCAL_MEM_FENCE);                                                                                  \
    }                                                                                                                  \
    if (lanes > 16) {                                                                                                  \
        if (lane < 16) {                                                                                               \
            TAKE_15(OP, v, scratch, lid, 0, 16)                                                                        \
            scratch[lid] = v;                                                                                          \
        }                                                                                                              \
        barrier(CLK_LOCAL_MEM_FENCE);                                                                                  \
    }                                                                                                                  \
    v = scratch[lid - lane * step];                                                                                    \
    TAKE_15(OP, v, scratch, lid - lane * step, 0, 1)
#ifdef __NV_CL_C_VERSION
// Returns the value that v has in the lane of this warp whose number is this lane's number XOR `mask`.
#define EXCHANGE static inline __attribute__((overloadable))
EXCHANGE uint exchange(uint v, uint mask) {
    uint other;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(other) : "r"(v), "r"(mask));
    return other;
}
EXCHANGE int exchange(int v, uint mask) { return as_int(exchange(as_uint(v), mask)); }
EXCHANGE float exchange(float v, uint mask) { return as_float(exchange(as_uint(v), mask)); }
EXCHANGE float2 exchange(float2 v, uint mask) { return (float2)(exchange(v.x, mask), exchange(v.y, mask)); }
EXCHANGE ulong exchange(ulong v, uint mask) { return as_ulong(exchange(as_float2(v), mask)); }
EXCHANGE long exchange(long v, uint mask) { return as_long(exchange(as_float2(v), mask)); }
#ifdef cl_khr_fp64
EXCHANGE double exchange(double v, uint mask) { return as_double(exchange(as_float2(v), mask)); }
EXCHANGE double2 exchange(double2 v, uint mask) { return (double2)(exchange(v.x, mask), exchange(v.y, mask)); }
#endif
#define TAKE_EXCHANGED(OP, v, mask)                                                                                    \
    {                                                                                                                  \
        const __typeof__(v) other = exchange(v, mask);                                                                 \
        v = OP(v, other);                                                                                              \
    }
#define FOLD_IN(OP, v, scratch)                                                                                        \
    if (step == 1 && lanes % 32 == 0) {                                                                                \
        TAKE_EXCHANGED(OP, v, 1u) TAKE_EXCHANGED(OP, v, 2u) TAKE_EXCHANGED(OP, v, 4u) TAKE_EXCHANGED(OP, v, 8u)        \
        TAKE_EXCHANGED(OP, v, 16u)                                                                                     \
        if (lanes > 32) {                                                                                              \
            if (lid % 32 == 0)                                                                                         \
                scratch[lid] = v;                                                                                      \
            barrier(CLK_LOCAL_MEM_FENCE);                                                                              \
            v = scratch[lid - lane];                                                                                   \
            TAKE_15(OP, v, scratch, lid - lane, 0, 32)                                                                 \
            if (lanes > 512) {                                                                                         \
                TAKE(OP, v, scratch, lid - lane, 512)                                                                  \
                TAKE_15(OP, v, scratch, lid - lane, 512, 32)                                                           \
            }                                                                                                          \
        }                                                                                                              \
    } else {                                                                                                           \
        FOLD_IN_MEMORY(OP, v, scratch)                                                                                 \
    }
#else
#define FOLD_IN(OP, v, scratch) FOLD_IN_MEMORY(OP, v, scratch)
#endif
#endif

// Offsets in strided tensors, 16-wide loads, and FOLD. Follows the prelude, precedes reduce.cl, softmax.cl and gather.cl.
// IDX is uint if every count fits in 31 bits (64-bit division is slow on GPUs), otherwise ulong.

// Returns the index along dim k of the linear position i, which becomes the position in the outer dims. Dim 0 needs no division.
#define NEXT(i, size, k) ((k) == 0 ? (i) : next_index(&(i), (IDX)(size)[k]))
static inline IDX next_index(IDX *i, IDX n) {
    const IDX q = *i / n, r = *i - q * n;
    *i = q;
    return r;
}

// Dims with their strides: `at_NAME(d, i)` is the element offset of position i.
#define STRIDED_DIMS(NAME, N)                                                                                           \
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

// Sixteen adjacent elements in the compute type. Vectors are explicit, because PoCL vectorises no loop inside a work-item.
#ifdef IS_CPU
#define load16_f32(p, i) vload16(0, (p) + (i))
#define load16_f64(p, i) vload16(0, (p) + (i))
#define load16_f16(p, i) vload_half16(0, (const __global half *)((p) + (i)))
#define load16_bf16(p, i) as_float16(convert_uint16(vload16(0, (p) + (i))) << 16)
#define load16_i64(p, i) vload16(0, (p) + (i))
#define load16_i32(p, i) convert_long16(vload16(0, (p) + (i)))
#define load16_u32(p, i) convert_long16(vload16(0, (p) + (i)))
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

// FOLD reduces v over the lanes of a row, `lanes` work-items `step` apart; all lanes get the result. First 256 lanes combine the
// values of the other lanes, then sixteen lanes combine those of the 256, and finally every lane combines these sixteen. The
// loops are unrolled by hand, so that loads overlap, because a macro cannot contain a loop pragma. Every work-item of the group
// must reach FOLD, with lid, lane and scratch[GROUP] in scope; GROUP is at most 1024.
#ifndef IS_CPU
#define TAKE(OP, v, scratch, at, i)                                                                                    \
    if ((i) < lanes)                                                                                                   \
        v = OP(v, scratch[(at) + (i) * step]);
#define TAKE_15(OP, v, s, at, by)                                                                                      \
    TAKE(OP, v, s, at, by)                                                                                             \
    TAKE(OP, v, s, at, 2 * by) TAKE(OP, v, s, at, 3 * by) TAKE(OP, v, s, at, 4 * by) TAKE(OP, v, s, at, 5 * by)        \
    TAKE(OP, v, s, at, 6 * by) TAKE(OP, v, s, at, 7 * by) TAKE(OP, v, s, at, 8 * by) TAKE(OP, v, s, at, 9 * by)        \
    TAKE(OP, v, s, at, 10 * by) TAKE(OP, v, s, at, 11 * by) TAKE(OP, v, s, at, 12 * by) TAKE(OP, v, s, at, 13 * by)    \
    TAKE(OP, v, s, at, 14 * by) TAKE(OP, v, s, at, 15 * by)
#define FOLD(OP, v) FOLD_IN(OP, v, scratch)
// FOLD with an array of another name.
#define FOLD_IN(OP, v, scratch)                                                                                        \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                                      \
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
            TAKE_15(OP, v, scratch, lid, 16)                                                                           \
            scratch[lid] = v;                                                                                          \
        }                                                                                                              \
        barrier(CLK_LOCAL_MEM_FENCE);                                                                                  \
    }                                                                                                                  \
    v = scratch[lid - lane * step];                                                                                    \
    TAKE_15(OP, v, scratch, lid - lane * step, 1)
#endif

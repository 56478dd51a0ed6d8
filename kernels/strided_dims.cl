// Offsets in strided tensors, and loads of 16 elements. Follows prelude.cl, precedes reduce.cl, softmax.cl and gather.cl. IDX
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

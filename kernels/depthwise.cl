// Convolutions in which each group has one channel of the image, without im2col. Follows strided_dims.cl. The host defines A (dtype) with
// ACC and ACC_NAME, IDX, one of WINDOWS, IMAGES, WEIGHT, SUM, the taps KH x KW, the strides SH and SW, the dilations DH and DW, and PER.
// A work-item computes PER adjacent elements of a row. From each row of the other tensor, it loads the elements for its taps once into
// `line`, with 0 outside the tensor. A load reads VEC elements from a multiple of VEC on, which is SKIP elements before the first element
// needed. If VEC is above 1, rows begin and end at multiples of VEC, and PER is VEC. WEIGHT computes the gradient of the weight: a group
// of GROUP work-items adds up the taps of one channel over a part of all windows. SUM adds up the parts in their order, so the bits are
// the same in every run.

#define LOAD CAT(load_, A)
#define STORE CAT(CAT(CAT(store_, A), _), ACC_NAME)

// Images are [n, inner, rows, columns] and windows are [n, channels, rows, columns]. There are `multiplier` channels of windows for
// each channel of images.
typedef struct {
    long image[2], grid[2], padding[2], channels, multiplier;
    long x[4], y[4], w[3]; // strides: of images, of windows, and of the weight's channels and taps
} Sizes;

#if VEC > 1
#define LOADED(line) ((SKIP + (line) + VEC - 1) / VEC * VEC)
#define LOAD_NEIGHBOURS(to, from, at, there)                                                                           \
    {                                                                                                                  \
        CAT(A, _t) raw[VEC];                                                                                           \
        CAT(vstore, VEC)((there) ? *(const __global WIDE_T *)((from) + (at)) : (WIDE_T)(0), 0, raw);                   \
        _Pragma("unroll") for (int e = 0; e < VEC; ++e)(to)[e] = CAT(from_, A)(raw[e]);                                \
    }
#define STORE_ROW(first, end)                                                                                          \
    {                                                                                                                  \
        CAT(A, _t) raw[VEC];                                                                                           \
        _Pragma("unroll") for (int e = 0; e < VEC; ++e) raw[e] = CAT(CAT(CAT(to_, A), _), ACC_NAME)(acc[e]);           \
        *(__global WIDE_T *)(out + out_at) = CAT(vload, VEC)(0, raw);                                                  \
    }
#else
#define SKIP 0
#define LOADED(line) (line)
#define LOAD_NEIGHBOURS(to, from, at, there) *(to) = (there) ? LOAD(from, at) : 0;
#define STORE_ROW(first, end)                                                                                          \
    _Pragma("unroll") for (int p = 0; p < PER; ++p) if ((first) + p < (end)) STORE(out, out_at + p, acc[p]);
#endif

// Loads the image elements that the windows of grid row `row`, from column `first` on, read with their tap row kh.
#define LINE_OF_IMAGE ((PER - 1) * SW + (KW - 1) * DW + 1)
#define LOAD_IMAGE_LINE(row, first, kh)                                                                                \
    const int h = (int)(row) * SH - (int)s.padding[0] + (kh) * DH, v0 = (int)(first) * SW - (int)s.padding[1] - SKIP;  \
    const bool in = h >= 0 && h < s.image[0];                                                                          \
    ACC line[LOADED(LINE_OF_IMAGE)];                                                                                   \
    _Pragma("unroll") for (int j = 0; j < LOADED(LINE_OF_IMAGE); j += VEC)                                             \
        LOAD_NEIGHBOURS(line + j, x, x_at + h * s.x[2] + (v0 + j) * s.x[3], in && v0 + j >= 0 && v0 + j < s.image[1])

#ifdef WINDOWS
__kernel void depthwise(const __global CAT(A, _t) *x, ulong x_at, const __global CAT(A, _t) *w, ulong w_at,
                        const __global CAT(A, _t) *bias, ulong bias_at, __global CAT(A, _t) *out, ulong out_at, Sizes s,
                        ulong count, uint biased, long bias_step) {
    IDX i = (IDX)get_global_id(0);
    if (i >= (IDX)count)
        return;
    const IDX first = next_index(&i, (IDX)((s.grid[1] + PER - 1) / PER)) * PER;
    const IDX row = next_index(&i, (IDX)s.grid[0]), o = next_index(&i, (IDX)s.channels);
    x_at += (long)i * s.x[0] + (long)(o / (IDX)s.multiplier) * s.x[1];
    w_at += (long)o * s.w[0];
    ACC acc[PER];
    #pragma unroll
    for (int p = 0; p < PER; ++p) acc[p] = biased ? LOAD(bias, bias_at + (long)o * bias_step) : 0;
    #pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        LOAD_IMAGE_LINE(row, first, kh)
        #pragma unroll
        for (int kw = 0; kw < KW; ++kw) {
            const ACC tap = LOAD(w, w_at + kh * s.w[1] + kw * s.w[2]);
            #pragma unroll
            for (int p = 0; p < PER; ++p) acc[p] = fma(line[SKIP + p * SW + kw * DW], tap, acc[p]);
        }
    }
    out_at += (((ulong)i * s.channels + o) * s.grid[0] + row) * s.grid[1] + first;
    STORE_ROW(first, s.grid[1])
}
#endif

#ifdef IMAGES
#define LINE_OF_WINDOWS (PER - 1 + (KW - 1) * DW + 1)
__kernel void depthwise(const __global CAT(A, _t) *y, ulong y_at, const __global CAT(A, _t) *w, ulong w_at,
                        const __global CAT(A, _t) *bias, ulong bias_at, __global CAT(A, _t) *out, ulong out_at, Sizes s,
                        ulong count, uint biased, long bias_step) {
    IDX i = (IDX)get_global_id(0);
    if (i >= (IDX)count)
        return;
    const IDX first = next_index(&i, (IDX)((s.image[1] + PER - 1) / PER)) * PER;
    const IDX row = next_index(&i, (IDX)s.image[0]), inner = (IDX)(s.channels / s.multiplier);
    const IDX c = next_index(&i, inner);
    ACC acc[PER];
    #pragma unroll
    for (int p = 0; p < PER; ++p) acc[p] = biased ? LOAD(bias, bias_at + (long)c * bias_step) : 0;
    for (long o = (long)c * s.multiplier; o < (long)(c + 1) * s.multiplier; ++o) {
        const ulong y_row = y_at + (long)i * s.y[0] + o * s.y[1], taps = w_at + o * s.w[0];
        #pragma unroll
        for (int kh = 0; kh < KH; ++kh) {
            // The windows that read this element begin at multiples of the stride, so h must be a multiple of SH.
            const int h = (int)row + (int)s.padding[0] - kh * DH;
            const int u0 = (int)first + (int)s.padding[1] - (KW - 1) * DW - SKIP;
            const bool in = h >= 0 && h % SH == 0 && h / SH < s.grid[0];
            ACC line[LOADED(LINE_OF_WINDOWS)];
            bool there[LOADED(LINE_OF_WINDOWS)];
            #pragma unroll
            for (int j = 0; j < LOADED(LINE_OF_WINDOWS); ++j) {
                const int u = u0 + j;
                there[j] = in && u >= 0 && u % SW == 0 && u / SW < s.grid[1];
            }
            #pragma unroll
            for (int j = 0; j < LOADED(LINE_OF_WINDOWS); j += VEC)
                LOAD_NEIGHBOURS(line + j, y, y_row + h / SH * s.y[2] + (u0 + j) / SW * s.y[3], there[j])
            #pragma unroll
            for (int kw = 0; kw < KW; ++kw) {
                const ACC tap = LOAD(w, taps + kh * s.w[1] + kw * s.w[2]);
                #pragma unroll
                for (int p = 0; p < PER; ++p) {
                    // A position without a window must be skipped: multiplying an infinite tap by 0 would give NaN.
                    const int j = SKIP + p + (KW - 1 - kw) * DW;
                    acc[p] = there[j] ? fma(line[j], tap, acc[p]) : acc[p];
                }
            }
        }
    }
    out_at += (((ulong)i * inner + c) * s.image[0] + row) * s.image[1] + first;
    STORE_ROW(first, s.image[1])
}
#endif

#ifdef WEIGHT
#define ADD(a, b) ((a) + (b))
// `sums` is [parts, channels, KH, KW]. Each channel has `count` runs of PER windows, and a part has `each` of these runs.
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void depthwise(const __global CAT(A, _t) *x, ulong x_at, const __global CAT(A, _t) *y, ulong y_at, __global ACC *sums,
               ulong sums_at, Sizes s, ulong count, ulong each) {
    const IDX channels = (IDX)s.channels, o = (IDX)get_group_id(0) % channels, part = (IDX)get_group_id(0) / channels;
    const uint lid = get_local_id(0);
    x_at += (long)(o / (IDX)s.multiplier) * s.x[1];
    y_at += (long)o * s.y[1];
    ACC acc[KH * KW];
    #pragma unroll
    for (int k = 0; k < KH * KW; ++k) acc[k] = 0;
    const IDX end = min((IDX)count, (IDX)((part + 1) * (IDX)each));
    const ulong images = x_at, windows = y_at;
    for (IDX at = part * (IDX)each + lid; at < end; at += GROUP) {
        IDX i = at;
        const IDX first = next_index(&i, (IDX)((s.grid[1] + PER - 1) / PER)) * PER, row = next_index(&i, (IDX)s.grid[0]);
        x_at = images + (long)i * s.x[0];
        y_at = windows + (long)i * s.y[0] + (long)row * s.y[2] + (long)first * s.y[3];
        ACC by[PER];
        #pragma unroll
        for (int p = 0; p < PER; p += VEC) LOAD_NEIGHBOURS(by + p, y, y_at + p * s.y[3], first + p < s.grid[1])
        #pragma unroll
        for (int kh = 0; kh < KH; ++kh) {
            LOAD_IMAGE_LINE(row, first, kh)
            #pragma unroll
            for (int kw = 0; kw < KW; ++kw) {
                #pragma unroll
                for (int p = 0; p < PER; ++p) {
                    const int k = kh * KW + kw;
                    acc[k] = first + p < s.grid[1] ? fma(line[SKIP + p * SW + kw * DW], by[p], acc[k]) : acc[k];
                }
            }
        }
    }
    sums_at += ((ulong)part * channels + o) * (KH * KW);
#if GROUP > 1
    __local ACC scratch[GROUP];
    const uint lane = lid, lanes = GROUP, step = 1;
#endif
    #pragma unroll
    for (int k = 0; k < KH * KW; ++k) {
        ACC sum = acc[k];
#if GROUP > 1
        FOLD(ADD, sum)
#endif
        if (lid == 0) sums[sums_at + k] = sum;
    }
}
#endif

#ifdef SUM
__kernel void depthwise(const __global ACC *sums, ulong sums_at, __global CAT(A, _t) *out, ulong out_at, ulong count, ulong parts) {
    const ulong i = get_global_id(0);
    if (i >= count)
        return;
    ACC sum = 0;
    for (ulong part = 0; part < parts; ++part) sum += sums[sums_at + part * count + i];
    STORE(out, out_at + i, sum);
}
#endif

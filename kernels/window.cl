// Windows over the last two dims of images: im2col (UNFOLD), col2im (FOLD_WINDOWS), max pooling (MAX), average pooling (MEAN), and the
// gradients of pooling (UNMAX, UNMEAN). The host defines one of these names, IDX, V (an unsigned type of the element's size) or A (dtype)
// with ACC and ACC_NAME, and ADAPTIVE for adaptive pooling. INT is the type of positions in an image: int if positions fit, because on
// GPUs 64-bit products and divisions take more time than the elements of the windows. All kernels are gathers: a work-item computes one
// element of a contiguous result (several in UNFOLD and in vectorised pooling), so there are no atomics and results are reproducible.

// Pairs are rows and columns. `padding` is in front of the image, `behind` is the padding behind the image.
typedef struct {
    long image[2], taps[2], grid[2], stride[2], padding[2], behind[2], dilation[2];
    long n, c;
    // Strides of the input: n, c, then either rows and columns of an image, or rows and columns of taps and of windows, or of pooled windows.
    long x[6];
} Windows;

#ifndef INT
#define INT long
#endif
// Field k of the windows, along direction d (0: rows, 1: columns).
#define W(k, d) ((INT)w->k[d])

#define LOAD CAT(load_, A)
#define STORE CAT(CAT(CAT(store_, A), _), ACC_NAME)

// Computes the image elements of window o along direction d: from `start` to before `stop`, one dilation apart.
static inline void span(const Windows *w, int d, INT o, INT *start, INT *stop) {
#ifdef ADAPTIVE
    *start = o * W(image, d) / W(grid, d);
    *stop = ((o + 1) * W(image, d) + W(grid, d) - 1) / W(grid, d);
#else
    const INT step = W(dilation, d), from = o * W(stride, d) - W(padding, d);
    *stop = min(from + step * (W(taps, d) - 1) + 1, W(image, d));
    *start = from < 0 ? from + (step - 1 - from) / step * step : from;
#endif
}

// Computes the range of windows, from `first` to `last`, that may contain element h along direction d.
static inline void windows_containing(const Windows *w, int d, INT h, INT *first, INT *last) {
#ifdef ADAPTIVE
    *first = h * W(grid, d) / W(image, d);
    *last = ((h + 1) * W(grid, d) - 1) / W(image, d);
#else
    const INT at = h + W(padding, d), reach = W(dilation, d) * (W(taps, d) - 1);
    *first = at <= reach ? 0 : (at - reach - 1) / W(stride, d) + 1;
    *last = min(at / W(stride, d), W(grid, d) - 1);
#endif
}

#ifdef UNFOLD
// y is [n, c, kh, kw, oh, ow], or with `inside` [c, kh, kw, n, oh, ow]. Taps outside the image give 0. Of the `count` windows over
// all channels, a work-item processes one window and writes `each` rows of its taps, so that index divisions are done only once.
__kernel void window(__global const V *x, ulong x_at, __global V *y, ulong y_at, Windows w, ulong count, uint each,
                     uint inside) {
    IDX i = (IDX)get_global_id(0);
    const long top = (long)(i / (IDX)count) * each;
    if (top >= w.taps[0])
        return;
    i %= (IDX)count;
    const IDX ow = next_index(&i, (IDX)w.grid[1]), oh = next_index(&i, (IDX)w.grid[0]);
    const IDX within = next_index(&i, inside ? (IDX)w.n : (IDX)w.c), outer = i;
    const IDX n = inside ? within : outer, c = inside ? outer : within;
    const long h = (long)oh * w.stride[0] - w.padding[0], v = (long)ow * w.stride[1] - w.padding[1];
    const ulong windows = (ulong)w.grid[0] * w.grid[1], step = inside ? w.n * windows : windows;
    x_at += (long)n * w.x[0] + (long)c * w.x[1] + h * w.x[2] + v * w.x[3];
    y_at += (inside ? ((ulong)c * w.taps[0] * w.taps[1] * w.n + n) * windows
                    : ((ulong)n * w.c + c) * w.taps[0] * w.taps[1] * windows) + (ulong)oh * w.grid[1] + ow;
    y_at += (ulong)top * w.taps[1] * step;
    for (long kh = top; kh < min(top + each, w.taps[0]); ++kh) {
        const long row = kh * w.dilation[0];
        const bool in = h + row >= 0 && h + row < w.image[0];
        for (long kw = 0; kw < w.taps[1]; ++kw, y_at += step) {
            const long column = kw * w.dilation[1];
            const bool there = in && v + column >= 0 && v + column < w.image[1];
            y[y_at] = there ? x[x_at + row * w.x[2] + column * w.x[3]] : 0;
        }
    }
}
#else

// Computes the indices of a work-item's element p in a result [n, c, rows, columns], or with LAST in a channels-last result. If
// neighbours.cl precedes this file, a work-item has VEC adjacent channels.
#ifdef LAST
#define CHANNEL_LAST const long c = (long)next_index(&n, (IDX)w.c / VEC) * VEC;
#define CHANNEL_FIRST
#else
#define CHANNEL_LAST
#define CHANNEL_FIRST const long c = (long)next_index(&n, (IDX)w.c);
#endif
#define POSITION(rows, columns)                                                                                        \
    const IDX p = (IDX)get_global_id(0);                                                                               \
    if (p >= (IDX)count)                                                                                               \
        return;                                                                                                        \
    IDX n = p;                                                                                                         \
    CHANNEL_LAST                                                                                                       \
    const INT v = (INT)next_index(&n, (IDX)(columns)), h = (INT)next_index(&n, (IDX)(rows));                           \
    CHANNEL_FIRST                                                                                                      \
    x_at += (long)n * w.x[0] + c * w.x[1]

#if defined(MAX) || defined(UNMAX) || defined(MEAN) || defined(UNMEAN)
#define EACH_CHANNEL _Pragma("unroll") for (int j = 0; j < VEC; ++j)
#define GET(v, row, column) get(v, x, x_at + (row)*w.x[2] + (column)*w.x[3])
#else
#define VEC 1
#endif

// Returns the divisor of a mean: `divide` if positive; otherwise the number of elements of the window, which includes the padding
// only if `divide` is 0.
static inline ACC divisor(const Windows *w, INT oh, INT ow, long divide) {
    if (divide > 0)
        return (ACC)divide;
    INT size = 1;
    for (int d = 0; d < 2; ++d) {
        const INT o = d == 0 ? oh : ow;
        INT start, stop;
        span(w, d, o, &start, &stop);
#ifndef ADAPTIVE
        if (divide == 0) {
            start = o * W(stride, d) - W(padding, d);
            stop = min(start + W(taps, d), W(image, d) + W(behind, d));
        }
#endif
        size *= stop - start;
    }
    return (ACC)size;
}

#ifdef FOLD_WINDOWS
__kernel void window(__global const CAT(A, _t) *x, ulong x_at, __global CAT(A, _t) *y, ulong y_at, Windows w, ulong count) {
    POSITION(w.image[0], w.image[1]);
    INT top, bottom, left, right;
    windows_containing(&w, 0, h, &top, &bottom);
    windows_containing(&w, 1, v, &left, &right);
    ACC sum = 0;
    for (INT oh = top; oh <= bottom; ++oh) {
        const INT dh = h + (INT)w.padding[0] - oh * (INT)w.stride[0];
        if (dh % (INT)w.dilation[0] != 0)
            continue;
        const ulong row = x_at + dh / (INT)w.dilation[0] * w.x[2] + oh * w.x[4];
        for (INT ow = left; ow <= right; ++ow) {
            const INT dv = v + (INT)w.padding[1] - ow * (INT)w.stride[1];
            if (dv % (INT)w.dilation[1] == 0)
                sum += LOAD(x, row + dv / (INT)w.dilation[1] * w.x[3] + ow * w.x[5]);
        }
    }
    STORE(y, y_at + p, sum);
}
#endif

#ifdef MAX
// Computes the maximum and its index in the image: of the last NaN if there is a NaN, otherwise of the first of equal elements.
__kernel void window(In x, ulong x_at, Out y, ulong y_at, __global long *index, ulong index_at, Windows w, ulong count) {
    POSITION(w.grid[0], w.grid[1]);
    INT top, bottom, left, right;
    span(&w, 0, h, &top, &bottom);
    span(&w, 1, v, &left, &right);
    const INT across = (INT)w.image[1];
    INT at[VEC];
    ACC best[VEC], value[VEC];
    GET(best, top, left);
    EACH_CHANNEL at[j] = top * across + left;
    for (INT i = top; i < bottom; i += (INT)w.dilation[0]) {
        for (INT k = left; k < right; k += (INT)w.dilation[1]) {
            GET(value, i, k);
            EACH_CHANNEL {
                const bool greater = (value[j] > best[j]) | (value[j] != value[j]);
                best[j] = greater ? value[j] : best[j];
                at[j] = greater ? i * across + k : at[j];
            }
        }
    }
    put(y, y_at + (ulong)p * VEC, best);
    index += index_at + (ulong)p * VEC;
#if VEC > 1
    #pragma unroll
    for (int j = 0; j < VEC; j += 2)
        *(__global long2 *)(index + j) = (long2)(at[j], at[j + 1]);
#else
    *index = at[0];
#endif
}
#endif

#if defined(MAX_OF_IMAGE) || defined(MEAN_OF_IMAGE)
__constant sampler_t PIXEL = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_NONE | CLK_FILTER_NEAREST;

// MAX and MEAN of an OpenCL image with the layout of image.cl. A work-item computes four channels of a window.
__kernel void window(__read_only image2d_t x, __global CAT(A, _t) *y, ulong y_at, __global long *index, ulong index_at, Windows w,
                     ulong count, long divide) {
    IDX n = (IDX)get_global_id(0);
    if (n >= (IDX)count)
        return;
    const INT v = (INT)next_index(&n, (IDX)w.grid[1]), h = (INT)next_index(&n, (IDX)w.grid[0]);
    const int block = (int)next_index(&n, (IDX)((w.c + 3) / 4)), across = (int)w.image[1];
    INT top, bottom, left, right;
    span(&w, 0, h, &top, &bottom);
    span(&w, 1, v, &left, &right);
    const int2 start = (int2)(block * across, (int)n * (int)w.image[0]);
#ifdef MAX_OF_IMAGE
    int4 at = (int4)((int)top * across + (int)left);
    float4 best = read_imagef(x, PIXEL, start + (int2)((int)left, (int)top));
    for (INT i = top; i < bottom; i += (INT)w.dilation[0]) {
        for (INT j = left; j < right; j += (INT)w.dilation[1]) {
            const float4 value = read_imagef(x, PIXEL, start + (int2)((int)j, (int)i));
            const int4 greater = value > best || value != value;
            best = select(best, value, greater);
            at = select(at, (int4)((int)i * across + (int)j), greater);
        }
    }
    const float result[4] = {best.x, best.y, best.z, best.w};
    const int indices[4] = {at.x, at.y, at.z, at.w};
#else
    float4 sum = 0;
    for (INT i = top; i < bottom; ++i)
        for (INT j = left; j < right; ++j)
            sum += read_imagef(x, PIXEL, start + (int2)((int)j, (int)i));
    sum /= divisor(&w, h, v, divide);
    const float result[4] = {sum.x, sum.y, sum.z, sum.w};
#endif
    for (int q = 0; q < 4 && 4 * block + q < w.c; q++) {
        const ulong p = (((ulong)n * w.c + 4 * block + q) * w.grid[0] + h) * w.grid[1] + v;
        STORE(y, y_at + p, result[q]);
#ifdef MAX_OF_IMAGE
        index[index_at + p] = indices[q];
#endif
    }
}
#endif

#ifdef UNMAX
// `index` is contiguous: [n, c, windows], or with LAST [n, windows, c].
__kernel void window(In x, ulong x_at, Out y, ulong y_at, __global const long *index, ulong index_at, Windows w, ulong count) {
    POSITION(w.image[0], w.image[1]);
#ifdef LAST
    const INT between = (INT)w.c;
    index += index_at + (ulong)n * w.grid[0] * w.grid[1] * w.c + c;
#else
    const INT between = 1;
    index += index_at + ((ulong)n * w.c + c) * w.grid[0] * w.grid[1];
#endif
    INT top, bottom, left, right;
    windows_containing(&w, 0, h, &top, &bottom);
    windows_containing(&w, 1, v, &left, &right);
    ACC sum[VEC], value[VEC];
    EACH_CHANNEL sum[j] = 0;
    const long here = h * (INT)w.image[1] + v;
    for (INT oh = top; oh <= bottom; ++oh) {
        for (INT ow = left; ow <= right; ++ow) {
            __global const long *of_window = index + (ulong)(oh * (INT)w.grid[1] + ow) * between;
            GET(value, oh, ow);
            // Whole indices are compared, because otherwise compilers would load the two halves of an index separately.
#if VEC > 1
            #pragma unroll
            for (int j = 0; j < VEC; j += 2) {
                const long2 two = *(__global const long2 *)(of_window + j);
                sum[j] += two.x == here ? value[j] : 0;
                sum[j + 1] += two.y == here ? value[j + 1] : 0;
            }
#else
            sum[0] += *of_window == here ? value[0] : 0;
#endif
        }
    }
    put(y, y_at + (ulong)p * VEC, sum);
}
#endif

#ifdef MEAN
__kernel void window(In x, ulong x_at, Out y, ulong y_at, Windows w, ulong count, long divide) {
    POSITION(w.grid[0], w.grid[1]);
    INT top, bottom, left, right;
    span(&w, 0, h, &top, &bottom);
    span(&w, 1, v, &left, &right);
    ACC sum[VEC], value[VEC];
    EACH_CHANNEL sum[j] = 0;
    for (INT i = top; i < bottom; ++i) {
        for (INT k = left; k < right; ++k) {
            GET(value, i, k);
            EACH_CHANNEL sum[j] += value[j];
        }
    }
    const ACC size = divisor(&w, h, v, divide);
    EACH_CHANNEL sum[j] /= size;
    put(y, y_at + (ulong)p * VEC, sum);
}
#endif

#ifdef UNMEAN
__kernel void window(In x, ulong x_at, Out y, ulong y_at, Windows w, ulong count, long divide) {
    POSITION(w.image[0], w.image[1]);
    INT top, bottom, left, right;
    windows_containing(&w, 0, h, &top, &bottom);
    windows_containing(&w, 1, v, &left, &right);
    ACC sum[VEC], value[VEC];
    EACH_CHANNEL sum[j] = 0;
    for (INT oh = top; oh <= bottom; ++oh) {
        for (INT ow = left; ow <= right; ++ow) {
            const ACC size = divisor(&w, oh, ow, divide);
            GET(value, oh, ow);
            EACH_CHANNEL sum[j] += value[j] / size;
        }
    }
    put(y, y_at + (ulong)p * VEC, sum);
}
#endif
#endif

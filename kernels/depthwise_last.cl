// Depthwise convolutions of channels-last tensors, with one output channel per input channel. Follows strided_dims.cl and neighbours.cl. The host
// defines one of WINDOWS, IMAGES, WEIGHT, the taps KH x KW, the strides SH and SW, the dilations DH and DW, COLUMNS, LANES and SLOTS. A work-item
// computes VEC adjacent channels of COLUMNS adjacent pixels of a row. A work-group has LANES work-items for adjacent channels, SLOTS times, and keeps
// the taps of its channels in local memory. With FLIP, WINDOWS reads the taps in reversed order, which computes the gradient of images for strides of 1.
// WEIGHT computes the gradient of the weight: partial sums of a part of all windows, which depthwise.cl adds up.

typedef CAT(float, VEC) Vec;
// Tensors are [n, rows, columns, channels]. `image` and `grid` are rows and columns of the tensor that is read and of the result.
typedef struct {
    long image[2], grid[2], padding[2], channels, positions, repeat;
    long x[3], y[3], w[3]; // strides: of both tensors along n, rows and columns; of the weight along channels and taps
} Sizes;

#define TAPS (KH * KW)
#define T (LANES * SLOTS)
#define LINE ((COLUMNS - 1) * SW + (KW - 1) * DW + 1)

static inline Vec load_pixel(In x, ulong at) {
    float each[VEC];
    get(each, x, at);
    return CAT(vload, VEC)(0, each);
}

// The first column, the row and the image of the work-item's pixels: `at` is a position among all runs of COLUMNS pixels.
#define POSITION(at)                                                                                                   \
    IDX n = (IDX)(at);                                                                                                 \
    const int column = next_index(&n, (IDX)((s.grid[1] + COLUMNS - 1) / COLUMNS)) * COLUMNS;                           \
    const int row = next_index(&n, (IDX)s.grid[0])

#ifndef WEIGHT
__kernel __attribute__((reqd_work_group_size(T, 1, 1))) void
depthwise_last(In x, ulong x_at, In w, ulong w_at, In bias, ulong bias_at, Out out, ulong out_at, const Sizes s, uint biased, long bias_step) {
    __local float taps[TAPS][LANES * VEC] __attribute__((aligned(32)));
    const uint t = get_local_id(0), blocks = ((uint)s.channels / VEC + LANES - 1) / LANES;
    const uint first = get_group_id(0) % blocks * LANES, c = (first + t % LANES) * VEC;
    for (uint i = t; i < TAPS * LANES * VEC; i += T) {
        const uint k = i % TAPS, channel = first * VEC + i / TAPS, tap = TAPS - 1 - k;
        const float value = channel < s.channels ? CAT(load_, A)(w, w_at + channel * s.w[0] + k / KW * s.w[1] + k % KW * s.w[2]) : 0;
#ifdef FLIP
        taps[tap][i / TAPS] = value;
#else
        taps[k][i / TAPS] = value;
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const IDX begin = get_group_id(0) / blocks * (IDX)(SLOTS * s.repeat) + t / LANES;
    const IDX end = min((IDX)s.positions, begin + (IDX)(SLOTS * s.repeat));
    for (IDX at = begin; at < end && c < s.channels; at += SLOTS) {
        POSITION(at);
        mem_fence(CLK_LOCAL_MEM_FENCE); // otherwise compilers keep the taps in registers, so that few work-groups run at the same time
        Vec acc[COLUMNS];
        #pragma unroll
        for (int p = 0; p < COLUMNS; ++p) {
            acc[p] = 0;
            if (biased) {
                float each[VEC];
                for (int e = 0; e < VEC; ++e)
                    each[e] = CAT(load_, A)(bias, bias_at + (c + e) * bias_step);
                acc[p] = CAT(vload, VEC)(0, each);
            }
        }
        const ulong image = x_at + (long)n * s.x[0] + c;
#ifdef WINDOWS
        #pragma unroll 1 // a work-item needs fewer registers, so more work-groups run at the same time
        for (int kh = 0; kh < KH; ++kh) {
            const int h = row * SH - (int)s.padding[0] + kh * DH, v0 = column * SW - (int)s.padding[1];
            const bool in = h >= 0 && h < s.image[0];
            #pragma unroll
            for (int j = 0; j < LINE; ++j) {
                const int v = v0 + j;
                const Vec pixel = in && v >= 0 && v < s.image[1] ? load_pixel(x, image + h * s.x[1] + v * s.x[2]) : (Vec)(0);
                #pragma unroll
                for (int kw = 0; kw < KW; ++kw) {
                    const int p = j - kw * DW;
                    if (p >= 0 && p % SW == 0 && p / SW < COLUMNS)
                        acc[p / SW] = fma(pixel, *(__local const Vec *)&taps[kh * KW + kw][t % LANES * VEC], acc[p / SW]);
                }
            }
        }
#else
        for (int kh = 0; kh < KH; ++kh) {
            // The windows that read a pixel begin at multiples of the stride.
            const int h = row + (int)s.padding[0] - kh * DH;
            if (h < 0 || h % SH != 0 || h / SH >= s.image[0])
                continue;
            #pragma unroll
            for (int kw = 0; kw < KW; ++kw) {
                const Vec tap = *(__local const Vec *)&taps[kh * KW + kw][t % LANES * VEC];
                #pragma unroll
                for (int p = 0; p < COLUMNS; ++p) {
                    const int u = column + p + (int)s.padding[1] - kw * DW;
                    if (u >= 0 && u % SW == 0 && u / SW < s.image[1])
                        acc[p] = fma(load_pixel(x, image + h / SH * s.x[1] + u / SW * s.x[2]), tap, acc[p]);
                }
            }
        }
#endif
        #pragma unroll
        for (int p = 0; p < COLUMNS; ++p) {
            float each[VEC];
            CAT(vstore, VEC)(acc[p], 0, each);
            if (column + p < s.grid[1])
                put(out, out_at + (long)n * s.y[0] + row * s.y[1] + (column + p) * s.y[2] + c, each);
        }
    }
}

#else
// `sums` is [parts, channels, KH, KW]. SLOTS is a multiple of KH: each work-item adds up one row of taps.
__kernel __attribute__((reqd_work_group_size(T, 1, 1))) void
depthwise_last(In x, ulong x_at, In y, ulong y_at, __global float *sums, ulong sums_at, const Sizes s) {
    __local float parts[SLOTS][LANES * VEC] __attribute__((aligned(32)));
    const uint t = get_local_id(0), blocks = ((uint)s.channels / VEC + LANES - 1) / LANES, kh = t / LANES % KH;
    const uint first = get_group_id(0) % blocks * LANES, c = (first + t % LANES) * VEC, part = get_group_id(0) / blocks;
    Vec acc[KW];
    #pragma unroll
    for (int k = 0; k < KW; ++k)
        acc[k] = 0;
    const IDX begin = part * (IDX)(SLOTS / KH * s.repeat), end = min((IDX)s.positions, begin + (IDX)(SLOTS / KH * s.repeat));
    for (IDX at = begin + t / LANES / KH; at < end && c < s.channels; at += SLOTS / KH) {
        POSITION(at);
        const int h = row * SH - (int)s.padding[0] + (int)kh * DH, v0 = column * SW - (int)s.padding[1];
        if (h < 0 || h >= s.image[0])
            continue;
        Vec window[COLUMNS];
        #pragma unroll
        for (int p = 0; p < COLUMNS; ++p)
            window[p] = column + p < s.grid[1]
                            ? load_pixel(y, y_at + (long)n * s.y[0] + row * s.y[1] + (column + p) * s.y[2] + c)
                            : (Vec)(0);
        #pragma unroll
        for (int j = 0; j < LINE; ++j) {
            const int v = v0 + j;
            const bool in = v >= 0 && v < s.image[1];
            const Vec pixel = in ? load_pixel(x, x_at + (long)n * s.x[0] + h * s.x[1] + v * s.x[2] + c) : (Vec)(0);
            #pragma unroll
            for (int kw = 0; kw < KW; ++kw) {
                const int p = j - kw * DW;
                if (p >= 0 && p % SW == 0 && p / SW < COLUMNS)
                    acc[kw] = fma(pixel, window[p / SW], acc[kw]);
            }
        }
    }
    #pragma unroll
    for (int kw = 0; kw < KW; ++kw) {
        barrier(CLK_LOCAL_MEM_FENCE);
        *(__local Vec *)&parts[t / LANES][t % LANES * VEC] = acc[kw];
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint i = t; i < KH * LANES * VEC; i += T) {
            const uint row = i / (LANES * VEC), e = i % (LANES * VEC);
            float sum = 0;
            for (uint slot = row; slot < SLOTS; slot += KH)
                sum += parts[slot][e];
            if (first * VEC + e < s.channels)
                sums[sums_at + ((ulong)part * s.channels + first * VEC + e) * TAPS + row * KW + kw] = sum;
        }
    }
}
#endif

// OpenCL images with four channels per pixel. A tensor [n, c, h, w] is an image of ceil(c / 4) * w by n * h pixels, with blocks of four
// channels side by side (NC4HW4). A filter [1, o, taps, c] is an image of c by ceil(o / 4) * taps pixels: with FILTER, blocks are
// stacked vertically. Channels are padded with zeros. The host defines the macro that selects a kernel, and A (f32, f16 or bf16).

#define LOAD CAT(load_, A)
#define STORE CAT(CAT(store_, A), _F32)

// Unnormalised coordinates. Kernels check bounds themselves, because an image may be larger than the tensor that it holds.
__constant sampler_t PIXEL = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_NONE | CLK_FILTER_NEAREST;

// The sizes and strides of a tensor.
typedef struct {
    int n, c, h, w;
    long strides[4];
} Tensor4;

// The number of blocks of four channels that hold c channels.
#define BLOCKS(c) (((c) + 3) / 4)

// Returns the index in the innermost dim, whose size is `size`, and sets *i to the index in the outer dims.
static inline int next(int *i, int size)
{
    const int part = *i % size;
    *i /= size;
    return part;
}

static inline float get(float4 v, int q)
{
    return q == 0 ? v.x : q == 1 ? v.y : q == 2 ? v.z : v.w;
}

#ifdef TO_IMAGE
__kernel void image(__global const CAT(A, _t) *x, ulong x_at, __write_only image2d_t y, Tensor4 t)
{
    int i = (int)get_global_id(0);
#ifdef FILTER
    const int w = next(&i, t.w), h = next(&i, t.h), block = next(&i, BLOCKS(t.c)), n = 0;
    const int2 at = (int2)(w, block * t.h + h);
    if (i > 0)
        return;
#else
    const int w = next(&i, t.w), block = next(&i, BLOCKS(t.c)), h = next(&i, t.h), n = i;
    const int2 at = (int2)(block * t.w + w, n * t.h + h);
    if (n >= t.n)
        return;
#endif
    x_at += n * t.strides[0] + h * t.strides[2] + w * t.strides[3];
    const int c = 4 * block;
    float4 v = 0;
    v.x = LOAD(x, x_at + c * t.strides[1]);
    if (c + 1 < t.c)
        v.y = LOAD(x, x_at + (c + 1) * t.strides[1]);
    if (c + 2 < t.c)
        v.z = LOAD(x, x_at + (c + 2) * t.strides[1]);
    if (c + 3 < t.c)
        v.w = LOAD(x, x_at + (c + 3) * t.strides[1]);
    write_imagef(y, at, v);
}
#endif

#ifdef FROM_IMAGE
__kernel void image(__read_only image2d_t x, __global CAT(A, _t) *y, ulong y_at, Tensor4 t)
{
    int i = (int)get_global_id(0);
    const int w = next(&i, t.w), h = next(&i, t.h), block = next(&i, BLOCKS(t.c)), n = i;
    if (n >= t.n)
        return;
    const float4 v = read_imagef(x, PIXEL, (int2)(block * t.w + w, n * t.h + h));
    y_at += n * t.strides[0] + h * t.strides[2] + w * t.strides[3];
    for (int q = 0, c = 4 * block; q < 4 && c < t.c; q++, c++)
        STORE(y, y_at + c * t.strides[1], get(v, q));
}
#endif

#ifdef ELEMENTWISE
// IMAGES declares the parameters of the inputs. READ loads the inputs' pixels at `at` into x0, x1 .. CALL(q) computes the formula
// for channel q and stores the result in `o`.
__kernel void image(IMAGES __global CAT(A, _t) *y, ulong y_at, Tensor4 t SCALARS)
{
    int i = (int)get_global_id(0);
    const int w = next(&i, t.w), h = next(&i, t.h), block = next(&i, BLOCKS(t.c)), n = i;
    if (n >= t.n)
        return;
    const int2 at = (int2)(block * t.w + w, n * t.h + h);
    READ
    y_at += n * t.strides[0] + h * t.strides[2] + w * t.strides[3];
    for (int q = 0, c = 4 * block; q < 4 && c < t.c; q++, c++) {
        float o;
        CALL(q);
        STORE(y, y_at + c * t.strides[1], o);
    }
}
#endif

#ifdef PRODUCT
// Multiplies a matrix [m, k] by an image of [1, n, k, 1]. A work-item computes four rows and four columns. EXTRAS and SCALARS are
// parameters of the epilogue, and CALL(value, i, j) stores the result of the epilogue in `o`.
__kernel void image(__global const CAT(A, _t) *a, ulong a_at, __read_only image2d_t b, __global CAT(Y, _t) *y, ulong y_at,
                    int m, int n, int k, long a_row, long a_col, long y_row, long y_col EXTRAS SCALARS)
{
    int item = (int)get_global_id(0);
    const int block = next(&item, BLOCKS(n)), row = 4 * item;
    if (row >= m)
        return;
    float4 sums[4];
    ulong rows[4];
    for (int r = 0; r < 4; r++) {
        sums[r] = 0;
        rows[r] = a_at + min(row + r, m - 1) * a_row;
    }
    for (int depth = 0; depth < k; depth++) {
        const float4 column = read_imagef(b, PIXEL, (int2)(block, depth));
        for (int r = 0; r < 4; r++)
            sums[r] += LOAD(a, rows[r] + depth * a_col) * column;
    }
    for (int r = 0; r < 4 && row + r < m; r++)
        for (int q = 0, j = 4 * block; q < 4 && j < n; q++, j++) {
            const long i = row + r;
            float o;
            CALL(get(sums[r], q), i, (long)j);
            CAT(CAT(store_, Y), _F32)(y, y_at + i * y_row + j * y_col, o);
        }
}
#endif

#if defined(CONVOLUTION) || defined(DEPTHWISE)
// Sizes and steps of images, taps and windows. Pairs are rows and columns.
typedef struct {
    int n, c, o;
    int image[2], taps[2], grid[2], stride[2], padding[2], dilation[2];
} Conv;

// The number of adjacent windows that a work-item computes.
#define COLUMNS 4

// Computes channels 4 * block to 4 * block + 3 of four adjacent windows of a row; y is contiguous. The filter is [1, o, taps, c], or
// with DEPTHWISE, which convolves each channel separately, [1, c, taps, 1].
__kernel void image(__read_only image2d_t x, __read_only image2d_t filter, __global const CAT(A, _t) *bias, ulong bias_at,
                    int biased, long bias_step, __global CAT(A, _t) *y, ulong y_at, Conv p)
{
    int i = (int)get_global_id(0);
    const int first = COLUMNS * next(&i, (p.grid[1] + COLUMNS - 1) / COLUMNS);
    const int row = next(&i, p.grid[0]), block = next(&i, BLOCKS(p.o)), n = i;
    if (n >= p.n)
        return;
    const int all = p.taps[0] * p.taps[1];
    float4 sums[COLUMNS];
    for (int j = 0; j < COLUMNS; j++)
        sums[j] = 0;
    for (int tap = 0; tap < all; tap++) {
        const int h = row * p.stride[0] - p.padding[0] + tap / p.taps[1] * p.dilation[0];
        if (h < 0 || h >= p.image[0])
            continue;
        const int v = first * p.stride[1] - p.padding[1] + tap % p.taps[1] * p.dilation[1];
#ifdef DEPTHWISE
        const float4 f = read_imagef(filter, PIXEL, (int2)(0, block * all + tap));
        for (int j = 0; j < COLUMNS; j++) {
            const int w = v + j * p.stride[1];
            if (w >= 0 && w < p.image[1])
                sums[j] += f * read_imagef(x, PIXEL, (int2)(block * p.image[1] + w, n * p.image[0] + h));
        }
#else
        for (int c = 0; c < p.c; c += 4) {
            float4 f[4];
            for (int q = 0; q < 4; q++)
                f[q] = c + q < p.c ? read_imagef(filter, PIXEL, (int2)(c + q, block * all + tap)) : (float4)0;
            const int2 start = (int2)(c / 4 * p.image[1], n * p.image[0] + h);
            for (int j = 0; j < COLUMNS; j++) {
                const int w = v + j * p.stride[1];
                if (w >= 0 && w < p.image[1]) {
                    const float4 in = read_imagef(x, PIXEL, start + (int2)(w, 0));
                    sums[j] += in.x * f[0] + in.y * f[1] + in.z * f[2] + in.w * f[3];
                }
            }
        }
#endif
    }
    const long size = (long)p.grid[0] * p.grid[1];
    for (int q = 0, o = 4 * block; q < 4 && o < p.o; q++, o++) {
        const float added = biased ? LOAD(bias, bias_at + o * bias_step) : 0;
        const ulong at = y_at + ((long)n * p.o + o) * size + (long)row * p.grid[1] + first;
        for (int j = 0; j < COLUMNS && first + j < p.grid[1]; j++)
            STORE(y, at + j, get(sums[j], q) + added);
    }
}
#endif

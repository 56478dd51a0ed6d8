// Convolutions of few channels in one launch, without tensor cores. The host defines A (dtype), the taps KH x KW, the strides SH and SW, the dilations DH
// and DW, and T. A work-group computes all output channels of `rows` rows of an image. It keeps the rows that it reads, with their padding, and the whole
// weight in local memory (TILE and TAPS elements). A work-item computes BLOCK output channels of a pixel at a time.
#define BLOCK 4

typedef struct {
    long image[2], grid[2], padding[2], channels, outer, rows, padded; // `padded` is the distance between taps in local memory
    long x[4], w[4], y[4]; // strides
} Sizes;

__kernel __attribute__((reqd_work_group_size(T, 1, 1))) void
conv_small(const __global CAT(A, _t) *x, ulong x_at, const __global CAT(A, _t) *w, ulong w_at, const __global CAT(A, _t) *bias, ulong bias_at,
           __global CAT(A, _t) *out, ulong out_at, const Sizes s, uint biased, long bias_step) {
    __local float tile[TILE];
    __local float taps[TAPS] __attribute__((aligned(16)));
    const uint t = get_local_id(0), columns = s.grid[1], outer = s.outer, padded = s.padded;
    const uint blocks = (s.grid[0] + s.rows - 1) / s.rows, n = get_group_id(0) / blocks, first = get_group_id(0) % blocks * s.rows;
    const uint rows = min((uint)s.rows, (uint)s.grid[0] - first);
    const uint lines = (rows - 1) * SH + (KH - 1) * DH + 1, wide = (columns - 1) * SW + (KW - 1) * DW + 1;
    #pragma unroll 4 // loads overlap
    for (uint i = t; i < (uint)s.channels * lines * wide; i += T) {
        const uint rest = i / wide, c = rest / lines;
        const int h = (int)(first * SH + rest % lines) - (int)s.padding[0], v = (int)(i % wide) - (int)s.padding[1];
        const bool in = h >= 0 && h < s.image[0] && v >= 0 && v < s.image[1];
        tile[i] = in ? CAT(load_, A)(x, x_at + n * s.x[0] + c * s.x[1] + h * s.x[2] + v * s.x[3]) : 0;
    }
    #pragma unroll 4
    for (uint i = t; i < (uint)s.channels * KH * KW * outer; i += T) {
        const uint k = i % (KH * KW), rest = i / (KH * KW), c = rest % (uint)s.channels, o = rest / (uint)s.channels;
        taps[(c * KH * KW + k) * padded + o] = CAT(load_, A)(w, w_at + o * s.w[0] + c * s.w[1] + k / KW * s.w[2] + k % KW * s.w[3]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint i = t; i < rows * columns * ((outer + BLOCK - 1) / BLOCK); i += T) {
        const uint pixel = i % (rows * columns), o = i / (rows * columns) * BLOCK, row = pixel / columns, column = pixel % columns;
        float4 acc = 0;
        __local const float *from = tile + row * SH * wide + column * SW;
        __local const float *by = taps + o;
        for (uint c = 0; c < (uint)s.channels; ++c, from += lines * wide)
            #pragma unroll
            for (int k = 0; k < KH * KW; ++k, by += padded)
                acc = fma((float4)(from[k / KW * DH * wide + k % KW * DW]), *(__local const float4 *)by, acc);
        float each[BLOCK];
        vstore4(acc, 0, each);
        #pragma unroll
        for (int e = 0; e < BLOCK; ++e)
            if (o + e < outer)
                CAT(CAT(store_, A), _F32)(out, out_at + n * s.y[0] + (o + e) * s.y[1] + (first + row) * s.y[2] + column * s.y[3],
                                          each[e] + (biased ? CAT(load_, A)(bias, bias_at + (o + e) * bias_step) : 0));
    }
}

// Channels-last copies of images, for products that read windows of images. The channels of each group are contiguous and padded
// with zeros, to a multiple of 16 bytes or to a size that divides 16 bytes. The image is padded with zeros as well.
//
// The host defines V (an unsigned type of an element's size), and EACH, the number of elements in 16 bytes. A work-group transposes a tile of
// CHANNELS channels by TILE pixels: it reads along rows of the image (with CONTIGUOUS along channels), and writes along channels. If 16 bytes
// hold all channels of a pixel, each work-item reads the elements that it writes, without a tile in local memory.

typedef struct {
    int rows, cols, above, left; // the rows and columns of the copy, and the padding rows above and padding columns to the left of the image
    int image_rows, image_cols;
    int groups, channels, padded; // the number of channels of a group in the image: without padding, and with padding
    int unused;
    long from[5]; // strides of the image in elements: between images, groups, channels, rows, columns
    long to[3]; // strides of the copy in elements: between images, groups, pixels
} sizes;

#define GROUP 256

// Returns an element of the copy: an element of the image, or 0 in the padding.
static inline V element(const __global V* from, const sizes s, uint channel, uint pixel)
{
    const int row = (int)(pixel / s.cols) - s.above, col = (int)(pixel % s.cols) - s.left;
    const bool inside = channel < s.channels && (uint)row < s.image_rows && (uint)col < s.image_cols;
    return inside ? from[channel * s.from[2] + row * s.from[3] + col * s.from[4]] : 0;
}

__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void channels_last(const __global V* restrict from, const ulong first, __global uint4* restrict to, const ulong first_to, const sizes s)
{
    const uint t = get_local_id(0), pixels = (uint)s.rows * s.cols;
    const uint tiles = (pixels + TILE - 1) / TILE, blocks = ((uint)s.padded + CHANNELS - 1) / CHANNELS;
    uint index = get_group_id(0);
    const uint pixel = index % tiles * TILE;
    index /= tiles;
    const uint channel = index % blocks * CHANNELS;
    index /= blocks;
    const uint group = index % s.groups;
    const long image = index / s.groups;
    from += first + image * s.from[0] + group * s.from[1];
    to += first_to / EACH + (image * s.to[0] + group * s.to[1]) / EACH;

#if CHANNELS > EACH
    // Rows have two more elements than a power of two, so that the elements of a column are in different banks.
    __local V tile[CHANNELS][TILE + 2];
    V got[CHANNELS * TILE / GROUP];
    #pragma unroll
    for (uint e = 0; e < CHANNELS * TILE / GROUP; e++) {
        const uint i = t + e * GROUP;
#ifdef CONTIGUOUS
        const uint c = i % CHANNELS, at = i / CHANNELS;
#else
        const uint c = i / TILE, at = i % TILE;
#endif
        got[e] = element(from, s, channel + c, pixel + at);
        tile[c][at] = got[e];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#define ELEMENT(c, at) tile[c][at]
#else
#define ELEMENT(c, at) element(from, s, c, pixel + at)
#endif
    for (uint i = t * EACH; i < TILE * CHANNELS; i += GROUP * EACH) {
        V v[EACH] __attribute__((aligned(16)));
        #pragma unroll
        for (uint u = 0; u < EACH; u++) v[u] = ELEMENT((i + u) % CHANNELS, (i + u) / CHANNELS);
        if (pixel + i / CHANNELS < pixels && channel + i % CHANNELS < s.padded) {
            to[((pixel + i / CHANNELS) * s.to[2] + channel + i % CHANNELS) / EACH] = *(uint4*)v;
        }
    }
}

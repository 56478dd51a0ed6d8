// Implicit im2col for gemm_mma.cl, which this file precedes: the matrix of windows over images is never stored, and its elements are read from the
// images. The elements of a window are ordered by row and column of the tap, then by channel. Images are channels-last, so that a copy of 16 bytes is
// inside one tap. Taps outside an image read zeros. If taps are whole rows of the convolution kernel, CHANNELS is the number of elements of a row, and
// elements behind the first INSIDE elements of a row read as zeros.
//
// Windows are rows of the left matrix (LEFT), columns of the right matrix (B_ALONG_K), or rows of the right matrix, in the order of
// images. WINDOWS is the index in p.v of the first parameter. Sizes and steps of windows are in pixels, strides of images in elements.

#if defined(MMA) && defined(WINDOWS)
#define CHANNELS (uint)p.v[WINDOWS]
#define KERNEL_ROWS (uint)p.v[WINDOWS + 1]
#define KERNEL_COLS (uint)p.v[WINDOWS + 2]
#define DILATION_ROW (int)p.v[WINDOWS + 3]
#define DILATION_COL (int)p.v[WINDOWS + 4]
#define STRIDE_ROW (int)p.v[WINDOWS + 5]
#define STRIDE_COL (int)p.v[WINDOWS + 6]
#define PADDING_ROW (int)p.v[WINDOWS + 7]
#define PADDING_COL (int)p.v[WINDOWS + 8]
#define IMAGE_ROWS (uint)p.v[WINDOWS + 9]
#define IMAGE_COLS (uint)p.v[WINDOWS + 10]
#define GRID (uint)p.v[WINDOWS + 11]
#define GRID_COLS (uint)p.v[WINDOWS + 12]
#define IMAGE (int)p.v[WINDOWS + 13]
#define IMAGE_ROW (int)p.v[WINDOWS + 14]
#define PIXEL (int)p.v[WINDOWS + 15]
#define AFTER p.v[WINDOWS + 16]
#define INSIDE (int)p.v[WINDOWS + 21]
#define TAP_ROW (DILATION_ROW * IMAGE_ROW)
#define TAP_COL (DILATION_COL * PIXEL)

// RESULT_OFFSET(j): the offset, in elements, of the result of window j, or of element j of a window. Without APART, the results of
// one image are contiguous, and AFTER is the distance that is skipped between images. With APART, windows have strides for images,
// rows and columns, and elements have strides for channels and taps. Channels and taps that are only padding to 16 bytes are not
// stored (IS_STORED).
#define IS_STORED(j) true
#if defined(APART) && (LEFT || B_ALONG_K)
#define RESULT_OFFSET(j) result_offset(p, (uint)(j))
static inline long result_offset(const params p, uint window)
{
    const uint image = window / GRID, position = window - image * GRID, row = position / GRID_COLS;
    return image * AFTER + row * p.v[WINDOWS + 17] + (position - row * GRID_COLS) * p.v[WINDOWS + 18];
}
#elif defined(APART)
#define PADDED (uint)p.v[WINDOWS + 19] // the number of elements of a pixel
#define FILLER p.v[WINDOWS + 20] // the number of padding pixels of a tap
#define RESULT_OFFSET(j) ((uint)(j) % PADDED * AFTER + ((uint)(j) / PADDED - (uint)(j) / CHANNELS * FILLER) * p.v[WINDOWS + 18])
#undef IS_STORED
#define IS_STORED(j) ((uint)(j) % PADDED < p.v[WINDOWS + 17] && (uint)(j) % CHANNELS < INSIDE)
#else
#define RESULT_OFFSET(j) ((j) + (uint)(j) / GRID * AFTER)
#endif

// Returns the offset, in bytes, of a window from the first image; it is negative in the padding. `inside` gets a bit for each row of
// taps that is inside the image, and in higher bits one for each column. Images for windows with more than MOST_TAPS rows or columns are
// stored with their padding.
#define MOST_TAPS 16
static inline int window_at(const params p, uint window, uint* inside)
{
    const uint image = window / GRID, position = window - image * GRID, row = position / GRID_COLS;
    int y = (int)row * STRIDE_ROW - PADDING_ROW, x = (int)(position - row * GRID_COLS) * STRIDE_COL - PADDING_COL;
    const int at = ((int)image * IMAGE + y * IMAGE_ROW + x * PIXEL) * BYTES;
    uint bits = 0;
    for (uint r = 0; r < KERNEL_ROWS; r++, y += DILATION_ROW) bits |= (uint)((uint)y < IMAGE_ROWS) << r % MOST_TAPS;
    for (uint c = 0; c < KERNEL_COLS; c++, x += DILATION_COL) bits |= (uint)((uint)x < IMAGE_COLS) << (MOST_TAPS + c % MOST_TAPS);
    *inside = bits;
    return at;
}
// Returns the offset, in bytes, of an element from the start of its window.
static inline int element_at(const params p, uint tap_row, uint tap_col, uint channel)
{
    return ((int)channel + (int)tap_row * TAP_ROW + (int)tap_col * TAP_COL) * BYTES;
}
// Returns the number of bytes that are inside the window, of 16 bytes that begin at an element of a tap.
static inline int bytes_inside(const params p, uint channel) { return clamp((INSIDE - (int)channel) * BYTES, 0, 16); }
static inline uint tap_bits(uint tap_row, uint tap_col) { return 1u << tap_row % MOST_TAPS | 1u << (MOST_TAPS + tap_col % MOST_TAPS); }

// Definitions for the matrix that consists of windows.
#if LEFT
#define OF(x) A_##x
#define FROM from_a
#define FIRST_WINDOW (uint)i0
#define A_FROM WINDOW_FROM
#define A_INSIDE WINDOW_INSIDE
#define A_WHOLE WINDOW_WHOLE
#define FIRST_A FIRST_WINDOWS
#define AGAIN_A AGAIN_WINDOWS
#define NEXT_A NEXT_WINDOWS
#else
#define OF(x) B_##x
#define FROM from_b
#define FIRST_WINDOW (uint)j0
#define B_FROM WINDOW_FROM
#define B_INSIDE WINDOW_INSIDE
#define B_WHOLE WINDOW_WHOLE
#define FIRST_B FIRST_WINDOWS
#define AGAIN_B AGAIN_WINDOWS
#define NEXT_B NEXT_WINDOWS
#endif
#define WINDOW_WHOLE(to, from, step, e) copy_inside(to, WINDOW_FROM(from, step, e), WINDOW_INSIDE(e))

#if LEFT || B_ALONG_K
// Windows along m or n: each copy e of a work-item is for the same window during the whole loop, and moves from tap to tap.
#define WINDOW_FROM(from, step, e) ((from) + (long)window[e])
#define WINDOW_INSIDE(e) ((inside[e] & tap) == tap ? bytes_there : 0)
#define FIRST_WINDOWS                                                                                                  \
    int window[OF(COPIES)];                                                                                            \
    int bytes_there;                                                                                                   \
    uint inside[OF(COPIES)], channel, tap_row, tap_col, tap;                                                           \
    _Pragma("unroll") for (uint e = 0; e < OF(COPIES); e++)                                                            \
        window[e] = window_at(p, FIRST_WINDOW + t / OF(CHUNKS) + e * (THREADS / OF(CHUNKS)), inside + e);              \
    AGAIN_WINDOWS
#define AGAIN_WINDOWS                                                                                                  \
    channel = (uint)from_k + t % OF(CHUNKS) * (16 / BYTES);                                                            \
    tap_row = channel / CHANNELS;                                                                                      \
    channel -= tap_row * CHANNELS;                                                                                     \
    tap_col = tap_row % KERNEL_COLS;                                                                                   \
    tap_row /= KERNEL_COLS;                                                                                            \
    tap = tap_bits(tap_row, tap_col);                                                                                  \
    bytes_there = bytes_inside(p, channel);                                                                            \
    FROM += (long)element_at(p, tap_row, tap_col, channel);
#define NEXT_WINDOWS                                                                                                   \
    FROM += TILE_K * BYTES;                                                                                            \
    channel += TILE_K;                                                                                                 \
    while (channel >= CHANNELS) {                                                                                      \
        channel -= CHANNELS;                                                                                           \
        FROM += (long)((TAP_COL - (int)CHANNELS) * BYTES);                                                             \
        NEXT_TAP_COL                                                                                                   \
        if (++tap_col == KERNEL_COLS) {                                                                                \
            tap_col = 0;                                                                                               \
            tap_row++;                                                                                                 \
            FROM += (long)((TAP_ROW - (int)KERNEL_COLS * TAP_COL) * BYTES);                                            \
            NEXT_TAP_ROW                                                                                               \
        }                                                                                                              \
        tap = tap_bits(tap_row, tap_col);                                                                              \
    }                                                                                                                  \
    bytes_there = bytes_inside(p, channel);

#if LEFT && !B_ALONG_K
// The right matrix is the weight as stored, with strides between its taps. Each slice is inside one tap.
#define WEIGHT_ROW p.v[WINDOWS + 19]
#define WEIGHT_COL p.v[WINDOWS + 20]
#define NEXT_TAP_COL from_b += (WEIGHT_COL - CHANNELS * B_ROW) * BYTES;
#define NEXT_TAP_ROW from_b += (WEIGHT_ROW - KERNEL_COLS * WEIGHT_COL) * BYTES;
#define FIRST_B                                                                                                        \
    const uint first_tap = (uint)from_k / CHANNELS;                                                                    \
    AGAIN_B
#define AGAIN_B                                                                                                        \
    from_b += (j0 + ((uint)from_k - first_tap * CHANNELS) * B_ROW + first_tap / KERNEL_COLS * WEIGHT_ROW               \
               + first_tap % KERNEL_COLS * WEIGHT_COL) * BYTES + t / B_CHUNKS * line_b + t % B_CHUNKS * 16;
#else
#define NEXT_TAP_COL
#define NEXT_TAP_ROW
#endif
#else
// Windows along k: every slice has different windows. Each lane computes the offset of one of the windows that its warp copies, and the
// lanes exchange these offsets by shuffles.
#define WINDOWS_AT_ONCE (B_CHUNKS < 32 ? 32 / B_CHUNKS : 1)
#define LANE_OF_COPY(e) ((e) * WINDOWS_AT_ONCE + lane * WINDOWS_AT_ONCE / 32)
#define WINDOW_FROM(from, step, e) ((from) + (long)(int)of_lane((uint)window, LANE_OF_COPY(e)))
#define WINDOW_INSIDE(e) ((of_lane(inside, LANE_OF_COPY(e)) & tap) == tap ? 16 : 0)
#define FIRST_WINDOWS                                                                                                  \
    uint own_window, inside, tap;                                                                                           \
    int window;                                                                                                        \
    AGAIN_WINDOWS
#define AGAIN_WINDOWS                                                                                                  \
    const uint element = FIRST_WINDOW + t % B_CHUNKS * (16 / BYTES), tap_of = element / CHANNELS;                      \
    FROM += (long)element_at(p, tap_of / KERNEL_COLS, tap_of % KERNEL_COLS, element % CHANNELS);                       \
    tap = tap_bits(tap_of / KERNEL_COLS, tap_of % KERNEL_COLS);                                                        \
    own_window = (uint)from_k + warp * 32 / B_CHUNKS + lane % WINDOWS_AT_ONCE + lane / WINDOWS_AT_ONCE * (THREADS / B_CHUNKS);              \
    window = window_at(p, own_window, &inside);
#define NEXT_WINDOWS window = window_at(p, own_window += TILE_K, &inside);
static inline uint of_lane(uint x, uint lane)
{
    uint of;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(of) : "r"(x), "r"(lane));
    return of;
}
#endif
#endif

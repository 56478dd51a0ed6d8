// A right matrix that is not in memory, for gemm_mma.cl: its elements are read where windows over images have them. Comes before
// that file. A window's elements are ordered by row and column of the tap, then by channel. Images are channels-last and have
// their padding, so that no bounds are checked, and 16 bytes lie in one piece inside of a tap.
//
// Windows are columns (B_ALONG_K), or rows; images follow one another. WINDOWS is where the sizes begin in p.v; strides, in
// elements, are those of taps and of windows, from one to the next and from row to row.

#if defined(MMA) && defined(WINDOWS)
#define CHANNELS (uint)p.v[WINDOWS]
#define KERNEL_COLS (uint)p.v[WINDOWS + 1]
#define TAP_COL (uint)p.v[WINDOWS + 2]
#define TAP_ROW (uint)p.v[WINDOWS + 3]
#define GRID (uint)p.v[WINDOWS + 4]
#define GRID_COLS (uint)p.v[WINDOWS + 5]
#define WINDOW_COL (uint)p.v[WINDOWS + 6]
#define WINDOW_ROW (uint)p.v[WINDOWS + 7]
#define IMAGE (uint)p.v[WINDOWS + 8]
#define AFTER p.v[WINDOWS + 9]
// Where column j is in a row of results. Windows of all images: so much further for each image, or APART: images, their rows and what is
// in these have strides. Elements of a window: by channel, then by tap, of which there are so many, and without the channels that
// are only there to fill 16 bytes.
#define IS_COLUMN(j) true
#if defined(APART)
#define COLUMN(j) column_at(p, (uint)(j))
static inline long column_at(const params p, uint window)
{
    const uint image = window / GRID, place = window - image * GRID, row = place / GRID_COLS;
    return image * AFTER + row * p.v[WINDOWS + 10] + (place - row * GRID_COLS) * p.v[WINDOWS + 11];
}
#elif B_ALONG_K
#define COLUMN(j) ((j) + (uint)(j) / GRID * AFTER)
#else
#define COLUMN(j) ((uint)(j) % CHANNELS * AFTER + (uint)(j) / CHANNELS)
#undef IS_COLUMN
#define IS_COLUMN(j) ((uint)(j) % CHANNELS < p.v[WINDOWS + 10])
#endif

// Bytes from the first window to another, and from a window to an element of it.
static inline uint window_at(const params p, uint window)
{
    const uint image = window / GRID, place = window - image * GRID, row = place / GRID_COLS;
    return (image * IMAGE + row * WINDOW_ROW + (place - row * GRID_COLS) * WINDOW_COL) * BYTES;
}
static inline uint element_at(const params p, uint tap, uint channel)
{
    const uint row = tap / KERNEL_COLS;
    return (channel + row * TAP_ROW + (tap - row * KERNEL_COLS) * TAP_COL) * BYTES;
}

#if B_ALONG_K
// Each copy of a slice is of another window, always the same; its chunk moves from tap to tap.
#define B_FROM(from, step, e) ((from) + window[e])
#define FIRST_B                                                                                                        \
    uint window[B_COPIES], channel, tap;                                                                               \
    _Pragma("unroll") for (uint e = 0; e < B_COPIES; e++)                                                              \
        window[e] = window_at(p, (uint)j0 + t / B_CHUNKS + e * (THREADS / B_CHUNKS));                                  \
    AGAIN_B
#define AGAIN_B                                                                                                        \
    channel = (uint)from_k + t % B_CHUNKS * (16 / BYTES);                                                              \
    tap = channel / CHANNELS;                                                                                          \
    channel -= tap * CHANNELS;                                                                                         \
    from_b += element_at(p, tap, channel);                                                                             \
    tap %= KERNEL_COLS;
#define NEXT_B                                                                                                         \
    from_b += TILE_K * BYTES;                                                                                          \
    channel += TILE_K;                                                                                                 \
    while (channel >= CHANNELS) {                                                                                      \
        channel -= CHANNELS;                                                                                           \
        from_b += (int)(TAP_COL - CHANNELS) * BYTES;                                                                   \
        if (++tap == KERNEL_COLS) {                                                                                    \
            tap = 0;                                                                                                   \
            from_b += (int)(TAP_ROW - KERNEL_COLS * TAP_COL) * BYTES;                                                  \
        }                                                                                                              \
    }
#else
// Each copy of a slice is of another window in each: a work-item finds one of those that its warp copies, and all ask it.
#define AT_ONCE (B_CHUNKS < 32 ? 32 / B_CHUNKS : 1)
#define B_FROM(from, step, e) ((from) + of_lane(window, (e) * AT_ONCE + lane * AT_ONCE / 32))
#define FIRST_B                                                                                                        \
    uint found, window;                                                                                                \
    AGAIN_B
#define AGAIN_B                                                                                                        \
    const uint element = (uint)j0 + t % B_CHUNKS * (16 / BYTES);                                                       \
    from_b += element_at(p, element / CHANNELS, element % CHANNELS);                                                   \
    found = (uint)from_k + warp * 32 / B_CHUNKS + lane % AT_ONCE + lane / AT_ONCE * (THREADS / B_CHUNKS);              \
    window = window_at(p, found);
#define NEXT_B window = window_at(p, found += TILE_K);
static inline uint of_lane(uint x, uint lane)
{
    uint of;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(of) : "r"(x), "r"(lane));
    return of;
}
#endif
#endif

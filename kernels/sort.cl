// Stable sorting along a dim of a strided tensor (follows key.cl), and binary search in sorted lines (SEARCH, which needs no key.cl). The
// host defines A (dtype), V (an unsigned type of the element's size), INDEX_TYPE (uint or ulong), NK (rank), IDX, FIRST if the launch
// reads the elements, FINAL if it writes the results, FROM if the indices are read from a tensor, and one of:
//   BLOCKS  sorts every block of BLOCK elements, with RADIX by the digits from bit FROM_BIT to bit TO_BIT
//   MERGE   merges pairs of sorted runs of `run` elements each
//   COUNT   computes the histogram of each tile: for each value of the byte that starts at bit `run`, the number of keys with this value
//   SCATTER moves the elements of whole lines into the order of that byte; `counts` holds the running sums of the histograms
// The keys and indices of line l are the elements [l * n, l * n + n) of `keys` and `at`; results are written to `keys_b` and `at_b`.
// Equal keys stay in the order of their indices.

#ifndef SEARCH
STRIDED_DIMS(Rest, NK)

#define PARAMETERS                                                                                                     \
    __global const CAT(A, _t) *x, ulong x_at, __global V *y, ulong y_at, __global long *indices, ulong indices_at,       \
        __global Key *keys, ulong keys_at, __global INDEX_TYPE *at, ulong at_at, __global Key *keys_b, ulong keys_b_at,     \
        __global INDEX_TYPE *at_b, ulong at_b_at, __global INDEX_TYPE *counts, ulong counts_at, __global const long *from_indices, ulong from_at,           \
        Rest rest, ulong lines_, ulong n_, long stride, ulong inner_, ulong run_, ulong flip_
#define NUMBERS                                                                                                        \
    const IDX lines = (IDX)lines_, n = (IDX)n_, inner = (IDX)inner_;                                                   \
    const Key flip = (Key)flip_

#ifdef FROM
#define INDEX(line, p) from_indices[from_at + (line) * n + (p)]
#else
#define INDEX(line, p) (long)(p)
#endif
// Writes element i of the sorted line: the element with index p in the unsorted line.
#define PUT(line, i, p)                                                                                                \
    {                                                                                                                  \
        const long put_from = (long)x_at + at_Rest(&rest, line) + (long)(p) * stride;                                  \
        const IDX put_at = (line) / inner * inner * n + (line) % inner + (i) * inner;                                  \
        y[y_at + put_at] = ((__global const V *)x)[put_from];                                                          \
        indices[indices_at + put_at] = INDEX(line, p);                                                                 \
    }

// The tile of a group, or of a CPU work-item: tile `segment` of the `segments` tiles of a line, with `len` elements from element `first`
// on. KEY_AT(s) is the key of element s of the tile.
#ifdef IS_CPU
#define TILE_ID get_global_id(0)
#else
#define TILE_ID get_group_id(0)
#endif
#define TILES                                                                                                          \
    NUMBERS;                                                                                                           \
    const IDX segments = (n + TILE - 1) / TILE, group = (IDX)TILE_ID, line = group / segments;                         \
    const IDX segment = group % segments, first = segment * TILE;                                                      \
    const uint lid = get_local_id(0), len = (uint)min(n - first, (IDX)TILE);                                           \
    const long from = (long)x_at + at_Rest(&rest, line)
#ifdef FIRST
#define KEY_AT(s) KEY_OF(CAT(load_, A)(x, (ulong)(from + (long)(first + (s)) * stride)))
#else
#define KEY_AT(s) keys[keys_at + line * n + first + (s)]
#endif
// The position in `counts` of this tile's count of a byte value. Running sums are ordered by byte value, and for each value by tile.
#define COUNT_AT(byte) (line * 256 * segments + (byte) * segments + segment)
#endif

#if defined(BLOCKS) || defined(SCATTER)
#if defined(IS_CPU) && defined(SCATTER)
__kernel void sort_tiles(PARAMETERS) {
    TILES;
    if (line >= lines)
        return;
    INDEX_TYPE next[256];
    for (uint b = 0; b < 256; ++b)
        next[b] = COUNT_AT(b) > line * 256 * segments ? counts[counts_at + COUNT_AT(b) - 1] : 0;
    for (uint s = 0; s < len; ++s) {
        const Key key = KEY_AT(s);
        const IDX to = (IDX)next[(uint)(key >> (uint)run_) & 255]++;
#ifdef FIRST
        const INDEX_TYPE index = (INDEX_TYPE)(first + s);
#else
        const INDEX_TYPE index = at[at_at + line * n + first + s];
#endif
#ifdef FINAL
        PUT(line, to, index);
#else
        keys_b[keys_b_at + line * n + to] = key;
        at_b[at_b_at + line * n + to] = index;
#endif
    }
}
#elif defined(IS_CPU)
// Each work-item sorts a block by bottom-up merging, alternating between the two pairs of buffers.
__kernel void sort_blocks(PARAMETERS) {
    NUMBERS;
    const IDX segments = (n + BLOCK - 1) / BLOCK, item = (IDX)get_global_id(0);
    const IDX line = item / segments, first = item % segments * BLOCK, len = min(n - first, (IDX)BLOCK);
    if (line >= lines)
        return;
    const long from = (long)x_at + at_Rest(&rest, line);
    __global Key *k = keys_b + keys_b_at + line * n + first, *l = keys + keys_at + line * n + first;
    __global INDEX_TYPE *a = at_b + at_b_at + line * n + first, *b = at + at_at + line * n + first;
    for (IDX i = 0; i < len; ++i) {
        k[i] = KEY_OF(CAT(load_, A)(x, (ulong)(from + (long)(first + i) * stride)));
        a[i] = (INDEX_TYPE)(first + i);
    }
    for (IDX run = 1; run < BLOCK; run *= 2) {
        for (IDX start = 0; start < len; start += 2 * run) {
            const IDX middle = min(start + run, len), end = min(start + 2 * run, len);
            IDX i = start, j = middle;
            for (IDX o = start; o < end; ++o) {
                const int left = j >= end || (i < middle && k[i] <= k[j]);
                const IDX taken = left ? i++ : j++;
                l[o] = k[taken];
                b[o] = a[taken];
            }
        }
        __global Key *const other_keys = k;
        __global INDEX_TYPE *const other_at = a;
        k = l;
        a = b;
        l = other_keys;
        b = other_at;
    }
#ifdef FINAL
    for (IDX i = 0; i < len; ++i)
        PUT(line, i, a[i]);
#endif
}
#elif defined(RADIX)
// Radix sort of one tile in local memory by digits of four bits, the lowest digit first. Each work-item has ITEMS consecutive elements, and counts its
// elements with each digit. The running sum of the counts, ordered by digit and then by work-item, is the new position of each element, so equal digits
// stay in order. SCATTER sorts a tile by one byte, and then moves each run of equal bytes to its final position in the line.
#define ITEMS (TILE / GROUP)
#define DIGIT(key, bit) ((uint)((key) >> (bit)) & 15)
// Padding: without it, accesses that are a power of two apart would use the same bank of local memory. Indices are stored as pairs of 16 bits.
#define PADDED(p) ((p) + ((p) >> 5))
#define PADDED_INDEX(p) ((p) + ((p) >> 6) * 2)
// The counts of digits d and d + 8 share one word, so one running sum adds up both. Row d holds the counts of all work-items; the count
// of work-item i is at SWIZZLED(i). This order avoids bank conflicts both when counting and when summing eight consecutive words.
typedef union {
    ushort each[2];
    uint both;
} Counts;
#define SWIZZLED(i) ((i) ^ ((i) % GROUP >> 3 & 4))
#define COUNT_OF(digit) counted[((digit) & 7) * GROUP].each[(digit) >> 3]
// For element i of a work-item: its old position in the tile (12 bits), and the number of the work-item's elements before it that
// have the same digit (4 bits).
#define OLD_POSITION(i) (packed[(i) / 2] >> (i) % 2 * 16 & 0xfff)
#define RANK(i) (packed[(i) / 2] >> ((i) % 2 * 16 + 12) & 15)
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void sort_tiles(PARAMETERS) {
    TILES;
    __local Key k[PADDED(TILE)];
    __local union {
        ushort each[PADDED_INDEX(TILE)];
        uint two[PADDED_INDEX(TILE) / 2];
    } a;
    __local uint4 of_digits[2 * GROUP];
    __local uint sums[GROUP], rows[GROUP / 16];
    // Pointers to the first element of a work-item, so that offsets from them are constants in the instructions.
    __local Key *const own_k = k + PADDED(lid * ITEMS);
    __local uint *const own_a = a.two + PADDED_INDEX(lid * ITEMS) / 2;
    __local Counts *const counted = (__local Counts *)of_digits + SWIZZLED(lid);
    __local uint4 *const low = of_digits + SWIZZLED(lid * 8) / 4, *const high = of_digits + SWIZZLED(lid * 8 + 4) / 4;
    __local const uint *const own_sums = sums + lid / 16 * 16;
    #pragma unroll 8
    for (uint i = 0; i < ITEMS; ++i) {
        const uint s = i * GROUP + lid;
        // Padding elements have the largest key and the last positions, so they stay behind all elements of the tile.
        k[PADDED(s)] = s < len ? KEY_AT(s) : (Key)-1;
        a.each[PADDED_INDEX(s)] = (ushort)s;
    }
    for (uint bit = FROM_BIT; bit < TO_BIT; bit += 4) {
        barrier(CLK_LOCAL_MEM_FENCE);
        #pragma unroll
        for (uint w = 0; w < 8; ++w) counted[w * GROUP].both = 0;
        Key key[ITEMS];
        uint packed[ITEMS / 2];
        #pragma unroll
        for (uint i = 0; i < ITEMS / 2; ++i) packed[i] = own_a[i];
        #pragma unroll
        for (uint i = 0; i < ITEMS; ++i) {
            key[i] = own_k[i];
            packed[i / 2] |= (uint)COUNT_OF(DIGIT(key[i], bit))++ << (i % 2 * 16 + 12);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        // A running sum over eight words of each work-item, then over sixteen work-items, then over all work-items.
        uint4 first_four = *low, last_four = *high;
        first_four.yw += first_four.xz;
        first_four.zw += first_four.y;
        last_four.yw += last_four.xz;
        last_four.zw += last_four.y;
        last_four += first_four.w;
        const uint sum = last_four.w;
        sums[lid] = sum;
        barrier(CLK_LOCAL_MEM_FENCE);
        uint before = 0, total = 0;
        #pragma unroll
        for (uint i = 0; i < 16; ++i) {
            const uint other = own_sums[i];
            before += i < lid % 16 ? other : 0;
        }
        if (lid % 16 == 15) rows[lid / 16] = before + sum;
        barrier(CLK_LOCAL_MEM_FENCE);
        #pragma unroll
        for (uint r = 0; r < GROUP / 16; ++r) {
            const uint other = rows[r];
            before += r < lid / 16 ? other : 0;
            total += other;
        }
        before += total << 16; // digits 8 to 15, in the upper halves, come after digits 0 to 7
        *low = before + (uint4)(0, first_four.xyz);
        *high = before + (uint4)(first_four.w, last_four.xyz);
        barrier(CLK_LOCAL_MEM_FENCE);
        // This equals `bit`, because the upper half of run_ is 0, but compilers cannot know that. If they knew, they would keep the
        // addresses of the counts in registers, and fewer groups would run at once.
        const uint again = bit + (uint)(run_ >> 32);
        #pragma unroll
        for (uint i = 0; i < ITEMS; ++i) {
            const uint to = RANK(i) + COUNT_OF(DIGIT(key[i], again));
            k[PADDED(to)] = key[i];
            a.each[PADDED_INDEX(to)] = (ushort)OLD_POSITION(i);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#ifdef SCATTER
#define BYTE(s) ((uint)(k[PADDED(s)] >> (uint)run_) & 255)
    // For each byte value, the number that converts a position in the tile to a position in the line by addition.
    __local INDEX_TYPE moved[256];
    for (uint s = lid; s < len; s += GROUP) {
        if (s == 0 || BYTE(s) != BYTE(s - 1)) {
            const IDX own = COUNT_AT(BYTE(s));
            moved[BYTE(s)] = (own > line * 256 * segments ? counts[counts_at + own - 1] : 0) - s;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
    for (uint s = lid; s < len; s += GROUP) {
        INDEX_TYPE index = (INDEX_TYPE)(first + a.each[PADDED_INDEX(s)]);
        IDX to = first + s;
#ifdef SCATTER
        to = (IDX)(INDEX_TYPE)(moved[BYTE(s)] + s);
#ifndef FIRST
        index = at[at_at + line * n + index];
#endif
#endif
#ifdef FINAL
        PUT(line, to, index);
#else
        keys_b[keys_b_at + line * n + to] = k[PADDED(s)];
        at_b[at_b_at + line * n + to] = index;
#endif
    }
}
#else
// A group sorts the TILE elements of TILE / BLOCK blocks in local memory, with Batcher's bitonic network.
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void sort_blocks(PARAMETERS) {
    NUMBERS;
    const IDX segments = (n + BLOCK - 1) / BLOCK, first = (IDX)get_group_id(0) * (TILE / BLOCK);
    const uint lid = get_local_id(0);
    __local Key k[TILE];
    __local INDEX_TYPE a[TILE];
    for (uint s = lid; s < TILE; s += GROUP) {
        const IDX segment = first + s / BLOCK, line = segment / segments;
        const IDX i = segment % segments * BLOCK + s % BLOCK;
        // Padding elements of the last block are sorted behind all elements.
        k[s] = (Key)-1;
        a[s] = (INDEX_TYPE)-1;
        if (line < lines && i < n) {
            const long from = (long)x_at + at_Rest(&rest, line) + (long)i * stride;
            k[s] = KEY_OF(CAT(load_, A)(x, (ulong)from));
            a[s] = (INDEX_TYPE)i;
        }
    }
    for (uint size = 2; size <= BLOCK; size *= 2) {
        for (uint step = size / 2; step > 0; step /= 2) {
            barrier(CLK_LOCAL_MEM_FENCE);
            for (uint p = lid; p < TILE / 2; p += GROUP) {
                const uint i = 2 * p - (p & (step - 1)), j = i + step;
                const int up = (i & size & (BLOCK - 1)) == 0;
                const Key ki = k[i], kj = k[j];
                const INDEX_TYPE ai = a[i], aj = a[j];
                const int after = ki > kj || (ki == kj && ai > aj);
                if (after == up) {
                    k[i] = kj;
                    k[j] = ki;
                    a[i] = aj;
                    a[j] = ai;
                }
            }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint s = lid; s < TILE; s += GROUP) {
        const IDX segment = first + s / BLOCK, line = segment / segments;
        const IDX i = segment % segments * BLOCK + s % BLOCK;
        if (line < lines && i < n) {
#ifdef FINAL
            PUT(line, i, a[s]);
#else
            keys_b[keys_b_at + line * n + i] = k[s];
            at_b[at_b_at + line * n + i] = a[s];
#endif
        }
    }
}
#endif
#endif

#if defined(COUNT) && defined(IS_CPU)
__kernel void sort_count(PARAMETERS) {
    TILES;
    if (line >= lines)
        return;
    uint bytes[256];
    for (uint b = 0; b < 256; ++b)
        bytes[b] = 0;
    for (uint s = 0; s < len; ++s)
        ++bytes[(uint)(KEY_AT(s) >> (uint)run_) & 255];
    for (uint b = 0; b < 256; ++b)
        counts[counts_at + COUNT_AT(b)] = bytes[b];
}
#elif defined(COUNT)
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void sort_count(PARAMETERS) {
    TILES;
    __local uint bytes[256];
    for (uint b = lid; b < 256; b += GROUP) bytes[b] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint s = lid; s < len; s += GROUP) atomic_inc(&bytes[(uint)(KEY_AT(s) >> (uint)run_) & 255]);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint b = lid; b < 256; b += GROUP) counts[counts_at + COUNT_AT(b)] = bytes[b];
}
#endif

#ifdef MERGE
// Merges pairs of sorted runs of `run` elements. The new position of an element is its position in its own run plus the number of
// elements of the other run that precede it, which a binary search finds.
__kernel void sort_merge(PARAMETERS) {
    NUMBERS;
    const IDX p = (IDX)get_global_id(0), line = p / n, i = p % n, run = (IDX)run_;
    if (line >= lines)
        return;
    __global const Key *k = keys + keys_at + line * n;
    const IDX start = i / (2 * run) * (2 * run), middle = min(start + run, n), end = min(start + 2 * run, n);
    const int left = i < middle;
    const Key key = k[i];
    IDX low = left ? middle : start, high = left ? end : middle;
    while (low < high) {
        const IDX between = low + (high - low) / 2;
        const Key other = k[between];
        if (left ? other < key : other <= key)
            low = between + 1;
        else
            high = between;
    }
    const IDX to = i + low - middle;
    const INDEX_TYPE own = at[at_at + line * n + i];
#ifdef FINAL
    PUT(line, to, own);
#else
    keys_b[keys_b_at + line * n + to] = key;
    at_b[at_b_at + line * n + to] = own;
#endif
}
#endif

#ifdef SEARCH
// For each value, the number of elements of a sorted line that are less than the value, or with RIGHT at most the value. With
// FINDS, whether the line contains the value.
#ifdef FINDS
#define RESULT uchar
#else
#define RESULT long
#endif
typedef struct {
    ulong size[NK];
    long x[NK], v[NK];
} Both;
__kernel void search(__global const CAT(A, _t) *x, ulong x_at, __global const CAT(A, _t) *v, ulong v_at,
                     __global RESULT *y, ulong y_at, Both walk, ulong count, ulong n, long stride) {
    const IDX p = (IDX)get_global_id(0);
    if (p >= (IDX)count)
        return;
    IDX i = p;
    for (int k = NK - 1; k >= 0; --k) {
        const IDX r = NEXT(i, walk.size, k);
        x_at += (long)r * walk.x[k];
        v_at += (long)r * walk.v[k];
    }
    ulong low = 0, high = n;
    while (low < high) {
        const ulong between = low + (high - low) / 2;
#ifdef RIGHT
        const int beyond = CAT(load_, A)(x, x_at + (long)between * stride) > CAT(load_, A)(v, v_at);
#else
        const int beyond = CAT(load_, A)(x, x_at + (long)between * stride) >= CAT(load_, A)(v, v_at);
#endif
        if (beyond)
            high = between;
        else
            low = between + 1;
    }
#ifdef FINDS
    y[y_at + p] = low < n && CAT(load_, A)(x, x_at + (long)low * stride) == CAT(load_, A)(v, v_at);
#else
    y[y_at + p] = (long)low;
#endif
}
#endif

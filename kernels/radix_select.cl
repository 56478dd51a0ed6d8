// Radix selection from few long lines, which are cut into slices: the element of one rank, or the first k elements in the order of their
// indices. Follows key.cl. The host defines A (dtype), V (an unsigned type of the element's size), NK (rank), IDX, GROUP (1 on CPUs),
// BITS (the number of bits of a digit), BINS (the number of values of a digit), FLOATS if elements may be NaN, and one of:
//   COUNT   the histogram of a digit (bits `low` to `high` of the keys) of each slice. If `low` equals `high`, the number of keys that
//           are less than the found key, and the number of equal keys. The last bin counts NaN.
//   NARROW  finds the digit that the element of the rank has
//   COLLECT writes the elements: with TOP, all elements less than the found key and the first of the equal elements; otherwise the
//           element of the rank
//   WHOLE   all stages for the element of one rank, on CPUs: each work-item searches one line
// The state of a line: the digits found so far, the rank (from 1) among the elements with these digits, and the last digit.

STRIDED_DIMS(Rest, NK)

#define FOUND state[state_at + 4 * line]
#define NEED state[state_at + 4 * line + 1]
#define LAST_DIGIT state[state_at + 4 * line + 2]

// The rule for the rank; NaN ranks last. PLAIN: the k-th element, counted from 1. OR_NAN: the k-th element, or the first NaN if there is
// any. NAN_MEDIAN: the median of the elements that are not NaN. Otherwise the rank, counted from 0, is read from `ranks`.
#define PLAIN 0
#define OR_NAN 1
#define NAN_MEDIAN 2

#define PARAMETERS                                                                                                     \
    __global const CAT(A, _t) *x, ulong x_at, __global V *y, ulong y_at, __global long *indices, ulong indices_at,       \
        __global const long *ranks, ulong ranks_at, __global uint *counts, ulong counts_at, __global ulong *state,       \
        ulong state_at, Rest rest, ulong lines_, ulong n_, long stride, ulong k_, uint slices, uint rule, uint begins, uint low,      \
        uint high, ulong flip_
#define KEY(i) KEY_OF(CAT(load_, A)(x, (ulong)(start + (long)(i) * stride)))
#define COUNT_AT(slice, bin) (counts_at + ((ulong)line * slices + (slice)) * (BINS + 1) + (bin))
// The slice of a CPU work-item, or of a GPU work-group.
#define SLICE                                                                                                          \
    const IDX n = (IDX)n_, line = (IDX)get_group_id(0) / slices, slice = (IDX)get_group_id(0) % slices;                 \
    const IDX share = n / slices, rest_of = n % slices;                                                                \
    const IDX first = slice * share + min(slice, rest_of), end = first + share + (slice < rest_of);                    \
    const long start = (long)x_at + at_Rest(&rest, line);                                                              \
    const Key flip = (Key)flip_, found = begins ? 0 : (Key)FOUND;                                                      \
    const uint lid = get_local_id(0)

// MATCHES: whether a key has the digits found so far. DIGIT: the next digit of a key.
#define MATCHES(key) (classes || ((key) >> (high - 1)) >> 1 == found)
#define DIGIT(key) (classes ? (uint)((key) >> low > found) + (uint)((key) >> low >= found) : (uint)((key) >> low) & mask)
#define CLASSES const int classes = low == high; const uint mask = (1u << (high - low)) - 1

#ifdef IS_CPU
// Counts the digits of the elements `first` to `end` of a line in two alternating histograms. Adjacent elements often have the same
// digit, so with a single histogram, each count would wait for the previous count.
static inline void count_digits(uint (*bins)[BINS + 1], __global const CAT(A, _t) *x, long start, long stride, IDX first, IDX end,
                                int begins, Key found, uint low, uint high, Key flip) {
    CLASSES;
    for (uint b = 0; b <= BINS; ++b)
        bins[0][b] = bins[1][b] = 0;
    IDX i = first;
    if (stride == 1 && !classes) {
        Key keys[16];
        uint digits[16];
        for (; i + 16 <= end; i += 16) {
            const CAT(KEY_T, 16) key = KEY16_OF(CAT(load16_, A)(x, (ulong)start + i));
            if (begins) {
                vstore16(key, 0, keys);
                #pragma unroll
                for (uint k = 0; k < 16; ++k)
                    ++bins[k & 1][DIGIT(keys[k])];
#ifdef FLOATS
                if (any(key == (Key)-1))
                    for (uint k = 0; k < 16; ++k)
                        bins[0][BINS] += keys[k] == (Key)-1;
#endif
            } else if (any(key >> (high - 1) >> 1 == found)) {
                vstore16(key, 0, keys);
                uint count = 0;
                #pragma unroll
                for (uint k = 0; k < 16; ++k) {
                    digits[count] = DIGIT(keys[k]);
                    count += MATCHES(keys[k]);
                }
                for (uint k = 0; k < count; ++k)
                    ++bins[k & 1][digits[k]];
            }
        }
    }
    for (; i < end; ++i) {
        const Key key = KEY(i);
        if (MATCHES(key))
            ++bins[i & 1][DIGIT(key)];
#ifdef FLOATS
        bins[0][BINS] += key == (Key)-1;
#endif
    }
    for (uint b = 0; b <= BINS; ++b)
        bins[0][b] += bins[1][b];
}
#endif

#ifdef COUNT
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void select_count(PARAMETERS) {
    SLICE;
#ifdef IS_CPU
    uint bins[2][BINS + 1];
    count_digits(bins, x, start, stride, first, end, begins, found, low, high, flip);
    for (uint b = 0; b <= BINS; ++b)
        counts[COUNT_AT(slice, b)] = bins[0][b];
#else
    CLASSES;
    __local uint bins[BINS + 1];
    for (uint b = lid; b <= BINS; b += GROUP)
        bins[b] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (IDX tile = first; tile < end; tile += GROUP * 8) {
        Key key[8];
        #pragma unroll
        for (uint s = 0; s < 8; ++s)
            key[s] = tile + s * GROUP + lid < end ? KEY(tile + s * GROUP + lid) : 0;
        #pragma unroll
        for (uint s = 0; s < 8; ++s) {
            if (tile + s * GROUP + lid >= end)
                continue;
            if (MATCHES(key[s]))
                atomic_inc(&bins[DIGIT(key[s])]);
#ifdef FLOATS
            if (key[s] == (Key)-1)
                atomic_inc(&bins[BINS]);
#endif
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint b = lid; b <= BINS; b += GROUP)
        counts[COUNT_AT(slice, b)] = bins[b];
#endif
}
#endif

// The rank, counted from 1, in a line that contains `nans` NaN.
#define RANK(nans)                                                                                                     \
    (rule == PLAIN || (rule == OR_NAN && (nans) == 0) ? k_                                                             \
     : rule == OR_NAN                                 ? n_ - (nans) + 1                                                \
     : rule == NAN_MEDIAN                             ? (n_ - 1 - min((ulong)(nans), n_ - 1)) / 2 + 1                   \
                                                      : (ulong)ranks[ranks_at + line] + 1)

#ifdef NARROW
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void select_narrow(PARAMETERS) {
    const IDX line = (IDX)get_group_id(0);
    const uint lid = get_local_id(0);
    __local ulong bins[BINS + 1], sums[16];
    for (uint b = lid; b <= BINS; b += GROUP) {
        ulong sum = 0;
        #pragma unroll 8
        for (uint s = 0; s < slices; ++s)
            sum += counts[COUNT_AT(s, b)];
        bins[b] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint b = lid; b < 16; b += GROUP) {
        ulong sum = 0;
        for (uint k = 0; k < BINS / 16; ++k)
            sum += bins[b * (BINS / 16) + k];
        sums[b] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid == 0) {
        ulong need = begins ? RANK(bins[BINS]) : NEED;
        uint row = 0;
        while (need > sums[row])
            need -= sums[row++];
        uint digit = row * (BINS / 16);
        while (need > bins[digit])
            need -= bins[digit++];
        FOUND = (begins ? 0 : FOUND << (high - low)) | digit;
        NEED = need;
        LAST_DIGIT = digit;
    }
}
#endif

// PUT writes element i of the line as result p of the RESULTS results of the line.
#ifdef TOP
#define RESULTS k_
#else
#define RESULTS 1
#endif
#define PUT(p, i)                                                                                                      \
    {                                                                                                                  \
        const ulong put_at = (ulong)line * RESULTS + (p);                                                                  \
        y[y_at + put_at] = ((__global const V *)x)[start + (long)(i) * stride];                                        \
        indices[indices_at + put_at] = (long)(i);                                                                      \
    }
// PUT_EQUAL writes an element that is preceded by `less` smaller and `same` equal elements of its line.
#ifdef TOP
#define IS_LESS(key) ((key) >> low < found)
#define EQUAL_BIN 1
#define PUT_EQUAL(i)                                                                                                   \
    if (same < need)                                                                                                   \
    PUT(less + same, i)
#else
#define IS_LESS(key) 0
#define EQUAL_BIN LAST_DIGIT
#define PUT_EQUAL(i)                                                                                                   \
    if (same + 1 == need)                                                                                              \
    PUT(0, i)
#endif

#ifdef WHOLE
// Each CPU work-item selects from one whole line.
__kernel void select_whole(PARAMETERS) {
    const IDX n = (IDX)n_, line = (IDX)get_global_id(0);
    if (line >= (IDX)lines_)
        return;
    const long start = (long)x_at + at_Rest(&rest, line);
    const Key flip = (Key)flip_;
    Key found = 0;
    ulong need = 0;
    uint bins[2][BINS + 1];
    for (uint to = high; to > low;) {
        const uint from = to - min(to - low, (uint)BITS);
        count_digits(bins, x, start, stride, 0, n, to == high, found, from, to, flip);
        if (to == high)
            need = RANK(bins[0][BINS]);
        uint digit = 0;
        while (need > bins[0][digit])
            need -= bins[0][digit++];
        found = (to == high ? 0 : found << (to - from)) | digit;
        to = from;
    }
    for (IDX i = 0; need > 0; ++i)
        if (KEY(i) >> low == found && --need == 0)
            PUT(0, i);
}
#endif

#ifdef COLLECT
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void select_collect(PARAMETERS) {
    SLICE;
    const ulong need = NEED;
    const ulong same_here = counts[COUNT_AT(slice, EQUAL_BIN)];
    ulong less = 0, same = 0;
#ifdef IS_CPU
    for (uint s = 0; s < slice; ++s) {
        same += counts[COUNT_AT(s, EQUAL_BIN)];
        less += counts[COUNT_AT(s, 0)];
    }
#ifndef TOP
    if (same >= need || same + same_here < need)
        return;
#endif
    for (IDX i = first; i < end;) {
        IDX stop = min(i + 16, end);
        if (stride == 1 && i + 16 <= end) {
            const CAT(KEY_T, 16) key = KEY16_OF(CAT(load16_, A)(x, (ulong)start + i)) >> low;
#ifdef TOP
            if (!any(key <= found)) {
#else
            if (!any(key == found)) {
#endif
                i = stop;
                continue;
            }
        }
        for (; i < stop; ++i) {
            const Key key = KEY(i);
            if (IS_LESS(key)) {
                PUT(less + min(same, need), i);
                ++less;
            } else if (key >> low == found) {
                PUT_EQUAL(i);
                ++same;
            }
        }
    }
#else
#define PER 8
#define TILE (GROUP * PER)
#define PLUS(a, b) ((a) + (b))
    const uint lane = lid, lanes = GROUP, step = 1;
    __local ulong scratch[GROUP];
    // The flag is 1 for a smaller element and 16 for an equal element.
    __local uchar flags[TILE];
    __local uint sums[2][GROUP];
    for (uint s = lid; s < slice; s += GROUP) {
        same += counts[COUNT_AT(s, EQUAL_BIN)];
        less += counts[COUNT_AT(s, 0)];
    }
    FOLD(PLUS, same);
    FOLD(PLUS, less);
#ifndef TOP
    if (same >= need || same + same_here < need)
        return;
#endif
    for (IDX tile = first; tile < end; tile += TILE) {
        // Work-items read interleaved elements, so that loads are coalesced, and then process consecutive elements.
        #pragma unroll
        for (uint s = 0; s < PER; ++s) {
            const IDX i = tile + s * GROUP + lid;
            uchar flag = 0;
            if (i < end) {
                const Key key = KEY(i);
                flag = IS_LESS(key) ? 1 : key >> low == found ? 16 : 0;
            }
            flags[s * GROUP + lid] = flag;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        uchar own[PER];
        vstore8(vload8(lid, flags), 0, own);
        // One sum holds both counts: smaller elements in the low 16 bits, equal elements in the high bits.
        uint count = 0, now = 0;
        #pragma unroll
        for (uint s = 0; s < PER; ++s)
            count += own[s] & 1 | (uint)(own[s] >> 4) << 16;
        sums[0][lid] = count;
        for (uint by = 1; by < GROUP; by *= 2, now = 1 - now) {
            barrier(CLK_LOCAL_MEM_FENCE);
            sums[1 - now][lid] = sums[now][lid] + (lid >= by ? sums[now][lid - by] : 0);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        const uint all = sums[now][GROUP - 1], before = sums[now][lid] - count;
        const ulong less_before = less, same_before = same;
        less += before & 0xffff;
        same += before >> 16;
        for (uint s = 0; s < PER; ++s) {
            const IDX i = tile + lid * PER + s;
            if (own[s] & 1) {
                PUT(less + min(same, need), i);
                ++less;
            } else if (own[s]) {
                PUT_EQUAL(i);
                ++same;
            }
        }
        less = less_before + (all & 0xffff);
        same = same_before + (all >> 16);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
#endif
}
#endif

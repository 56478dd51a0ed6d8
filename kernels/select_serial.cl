// The first k elements in order (k at most CAP) along a dim of a strided tensor, on CPUs. A work-item processes a slice of a line.
// Follows key.cl. The host defines A (dtype), V (an unsigned type of the element's size), INDEX_TYPE (uint or ulong), NK (rank), IDX,
// CAP (8 or 32), and FROM if the indices are read from a tensor. Equal keys are ordered by their indices.

STRIDED_DIMS(Rest, NK)

#define LANES (2 * CAP)
// The number of elements from which the first bound for the k-th key is computed.
#define SAMPLE 4096

// Inserts a key behind equal keys into the first `held` keys, and keeps at most k keys. Returns the new number of keys.
static inline uint insert(Key *kept, INDEX_TYPE *at, uint held, uint k, Key key, INDEX_TYPE index) {
    if (held == k && kept[k - 1] <= key)
        return held;
    uint j = min(held, k - 1);
    for (; j > 0 && kept[j - 1] > key; --j) {
        kept[j] = kept[j - 1];
        at[j] = at[j - 1];
    }
    kept[j] = key;
    at[j] = index;
    return min(held + 1, k);
}

__kernel void choose(__global const CAT(A, _t) *x, ulong x_at, __global V *y, ulong y_at, __global long *indices, ulong indices_at,
                     __global const long *from, ulong from_at, Rest rest, ulong lines_, ulong n_, long stride, ulong inner_,
                     ulong k_, uint slices, ulong flip_) {
    const IDX n = (IDX)n_, inner = (IDX)inner_, line = (IDX)get_global_id(0) / slices, slice = (IDX)get_global_id(0) % slices;
    if (line >= (IDX)lines_)
        return;
    const IDX share = n / slices, rest_of = n % slices;
    const IDX first = slice * share + min(slice, rest_of), end = first + share + (slice < rest_of);
    const long start = (long)x_at + at_Rest(&rest, line);
    const Key flip = (Key)flip_;
    const uint k = (uint)k_;
    Key kept[CAP], keys[LANES];
    INDEX_TYPE at[CAP];
    uint held = 0;
    // Keys above `last` are not among the first k keys.
    Key last = (Key)-1;
    IDX i = first;
    if (stride == 1 && end - first >= 4 * LANES) {
        // The bound is the k-th smallest of the smallest keys of LANES lanes. At least k keys are at most this bound.
        const IDX stop = min(first + SAMPLE, end);
        CAT(KEY_T, 16) best[LANES / 16];
        for (uint lane = 0; lane < LANES / 16; ++lane)
            best[lane] = (Key)-1;
        for (IDX j = first; j + LANES <= stop; j += LANES)
            #pragma unroll
            for (uint lane = 0; lane < LANES / 16; ++lane)
                best[lane] = min(best[lane], KEY16_OF(CAT(load16_, A)(x, (ulong)start + j + 16 * lane)));
        for (uint lane = 0; lane < LANES / 16; ++lane)
            vstore16(best[lane], lane, keys);
        for (uint lane = 0; lane < LANES; ++lane)
            held = insert(kept, at, held, k, keys[lane], 0);
        last = kept[k - 1];
        held = 0;
    }
    while (i < end) {
        IDX stop = i + 1;
        if (stride == 1 && i + 16 <= end) {
            const CAT(KEY_T, 16) key = KEY16_OF(CAT(load16_, A)(x, (ulong)start + i));
            stop = i + 16;
            if (!any(key <= last)) {
                i = stop;
                continue;
            }
        }
        for (; i < stop; ++i) {
            const Key key = KEY_OF(CAT(load_, A)(x, (ulong)(start + (long)i * stride)));
            if (key > last)
                continue;
            held = insert(kept, at, held, k, key, (INDEX_TYPE)i);
            // Later elements have larger indices, so an element whose key equals the k-th key is ordered after the k-th element.
            if (held == k)
                last = kept[k - 1] - (kept[k - 1] > 0);
        }
    }
    const IDX of = line * slices + slice;
    for (uint j = 0; j < k; ++j) {
        const IDX put_at = of / inner * inner * k + of % inner + j * inner;
        y[y_at + put_at] = ((__global const V *)x)[start + (long)at[j] * stride];
#ifdef FROM
        indices[indices_at + put_at] = from[from_at + line * n + at[j]];
#else
        indices[indices_at + put_at] = (long)at[j];
#endif
    }
}

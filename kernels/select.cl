// Selection along a dim of a strided tensor on GPUs, without sorting: the first k elements in order (TOP), or the element of one rank in
// ascending order. Follows key.cl. The host defines A (dtype), V (an unsigned type of the element's size), INDEX_TYPE (uint or ulong), NK
// (rank), IDX, GROUP, PER (the number of elements that a work-item keeps in registers at a time), CAP (the maximum number of candidates
// of a group, a multiple of GROUP), DESCENDING (0 or 1; a macro, because with a variable the search takes a fifth longer), and FROM if
// the indices are read from a tensor. Equal keys are ordered by their indices. Functions with barriers are not static, because the
// inliner of LLVM 15 crashes on them in PoCL 3.1.

STRIDED_DIMS(Rest, NK)

// The histogram of the current digit, the sums of eight bins each, and the results of find_digit. `together` uses `count`.
typedef struct {
    uint bins[256], sums[32], digit, below, inside, count;
} Digits;

// Digits are the bytes of (key, index). Digit 0 is the lowest byte of the index. The index has `low` digits, and digit `low` is the
// lowest byte of the key.
#define DIGIT(key, at, d, low) (((d) >= (low) ? (uint)((key) >> 8 * ((d) - (low))) : (uint)((at) >> 8 * (d))) & 255)

inline int index_digits(ulong n) {
    int low = 0;
    for (ulong left = n - 1; left > 0; left >>= 8)
        ++low;
    return low;
}

inline void clear(__local Digits *d, uint lid) {
    for (uint b = lid; b < 256; b += GROUP)
        d->bins[b] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
}

// Finds the digit of the need-th smallest element in the bins, the number of elements with a smaller digit, and the number of
// elements with this digit.
inline void find_digit(__local Digits *d, ulong need, uint lid) {
    barrier(CLK_LOCAL_MEM_FENCE);
    uint own = 0;
    if (lid < 32) {
        #pragma unroll
        for (uint k = 0; k < 8; ++k)
            own += d->bins[8 * lid + k];
        d->sums[lid] = own;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid < 32) {
        uint before = 0;
        #pragma unroll
        for (uint k = 0; k < 31; ++k)
            before += k < lid ? d->sums[k] : 0;
        if (before < need && need <= before + own) {
            uint b = 8 * lid;
            while (before + d->bins[b] < need)
                before += d->bins[b++];
            d->digit = b;
            d->below = before;
            d->inside = d->bins[b];
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

// Returns the sum of v over all work-items of the group.
inline uint together(__local Digits *d, uint v, uint lid) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid == 0)
        d->count = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (v > 0)
        atomic_add(&d->count, v);
    barrier(CLK_LOCAL_MEM_FENCE);
    return d->count;
}

#define PARAMETERS                                                                                                     \
    __global const CAT(A, _t) *x, ulong x_at, __global V *y, ulong y_at, __global long *indices, ulong indices_at,       \
        __global const long *from, ulong from_at, Rest rest, ulong n_, long stride, ulong inner_, ulong k_,            \
        uint slices, uint rule
#define KEY(i) KEY_OF(CAT(load_, A)(x, (ulong)(start + (long)(i) * stride)))

#ifdef FROM
#define INDEX(i) from[from_at + line * n + (i)]
#else
#define INDEX(i) (long)(i)
#endif
// Writes result j of line `of`: the element with index p.
#define PUT(of, j, p)                                                                                                  \
    {                                                                                                                  \
        const IDX put_at = (of) / inner * inner * k + (of) % inner + (j) * inner;                                      \
        y[y_at + put_at] = ((__global const V *)x)[start + (long)(p) * stride];                                        \
        indices[indices_at + put_at] = INDEX(p);                                                                         \
    }

#ifdef TOP
#define SLOTS (CAP / GROUP)
#define ENTRIES (PER + SLOTS)

// Returns an upper bound for the `need` smallest keys. Each work-item with `alive` set has one key.
inline Key bound_of(Key key, int alive, uint need, uint lid, __local Digits *d) {
    Key found = 0, mask = 0;
    for (int digit = (int)sizeof(Key) - 1; digit >= 0; --digit) {
        clear(d, lid);
        if (alive && ((key ^ found) & mask) == 0)
            atomic_inc(&d->bins[DIGIT(key, 0u, digit, 0)]);
        find_digit(d, need, lid);
        need -= d->below;
        found |= (Key)d->digit << 8 * digit;
        mask |= (Key)255 << 8 * digit;
        if (d->inside == need)
            break;
    }
    return found | ~mask;
}

// Selects the `need` smallest of the entries whose bit is set in `alive`, and returns their bits. *bound is an upper bound for the
// keys of these entries; if *exact is set, *bound is the largest of the keys.
inline uint least(const Key *key, const INDEX_TYPE *at, uint alive, uint need, int low, uint lid, __local Digits *d, Key *bound,
                  int *exact) {
    uint taken = 0;
    *bound = (Key)-1;
    for (int digit = low + (int)sizeof(Key) - 1;; --digit) {
        clear(d, lid);
        #pragma unroll
        for (uint s = 0; s < ENTRIES; ++s)
            if (alive >> s & 1)
                atomic_inc(&d->bins[DIGIT(key[s], at[s], digit, low)]);
        find_digit(d, need, lid);
        const uint b = d->digit, inside = d->inside;
        need -= d->below;
        uint below = 0, same = 0;
        #pragma unroll
        for (uint s = 0; s < ENTRIES; ++s) {
            const uint own = DIGIT(key[s], at[s], digit, low);
            below |= (uint)(own < b) << s;
            same |= (uint)(own == b) << s;
        }
        taken |= alive & below;
        alive &= same;
        if (digit >= low)
            *bound -= (Key)(255 - b) << 8 * (digit - low);
        *exact = digit <= low;
        if (inside == need || digit == 0)
            return taken | alive;
    }
}

// Each group processes a slice of a line tile by tile, and keeps candidates for the first k: the elements below a limit. When there
// would be more than `rule` candidates, the group lowers the limit and drops candidates above it.
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void choose(PARAMETERS) {
    const IDX n = (IDX)n_, inner = (IDX)inner_, line = (IDX)get_group_id(0) / slices, slice = (IDX)get_group_id(0) % slices;
    const IDX share = n / slices, rest_of = n % slices;
    const IDX first = slice * share + min(slice, rest_of), end = first + share + (slice < rest_of);
    const long start = (long)x_at + at_Rest(&rest, line);
    const uint lid = get_local_id(0), k = (uint)k_;
    const Key flip = DESCENDING ? (Key)-1 : 0;
    const int low = index_digits(n_);
    __local Digits digits;
    __local Key held_key[CAP];
    __local INDEX_TYPE held_at[CAP];
    uint held = 0;
    Key limit = 0;
    int open = 1;
    for (IDX tile = first; tile < end; tile += GROUP * PER) {
        Key key[ENTRIES];
        INDEX_TYPE at[ENTRIES];
        uint alive = 0;
        #pragma unroll
        for (uint s = 0; s < PER; ++s) {
            const IDX i = tile + s * GROUP + lid;
            key[s] = (Key)-1;
            at[s] = (INDEX_TYPE)i;
            if (i < end) {
                key[s] = KEY(i);
                alive |= (uint)(open || key[s] < limit) << s;
            }
        }
        // One sum holds both counts: candidates in the low 16 bits, and work-items with candidates in the high bits.
        uint counts = together(&digits, popcount(alive) | (uint)(alive != 0) << 16, lid);
        uint found = counts & 0xffff;
        if (found == 0)
            continue;
        if (held + found > rule && counts >> 16 >= k) {
            // Each work-item contributes its smallest key. At least k of these are at most this bound, so larger keys are not among the first k.
            Key best = (Key)-1;
            #pragma unroll
            for (uint s = 0; s < PER; ++s)
                if (alive >> s & 1)
                    best = min(best, key[s]);
            const Key bound = bound_of(best, alive != 0, k, lid, &digits);
            #pragma unroll
            for (uint s = 0; s < PER; ++s)
                if (key[s] > bound)
                    alive &= ~(1u << s);
            found = together(&digits, popcount(alive), lid);
            limit = bound + 1;
            open = bound == (Key)-1;
        }
        if (held + found > rule) {
            #pragma unroll
            for (uint s = 0; s < SLOTS; ++s) {
                const uint j = s * GROUP + lid;
                key[PER + s] = (Key)-1;
                at[PER + s] = (INDEX_TYPE)-1;
                if (j < held) {
                    key[PER + s] = held_key[j];
                    at[PER + s] = held_at[j];
                    alive |= 1u << (PER + s);
                }
            }
            Key bound;
            int exact;
            alive = least(key, at, alive, k, low, lid, &digits, &bound, &exact);
            held = 0;
            found = k;
            // Later elements have larger indices, so an element whose key equals the k-th key is ordered after the k-th element.
            limit = exact ? bound : bound + 1;
            open = !exact && bound == (Key)-1;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid == 0)
            digits.count = held;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (alive) {
            uint to = atomic_add(&digits.count, popcount(alive));
            #pragma unroll
            for (uint s = 0; s < ENTRIES; ++s) {
                if (alive >> s & 1) {
                    held_key[to] = key[s];
                    held_at[to++] = at[s];
                }
            }
        }
        held += found;
    }
    // Sorts the candidates with a bitonic network (Batcher).
    uint size = 1;
    while (size < held)
        size *= 2;
    for (uint j = held + lid; j < size; j += GROUP) {
        held_key[j] = (Key)-1;
        held_at[j] = (INDEX_TYPE)-1;
    }
    for (uint run = 2; run <= size; run *= 2) {
        for (uint step = run / 2; step > 0; step /= 2) {
            barrier(CLK_LOCAL_MEM_FENCE);
            for (uint p = lid; p < size / 2; p += GROUP) {
                const uint i = 2 * p - (p & (step - 1)), j = i + step;
                const int up = (i & run & (size - 1)) == 0;
                const Key ki = held_key[i], kj = held_key[j];
                const INDEX_TYPE ai = held_at[i], aj = held_at[j];
                const int after = ki > kj || (ki == kj && ai > aj);
                if (after == up) {
                    held_key[i] = kj;
                    held_key[j] = ki;
                    held_at[i] = aj;
                    held_at[j] = ai;
                }
            }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint j = lid; j < k; j += GROUP)
        PUT(line * slices + slice, j, held_at[j]);
}
#else
// The rule for the rank; NaN ranks last. PLAIN: the k-th element, counted from 1. OR_NAN: the k-th element, or the first NaN if there is
// any. NAN_MEDIAN: the median of the elements that are not NaN. Otherwise the rank, counted from 0, is read from `from`.
#define PLAIN 0
#define OR_NAN 1
#define NAN_MEDIAN 2

#ifdef RESIDENT
#define KEY_AT(s, i) key[s]
#else
#define KEY_AT(s, i) KEY(i)
#endif

// A group finds the key of the element with that rank digit by digit, then the index of that element.
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void choose(PARAMETERS) {
    const IDX n = (IDX)n_, inner = (IDX)inner_, line = (IDX)get_group_id(0), k = 1;
    const long start = (long)x_at + at_Rest(&rest, line);
    const uint lid = get_local_id(0);
    const int low = index_digits(n_);
    const Key flip = 0;
    __local Digits digits;
#ifdef RESIDENT
    Key key[PER];
    #pragma unroll
    for (uint s = 0; s < PER; ++s)
        key[s] = s * GROUP + lid < n ? KEY(s * GROUP + lid) : 0;
#endif
    ulong need = k_;
    if (rule > NAN_MEDIAN)
        need = (ulong)from[from_at + line] + 1;
    else if (rule != PLAIN) {
        uint nans = 0;
#if defined(KEY_F32) || defined(KEY_F64)
        for (IDX block = 0; block < n; block += GROUP * PER) {
            #pragma unroll
            for (uint s = 0; s < PER; ++s) {
                const IDX i = block + s * GROUP + lid;
                if (i < n)
                    nans += KEY_AT(s, i) == (Key)-1;
            }
        }
        nans = together(&digits, nans, lid);
#endif
        if (rule == NAN_MEDIAN)
            need = (n - 1 - min((IDX)nans, n - 1)) / 2 + 1;
        else if (nans > 0)
            need = n - nans + 1;
    }
    Key key_found = 0, key_mask = 0;
    IDX at_found = 0, at_mask = 0;
    for (int digit = low + (int)sizeof(Key) - 1; digit >= 0; --digit) {
        clear(&digits, lid);
        for (IDX block = 0; block < n; block += GROUP * PER) {
            #pragma unroll
            for (uint s = 0; s < PER; ++s) {
                const IDX i = block + s * GROUP + lid;
                if (i < n) {
                    const Key own = KEY_AT(s, i);
                    if (((own ^ key_found) & key_mask) == 0 && ((i ^ at_found) & at_mask) == 0)
                        atomic_inc(&digits.bins[DIGIT(own, i, digit, low)]);
                }
            }
        }
        find_digit(&digits, need, lid);
        const uint b = digits.digit, inside = digits.inside;
        need -= digits.below;
        if (digit >= low) {
            key_found |= (Key)b << 8 * (digit - low);
            key_mask |= (Key)255 << 8 * (digit - low);
        } else {
            at_found |= (IDX)b << 8 * digit;
            at_mask |= (IDX)255 << 8 * digit;
        }
        if (inside == 1)
            break;
    }
    for (IDX block = 0; block < n; block += GROUP * PER) {
        #pragma unroll
        for (uint s = 0; s < PER; ++s) {
            const IDX i = block + s * GROUP + lid;
            if (i < n && ((KEY_AT(s, i) ^ key_found) & key_mask) == 0 && ((i ^ at_found) & at_mask) == 0)
                PUT(line, 0, i);
        }
    }
}
#endif

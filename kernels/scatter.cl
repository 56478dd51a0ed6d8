// Writing through indices on GPUs; comes after strided_dims.cl and gather.cl. y[.., index[j], ..] becomes COMBINE of itself and
// x[.., j, ..], in the order of j, whoever does it: the same bits every time, and no atomics on what is added up. The host
// gives what gather.cl says of SCATTER, GROUP, and one of TILES, ROWS.

#ifdef V
typedef V Element;
#define MEET(old, new) (new)
#else
typedef CAT(A, _t) Element;
#define PLUS(a, b) ((a) + (b))
#define TIMES(a, b) ((a) * (b))
#define MEET(old, new) CAT(CAT(CAT(to_, A), _), ACC_NAME)(COMBINE(CAT(from_, A)(old), CAT(from_, A)(new)))
#endif

#ifdef TILES
// An index for every element. A group has SIDE neighbouring columns (positions outside the dim) of y and of these what lies
// in one of `parts` ranges of `span`, and goes through the indices in order, PER of them a work-item at a time. Of those
// that meet in an element (of those with one tag) the first one is next in each round, which the greatest of their
// numbers says: these count down within a round, and up from round to round. HELD: what is written to is in local memory.
// Where many meet, a work-item takes all those of a tag after ROUNDS.
typedef struct {
    ulong size[NK];
    long x[NK], index[NK], y[NK];
} Walk;
#define BLOCK (GROUP * PER)
#define STEP (GROUP / SIDE)
#define NONE ((IDX)-1)
#define NO_TAG 0xffff
#define TAG(slot) (((uint)(slot) * SIDE + c) & (TAGS - 1))
#ifdef HELD
#define HERE(slot) held[(slot) * SIDE + c]
#define FENCES CLK_LOCAL_MEM_FENCE
#else
#define HERE(slot) y[ya + (low + (long)(slot)) * ys]
#define FENCES (CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#endif
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void
scatter_tiles(__global const Element *x, ulong x_at, __global const CAT(T, _t) *index, ulong index_at,
              __global Element *y, ulong y_at, volatile __global int *word, uint code, Walk walk, ulong columns_,
              ulong count_, ulong size, long xs, long is, long ys, uint parts, ulong span, uint wraps) {
    const IDX columns = (IDX)columns_, count = (IDX)count_;
    const uint lid = get_local_id(0), c = lid % SIDE, part = get_group_id(0) % parts;
    const IDX column = (IDX)get_group_id(0) / parts * SIDE + c;
    const bool mine = column < columns;
    const long low = (long)(part * span), high = min(low + (long)span, (long)size);
    __local uint tag[TAGS];
    __local ushort staged[BLOCK];
    __local uint waiting[3];
    ulong xa = x_at, ia = index_at, ya = y_at;
    IDX i = mine ? column : 0;
    for (int k = NK - 1; k >= 0; --k) {
        const IDX r = NEXT(i, walk.size, k);
        xa += (long)r * walk.x[k];
        ia += (long)r * walk.index[k];
        ya += (long)r * walk.y[k];
    }
    for (uint t = lid; t < TAGS; t += GROUP)
        tag[t] = 0;
    if (lid < 3)
        waiting[lid] = 0;
#ifdef HELD
    __local Element held[TAGS];
    const uint all = (uint)(high - low) * SIDE;
    for (uint t = lid; t < all; t += GROUP)
        if (mine)
            held[t] = y[ya + (low + t / SIDE) * ys];
#endif
    barrier(CLK_LOCAL_MEM_FENCE);
    uint number = 0, turn = 0;
    for (IDX block = 0; block < count; block += STEP * PER) {
        long given[PER];
        IDX slot[PER];
        Element v[PER];
        #pragma unroll
        for (uint k = 0; k < PER; ++k) {
            const IDX j = block + lid / SIDE + k * STEP;
            given[k] = mine && j < count ? CAT(load_, T)(index, ia + (long)j * is) : 0;
        }
        #pragma unroll
        for (uint k = 0; k < PER; ++k) {
            const IDX j = block + lid / SIDE + k * STEP;
            const long at = wrapped(given[k], size, wraps);
            slot[k] = NONE;
            if (mine && j < count) {
                if (at >= low && at < high) {
                    slot[k] = (IDX)(at - low);
                    v[k] = x[xa + (long)j * xs];
                } else if (part == 0 && !in_range(at, size)) {
                    fault_record(word, code, given[k], size);
                }
            }
        }
        for (uint round = 0;; ++round, ++turn) {
            number += BLOCK;
            #pragma unroll
            for (uint k = 0; k < PER; ++k)
                if (slot[k] != NONE)
                    atomic_max(&tag[TAG(slot[k])], number - (k * GROUP + lid));
            barrier(CLK_LOCAL_MEM_FENCE);
            bool left = false;
            #pragma unroll
            for (uint k = 0; k < PER; ++k) {
                if (slot[k] != NONE) {
                    if (tag[TAG(slot[k])] == number - (k * GROUP + lid)) {
                        HERE(slot[k]) = MEET(HERE(slot[k]), v[k]);
                        slot[k] = NONE;
                    } else {
                        left = true;
                    }
                }
            }
            if (left)
                waiting[turn % 3] = 1;
            if (lid == 0)
                waiting[(turn + 1) % 3] = 0;
            barrier(FENCES);
            if (!waiting[turn % 3])
                break;
            if (round + 1 == ROUNDS) {
                #pragma unroll
                for (uint k = 0; k < PER; ++k)
                    staged[k * GROUP + lid] = slot[k] != NONE ? TAG(slot[k]) : NO_TAG;
                barrier(CLK_LOCAL_MEM_FENCE);
                for (uint n = 0; n < BLOCK; ++n) {
                    if (staged[n] % GROUP == lid && staged[n] != NO_TAG) {
                        const IDX j = block + n / SIDE;
                        const long at = wrapped(CAT(load_, T)(index, ia + (long)j * is), size, wraps) - low;
                        HERE(at) = MEET(HERE(at), x[xa + (long)j * xs]);
                    }
                }
                barrier(FENCES);
                break;
            }
        }
        ++turn;
    }
#ifdef HELD
    for (uint t = lid; t < all; t += GROUP)
        if (mine)
            y[ya + (low + t / SIDE) * ys] = held[t];
#endif
}
#endif

#ifdef ROWS
// One index for a whole row of columns. A group has `span` neighbouring destinations, at most 64, and some of the columns. It
// looks for the indices that are its own, puts them in order, and adds up the rows of each destination, UNIT by UNIT of
// WIDTH elements, `lanes` of them side by side.
typedef struct {
    ulong size[NK];
    long x[NK], y[NK];
} Walk;
typedef union {
    UNIT unit;
    Element e[WIDTH];
} Some;
#define CHUNK (8 * GROUP)
#define MOST (10 * GROUP)
static inline Some meet(Some old, Some new) {
    Some met;
    #pragma unroll
    for (uint w = 0; w < WIDTH; ++w)
        met.e[w] = MEET(old.e[w], new.e[w]);
    return met;
}
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void
scatter_rows(__global const UNIT *x, ulong x_at, __global const CAT(T, _t) *index, ulong index_at, __global UNIT *y,
             ulong y_at, volatile __global int *word, uint code, Walk walk, ulong columns_, ulong count_, ulong size,
             long xs, long is, long ys, uint span, uint slabs, uint lanes, uint wraps) {
    const uint columns = (uint)columns_, count = (uint)count_, lid = get_local_id(0);
    const uint part = get_group_id(0) / slabs, slab = get_group_id(0) % slabs, wide = (columns + slabs - 1) / slabs;
    const uint lane = lid % lanes, end = min((slab + 1) * wide, columns);
    const long low = (long)part * span, high = min(low + (long)span, (long)size);
    // A key is a destination, in the upper 6 bits, and the place of an index.
    __local uint found, keys[MOST], sorted[MOST], first[64], last[64];
    if (lid == 0)
        found = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint chunk = 0; chunk < count; chunk += CHUNK) {
        long given[8];
        #pragma unroll
        for (uint k = 0; k < 8; ++k) {
            const uint j = chunk + k * GROUP + lid;
            given[k] = j < count ? CAT(load_, T)(index, index_at + (long)j * is) : 0;
        }
        #pragma unroll
        for (uint k = 0; k < 8; ++k) {
            const uint j = chunk + k * GROUP + lid;
            const long at = wrapped(given[k], size, wraps);
            if (j < count) {
                if (at >= low && at < high)
                    keys[atomic_inc(&found)] = (uint)(at - low) << 26 | j;
                else if (get_group_id(0) == 0 && !in_range(at, size))
                    fault_record(word, code, given[k], size);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        const uint many = found;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (many + CHUNK <= MOST && chunk + CHUNK < count)
            continue;
        if (lid == 0)
            found = 0;
        for (uint d = lid; d < 64; d += GROUP)
            first[d] = last[d] = 0;
        for (uint i = lid; i < many; i += GROUP) {
            const uint key = keys[i];
            uint before = 0;
            for (uint o = 0; o < many; ++o)
                before += keys[o] < key;
            sorted[before] = key;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint i = lid; i < many; i += GROUP) {
            const uint d = sorted[i] >> 26;
            if (i == 0 || sorted[i - 1] >> 26 != d)
                first[d] = i;
            if (i + 1 == many || sorted[i + 1] >> 26 != d)
                last[d] = i + 1;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint d = lid / lanes; d < (uint)(high - low); d += GROUP / lanes) {
            const uint stop = last[d];
            for (uint c = slab * wide + lane; c < end && first[d] < stop; c += lanes) {
                uint rest = c;
                ulong xa = x_at, ya = y_at + (low + d) * ys;
                for (int k = NK - 1; k >= 0; --k) {
                    const uint r = NEXT(rest, walk.size, k);
                    xa += (long)r * walk.x[k];
                    ya += (long)r * walk.y[k];
                }
#define FROM(i) x[xa + (long)(sorted[i] & 0x3ffffff) * xs]
                Some all, v[4];
#ifdef V
                all.unit = FROM(stop - 1);
#else
                all.unit = y[ya];
                uint i = first[d];
                for (; i + 4 <= stop; i += 4) {
                    #pragma unroll
                    for (uint k = 0; k < 4; ++k)
                        v[k].unit = FROM(i + k);
                    #pragma unroll
                    for (uint k = 0; k < 4; ++k)
                        all = meet(all, v[k]);
                }
                for (; i < stop; ++i) {
                    v[0].unit = FROM(i);
                    all = meet(all, v[0]);
                }
#endif
                y[ya] = all.unit;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
#endif

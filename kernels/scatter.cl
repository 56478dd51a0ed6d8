// Scatter on GPUs; follows strided_dims.cl and gather.cl. y[.., index[j], ..] = COMBINE(y[.., index[j], ..], x[.., j, ..]). Each
// element of y is combined in the order of j, whichever work-item computes it. So results are reproducible and need no atomics on
// the elements. The host defines the macros for SCATTER in gather.cl, GROUP, and one of TILES and ROWS.

#ifdef V
typedef V Element;
#define COMBINED(old, new) (new)
#else
typedef CAT(A, _t) Element;
#define PLUS(a, b) ((a) + (b))
#define TIMES(a, b) ((a) * (b))
#define COMBINED(old, new) CAT(CAT(CAT(to_, A), _), ACC_NAME)(COMBINE(CAT(from_, A)(old), CAT(from_, A)(new)))
#endif

#ifdef TILES
// Every element has its own index. A group processes SIDE adjacent columns of y (positions in the other dims), in one of `parts`
// ranges of `span` along the indexed dim. It processes the indices in order, each work-item PER at a time. Conflicts between
// indices with the same tag are resolved in rounds: the first index in order has the largest number, wins an atomic_max on the tag,
// and is done. Numbers decrease within a round and increase from round to round, so tags need no reset. After ROUNDS rounds, one
// work-item processes each tag's remaining indices in order. HELD: the range of y is in local memory.
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
#define TARGET(slot) held[(slot) * SIDE + c]
#define FENCES CLK_LOCAL_MEM_FENCE
#else
#define TARGET(slot) y[ya + (low + (long)(slot)) * ys]
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
                        TARGET(slot[k]) = COMBINED(TARGET(slot[k]), v[k]);
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
                        TARGET(at) = COMBINED(TARGET(at), x[xa + (long)j * xs]);
                    }
                }
                barrier(FENCES);
                break;
            }
        }
        ++turn;
    }
#ifdef HELD
    // Only elements that an index has changed are written, because the range of a column may contain elements of other columns.
    for (uint t = lid; t < all; t += GROUP)
        if (mine && tag[t] > 0)
            y[ya + (low + t / SIDE) * ys] = held[t];
#endif
}
#endif

#ifdef ROWS
// All columns of a row have the same index. A group has `span` adjacent destination rows (at most 64) and a slab of the columns. The group
// collects the indices of its destination rows, sorts the indices, and combines the source rows of each destination row. `lanes` work-items
// process adjacent units (UNIT) of WIDTH elements of a row.
typedef struct {
    ulong size[NK];
    long x[NK], y[NK];
} Walk;
typedef union {
    UNIT unit;
    Element e[WIDTH];
} Unit;
#define CHUNK (8 * GROUP)
#define MOST (10 * GROUP)
static inline Unit combine_units(Unit old, Unit new) {
    Unit met;
    #pragma unroll
    for (uint w = 0; w < WIDTH; ++w)
        met.e[w] = COMBINED(old.e[w], new.e[w]);
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
    // A key holds a destination row in its upper 6 bits, and in the other bits the position j of the index.
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
                Unit all, v[4];
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
                        all = combine_units(all, v[k]);
                }
                for (; i < stop; ++i) {
                    v[0].unit = FROM(i);
                    all = combine_units(all, v[0]);
                }
#endif
                y[ya] = all.unit;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
#endif

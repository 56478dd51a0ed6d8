// Reads and writes through indices. The host defines T (dtype of the index), NK (rank), IDX, and one of GATHER, SCATTER, LINEAR, ONE_HOT. GATHER also
// needs V (an unsigned type of a unit's size), PER and NEAR. SCATTER needs V (of an element's size), or A (dtype), ACC, ACC_NAME and COMBINE. `code` is
// the fault that is recorded for an index out of range. With `wraps`, negative indices count from the end.

static inline long wrapped(long index, ulong size, uint wraps) { return wraps && index < 0 ? index + (long)size : index; }
static inline bool in_range(long at, ulong size) { return at >= 0 && at < (long)size; }

#ifdef GATHER
// y[p] = x[.., index[p], ..]. The strides of x and the index are for the shape of y, and 0 along broadcast dims. A unit (V) is one
// element, or several adjacent elements of a row with the same index. On CPUs, a work-item copies one unit. On GPUs, it copies PER
// units, interleaved with the units of its group so that accesses are coalesced.
typedef struct {
    ulong size[NK];
    long x[NK], index[NK];
} Walk;
// NEAR is int if strides and sizes fit in int, because GPUs multiply int in one instruction. Otherwise NEAR is long.
#define OFFSET(i, stride) ((long)(NEAR)(i) * (NEAR)(stride))
__kernel void gather(__global const V *x, ulong x_at, __global const CAT(T, _t) *index, ulong index_at, __global V *y,
                     ulong y_at, volatile __global int *word, uint code, Walk walk, ulong count_, ulong size,
                     long stride, uint wraps) {
#ifdef IS_CPU
    const IDX p = (IDX)get_global_id(0);
    if (p >= (IDX)count_)
        return;
    IDX i = p;
    for (int k = NK - 1; k >= 0; --k) {
        const IDX r = NEXT(i, walk.size, k);
        x_at += (long)r * walk.x[k];
        index_at += (long)r * walk.index[k];
    }
    const long given = CAT(load_, T)(index, index_at), at = wrapped(given, size, wraps);
    if (in_range(at, size)) {
        y[y_at + p] = x[x_at + at * stride];
    } else {
        y[y_at + p] = (V)(0);
        fault_record(word, code, given, size);
    }
#else
    const IDX count = (IDX)count_, group = (IDX)get_local_size(0);
    const IDX first = (IDX)get_group_id(0) * group * PER + (IDX)get_local_id(0);
    long given[PER], from[PER];
    V v[PER];
    #pragma unroll
    for (IDX k = 0; k < PER; ++k) {
        const IDX p = first + k * group;
        if (p < count) {
            IDX i = p;
            ulong at = index_at;
            from[k] = (long)x_at;
            for (int d = NK - 1; d >= 0; --d) {
                const IDX r = NEXT(i, walk.size, d);
                from[k] += OFFSET(r, walk.x[d]);
                at += OFFSET(r, walk.index[d]);
            }
            given[k] = CAT(load_, T)(index, at);
        }
    }
    #pragma unroll
    for (IDX k = 0; k < PER; ++k) {
        const long at = wrapped(given[k], size, wraps);
        v[k] = (V)(0);
        if (first + k * group < count) {
            if (in_range(at, size))
                v[k] = x[from[k] + OFFSET(at, stride)];
            else
                fault_record(word, code, given[k], size);
        }
    }
    #pragma unroll
    for (IDX k = 0; k < PER; ++k)
        if (first + k * group < count)
            y[y_at + first + k * group] = v[k];
#endif
}
#endif

#ifdef SCATTER
// y[.., index[j], ..] = COMBINE(y[.., index[j], ..], x[.., j, ..]). A work-item owns one column of y (a position in the other dims),
// for the indices in [part * span, (part + 1) * span), and processes all j in order. So no atomics are needed, and results are
// reproducible. On CPUs, a work-item processes `block` adjacent columns in its inner loop.
#ifdef V
#define PUT(y, at, x, from) (y)[at] = (x)[from]
typedef V Element;
#else
#define PUT(y, at, x, from)                                                                                            \
    CAT(CAT(CAT(store_, A), _), ACC_NAME)(y, at, COMBINE(CAT(load_, A)(y, at), CAT(load_, A)(x, from)))
typedef CAT(A, _t) Element;
#endif
#define PLUS(a, b) ((a) + (b))
#define TIMES(a, b) ((a) * (b))
typedef struct {
    ulong size[NK];
    long x[NK], index[NK], y[NK];
} Walk;
__kernel void scatter(__global const Element *x, ulong x_at, __global const CAT(T, _t) *index, ulong index_at,
                      __global Element *y, ulong y_at, volatile __global int *word, uint code, Walk walk, ulong columns_,
                      ulong count_, ulong size, long xs, long is, long ys, uint parts, ulong span, uint block, uint wraps) {
    const IDX columns = (IDX)columns_, count = (IDX)count_, blocks = (columns + block - 1) / block;
    const IDX item = (IDX)get_global_id(0), part = item / blocks;
    const IDX first = item % blocks * block, end = min(first + block, columns);
    if (part >= parts)
        return;
    const long low = (long)(part * span), high = min(low + (long)span, (long)size);
    for (IDX j = 0; j < count; ++j) {
        for (IDX c = first; c < end; ++c) {
            IDX i = c;
            ulong xa = x_at, ia = index_at, ya = y_at;
            for (int k = NK - 1; k >= 0; --k) {
                const IDX r = NEXT(i, walk.size, k);
                xa += (long)r * walk.x[k];
                ia += (long)r * walk.index[k];
                ya += (long)r * walk.y[k];
            }
            const long given = CAT(load_, T)(index, ia + (long)j * is), at = wrapped(given, size, wraps);
            if (at >= low && at < high) {
                ya += at * ys;
                xa += (long)j * xs;
                PUT(y, ya, x, xa);
            } else if (part == 0 && !in_range(at, size)) {
                fault_record(word, code, given, size);
            }
        }
    }
}
#endif

#ifdef LINEAR
// Linear indices of one index tensor per dim, in one launch per tensor: y[p] += index[p] * step, where y[p] starts as `base`. Negative
// indices count from the end. If an index is out of range, y[p] becomes -1.
typedef struct {
    ulong size[NK];
    long index[NK];
} Walk;
__kernel void linear(__global const CAT(T, _t) *index, ulong index_at, __global long *y, ulong y_at,
                     volatile __global int *word, uint code, Walk walk, ulong count, ulong size, long step, uint first,
                     long base) {
    const IDX p = (IDX)get_global_id(0);
    if (p >= (IDX)count)
        return;
    IDX i = p;
    for (int k = NK - 1; k >= 0; --k)
        index_at += (long)NEXT(i, walk.size, k) * walk.index[k];
    const long given = CAT(load_, T)(index, index_at), at = wrapped(given, size, 1);
    const long sum = first ? base : y[y_at + p];
    const bool valid = in_range(at, size);
    y[y_at + p] = valid && sum >= 0 ? sum + at * step : -1;
    if (!valid)
        fault_record(word, code, given, size);
}
#endif

#ifdef ONE_HOT
typedef struct {
    ulong size[NK];
    long index[NK];
} Walk;
__kernel void one_hot(__global const CAT(T, _t) *index, ulong index_at, __global long *y, ulong y_at,
                      volatile __global int *word, uint code, Walk walk, ulong count, ulong classes) {
    const IDX p = (IDX)get_global_id(0);
    if (p >= (IDX)count)
        return;
    const IDX c = p % (IDX)classes;
    IDX i = p / (IDX)classes;
    for (int k = NK - 1; k >= 0; --k)
        index_at += (long)NEXT(i, walk.size, k) * walk.index[k];
    const long at = CAT(load_, T)(index, index_at);
    y[y_at + p] = at == (long)c;
    if (c == 0 && !in_range(at, classes))
        fault_record(word, code, at, classes);
}
#endif

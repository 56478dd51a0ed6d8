// Reading and adding through indices. The host gives: V (an unsigned type of the element's size) or A (dtype) with ACC and
// ACC_NAME, T (the index's dtype), NK (rank), IDX, and one of GATHER, SCATTER_ADD, ONE_HOT.

#ifdef GATHER
// y[p] = x[.., index[p], ..]: x and the index are walked together over y's shape, where a stride of zero broadcasts.
typedef struct {
    ulong size[NK];
    long x[NK], index[NK];
} Walk;
__kernel void gather(__global const V *x, ulong x_at, __global const CAT(T, _t) *index, ulong index_at, __global V *y,
                     ulong y_at, volatile __global int *word, Walk walk, ulong count, ulong size, long stride) {
    const IDX p = (IDX)get_global_id(0);
    if (p >= (IDX)count)
        return;
    IDX i = p;
    for (int k = NK - 1; k >= 0; --k) {
        const IDX r = NEXT(i, walk.size, k);
        x_at += (long)r * walk.x[k];
        index_at += (long)r * walk.index[k];
    }
    const long at = CAT(load_, T)(index, index_at);
    if (at >= 0 && at < (long)size) {
        y[y_at + p] = x[x_at + at * stride];
    } else {
        y[y_at + p] = 0;
        fault_record(word, FAULT_INDEX, at, size);
    }
}
#endif

#ifdef SCATTER_ADD
// y[.., index[j], ..] += x[.., j, ..]. A work-item owns one column (a position outside the dim) of y for indices in
// [part * span, (part + 1) * span) and goes through all j in order: no atomics, and the same bits every time.
// Processors take `block` neighbouring columns a work-item, the column loop inside.
typedef struct {
    ulong size[NK];
    long x[NK], index[NK], y[NK];
} Walk;
__kernel void scatter_add(__global const CAT(A, _t) *x, ulong x_at, __global const CAT(T, _t) *index, ulong index_at,
                          __global CAT(A, _t) *y, ulong y_at, volatile __global int *word, Walk walk, ulong columns_,
                          ulong count_, ulong size, long xs, long is, long ys, uint parts, ulong span, uint block) {
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
            const long at = CAT(load_, T)(index, ia + (long)j * is);
            if (at >= low && at < high) {
                ya += at * ys;
                const ACC sum = CAT(load_, A)(y, ya) + CAT(load_, A)(x, xa + (long)j * xs);
                CAT(CAT(CAT(store_, A), _), ACC_NAME)(y, ya, sum);
            } else if (part == 0 && (at < 0 || at >= (long)size)) {
                fault_record(word, FAULT_INDEX, at, size);
            }
        }
    }
}
#endif

#ifdef ONE_HOT
typedef struct {
    ulong size[NK];
    long index[NK];
} Walk;
__kernel void one_hot(__global const CAT(T, _t) *index, ulong index_at, __global long *y, ulong y_at,
                      volatile __global int *word, Walk walk, ulong count, ulong classes) {
    const IDX p = (IDX)get_global_id(0);
    if (p >= (IDX)count)
        return;
    const IDX c = p % (IDX)classes;
    IDX i = p / (IDX)classes;
    for (int k = NK - 1; k >= 0; --k)
        index_at += (long)NEXT(i, walk.size, k) * walk.index[k];
    const long at = CAT(load_, T)(index, index_at);
    y[y_at + p] = at == (long)c;
    if (c == 0 && (at < 0 || at >= (long)classes))
        fault_record(word, FAULT_INDEX, at, classes);
}
#endif

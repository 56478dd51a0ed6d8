// Inclusive scans along a dim of a strided tensor: cumulative sums, products, maxima and minima with their indices, and log-sum-exps. The
// host defines A (input dtype), B (output dtype), ACC and ACC_NAME (the type of the running value), one of OP_SUM OP_PROD OP_MAX OP_MIN
// OP_LOG_SUM, ARG for maxima and minima, INTEGERS if ACC is long, NK (rank), IDX, and PHASE. PHASE 0 scans whole lines. If there are few
// lines, they are cut into slices: PHASE 1 computes the total of each slice, PHASE 2 scans the totals of a line, and PHASE 3 scans each
// slice, starting from the total before it. SERIAL: one work-item scans a slice (on CPUs, or for interleaved lines). Otherwise GROUP
// work-items scan a slice, each PER adjacent elements at a time.

STRIDED_DIMS(Rest, NK)

#ifdef INTEGERS
#define IS_NAN(v) 0
#define SUM_OF(a, b) add_long(a, b)
#define PRODUCT_OF(a, b) mul_long(a, b)
#else
#define IS_NAN(v) ((v) != (v))
#define SUM_OF(a, b) ((a) + (b))
#define PRODUCT_OF(a, b) ((a) * (b))
#endif

#ifdef ARG
// An index of -1 means that there is no element yet.
typedef struct {
    ACC v;
    long i;
} Acc;
static inline Acc pair(ACC v, long i) {
    Acc a;
    a.v = v;
    a.i = i;
    return a;
}
static inline Acc neutral(void) { return pair((ACC)0, -1); }
// Returns the better pair of value and index. Of equal values, the later is better, and a NaN is better than all numbers, the last NaN the best.
static inline Acc combine(Acc a, Acc b) {
#ifdef OP_MAX
    const int reaches = b.v >= a.v;
#else
    const int reaches = b.v <= a.v;
#endif
    return a.i < 0 || (b.i >= 0 && (IS_NAN(b.v) || (!IS_NAN(a.v) && reaches))) ? b : a;
}
#else
typedef ACC Acc;
#ifdef OP_SUM
static inline Acc neutral(void) { return (ACC)0; }
static inline Acc combine(Acc a, Acc b) { return SUM_OF(a, b); }
#elif defined(OP_PROD)
static inline Acc neutral(void) { return (ACC)1; }
static inline Acc combine(Acc a, Acc b) { return PRODUCT_OF(a, b); }
#else
static inline Acc neutral(void) { return (ACC)(-INFINITY); }
static inline Acc combine(Acc a, Acc b) {
    const ACC greater = CAT(max_, ACC)(a, b);
    return isinf(greater) ? greater : greater + log1p(exp(-fabs(a - b)));
}
#endif
#endif

#if PHASE == 2
#define GET(i) totals[totals_at + line * n + (i)]
#elif defined(ARG)
#define GET(i) pair((ACC)CAT(load_, A)(x, (ulong)(from + (long)(i) * stride)), (long)(i))
#else
#define GET(i) ((ACC)CAT(load_, A)(x, (ulong)(from + (long)(i) * stride)))
#endif

#define STORE(i, value) CAT(CAT(CAT(store_, B), _), ACC_NAME)(y, y_at + to + (i) * inner, value)
#if PHASE == 1
#define PUT(i, a)
#elif PHASE == 2
#define PUT(i, a) totals[totals_at + line * n + (i)] = (a)
#elif defined(ARG)
#define PUT(i, a)                                                                                                      \
    STORE(i, (a).v);                                                                                                   \
    indices[indices_at + to + (i) * inner] = (a).i
#else
#define PUT(i, a) STORE(i, a)
#endif

// Line `line` begins at offset `from` in x and at offset `to` in the results. In the results, elements of a line are `inner` apart.
#define PARAMETERS                                                                                                     \
    __global const CAT(A, _t) *x, ulong x_at, __global CAT(B, _t) *y, ulong y_at, __global long *indices,               \
        ulong indices_at, __global Acc *totals, ulong totals_at, Rest rest, ulong lines_, ulong n_, long stride,        \
        ulong inner_, ulong chunk_, ulong slices_
#define NUMBERS                                                                                                        \
    const IDX lines = (IDX)lines_, n = (IDX)n_, inner = (IDX)inner_, chunk = (IDX)chunk_, slices = (IDX)slices_
#define SLICE_OF(item)                                                                                                 \
    const IDX line = (item) / slices, slice = (item) % slices;                                                         \
    if (line >= lines)                                                                                                 \
        return;                                                                                                        \
    const long from = (long)x_at + at_Rest(&rest, line);                                                               \
    const IDX to = line / inner * inner * n + line % inner;                                                            \
    const IDX first = slice * chunk, end = min(first + chunk, n);                                                      \
    Acc before = neutral();                                                                                            \
    BEFORE

#if PHASE == 3
#define BEFORE                                                                                                         \
    if (slice > 0)                                                                                                     \
        before = totals[totals_at + line * slices + slice - 1]
#else
#define BEFORE
#endif

#ifdef SERIAL
__kernel void scan(PARAMETERS) {
    NUMBERS;
    SLICE_OF((IDX)get_global_id(0));
    IDX i = first;
    while (i < end) {
        // Sums are computed in blocks, which keeps the rounding error of the running sum small.
        const IDX stop = min(i + 64, end);
        Acc own = neutral();
        for (; i < stop; ++i) {
            own = combine(own, GET(i));
            PUT(i, combine(before, own));
        }
        before = combine(before, own);
    }
#if PHASE == 1
    totals[totals_at + line * slices + slice] = before;
#endif
}
#else
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void scan(PARAMETERS) {
    NUMBERS;
    const uint lid = get_local_id(0);
    SLICE_OF((IDX)get_group_id(0));
    __local Acc scratch[GROUP];
    for (IDX block = first; block < end; block += GROUP * PER) {
        Acc own[PER];
        Acc total = neutral();
        #pragma unroll
        for (uint k = 0; k < PER; ++k) {
            const IDX i = block + lid * PER + k;
            if (i < end)
                total = combine(total, GET(i));
            own[k] = total;
        }
        scratch[lid] = total;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint s = 1; s < GROUP; s *= 2) {
            if (lid >= s)
                total = combine(scratch[lid - s], total);
            barrier(CLK_LOCAL_MEM_FENCE);
            scratch[lid] = total;
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        const Acc mine = lid > 0 ? combine(before, scratch[lid - 1]) : before;
        before = combine(before, scratch[GROUP - 1]);
        barrier(CLK_LOCAL_MEM_FENCE);
        #pragma unroll
        for (uint k = 0; k < PER; ++k) {
            const IDX i = block + lid * PER + k;
            if (i < end) {
                PUT(i, combine(mine, own[k]));
            }
        }
    }
#if PHASE == 1
    if (lid == 0)
        totals[totals_at + line * slices + slice] = before;
#endif
}
#endif

// Reductions over any dims of a strided tensor. The host gives A (input dtype), B (output dtype), ACC and ACC_NAME (the accumulator's type:
// float F32, double F64 or long I64), NK and NR (ranks), IDX, one of OP_SUM OP_PROD OP_MAX OP_MIN, and
//   ARG       for argmax and argmin
//   NONZERO   where elements count as 0 or 1
//   MAPPED    where element_of maps each element (of FROM, the type that A is computed in) before the reduction
//   FINISHED  where finish_of maps each result (of ACC, over `number` elements)
//   INTEGERS  where ACC is long
// With several slices, output o of slice s is the partial result o * slices + s. A second launch reduces these (for ARG: PARTIAL writes
// and PAIRS reads values with indices), or with LAST_GROUP_SUMS the last work-group of an output to arrive. On GPUs `lanes` work-items
// share an output. With VEC above 1 elements are loaded as WIDE_T, VEC at a time: neighbours of one output, or with COLUMNS one element
// of each of VEC neighbouring outputs.

STRIDED_DIMS(Kept, NK)
STRIDED_DIMS(Reduced, NR)

#ifdef INTEGERS
#define IS_NAN(v) 0
#else
#define IS_NAN(v) ((v) != (v))
#endif

#ifdef OP_SUM
#define NEUTRAL ((ACC)0)
#define COMBINE(a, b) ((a) + (b))
#elif defined(OP_PROD)
#define NEUTRAL ((ACC)1)
#define COMBINE(a, b) ((a) * (b))
#elif defined(OP_MAX)
#define NEUTRAL LOWEST
#define BEATS(a, b) ((a) > (b))
#else
#define NEUTRAL HIGHEST
#define BEATS(a, b) ((a) < (b))
#endif
// A NaN beats everything and stays. This works for vectors too, where ?: selects lane by lane.
#ifndef COMBINE
#define COMBINE(a, b) ((BEATS(a, b) | IS_NAN(a)) ? (a) : (b))
#endif

#ifdef NONZERO
#define ELEMENT(v) ((ACC)((v) != 0))
#define ELEMENT16(v) (convert_long16((v) != 0) & 1L)
#elif defined(MAPPED)
#define ELEMENT(v) ((ACC)element_of(v, (FROM)0))
#define ELEMENT16(v) element16_of(v)
#ifdef IS_CPU
static inline CAT(ACC, 16) element16_of(CAT(FROM, 16) v) {
    FROM in[16];
    ACC out[16];
    vstore16(v, 0, in);
    #pragma unroll
    for (int k = 0; k < 16; ++k)
        out[k] = ELEMENT(in[k]);
    return vload16(0, out);
}
#endif
#else
#define ELEMENT(v) ((ACC)(v))
#define ELEMENT16(v) (v)
#endif

#ifdef ARG
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
static inline Acc neutral(void) { return pair(NEUTRAL, LONG_MAX); }
// The better one, the first among equals; the first NaN before everything.
static inline Acc combine(Acc a, Acc b) {
    const int a_nan = IS_NAN(a.v), b_nan = IS_NAN(b.v);
    const int equal = (a_nan & b_nan) | (a.v == b.v);
    const int stay = equal ? a.i <= b.i : a_nan | (!b_nan & BEATS(a.v, b.v));
    return stay ? a : b;
}
#else
typedef ACC Acc;
static inline Acc neutral(void) { return NEUTRAL; }
static inline Acc combine(Acc a, Acc b) { return COMBINE(a, b); }
#endif

// GET loads the element at offset `at`, which has index r among the reduced ones; PUT stores result o.
#ifdef PAIRS
typedef Acc In;
#define GET(at, r) (x[x_at + (at)])
#else
typedef CAT(A, _t) In;
#ifdef ARG
#define GET(at, r) pair(ELEMENT(CAT(load_, A)(x, x_at + (at))), r)
#else
#define GET(at, r) ELEMENT(CAT(load_, A)(x, x_at + (at)))
#endif
#endif
#ifdef PARTIAL
typedef Acc Out;
#define PUT(o, a) y[y_at + (o)] = (a)
#else
typedef CAT(B, _t) Out;
#ifdef FINISHED
#define RESULT(a) finish_of(a, number)
#else
#define RESULT(a) (a)
#endif
#ifdef ARG
#define PUT(o, a) CAT(CAT(store_, B), _I64)(y, y_at + (o), (a).i)
#else
#define PUT(o, a) CAT(CAT(CAT(store_, B), _), ACC_NAME)(y, y_at + (o), RESULT(a))
#endif
#endif

#define PARAMETERS                                                                                                     \
    __global const In *x, ulong x_at, __global Out *y, ulong y_at, Kept kept, Reduced reduced, ulong outs_, ulong n_,  \
        ulong chunk_, uint slices, ACC number

#ifndef IS_CPU
#if VEC > 1
// Loads in flight per lane; fewer for halves, which need more arithmetic.
#define AHEAD (VEC > 4 ? 4 : 8)

#ifdef ARG
// The best of a lane's elements from r to `end`: first for each position in a vector, then among these.
static inline Acc share(__global const In *x, IDX r, IDX end, uint lanes) {
    if (r >= end)
        return neutral();
    ACC best[VEC];
    IDX at[VEC];
    #pragma unroll
    for (int k = 0; k < VEC; ++k) {
        best[k] = ELEMENT(CAT(from_, A)(x[r]));
        at[k] = r;
    }
#define OFFER(k, raw, i)                                                                                               \
    {                                                                                                                  \
        const ACC v = ELEMENT(CAT(from_, A)(raw));                                                                     \
        if (BEATS(v, best[k]) | (IS_NAN(v) & !IS_NAN(best[k]))) {                                                      \
            best[k] = v;                                                                                               \
            at[k] = i;                                                                                                 \
        }                                                                                                              \
    }
    for (; r + (AHEAD - 1) * lanes * VEC + VEC <= end; r += AHEAD * lanes * VEC) {
        In raw[AHEAD][VEC];
        #pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            CAT(vstore, VEC)(*(__global const WIDE_T *)(x + r + a * lanes * VEC), 0, raw[a]);
        #pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            #pragma unroll
            for (int k = 0; k < VEC; ++k)
                OFFER(k, raw[a][k], r + a * lanes * VEC + k)
        }
    }
    for (; r + VEC <= end; r += lanes * VEC) {
        In raw[VEC];
        CAT(vstore, VEC)(*(__global const WIDE_T *)(x + r), 0, raw);
        #pragma unroll
        for (int k = 0; k < VEC; ++k)
            OFFER(k, raw[k], r + k)
    }
    for (; r < end; ++r)
        OFFER(0, x[r], r)
    Acc total = pair(best[0], (long)at[0]);
    #pragma unroll
    for (int k = 1; k < VEC; ++k)
        total = combine(total, pair(best[k], (long)at[k]));
    return total;
}
#else
// Combines VEC elements from x on into the accumulators.
static inline void take(Acc *acc, __global const In *x) {
    In raw[VEC];
    CAT(vstore, VEC)(*(__global const WIDE_T *)x, 0, raw);
    #pragma unroll
    for (int k = 0; k < VEC; ++k)
        acc[k] = combine(acc[k], ELEMENT(CAT(from_, A)(raw[k])));
}

#ifdef COLUMNS
// A lane's partial results of VEC neighbouring outputs, of its elements from r to `end`.
static inline void shares(Acc *total, __global const In *x, const Reduced *reduced, IDX r, IDX end, uint lanes) {
    #pragma unroll
    for (int k = 0; k < VEC; ++k)
        total[k] = neutral();
    while (r < end) {
        Acc acc[VEC];
        #pragma unroll
        for (int k = 0; k < VEC; ++k)
            acc[k] = neutral();
        uint blocks = 0;
        for (; blocks < 32 && r + 3 * lanes < end; ++blocks, r += 4 * lanes) {
            #pragma unroll
            for (int k = 0; k < 4; ++k)
                take(acc, x + at_Reduced(reduced, r + k * lanes));
        }
        if (blocks < 32)
            for (; r < end; r += lanes)
                take(acc, x + at_Reduced(reduced, r));
        #pragma unroll
        for (int k = 0; k < VEC; ++k)
            total[k] = combine(total[k], acc[k]);
    }
}
#else
// A lane's partial result, of its elements from r to `end`.
static inline Acc share(__global const In *x, IDX r, IDX end, uint lanes) {
    Acc total = neutral();
    while (r < end) {
        Acc acc[VEC];
        #pragma unroll
        for (int k = 0; k < VEC; ++k)
            acc[k] = neutral();
        // Blocks keep the running sums' rounding small.
        uint blocks = 0;
        for (; blocks < 128 / AHEAD && r + (AHEAD - 1) * lanes * VEC + VEC <= end; ++blocks, r += AHEAD * lanes * VEC) {
            #pragma unroll
            for (int k = 0; k < AHEAD; ++k)
                take(acc, x + r + k * lanes * VEC);
        }
        if (blocks < 128 / AHEAD) {
            for (; r + VEC <= end; r += lanes * VEC)
                take(acc, x + r);
            for (; r < end; ++r)
                acc[0] = combine(acc[0], ELEMENT(CAT(from_, A)(x[r])));
        }
        #pragma unroll
        for (int k = 0; k < VEC; ++k)
            total = combine(total, acc[k]);
    }
    return total;
}
#endif
#endif
#endif

// A group has `lanes` work-items for each of GROUP / lanes outputs. Neighbouring work-items are neighbouring lanes, or with `by_column`
// neighbouring outputs, so that they read neighbouring elements.
#ifdef LAST_GROUP_SUMS
// Slices write to `partial`; the last work-group of an output to arrive combines them, always in the same order.
#define LAST_GROUP_PARAMETERS , __global Acc *partial, ulong partial_at, volatile __global uint *arrived, uint first_arrived
#define PUT_PARTIAL(o, a) partial[partial_at + (o) * slices + slice] = (a)
#define WAIT_FOR_LAST_GROUP                                                                                                           \
    __local uint others;                                                                                               \
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);                                                               \
    if (lid == 0) {                                                                                                    \
        FENCE;                                                                                                         \
        others = atomic_inc(arrived + first_arrived + group / slices);                                                 \
        FENCE;                                                                                                         \
        if (others == slices - 1)                                                                                      \
            arrived[first_arrived + group / slices] = 0;                                                               \
    }                                                                                                                  \
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);                                                               \
    if (others != slices - 1)                                                                                          \
        return;
#define COMBINE_SLICES(o, there)                                                                                       \
    Acc all = neutral();                                                                                               \
    if (there)                                                                                                         \
        for (uint s = lane; s < slices; s += lanes)                                                                    \
            all = combine(all, partial[partial_at + (o) * slices + s]);                                                \
    FOLD(combine, all);                                                                                                \
    if (lane == 0 && (there))                                                                                          \
        PUT(o, all);                                                                                                   \
    barrier(CLK_LOCAL_MEM_FENCE) /* see FENCE */
#else
#define LAST_GROUP_PARAMETERS
#define PUT_PARTIAL(o, a) PUT((o) * slices + slice, a)
#define WAIT_FOR_LAST_GROUP
#define COMBINE_SLICES(o, there)
#endif

__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void reduce(PARAMETERS, uint by_column, uint lanes LAST_GROUP_PARAMETERS) {
    const IDX outs = (IDX)outs_, n = (IDX)n_, chunk = (IDX)chunk_;
    const uint lid = get_local_id(0), per = GROUP / lanes;
    const uint lane = by_column ? lid / per : lid % lanes;
    const uint step = by_column ? per : 1;
    const IDX group = (IDX)get_group_id(0), slice = group % slices;
#ifdef COLUMNS
    const IDX first = (group / slices * per + lid % per) * VEC;
    Acc totals[VEC];
    shares(totals, x + x_at + at_Kept(&kept, min(first, outs - VEC)), &reduced, slice * chunk + lane,
           first < outs ? min(slice * chunk + chunk, n) : 0, lanes);
    __local Acc scratch[GROUP];
    #pragma unroll
    for (int k = 0; k < VEC; ++k) {
        Acc total = totals[k];
        FOLD(combine, total);
        if (lane == 0 && first < outs)
            PUT_PARTIAL(first + k, total);
    }
    WAIT_FOR_LAST_GROUP
    for (int k = 0; k < VEC; ++k) {
        COMBINE_SLICES(first + k, first < outs);
    }
#else
    const IDX o = group / slices * per + (by_column ? lid % per : lid / lanes);
    Acc total = neutral();
    if (o < outs) {
        const long base = at_Kept(&kept, o);
        const IDX end = min(slice * chunk + chunk, n);
#if VEC > 1
        total = share(x + x_at + base, slice * chunk + lane * VEC, end, lanes);
#else
        IDX r = slice * chunk + lane;
        // Four chains hide the latency of loads; blocks keep the running sum's rounding small.
        while (r < end) {
            Acc a = neutral(), b = neutral(), c = neutral(), d = neutral();
            uint k = 0;
            for (; k < 32 && r + 3 * lanes < end; ++k, r += 4 * lanes) {
                a = combine(a, GET(base + at_Reduced(&reduced, r), r));
                b = combine(b, GET(base + at_Reduced(&reduced, r + lanes), r + lanes));
                c = combine(c, GET(base + at_Reduced(&reduced, r + 2 * lanes), r + 2 * lanes));
                d = combine(d, GET(base + at_Reduced(&reduced, r + 3 * lanes), r + 3 * lanes));
            }
            if (k < 32)
                for (; r < end; r += lanes)
                    a = combine(a, GET(base + at_Reduced(&reduced, r), r));
            total = combine(total, combine(combine(a, b), combine(c, d)));
        }
#endif
    }
    __local Acc scratch[GROUP];
    FOLD(combine, total);
    if (lane == 0 && o < outs)
        PUT_PARTIAL(o, total);
    WAIT_FOR_LAST_GROUP
    COMBINE_SLICES(o, o < outs);
#endif
}
#else
// Processors: a work-item has one output of one slice, or with `by_column` sixteen neighbouring columns. It uses sixteen accumulators
// and no local memory.
#ifndef PAIRS
typedef CAT(ACC, 16) Acc16;
#ifdef ARG
// For each vector lane, the best element so far and its step (-1: none yet).
typedef struct {
    Acc16 v;
    STEP16 from;
} Wide;
static inline Wide neutral16(void) {
    Wide w;
    w.v = (Acc16)(NEUTRAL);
    w.from = (STEP16)(-1);
    return w;
}
static inline Wide combine16(Wide w, Acc16 v, long step) {
    const STEP16 better = BEATS(v, w.v) | (IS_NAN(v) & !IS_NAN(w.v)) | (w.from < 0);
    w.v = better ? v : w.v;
    w.from = better ? (STEP16)(step) : w.from;
    return w;
}
#else
typedef Acc16 Wide;
static inline Wide neutral16(void) { return (Acc16)(NEUTRAL); }
static inline Wide combine16(Wide w, Acc16 v, long step) { return COMBINE(w, v); }
#endif
#define GET16(at) ELEMENT16(CAT(load16_, A)(x, x_at + (at)))

// Reduces the sixteen lanes of w; step s of lane k has index first + s * by + k * lane.
static inline void lanes_of(Wide w, long first, long by, long lane, Acc *out) {
#ifdef ARG
    ACC v[16];
    STEP from[16];
    vstore16(w.v, 0, v);
    vstore16(w.from, 0, from);
    for (int k = 0; k < 16; ++k)
        out[k] = from[k] < 0 ? neutral() : pair(v[k], first + (long)from[k] * by + k * lane);
#else
    vstore16(w, 0, out);
#endif
}
#endif

// The reduction of n elements `stride` apart; the first has index r.
static inline Acc run(__global const In *x, ulong x_at, long at, IDX n, long stride, long r) {
    Acc total = neutral();
    IDX i = 0;
#ifndef PAIRS
    if (stride == 1 && n >= 32) {
        // Blocks keep the running sums' rounding small.
        while (i + 32 <= n) {
            const IDX first = i;
            Wide a = neutral16(), b = neutral16();
            for (uint k = 0; k < 64 && i + 32 <= n; ++k, i += 32) {
                a = combine16(a, GET16(at + i), k);
                b = combine16(b, GET16(at + i + 16), k);
            }
            Acc lanes[32];
            lanes_of(a, r + first, 32, 1, lanes);
            lanes_of(b, r + first + 16, 32, 1, lanes + 16);
            for (int s = 16; s > 0; s /= 2)
                for (int k = 0; k < s; ++k)
                    lanes[k] = combine(lanes[k], lanes[k + s]);
            total = combine(total, lanes[0]);
        }
    }
#endif
    while (i < n) {
        Acc a = neutral(), b = neutral();
        uint k = 0;
        for (; k < 64 && i + 2 <= n; ++k, i += 2) {
            a = combine(a, GET(at + (long)i * stride, r + (long)i));
            b = combine(b, GET(at + (long)(i + 1) * stride, r + (long)i + 1));
        }
        if (k < 64 && i < n) {
            a = combine(a, GET(at + (long)i * stride, r + (long)i));
            ++i;
        }
        total = combine(total, combine(a, b));
    }
    return total;
}

// The reduction of positions [r, end) of one output, in runs along the innermost dim.
static inline Acc line(__global const In *x, ulong x_at, long base, const Reduced *reduced, IDX r, IDX end) {
    const IDX inner = (IDX)reduced->size[NR - 1];
    Acc total = neutral();
    while (r < end) {
        const IDX n = min(inner - r % inner, end - r);
        const long at = base + at_Reduced(reduced, r);
        total = combine(total, run(x, x_at, at, n, reduced->stride[NR - 1], (long)r));
        r += n;
    }
    return total;
}

__kernel void reduce(PARAMETERS, uint by_column) {
    const IDX outs = (IDX)outs_, n = (IDX)n_, chunk = (IDX)chunk_;
    const IDX item = (IDX)get_global_id(0) / slices, slice = (IDX)get_global_id(0) % slices;
    const IDX start = slice * chunk, end = min(start + chunk, n);
    if (!by_column) {
        if (item < outs) {
            const Acc result = line(x, x_at, at_Kept(&kept, item), &reduced, start, end);
            PUT(item * slices + slice, result);
        }
        return;
    }
#ifndef PAIRS
    const IDX columns = (IDX)kept.size[NK - 1], blocks = (columns + 15) / 16;
    const IDX column = item % blocks * 16, o = item / blocks * columns + column;
    if (o >= outs)
        return;
    const long base = at_Kept(&kept, o);
    if (column + 16 > columns) {
        for (IDX k = 0; column + k < columns; ++k) {
            const Acc result = line(x, x_at, base + (long)k, &reduced, start, end);
            PUT((o + k) * slices + slice, result);
        }
        return;
    }
    Acc total[16];
    for (int k = 0; k < 16; ++k)
        total[k] = neutral();
    for (IDX r = start; r < end;) {
        const IDX first = r;
        Wide w = neutral16();
        for (; r < end && r < first + 64; ++r)
            w = combine16(w, GET16(base + at_Reduced(&reduced, r)), (long)(r - first));
        Acc lanes[16];
        lanes_of(w, (long)first, 1, 0, lanes);
        for (int k = 0; k < 16; ++k)
            total[k] = combine(total[k], lanes[k]);
    }
    for (int k = 0; k < 16; ++k)
        PUT((o + k) * slices + slice, total[k]);
#endif
}
#endif

// Reductions on CPUs. Follows reduce.cl. A work-item computes one slice of one output, or with `by_column` of sixteen adjacent outputs.
// It uses sixteen accumulators and no local memory.
#ifdef IS_CPU
#ifndef PAIRS
typedef CAT(ACC, 16) Acc16;
#ifdef ARG
// For each vector lane: the best element so far and the step at which it was read (-1 if there is no element yet).
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

// Copies the sixteen lanes of w to `out`. Step s of lane k has the index first + s * by + k * lane.
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

// Reduces n elements that are `stride` apart. The first element has index r.
static inline Acc run(__global const In *x, ulong x_at, long at, IDX n, long stride, long r, ACC factor) {
    Acc total = neutral();
    IDX i = 0;
#ifndef PAIRS
    if (stride == 1 && n >= 32) {
        // Sums are computed in blocks, which keeps the rounding errors of running sums small.
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

// Reduces the positions [r, end) of one output. A run is a range of positions along the innermost dim.
static inline Acc line(__global const In *x, ulong x_at, long base, const Reduced *reduced, IDX r, IDX end, ACC factor) {
    const IDX inner = (IDX)reduced->size[NR - 1];
    Acc total = neutral();
    while (r < end) {
        const IDX n = min(inner - r % inner, end - r);
        const long at = base + at_Reduced(reduced, r);
        total = combine(total, run(x, x_at, at, n, reduced->stride[NR - 1], (long)r, factor));
        r += n;
    }
    return total;
}

// Stores the result `made`, an expression that contains `factor`. If the first result needs another factor, `made` is computed again.
#ifdef RESCALED
#define PUT_MADE(o, made)                                                                                              \
    {                                                                                                                  \
        ACC factor = 1;                                                                                                \
        Acc result = made;                                                                                             \
        const uint attempt = ATTEMPT_FOR(result);                                                                      \
        if (attempt > 0) {                                                                                             \
            factor = FACTOR_OF(attempt);                                                                               \
            result = made;                                                                                             \
        }                                                                                                              \
        PUT(o, result, attempt);                                                                                       \
    }
#else
#define PUT_MADE(o, made)                                                                                              \
    {                                                                                                                  \
        const ACC factor = 1;                                                                                          \
        const Acc result = made;                                                                                       \
        PUT(o, result, 0);                                                                                             \
    }
#endif

#ifdef ROW
// Contiguous rows of ROW elements (2 to 4): each work-item reduces sixteen rows. `column` is a vector of element j of each row.
__kernel void reduce(PARAMETERS, uint by_column) {
    const IDX outs = (IDX)outs_, first = (IDX)get_global_id(0) * 16;
    const ACC factor = 1;
    if (first + 16 > outs) {
        for (IDX o = first; o < outs; ++o)
            PUT_MADE(o, run(x, x_at, (long)o * ROW, ROW, 1, 0, factor))
        return;
    }
    ACC elements[16 * ROW];
    #pragma unroll
    for (int j = 0; j < ROW; ++j)
        vstore16(GET16((long)first * ROW + 16 * j), j, elements);
    Wide w = neutral16();
    #pragma unroll
    for (int j = 0; j < ROW; ++j) {
        ACC column[16];
        #pragma unroll
        for (int k = 0; k < 16; ++k)
            column[k] = elements[k * ROW + j];
        w = combine16(w, vload16(0, column), j);
    }
    Acc totals[16];
    lanes_of(w, 0, 1, 0, totals);
    #pragma unroll
    for (int k = 0; k < 16; ++k) {
#ifdef RESCALED
        if (ATTEMPT_FOR(totals[k]) > 0) {
            PUT_MADE(first + k, run(x, x_at, (long)(first + k) * ROW, ROW, 1, 0, factor))
            continue;
        }
#endif
        PUT(first + k, totals[k], 0);
    }
}
#else
__kernel void reduce(PARAMETERS, uint by_column) {
    const IDX outs = (IDX)outs_, n = (IDX)n_, chunk = (IDX)chunk_;
    const IDX item = (IDX)get_global_id(0) / slices, slice = (IDX)get_global_id(0) % slices;
    const IDX start = slice * chunk, end = min(start + chunk, n);
    if (!by_column) {
        if (item < outs)
            PUT_MADE(item * slices + slice, line(x, x_at, at_Kept(&kept, item), &reduced, start, end, factor))
        return;
    }
#ifndef PAIRS
    const IDX columns = (IDX)kept.size[NK - 1], blocks = (columns + 15) / 16;
    const IDX column = item % blocks * 16, o = item / blocks * columns + column;
    if (o >= outs)
        return;
    const long base = at_Kept(&kept, o);
    if (column + 16 > columns) {
        for (IDX k = 0; column + k < columns; ++k)
            PUT_MADE((o + k) * slices + slice, line(x, x_at, base + (long)k, &reduced, start, end, factor))
        return;
    }
    const ACC factor = 1;
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
    for (int k = 0; k < 16; ++k) {
#ifdef RESCALED
        if (ATTEMPT_FOR(total[k]) > 0) {
            PUT_MADE((o + k) * slices + slice, line(x, x_at, base + k, &reduced, start, end, factor))
            continue;
        }
#endif
        PUT((o + k) * slices + slice, total[k], 0);
    }
#endif
}
#endif
#endif

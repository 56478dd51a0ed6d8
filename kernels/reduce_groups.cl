// Reductions by work-groups, for GPUs. Follows reduce.cl.

#ifndef IS_CPU
#if VEC > 1
// The number of loads that a lane has in flight. For halves there are fewer, because halves need more arithmetic.
#define AHEAD (VEC > 4 ? 4 : 8)

#ifdef ARG
// Returns the best of a lane's elements from r to `end`: first the best at each position in a vector, then the best of these.
static inline Acc share(__global const In *x, IDX r, IDX end, uint lanes, ACC factor) {
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
// Adds VEC elements from x on to the accumulators.
static inline void take(Acc *acc, __global const In *x, ACC factor) {
    In raw[VEC];
    CAT(vstore, VEC)(*(__global const WIDE_T *)x, 0, raw);
    #pragma unroll
    for (int k = 0; k < VEC; ++k)
        acc[k] = combine(acc[k], ELEMENT(CAT(from_, A)(raw[k])));
}

#ifdef COLUMNS
// Computes a lane's partial results of VEC adjacent outputs, from the lane's elements r to `end`.
static inline void shares(Acc *total, __global const In *x, const Reduced *reduced, IDX r, IDX end, uint lanes,
                          ACC factor) {
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
                take(acc, x + at_Reduced(reduced, r + k * lanes), factor);
        }
        if (blocks < 32)
            for (; r < end; r += lanes)
                take(acc, x + at_Reduced(reduced, r), factor);
        #pragma unroll
        for (int k = 0; k < VEC; ++k)
            total[k] = combine(total[k], acc[k]);
    }
}
#else
// Returns a lane's partial result, from the lane's elements r to `end`.
static inline Acc share(__global const In *x, IDX r, IDX end, uint lanes, ACC factor) {
    Acc total = neutral();
    while (r < end) {
        Acc acc[VEC];
        #pragma unroll
        for (int k = 0; k < VEC; ++k)
            acc[k] = neutral();
        // Sums are computed in blocks, which keeps the rounding errors of running sums small.
        uint blocks = 0;
        for (; blocks < 128 / AHEAD && r + (AHEAD - 1) * lanes * VEC + VEC <= end; ++blocks, r += AHEAD * lanes * VEC) {
            #pragma unroll
            for (int k = 0; k < AHEAD; ++k)
                take(acc, x + r + k * lanes * VEC, factor);
        }
        if (blocks < 128 / AHEAD) {
            for (; r + VEC <= end; r += lanes * VEC)
                take(acc, x + r, factor);
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

// A group has `lanes` work-items for each of GROUP / lanes outputs. Adjacent work-items are adjacent lanes, or with `by_column` work on
// adjacent outputs, so that they read adjacent elements.
#ifdef LAST_GROUP_SUMS
// Slices write to `partial`. The last work-group of an output to finish combines the slices, always in the same order.
#define LAST_GROUP_PARAMETERS , __global Acc *partial, ulong partial_at, volatile __global uint *arrived, uint first_arrived
// With RESCALED, partial results are in range: they are square roots of sums of squares, or for a mean, already divided by the count.
#if defined(RESCALED) && defined(SQUARES)
#ifdef ROOT
#define PARTIAL_OF(a) FINISH(a)
#define WHOLE_OF(a) sqrt(a)
#else
#define PARTIAL_OF(a) sqrt(FINISH(a))
#define WHOLE_OF(a) (a)
#endif
#define PUT_PARTIAL(o, a, attempt) partial[partial_at + (o) * slices + slice] = PARTIAL_OF(a) / FACTOR_OF(attempt)
#define GREATER(a, b) fmax(a, b)
#define FROM_PARTIAL(p) ((p) * factor * ((p) * factor))
#define PUT_WHOLE(o, a) CAT(CAT(CAT(store_, B), _), ACC_NAME)(y, y_at + (o), UNDO(WHOLE_OF(a), factor))
#define CHOOSE_FACTOR(o, there)                                                                                        \
    Acc greatest = 0;                                                                                                  \
    if (there)                                                                                                         \
        for (uint s = lane; s < slices; s += lanes)                                                                    \
            greatest = fmax(greatest, partial[partial_at + (o) * slices + s]);                                         \
    FOLD(GREATER, greatest);                                                                                           \
    const uint attempt = greatest > sqrt(LARGEST) / 128 ? 1 : greatest < sqrt(LEAST) ? 2 : 0;                           \
    const ACC factor = FACTOR_OF(attempt);
#else
#ifdef RESCALED
#define PUT_PARTIAL(o, a, attempt) partial[partial_at + (o) * slices + slice] = RESULT(a, attempt)
#define PUT_WHOLE(o, a) CAT(CAT(CAT(store_, B), _), ACC_NAME)(y, y_at + (o), a)
#else
#define PUT_PARTIAL(o, a, attempt) partial[partial_at + (o) * slices + slice] = (a)
#define PUT_WHOLE(o, a) PUT(o, a, 0)
#endif
#define FROM_PARTIAL(p) (p)
#define CHOOSE_FACTOR(o, there)
#endif
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
    CHOOSE_FACTOR(o, there)                                                                                            \
    Acc all = neutral();                                                                                               \
    if (there)                                                                                                         \
        for (uint s = lane; s < slices; s += lanes)                                                                    \
            all = combine(all, FROM_PARTIAL(partial[partial_at + (o) * slices + s]));                                  \
    FOLD(combine, all);                                                                                                \
    if (lane == 0 && (there))                                                                                          \
        PUT_WHOLE(o, all);                                                                                             \
    barrier(CLK_LOCAL_MEM_FENCE) /* see FENCE */
#else
#define LAST_GROUP_PARAMETERS
#define PUT_PARTIAL(o, a, attempt) PUT((o) * slices + slice, a, attempt)
#define WAIT_FOR_LAST_GROUP
#define COMBINE_SLICES(o, there)
#endif

// Processes all elements, and with RESCALED processes them again with each factor that a sum of the group needs. Work-items that
// need no factor take part as well, because every work-item must reach every barrier.
#ifdef RESCALED
// `wanted` has a bit for each attempt that an output of the group needs. The first FOLD puts a barrier between setting `needed` to
// zero and the writes to it. The attempts are unrolled, so that the factor of the first attempt is the constant 1.
#define FOR_EACH_FACTOR                                                                                                \
    __local uint needed[2];                                                                                            \
    uint wanted = 0;                                                                                                   \
    if (lid < 2)                                                                                                       \
        needed[lid] = 0;                                                                                               \
    _Pragma("unroll") for (uint attempt = 0; attempt < 3; ++attempt) {                                                 \
        const ACC factor = FACTOR_OF(attempt);                                                                         \
        if (attempt == 0 || wanted >> attempt & 1) {
#define KEEP(kept, its_attempt, total)                                                                                 \
    if (its_attempt == attempt) {                                                                                      \
        kept = total;                                                                                                  \
        if (attempt == 0) {                                                                                            \
            its_attempt = ATTEMPT_FOR(total);                                                                          \
            wanted |= 1 << its_attempt;                                                                                \
        }                                                                                                              \
    }
#define END_OF_FACTORS                                                                                                 \
            if (attempt == 0 && lanes < GROUP) {                                                                       \
                if (wanted & 2)                                                                                        \
                    needed[0] = 2;                                                                                     \
                if (wanted & 4)                                                                                        \
                    needed[1] = 4;                                                                                     \
                barrier(CLK_LOCAL_MEM_FENCE);                                                                          \
                wanted = needed[0] | needed[1];                                                                        \
            }                                                                                                          \
        }                                                                                                              \
    }
#else
#define FOR_EACH_FACTOR {
#define KEEP(kept, its_attempt, total) kept = total;
#define END_OF_FACTORS }
#endif

__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void reduce(PARAMETERS, uint by_column, uint lanes LAST_GROUP_PARAMETERS) {
    const IDX outs = (IDX)outs_, n = (IDX)n_, chunk = (IDX)chunk_;
    const uint lid = get_local_id(0), per = GROUP / lanes;
    const uint lane = by_column ? lid / per : lid % lanes;
    const uint step = by_column ? per : 1;
    const IDX group = (IDX)get_group_id(0), slice = group % slices;
    __local Acc scratch[GROUP];
#ifdef COLUMNS
    const IDX first = (group / slices * per + lid % per) * VEC;
    Acc kept_totals[VEC];
    uint attempts[VEC];
    #pragma unroll
    for (int k = 0; k < VEC; ++k)
        attempts[k] = 0;
    FOR_EACH_FACTOR
        Acc totals[VEC];
        shares(totals, x + x_at + at_Kept(&kept, min(first, outs - VEC)), &reduced, slice * chunk + lane,
               first < outs ? min(slice * chunk + chunk, n) : 0, lanes, FACTOR_HERE);
        #pragma unroll
        for (int k = 0; k < VEC; ++k) {
            Acc total = totals[k];
            FOLD(combine, total);
            KEEP(kept_totals[k], attempts[k], total)
        }
    END_OF_FACTORS
    #pragma unroll
    for (int k = 0; k < VEC; ++k)
        if (lane == 0 && first < outs)
            PUT_PARTIAL(first + k, kept_totals[k], attempts[k]);
    WAIT_FOR_LAST_GROUP
    for (int k = 0; k < VEC; ++k) {
        COMBINE_SLICES(first + k, first < outs);
    }
#else
    const IDX o = group / slices * per + (by_column ? lid % per : lid / lanes);
    Acc kept_total;
    uint its_attempt = 0;
    FOR_EACH_FACTOR
        Acc total = neutral();
        if (o < outs) {
            const long base = at_Kept(&kept, o);
            const IDX end = min(slice * chunk + chunk, n);
#if VEC > 1
            total = share(x + x_at + base, slice * chunk + lane * VEC, end, lanes, FACTOR_HERE);
#else
            IDX r = slice * chunk + lane;
            // Four chains of additions hide the latency of loads. Blocks keep the rounding error of the running sum small.
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
        FOLD(combine, total);
        KEEP(kept_total, its_attempt, total)
    END_OF_FACTORS
    if (lane == 0 && o < outs)
        PUT_PARTIAL(o, kept_total, its_attempt);
    WAIT_FOR_LAST_GROUP
    COMBINE_SLICES(o, o < outs);
#endif
}
#endif

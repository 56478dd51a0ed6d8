// Norm layers: rows are normalised to mean 0 and variance 1, or to a mean square of 1, then scaled and shifted. A row is two dims of a view
// with four dims, [rows, inner rows | outer, inner], so one channel of a batch can also be a row. Follows norm_arguments.cl. The host
// defines A (dtype), ACC and ACC_NAME, IDX, FLAT if rows have one outer index, and RMS if the mean is not subtracted. CPUs: one work-item
// per row. GPUs: LANES work-items of a group of GROUP keep a row in registers, each CACHED times VEC adjacent elements (loaded as WIDE_T if
// VEC is above 1), so that the row is read once. Longer rows are cut into `slices` of `chunk` elements, which go through registers block by
// block: a launch with PARTS writes the sums of the slices, and a launch with APPLY combines the sums, always in the same order, and writes
// the result. EACH: every element has its own weight. COLUMNS: the rows of a lane are consecutive, and the lane writes its sums for the
// gradients of weights. VARIANCE: only the sum of squared deviations divided by eps is computed, or with ROOT its square root.

typedef struct {
    ulong inner_rows, outer, inner;
    // Strides of the input, of the result, and, if they exist, of the input of the forward pass (z), the weight and the bias.
    long x[4], y[4], z[4], w[4], b[4];
} Rows;

#define LOAD CAT(load_, A)
#define STORE CAT(CAT(CAT(store_, A), _), ACC_NAME)

#ifdef FLAT
#define ELEMENT_OFFSET(s2, s3) ((long)e * (s3))
#else
#define ELEMENT_OFFSET(s2, s3) ((long)(e / inner) * (s2) + (long)(e % inner) * (s3))
#endif
#define AT(base, s) ((base) + ELEMENT_OFFSET((s)[2], (s)[3]))
#define ROW(base, s) ((base) + (long)(r / (IDX)d.inner_rows) * (s)[0] + (long)(r % (IDX)d.inner_rows) * (s)[1])

// Forward: the statistics of each row are written. Backward: x is the gradient of the result, and z is the input of the forward
// pass. Also written are two unweighted sums for each row: of the gradient, and of the gradient times the normalised input.
#define PARAMETERS                                                                                                     \
    In x, ulong x_at, Out y, ulong y_at, FORWARDS_INPUT ITS_WEIGHT ITS_BIAS __global ACC *statistics,                   \
        ulong statistics_at, ITS_SUMS Rows d, ulong count_, ACC eps

#ifndef IS_CPU
#define KEPT (CACHED * VEC)
#define BLOCK (LANES * KEPT)
#define PLUS(a, b) ((a) + (b))
// Uses of `pairs` and of `scratch` alternate, so no extra barrier is needed, except if no mean is computed.
#ifdef RMS
#define FOLD_PAIRS(s)                                                                                                  \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                                      \
    FOLD_IN(PLUS, s, pairs)
#else
#define FOLD_PAIRS(s) FOLD_IN(PLUS, s, pairs)
#endif

// Loads the weights or the biases of VEC adjacent elements.
static inline void factors(ACC *v, Weights w, ulong at) {
#ifdef EACH
    get(v, w, at);
#else
    const ACC f = LOAD_WEIGHT(w, at);
    #pragma unroll
    for (int j = 0; j < VEC; ++j)
        v[j] = f;
#endif
}

// Loads a lane's part of a block that ends at `stop`. e is the first element of the lane. Elements past the end are set to `other`.
static inline void block_of(ACC *v, In x, ulong at, long s2, long s3, IDX inner, IDX e, IDX stop, ACC other) {
    #pragma unroll
    for (int k = 0; k < CACHED; ++k, e += LANES * VEC) {
        if (e < stop) {
            get(v + k * VEC, x, at + ELEMENT_OFFSET(s2, s3));
        } else {
            #pragma unroll
            for (int j = 0; j < VEC; ++j)
                v[k * VEC + j] = other;
        }
    }
}

static inline ACC sum_of(const ACC *v) {
    ACC s = 0;
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        s += v[k];
    return s;
}

// Returns two sums over the elements: of the deviations from `mean`, and of the squares of these deviations.
static inline Two sums_above(const ACC *v, ACC mean, IDX e, IDX stop) {
    Two s = 0;
    #pragma unroll
    for (int k = 0; k < CACHED; ++k, e += LANES * VEC) {
        if (e < stop) {
            #pragma unroll
            for (int j = 0; j < VEC; ++j) {
                const ACC above = v[k * VEC + j] - mean;
                s += (Two)(above, above * above);
            }
        }
    }
    return s;
}

static inline void times(ACC *v, ACC factor) {
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        v[k] *= factor;
}

static inline void normalise(ACC *v, ACC mean, ACC low, ACC scale) {
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        v[k] = (v[k] - mean - low) * scale;
}

static inline Two sums_of(const ACC *g, const ACC *z) {
    Two s = 0;
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        s += (Two)(g[k], g[k] * z[k]);
    return s;
}

#if defined(WEIGHT) && !defined(WEIGHTED_ROWS)
static inline void weigh(ACC *v, Weights w, ulong at, long s2, long s3, IDX inner, IDX e, IDX stop) {
    #pragma unroll
    for (int k = 0; k < CACHED; ++k, e += LANES * VEC) {
        if (e < stop) {
            ACC f[VEC];
            factors(f, w, at + ELEMENT_OFFSET(s2, s3));
            #pragma unroll
            for (int j = 0; j < VEC; ++j)
                v[k * VEC + j] *= f[j];
        }
    }
}
#define WEIGH(v, r) weigh(v, w, ROW(w_at, d.w), d.w[2], d.w[3], inner, first, stop)
#else
#define WEIGH(v, r)
#endif

#define FETCH(v, t, base, s, other) block_of(v, t, base, (s)[2], (s)[3], inner, first, stop, other)

#if defined(PARTS) || defined(APPLY)
#define SLICED , __global Two *parts, ulong parts_at, uint slices, ulong chunk_
#else
#define SLICED
#endif
#ifdef COLUMNS
#define ITS_COLUMNS __global ACC *columns, ulong columns_at, uint each_has,
#else
#define ITS_COLUMNS
#endif

__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void norm(ITS_COLUMNS PARAMETERS SLICED) {
    const IDX count = (IDX)count_, inner = (IDX)d.inner, n = (IDX)d.outer * inner;
    const uint lid = get_local_id(0), lanes = LANES, lane = lid % LANES, step = 1;
    __global ACC *means = statistics + statistics_at, *scales = means + count;
    const IDX group = (IDX)get_group_id(0);
    ACC v[KEPT];
#if defined(PARTS) || defined(APPLY) && !defined(VARIANCE)
    const IDX r = group / slices, slice = group % slices, chunk = (IDX)chunk_;
    const IDX start = slice * chunk, stop = min(start + chunk, n);
#elif defined(APPLY)
    const IDX r = group, slice = 0, chunk = (IDX)chunk_;
#elif !defined(COLUMNS)
    // Work-items past the last row get an empty row, so that they reach every barrier as well.
    const IDX mine = group * (GROUP / LANES) + lid / LANES, r = min(mine, count - 1), stop = mine < count ? n : 0;
    const IDX first = lane * VEC, slice = mine < count ? 0 : 1;
#endif

#ifndef BACKWARD
    __local ACC scratch[GROUP];
    __local Two pairs[GROUP];
    // The mean is stored as the sum `mean + low`. All statistics are of elements multiplied by `factor`.
    ACC factor = 1, mean, low, squares;
#ifdef VARIANCE
#define LEAST_OF_VARIANCE 0
#else
#define LEAST_OF_VARIANCE eps
#endif
#ifdef PARTS
    #pragma unroll
    for (uint attempt = 0; attempt < 2; ++attempt) {
        ACC seen = 0;
        mean = low = squares = 0;
        for (IDX from = start; from < stop; from += BLOCK) {
            const IDX first = from + lane * VEC;
            const ACC here = (ACC)min((IDX)BLOCK, stop - from), all = seen + here;
            FETCH(v, x, ROW(x_at, d.x), d.x, 0);
            times(v, factor);
            ACC middle = 0;
#ifndef RMS
            middle = sum_of(v);
            FOLD_IN(PLUS, middle, scratch);
            middle /= here;
#endif
            Two s = sums_above(v, middle, first, stop);
            FOLD_PAIRS(s);
#ifdef RMS
            squares += s.y;
#else
            if (from == start)
                mean = middle;
            const ACC apart = middle - mean + s.x / here - low;
            low += apart * (here / all);
            squares += squares_about_mean(s, here) + apart * apart * (seen * here / all);
            seen = all;
#endif
        }
        const ACC needed = attempt == 0 ? factor_for(mean + low, squares, LEAST_OF_VARIANCE) : 1;
        if (needed == 1)
            break;
        factor = needed;
    }
    // The square root of the mean square is in the range of ACC, because the elements are.
    if (lane == 0)
        parts[parts_at + (ulong)r * slices + slice] = (Two)((mean + low) / factor, sqrt(squares / (ACC)(stop - start)) / factor);
#else
#ifdef APPLY
    mean = parts[parts_at + (ulong)r * slices].x;
    low = 0;
    for (uint s = lane; s < slices; s += LANES)
        low += (parts[parts_at + (ulong)r * slices + s].x - mean) * ((ACC)min(chunk, n - s * chunk) / (ACC)n);
    FOLD(PLUS, low);
    #pragma unroll
    for (uint attempt = 0; attempt < 2; ++attempt) {
        squares = 0;
        for (uint s = lane; s < slices; s += LANES) {
            const Two part = parts[parts_at + (ulong)r * slices + s] * factor;
            const ACC apart = part.x - mean * factor - low * factor;
            squares += (part.y * part.y + apart * apart) * (ACC)min(chunk, n - s * chunk);
        }
        FOLD(PLUS, squares);
        const ACC needed = attempt == 0 ? factor_for(mean + low, squares, LEAST_OF_VARIANCE) : 1;
        if (needed == 1)
            break;
        factor = needed;
    }
    mean *= factor;
    low *= factor;
#else
#if LANES < GROUP
    __local uint again;
    if (lid == 0)
        again = 0;
    barrier(CLK_LOCAL_MEM_FENCE); // before another work-item sets it
#endif
    FETCH(v, x, ROW(x_at, d.x), d.x, 0);
    #pragma unroll
    for (uint attempt = 0; attempt < 2; ++attempt) {
        mean = low = 0;
#ifndef RMS
        mean = sum_of(v);
        FOLD_IN(PLUS, mean, scratch);
        mean /= (ACC)n;
#endif
        Two s = sums_above(v, mean, first, stop);
        FOLD_PAIRS(s);
#ifdef RMS
        squares = s.y;
#else
        low = s.x / (ACC)n;
        squares = squares_about_mean(s, (ACC)n);
#endif
        if (attempt == 1)
            break;
        factor = factor_for(mean, squares, LEAST_OF_VARIANCE);
#if LANES < GROUP
        // All rows of a group are repeated together, because every work-item must reach every barrier.
        if (factor != 1)
            again = 1;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (!again)
            break;
#else
        if (factor == 1)
            break;
#endif
        times(v, factor);
    }
#endif
#ifdef VARIANCE
    ACC var = squares / eps;
#ifdef ROOT
    var = sqrt(var) / factor;
#else
    var = var / factor / factor;
#endif
    if (lane == 0 && slice == 0)
        STORE(y, y_at + r, var);
#else
    const ACC var = squares / (ACC)n, scale = 1 / sqrt(var + eps * factor * factor);
    if (lane == 0 && slice == 0) {
        means[r] = (mean + low) / factor;
        scales[r] = scale * factor;
        scales[count + r] = var / factor / factor;
    }
#ifdef APPLY
    for (IDX first = start + lane * VEC; first < stop; first += BLOCK) {
        FETCH(v, x, ROW(x_at, d.x), d.x, 0);
        times(v, factor);
#else
    {
#endif
        normalise(v, mean, low, scale);
        IDX e = first;
        #pragma unroll
        for (int k = 0; k < CACHED; ++k, e += LANES * VEC) {
            if (e < stop) {
                ACC f[VEC];
#ifdef WEIGHT
                factors(f, w, AT(ROW(w_at, d.w), d.w));
                #pragma unroll
                for (int j = 0; j < VEC; ++j)
                    v[k * VEC + j] *= f[j];
#endif
#ifdef BIAS
                factors(f, b, AT(ROW(b_at, d.b), d.b));
                #pragma unroll
                for (int j = 0; j < VEC; ++j)
                    v[k * VEC + j] += f[j];
#endif
                put(y, AT(ROW(y_at, d.y), d.y), v + k * VEC);
            }
        }
    }
#endif
#endif

#else
    __local Two scratch[GROUP];
    ACC g[KEPT];
#ifdef COLUMNS
    const IDX slot = group * (GROUP / LANES) + lid / LANES, begin = slot * each_has, first = lane * VEC;
    ACC gs[KEPT], products[KEPT];
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        gs[k] = products[k] = 0;
    for (uint i = 0; i < each_has; ++i) {
        const IDX mine = begin + i, r = min(mine, count - 1), stop = mine < count ? n : 0;
#else
    {
#endif
        const ACC mean = means[r], scale = scales[r];
        Two s = 0;
#ifdef APPLY
        for (uint k = lane; k < slices; k += LANES)
            s += parts[parts_at + (ulong)r * slices + k];
#elif defined(PARTS)
        for (IDX first = start + lane * VEC; first < stop; first += BLOCK) {
            FETCH(g, x, ROW(x_at, d.x), d.x, 0);
            FETCH(v, z, ROW(z_at, d.z), d.z, mean);
            normalise(v, mean, 0, scale);
            WEIGH(g, r);
            s += sums_of(g, v);
        }
#else
        FETCH(g, x, ROW(x_at, d.x), d.x, 0);
        FETCH(v, z, ROW(z_at, d.z), d.z, mean);
        normalise(v, mean, 0, scale);
#ifdef COLUMNS
        #pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            gs[k] += g[k];
            products[k] += g[k] * v[k];
        }
#endif
        WEIGH(g, r);
        s = sums_of(g, v);
#endif
        FOLD(PLUS, s);
#ifdef PARTS
        if (lane == 0)
            parts[parts_at + (ulong)r * slices + slice] = s;
#else
        ACC weight = 1;
#ifdef WEIGHTED_ROWS
        // One weight for the whole row: the gradient of the weight needs the same sums.
        if (lane == 0 && slice == 0) {
            sums[sums_at + r] = s.x;
            sums[sums_at + count + r] = s.y;
        }
#ifdef WEIGHT
        weight = LOAD_WEIGHT(w, ROW(w_at, d.w));
#endif
#endif
#ifdef RMS
        s.x = 0;
#endif
        s = s * weight / (ACC)n;
#ifdef APPLY
        for (IDX first = start + lane * VEC; first < stop; first += BLOCK) {
            FETCH(g, x, ROW(x_at, d.x), d.x, 0);
            FETCH(v, z, ROW(z_at, d.z), d.z, mean);
            normalise(v, mean, 0, scale);
            WEIGH(g, r);
#else
        {
#endif
            IDX e = first;
            #pragma unroll
            for (int k = 0; k < CACHED; ++k, e += LANES * VEC) {
                if (e < stop) {
                    #pragma unroll
                    for (int j = 0; j < VEC; ++j)
                        v[k * VEC + j] = (g[k * VEC + j] * weight - s.x - v[k * VEC + j] * s.y) * scale;
                    put(y, AT(ROW(y_at, d.y), d.y), v + k * VEC);
                }
            }
        }
#endif
    }
#ifdef COLUMNS
    if (begin < count) {
        __global ACC *to = columns + columns_at + (ulong)slot * 2 * n;
        #pragma unroll
        for (int k = 0; k < CACHED; ++k) {
            const IDX e = first + k * LANES * VEC;
            #pragma unroll
            for (int j = 0; j < VEC; ++j) {
                if (e < n) {
                    to[e + j] = gs[k * VEC + j];
                    to[n + e + j] = products[k * VEC + j];
                }
            }
        }
    }
#endif
#endif
}
#endif

// Norms on CPUs: one work-item per row. Follows norm.cl.

#ifdef IS_CPU
// Adds up `term` over the row, in blocks, because a chain of thousands of additions would round too often. The rounding error of
// adding one block is carried into the next block.
#define SUM(result, term)                                                                                              \
    {                                                                                                                  \
        ACC block = 0;                                                                                                 \
        uint terms = 0;                                                                                                \
        result = 0;                                                                                                    \
        for (IDX e = 0; e < n; ++e) {                                                                                  \
            block += term;                                                                                             \
            if (++terms % 64 == 0) {                                                                                   \
                const ACC before = result;                                                                             \
                result += block;                                                                                       \
                block = isinf(result) ? 0 : block - (result - before);                                                 \
            }                                                                                                          \
        }                                                                                                              \
        result += block;                                                                                               \
    }

// Adds up `term` and the square of `term` in such blocks.
#define SUMS(result, term)                                                                                             \
    {                                                                                                                  \
        Two block = 0;                                                                                                 \
        uint terms = 0;                                                                                                \
        result = 0;                                                                                                    \
        for (IDX e = 0; e < n; ++e) {                                                                                  \
            const ACC t = term;                                                                                        \
            block += (Two)(t, t * t);                                                                                  \
            if (++terms % 64 == 0) {                                                                                   \
                const Two before = result;                                                                             \
                result += block;                                                                                       \
                block = isinf(result) ? (Two)0 : block - (result - before);                                            \
            }                                                                                                          \
        }                                                                                                              \
        result += block;                                                                                               \
    }

__kernel void norm(PARAMETERS) {
    const IDX count = (IDX)count_, inner = (IDX)d.inner, n = (IDX)d.outer * inner;
    const IDX r = (IDX)get_global_id(0);
    if (r >= count)
        return;
    __global ACC *means = statistics + statistics_at, *scales = means + count;
    const ulong xa = ROW(x_at, d.x), ya = ROW(y_at, d.y);
#ifdef WEIGHT
    const ulong wa = ROW(w_at, d.w);
#define TIMES_WEIGHT * LOAD_WEIGHT(w, AT(wa, d.w))
#else
#define TIMES_WEIGHT
#endif
#ifdef BIAS
    const ulong ba = ROW(b_at, d.b);
#define PLUS_BIAS + LOAD_WEIGHT(b, AT(ba, d.b))
#else
#define PLUS_BIAS
#endif
#ifndef BACKWARD
    // The mean is stored as the sum `mean + low`. All statistics are of elements multiplied by `factor`.
#define X (LOAD(x, AT(xa, d.x)) * factor)
    ACC factor = 1, mean, low, squares;
    for (uint attempt = 0; attempt < 2; ++attempt) {
        Two sums;
        mean = low = 0;
#ifdef RMS
        SUMS(sums, X);
        squares = sums.y;
#else
        SUM(mean, X);
        mean /= (ACC)n;
        SUMS(sums, X - mean);
        low = sums.x / (ACC)n;
        squares = squares_about_mean(sums, (ACC)n);
#endif
        const ACC needed = attempt == 0 ? factor_for(mean, squares, eps) : 1;
        if (needed == 1)
            break;
        factor = needed;
    }
    const ACC var = squares / (ACC)n, scale = 1 / sqrt(var + eps * factor * factor);
    means[r] = (mean + low) / factor;
    scales[r] = scale * factor;
    scales[count + r] = var / factor / factor;
    for (IDX e = 0; e < n; ++e)
        STORE(y, AT(ya, d.y), (X - mean - low) * scale TIMES_WEIGHT PLUS_BIAS);
#else
    const ulong za = ROW(z_at, d.z);
    const ACC mean = means[r], scale = scales[r];
#define NORMAL ((LOAD(z, AT(za, d.z)) - mean) * scale)
    ACC sum, product;
#ifdef WEIGHTED_ROWS
    // One weight for the whole row: the gradient of the weight needs the same sums.
    SUM(sum, LOAD(x, AT(xa, d.x)));
    SUM(product, LOAD(x, AT(xa, d.x)) * NORMAL);
    sums[sums_at + r] = sum;
    sums[sums_at + count + r] = product;
#ifdef WEIGHT
    sum *= LOAD_WEIGHT(w, wa);
    product *= LOAD_WEIGHT(w, wa);
#endif
#else
    SUM(sum, LOAD(x, AT(xa, d.x)) TIMES_WEIGHT);
    SUM(product, LOAD(x, AT(xa, d.x)) * NORMAL TIMES_WEIGHT);
#endif
#ifdef RMS
    sum = 0;
#endif
    sum /= (ACC)n;
    product /= (ACC)n;
    for (IDX e = 0; e < n; ++e)
        STORE(y, AT(ya, d.y), (LOAD(x, AT(xa, d.x)) TIMES_WEIGHT - sum - NORMAL * product) * scale);
#endif
}
#endif

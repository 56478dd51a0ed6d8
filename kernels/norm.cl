// Rows brought to mean 0 and variance 1, or to a mean square of 1, with a factor and a shift: the layers named norm. A row is
// two dims of a view of four, [rows, inner rows | outer, inner], so that a channel of a batch is one as well. The host
// gives A (dtype), ACC and ACC_NAME, IDX, FLAT where rows have one outer index, RMS where means stay as they are, BACKWARD
// for the gradient, WEIGHT and BIAS where there are some, and GROUP. `lanes` work-items share a row (processors: one).

typedef struct {
    ulong inner_rows, outer, inner;
    // Of what is read, of the result, and of what there is of the forward's input, weight and bias.
    long x[4], y[4], z[4], w[4], b[4];
} Rows;

typedef __global const CAT(A, _t) *In;
typedef __global CAT(A, _t) *Out;
#define LOAD CAT(load_, A)
#define STORE CAT(CAT(CAT(store_, A), _), ACC_NAME)
#define PLUS(a, b) ((a) + (b))

#ifdef FLAT
#define AT(base, s) ((base) + (long)e * (s)[3])
#else
#define AT(base, s) ((base) + (long)(e / inner) * (s)[2] + (long)(e % inner) * (s)[3])
#endif
#define ROW(base, s) ((base) + (long)r1 * (s)[0] + (long)r2 * (s)[1])

#ifdef IS_CPU
#define FOLD(OP, v)
#endif

// The sum of `term` over the row, in blocks: thousands in one chain would round too often. Every work-item comes here.
#define SUM(result, term)                                                                                              \
    {                                                                                                                  \
        ACC block = 0;                                                                                                 \
        uint terms = 0;                                                                                                \
        result = 0;                                                                                                    \
        for (IDX e = lane; e < stop; e += lanes) {                                                                     \
            block += term;                                                                                             \
            if (++terms % 64 == 0) {                                                                                   \
                result += block;                                                                                       \
                block = 0;                                                                                             \
            }                                                                                                          \
        }                                                                                                              \
        result += block;                                                                                               \
        FOLD(PLUS, result);                                                                                            \
    }

// Forward: mean and variance of each row are written. Backward: x is the gradient of the result, z the forward's input; the
// row's sums of the gradient, and of its products with the normalised input, are written too, unweighted.
__kernel
#ifndef IS_CPU
    __attribute__((reqd_work_group_size(GROUP, 1, 1)))
#endif
    void
    norm(In x, ulong x_at, Out y, ulong y_at,
#ifdef BACKWARD
         In z, ulong z_at,
#endif
#ifdef WEIGHT
         In w, ulong w_at,
#endif
#ifdef BIAS
         In b, ulong b_at,
#endif
         __global ACC *statistics, ulong statistics_at,
#ifdef WEIGHTED_ROWS
         __global ACC *sums, ulong sums_at,
#endif
         Rows d, ulong count_, ACC eps, uint lanes_) {
    const IDX count = (IDX)count_, inner = (IDX)d.inner, n = (IDX)d.outer * inner;
#ifdef IS_CPU
    const uint lane = 0, lanes = 1;
    const IDX r = (IDX)get_global_id(0);
    if (r >= count)
        return;
#else
    const uint lanes = lanes_, lid = get_local_id(0), lane = lid % lanes, step = 1;
    const IDX r = (IDX)get_group_id(0) * (GROUP / lanes) + lid / lanes;
    __local ACC scratch[GROUP];
#endif
    __global ACC *means = statistics + statistics_at, *vars = means + count;
    // Work-items past the last row see an empty row, and come to every barrier.
    const IDX stop = r < count ? n : 0, row = r < count ? r : 0;
    const IDX r1 = row / (IDX)d.inner_rows, r2 = row % (IDX)d.inner_rows;
    const ulong xa = ROW(x_at, d.x), ya = ROW(y_at, d.y);
#ifdef WEIGHT
    const ulong wa = ROW(w_at, d.w);
#define TIMES_WEIGHT * LOAD(w, AT(wa, d.w))
#else
#define TIMES_WEIGHT
#endif
#ifdef BIAS
    const ulong ba = ROW(b_at, d.b);
#define PLUS_BIAS + LOAD(b, AT(ba, d.b))
#else
#define PLUS_BIAS
#endif
#ifndef BACKWARD
    ACC mean = 0, var;
#ifdef RMS
    SUM(var, LOAD(x, AT(xa, d.x)) * LOAD(x, AT(xa, d.x)));
#else
    SUM(mean, LOAD(x, AT(xa, d.x)));
    mean /= (ACC)n;
    SUM(var, (LOAD(x, AT(xa, d.x)) - mean) * (LOAD(x, AT(xa, d.x)) - mean));
#endif
    var /= (ACC)n;
    if (lane == 0 && r < count) {
        means[r] = mean;
        vars[r] = var;
    }
    const ACC scale = 1 / sqrt(var + eps);
    for (IDX e = lane; e < stop; e += lanes)
        STORE(y, AT(ya, d.y), (LOAD(x, AT(xa, d.x)) - mean) * scale TIMES_WEIGHT PLUS_BIAS);
#else
    const ulong za = ROW(z_at, d.z);
    const ACC mean = means[row], scale = 1 / sqrt(vars[row] + eps);
#define NORMAL ((LOAD(z, AT(za, d.z)) - mean) * scale)
    ACC sum, product;
#ifdef WEIGHTED_ROWS
    // One weight for the whole row: what its gradient needs are the same sums.
    SUM(sum, LOAD(x, AT(xa, d.x)));
    SUM(product, LOAD(x, AT(xa, d.x)) * NORMAL);
    if (lane == 0 && r < count) {
        sums[sums_at + r] = sum;
        sums[sums_at + count + r] = product;
    }
#ifdef WEIGHT
    sum *= LOAD(w, wa);
    product *= LOAD(w, wa);
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
    for (IDX e = lane; e < stop; e += lanes)
        STORE(y, AT(ya, d.y), (LOAD(x, AT(xa, d.x)) TIMES_WEIGHT - sum - NORMAL * product) * scale);
#endif
}

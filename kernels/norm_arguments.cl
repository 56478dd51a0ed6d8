// Optional arguments of norms, and the statistics for the backward pass. Follows neighbours.cl. The host defines W (dtype of the
// weights; A unless there is one weight per row), BACKWARD for the gradient, WEIGHT and BIAS if they exist, and WEIGHTED_ROWS if
// the backward pass writes sums of whole rows. The statistics of a row are the mean, 1 / sqrt(var + eps), and, in the forward pass
// only, the variance.

typedef __global const CAT(W, _t) *Weights;
typedef CAT(ACC, 2) Two;
#define LOAD_WEIGHT CAT(load_, W)

#ifdef BACKWARD
#define FORWARDS_INPUT In z, ulong z_at,
#else
#define FORWARDS_INPUT
#endif
#ifdef WEIGHT
#define ITS_WEIGHT Weights w, ulong w_at,
#else
#define ITS_WEIGHT
#endif
#ifdef BIAS
#define ITS_BIAS Weights b, ulong b_at,
#else
#define ITS_BIAS
#endif
#ifdef WEIGHTED_ROWS
#define ITS_SUMS __global ACC *sums, ulong sums_at,
#else
#define ITS_SUMS
#endif

// Returns the factor for a row's elements if the mean or the sum of squared deviations of the unscaled elements left the range of ACC,
// otherwise 1. Squares that underflow to 0 do not matter compared to `eps`. LARGEST, LEAST, DOWN and UP are as in reductions.
static inline ACC factor_for(ACC mean, ACC squares, ACC eps) {
    const bool overflow = !(fabs(mean) <= LARGEST) | !(squares <= LARGEST);
    return overflow ? DOWN : (squares < LEAST) & (eps < LEAST) ? UP : 1;
}

// Returns the sum of squared deviations of n elements from their mean. `sums` holds the sum of the elements' deviations from a
// number close to the mean, and the sum of the squares of these deviations.
static inline ACC squares_about_mean(Two sums, ACC n) {
    const ACC squares = sums.y - sums.x * (sums.x / n);
    return squares < 0 ? 0 : squares;
}

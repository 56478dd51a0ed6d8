// Optional arguments of norms, and the statistics for the backward pass. Follows neighbours.cl. The host defines W (dtype of
// weights; A unless a weight belongs to a whole row), BACKWARD for the gradient, WEIGHT and BIAS if they exist, and
// WEIGHTED_ROWS if the backward pass writes the sums of whole rows. Statistics are means, 1 / sqrt(var + eps) and, in the
// forward pass only, variances.

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

// Returns the factor for a row's elements if the row's plain moments (the mean, and the sum of squared deviations) left the range of ACC,
// otherwise 1. Squares that vanish do not matter beside `eps`. LARGEST, LEAST, DOWN and UP are those of reductions.
static inline ACC factor_for(ACC mean, ACC squares, ACC eps) {
    const bool overflow = !(fabs(mean) <= LARGEST) | !(squares <= LARGEST);
    return overflow ? DOWN : (squares < LEAST) & (eps < LEAST) ? UP : 1;
}

// Returns the sum of squared deviations of n elements from their mean, given the sums of deviations from a number near
// it and of their squares.
static inline ACC squares_about_mean(Two sums, ACC n) {
    const ACC squares = sums.y - sums.x * (sums.x / n);
    return squares < 0 ? 0 : squares;
}

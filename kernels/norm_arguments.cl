// Arguments that norms of rows may have, and the statistics that they leave for backward. Comes after neighbours.cl. The host gives W
// (dtype of weights, A where they are not a whole row's), BACKWARD for the gradient, WEIGHT and BIAS where there are some, and
// WEIGHTED_ROWS where backward gives the sums of whole rows. Statistics are means, 1 / sqrt(var + eps) and, forward alone, variances.

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

// The factor of a row's elements whose plain moments left the range of ACC, else 1: the mean, and the sum of squared deviations. Squares
// that vanish do not matter beside `eps`. LARGEST, LEAST, DOWN and UP are those of reductions.
static inline ACC factor_for(ACC mean, ACC squares, ACC eps) {
    const bool overflow = !(fabs(mean) <= LARGEST) | !(squares <= LARGEST);
    return overflow ? DOWN : (squares < LEAST) & (eps < LEAST) ? UP : 1;
}

// The sum of squared deviations of n elements from their mean, by the sums of deviations, and of their squares, from a number near it.
static inline ACC squares_about_mean(Two sums, ACC n) {
    const ACC squares = sums.y - sums.x * (sums.x / n);
    return squares < 0 ? 0 : squares;
}

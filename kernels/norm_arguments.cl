// Arguments that norms of rows may have, and the statistics that they leave for backward. Comes after neighbours.cl. The host gives W
// (dtype of weights, A where they are not a whole row's), BACKWARD for the gradient, WEIGHT and BIAS where there are some, WEIGHTED_ROWS
// where backward gives the sums of whole rows, and RSTD where statistics are means and 1 / sqrt(var + eps) instead of variances.

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

// The second number of a row's statistics, and the scale by it.
#ifdef RSTD
#define SPREAD(var, scale) (scale)
#define SCALE(spread) (spread)
#else
#define SPREAD(var, scale) (var)
#define SCALE(spread) (1 / sqrt((spread) + eps))
#endif

// Reductions over any dims of a strided tensor. The host defines A (input dtype), B (output dtype), ACC and ACC_NAME (the accumulator's
// type: float F32, double F64 or long I64), NK and NR (ranks of kept and reduced dims), IDX, one of OP_SUM OP_PROD OP_MAX OP_MIN, and
//   ARG       for argmax and argmin
//   NONZERO   if nonzero elements count as 1 and other elements as 0
//   MAPPED    if element_of maps each element (of type FROM, in which A is computed) before the reduction
//   FINISHED  if finish_of maps each result (of type ACC, over `number` elements)
//   INTEGERS  if ACC is long
//   RESCALED  if a sum that leaves the range of ACC is computed again, from elements times a power of two. UNDO removes the factor from
//             the result. SQUARES: the sum is of squares, which may also underflow. ROOT: the result is the square root of the sum.
// With several slices, slice s of output o has the partial result o * slices + s. The partial results are reduced by a second launch
// (for ARG, PARTIAL writes and PAIRS reads values with indices), or with LAST_GROUP_SUMS by the last work-group of an output to finish.
// On GPUs, `lanes` work-items share an output. If VEC is above 1, VEC elements are loaded at a time as WIDE_T: adjacent elements of one
// output, or, with COLUMNS, one element of each of VEC adjacent outputs.

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
// NaN wins over every number and stays. This also works for vectors, because ?: selects each vector element separately.
#ifndef COMBINE
#define COMBINE(a, b) ((BEATS(a, b) | IS_NAN(a)) ? (a) : (b))
#endif

#ifdef RESCALED
// The factor that a sum needs: 0 for none, 1 for DOWN after an overflow, 2 for UP if squares may have underflowed.
#ifdef SQUARES
#define ATTEMPT_FOR(s) (!((s) <= LARGEST) ? 1 : (s) < LEAST ? 2 : 0)
#else
#define ATTEMPT_FOR(s) (fabs(s) <= LARGEST ? 0 : 1)
#endif
#define FACTOR_OF(attempt) ((attempt) == 0 ? (ACC)1 : (attempt) == 1 ? (ACC)DOWN : (ACC)UP)
#define FACTOR *factor
#define FACTOR_HERE factor
#else
#define FACTOR
#define FACTOR_HERE 1
#endif

#ifdef NONZERO
#define ELEMENT(v) ((ACC)((v) != 0))
#define ELEMENT16(v) (convert_long16((v) != 0) & 1L)
#elif defined(MAPPED)
#define ELEMENT(v) ((ACC)element_of(v FACTOR, (FROM)0))
#define ELEMENT16(v) element16_of(v, factor)
#ifdef IS_CPU
static inline CAT(ACC, 16) element16_of(CAT(FROM, 16) v, ACC factor) {
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
#define ELEMENT(v) ((ACC)(v)FACTOR)
#define ELEMENT16(v) ((v)FACTOR)
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
// Returns the better pair of value and index. Of equal values, the first is better, and the first NaN is better than all numbers.
static inline Acc combine(Acc a, Acc b) {
    const int a_nan = IS_NAN(a.v), b_nan = IS_NAN(b.v);
    const int equal = (a_nan & b_nan) | (a.v == b.v);
    const int stay = equal ? a.i <= b.i : a_nan | (!b_nan & BEATS(a.v, b.v));
    return stay ? a : b;
}
#ifdef EXCHANGE
EXCHANGE Acc exchange(Acc a, uint mask) { return pair(exchange(a.v, mask), exchange(a.i, mask)); }
#endif
#else
typedef ACC Acc;
static inline Acc neutral(void) { return NEUTRAL; }
static inline Acc combine(Acc a, Acc b) { return COMBINE(a, b); }
#endif

// GET loads the element at offset `at`, whose index among the reduced elements is r. PUT stores result o.
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
#define PUT(o, a, attempt) y[y_at + (o)] = (a)
#else
typedef CAT(B, _t) Out;
#ifdef FINISHED
#define FINISH(a) finish_of(a, number)
#else
#define FINISH(a) (a)
#endif
#ifdef RESCALED
#define RESULT(a, attempt) UNDO(FINISH(a), FACTOR_OF(attempt))
#else
#define RESULT(a, attempt) FINISH(a)
#endif
#ifdef ARG
#define PUT(o, a, attempt) CAT(CAT(store_, B), _I64)(y, y_at + (o), (a).i)
#else
#define PUT(o, a, attempt) CAT(CAT(CAT(store_, B), _), ACC_NAME)(y, y_at + (o), RESULT(a, attempt))
#endif
#endif

#define PARAMETERS                                                                                                     \
    __global const In *x, ulong x_at, __global Out *y, ulong y_at, Kept kept, Reduced reduced, ulong outs_, ulong n_,  \
        ulong chunk_, uint slices, ACC number

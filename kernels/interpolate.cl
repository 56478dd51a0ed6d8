// Resizes images by nearest or linear interpolation of rows, columns or both. The host defines A (dtype) with ACC and ACC_NAME,
// IDX, INT (int if positions fit), ROWS and COLUMNS (1 if rows or columns are interpolated linearly), and TRANSPOSED for gradients.
// A work-item computes one element of a contiguous result, or, without TRANSPOSED, VEC adjacent elements of a row. Each element is
// written once, so there are no atomics, and results are reproducible. With DENSE, rows of the input are contiguous.

// Element o of `to` results has the position (scale * o + shift) / unit (at least 0) among `from` inputs. `whole` is scale / unit,
// rounded down. Kernels compute with positions in multiples of 1 / unit, which are integers.
typedef struct {
    long from, to, scale, shift, unit, whole;
} Samples;

typedef struct {
    Samples rows, columns;
    // The number of channels, and the strides of the input: n, c, rows, columns.
    long c, x[4];
} Images;

#ifndef INT
#define INT long
#endif

#define LOAD CAT(load_, A)
#define STORE CAT(CAT(CAT(store_, A), _), ACC_NAME)
#define TO CAT(CAT(CAT(to_, A), _), ACC_NAME)

// Returns the position of element o, in multiples of 1 / unit.
static inline INT position(const Samples *p, INT o) {
    return max((INT)p->scale * o + (INT)p->shift, (INT)0);
}

// Returns the input before the position of element o (-1 if the position is below 0), and in *rest the distance from that input, in 1 / unit.
static inline INT before(const Samples *p, INT o, INT *rest) {
    // One input's width (`unit`) is added before the division and subtracted afterwards, because positions are above -1 and the
    // division needs numbers that are not negative.
    const INT unit = (INT)p->unit, at = (INT)p->scale * o + (INT)p->shift + unit, behind = at / unit;
    *rest = at - behind * unit;
    return behind - 1;
}

// Returns the weight of the input after the position whose preceding input is `low`, at a distance of `rest`.
static inline ACC weight_behind(const Samples *p, INT low, INT rest) {
    return low < 0 ? (ACC)0 : (ACC)rest / (ACC)(INT)p->unit;
}

// Swaps a and b if b is closer, so that both ends are exact. `far_weight` becomes the weight of the input that is farther away.
#define NEARER_FIRST(T, a, b, far_weight)                                                                                   \
    if (far_weight >= (ACC)0.5f) {                                                                                          \
        const T nearer = b;                                                                                            \
        b = a;                                                                                                         \
        a = nearer;                                                                                                    \
        far_weight = 1 - far_weight;                                                                                             \
    }

static inline ACC lerp(ACC a, ACC b, ACC far_weight) {
    return a + far_weight * (b - a);
}

// Returns the first element of the result whose position is at least k inputs.
static inline INT first(const Samples *p, INT k) {
    const INT wanted = (INT)p->unit * k - (INT)p->shift, scale = (INT)p->scale;
    if (k <= 0 || (scale != 0 && wanted <= 0))
        return 0;
    return scale == 0 ? (INT)p->to : min((wanted + scale - 1) / scale, (INT)p->to);
}

// Returns the weight that input j, one of the two inputs around the position of element o, has in element o.
static inline ACC weight_of(const Samples *p, INT o, INT j) {
    const INT unit = (INT)p->unit, beside = position(p, o) - j * unit;
    if (beside > 0 && j == (INT)p->from - 1)
        return 1;
    return (ACC)min(unit - beside, unit + beside) / (ACC)unit;
}

// Computes the column v, row h and channel c of a work-item's element in a contiguous result [n, c, rows, columns].
#define POSITION(height, width)                                                                                        \
    const IDX p = (IDX)get_global_id(0);                                                                               \
    if (p >= (IDX)count)                                                                                               \
        return;                                                                                                        \
    IDX n = p;                                                                                                         \
    const INT v = (INT)next_index(&n, (IDX)(width)), h = (INT)next_index(&n, (IDX)(height));                           \
    const long c = (long)next_index(&n, (IDX)w.c);                                                                     \
    x_at += (long)n * w.x[0] + c * w.x[1]

__kernel void interpolate(__global const CAT(A, _t) *x, ulong x_at, __global CAT(A, _t) *y, ulong y_at, Images w, ulong count) {
#ifdef TRANSPOSED
#define X(row, column) LOAD(x, x_at + (long)(row) * w.x[2] + (long)(column) * w.x[3])
    POSITION(w.rows.from, w.columns.from);
    const INT bottom = first(&w.rows, h + 1), right = first(&w.columns, v + 1), left = first(&w.columns, v - COLUMNS);
    ACC sum = 0;
    for (INT i = first(&w.rows, h - ROWS); i < bottom; ++i) {
        ACC row = 0;
        for (INT j = left; j < right; ++j)
            row += COLUMNS ? weight_of(&w.columns, j, v) * X(i, j) : X(i, j);
        sum += ROWS ? weight_of(&w.rows, i, h) * row : row;
    }
    STORE(y, y_at + p, sum);
#else
    // Divides only once, for the first of VEC adjacent elements. The positions of the other elements follow by additions.
    POSITION(w.rows.to, w.columns.to / VEC);
    INT down_rest, rest, low = before(&w.rows, h, &down_rest);
    ACC down = ROWS ? weight_behind(&w.rows, low, down_rest) : 0;
    const INT top = max(low, (INT)0), unit = (INT)w.columns.unit;
    ulong upper = x_at + (long)top * w.x[2], lower = x_at + (long)min(top + 1, (INT)w.rows.from - 1) * w.x[2];
    NEARER_FIRST(ulong, upper, lower, down)
    const INT step = (INT)w.columns.whole, step_rest = (INT)w.columns.scale - step * unit;
    low = before(&w.columns, v * VEC, &rest);
    union {
        CAT(A, _t) each[VEC];
        uint word[4];
    } made;
    #pragma unroll
    for (uint k = 0; k < VEC; ++k) {
        long a = max(low, (INT)0), b = min((INT)a + 1, (INT)w.columns.from - 1);
        ACC across = COLUMNS ? weight_behind(&w.columns, low, rest) : 0;
        NEARER_FIRST(long, a, b, across)
#ifndef DENSE
        a *= w.x[3];
        b *= w.x[3];
#endif
        ACC value = COLUMNS ? lerp(LOAD(x, upper + a), LOAD(x, upper + b), across) : LOAD(x, upper + a);
        if (ROWS)
            value = lerp(value, COLUMNS ? lerp(LOAD(x, lower + a), LOAD(x, lower + b), across) : LOAD(x, lower + a), down);
        made.each[k] = TO(value);
        low += step;
        rest += step_rest;
        if (rest >= unit) {
            rest -= unit;
            ++low;
        }
    }
#if VEC > 1
    // Stored as words, because compilers split a store of a vector of shorter elements in two.
    *(__global uint4 *)(y + y_at + (ulong)p * VEC) = (uint4)(made.word[0], made.word[1], made.word[2], made.word[3]);
#else
    y[y_at + p] = made.each[0];
#endif
#endif
}

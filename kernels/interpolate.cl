// Images of other sizes: elements of a result picked, or mixed of their neighbours, in rows, columns or both. The host gives A (dtype)
// with ACC and ACC_NAME, IDX, INT (int where places fit), ROWS and COLUMNS, which are 1 where rows or columns are mixed, and
// TRANSPOSED for gradients. A work-item owns an element of a contiguous result, of which it has no part in another, so there are
// no atomics and the bits are the same on every run.

// Element o of `to` lies at (scale * o + shift) / unit among `from`, not below 0.
typedef struct {
    long from, to, scale, shift, unit;
} Places;

typedef struct {
    Places rows, columns;
    // Channels, and strides of what is read: n, c, rows, columns.
    long c, x[4];
} Images;

#ifndef INT
#define INT long
#endif

#define LOAD CAT(load_, A)
#define STORE CAT(CAT(CAT(store_, A), _), ACC_NAME)

// Where element o lies, in units.
static inline INT place(const Places *p, INT o) {
    return max((INT)p->scale * o + (INT)p->shift, (INT)0);
}

// The element before it, the one behind it and the share of that one.
static inline INT between(const Places *p, INT o, INT *high, ACC *share) {
    const INT unit = (INT)p->unit, at = place(p, o), low = at / unit;
    *high = min(low + 1, (INT)p->from - 1);
    *share = (ACC)(at - low * unit) / (ACC)unit;
    return low;
}

// Exact at both ends.
static inline ACC mixed(ACC a, ACC b, ACC share) {
    return share < (ACC)0.5f ? a + share * (b - a) : b + (1 - share) * (a - b);
}

// The first element of the result that lies at k or behind it.
static inline INT first(const Places *p, INT k) {
    const INT wanted = (INT)p->unit * k - (INT)p->shift, scale = (INT)p->scale;
    if (k <= 0 || (scale != 0 && wanted <= 0))
        return 0;
    return scale == 0 ? (INT)p->to : min((wanted + scale - 1) / scale, (INT)p->to);
}

// The share that element o of the result has of element j, one of the two that it lies between.
static inline ACC share_of(const Places *p, INT o, INT j) {
    const INT unit = (INT)p->unit, beside = place(p, o) - j * unit;
    if (beside > 0 && j == (INT)p->from - 1)
        return 1;
    return (ACC)min(unit - beside, unit + beside) / (ACC)unit;
}

// Row or column k of a contiguous [n, c, rows, columns] result.
#define POSITION(height, width)                                                                                        \
    const IDX p = (IDX)get_global_id(0);                                                                               \
    if (p >= (IDX)count)                                                                                               \
        return;                                                                                                        \
    IDX n = p;                                                                                                         \
    const INT v = (INT)next_index(&n, (IDX)(width)), h = (INT)next_index(&n, (IDX)(height));                           \
    const long c = (long)next_index(&n, (IDX)w.c);                                                                     \
    x_at += (long)n * w.x[0] + c * w.x[1]

#define X(row, column) LOAD(x, x_at + (long)(row) * w.x[2] + (long)(column) * w.x[3])

__kernel void interpolate(__global const CAT(A, _t) *x, ulong x_at, __global CAT(A, _t) *y, ulong y_at, Images w, ulong count) {
#ifdef TRANSPOSED
    POSITION(w.rows.from, w.columns.from);
    const INT bottom = first(&w.rows, h + 1), right = first(&w.columns, v + 1), left = first(&w.columns, v - COLUMNS);
    ACC sum = 0;
    for (INT i = first(&w.rows, h - ROWS); i < bottom; ++i) {
        ACC row = 0;
        for (INT j = left; j < right; ++j)
            row += COLUMNS ? share_of(&w.columns, j, v) * X(i, j) : X(i, j);
        sum += ROWS ? share_of(&w.rows, i, h) * row : row;
    }
    STORE(y, y_at + p, sum);
#else
    POSITION(w.rows.to, w.columns.to);
    INT bottom, right;
    ACC down, across;
    const INT top = between(&w.rows, h, &bottom, &down), left = between(&w.columns, v, &right, &across);
    ACC made = COLUMNS ? mixed(X(top, left), X(top, right), across) : X(top, left);
    if (ROWS)
        made = mixed(made, COLUMNS ? mixed(X(bottom, left), X(bottom, right), across) : X(bottom, left), down);
    STORE(y, y_at + p, made);
#endif
}

// Comes after strided_dims.cl and before softmax.cl and softmax_slices.cl; NK is the rank of the rows.

// The offset of a row in each of three tensors.
typedef struct {
    ulong size[NK];
    long x[NK], y[NK], z[NK];
} Rows;
typedef struct {
    long x, y, z;
} At;
static inline At at_rows(const Rows *d, IDX i) {
    At at = {0, 0, 0};
    for (int k = NK - 1; k >= 0; --k) {
        const long r = (long)NEXT(i, d->size, k);
        at.x += r * d->x[k];
        at.y += r * d->y[k];
        at.z += r * d->z[k];
    }
    return at;
}

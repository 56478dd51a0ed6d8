// The offsets of rows in three tensors. Follows strided_dims.cl, precedes softmax.cl and softmax_slices.cl. The host defines NK (dims of rows).

// The sizes of the dims of rows, and their strides in the three tensors. at_rows returns the offsets of a row.
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

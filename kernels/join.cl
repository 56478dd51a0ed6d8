// Concatenation. Inputs and result have the same number of rows. The rows of an input are contiguous and become some columns of the
// result. Elements are copied in units of type T, and all sizes are in units. The host defines COUNT (the number of inputs), INPUTS (the
// parameters of the inputs), and CHOOSE_ALL, which is CHOOSE(k) for each input except the first.

typedef struct {
    long items, width, columns;
    // For each input: the column of the result where its rows start, and the step from row to row.
    struct {
        long start, step;
    } of[COUNT];
} join_params;

#define CHOOSE(k)                                                                                                      \
    if (column >= (IDX)p.of[k].start) {                                                                                \
        from = x##k + x##k##_at;                                                                                       \
        start = (IDX)p.of[k].start;                                                                                    \
        step = p.of[k].step;                                                                                           \
    }

// Writes `width` columns of the result. Rows of the result have `columns` columns.
__kernel void join(const join_params p, __global T *out, ulong out_at INPUTS) {
    const IDX item = (IDX)get_global_id(0), width = (IDX)p.width;
    if (item >= (IDX)p.items)
        return;
    const IDX row = item / width, column = item - row * width;
    const __global T *from = x0 + x0_at;
    IDX start = 0;
    long step = p.of[0].step;
    CHOOSE_ALL
    out[out_at + row * (IDX)p.columns + column] = from[(long)row * step + (long)(column - start)];
}

// Concatenation. Inputs and result have the same number of rows. An input's rows are contiguous and become some of the result's columns.
// Elements are copied in units of type T; all numbers count units. The host defines COUNT, the number of inputs, INPUTS, their
// parameters, and CHOOSE_ALL, which is CHOOSE(k) for each input except the first.

typedef struct {
    long items, width, columns;
    // For each input: the column where it starts, and the step between its rows.
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

// Writes `width` columns of the result, whose rows are `columns` long.
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

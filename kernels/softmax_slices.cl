// Softmax, log-softmax, logsumexp and their gradients for rows that are too long for registers, in two launches with a group for
// each slice of a row. With SLICES, a group writes the partial sums of its slice. Without SLICES, a group combines the partial sums
// of the whole row, always in the same order, and writes the results of its slice (for LOGSUMEXP the result of the row). Follows
// rows.cl and row_blocks.cl. The host defines the same macros as for softmax.cl.

#if defined(SOFTMAX_GRAD)
#define TERM(v, g) ((g) * (v))
#define RESULT(v, g) (((g) - s) * (v))
#elif defined(LOG_SOFTMAX_GRAD)
#define TERM(v, g) (g)
#define RESULT(v, g) ((g) - exp(v) * s)
#elif defined(SOFTMAX)
#define RESULT(v) (exp((v) - m) * scale)
#else
#define RESULT(v) ((v) - m - log_s)
#endif

__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void
row(In x, ulong x_at, Out y, ulong y_at, In z, ulong z_at, Rows rows, ulong n_, long xs, long ys, long zs,
    __global Two *slice_parts, ulong of_slices_at, uint slices, ulong chunk) {
    const IDX n = (IDX)n_, group = (IDX)get_group_id(0);
#if defined(LOGSUMEXP) && !defined(SLICES)
    const IDX r = group, slice = 0;
#else
    const IDX r = group / slices, slice = group % slices;
#endif
    const uint lid = get_local_id(0), lanes = GROUP, lane = lid, step = 1;
    const IDX first = slice * (IDX)chunk + lane * VEC, stop = min(slice * (IDX)chunk + (IDX)chunk, n);
    const At at = at_rows(&rows, r);
    const ulong xa = x_at + at.x, ya = y_at + at.y, za = z_at + at.z;
    __local ACC scratch[GROUP];
#ifdef TERM
    // x is the result of the forward pass, and z is the gradient of that result.
    ACC v[KEPT], g[KEPT];
#ifdef SLICES
    ACC s = 0;
    for (IDX i = first; i < stop; i += BLOCK) {
        fetch(v, x, xa, i, stop, xs, 0);
        fetch(g, z, za, i, stop, zs, 0);
        #pragma unroll
        for (int k = 0; k < KEPT; ++k)
            s += TERM(v[k], g[k]);
    }
    FOLD(PLUS, s);
    if (lid == 0)
        slice_parts[of_slices_at + group] = (Two)(s, 0);
#else
    ACC s = lane < slices ? slice_parts[of_slices_at + (ulong)r * slices + lane].x : 0;
    FOLD(PLUS, s);
    for (IDX i = first; i < stop; i += BLOCK) {
        fetch(v, x, xa, i, stop, xs, 0);
        fetch(g, z, za, i, stop, zs, 0);
        #pragma unroll
        for (int k = 0; k < KEPT; ++k)
            v[k] = RESULT(v[k], g[k]);
        write(v, y, ya, i, stop, ys);
    }
#endif
#elif defined(SLICES)
    ACC m = -INFINITY, s = 0, base = 0;
    sum_online(x, xa, first, stop, xs, &m, &base, &s);
    COMBINE(most);
    if (lid == 0)
        slice_parts[of_slices_at + group] = (Two)(most, s);
#else
    TAKE_SLICE(r, lane < slices);
    COMBINE(most);
    const ACC scale = 1 / s, log_s = log(s);
#ifdef LOGSUMEXP
    if (lid == 0)
        STORE(y, ya, m + log_s);
#else
    ACC v[KEPT];
    for (IDX i = first; i < stop; i += BLOCK) {
        fetch(v, x, xa, i, stop, xs, -INFINITY);
        #pragma unroll
        for (int k = 0; k < KEPT; ++k)
            v[k] = RESULT(v[k]);
        write(v, y, ya, i, stop, ys);
    }
#endif
#endif
}

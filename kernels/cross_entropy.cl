// Cross-entropy with class labels on GPUs: the loss and its gradient in one launch, or in up to three launches if few long rows are cut
// into slices. Follows row_blocks.cl. The host defines the macros of row_blocks.cl, A (dtype), B (dtype of the losses), T (dtype of the
// labels), ACC and ACC_NAME, IDX, GROUP, WITH_GRAD if the gradient is computed, and WHOLE if a block is a whole row. With
// LAST_GROUP_SUMS, the last work-group to finish adds up the losses of all groups. Slices have `chunk` elements. With SLICES, a group
// writes the maximum and the sum of exponentials of a slice; with COMBINES, the lanes of a row combine the slices; with GRADIENTS, a
// group writes the gradient of a slice.

#define COUNT_HERE 0
#define COUNT_ONE 1
#define COUNT_GIVEN 2
#define COUNT_ALONG 3

#define STORE_LOSS CAT(CAT(CAT(store_, B), _), ACC_NAME)
#define LABEL(r) CAT(load_, T)(label, label_at + (long)(r) * label_stride)
// Adds up v over the whole work-group; every work-item gets the sum.
#define FOLD_GROUP(v)                                                                                                  \
    {                                                                                                                  \
        const uint lanes = GROUP, lane = lid;                                                                          \
        FOLD(PLUS, v);                                                                                                 \
    }

// Writes a lane's part of the gradient. If `scale` is 0, writes zeros, even if lse is not finite.
static inline void write_gradient(ACC *v, Out grad, ulong at, IDX first, IDX stop, ACC lse, IDX target, ACC scale) {
    #pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const IDX i = first + k / VEC * LANES * VEC + k % VEC;
        const ACC p = exp(v[k] - lse) - (ACC)(i == target);
        v[k] = scale == 0 ? 0 : p * scale;
    }
    write(v, grad, at, first, stop, 1);
}

#ifdef LAST_GROUP_SUMS
#define LAST_GROUP_PARAMETERS                                                                                          \
    , __global Two *parts, ulong parts_at, volatile __global uint *arrived, uint first_arrived
#else
#define LAST_GROUP_PARAMETERS
#endif
#if defined(SLICES) || defined(COMBINES) || defined(GRADIENTS)
#define SLICE_PARAMETERS , __global Two *slice_parts, ulong of_slices_at, uint slices, ulong chunk
#else
#define SLICE_PARAMETERS
#endif
#define PARAMETERS                                                                                                     \
    In x, ulong x_at, __global const CAT(T, _t) *label, ulong label_at, long label_stride, Out grad, ulong grad_at,    \
        __global CAT(B, _t) *loss, ulong loss_at, __global const long *counted, ulong counted_at,                      \
        volatile __global int *word, ulong rows_, ulong n_, long row_stride, long stride, long ignore, uint counting,  \
        uint sums SLICE_PARAMETERS LAST_GROUP_PARAMETERS

#if defined(SLICES) || defined(GRADIENTS)
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void row(PARAMETERS) {
    const IDX rows = (IDX)rows_, n = (IDX)n_, r = (IDX)get_group_id(0) / slices;
    const IDX first = (IDX)get_group_id(0) % slices * (IDX)chunk, stop = min(first + (IDX)chunk, n);
    const uint lid = get_local_id(0), lanes = GROUP, lane = lid, step = 1;
    const ulong at = x_at + (long)r * row_stride;
    __local ACC scratch[GROUP];
#ifdef SLICES
    ACC m = -INFINITY, s = 0, base = 0;
    sum_online(x, at, first + lane * VEC, stop, stride, &m, &base, &s);
    COMBINE(most);
    if (lid == 0)
        slice_parts[of_slices_at + get_group_id(0)] = (Two)(most, s);
#else
    ACC count = counting == COUNT_ONE ? 1 : 0;
    if (counting != COUNT_ONE) {
        for (IDX q = lid; q < rows; q += GROUP)
            count += LABEL(q) != ignore;
        FOLD(PLUS, count);
    }
    const long target = LABEL(r);
    const bool valid = target != ignore && target >= 0 && target < (long)n;
    TAKE_SLICE(r, lane < slices);
    COMBINE(most);
    const ACC lse = m + log(s), scale = valid ? 1 / count : 0;
    ACC v[KEPT];
    for (IDX i = first + lane * VEC; i < stop; i += BLOCK) {
        fetch(v, x, at, i, stop, stride, -INFINITY);
        write_gradient(v, grad, grad_at + (ulong)r * n, i, stop, lse, (IDX)target, scale);
    }
#endif
}
#else

// loss[row] = logsumexp(x) - x[label] and grad = (softmax(x) - onehot) / count. Both are 0 if the label is `ignore`. `count` is the
// number of labels that are not ignored: with COUNT_ONE it is 1 (no mean), with COUNT_GIVEN it is counted[0], and with COUNT_HERE
// every group counts all labels. With COUNT_ALONG, a group counts only the labels of its rows, which suffices if one group divides
// the sum. With `sums`, group g writes to loss[g] the sum of its losses divided by the count. Otherwise the loss of every row is
// written.
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void
row(PARAMETERS) {
    const IDX rows = (IDX)rows_, n = (IDX)n_;
    const uint lid = get_local_id(0), lanes = LANES, lane = lid % LANES, step = 1;
    const IDX group = (IDX)get_group_id(0), by = (IDX)get_num_groups(0) * (GROUP / LANES);
    __local ACC scratch[GROUP];
    ACC count = counting == COUNT_ONE ? 1 : 0;
    if (counting == COUNT_GIVEN) {
        count = (ACC)counted[counted_at];
    } else if (counting == COUNT_HERE) {
        #pragma unroll 8
        for (IDX r = lid; r < rows; r += GROUP)
            count += LABEL(r) != ignore;
        FOLD_GROUP(count);
    }
    // Losses are added up in blocks of 64, which keeps rounding errors small.
    ACC total = 0, block = 0;
    uint blocked = 0;
    for (IDX top = group * (GROUP / LANES); top < rows; top += by) {
        const IDX r = top + lid / LANES;
        const bool inside = r < rows;
        const IDX stop = inside ? n : 0;
        const ulong at = x_at + (inside ? (long)r * row_stride : 0);
        const long target = inside ? LABEL(r) : ignore;
        const bool counts = target != ignore, valid = counts && target >= 0 && target < (long)n;
        const ACC chosen = valid ? LOAD(x, at + target * stride) : 0;
#if defined(COMBINES)
        TAKE_SLICE(r, inside && lane < slices);
        COMBINE(most);
#else
        ACC m = -INFINITY, s = 0;
#ifdef WHOLE
        ACC v[KEPT];
        fetch(v, x, at, lane * VEC, stop, stride, -INFINITY);
        m = largest_of(v);
        FOLD(fmax, m);
        s = sum_exp_of(v, m);
        FOLD(PLUS, s);
#else
        ACC base = 0;
        sum_online(x, at, lane * VEC, stop, stride, &m, &base, &s);
        COMBINE(most);
#endif
#endif
        const ACC lse = m + log(s);
        ACC l = 0;
        if (counts) {
            l = valid ? lse - chosen : NAN;
            if (!valid && lane == 0)
                fault_record(word, FAULT_LABEL, target, n);
        }
        if (lane == 0 && inside) {
            block += l;
            if (++blocked % 64 == 0) {
                total += block;
                block = 0;
            }
            if (counting == COUNT_ALONG)
                count += counts;
            if (!sums)
                STORE_LOSS(loss, loss_at + r, l);
        }
#ifdef WITH_GRAD
        const ACC scale = valid ? 1 / count : 0;
#ifdef WHOLE
        write_gradient(v, grad, grad_at + (ulong)r * n, lane * VEC, stop, lse, (IDX)target, scale);
#else
        ACC v[KEPT];
        for (IDX i = lane * VEC; i < stop; i += BLOCK) {
            fetch(v, x, at, i, stop, stride, -INFINITY);
            write_gradient(v, grad, grad_at + (ulong)r * n, i, stop, lse, (IDX)target, scale);
        }
#endif
#endif
    }
    if (!sums)
        return;
    total += block;
    FOLD_GROUP(total);
    if (counting == COUNT_ALONG)
        FOLD_GROUP(count);
#ifdef LAST_GROUP_SUMS
    __local uint others;
    if (lid == 0) {
        parts[parts_at + group] = (Two)(total, count);
        FENCE;
        others = atomic_inc(arrived + first_arrived);
        FENCE;
        if (others == get_num_groups(0) - 1)
            arrived[first_arrived] = 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (others != get_num_groups(0) - 1)
        return;
    Two all = 0;
    for (uint g = lid; g < get_num_groups(0); g += GROUP)
        all += parts[parts_at + g];
    total = all.x;
    FOLD_GROUP(total);
    if (counting == COUNT_ALONG) {
        count = all.y;
        FOLD_GROUP(count);
    }
    if (lid == 0)
        STORE_LOSS(loss, loss_at, total / count);
    barrier(CLK_LOCAL_MEM_FENCE); // see FENCE in prelude.cl
#else
    if (lid == 0)
        STORE_LOSS(loss, loss_at + group, total / count);
#endif
}
#endif

// Softmax, log-softmax, logsumexp and their gradients along any dim. On CPUs also cross-entropy, with loss and gradient in one launch (for GPUs see
// cross_entropy.cl). The host defines A (dtype), ACC and ACC_NAME (float F32, double F64), NK (number of dims of rows), IDX, and one of SOFTMAX
// LOG_SOFTMAX LOGSUMEXP SOFTMAX_GRAD LOG_SOFTMAX_GRAD CROSS_ENTROPY; for the last also T (dtype of the labels) and WITH_GRAD. On CPUs, a work-item
// processes one row or several. On GPUs, `lanes` work-items share a row, as in reduce.cl. With CACHED, the whole row is in registers: each lane has
// CACHED groups of VEC elements (loaded as WIDE_T if VEC is above 1), and LANES and BY_COLUMN are macros. SOFTMAX with MASK is masked. If `causal` (the
// number of rows of a matrix) is not 0, row r of a matrix keeps the elements 0 to `first` + r. With MASK 1, only elements where z (dtype Z) is true
// count. With MASK 2, z is added.

typedef __global const CAT(A, _t) *In;
typedef __global CAT(A, _t) *Out;
#ifdef MASK
typedef __global const CAT(Z, _t) *Other;
#if MASK == 0
#define MASKED(v, i) (v)
#elif MASK == 1
#define MASKED(v, i) (CAT(load_, Z)(z, za + (long)(i) * zs) ? (v) : -INFINITY)
#else
#define MASKED(v, i) ((v) + CAT(load_, Z)(z, za + (long)(i) * zs))
#endif
#else
typedef In Other;
#endif
#define LOAD CAT(load_, A)
#define STORE CAT(CAT(CAT(store_, A), _), ACC_NAME)
#define LARGER(a, b) ((((a) > (b)) | ((a) != (a))) ? (a) : (b))
#define PLUS(a, b) ((a) + (b))

#ifdef IS_CPU
typedef CAT(ACC, 16) Acc16;
#define LOAD16 CAT(load16_, A)
#define STORE16 CAT(store16_, A)
#define WIDE(stride_is_one) if (stride_is_one) for (; i + 16 <= n; i += 16)
#define FOLD(OP, v)
#define ACROSS(OP, v)                                                                                                  \
    const CAT(ACC, 8) v##_8 = OP(v.lo, v.hi);                                                                           \
    const CAT(ACC, 4) v##_4 = OP(v##_8.lo, v##_8.hi);                                                                     \
    const CAT(ACC, 2) v##_2 = OP(v##_4.lo, v##_4.hi);                                                                     \
    const ACC v##_1 = OP(v##_2.lo, v##_2.hi)
#endif

static inline ACC largest(In x, ulong at, IDX n, long stride, uint lane, uint lanes) {
    ACC m = -INFINITY;
    IDX i = lane;
#ifdef IS_CPU
    Acc16 w = -INFINITY;
    WIDE(stride == 1) {
        const Acc16 v = LOAD16(x, at + i);
        w = LARGER(v, w);
    }
    ACROSS(LARGER, w);
    m = w_1;
#endif
    for (; i < n; i += lanes) {
        const ACC v = LOAD(x, at + (long)i * stride);
        m = LARGER(v, m);
    }
    return m;
}

static inline ACC sum_exp(In x, ulong at, IDX n, long stride, ACC m, uint lane, uint lanes) {
    ACC s = 0;
    IDX i = lane;
#ifdef IS_CPU
    Acc16 w = 0;
    WIDE(stride == 1) w += exp(LOAD16(x, at + i) - m);
    ACROSS(PLUS, w);
    s = w_1;
#endif
    for (; i < n; i += lanes)
        s += exp(LOAD(x, at + (long)i * stride) - m);
    return s;
}

#ifdef CROSS_ENTROPY
#define COUNT_HERE 0
#define COUNT_ONE 1
#define COUNT_GIVEN 2

// loss[row] = logsumexp(x) - x[label] and grad = (softmax(x) - onehot) / count. Both are 0 if the label is `ignore`. `count` is the number of labels
// that are not ignored: with COUNT_ONE it is 1 (no mean), with COUNT_GIVEN it is counted[0], and otherwise every work-item counts. With `sums`,
// work-item g writes to loss[g] the sum of its losses divided by the count. Otherwise the loss of every row is written.
__kernel void
    row(In x, ulong x_at, __global const CAT(T, _t) *label, ulong label_at, long label_stride, Out grad, ulong grad_at,
        __global CAT(B, _t) *loss, ulong loss_at, __global const long *counted, ulong counted_at, volatile __global int *word,
        ulong rows_, ulong n_, long row_stride, long stride, long ignore, uint counting, uint sums) {
    const IDX rows = (IDX)rows_, n = (IDX)n_;
    const uint lane = 0, lanes = 1;
    const IDX group = (IDX)get_global_id(0), groups = (IDX)get_global_size(0);
    const IDX chunk = (rows + groups - 1) / groups;
    const IDX first = group * chunk, end = min(first + chunk, rows);
    ACC count = counting == COUNT_ONE ? 1 : 0;
    if (counting == COUNT_GIVEN) {
        count = (ACC)counted[counted_at];
    } else if (counting == COUNT_HERE) {
        for (IDX r = 0; r < rows; ++r)
            count += CAT(load_, T)(label, label_at + (long)r * label_stride) != ignore;
    }
    // Losses are added up in blocks, which keeps rounding errors small.
    ACC total = 0, block = 0;
    uint blocked = 0;
    for (IDX r = first; r < end; ++r) {
        const ulong at = x_at + (long)r * row_stride;
        const long target = CAT(load_, T)(label, label_at + (long)r * label_stride);
        const bool counts = target != ignore, valid = target >= 0 && target < (long)n;
        const ACC m = largest(x, at, n, stride, lane, lanes);
        const ACC lse = m + log(sum_exp(x, at, n, stride, m, lane, lanes));
        ACC l = 0;
        if (counts) {
            l = NAN;
            if (valid)
                l = lse - LOAD(x, at + target * stride);
            else
                fault_record(word, FAULT_LABEL, target, n);
        }
        block += l;
        if (++blocked % 64 == 0) {
            total += block;
            block = 0;
        }
        if (!sums)
            CAT(CAT(CAT(store_, B), _), ACC_NAME)(loss, loss_at + r, l);
#ifdef WITH_GRAD
        const ulong to = grad_at + (ulong)r * n;
        const ACC scale = counts && valid ? 1 / count : 0;
        IDX i = 0;
        if (scale == 0) {
            for (; i < n; ++i)
                STORE(grad, to + i, (ACC)0);
        }
        WIDE(stride == 1) STORE16(grad, to + i, exp(LOAD16(x, at + i) - lse) * scale);
        for (; i < n; ++i)
            STORE(grad, to + i, (exp(LOAD(x, at + (long)i * stride) - lse) - (ACC)(i == target)) * scale);
        // The vector loop has not subtracted 1 at the label.
        if (scale != 0)
            STORE(grad, to + target, (exp(LOAD(x, at + target * stride) - lse) - 1) * scale);
#endif
    }
    if (sums)
        CAT(CAT(CAT(store_, B), _), ACC_NAME)(loss, loss_at + group, (total + block) / count);
}
#else

#ifdef CACHED
// The number of elements of a lane's part of a row. They stay in registers, because every loop over them is unrolled.
#define KEPT (CACHED * VEC)

static inline ACC largest_of(const ACC *v) {
    ACC m = -INFINITY;
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        m = fmax(v[k], m);
    return m;
}

static inline ACC sum_of(const ACC *v) {
    ACC s = 0;
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        s += v[k];
    return s;
}

static inline ACC sum_exp_of(const ACC *v) {
    ACC s = 0;
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        s += exp(v[k]);
    return s;
}

static inline ACC dot_of(const ACC *v, const ACC *g) {
    ACC s = 0;
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        s += g[k] * v[k];
    return s;
}

static inline void exp_all(ACC *v) {
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        v[k] = exp(v[k]);
}

static inline void shift_all(ACC *v, ACC by) {
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        v[k] -= by;
}

static inline void scale_all(ACC *v, ACC by) {
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        v[k] *= by;
}

// Loads a lane's part of a row. Elements past the end of the row are set to `other`.
static inline void fetch(ACC *v, In x, ulong at, uint lane, uint lanes, IDX stop, long stride, ACC other) {
    #pragma unroll
    for (int k = 0; k < CACHED; ++k) {
        const IDX i = (lane + k * lanes) * VEC;
#if VEC > 1
        CAT(A, _t) raw[VEC];
        const bool inside = i < stop;
        CAT(vstore, VEC)(inside ? *(__global const WIDE_T *)(x + at + i) : (WIDE_T)(0), 0, raw);
        #pragma unroll
        for (int j = 0; j < VEC; ++j)
            v[k * VEC + j] = inside ? CAT(from_, A)(raw[j]) : other;
#else
        v[k] = i < stop ? LOAD(x, at + (long)i * stride) : other;
#endif
    }
}

#ifdef MASK
static inline void hide(ACC *v, Other z, ulong za, uint lane, uint lanes, IDX visible, long zs) {
    #pragma unroll
    for (int k = 0; k < CACHED; ++k) {
        #pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const IDX i = (lane + k * lanes) * VEC + j;
            v[k * VEC + j] = i < visible ? MASKED(v[k * VEC + j], i) : -INFINITY;
        }
    }
}
#endif

static inline void keep(const ACC *v, Out y, ulong at, uint lane, uint lanes, IDX stop, long stride) {
    #pragma unroll
    for (int k = 0; k < CACHED; ++k) {
        const IDX i = (lane + k * lanes) * VEC;
        if (i < stop) {
#if VEC > 1
            CAT(A, _t) raw[VEC];
            #pragma unroll
            for (int j = 0; j < VEC; ++j)
                raw[j] = CAT(CAT(CAT(to_, A), _), ACC_NAME)(v[k * VEC + j]);
            *(__global WIDE_T *)(y + at + i) = CAT(vload, VEC)(0, raw);
#else
            STORE(y, at + (long)i * stride, v[k]);
#endif
        }
    }
}
#endif

__kernel
#ifndef IS_CPU
    __attribute__((reqd_work_group_size(GROUP, 1, 1)))
#endif
    void
    row(In x, ulong x_at, Out y, ulong y_at, Other z, ulong z_at, Rows rows, ulong count_, ulong n_, long xs, long ys,
        long zs, uint by_column_, uint lanes_, ulong causal, ulong first) {
    const IDX count = (IDX)count_, n = (IDX)n_;
#ifdef CACHED
    const uint by_column = BY_COLUMN, lanes = LANES;
#else
    const uint by_column = by_column_, lanes = lanes_;
#endif
#ifdef IS_CPU
    const uint lane = 0;
    const IDX r = (IDX)get_global_id(0);
    if (r >= count)
        return;
#else
    const uint lid = get_local_id(0), per = GROUP / lanes;
    const uint lane = by_column ? lid / per : lid % lanes;
    const uint step = by_column ? per : 1;
    const IDX r = (IDX)get_group_id(0) * per + (by_column ? lid % per : lid / lanes);
    __local ACC scratch[GROUP];
#endif
    // Work-items past the last row get an empty row, so that they reach every barrier as well.
    const IDX stop = r < count ? n : 0;
    const At at = at_rows(&rows, r < count ? r : 0);
    const ulong xa = x_at + at.x, ya = y_at + at.y, za = z_at + at.z;
    IDX i = lane;
#ifdef MASK
    const IDX visible = causal == 0 ? stop : min(stop, (IDX)first + r % (IDX)causal + 1);
#endif
#ifdef CACHED
    ACC v[KEPT];
#if defined(SOFTMAX) || defined(LOG_SOFTMAX) || defined(LOGSUMEXP)
#ifdef MASK
    fetch(v, x, xa, lane, lanes, min(stop, (visible + VEC - 1) / VEC * VEC), xs, -INFINITY);
    hide(v, z, za, lane, lanes, visible, zs);
#else
    fetch(v, x, xa, lane, lanes, stop, xs, -INFINITY);
#endif
    // fmax may drop a NaN, but the NaN still reaches the sum of exponentials.
    ACC m = largest_of(v);
    FOLD(fmax, m);
#ifdef LOGSUMEXP
    // Subtracts 0 instead of an infinite maximum. The result is then that infinity, instead of NaN from inf - inf.
    if (isinf(m))
        m = 0;
#elif defined(MASK)
    if (m == -INFINITY)
        m = 0;
#endif
    shift_all(v, m);
#ifdef SOFTMAX
    exp_all(v);
    ACC s = sum_of(v);
    FOLD(PLUS, s);
#ifdef MASK
    // A row in which all elements are masked gives zeros.
    scale_all(v, s == 0 ? 0 : 1 / s);
#else
    scale_all(v, 1 / s);
#endif
    keep(v, y, ya, lane, lanes, stop, ys);
#else
    ACC s = sum_exp_of(v);
    FOLD(PLUS, s);
#ifdef LOGSUMEXP
    if (lane == 0 && r < count)
        STORE(y, ya, m + log(s));
#else
    shift_all(v, log(s));
    keep(v, y, ya, lane, lanes, stop, ys);
#endif
#endif
#else
    // x is the result of the forward pass, and z is the gradient of that result.
    ACC g[KEPT];
    fetch(v, x, xa, lane, lanes, stop, xs, 0);
    fetch(g, z, za, lane, lanes, stop, zs, 0);
#ifdef SOFTMAX_GRAD
    ACC s = dot_of(v, g);
    FOLD(PLUS, s);
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        v[k] *= g[k] - s;
#else
    ACC s = sum_of(g);
    FOLD(PLUS, s);
    #pragma unroll
    for (int k = 0; k < KEPT; ++k)
        v[k] = g[k] - exp(v[k]) * s;
#endif
    keep(v, y, ya, lane, lanes, stop, ys);
#endif
#elif defined(MASK)
#define VALUE(i) MASKED(LOAD(x, xa + (long)(i) * xs), i)
    ACC m = -INFINITY, s = 0;
#if MASK == 0
    m = largest(x, xa, visible, xs, lane, lanes);
#else
    for (i = lane; i < visible; i += lanes) {
        const ACC v = VALUE(i);
        m = LARGER(v, m);
    }
#endif
    FOLD(LARGER, m);
    if (m == -INFINITY)
        m = 0;
#if MASK == 0
    s = sum_exp(x, xa, visible, xs, m, lane, lanes);
#else
    for (i = lane; i < visible; i += lanes)
        s += exp(VALUE(i) - m);
#endif
    FOLD(PLUS, s);
    const ACC scale = s == 0 ? 0 : 1 / s;
    i = lane;
#if MASK == 0 && defined(IS_CPU)
    {
        const IDX n = visible;
        WIDE(xs == 1 && ys == 1) STORE16(y, ya + i, exp(LOAD16(x, xa + i) - m) * scale);
    }
#endif
    for (; i < visible; i += lanes)
        STORE(y, ya + (long)i * ys, exp(VALUE(i) - m) * scale);
    for (; i < stop; i += lanes)
        STORE(y, ya + (long)i * ys, (ACC)0);
#elif defined(SOFTMAX) || defined(LOG_SOFTMAX) || defined(LOGSUMEXP)
    ACC m = largest(x, xa, stop, xs, lane, lanes);
    FOLD(LARGER, m);
#ifdef LOGSUMEXP
    // Subtracts 0 instead of an infinite maximum. The result is then that infinity, instead of NaN from inf - inf.
    if (isinf(m))
        m = 0;
#endif
    ACC s = sum_exp(x, xa, stop, xs, m, lane, lanes);
    FOLD(PLUS, s);
#ifdef LOGSUMEXP
    if (lane == 0 && r < count)
        STORE(y, ya, m + log(s));
#else
#ifdef SOFTMAX
    const ACC scale = 1 / s;
#define RESULT(v) (exp((v) - m) * scale)
#else
    const ACC log_s = log(s);
#define RESULT(v) ((v) - m - log_s)
#endif
#ifdef IS_CPU
    WIDE(xs == 1 && ys == 1) STORE16(y, ya + i, RESULT(LOAD16(x, xa + i)));
#endif
    for (; i < stop; i += lanes)
        STORE(y, ya + (long)i * ys, RESULT(LOAD(x, xa + (long)i * xs)));
#endif
#else
    // x is the result of the forward pass, and z is the gradient of that result.
    ACC s = 0;
#ifdef SOFTMAX_GRAD
#define TERM(v, g) ((g) * (v))
#define RESULT(v, g) (((g) - s) * (v))
#else
#define TERM(v, g) (g)
#define RESULT(v, g) ((g) - exp(v) * s)
#endif
#ifdef IS_CPU
    Acc16 w = 0;
    WIDE(xs == 1 && zs == 1) w += TERM(LOAD16(x, xa + i), LOAD16(z, za + i));
    ACROSS(PLUS, w);
    s = w_1;
#endif
    for (; i < stop; i += lanes)
        s += TERM(LOAD(x, xa + (long)i * xs), LOAD(z, za + (long)i * zs));
    FOLD(PLUS, s);
    i = lane;
#ifdef IS_CPU
    WIDE(xs == 1 && ys == 1 && zs == 1) STORE16(y, ya + i, RESULT(LOAD16(x, xa + i), LOAD16(z, za + i)));
#endif
    for (; i < stop; i += lanes)
        STORE(y, ya + (long)i * ys, RESULT(LOAD(x, xa + (long)i * xs), LOAD(z, za + (long)i * zs)));
#endif
}
#endif

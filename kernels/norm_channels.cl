// Batch norm of tensors whose channels lie innermost: rows of `channels` neighbours, of which each channel has a mean and a variance over
// all rows. The host gives A (dtype), W (dtype of weights), ACC and ACC_NAME, IDX, BACKWARD for the gradient, WEIGHT and BIAS
// where there are some. A work-item has VEC neighbouring channels (loaded as WIDE_T where VEC is above 1), LANES of a group's GROUP
// share a row, and the others have the rows after it. Each slice of `chunk` rows has groups of its own: a launch with PARTS leaves what the
// slices add up to, one with APPLY combines it, always in the same order, and writes. Without either, a group has all rows.

typedef __global const CAT(A, _t) *In;
typedef __global CAT(A, _t) *Out;
typedef __global const CAT(W, _t) *Weights;
typedef CAT(ACC, 2) Two;
#define ROWS (GROUP / LANES)
// Rows that a work-item loads before it goes on with the first.
#define AT_ONCE 4

static inline void get(ACC *v, In x, ulong at) {
#if VEC > 1
    CAT(A, _t) raw[VEC];
    CAT(vstore, VEC)(*(__global const WIDE_T *)(x + at), 0, raw);
    #pragma unroll
    for (int j = 0; j < VEC; ++j)
        v[j] = CAT(from_, A)(raw[j]);
#else
    v[0] = CAT(load_, A)(x, at);
#endif
}

static inline void put(Out y, ulong at, const ACC *v) {
#if VEC > 1
    CAT(A, _t) raw[VEC];
    #pragma unroll
    for (int j = 0; j < VEC; ++j)
        raw[j] = CAT(CAT(CAT(to_, A), _), ACC_NAME)(v[j]);
    *(__global WIDE_T *)(y + at) = CAT(vload, VEC)(0, raw);
#else
    CAT(CAT(CAT(store_, A), _), ACC_NAME)(y, at, v[0]);
#endif
}

// What some rows of each channel have: the mean and the squared deviations of n; in the gradient two sums.
typedef struct {
    ACC a[VEC], b[VEC], n;
} Seen;

static inline void merge(Seen *to, const ACC *a, const ACC *b, ACC n) {
#ifdef BACKWARD
    #pragma unroll
    for (int j = 0; j < VEC; ++j) {
        to->a[j] += a[j];
        to->b[j] += b[j];
    }
#else
    const ACC all = to->n + n, share = all > 0 ? n / all : 0, both = to->n * share;
    #pragma unroll
    for (int j = 0; j < VEC; ++j) {
        const ACC apart = a[j] - to->a[j];
        to->a[j] += apart * share;
        to->b[j] += b[j] + apart * apart * both;
    }
    to->n = all;
#endif
}

#ifdef BACKWARD
#define FORWARDS_INPUT In z, ulong z_at,
#define ITS_SUMS __global ACC *sums, ulong sums_at,
#else
#define FORWARDS_INPUT
#define ITS_SUMS
#endif
#ifdef WEIGHT
#define ITS_WEIGHT Weights w, ulong w_at,
#else
#define ITS_WEIGHT
#endif
#ifdef BIAS
#define ITS_BIAS Weights b, ulong b_at,
#else
#define ITS_BIAS
#endif
#if defined(PARTS) || defined(APPLY)
#define SLICED , __global Two *parts, ulong parts_at
#else
#define SLICED
#endif

typedef struct {
    ulong rows, channels, chunk, slices;
    // From one row to the next of what is read, of the result, and of the forward's input; from one channel's weight, and bias, to the next.
    long x, y, z, w, b;
} Sizes;

// Forward, x is normalised. Backward, it is the gradient of the result, and z the forward's input.
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void norm(
    In x, ulong x_at, Out y, ulong y_at, FORWARDS_INPUT ITS_WEIGHT ITS_BIAS __global ACC *statistics, ulong statistics_at,
    ITS_SUMS Sizes d, ACC eps SLICED) {
    __local ACC of_a[GROUP * VEC], of_b[GROUP * VEC], of_n[GROUP];
    const IDX rows = (IDX)d.rows, channels = (IDX)d.channels, chunk = (IDX)d.chunk;
    const uint lid = get_local_id(0), lane = lid % LANES, row = lid / LANES;
    const IDX blocks = (channels + LANES * VEC - 1) / (LANES * VEC), group = (IDX)get_group_id(0);
    const IDX slice = group / blocks, c = (group % blocks * LANES + lane) * VEC;
    const IDX start = slice * chunk, stop = min(start + chunk, rows);
    const bool there = c < channels;
    __global ACC *means = statistics + statistics_at + c, *vars = means + channels;
    Seen seen;
    seen.n = 0;
    #pragma unroll
    for (int j = 0; j < VEC; ++j)
        seen.a[j] = seen.b[j] = 0;
#ifdef BACKWARD
    ACC mean[VEC], scale[VEC];
    #pragma unroll
    for (int j = 0; j < VEC; ++j) {
        mean[j] = there ? means[j] : 0;
        scale[j] = there ? 1 / sqrt(vars[j] + eps) : 0;
    }
#endif

#ifdef APPLY
    for (IDX s = row; there && s < (IDX)d.slices; s += ROWS) {
        ACC a[VEC], b[VEC];
        #pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const Two part = parts[parts_at + (ulong)s * channels + c + j];
            a[j] = part.x;
            b[j] = part.y;
        }
        merge(&seen, a, b, (ACC)min(chunk, rows - s * chunk));
    }
#else
    for (IDX r = start + row; there && r < stop; r += ROWS * AT_ONCE) {
        const int here = (int)min((IDX)AT_ONCE, (stop - r + ROWS - 1) / ROWS);
        ACC v[AT_ONCE][VEC], a[VEC], b[VEC];
        #pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (k < here)
                get(v[k], x, x_at + (ulong)((long)(r + k * ROWS) * d.x) + c);
        #pragma unroll
        for (int j = 0; j < VEC; ++j)
            a[j] = b[j] = 0;
#ifdef BACKWARD
        ACC z_of[AT_ONCE][VEC];
        #pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (k < here)
                get(z_of[k], z, z_at + (ulong)((long)(r + k * ROWS) * d.z) + c);
        #pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            #pragma unroll
            for (int j = 0; j < VEC; ++j) {
                a[j] += k < here ? v[k][j] : 0;
                b[j] += k < here ? v[k][j] * ((z_of[k][j] - mean[j]) * scale[j]) : 0;
            }
        }
#else
        const ACC each = 1 / (ACC)here;
        #pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            #pragma unroll
            for (int j = 0; j < VEC; ++j)
                a[j] += k < here ? v[k][j] * each : 0;
        }
        #pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            #pragma unroll
            for (int j = 0; j < VEC; ++j)
                b[j] += k < here ? (v[k][j] - a[j]) * (v[k][j] - a[j]) : 0;
        }
#endif
        merge(&seen, a, b, (ACC)here);
    }
#endif

    // All rows of the group: halves of them take in the others', and every row has what the first one has at last.
    for (uint half_of = ROWS; half_of > 0; half_of /= 2) {
        const bool gives = half_of == 1 ? row == 0 : row >= half_of / 2 && row < half_of;
        if (gives) {
            #pragma unroll
            for (int j = 0; j < VEC; ++j) {
                of_a[j * GROUP + lid] = seen.a[j];
                of_b[j * GROUP + lid] = seen.b[j];
            }
            of_n[lid] = seen.n;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        const uint from = half_of == 1 ? lane : lid + half_of / 2 * LANES;
        if (half_of == 1 ? row > 0 : row < half_of / 2) {
            ACC a[VEC], b[VEC];
            #pragma unroll
            for (int j = 0; j < VEC; ++j) {
                a[j] = of_a[j * GROUP + from];
                b[j] = of_b[j * GROUP + from];
            }
            if (half_of == 1) {
                #pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    seen.a[j] = a[j];
                    seen.b[j] = b[j];
                }
            } else {
                merge(&seen, a, b, of_n[from]);
            }
        }
    }

#ifdef PARTS
    if (row == 0 && there) {
        #pragma unroll
        for (int j = 0; j < VEC; ++j)
            parts[parts_at + (ulong)slice * channels + c + j] = (Two)(seen.a[j], seen.b[j]);
    }
#else
    if (!there)
        return;
    ACC weight[VEC];
    #pragma unroll
    for (int j = 0; j < VEC; ++j) {
#ifdef WEIGHT
        weight[j] = CAT(load_, W)(w, w_at + (ulong)((long)(c + j) * d.w));
#else
        weight[j] = 1;
#endif
    }
#ifdef BACKWARD
    if (row == 0 && slice == 0) {
        #pragma unroll
        for (int j = 0; j < VEC; ++j) {
            sums[sums_at + c + j] = seen.a[j];
            sums[sums_at + channels + c + j] = seen.b[j];
        }
    }
    #pragma unroll
    for (int j = 0; j < VEC; ++j) {
        seen.a[j] *= weight[j] / (ACC)rows;
        seen.b[j] *= weight[j] / (ACC)rows;
    }
#else
    ACC shift[VEC];
    #pragma unroll
    for (int j = 0; j < VEC; ++j) {
        const ACC var = seen.b[j] / (ACC)rows;
        if (row == 0 && slice == 0) {
            means[j] = seen.a[j];
            vars[j] = var;
        }
        weight[j] *= 1 / sqrt(var + eps);
#ifdef BIAS
        shift[j] = CAT(load_, W)(b, b_at + (ulong)((long)(c + j) * d.b));
#else
        shift[j] = 0;
#endif
    }
#endif
    for (IDX r = start + row; r < stop; r += ROWS * AT_ONCE) {
        const int here = (int)min((IDX)AT_ONCE, (stop - r + ROWS - 1) / ROWS);
        ACC v[AT_ONCE][VEC];
        #pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (k < here)
                get(v[k], x, x_at + (ulong)((long)(r + k * ROWS) * d.x) + c);
#ifdef BACKWARD
        ACC z_of[AT_ONCE][VEC];
        #pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (k < here)
                get(z_of[k], z, z_at + (ulong)((long)(r + k * ROWS) * d.z) + c);
#endif
        #pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            #pragma unroll
            for (int j = 0; j < VEC; ++j) {
#ifdef BACKWARD
                const ACC normal = (z_of[k][j] - mean[j]) * scale[j];
                v[k][j] = (v[k][j] * weight[j] - seen.a[j] - normal * seen.b[j]) * scale[j];
#else
                v[k][j] = (v[k][j] - seen.a[j]) * weight[j] + shift[j];
#endif
            }
            if (k < here)
                put(y, y_at + (ulong)((long)(r + k * ROWS) * d.y) + c, v[k]);
        }
    }
#endif
}

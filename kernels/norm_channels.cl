// Batch norm of channels-last tensors: rows of `channels` adjacent elements. Each channel has a mean and a variance over all rows.
// Follows norm_arguments.cl. The host defines IDX. A work-item has VEC adjacent channels, and LANES of the GROUP work-items of a
// group share a row. So a group has a block of LANES * VEC channels, and at most one channel per work-item. Each slice of `chunk` rows
// is processed by separate groups: a launch with PARTS writes the sums of the slices, and a launch with APPLY combines the sums and
// writes the result. Without either macro, a group processes all rows. Sums have the same order in every run.

#define BLOCK (LANES * VEC)
#define ROWS (GROUP / LANES)
// The number of rows from one iteration of a work-item to the next. A work-item loads AT_ONCE rows of x (and of z) before it computes.
#define TURN (ROWS * AT_ONCE)

// Loads rows r, r + ROWS and so on of this work-item's channels. Past the end, the last row is loaded again, so that loads need no conditions.
static inline void fetch(Raw *raw, In x, ulong at, long step, IDX r, IDX last) {
    #pragma unroll
    for (int k = 0; k < AT_ONCE; ++k)
        raw[k] = raw_at(x, at + (ulong)((long)min(r + k * ROWS, last) * step));
}

// Sets v of work-item t < BLOCK to the sum over all work-items whose number is t modulo BLOCK. This is a macro, because in PoCL,
// groups share local memory that is passed to functions.
#define OVER_BLOCK(v)                                                                                                  \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                                      \
    scratch[lid] = v;                                                                                                  \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                                      \
    v = 0;                                                                                                             \
    if (lid < BLOCK) {                                                                                                 \
        _Pragma("unroll") for (int k = 0; k < GROUP / BLOCK; ++k) v += scratch[lid + k * BLOCK];                       \
    }

// Like OVER_BLOCK, for VEC channels per work-item: `sum` of work-item t becomes the sum over all rows of channel t of the block.
#define PITCH (GROUP + 32 / VEC) // padded so that a column of work-items reads from different banks
#define OVER_ROWS(v, sum)                                                                                              \
    ACC sum = 0;                                                                                                       \
    _Pragma("unroll") for (int j = 0; j < VEC; ++j) all[j * PITCH + lid] = v[j];                                       \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                                      \
    _Pragma("unroll") for (int i = 0; i < VEC; ++i) sum +=                                                             \
        all[lid % BLOCK % VEC * PITCH + (lid / BLOCK * VEC + i) * LANES + lid % BLOCK / VEC];                          \
    OVER_BLOCK(sum)

#if defined(PARTS) || defined(APPLY)
#define SLICED , __global Two *parts, ulong parts_at
#else
#define SLICED
#endif

typedef struct {
    ulong rows, channels, chunk, slices;
    // Strides between rows of the input, of the result and of the forward pass's input, and strides between channels of the weight
    // and the bias.
    long x, y, z, w, b;
} Sizes;

// Forward: normalises x. Backward: x is the gradient of the result, and z is the input of the forward pass.
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void norm(
    In x, ulong x_at, Out y, ulong y_at, FORWARDS_INPUT ITS_WEIGHT ITS_BIAS __global ACC *statistics, ulong statistics_at,
    ITS_SUMS Sizes d, ACC eps SLICED) {
    // Four numbers for each channel of the block, which all rows use.
    __local ACC scratch[GROUP], of_block[4 * BLOCK];
    const IDX rows = (IDX)d.rows, channels = (IDX)d.channels, chunk = (IDX)d.chunk;
    const uint lid = get_local_id(0), lane = lid % LANES, row = lid / LANES;
    const IDX blocks = (channels + BLOCK - 1) / BLOCK, group = (IDX)get_group_id(0), slice = group / blocks;
    const IDX first = group % blocks * BLOCK, c = first + lane * VEC;
    // The channel whose partial results this work-item combines. The first work-item of each channel writes the channel's results.
    const IDX own = first + lid % BLOCK;
    const bool counts = own < channels, writes = counts & (lid < BLOCK);
    __global ACC *means = statistics + statistics_at, *scales = means + channels;
    // Work-items past the last channel get no rows.
    const IDX start = slice * chunk, stop = c < channels ? min(start + chunk, rows) : start, last = stop - 1;
    x_at += c;
#ifdef BACKWARD
    z_at += c;
#endif

#ifndef BACKWARD
    // The mean is stored as the sum `sum_a + low`, and squares are of elements multiplied by the factor. If one channel needs
    // another factor, all work-items repeat the sums.
    ACC low = 0, own_factor = 1;
    __local uint needed[3];
    if (lid < 3)
        needed[lid] = 0;
#define FOR_EACH_FACTOR                                                                                                \
    uint own_attempt = 0;                                                                                              \
    for (uint attempt = 0; attempt < 3; ++attempt) {                                                                   \
        const ACC factor = attempt == 0 ? 1 : attempt == 1 ? DOWN : UP;                                                \
        if (attempt == 0 || needed[attempt]) {
#define KEEP(mean, squares, kept)                                                                                      \
            if (writes && own_attempt == attempt) {                                                                    \
                kept                                                                                                   \
                if (attempt == 0) {                                                                                    \
                    const ACC better = factor_for(mean, squares, eps);                                                 \
                    own_attempt = better == 1 ? 0 : better == DOWN ? 1 : 2;                                            \
                    needed[own_attempt] = 1;                                                                           \
                }                                                                                                      \
            }
#define END_OF_FACTORS                                                                                                 \
            barrier(CLK_LOCAL_MEM_FENCE);                                                                              \
        }                                                                                                              \
    }
#endif
#ifdef APPLY
    // Combines the partial results of all slices. Means are summed relative to one slice's mean, so that no digits are lost if they are far from 0.
    ACC sum_a = 0, sum_b = 0;
    parts += parts_at + own;
    const IDX slices = counts ? (IDX)d.slices : 0;
#ifdef BACKWARD
    for (IDX s = lid / BLOCK; s < slices; s += GROUP / BLOCK) {
        const Two part = parts[(ulong)s * channels];
        sum_a += part.x;
        sum_b += part.y;
    }
    OVER_BLOCK(sum_a);
    OVER_BLOCK(sum_b);
#else
#define ROWS_OF(s) (ACC) min(chunk, rows - (s) * chunk)
    const ACC near = counts ? parts[0].x : 0;
    for (IDX s = lid / BLOCK; s < slices; s += GROUP / BLOCK)
        sum_a += (parts[(ulong)s * channels].x - near) * (ROWS_OF(s) / (ACC)rows);
    OVER_BLOCK(sum_a);
    if (lid < BLOCK)
        of_block[lid] = sum_a;
    barrier(CLK_LOCAL_MEM_FENCE);
    const ACC above = of_block[lid % BLOCK];
    FOR_EACH_FACTOR
        ACC squares = 0;
        for (IDX s = lid / BLOCK; s < slices; s += GROUP / BLOCK) {
            const Two part = parts[(ulong)s * channels] * factor;
            const ACC apart = part.x - near * factor - above * factor;
            squares += (part.y * part.y + apart * apart) * ROWS_OF(s);
        }
        OVER_BLOCK(squares);
        KEEP(near, squares, own_factor = factor; sum_b = squares;)
    END_OF_FACTORS
    low = sum_a;
    sum_a += near;
    low -= sum_a - near;
#endif
#else
    __local ACC all[VEC * PITCH];
    ACC of_a[VEC], of_b[VEC], mean[VEC];
    #pragma unroll
    for (int j = 0; j < VEC; ++j)
        of_a[j] = of_b[j] = mean[j] = 0;
#ifdef BACKWARD
    // The sums of the gradient, and of the gradient times the normalised input (without the weight).
    if (start < stop) {
        #pragma unroll
        for (int j = 0; j < VEC; ++j)
            mean[j] = means[c + j];
    }
    for (IDX r = start + row; r < stop; r += TURN) {
        Raw of_x[AT_ONCE], of_z[AT_ONCE];
        fetch(of_x, x, x_at, d.x, r, last);
        fetch(of_z, z, z_at, d.z, r, last);
        #pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const bool here = r + k * ROWS < stop;
            ACC g[VEC], v[VEC];
            widen(g, of_x[k]);
            widen(v, of_z[k]);
            #pragma unroll
            for (int j = 0; j < VEC; ++j) {
                of_a[j] += here ? g[j] : 0;
                of_b[j] += here ? g[j] * (v[j] - mean[j]) : 0;
            }
        }
    }
    OVER_ROWS(of_a, sum_a);
    OVER_ROWS(of_b, sum_b);
    if (writes)
        sum_b *= scales[own];
#else
    // The mean and the squared deviations so far, of elements multiplied by the factor. Whenever the number of elements has doubled, the
    // mean is moved by the mean deviation. So at most half of the squares is subtracted, and few moves cause rounding errors.
    ACC sum_a = 0, sum_b = 0;
    FOR_EACH_FACTOR
        ACC n = 0, moved_at = 0;
        #pragma unroll
        for (int j = 0; j < VEC; ++j)
            of_a[j] = of_b[j] = mean[j] = 0;
        if (start + row < stop)
            get(mean, x, x_at + (ulong)((long)(start + row) * d.x));
        #pragma unroll
        for (int j = 0; j < VEC; ++j)
            mean[j] *= factor;
        for (IDX r = start + row; r < stop; r += TURN) {
            Raw of_x[AT_ONCE];
            fetch(of_x, x, x_at, d.x, r, last);
            #pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const bool here = r + k * ROWS < stop;
                n += here ? 1 : 0;
                ACC v[VEC];
                widen(v, of_x[k]);
                #pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    const ACC apart = here ? v[j] * factor - mean[j] : 0;
                    of_a[j] += apart;
                    of_b[j] = fma(apart, apart, of_b[j]);
                }
            }
            if (n >= 2 * moved_at) {
                moved_at = n;
                #pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    // The rounding error of the new mean stays in the sum of deviations.
                    const ACC to = mean[j] + of_a[j] / n, moved = to - mean[j];
                    of_b[j] = fma(moved, fma(n, moved, -2 * of_a[j]), of_b[j]);
                    of_a[j] = fma(-n, moved, of_a[j]);
                    mean[j] = to;
                }
            }
        }
        const ACC first_mean = counts ? CAT(load_, A)(x, x_at - c + own + (ulong)((long)start * d.x)) * factor : 0;
        ACC near[VEC], sums[VEC];
        #pragma unroll
        for (int j = 0; j < VEC; ++j)
            near[j] = 0;
        if (start < stop)
            get(near, x, x_at + (ulong)((long)start * d.x));
        #pragma unroll
        for (int j = 0; j < VEC; ++j)
            sums[j] = n > 0 ? fma(mean[j] - near[j] * factor, n, of_a[j]) : 0;
        OVER_ROWS(sums, above);
        above /= (ACC)(min(start + chunk, rows) - start);
        const ACC middle = first_mean + above, rest = above - (middle - first_mean);
        if (lid < BLOCK) {
            of_block[lid] = middle;
            of_block[BLOCK + lid] = rest;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        #pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const ACC apart = mean[j] - of_block[lane * VEC + j] - of_block[BLOCK + lane * VEC + j];
            // A work-item without rows has no mean, so its sum is 0.
            sums[j] = n > 0 ? fma(apart, fma(n, apart, 2 * of_a[j]), of_b[j]) : 0;
        }
        OVER_ROWS(sums, squares);
        KEEP(middle, squares, own_factor = factor; sum_a = middle / factor; low = rest / factor; sum_b = squares < 0 ? 0 : squares;)
    END_OF_FACTORS
#endif
#endif

#ifdef PARTS
    if (writes)
#ifdef BACKWARD
        parts[parts_at + (ulong)slice * channels + own] = (Two)(sum_a, sum_b);
#else
        // The square root of the mean square is in the range of ACC, because the elements are.
        parts[parts_at + (ulong)slice * channels + own] =
            (Two)(sum_a, sqrt(sum_b / (ACC)(min(start + chunk, rows) - start)) / own_factor);
#endif
#else
    // Four numbers per channel. Forward: (x - first) * second + third. Backward: x * first + (z - fourth) * second + third.
    barrier(CLK_LOCAL_MEM_FENCE);
    if (writes) {
        ACC weight = 1;
#ifdef WEIGHT
        weight = LOAD_WEIGHT(w, w_at + (ulong)((long)own * d.w));
#endif
#ifdef BACKWARD
        if (slice == 0) {
            sums[sums_at + own] = sum_a;
            sums[sums_at + channels + own] = sum_b;
        }
        const ACC scale = scales[own], factor = weight * scale, each = sum_b / (ACC)rows * factor * scale;
        of_block[lid] = factor;
        of_block[BLOCK + lid] = -each;
        of_block[2 * BLOCK + lid] = -sum_a / (ACC)rows * factor;
        of_block[3 * BLOCK + lid] = means[own];
#else
        const ACC var = sum_b / (ACC)rows, scale = own_factor / sqrt(var + eps * own_factor * own_factor);
        if (slice == 0) {
            means[own] = sum_a;
            scales[own] = scale;
            scales[channels + own] = var / own_factor / own_factor;
        }
        of_block[lid] = sum_a;
        of_block[BLOCK + lid] = weight * scale;
        of_block[2 * BLOCK + lid] = -low * (weight * scale);
#ifdef BIAS
        of_block[2 * BLOCK + lid] += LOAD_WEIGHT(b, b_at + (ulong)((long)own * d.b));
#endif
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    ACC first_of[VEC], second_of[VEC], third_of[VEC];
#ifdef BACKWARD
    ACC fourth_of[VEC];
#endif
    #pragma unroll
    for (int j = 0; j < VEC; ++j) {
        first_of[j] = of_block[lane * VEC + j];
        second_of[j] = of_block[BLOCK + lane * VEC + j];
        third_of[j] = of_block[2 * BLOCK + lane * VEC + j];
#ifdef BACKWARD
        fourth_of[j] = of_block[3 * BLOCK + lane * VEC + j];
#endif
    }
    // Iterates from the last row to the first, because the rows that were read last may still be cached.
    for (IDX turn = (stop - start + TURN - 1) / TURN; turn > 0; --turn) {
        const IDX r = start + row + (turn - 1) * TURN;
        Raw of_x[AT_ONCE];
        fetch(of_x, x, x_at, d.x, r, last);
#ifdef BACKWARD
        Raw of_z[AT_ONCE];
        fetch(of_z, z, z_at, d.z, r, last);
#endif
        #pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            ACC v[VEC];
            widen(v, of_x[k]);
#ifdef BACKWARD
            ACC normal[VEC];
            widen(normal, of_z[k]);
#endif
            #pragma unroll
            for (int j = 0; j < VEC; ++j) {
#ifdef BACKWARD
                v[j] = fma(v[j], first_of[j], fma(normal[j] - fourth_of[j], second_of[j], third_of[j]));
#else
                v[j] = fma(v[j] - first_of[j], second_of[j], third_of[j]);
#endif
            }
            if (r + k * ROWS < stop)
                put(y, y_at + (ulong)((long)(r + k * ROWS) * d.y) + c, v);
        }
    }
#endif
}

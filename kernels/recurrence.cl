// One direction of a recurrent layer over all time steps. A work-group of T work-items computes all steps of R sequences, so work-groups exchange
// no data. Follows strided_dims.cl and neighbours.cl. The host defines H (hidden size), one of LSTM, GRU, RELU and TANH, BACKWARD for the backward
// pass, PACKED if sequences have different lengths, KEEP if the forward pass stores what the backward pass reads, and UNITS: the number of vectors
// of the weight that a work-item keeps in registers, because the caches hold the rest.

#if defined(LSTM)
#define GATES 4
#define VALUES 7 // the numbers of a row and a feature that the backward pass reads
#elif defined(GRU)
#define GATES 3
#define VALUES 6
#else
#define GATES 1
#define VALUES 2
#endif
#define SUMS (GATES * H)
#define LANES (H / VEC)           // the number of vectors of a row of the weight
#define PER ((R * H + T - 1) / T) // the number of features whose states a work-item computes
#define LOAD(p, i) CAT(load_, A)(p, p##_at + (i))
#define STORE(p, i, v) CAT(CAT(store_, A), _F32)(p, p##_at + (i), v)
#define TENSOR(type, p) type p, const ulong p##_at

typedef struct {
    long steps, sequences, total, reverse;
} Numbers;

#if VEC > 1
typedef CAT(float, VEC) Vec;
#define GET_VEC(v, from) CAT(vstore, VEC)(*(__local const Vec *)(from), 0, v)
#define PUT_VEC(v, to) *(__local Vec *)(to) = CAT(vload, VEC)(0, v)
#else
#define GET_VEC(v, from) (v)[0] = *(from)
#define PUT_VEC(v, to) *(to) = (v)[0]
#endif

#ifdef PACKED
#define FIRST(step) (uint)starts[starts_at + (step)]
#else
#define FIRST(step) (uint)((step) * n.sequences)
#endif
// Sets the first row of a step, given in the order of computation, and the number of sequences that have this step.
#define ROWS_OF(s, first, count)                                                                                       \
    const uint CAT(first, _step) = n.reverse ? n.steps - 1 - (s) : (s);                                                \
    const uint first = FIRST(CAT(first, _step)), count = FIRST(CAT(first, _step) + 1) - first
// Runs for each feature that this work-item computes: feature u of sequence `row`, the r-th of this work-group.
#define EACH_FEATURE                                                                                                   \
    _Pragma("unroll") for (uint p = 0; p < PER; ++p)                                                                   \
        if (t + p * T < R * H)
#define FEATURE const uint r = (t + p * T) / H, u = (t + p * T) % H, row = base + r

#ifndef BACKWARD
#define TEAM 8 // the number of work-items that share a row of the weight
#define BLOCKS ((SUMS + T - 1) / T)
#define CHUNKS ((LANES + TEAM - 1) / TEAM)
#define WEIGHT_ROW(i) min((uint)(b * T + t / TEAM * TEAM + (i)), (uint)SUMS - 1)

// Adds the products of a vector of TEAM rows of the weight with the vectors of the hidden states.
static inline void multiply(float sum[TEAM][R], const Raw *w, __local const float *hidden, uint c) {
    float h[R][VEC];
    #pragma unroll
    for (int r = 0; r < R; ++r)
        GET_VEC(h[r], hidden + r * H + c * VEC);
    #pragma unroll
    for (int i = 0; i < TEAM; ++i) {
        float each[VEC];
        widen(each, w[i]);
        #pragma unroll
        for (int r = 0; r < R; ++r)
            #pragma unroll
            for (int j = 0; j < VEC; ++j)
                sum[i][r] = fma(each[j], h[r][j], sum[i][r]);
    }
}

__kernel __attribute__((reqd_work_group_size(T, 1, 1))) void
recurrence(TENSOR(In, x), TENSOR(Out, result),
#ifdef GRU
           TENSOR(In, bias),
#endif
           TENSOR(In, h0),
#ifdef LSTM
           TENSOR(In, c0),
#endif
           TENSOR(In, weight),
#ifdef KEEP
           TENSOR(Out, hidden),
#ifdef LSTM
           TENSOR(Out, cells),
#endif
#if GATES > 1
           TENSOR(Out, gate0), TENSOR(Out, gate1), TENSOR(Out, gate2), TENSOR(Out, gate3),
#endif
#endif
#ifdef PACKED
           TENSOR(__global const long *, starts),
#endif
           const Numbers n) {
    const uint t = get_local_id(0), lane = t % TEAM, base = get_group_id(0) * R, total = n.total;
    const uint initial = n.reverse ? total : 0, own = n.reverse ? 0 : n.sequences;
    __local float state[R * H] __attribute__((aligned(32)));
    __local float sums[R * SUMS];
#ifndef __NV_CL_C_VERSION
    __local float parts[TEAM][T];
#endif
    Raw kept[UNITS > 0 ? UNITS : 1][TEAM];
    float c[PER];
    EACH_FEATURE {
        FEATURE;
        const bool exists = row < n.sequences;
        state[r * H + u] = exists ? LOAD(h0, row * H + u) : 0;
#ifdef LSTM
        c[p] = exists ? LOAD(c0, row * H + u) : 0;
#endif
#ifdef KEEP
        if (exists) {
            STORE(hidden, (initial + row) * H + u, state[r * H + u]);
#ifdef LSTM
            STORE(cells, (initial + row) * H + u, c[p]);
#endif
        }
#endif
    }
    #pragma unroll
    for (uint k = 0; k < UNITS; ++k)
        #pragma unroll
        for (uint i = 0, b = 0; i < TEAM; ++i)
            kept[k][i] = raw_at(weight, weight_at + WEIGHT_ROW(i) * H + min(lane + k * TEAM, (uint)LANES - 1) * VEC);
    for (uint s = 0; s < n.steps; ++s) {
        ROWS_OF(s, first, count);
        float of_x[PER][GATES];
        EACH_FEATURE {
            FEATURE;
            #pragma unroll
            for (uint g = 0; g < GATES; ++g)
                of_x[p][g] = row < count ? LOAD(x, ((first + row) * GATES + g) * H + u) : 0;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        #pragma unroll
        for (uint b = 0; b < BLOCKS; ++b) {
            float sum[TEAM][R] = {{0}};
            #pragma unroll
            for (uint k = 0; k < CHUNKS; ++k) {
                const uint v = lane + k * TEAM;
                if (v < LANES) {
                    Raw w[TEAM];
                    #pragma unroll
                    for (uint i = 0; i < TEAM; ++i)
                        w[i] = k < UNITS && b == 0 ? kept[k][i] : raw_at(weight, weight_at + WEIGHT_ROW(i) * H + v * VEC);
                    multiply(sum, w, state, v);
                }
            }
            // Each lane of a team gets the sum of the row with its own number.
            #pragma unroll
            for (uint r = 0; r < R; ++r) {
                float own_row;
#ifdef __NV_CL_C_VERSION
#define HALVE(d)                                                                                                       \
    _Pragma("unroll") for (uint i = 0; i < d; ++i)                                                                     \
    {                                                                                                                  \
        const float given = exchange(lane & d ? sum[i][r] : sum[i + d][r], d);                                         \
        sum[i][r] = (lane & d ? sum[i + d][r] : sum[i][r]) + given;                                                    \
    }
                HALVE(4)
                HALVE(2)
                HALVE(1)
                own_row = sum[0][r];
#else
                barrier(CLK_LOCAL_MEM_FENCE);
                for (uint i = 0; i < TEAM; ++i)
                    parts[i][t] = sum[i][r];
                barrier(CLK_LOCAL_MEM_FENCE);
                own_row = 0;
                for (uint i = 0; i < TEAM; ++i)
                    own_row += parts[lane][t - lane + i];
#endif
                if (b * T + t < SUMS)
                    sums[r * SUMS + b * T + t] = own_row;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        EACH_FEATURE {
            FEATURE;
            if (row < count) {
                const uint at = (first + row) * H + u;
                __local const float *sum = sums + r * SUMS + u;
#if defined(LSTM)
                const float i = sigmoid_float(of_x[p][0] + sum[0]), f = sigmoid_float(of_x[p][1] + sum[H]);
                const float g = tanh(of_x[p][2] + sum[2 * H]), o = sigmoid_float(of_x[p][3] + sum[3 * H]);
                c[p] = f * c[p] + i * g;
                const float h = o * tanh(c[p]), kept_gates[4] = {i, f, g, o};
#elif defined(GRU)
                const float reset = sigmoid_float(of_x[p][0] + sum[0] + LOAD(bias, u));
                const float update = sigmoid_float(of_x[p][1] + sum[H] + LOAD(bias, H + u));
                const float part = sum[2 * H] + LOAD(bias, 2 * H + u), fresh = tanh(of_x[p][2] + reset * part);
                const float h = fresh + update * (state[r * H + u] - fresh), kept_gates[4] = {reset, update, fresh, part};
#elif defined(RELU)
                const float h = max_float(of_x[p][0] + sum[0], 0);
#else
                const float h = tanh(of_x[p][0] + sum[0]);
#endif
                state[r * H + u] = h;
                STORE(result, at, h);
#ifdef KEEP
                STORE(hidden, own * H + at, h);
#ifdef LSTM
                STORE(cells, own * H + at, c[p]);
#endif
#if GATES > 1
                STORE(gate0, at, kept_gates[0]);
                STORE(gate1, at, kept_gates[1]);
                STORE(gate2, at, kept_gates[2]);
                STORE(gate3, at, kept_gates[3]);
#endif
#endif
            }
        }
    }
#ifdef LSTM
    EACH_FEATURE {
        FEATURE;
        if (row < n.sequences)
            STORE(result, (total + row) * H + u, c[p]);
    }
#endif
}

#else
#define SLICES (T / LANES) // the number of slices of the rows of the weight; a work-item computes a vector of columns of a slice
#define DEPTH ((SUMS + SLICES - 1) / SLICES)
#define OUT_SUMS (GATES == 3 ? 4 : GATES)

// Adds the products of a vector of a row of the weight with the gradients of that row's sums.
static inline void multiply(float sum[R][VEC], const Raw w, __local const float *grads, uint j) {
    float each[VEC];
    widen(each, w);
#ifdef __NV_CL_C_VERSION // PoCL 3.1 computes NaN for 8 sequences with this pragma; compilers may unroll the loop without it
    #pragma unroll
#endif
    for (int r = 0; r < R; ++r) {
        const float grad = grads[r * SUMS + j];
        #pragma unroll
        for (int k = 0; k < VEC; ++k)
            sum[r][k] = fma(each[k], grad, sum[r][k]);
    }
}

__kernel __attribute__((reqd_work_group_size(T, 1, 1))) void
recurrence(TENSOR(In, grad), TENSOR(Out, out), TENSOR(Out, grad_h),
#ifdef LSTM
           TENSOR(Out, grad_c),
#endif
           TENSOR(In, weight), TENSOR(In, hidden),
#ifdef LSTM
           TENSOR(In, cells),
#endif
#if GATES > 1
           TENSOR(In, gate0), TENSOR(In, gate1), TENSOR(In, gate2), TENSOR(In, gate3),
#endif
#ifdef PACKED
           TENSOR(__global const long *, starts),
#endif
           const Numbers n) {
    const uint t = get_local_id(0), base = get_group_id(0) * R, total = n.total;
    const uint initial = n.reverse ? total : 0, own = n.reverse ? 0 : n.sequences;
    const uint column = t % LANES * VEC, slice = t / LANES;
    __local float grads[R * SUMS];
    __local float parts[SLICES * R * H] __attribute__((aligned(32)));
    Raw kept[UNITS > 0 ? UNITS : 1];
    // The gradients of a feature's states after the step. `direct` is the part of the hidden state's gradient that does not go through the weight.
    float of_h[PER], of_c[PER], direct[PER], values[PER][VALUES];
    EACH_FEATURE {
        FEATURE;
        of_h[p] = direct[p] = of_c[p] = 0;
#ifdef LSTM
        if (row < n.sequences)
            of_c[p] = LOAD(grad, (total + row) * H + u);
#endif
    }
    #pragma unroll
    for (uint k = 0; k < UNITS; ++k)
        kept[k] = raw_at(weight, weight_at + min(slice + k * SLICES, (uint)SUMS - 1) * H + column);
    // Each turn reads the values of the next turn's step before it computes its own product. The first turn only reads.
    uint last = 0;
    for (long s = n.steps; s >= 0; --s) {
        if (s < n.steps) {
            ROWS_OF(s, first, count);
            EACH_FEATURE {
                FEATURE;
                if (last > row) {
                    of_h[p] = direct[p];
                    for (uint k = 0; k < SLICES; ++k)
                        of_h[p] += parts[(k * R + r) * H + u];
                }
                float of_sum[4] = {0, 0, 0, 0};
                const float *v = values[p];
                if (row < count) {
                    of_h[p] += v[0];
#if defined(LSTM)
                    const float bent = tanh(v[5]), of_cell = of_c[p] + of_h[p] * v[4] * (1 - bent * bent);
                    of_sum[0] = of_cell * v[3] * (v[1] * (1 - v[1]));
                    of_sum[1] = of_cell * v[6] * (v[2] * (1 - v[2]));
                    of_sum[2] = of_cell * v[1] * (1 - v[3] * v[3]);
                    of_sum[3] = of_h[p] * bent * (v[4] * (1 - v[4]));
                    of_c[p] = of_cell * v[2];
#elif defined(GRU)
                    const float of_fresh = of_h[p] * (1 - v[2]) * (1 - v[3] * v[3]);
                    of_sum[0] = of_fresh * v[4] * (v[1] * (1 - v[1]));
                    of_sum[1] = of_h[p] * (v[5] - v[3]) * (v[2] * (1 - v[2]));
                    of_sum[2] = of_fresh * v[1];
                    of_sum[3] = of_fresh;
                    direct[p] = of_h[p] * v[2];
#elif defined(RELU)
                    of_sum[0] = v[1] > 0 ? of_h[p] : 0;
#else
                    of_sum[0] = of_h[p] * (1 - v[1] * v[1]);
#endif
                    #pragma unroll
                    for (uint k = 0; k < OUT_SUMS; ++k)
                        STORE(out, ((first + row) * OUT_SUMS + k) * H + u, of_sum[k]);
                }
                #pragma unroll
                for (uint k = 0; k < GATES; ++k)
                    grads[r * SUMS + k * H + u] = of_sum[k];
            }
            last = count;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (s > 0) {
            ROWS_OF(s - 1, next, count);
#if defined(GRU) || defined(LSTM)
            const uint before_step = n.reverse ? next_step + 1 : next_step - 1;
            const bool has_before = s > 1;
            const uint before = has_before ? FIRST(before_step) : 0;
            const uint before_count = has_before ? FIRST(before_step + 1) - before : 0;
#endif
            EACH_FEATURE {
                FEATURE;
                const uint at = (next + row) * H + u;
                if (row < count) {
                    values[p][0] = LOAD(grad, at);
#if defined(GRU) || defined(LSTM)
                    const uint previous = (row < before_count ? own + before + row : initial + row) * H + u;
                    values[p][1] = LOAD(gate0, at);
                    values[p][2] = LOAD(gate1, at);
                    values[p][3] = LOAD(gate2, at);
                    values[p][4] = LOAD(gate3, at);
#endif
#if defined(LSTM)
                    values[p][5] = LOAD(cells, own * H + at);
                    values[p][6] = LOAD(cells, previous);
#elif defined(GRU)
                    values[p][5] = LOAD(hidden, previous);
#else
                    values[p][1] = LOAD(hidden, own * H + at);
#endif
                }
            }
        }
        if (s < n.steps && slice < SLICES) {
            float sum[R][VEC] = {{0}};
            #pragma unroll
            for (uint k = 0; k < UNITS; ++k)
                if (DEPTH * SLICES == SUMS || slice + k * SLICES < SUMS)
                    multiply(sum, kept[k], grads, slice + k * SLICES);
            #pragma unroll 8
            for (uint j = slice + UNITS * SLICES; j < SUMS; j += SLICES)
                multiply(sum, raw_at(weight, weight_at + j * H + column), grads, j);
            #pragma unroll
            for (uint r = 0; r < R; ++r)
                PUT_VEC(sum[r], parts + (slice * R + r) * H + column);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    EACH_FEATURE {
        FEATURE;
        if (row < n.sequences) {
            if (last > row) {
                of_h[p] = direct[p];
                for (uint k = 0; k < SLICES; ++k)
                    of_h[p] += parts[(k * R + r) * H + u];
            }
            STORE(grad_h, row * H + u, of_h[p]);
#ifdef LSTM
            STORE(grad_c, row * H + u, of_c[p]);
#endif
        }
    }
}
#endif

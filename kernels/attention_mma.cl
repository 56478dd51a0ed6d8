// Attention on tensor cores. The host appends this file to mma.cl, attention.cl and attention_products.cl. A work-group iterates over tiles of OTHER
// rows (a macro of attention.cl): while the group multiplies one tile, the next tile is copied to local memory. Scores stay in registers: the
// accumulator of one product, rounded if the dtype is f16 or bf16, is the left operand of the next product. A copy instruction copies COPY bytes.
// With OUT_WIDE, a store writes two elements of 16 bits or four f32.

#define TILES (2 * BYTES(OTHER, DK) + 2 * BYTES(OTHER, DV)) // bytes of local memory: two buffers for both kinds of tiles that a group iterates over
#define LOG2_E 1.4426950408889634f

// Starts copying `lines` rows of `width` elements, from row `first` on, to the tile at `to`. Rows from `rows` on and columns from `width` on are 0.
INLINE void fetch(uint to, const uint lines, const uint length, In x, ulong at, const Strides *s, uint first, uint rows,
                         uint period, uint width, uint t)
{
    const uint chunks = length / CHUNK, line = t / chunks, chunk = t % chunks, step = THREADS / chunks;
    const bool of_one_head = period == ONE_HEAD || first / period == (first + lines - 1) / period;
    if (first + lines <= rows && width == length && of_one_head) {
        ulong from = (ulong)(x + at + row_at(s, first, period) + line * s->row + chunk * CHUNK);
        const ulong between = step * SIZE * s->row;
        #pragma unroll
        for (uint e = 0; e < lines / step; ++e, from += between)
            copy_whole(to + CHUNK_AT(line + e * step, chunk, lines, length), from, COPY);
        return;
    }
    const int bytes = clamp((int)width * SIZE - (int)chunk * 16, 0, 16);
    #pragma unroll
    for (uint e = 0; e < lines / step; ++e) {
        const uint row = first + line + e * step;
        const bool inside = row < rows && bytes > 0;
        const ulong from = inside ? at + row_at(s, row, period) + chunk * CHUNK : at;
        copy_part(to + CHUNK_AT(line + e * step, chunk, lines, length), (ulong)(x + from), COPY, inside ? bytes : 0);
    }
}
#define COMMIT_COPIES asm volatile("cp.async.commit_group;")

INLINE float shuffle_xor(float x, const int distance)
{
    float y;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(y) : "f"(x), "r"(distance));
    return y;
}
// Reductions over the four lanes that share a row of a fragment.
INLINE float row_max(float x)
{
    x = fmax(x, shuffle_xor(x, 1));
    return fmax(x, shuffle_xor(x, 2));
}
INLINE float row_sum(float x)
{
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// True if x is true in at least one lane of the warp.
INLINE bool any_lane(bool x)
{
    uint any;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\nvote.sync.any.pred p, p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(any) : "r"((uint)x));
    return any;
}
// Computes 2^x in one instruction. Subnormal results are 0.
INLINE float power_of_two(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// HIDE applies the mask to the products s[i][c][r] of queries and key COLUMN: keys from `visible` on become -inf. WEIGHT converts a
// product to its weight; BASE_OF is the log-sum-exp of the row. An additive mask may hide keys with the lowest number of a dtype,
// so products are scaled before the mask is added, and clamped to stay finite. If such a mask hides all keys of a row, its weights
// are equal, as the definition of attention requires.
#if MASK == 2
#define UNDER_MASK(x, at) finite(MASKED((x) * scale, at))
#define WEIGHT(x, base) power_of_two(((x) - (base)) * LOG2_E)
#define BASE_OF(log_sum) finite(log_sum)
#define LOG_OF(x) (x)
#define POWER 1
#else
#define UNDER_MASK MASKED
#define WEIGHT(x, base) power_of_two(fma(x, power, -(base)))
#define BASE_OF(log_sum) ((log_sum) * LOG2_E)
#define LOG_OF(x) ((x) * scale)
#define POWER (scale * LOG2_E)
#endif
INLINE float finite(float x) { return x < -1e38f && x != -INFINITY ? -1e38f : x; }
#define HIDE(s, visible, mask_row, COLUMN)                                                                                           \
    EACH(i, MT) EACH(c, NT) EACH(r, 4) {                                                                                          \
        const uint column = COLUMN;                                                                                               \
        s[i][c][r] = column < (visible) ? UNDER_MASK(s[i][c][r], (mask_row) + (long)column * mask_by.column) : -INFINITY;            \
    }
// Declares for each row of a tile of queries: the number of keys that the row attends to, and the offset of the row in the mask.
#define VISIBLE_KEYS                                                                                                                  \
    uint visible[MT][2];                                                                                                             \
    ulong mask_row[MT][2];                                                                                                        \
    EACH(i, MT) EACH(h, 2) {                                                                                                      \
        const uint r = first + m + 16 * i + ROW_OF(2 * h);                                                                        \
        visible[i][h] = KEYS_OF(r);                                                                                                \
        mask_row[i][h] = MASK && r < rows ? START(mask) + row_at(&mask_by, r, queries) : 0;                                       \
    }                                                                                                                             \
    /* Keys that all rows attend to. */                                                                                                 \
    const uint visible_to_all = MASK ? 0 : !n.causal ? keys : one_head ? min(first % queries + 1, keys) : 1;

// STORE_ROWS writes rows of sums to `out`. Row 16 i + 8 h of the warp is multiplied by SCALE(i, h).
#if SIZE == 4
#define PIECE 4 // adjacent columns in a lane
#define PIECES(length) ((length) / 16)
#define COLUMN_OF_PIECE(c) COLUMN_OF_SUM((c) / 2 * 4, (c) % 2)
#define SUM_OF_PIECE(sum, c, h, e) sum[(c) / 2 * 4 + (e)][2 * (h) + (c) % 2]
#else
#define PIECE 2
#define PIECES(length) ((length) / 8)
#define COLUMN_OF_PIECE(c) (8 * (c) + COLUMN_OF(0))
#define SUM_OF_PIECE(sum, c, h, e) sum[c][2 * (h) + (e)]
#endif
INLINE void store_piece(Out out, ulong to, long step, int columns, const float x[PIECE])
{
#if !defined(OUT_WIDE)
    EACH(e, PIECE) if ((int)e < columns) STORE(out, to + e * step, x[e]);
#elif SIZE == 4
    if (columns > 0) *(__global float4 *)(out + to) = (float4)(x[0], x[1], x[2], x[3]);
#else
    if (columns > 0) *(__global uint *)(out + to) = halves(x[0], x[1]);
#endif
}
#define STORE_ROWS(sum, length, out, at, s, rows, period, width, SCALE)                                                           \
    EACH(i, MT) EACH(h, 2) {                                                                                                      \
        const uint r = first + m + 16 * i + ROW_OF(2 * h);                                                                        \
        if (r < (rows)) {                                                                                                         \
            const float scale_of_row = SCALE(i, h);                                                                               \
            EACH(c, PIECES(length)) {                                                                                             \
                const uint column = COLUMN_OF_PIECE(c);                                                                           \
                float piece[PIECE];                                                                                               \
                EACH(e, PIECE) piece[e] = SUM_OF_PIECE(sum[i], c, h, e) * scale_of_row;                                           \
                store_piece(out, (at) + row_at(&s, r, period) + (long)column * s.column, s.column, (int)(width) - (int)column,    \
                            piece);                                                                                               \
            }                                                                                                                     \
        }                                                                                                                         \
    }

// A kernel iterates over its tiles between TRY and UNTIL(POISON(sum, columns) ..). In f32, if any of these sums is not finite, the loop
// runs a second time with `exact` true.
#if SIZE == 4
#define TRY                                                                                                                       \
    __local uint not_finite;                                                                                                      \
    for (bool exact = false;; exact = true) {
#define POISON(sum, columns) EACH(i, MT) EACH(c, (columns) / 8) EACH(r, 4) poison += sum[i][c][r] * 0;
#define UNTIL(poisons)                                                                                                            \
        float poison = 0;                                                                                                         \
        poisons                                                                                                                   \
        if (exact || !any_item(poison != 0, &not_finite, t))                                                                   \
            break;                                                                                                                \
    }
INLINE bool any_item(bool x, __local uint *any, uint t)
{
    barrier(CLK_LOCAL_MEM_FENCE);
    if (t == 0) *any = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (x) *any = 1;
    barrier(CLK_LOCAL_MEM_FENCE);
    return *any;
}
#else
#define TRY {
#define POISON(sum, columns)
#define UNTIL(poisons) }
#endif

#define SHARED(bytes) __local uint4 shared[(bytes) / 16] __attribute__((aligned(1024)))
#define KERNEL __kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) void attention
#define LANES const uint t = get_local_id(0), lane = t % 32, m = t / 32 * (MT * 16);
#define RANDOM float scale, float dropped, float rescale, ulong key, ulong stream

// Waits until the tile that was copied is in local memory and all work-items have finished with the previous tile.
#define NEXT_TILE                                                                                                                 \
    WAIT_BUT(0);                                                                                                                  \
    FENCE_WGMMA;                                                                                                                         \
    barrier(CLK_LOCAL_MEM_FENCE);
// Starts copying the tiles of keys and values that begin at key `j` to buffer `slot`.
#define FETCH_KEYS(slot, j)                                                                                                       \
    {                                                                                                                             \
        fetch(k_tiles + (slot) * BYTES(OTHER, DK), OTHER, DK, k, k0, &k_by, j, keys, ONE_HEAD, width, t);                         \
        fetch(v_tiles + (slot) * BYTES(OTHER, DV), OTHER, DV, v, v0, &v_by, j, keys, ONE_HEAD, value_width, t);                   \
        COMMIT_COPIES;                                                                                                            \
    }

#ifdef FORWARD
KERNEL(OPERAND(In, q), OPERAND(In, k), OPERAND(In, v), OPERAND(Mask, mask), OPERAND(Out, out), Rows lse, ulong lse_at,
       const Sizes n, RANDOM)
{
    SHARED(BYTES(OWN, DK) + TILES);
    const uint own = (uint)(ulong)shared, k_tiles = own + BYTES(OWN, DK), v_tiles = k_tiles + 2 * BYTES(OTHER, DK);
    LANES
    SIZES
    TILE_OF_QUERIES((uint)get_group_id(0))
    VISIBLE_KEYS
    const ulong k0 = START(k), v0 = START(v);
    const float power = POWER;

    float sum[MT][DV / 8][4], top[MT][2], total[MT][2];
    fetch(own, OWN, DK, q, START(q), &q_by, first, rows, queries, width, t);
    TRY
    CLEAR(sum, DV);
    EACH(i, MT) EACH(h, 2) {
        top[i][h] = -INFINITY;
        total[i][h] = 0;
    }
    FETCH_KEYS(0, 0)
    for (uint j0 = 0, slot = 0; j0 < most; j0 += OTHER, slot ^= 1) {
        NEXT_TILE
        if (j0 + OTHER < most)
            FETCH_KEYS(slot ^ 1, j0 + OTHER)
        float s[MT][NT][4];
        MULTIPLY(s, own, k_tiles + slot * BYTES(OTHER, DK), DK)
        DONE(OTHER, s)
        if (j0 + OTHER > visible_to_all)
            HIDE(s, visible[i][r / 2], mask_row[i][r / 2], j0 + 8 * c + COLUMN_OF(r))
        WEIGHTS(weights);
        EACH(i, MT) EACH(h, 2) {
            // fmax may drop a NaN, but the NaN still reaches the sum of exponentials.
            float next = top[i][h];
            EACH(c, NT) next = fmax(next, fmax(s[i][c][2 * h], s[i][c][2 * h + 1]));
            next = row_max(next);
            const float base = next == -INFINITY ? 0 : next * power, shrink = WEIGHT(top[i][h], base);
            top[i][h] = next;
            total[i][h] *= shrink;
            if (any_lane(shrink != 1)) {
                EACH(c, DV / 8) {
                    sum[i][c][2 * h] *= shrink;
                    sum[i][c][2 * h + 1] *= shrink;
                }
            }
            EACH(c, NT) {
                const float x = WEIGHT(s[i][c][2 * h], base);
                const float y = WEIGHT(s[i][c][2 * h + 1], base);
                total[i][h] += x + y;
                const uint row = first + m + 16 * i + ROW_OF(2 * h), column = j0 + 8 * c + COLUMN_OF(0);
                SET_WEIGHTS(weights, i, c, h, x * KEPT(row, column), y * KEPT(row, column + 1));
            }
        }
        ADD_PRODUCT(sum, weights, v_tiles + slot * BYTES(OTHER, DV), DV)
        DONE(DV, sum)
    }
    UNTIL(POISON(sum, DV))
    EACH(i, MT) EACH(h, 2) total[i][h] = row_sum(total[i][h]);
    #define INVERSE(i, h) (total[i][h] == 0 ? 0 : 1 / total[i][h])
    STORE_ROWS(sum, DV, out, START(out), out_by, rows, queries, value_width, INVERSE)
    if (lane % 4 == 0) {
        EACH(i, MT) EACH(h, 2) {
            const uint r = first + m + 16 * i + ROW_OF(2 * h);
            if (r < rows)
                lse[lse_at + (ulong)b * rows + r] = LOG_OF(top[i][h]) + log(total[i][h]);
        }
    }
}
#endif

#define SCALE_OF_GRADIENT(i, h) scale
#define ONE(i, h) 1

#ifdef QUERIES
KERNEL(OPERAND(In, q), OPERAND(In, k), OPERAND(In, v), OPERAND(Mask, mask), OPERAND(In, out), OPERAND(In, grad),
       OPERAND(Out, dq), Rows lse, ulong lse_at, Rows delta, ulong delta_at, const Sizes n, RANDOM)
{
    SHARED(BYTES(OWN, DK) + BYTES(OWN, DV) + (TILES > BYTES(OWN, DV) ? TILES : BYTES(OWN, DV)));
    const uint own = (uint)(ulong)shared, grads = own + BYTES(OWN, DK);
    const uint k_tiles = grads + BYTES(OWN, DV), v_tiles = k_tiles + 2 * BYTES(OTHER, DK);
    LANES
    SIZES
    TILE_OF_QUERIES((uint)get_group_id(0))
    VISIBLE_KEYS
    const ulong k0 = START(k), v0 = START(v);
    const float power = POWER;

    fetch(own, OWN, DK, q, START(q), &q_by, first, rows, queries, width, t);
    fetch(grads, OWN, DV, grad, START(grad), &grad_by, first, rows, queries, value_width, t);
    fetch(k_tiles, OWN, DV, out, START(out), &out_by, first, rows, queries, value_width, t);
    COMMIT_COPIES;
    WAIT_BUT(0);
    FENCE_WGMMA;
    barrier(CLK_LOCAL_MEM_FENCE);
    float base[MT][2], less[MT][2];
    EACH(i, MT) EACH(h, 2) {
        const uint line = m + 16 * i + ROW_OF(2 * h), r = first + line;
        const uint words = BYTES(OWN, DK) / 4 + lane % 4;
        const __local uint *g = (const __local uint *)shared + words, *o = g + BYTES(OWN, DV) / 4;
        float share = 0;
        EACH(c, DV / CHUNK) {
            const uint at = CHUNK_AT(line, c, OWN, DV) / 4, x = g[at], y = o[at];
#if SIZE == 4
            share = fma(as_float(x), as_float(y), share);
#else
            share = fma(CAT(from_, A)((ushort)x), CAT(from_, A)((ushort)y), share);
            share = fma(CAT(from_, A)((ushort)(x >> 16)), CAT(from_, A)((ushort)(y >> 16)), share);
#endif
        }
        less[i][h] = row_sum(share);
        base[i][h] = BASE_OF(BASE(r));
        if (lane % 4 == 0 && r < rows)
            delta[delta_at + (ulong)b * rows + r] = less[i][h];
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    float sum[MT][DK / 8][4];
    TRY
    CLEAR(sum, DK);
    FETCH_KEYS(0, 0)
    for (uint j0 = 0, slot = 0; j0 < most; j0 += OTHER, slot ^= 1) {
        NEXT_TILE
        if (j0 + OTHER < most)
            FETCH_KEYS(slot ^ 1, j0 + OTHER)
        const uint k_tile = k_tiles + slot * BYTES(OTHER, DK), v_tile = v_tiles + slot * BYTES(OTHER, DV);
        float s[MT][NT][4], dp[MT][NT][4];
        MULTIPLY(s, own, k_tile, DK)
        MULTIPLY(dp, grads, v_tile, DV)
        DONE(OTHER, s)
        DONE(OTHER, dp)
        if (j0 + OTHER > visible_to_all)
            HIDE(s, visible[i][r / 2], mask_row[i][r / 2], j0 + 8 * c + COLUMN_OF(r))
        EACH(i, MT) EACH(c, NT) EACH(r, 4) s[i][c][r] = WEIGHT(s[i][c][r], base[i][r / 2]);
        WEIGHTS(weights);
        EACH(i, MT) EACH(h, 2) EACH(c, NT) {
            const uint row = first + m + 16 * i + ROW_OF(2 * h), column = j0 + 8 * c + COLUMN_OF(0);
            const float x = s[i][c][2 * h] * (dp[i][c][2 * h] * KEPT(row, column) - less[i][h]);
            const float y = s[i][c][2 * h + 1] * (dp[i][c][2 * h + 1] * KEPT(row, column + 1) - less[i][h]);
            SET_WEIGHTS(weights, i, c, h, x, y);
        }
        ADD_PRODUCT(sum, weights, k_tile, DK)
        DONE(DK, sum)
    }
    UNTIL(POISON(sum, DK))
    STORE_ROWS(sum, DK, dq, START(dq), dq_by, rows, queries, width, SCALE_OF_GRADIENT)
}
#endif

#ifdef KEYS
KERNEL(OPERAND(In, q), OPERAND(In, k), OPERAND(In, v), OPERAND(Mask, mask), OPERAND(In, grad), OPERAND(Out, dk), OPERAND(Out, dv),
       Rows lse, ulong lse_at, Rows delta, ulong delta_at, const Sizes n, RANDOM)
{
    SHARED(BYTES(OWN, DK) + BYTES(OWN, DV) + TILES);
    __local float stats[2][2][OTHER] __attribute__((aligned(8))); // for each query of a tile: the log-sum-exp in base 2, and delta
    #define LESS(r) ((r) < rows ? delta[delta_at + (ulong)b * rows + (r)] : 0)
    const uint own = (uint)(ulong)shared, values = own + BYTES(OWN, DK);
    const uint q_tiles = values + BYTES(OWN, DV), grad_tiles = q_tiles + 2 * BYTES(OTHER, DK);
    LANES
    SIZES
    TILE_OF_KEYS
    const ulong q0 = START(q), grad0 = START(grad), mask0 = MASK ? START(mask) : 0;
    const float power = POWER;

    float sum_k[MT][DK / 8][4], sum_v[MT][DV / 8][4];
    fetch(own, OWN, DK, k, START(k), &k_by, first, keys, ONE_HEAD, width, t);
    fetch(values, OWN, DV, v, START(v), &v_by, first, keys, ONE_HEAD, value_width, t);
    TRY
    CLEAR(sum_k, DK);
    CLEAR(sum_v, DV);
    uint r0 = next_tile(&n, 0, first, OTHER);
    fetch(q_tiles, OTHER, DK, q, q0, &q_by, r0, rows, queries, width, t);
    fetch(grad_tiles, OTHER, DV, grad, grad0, &grad_by, r0, rows, queries, value_width, t);
    COMMIT_COPIES;
    if (t < OTHER) {
        stats[0][0][t] = BASE_OF(BASE(r0 + t));
        stats[0][1][t] = LESS(r0 + t);
    }
    for (uint slot = 0; r0 < rows; slot ^= 1) {
        const uint after = next_tile(&n, r0 + OTHER, first, OTHER);
        const float base_after = t < OTHER ? BASE_OF(BASE(after + t)) : 0, less_after = t < OTHER ? LESS(after + t) : 0;
        NEXT_TILE
        if (after < rows) {
            fetch(q_tiles + (slot ^ 1) * BYTES(OTHER, DK), OTHER, DK, q, q0, &q_by, after, rows, queries, width, t);
            fetch(grad_tiles + (slot ^ 1) * BYTES(OTHER, DV), OTHER, DV, grad, grad0, &grad_by, after, rows, queries, value_width, t);
            COMMIT_COPIES;
        }
        const uint q_tile = q_tiles + slot * BYTES(OTHER, DK), grad_tile = grad_tiles + slot * BYTES(OTHER, DV);
        // The index of a row's query within its head. No division is needed if the whole tile belongs to one head.
        const uint head = r0 / queries * queries;
        const bool one_head = r0 + OTHER <= head + queries;
        #define QUERY(row) (one_head ? (row) - head : (row) % queries)
        // If the first query of the tile attends to the last key of the group's tile, nothing needs to be masked.
        const uint visible_to_all = !n.causal ? keys : one_head ? min(QUERY(r0) + 1, keys) : 0;
        const bool whole = !MASK && r0 + OTHER <= rows && first + OWN <= visible_to_all;
        float s[MT][NT][4];
        MULTIPLY(s, own, q_tile, DK)
        DONE(OTHER, s)
        if (!whole) {
            #define ROW (r0 + 8 * c + COLUMN_OF(r))
            #define SEES (ROW >= rows ? 0 : n.causal ? min(QUERY(ROW) + 1, keys) : keys)
            #define OF_MASK (MASK && ROW < rows ? mask0 + (one_head ? head / queries : ROW / queries) * mask_by.head + QUERY(ROW) * mask_by.row : 0)
            HIDE(s, SEES, OF_MASK, first + m + 16 * i + ROW_OF(r))
        }
        WEIGHTS(weights);
        EACH(c, NT) {
            const float2 base = *(__local float2 *)&stats[slot][0][8 * c + COLUMN_OF(0)];
            EACH(i, MT) EACH(h, 2) {
                const uint row = r0 + 8 * c + COLUMN_OF(0), column = first + m + 16 * i + ROW_OF(2 * h);
                const float x = WEIGHT(s[i][c][2 * h], base.x);
                const float y = WEIGHT(s[i][c][2 * h + 1], base.y);
                s[i][c][2 * h] = x;
                s[i][c][2 * h + 1] = y;
                SET_WEIGHTS(weights, i, c, h, x * KEPT(row, column), y * KEPT(row + 1, column));
            }
        }
        ADD_PRODUCT(sum_v, weights, grad_tile, DV)
        float dp[MT][NT][4];
        MULTIPLY(dp, values, grad_tile, DV)
        DONE(DV, sum_v)
        DONE(OTHER, dp)
        EACH(c, NT) {
            const float2 less = *(__local float2 *)&stats[slot][1][8 * c + COLUMN_OF(0)];
            EACH(i, MT) EACH(h, 2) {
                const uint row = r0 + 8 * c + COLUMN_OF(0), column = first + m + 16 * i + ROW_OF(2 * h);
                const float x = s[i][c][2 * h] * (dp[i][c][2 * h] * KEPT(row, column) - less.x);
                const float y = s[i][c][2 * h + 1] * (dp[i][c][2 * h + 1] * KEPT(row + 1, column) - less.y);
                SET_WEIGHTS(weights, i, c, h, x, y);
            }
        }
        ADD_PRODUCT(sum_k, weights, q_tile, DK)
        DONE(DK, sum_k)
        if (t < OTHER) {
            stats[slot ^ 1][0][t] = base_after;
            stats[slot ^ 1][1][t] = less_after;
        }
        r0 = after;
    }
    UNTIL(POISON(sum_k, DK) POISON(sum_v, DV))
    STORE_ROWS(sum_k, DK, dk, START(dk), dk_by, keys, ONE_HEAD, width, SCALE_OF_GRADIENT)
    STORE_ROWS(sum_v, DV, dv, START(dv), dv_by, keys, ONE_HEAD, value_width, ONE)
}
#endif

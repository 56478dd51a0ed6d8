// Attention of halves on tensor cores; comes after attention.cl and mma.cl. Each of WARPS warps has MT x 16 rows of the tile, and multiplies
// them by tiles of OTHER rows, of which one is multiplied while the next is on its way to local memory. Scores stay in registers: the
// fragments of a sum are, rounded to halves, those of the left matrix of the next product. Tiles lie in lines of DK or DV elements, 32 or
// multiples of 64; COPY bytes are copied at once. With OUT_PAIRS results are stored two at a time.
//
// Lane l has rows l / 4 and l / 4 + 8 of 16, and columns l % 4 * 2 and the next one of each 8.

#define THREADS (32 * WARPS)
#define OWN (WARPS * MT * 16)
#define NT (OTHER / 8)
#define BYTES(lines, length) ((lines) * (length) * 2)
#define TILES (2 * BYTES(OTHER, DK) + 2 * BYTES(OTHER, DV)) // of both kinds that a group goes over
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

#define EACH(x, n) _Pragma("unroll") for (uint x = 0; x < n; ++x)
#define CLEAR(sum, columns) EACH(i, MT) EACH(c, (columns) / 8) EACH(r, 4) sum[i][c][r] = 0
// Register r of a fragment of a sum: its row of 16, and its column of 8.
#define ROW_OF(r) ((r) / 2 * 8 + lane / 4)
#define COLUMN_OF(r) (lane % 4 * 2 + (r) % 2)

// Asks for `lines` rows from row `first` on, of `rows` in all, each `width` elements, with zeros beyond the edges.
INLINE void fetch(uint to, const uint lines, const uint length, In x, ulong at, const Strides *s, uint first, uint rows,
                         uint period, uint width, uint t)
{
    const uint chunks = length / 8;
    const bool whole = first + lines <= rows && width == length;
    #pragma unroll
    for (uint e = 0; e < lines * chunks / THREADS; ++e) {
        const uint line = (e * THREADS + t) / chunks, chunk = (e * THREADS + t) % chunks, row = first + line;
        if (whole) {
            copy_whole(to + chunk_at(line, chunk, lines, length), (ulong)(x + at + row_at(s, row, period) + chunk * 8), COPY);
        } else {
            const int bytes = row < rows ? clamp((int)width * 2 - (int)chunk * 16, 0, 16) : 0;
            const ulong from = bytes > 0 ? at + row_at(s, row, period) + chunk * 8 : at;
            copy_part(to + chunk_at(line, chunk, lines, length), (ulong)(x + from), COPY, bytes);
        }
    }
}
#define ASKED asm volatile("cp.async.commit_group;")

INLINE float of_neighbour(float x, const int distance)
{
    float y;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(y) : "f"(x), "r"(distance));
    return y;
}
// Of the four lanes that have a row.
INLINE float row_max(float x)
{
    x = fmax(x, of_neighbour(x, 1));
    return fmax(x, of_neighbour(x, 2));
}
INLINE float row_sum(float x)
{
    x += of_neighbour(x, 1);
    return x + of_neighbour(x, 2);
}

// Two numbers as halves.
INLINE uint halves(float low, float high)
{
    uint both;
    asm("cvt.rn." MMA "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// s = rows of the tile at `own` times lines of the tile at `other`, both of `length` elements.
#define MULTIPLY(s, own, other, length)                                                                                           \
    CLEAR(s, OTHER);                                                                                                              \
    _Pragma("unroll") for (uint d = 0; d < (length); d += 16) {                                                                   \
        uint a[MT][4];                                                                                                            \
        EACH(i, MT) LDMATRIX("", a[i], (own) + chunk_at(m + 16 * i + lane % 16, d / 8 + lane / 16, OWN, length));                 \
        EACH(c, NT / 2) {                                                                                                         \
            uint w[4];                                                                                                            \
            LDMATRIX("", w, (other) + chunk_at(16 * c + lane % 8 + lane / 16 * 8, d / 8 + lane / 8 % 2, OTHER, length));          \
            EACH(i, MT) {                                                                                                         \
                mma(s[i][2 * c], a[i], w);                                                                                        \
                mma(s[i][2 * c + 1], a[i], w + 2);                                                                                \
            }                                                                                                                     \
        }                                                                                                                         \
    }

// sum += `weights`, which are rows of OTHER halves, times the tile at `other`, of lines of `length` elements.
#define ADD_PRODUCT(sum, weights, other, length)                                                                                  \
    EACH(d, OTHER / 16) {                                                                                                         \
        EACH(c, (length) / 16) {                                                                                                  \
            uint w[4];                                                                                                            \
            LDMATRIX(".trans", w, (other) + chunk_at(16 * d + lane % 16, 2 * c + lane / 16, OTHER, length));                      \
            EACH(i, MT) {                                                                                                         \
                const uint a[4] = {weights[i][2 * d][0], weights[i][2 * d][1], weights[i][2 * d + 1][0],                          \
                                   weights[i][2 * d + 1][1]};                                                                     \
                mma(sum[i][2 * c], a, w);                                                                                         \
                mma(sum[i][2 * c + 1], a, w + 2);                                                                                 \
            }                                                                                                                     \
        }                                                                                                                         \
    }

// Writes rows of sums, SCALE(i, h) times row 8 h of 16 i, to `out`.
INLINE void store_two(Out out, ulong to, long step, uint columns, float x, float y)
{
#ifdef OUT_PAIRS
    if (columns > 0) *(__global uint *)(out + to) = halves(x, y);
#else
    if (columns > 0) STORE(out, to, x);
    if (columns > 1) STORE(out, to + step, y);
#endif
}
#define STORE_ROWS(sum, length, out, at, s, rows, period, width, SCALE)                                                           \
    EACH(i, MT) EACH(h, 2) {                                                                                                      \
        const uint r = first + m + 16 * i + ROW_OF(2 * h);                                                                        \
        if (r < (rows)) {                                                                                                         \
            const float scale_of_row = SCALE(i, h);                                                                               \
            EACH(c, (length) / 8) {                                                                                               \
                const uint column = 8 * c + COLUMN_OF(0);                                                                         \
                store_two(out, (at) + row_at(&s, r, period) + (long)column * s.column, s.column,                                  \
                          (uint)max((int)(width) - (int)column, 0), sum[i][c][2 * h] * scale_of_row,                              \
                          sum[i][c][2 * h + 1] * scale_of_row);                                                                   \
            }                                                                                                                     \
        }                                                                                                                         \
    }

#define SHARED(bytes) __local uint4 shared[(bytes) / 16] __attribute__((aligned(1024)))
#define KERNEL __kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) void attention
#define LANES const uint t = get_local_id(0), lane = t % 32, m = t / 32 * (MT * 16);
#define RANDOM float scale, float dropped, float rescale, ulong key, ulong stream

#ifdef FORWARD
KERNEL(OPERAND(In, q), OPERAND(In, k), OPERAND(In, v), OPERAND(Mask, mask), OPERAND(Out, out), Rows lse, ulong lse_at,
       const Sizes n, RANDOM)
{
    SHARED(BYTES(OWN, DK) + TILES);
    const uint own = (uint)(ulong)shared, k_tiles = own + BYTES(OWN, DK), v_tiles = k_tiles + 2 * BYTES(OTHER, DK);
    LANES
    SIZES
    TILE_OF_QUERIES((ulong)get_group_id(0))
    // Tiles before this one hide nothing from any row.
    const uint all_seen = MASK ? 0 : !n.causal ? keys : one_head ? min(first % queries + 1, keys) : 1;
    const ulong k0 = START(k), v0 = START(v);

    float sum[MT][DV / 8][4], top[MT][2], total[MT][2];
    CLEAR(sum, DV);
    EACH(i, MT) EACH(h, 2) {
        top[i][h] = -INFINITY;
        total[i][h] = 0;
    }
    fetch(own, OWN, DK, q, START(q), &q_by, first, rows, queries, width, t);
    fetch(k_tiles, OTHER, DK, k, k0, &k_by, 0, keys, ONE_HEAD, width, t);
    fetch(v_tiles, OTHER, DV, v, v0, &v_by, 0, keys, ONE_HEAD, value_width, t);
    ASKED;
    for (uint j0 = 0, slot = 0; j0 < most; j0 += OTHER, slot ^= 1) {
        WAIT_BUT(0);
        barrier(CLK_LOCAL_MEM_FENCE);
        if (j0 + OTHER < most) {
            fetch(k_tiles + (slot ^ 1) * BYTES(OTHER, DK), OTHER, DK, k, k0, &k_by, j0 + OTHER, keys, ONE_HEAD, width, t);
            fetch(v_tiles + (slot ^ 1) * BYTES(OTHER, DV), OTHER, DV, v, v0, &v_by, j0 + OTHER, keys, ONE_HEAD, value_width, t);
            ASKED;
        }
        float s[MT][NT][4];
        MULTIPLY(s, own, k_tiles + slot * BYTES(OTHER, DK), DK)
        if (j0 + OTHER <= all_seen) {
            EACH(i, MT) EACH(c, NT) EACH(r, 4) s[i][c][r] *= scale * LOG2_E;
        } else {
            EACH(i, MT) EACH(h, 2) {
                const uint row = first + m + 16 * i + ROW_OF(2 * h), seen = KEYS_SEEN(row);
                const ulong mask_row = MASK && row < rows ? START(mask) + row_at(&mask_by, row, queries) : 0;
                EACH(c, NT) EACH(e, 2) {
                    const uint column = j0 + 8 * c + COLUMN_OF(e);
                    const float x = s[i][c][2 * h + e] * scale;
                    s[i][c][2 * h + e] =
                        column < seen ? SEEN(x, mask_row + (long)column * mask_by.column) * LOG2_E : -INFINITY;
                }
            }
        }
        uint weights[MT][NT][2];
        EACH(i, MT) EACH(h, 2) {
            // A NaN need not be found here: the sum has it.
            float next = top[i][h];
            EACH(c, NT) next = fmax(next, fmax(s[i][c][2 * h], s[i][c][2 * h + 1]));
            next = row_max(next);
            const float base = next == -INFINITY ? 0 : next, shrink = native_exp2(top[i][h] - base);
            top[i][h] = next;
            total[i][h] *= shrink;
            EACH(c, DV / 8) {
                sum[i][c][2 * h] *= shrink;
                sum[i][c][2 * h + 1] *= shrink;
            }
            EACH(c, NT) {
                const float x = native_exp2(s[i][c][2 * h] - base), y = native_exp2(s[i][c][2 * h + 1] - base);
                total[i][h] += x + y;
                const uint row = first + m + 16 * i + ROW_OF(2 * h), column = j0 + 8 * c + COLUMN_OF(0);
                weights[i][c][h] = halves(x * KEPT(row, column), y * KEPT(row, column + 1));
            }
        }
        ADD_PRODUCT(sum, weights, v_tiles + slot * BYTES(OTHER, DV), DV)
    }
    EACH(i, MT) EACH(h, 2) total[i][h] = row_sum(total[i][h]);
    #define INVERSE(i, h) (total[i][h] == 0 ? 0 : 1 / total[i][h])
    STORE_ROWS(sum, DV, out, START(out), out_by, rows, queries, value_width, INVERSE)
    if (lane % 4 == 0) {
        EACH(i, MT) EACH(h, 2) {
            const uint r = first + m + 16 * i + ROW_OF(2 * h);
            if (r < rows)
                lse[lse_at + b * rows + r] = top[i][h] * LN_2 + log(total[i][h]);
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
    TILE_OF_QUERIES((ulong)get_group_id(0))
    const uint all_seen = MASK ? 0 : !n.causal ? keys : one_head ? min(first % queries + 1, keys) : 1;
    const ulong k0 = START(k), v0 = START(v);

    fetch(own, OWN, DK, q, START(q), &q_by, first, rows, queries, width, t);
    fetch(grads, OWN, DV, grad, START(grad), &grad_by, first, rows, queries, value_width, t);
    fetch(k_tiles, OWN, DV, out, START(out), &out_by, first, rows, queries, value_width, t);
    ASKED;
    WAIT_BUT(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    float base[MT][2], less[MT][2];
    EACH(i, MT) EACH(h, 2) {
        const uint line = m + 16 * i + ROW_OF(2 * h), r = first + line;
        const uint words = BYTES(OWN, DK) / 4 + lane % 4;
        const __local uint *g = (const __local uint *)shared + words, *o = g + BYTES(OWN, DV) / 4;
        float share = 0;
        EACH(c, DV / 8) {
            const uint at = chunk_at(line, c, OWN, DV) / 4, x = g[at], y = o[at];
            share = fma(CAT(from_, A)((ushort)x), CAT(from_, A)((ushort)y), share);
            share = fma(CAT(from_, A)((ushort)(x >> 16)), CAT(from_, A)((ushort)(y >> 16)), share);
        }
        less[i][h] = row_sum(share);
        base[i][h] = BASE(r) * LOG2_E;
        if (lane % 4 == 0 && r < rows)
            delta[delta_at + b * rows + r] = less[i][h];
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    float sum[MT][DK / 8][4];
    CLEAR(sum, DK);
    fetch(k_tiles, OTHER, DK, k, k0, &k_by, 0, keys, ONE_HEAD, width, t);
    fetch(v_tiles, OTHER, DV, v, v0, &v_by, 0, keys, ONE_HEAD, value_width, t);
    ASKED;
    for (uint j0 = 0, slot = 0; j0 < most; j0 += OTHER, slot ^= 1) {
        WAIT_BUT(0);
        barrier(CLK_LOCAL_MEM_FENCE);
        if (j0 + OTHER < most) {
            fetch(k_tiles + (slot ^ 1) * BYTES(OTHER, DK), OTHER, DK, k, k0, &k_by, j0 + OTHER, keys, ONE_HEAD, width, t);
            fetch(v_tiles + (slot ^ 1) * BYTES(OTHER, DV), OTHER, DV, v, v0, &v_by, j0 + OTHER, keys, ONE_HEAD, value_width, t);
            ASKED;
        }
        const uint k_tile = k_tiles + slot * BYTES(OTHER, DK), v_tile = v_tiles + slot * BYTES(OTHER, DV);
        float s[MT][NT][4], dp[MT][NT][4];
        MULTIPLY(s, own, k_tile, DK)
        const bool whole = j0 + OTHER <= all_seen;
        EACH(i, MT) EACH(h, 2) {
            const uint row = first + m + 16 * i + ROW_OF(2 * h), seen = KEYS_SEEN(row);
            const ulong mask_row = MASK && row < rows ? START(mask) + row_at(&mask_by, row, queries) : 0;
            EACH(c, NT) EACH(e, 2) {
                const uint column = j0 + 8 * c + COLUMN_OF(e);
                float x = s[i][c][2 * h + e] * scale;
                if (!whole)
                    x = column < seen ? SEEN(x, mask_row + (long)column * mask_by.column) : -INFINITY;
                s[i][c][2 * h + e] = native_exp2(fma(x, LOG2_E, -base[i][h]));
            }
        }
        MULTIPLY(dp, grads, v_tile, DV)
        uint weights[MT][NT][2];
        EACH(i, MT) EACH(h, 2) EACH(c, NT) {
            const uint row = first + m + 16 * i + ROW_OF(2 * h), column = j0 + 8 * c + COLUMN_OF(0);
            const float x = s[i][c][2 * h] * (dp[i][c][2 * h] * KEPT(row, column) - less[i][h]);
            const float y = s[i][c][2 * h + 1] * (dp[i][c][2 * h + 1] * KEPT(row, column + 1) - less[i][h]);
            weights[i][c][h] = halves(x, y);
        }
        ADD_PRODUCT(sum, weights, k_tile, DK)
    }
    STORE_ROWS(sum, DK, dq, START(dq), dq_by, rows, queries, width, SCALE_OF_GRADIENT)
}
#endif

#ifdef KEYS
KERNEL(OPERAND(In, q), OPERAND(In, k), OPERAND(In, v), OPERAND(Mask, mask), OPERAND(In, grad), OPERAND(Out, dk), OPERAND(Out, dv),
       Rows lse, ulong lse_at, Rows delta, ulong delta_at, const Sizes n, RANDOM)
{
    SHARED(BYTES(OWN, DK) + BYTES(OWN, DV) + TILES);
    const uint own = (uint)(ulong)shared, values = own + BYTES(OWN, DK);
    const uint q_tiles = values + BYTES(OWN, DV), grad_tiles = q_tiles + 2 * BYTES(OTHER, DK);
    LANES
    SIZES
    TILE_OF_KEYS
    const ulong q0 = START(q), grad0 = START(grad), mask0 = MASK ? START(mask) : 0;

    float sum_k[MT][DK / 8][4], sum_v[MT][DV / 8][4];
    CLEAR(sum_k, DK);
    CLEAR(sum_v, DV);
    uint r0 = next_tile(&n, 0, first, OTHER);
    fetch(own, OWN, DK, k, START(k), &k_by, first, keys, ONE_HEAD, width, t);
    fetch(values, OWN, DV, v, START(v), &v_by, first, keys, ONE_HEAD, value_width, t);
    fetch(q_tiles, OTHER, DK, q, q0, &q_by, r0, rows, queries, width, t);
    fetch(grad_tiles, OTHER, DV, grad, grad0, &grad_by, r0, rows, queries, value_width, t);
    ASKED;
    for (uint slot = 0; r0 < rows; slot ^= 1) {
        const uint after = next_tile(&n, r0 + OTHER, first, OTHER);
        WAIT_BUT(0);
        barrier(CLK_LOCAL_MEM_FENCE);
        if (after < rows) {
            fetch(q_tiles + (slot ^ 1) * BYTES(OTHER, DK), OTHER, DK, q, q0, &q_by, after, rows, queries, width, t);
            fetch(grad_tiles + (slot ^ 1) * BYTES(OTHER, DV), OTHER, DV, grad, grad0, &grad_by, after, rows, queries, value_width, t);
            ASKED;
        }
        const uint q_tile = q_tiles + slot * BYTES(OTHER, DK), grad_tile = grad_tiles + slot * BYTES(OTHER, DV);
        // Nothing is hidden where the first query of one head sees the last key of this tile.
        const bool one_head = r0 / queries == (r0 + OTHER - 1) / queries;
        const bool whole = !MASK && r0 + OTHER <= rows && first + OWN <= (!n.causal ? keys : one_head ? min(r0 % queries + 1, keys) : 0);
        float s[MT][NT][4];
        MULTIPLY(s, own, q_tile, DK)
        uint weights[MT][NT][2];
        EACH(c, NT) {
            EACH(e, 2) {
                const uint r = r0 + 8 * c + COLUMN_OF(e), seen = KEYS_SEEN(r);
                const ulong mask_row = MASK && r < rows ? mask0 + row_at(&mask_by, r, queries) : 0;
                const float base = BASE(r) * LOG2_E;
                EACH(i, MT) EACH(h, 2) {
                    const uint column = first + m + 16 * i + ROW_OF(2 * h);
                    float x = s[i][c][2 * h + e] * scale;
                    if (!whole)
                        x = column < seen ? SEEN(x, mask_row + (long)column * mask_by.column) : -INFINITY;
                    s[i][c][2 * h + e] = native_exp2(fma(x, LOG2_E, -base));
                }
            }
            EACH(i, MT) EACH(h, 2) {
                const uint r = r0 + 8 * c + COLUMN_OF(0), column = first + m + 16 * i + ROW_OF(2 * h);
                weights[i][c][h] = halves(s[i][c][2 * h] * KEPT(r, column), s[i][c][2 * h + 1] * KEPT(r + 1, column));
            }
        }
        ADD_PRODUCT(sum_v, weights, grad_tile, DV)
        float dp[MT][NT][4];
        MULTIPLY(dp, values, grad_tile, DV)
        EACH(c, NT) {
            const uint r = r0 + 8 * c + COLUMN_OF(0);
            const float less[2] = {r < rows ? delta[delta_at + b * rows + r] : 0, r + 1 < rows ? delta[delta_at + b * rows + r + 1] : 0};
            EACH(i, MT) EACH(h, 2) {
                const uint column = first + m + 16 * i + ROW_OF(2 * h);
                const float x = s[i][c][2 * h] * (dp[i][c][2 * h] * KEPT(r, column) - less[0]);
                const float y = s[i][c][2 * h + 1] * (dp[i][c][2 * h + 1] * KEPT(r + 1, column) - less[1]);
                weights[i][c][h] = halves(x, y);
            }
        }
        ADD_PRODUCT(sum_k, weights, q_tile, DK)
        r0 = after;
    }
    STORE_ROWS(sum_k, DK, dk, START(dk), dk_by, keys, ONE_HEAD, width, SCALE_OF_GRADIENT)
    STORE_ROWS(sum_v, DV, dv, START(dv), dv_by, keys, ONE_HEAD, value_width, ONE)
}
#endif

// Attention without tensor cores, computed in ACC; follows attention.cl. Each of TX x TY work-items computes MI x NI scores. DK and
// DV are multiples of 4 TX. A load reads VEC adjacent elements, as WIDE_T if VEC is above 1.

typedef CAT(ACC, 4) FOUR;

#define GROUP (TX * TY)
#define OWN (TY * MI)
#define OTHER (TX * NI)
// Rows in local memory have 4 elements of padding, to avoid bank conflicts.
#define PITCH_K (DK + 4)
#define PITCH_V (DV + 4)
#define PITCH_W (OTHER + 4)
#define PITCH_MOST (DK > DV ? PITCH_K : PITCH_V)
#define FOURS_K (DK / 4 / TX)
#define FOURS_V (DV / 4 / TX)

// Copies `count` rows of `width` elements, from row `first` of `rows` rows on, to local memory. Rows and columns past the edges become zeros.
INLINE void stage(__local ACC *to, const int pitch, const int count, In x, ulong at, const Strides *s, uint first, uint rows,
                         uint length, uint width, uint t) {
    const uint chunks = (pitch - 4) / VEC;
    for (uint e = t; e < count * chunks; e += GROUP) {
        const uint r = e / chunks, c = e % chunks * VEC;
        const bool inside = first + r < rows && c < width;
        const ulong from = inside ? at + row_at(s, first + r, length) + (long)c * s->column : 0;
#if VEC > 1
        CAT(A, _t) raw[VEC];
        CAT(vstore, VEC)(inside ? *(__global const WIDE_T *)(x + from) : (WIDE_T)(0), 0, raw);
        #pragma unroll
        for (int v = 0; v < VEC; ++v)
            to[r * pitch + c + v] = CAT(from_, A)(raw[v]);
#else
        to[r * pitch + c] = inside ? CAT(load_, A)(x, from) : 0;
#endif
    }
}

// s[i][j] = the dot product of row ty + i TY of `own` and row tx + j TX of `other`, over `depth` elements (a multiple of 4).
INLINE void multiply_rows(ACC s[MI][NI], const __local ACC *own, const __local ACC *other, const int pitch, uint depth, uint tx,
                                 uint ty) {
    #pragma unroll
    for (int i = 0; i < MI; ++i) {
        #pragma unroll
        for (int j = 0; j < NI; ++j)
            s[i][j] = 0;
    }
    for (uint d = 0; d < depth; d += 4) {
        FOUR a[MI], b[NI];
        #pragma unroll
        for (int i = 0; i < MI; ++i)
            a[i] = *(const __local FOUR *)(own + (ty + i * TY) * pitch + d);
        #pragma unroll
        for (int j = 0; j < NI; ++j)
            b[j] = *(const __local FOUR *)(other + (tx + j * TX) * pitch + d);
        #pragma unroll
        for (int i = 0; i < MI; ++i) {
            #pragma unroll
            for (int j = 0; j < NI; ++j)
                s[i][j] = fma(a[i].w, b[j].w, fma(a[i].z, b[j].z, fma(a[i].y, b[j].y, fma(a[i].x, b[j].x, s[i][j]))));
        }
    }
}

// sum[i][c] += row ty + i TY of `weights` times columns 4 (tx + c TX) to 4 (tx + c TX) + 3 of the rows in `other`.
#define ADD_PRODUCT(sum, fours, pitch)                                                                                  \
    for (int n = 0; n < OTHER; n += 4) {                                                                                \
        FOUR w[MI];                                                                                                     \
        _Pragma("unroll") for (int i = 0; i < MI; ++i)                                                                  \
            w[i] = *(__local FOUR *)(weights + (ty + i * TY) * PITCH_W + n);                                            \
        _Pragma("unroll") for (int c = 0; c < fours; ++c) {                                                             \
            const __local ACC *from = others + n * pitch + 4 * (tx + c * TX);                                           \
            const FOUR x0 = *(const __local FOUR *)from, x1 = *(const __local FOUR *)(from + pitch);                    \
            const FOUR x2 = *(const __local FOUR *)(from + 2 * pitch), x3 = *(const __local FOUR *)(from + 3 * pitch);  \
            _Pragma("unroll") for (int i = 0; i < MI; ++i)                                                              \
                sum[i][c] = fma((FOUR)(w[i].w), x3,                                                                     \
                                fma((FOUR)(w[i].z), x2, fma((FOUR)(w[i].y), x1, fma((FOUR)(w[i].x), x0, sum[i][c]))));  \
        }                                                                                                               \
    }

#define CLEAR(sum, fours)                                                                                               \
    _Pragma("unroll") for (int i = 0; i < MI; ++i) _Pragma("unroll") for (int c = 0; c < fours; ++c) sum[i][c] = 0;

// Writes rows of sums to `out`, with row i multiplied by `scale`.
#define STORE_ROWS(sum, fours, out, at, s, rows, length, width, scale)                                                  \
    for (int i = 0; i < MI; ++i) {                                                                                      \
        const uint r = first + ty + i * TY;                                                                             \
        if (r < (rows)) {                                                                                               \
            const ulong to = at + row_at(&s, r, length);                                                                \
            for (int c = 0; c < fours; ++c) {                                                                           \
                const uint column = 4 * (tx + c * TX);                                                                  \
                const ACC four[4] = {sum[i][c].x * (scale), sum[i][c].y * (scale), sum[i][c].z * (scale), sum[i][c].w * (scale)}; \
                for (uint e = 0; e < 4; ++e)                                                                            \
                    if (column + e < (width))                                                                           \
                        STORE(out, to + (long)(column + e) * s.column, four[e]);                                        \
            }                                                                                                           \
        }                                                                                                               \
    }

#ifdef FORWARD
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void attention(OPERAND(In, q), OPERAND(In, k), OPERAND(In, v), OPERAND(Mask, mask), OPERAND(Out, out), Rows lse, ulong lse_at,
               const Sizes n, ACC scale, ACC dropped, ACC rescale, ulong key, ulong stream
#ifdef SPLIT
               , Rows partial, ulong partial_at
#endif
) {
    __local ACC own[OWN * PITCH_K] __attribute__((aligned(32)));
    __local ACC others[OTHER * PITCH_MOST] __attribute__((aligned(32)));
    __local ACC weights[OWN * PITCH_W] __attribute__((aligned(32)));
    __local ACC shared[OWN * TX];
    const uint t = get_local_id(0), tx = t % TX, ty = t / TX;
    SIZES
    const uint part = get_group_id(0) % n.parts;
    TILE_OF_QUERIES((uint)(get_group_id(0) / n.parts))
    const uint each = ((keys + OTHER - 1) / OTHER + n.parts - 1) / n.parts * OTHER;
    const uint begin = min(part * each, most), end = min(begin + each, most);
    const ulong q0 = START(q), k0 = START(k), v0 = START(v);
    const uint depth = (width + 3) / 4 * 4;

    FOUR sum[MI][FOURS_V];
    ACC top[MI], total[MI];
    uint visible[MI];
    ulong mask_row[MI];
    CLEAR(sum, FOURS_V)
    #pragma unroll
    for (int i = 0; i < MI; ++i) {
        const uint r = first + ty + i * TY;
        top[i] = -INFINITY;
        total[i] = 0;
        visible[i] = KEYS_OF(r);
        mask_row[i] = MASK && r < rows ? START(mask) + row_at(&mask_by, r, queries) : 0;
    }
    stage(own, PITCH_K, OWN, q, q0, &q_by, first, rows, queries, width, t);

    for (uint j0 = begin; j0 < end; j0 += OTHER) {
        ACC s[MI][NI];
        barrier(CLK_LOCAL_MEM_FENCE);
        stage(others, PITCH_K, OTHER, k, k0, &k_by, j0, keys, ONE_HEAD, width, t);
        barrier(CLK_LOCAL_MEM_FENCE);
        multiply_rows(s, own, others, PITCH_K, depth, tx, ty);
        #pragma unroll
        for (int i = 0; i < MI; ++i) {
            ACC largest = -INFINITY;
            #pragma unroll
            for (int j = 0; j < NI; ++j) {
                const uint column = j0 + tx + j * TX;
                s[i][j] = column < visible[i] ? MASKED(s[i][j] * scale, mask_row[i] + (long)column * mask_by.column) : -INFINITY;
                largest = fmax(largest, s[i][j]);
            }
            shared[(ty + i * TY) * TX + tx] = largest;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        stage(others, PITCH_V, OTHER, v, v0, &v_by, j0, keys, ONE_HEAD, value_width, t);
        #pragma unroll
        for (int i = 0; i < MI; ++i) {
            // fmax may drop a NaN, but the NaN still reaches the sum of exponentials.
            ACC next = top[i];
            #pragma unroll
            for (int c = 0; c < TX; ++c)
                next = fmax(next, shared[(ty + i * TY) * TX + c]);
            const ACC base = next == -INFINITY ? 0 : next, shrink = top[i] == -INFINITY ? 0 : exp(top[i] - base);
            top[i] = next;
            total[i] *= shrink;
            #pragma unroll
            for (int c = 0; c < FOURS_V; ++c)
                sum[i][c] *= shrink;
            #pragma unroll
            for (int j = 0; j < NI; ++j) {
                const ACC p = exp(s[i][j] - base);
                total[i] += p;
                weights[(ty + i * TY) * PITCH_W + tx + j * TX] = p * KEPT(first + ty + i * TY, j0 + tx + j * TX);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        ADD_PRODUCT(sum, FOURS_V, PITCH_V)
    }

    // Each work-item has summed the exponentials of only its own columns, so the sums of all columns are combined here.
    barrier(CLK_LOCAL_MEM_FENCE);
    #pragma unroll
    for (int i = 0; i < MI; ++i)
        shared[(ty + i * TY) * TX + tx] = total[i];
    barrier(CLK_LOCAL_MEM_FENCE);
    #pragma unroll
    for (int i = 0; i < MI; ++i) {
        total[i] = 0;
        #pragma unroll
        for (int c = 0; c < TX; ++c)
            total[i] += shared[(ty + i * TY) * TX + c];
    }
#ifdef SPLIT
    for (int i = 0; i < MI; ++i) {
        const uint r = first + ty + i * TY;
        if (r < rows) {
            const ulong to = partial_at + (((ulong)b * rows + r) * n.parts + part) * (DV + 2);
            for (int c = 0; c < FOURS_V; ++c)
                vstore4(sum[i][c], tx + c * TX, partial + to + 2);
            if (tx == 0) {
                partial[to] = top[i];
                partial[to + 1] = total[i];
            }
        }
    }
#else
    const ulong out0 = START(out);
    STORE_ROWS(sum, FOURS_V, out, out0, out_by, rows, queries, value_width, total[i] == 0 ? 0 : 1 / total[i])
    if (tx == 0) {
        for (int i = 0; i < MI; ++i) {
            const uint r = first + ty + i * TY;
            if (r < rows)
                lse[lse_at + (ulong)b * rows + r] = top[i] + log(total[i]);
        }
    }
#endif
}
#endif

#ifdef QUERIES
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void attention(OPERAND(In, q), OPERAND(In, k), OPERAND(In, v), OPERAND(Mask, mask), OPERAND(In, out), OPERAND(In, grad),
               OPERAND(Out, dq), Rows lse, ulong lse_at, Rows delta, ulong delta_at, const Sizes n, ACC scale, ACC dropped, ACC rescale,
               ulong key, ulong stream) {
    __local ACC own[OWN * PITCH_K] __attribute__((aligned(32)));
    __local ACC grads[OWN * PITCH_V] __attribute__((aligned(32)));
    __local ACC others[OTHER * PITCH_MOST] __attribute__((aligned(32)));
    __local ACC weights[OWN * PITCH_W] __attribute__((aligned(32)));
    const uint t = get_local_id(0), tx = t % TX, ty = t / TX;
    SIZES
    TILE_OF_QUERIES((uint)get_group_id(0))
    const ulong q0 = START(q), k0 = START(k), v0 = START(v);
    const ulong out0 = START(out), grad0 = START(grad);
    const uint depth = (width + 3) / 4 * 4, value_depth = (value_width + 3) / 4 * 4;

    FOUR sum[MI][FOURS_K];
    ACC base[MI], less[MI];
    uint visible[MI];
    ulong mask_row[MI];
    CLEAR(sum, FOURS_K)
    stage(own, PITCH_K, OWN, q, q0, &q_by, first, rows, queries, width, t);
    stage(grads, PITCH_V, OWN, grad, grad0, &grad_by, first, rows, queries, value_width, t);
    barrier(CLK_LOCAL_MEM_FENCE);
    #pragma unroll
    for (int i = 0; i < MI; ++i) {
        const uint r = first + ty + i * TY;
        visible[i] = KEYS_OF(r);
        mask_row[i] = MASK && r < rows ? START(mask) + row_at(&mask_by, r, queries) : 0;
        base[i] = BASE(r);
        ACC share = 0;
        if (r < rows) {
            const ulong at = out0 + row_at(&out_by, r, queries);
            for (uint c = tx; c < value_width; c += TX)
                share = fma(grads[(ty + i * TY) * PITCH_V + c], (ACC)CAT(load_, A)(out, at + (long)c * out_by.column), share);
        }
        weights[(ty + i * TY) * PITCH_W + tx] = share;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    #pragma unroll
    for (int i = 0; i < MI; ++i) {
        const uint r = first + ty + i * TY;
        less[i] = 0;
        #pragma unroll
        for (int c = 0; c < TX; ++c)
            less[i] += weights[(ty + i * TY) * PITCH_W + c];
        if (tx == 0 && r < rows)
            delta[delta_at + (ulong)b * rows + r] = less[i];
    }

    for (uint j0 = 0; j0 < most; j0 += OTHER) {
        ACC s[MI][NI], dp[MI][NI];
        barrier(CLK_LOCAL_MEM_FENCE);
        stage(others, PITCH_V, OTHER, v, v0, &v_by, j0, keys, ONE_HEAD, value_width, t);
        barrier(CLK_LOCAL_MEM_FENCE);
        multiply_rows(dp, grads, others, PITCH_V, value_depth, tx, ty);
        barrier(CLK_LOCAL_MEM_FENCE);
        stage(others, PITCH_K, OTHER, k, k0, &k_by, j0, keys, ONE_HEAD, width, t);
        barrier(CLK_LOCAL_MEM_FENCE);
        multiply_rows(s, own, others, PITCH_K, depth, tx, ty);
        #pragma unroll
        for (int i = 0; i < MI; ++i) {
            #pragma unroll
            for (int j = 0; j < NI; ++j) {
                const uint column = j0 + tx + j * TX;
                const bool inside = column < visible[i];
                const ACC x = inside ? MASKED(s[i][j] * scale, mask_row[i] + (long)column * mask_by.column) : -INFINITY;
                const ACC kept = KEPT(first + ty + i * TY, column), ds = exp(x - base[i]) * (dp[i][j] * kept - less[i]) * scale;
                weights[(ty + i * TY) * PITCH_W + tx + j * TX] = inside ? ds : 0;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        ADD_PRODUCT(sum, FOURS_K, PITCH_K)
    }
    const ulong dq0 = START(dq);
    STORE_ROWS(sum, FOURS_K, dq, dq0, dq_by, rows, queries, width, 1)
}
#endif

#ifdef KEYS
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void attention(OPERAND(In, q), OPERAND(In, k), OPERAND(In, v), OPERAND(Mask, mask), OPERAND(In, grad), OPERAND(Out, dk), OPERAND(Out, dv),
               Rows lse, ulong lse_at, Rows delta, ulong delta_at, const Sizes n, ACC scale, ACC dropped, ACC rescale, ulong key,
               ulong stream) {
    __local ACC own[OWN * PITCH_K] __attribute__((aligned(32)));
    __local ACC values[OWN * PITCH_V] __attribute__((aligned(32)));
    __local ACC others[OTHER * PITCH_MOST] __attribute__((aligned(32)));
    __local ACC weights[OWN * PITCH_W] __attribute__((aligned(32)));
    const uint t = get_local_id(0), tx = t % TX, ty = t / TX;
    SIZES
    TILE_OF_KEYS
    const ulong q0 = START(q), k0 = START(k), v0 = START(v);
    const ulong grad0 = START(grad), mask0 = MASK ? START(mask) : 0;
    const uint depth = (width + 3) / 4 * 4, value_depth = (value_width + 3) / 4 * 4;

    FOUR sum_k[MI][FOURS_K], sum_v[MI][FOURS_V];
    CLEAR(sum_k, FOURS_K)
    CLEAR(sum_v, FOURS_V)
    stage(own, PITCH_K, OWN, k, k0, &k_by, first, keys, ONE_HEAD, width, t);
    stage(values, PITCH_V, OWN, v, v0, &v_by, first, keys, ONE_HEAD, value_width, t);

    for (uint r0 = next_tile(&n, 0, first, OTHER); r0 < rows; r0 = next_tile(&n, r0 + OTHER, first, OTHER)) {
        ACC s[MI][NI], dp[MI][NI];
        barrier(CLK_LOCAL_MEM_FENCE);
        stage(others, PITCH_K, OTHER, q, q0, &q_by, r0, rows, queries, width, t);
        barrier(CLK_LOCAL_MEM_FENCE);
        multiply_rows(s, own, others, PITCH_K, depth, tx, ty);
        #pragma unroll
        for (int j = 0; j < NI; ++j) {
            const uint r = r0 + tx + j * TX, visible = KEYS_OF(r);
            const ulong mask_row = MASK && r < rows ? mask0 + row_at(&mask_by, r, queries) : 0;
            const ACC base = BASE(r);
            #pragma unroll
            for (int i = 0; i < MI; ++i) {
                const uint column = first + ty + i * TY;
                const bool inside = column < visible;
                const ACC x = inside ? MASKED(s[i][j] * scale, mask_row + (long)column * mask_by.column) : -INFINITY;
                s[i][j] = inside ? exp(x - base) : 0;
                weights[(ty + i * TY) * PITCH_W + tx + j * TX] = s[i][j] * KEPT(r, column);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        stage(others, PITCH_V, OTHER, grad, grad0, &grad_by, r0, rows, queries, value_width, t);
        barrier(CLK_LOCAL_MEM_FENCE);
        multiply_rows(dp, values, others, PITCH_V, value_depth, tx, ty);
        ADD_PRODUCT(sum_v, FOURS_V, PITCH_V)
        barrier(CLK_LOCAL_MEM_FENCE);
        stage(others, PITCH_K, OTHER, q, q0, &q_by, r0, rows, queries, width, t);
        #pragma unroll
        for (int j = 0; j < NI; ++j) {
            const uint r = r0 + tx + j * TX, visible = KEYS_OF(r);
            const ACC less = r < rows ? delta[delta_at + (ulong)b * rows + r] : 0;
            #pragma unroll
            for (int i = 0; i < MI; ++i) {
                const uint column = first + ty + i * TY;
                const ACC kept = KEPT(r, column), ds = s[i][j] * (dp[i][j] * kept - less) * scale;
                weights[(ty + i * TY) * PITCH_W + tx + j * TX] = column < visible ? ds : 0;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        ADD_PRODUCT(sum_k, FOURS_K, PITCH_K)
    }
    const ulong dk0 = START(dk), dv0 = START(dv);
    STORE_ROWS(sum_k, FOURS_K, dk, dk0, dk_by, keys, ONE_HEAD, width, 1)
    STORE_ROWS(sum_v, FOURS_V, dv, dv0, dv_by, keys, ONE_HEAD, value_width, 1)
}
#endif

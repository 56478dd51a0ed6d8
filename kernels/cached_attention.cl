// Attention over a cache of keys and values whose position is in device memory. Follows strided_dims.cl. The host defines A (dtype of queries, new
// rows and result), B (dtype of the cache), WIDTH, Q8 if rows are blocks of 34 bytes (d in f16, then 32 signed bytes q; the values are q * d), and
//   STORES  stores the new rows of a part of the cache
//   ATTEND  computes partial results over a part of the keys: sums of values, the greatest score, and the sum of weights, for each row
//   JOIN    computes the result from the partial results: in the launch of ATTEND by the last work-group of a unit, or in a second launch
// The rows are all queries of all heads that share a head of keys, ordered by query. A unit is up to R rows of a head. A work-group of T work-items
// processes KEYS keys of a unit and reads each key once for all R rows, with TEAM work-items per key and in vectors of VEC elements. On CPUs, T is 1
// and weights are computed in vectors of WIDE elements.

typedef __global const CAT(A, _t) *In;
typedef __global CAT(A, _t) *Out;
typedef __global CAT(B, _t) *Cache;
typedef struct {
    long batch, head, row, column;
} Strides;
// `length` is the number of new rows of a head, `group` the number of query heads that share a head of keys, and `passes` the number of units of a head.
typedef struct {
    long heads, capacity, length, position_step, group, passes, parts;
} Sizes;

#ifdef Q8
#define ROW (WIDTH / 32 * 34)
#define UNITS (WIDTH / 32)
#else
#define ROW WIDTH
#define UNITS WIDTH
#endif
#define LANES (WIDTH / VEC)
#define COLUMNS (T < LANES ? T : LANES) // the number of vectors of a value that are loaded at once
#define PER (T / R > 16 ? 16 : T > R ? T / R : 1) // the number of work-items that compute the weights of a row
#define RECORD (WIDTH + 2) // the number of floats of a partial result of a row
#if VEC == 1
typedef float Vec;
#else
typedef CAT(float, VEC) Vec;
#endif
#if WIDE == 1
typedef float Wide;
#define SCORE(r, i) scores[r][(i) * TEAM]
#define PUT(r, i, x) scores[r][(i) * TEAM] = x
#else
typedef float16 Wide;
#define SCORE(r, i) vload16(i, scores[r])
#define PUT(r, i, x) vstore16(x, i, scores[r])
#endif
#define PLUS(a, b) ((a) + (b))
#define HALVED(OP, x) OP((x).lo, (x).hi)
#define ACROSS1(OP, x) (x)
#define ACROSS4(OP, x) HALVED(OP, HALVED(OP, x))
#define ACROSS8(OP, x) HALVED(OP, ACROSS4(OP, x))
#define ACROSS16(OP, x) HALVED(OP, ACROSS8(OP, x))

// Stores a block of Q8, or an element, of a new row, whose elements are `step` apart.
static inline void store_unit(In x, long step, Cache to) {
#ifdef Q8
    float top = 0;
    for (int e = 0; e < 32; ++e)
        top = fmax(top, fabs(CAT(load_, A)(x, e * step)));
    const float d = top / 127, inverse = d == 0 ? 0 : 1 / d;
    store_f16_F32((__global f16_t *)to, 0, d);
    for (int e = 0; e < 32; ++e) {
        const float y = CAT(load_, A)(x, e * step) * inverse;
        to[2 + e] = (uchar)(int)(y + copysign(0.5f, y)); // rounds to nearest, ties away from zero
    }
#else
    CAT(CAT(store_, B), _F32)(to, 0, CAT(load_, A)(x, 0));
#endif
}

// Loads vector c of a row.
static inline Vec load_vec(__global const CAT(B, _t) *row, uint c) {
#ifdef Q8
    row += c * VEC / 32 * 34;
    const float d = load_f16((__global const f16_t *)row, 0);
    row += 2 + c * VEC % 32;
#if VEC == 16
    const uint16 q = convert_uint16(as_ulong16(convert_long16(vload16(0, row))));
    return convert_float16(as_int16(q ^ 128u) - 128) * d;
#else
#define PAIR(x) (float)(char)(x), (float)(char)((x) >> 8)
    __global const ushort *q = (__global const ushort *)row;
    return (float8)(PAIR(q[0]), PAIR(q[1]), PAIR(q[2]), PAIR(q[3])) * d;
#endif
#elif VEC == 1
    return CAT(load_, B)(row, c);
#elif VEC == 4
    return *(__global const float4 *)(row + c * 4);
#elif VEC == 8
#define PAIR(x) CAT(from_, B)((CAT(B, _t))(x)), CAT(from_, B)((CAT(B, _t))((x) >> 16))
    const uint4 x = *(__global const uint4 *)(row + c * 8);
    return (float8)(PAIR(x.x), PAIR(x.y), PAIR(x.z), PAIR(x.w));
#else
    return CAT(load16_, B)(row, c * 16);
#endif
}

// Row r of the unit as a row of the head, and the number of keys of the part to which this row attends.
#define ROW_OF(r) min((long)(pass * R + (r)), rows - 1)
#define SEEN(r) (uint)clamp(start + 1 + ROW_OF(r) / group - first, 0L, min((long)KEYS, n.capacity - first))
// The offset of element e of row r in new rows, and in queries or results.
#define NEW_AT(by, r, e) b * by.batch + head * by.head + (r) * by.row + (e) * by.column
#define AT(by, r, e) b * by.batch + (head * group + (r) % group) * by.head + (r) / group * by.row + (e) * by.column

__kernel __attribute__((reqd_work_group_size(T, 1, 1)))
void attention(In key, ulong key_at, const Strides key_by, In value, ulong value_at, const Strides value_by, Cache k, ulong k_at,
               Cache v, ulong v_at, __global const long *position, ulong position_at, In q, ulong q_at, const Strides q_by,
               Out out, ulong out_at, const Strides out_by, __global float *partial, ulong partial_at, const Sizes n, float scale,
               volatile __global int *fault
#if defined(ATTEND) && defined(JOIN) && defined(PARTS)
               , volatile __global uint *arrived, uint first_arrived
#endif
) {
#if defined(STORES) || defined(ATTEND)
    const uint unit = get_group_id(0) / n.parts, part = get_group_id(0) % n.parts;
#else
    const uint unit = get_group_id(0);
#endif
    const uint t = get_local_id(0), pass = unit % n.passes;
    const long head = unit / n.passes % n.heads, b = unit / n.passes / n.heads, group = n.group, rows = n.length * group;
    const long start = position[position_at + b * n.position_step];
    // The other parts have no keys.
    const uint used = clamp((start + n.length + KEYS - 1) / KEYS, 1L, n.parts);
#if defined(STORES) || defined(ATTEND)
    if (part >= used)
        return;
    const long first = (long)part * KEYS, cached = ((b * n.heads + head) * n.capacity + first) * ROW;
#endif
#ifdef STORES
    if (part == 0 && head == 0 && t == 0 && (start < 0 || start + n.length > n.capacity))
        fault_record(fault, FAULT_INDEX, start < 0 ? start : start + n.length - 1, n.capacity);
    for (long i = t; i < n.length * UNITS; i += T) {
        const long row = i / UNITS, e = i % UNITS * (WIDTH / UNITS), to = start + row - first;
        if (to >= 0 && to < min((long)KEYS, n.capacity - first)) {
            const long at = cached + to * ROW + i % UNITS * (ROW / UNITS);
            store_unit(key + key_at + NEW_AT(key_by, row, e), key_by.column, k + k_at + at);
            store_unit(value + value_at + NEW_AT(value_by, row, e), value_by.column, v + v_at + at);
        }
    }
    barrier(CLK_GLOBAL_MEM_FENCE);
#endif
#ifdef ATTEND
    __local Vec queries[R][LANES], vectors[T];
    __local float scores[R][KEYS * TEAM], tops[R * PER], sums[R * PER];
    const uint most = SEEN(R - 1);
    __global float *own = partial + partial_at + (ulong)get_group_id(0) * (R * RECORD);
    for (uint i = t; i < R * WIDTH; i += T) {
        const long row = ROW_OF(i / WIDTH);
        ((__local float *)queries)[i] = scale * CAT(load_, A)(q, q_at + AT(q_by, row, i % WIDTH));
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint i = t; i < most * TEAM; i += T) {
        Vec sum[R];
        #pragma unroll
        for (int r = 0; r < R; ++r)
            sum[r] = 0;
        for (uint c = i % TEAM; c < LANES; c += TEAM) {
            const Vec x = load_vec(k + k_at + cached + i / TEAM * ROW, c);
            #pragma unroll
            for (int r = 0; r < R; ++r)
                sum[r] = fma(queries[r][c], x, sum[r]);
        }
        #pragma unroll
        for (int r = 0; r < R; ++r)
            scores[r][i] = CAT(ACROSS, VEC)(PLUS, sum[r]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint i = t; i < R * PER; i += T) {
        const uint r = i / PER, seen = SEEN(r);
        Wide top = -INFINITY;
        for (uint j = seen; j % WIDE > 0; ++j)
            scores[r][j] = -INFINITY;
        for (uint j = i % PER; j * WIDE < seen; j += PER) {
            for (uint lane = 1; lane < TEAM; ++lane)
                scores[r][j * TEAM] += scores[r][j * TEAM + lane];
            top = fmax(top, SCORE(r, j));
        }
        tops[i] = CAT(ACROSS, WIDE)(fmax, top);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint i = t; i < R * PER; i += T) {
        const uint r = i / PER, seen = SEEN(r);
        float top = -INFINITY;
        for (uint j = 0; j < PER; ++j)
            top = fmax(top, tops[r * PER + j]);
        const float base = top == -INFINITY ? 0 : top;
        Wide sum = 0;
        for (uint j = i % PER; j * WIDE < most; j += PER) {
            Wide weight = 0;
            if (j * WIDE < seen)
                weight = exp(SCORE(r, j) - base);
            PUT(r, j, weight);
            sum += weight;
        }
        sums[i] = CAT(ACROSS, WIDE)(PLUS, sum);
        if (i % PER == 0)
            own[r * RECORD + WIDTH] = top;
    }
    for (uint from = 0; from < LANES; from += T) {
        barrier(CLK_LOCAL_MEM_FENCE);
        // The work-items of a vector of columns read every `step`th value.
        const uint c = from + t % COLUMNS, step = T / COLUMNS;
        Vec sum[R];
        #pragma unroll
        for (int r = 0; r < R; ++r)
            sum[r] = 0;
        for (uint j = t / COLUMNS; j < most && c < LANES && t < step * COLUMNS; j += step) {
            const Vec x = load_vec(v + v_at + cached + j * ROW, c);
            #pragma unroll
            for (int r = 0; r < R; ++r)
                sum[r] = fma((Vec)(scores[r][j * TEAM]), x, sum[r]);
        }
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            vectors[t] = sum[r];
            barrier(CLK_LOCAL_MEM_FENCE);
            for (uint e = t; e < COLUMNS * VEC && from * VEC + e < WIDTH; e += T) {
                float all = 0;
                for (uint s = 0; s < step; ++s)
                    all += ((__local float *)vectors)[s * COLUMNS * VEC + e];
                own[r * RECORD + from * VEC + e] = all;
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
    }
    for (uint r = t; r < R; r += T) {
        float total = 0;
        for (uint j = 0; j < PER; ++j)
            total += sums[r * PER + j];
        own[r * RECORD + WIDTH + 1] = total;
    }
#endif
#ifdef JOIN
#ifdef ATTEND
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
#ifdef PARTS
    __local uint others;
    if (used > 1) {
        if (t == 0) {
            FENCE;
            others = atomic_inc(arrived + first_arrived + unit);
            FENCE;
            if (others == used - 1)
                arrived[first_arrived + unit] = 0;
        }
        barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
        if (others != used - 1)
            return;
    }
#endif
#endif
    for (uint i = t; i < R * WIDTH && pass * R + i / WIDTH < rows; i += T) {
        const uint e = i % WIDTH;
        const long row = pass * R + i / WIDTH;
        __global const float *of_row = partial + partial_at + ((ulong)unit * n.parts * R + i / WIDTH) * RECORD;
        float top = -INFINITY, total = 0, sum = 0;
        for (uint s = 0; s < used; ++s)
            top = fmax(top, of_row[s * (R * RECORD) + WIDTH]);
        for (uint s = 0; s < used; ++s, of_row += R * RECORD) {
            const float factor = of_row[WIDTH] == top ? 1 : exp(of_row[WIDTH] - top);
            total += of_row[WIDTH + 1] * factor;
            sum += of_row[e] * factor;
        }
        CAT(CAT(store_, A), _F32)(out, out_at + AT(out_by, row, e), total == 0 ? 0 : sum / total);
    }
    barrier(CLK_LOCAL_MEM_FENCE); // see FENCE in prelude.cl
#endif
}

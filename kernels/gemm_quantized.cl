// C = epilogue(A W^T) for an A with few rows (MR), contiguous along k, and a quantised W, of which every packed byte is read once. Follows gemm.cl,
// quantized.cl and fold.cl. p.v[7] is the first row of W, and p.v[8] the number of blocks of the whole weight.
//
// On CPUs (SERIAL), a work-item computes MR x NR results with explicit vectors of 16 elements.
// On GPUs, a work-group of THREADS stages STAGE elements of each row of A in local memory, converted to float. LANES work-items share NR columns of
// C. A work-item reads 16 bytes of each column at a time, and issues the next loads before it multiplies. FOLD adds up the sums of the
// lanes. With PARTS (split-K), work-groups share a tile as in gemm_thin.cl.

#define ROW_OF(j) ((uint)(p.v[7] + min((long)(j), COLS - 1)) * (uint)(DEPTH / BLOCK)) // the first block of column j

#ifdef SERIAL
static inline float16 vector_f32(const __global f32_t* p, ulong i) { return vload16(0, p + i); }
static inline float16 vector_f16(const __global f16_t* p, ulong i) { return vload_half16(0, (const __global half*)p + i); }
static inline float16 vector_bf16(const __global bf16_t* p, ulong i) {
    return as_float16(convert_uint16(vload16(0, p + i)) << 16);
}
static inline float sum_of(float16 v) {
    const float8 a = v.lo + v.hi;
    const float4 b = a.lo + a.hi;
    return (b.x + b.z) + (b.y + b.w);
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void gemm(const __global CAT(A, _t)* restrict a, const __global uchar* restrict b, const params p OPERANDS) {
    const long j0 = (long)get_global_id(0) * NR;
    const uint n = p.v[8], chunks = DEPTH / CHUNK;
    uint row[NR];
    float16 acc[MR][NR];
    for (int j = 0; j < NR; j++) row[j] = ROW_OF(j0 + j);
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < NR; j++) acc[i][j] = 0;
    for (uint c = 0; c < chunks; c++) {
        #pragma unroll
        for (int j = 0; j < NR; j++) {
            const Chunk k = load_chunk(b + p.v[6], n, row[j], c);
            #pragma unroll
            for (uint r = 0; r < RUNS; r++) {
                const float16 v = elements(k, c, r);
                #pragma unroll
                for (int i = 0; i < MR; i++)
                    acc[i][j] = fma(CAT(vector_, A)(a, p.v[3] + i * A_ROW + ELEMENT(c, r)), v, acc[i][j]);
            }
        }
    }
    OPERAND_OFFSETS(0)
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < NR; j++)
            if (j0 + j < COLS) { FINISH(i, j0 + j, sum_of(acc[i][j])) }
}
#else
#define COLUMNS (THREADS / LANES * NR)
// Element e of a staged row. Rows of 32 elements are padded, so that lanes that read adjacent chunks use different banks.
#define PLACE(e) ((e) / 32 * 36 + (e) % 32)
#define PITCH (STAGE / 32 * 36)
#define LOADS ((STAGE + 4 * THREADS - 1) / (4 * THREADS)) // the number of times that a work-item stages four elements of a row

// Returns the four integers of a word of run r, minus the bias: two of its bytes are in the low bits of 2^23, where bit s counts as 1.
static inline float4 four(uint word, uint s, float bias) {
    const uint high = word >> 16;
    const float unit = 1.0f / (1u << s), next = unit / 256;
    const float at = -(8388608.0f * unit + bias), next_at = -(8388608.0f * next + bias);
    return (float4)(fma(as_float((word & MASK << s) | MAGIC), unit, at), fma(as_float((word & MASK << (s + 8)) | MAGIC), next, next_at),
                    fma(as_float((high & MASK << s) | MAGIC), unit, at), fma(as_float((high & MASK << (s + 8)) | MAGIC), next, next_at));
}

// Adds up the sums `own` of the lanes of each column, and runs STORE for each column e of the group and its `sum`.
#define PLUS(a, b) ((a) + (b))
#define JOIN(own, STORE)                                                                                               \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                                      \
    _Pragma("unroll") for (int j = 0; j < NR; j++) {                                                                   \
        float sum = own[j];                                                                                            \
        FOLD_IN(PLUS, sum, sums[j])                                                                                    \
        const int e = lid / LANES * NR + j;                                                                            \
        if (lane == 0) { STORE }                                                                                       \
    }
#define STORE_RESULT if (j0 + e < COLS) { FINISH(i, j0 + e, sum) }

__kernel __attribute__((reqd_work_group_size(THREADS, 1, 1)))
void gemm(const __global CAT(A, _t)* restrict a, const __global uchar* restrict b, const params p OPERANDS) {
    __local float staged[MR * PITCH] __attribute__((aligned(16)));
    __local float sums[NR][THREADS];
    const uint lid = get_local_id(0), lanes = LANES, lane = lid % LANES, step = 1;
    const int t = lid;
#ifdef PARTS
    const long part = get_group_id(0) % PARTS, group = get_group_id(0) / PARTS;
    const long first = part * PART_DEPTH, end = min(DEPTH, first + PART_DEPTH);
#else
    const long group = get_group_id(0), first = 0, end = DEPTH;
#endif
    const long j0 = group * COLUMNS;
    const uint n = p.v[8], last = end / CHUNK;
    const __global uchar* w = b + p.v[6];
    uint row[NR], c = first / CHUNK + lane;
    float acc[MR][NR];
    Chunk next[NR];
    #pragma unroll
    for (int j = 0; j < NR; j++) {
        row[j] = ROW_OF(j0 + t / LANES * NR + j);
        if (c < last) next[j] = load_chunk(w, n, row[j], c);
        for (int i = 0; i < MR; i++) acc[i][j] = 0;
    }
    for (long k0 = first; k0 < end; k0 += STAGE) {
        const int count = min((long)STAGE, end - k0);
        barrier(CLK_LOCAL_MEM_FENCE);
        #pragma unroll
        for (int f = 0; f < MR * LOADS; f++) {
            const int i = f / LOADS, e = 4 * (t + f % LOADS * THREADS);
            const long at = p.v[3] + i * A_ROW + k0 + e;
            if (e < count)
                *(__local float4*)(staged + i * PITCH + PLACE(e)) = (float4)(
                    CAT(load_, A)(a, at), CAT(load_, A)(a, at + 1), CAT(load_, A)(a, at + 2), CAT(load_, A)(a, at + 3));
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint u = lane; u < count / CHUNK; u += LANES, c += LANES) {
            Chunk now[NR];
            #pragma unroll
            for (int j = 0; j < NR; j++) {
                now[j] = next[j];
                if (c + LANES < last) next[j] = load_chunk(w, n, row[j], c + LANES);
            }
            #pragma unroll
            for (uint r = 0; r < RUNS; r++) {
                const __local float* x = staged + PLACE(ELEMENT(u, r));
                float run[MR][NR], all[MR];
                for (int i = 0; i < MR; i++) {
                    all[i] = 0;
                    for (int j = 0; j < NR; j++) run[i][j] = 0;
                }
                #pragma unroll
                for (int v = 0; v < 4; v++) {
                    float4 q[NR];
                    #pragma unroll
                    for (int j = 0; j < NR; j++) q[j] = four(WORD(now[j], c, r, v), SHIFT(r), BIAS(now[j]));
                    #pragma unroll
                    for (int i = 0; i < MR; i++) {
                        const float4 at = *(const __local float4*)(x + i * PITCH + v * 4);
                        all[i] += (at.x + at.y) + (at.z + at.w);
                        #pragma unroll
                        for (int j = 0; j < NR; j++)
                            run[i][j] = fma(at.w, q[j].w, fma(at.z, q[j].z, fma(at.y, q[j].y, fma(at.x, q[j].x, run[i][j]))));
                    }
                }
                #pragma unroll
                for (int j = 0; j < NR; j++) {
                    const float2 s = scales(now[j], c, r);
                    #pragma unroll
                    for (int i = 0; i < MR; i++) {
                        acc[i][j] = fma(s.x, run[i][j], acc[i][j]);
#ifdef HAS_OFFSET
                        acc[i][j] = fma(s.y, all[i], acc[i][j]);
#endif
                    }
                }
            }
        }
    }
    OPERAND_OFFSETS(0)
#ifndef PARTS
    #pragma unroll
    for (int i = 0; i < MR; i++) { JOIN(acc[i], STORE_RESULT) }
#else
    __local uint others;
    __global float* parts_of_group = partial + FIRST_PARTIAL + group * PARTS * (MR * COLUMNS);
    #pragma unroll
    for (int i = 0; i < MR; i++) { JOIN(acc[i], parts_of_group[(part * MR + i) * COLUMNS + e] = sum;) }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (t == 0) {
        FENCE;
        others = atomic_inc(arrived + FIRST_ARRIVED + group);
        FENCE;
        if (others == PARTS - 1) arrived[FIRST_ARRIVED + group] = 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (others != PARTS - 1) return;
    for (int i = 0; i < MR; i++)
        for (int e = t; e < COLUMNS; e += THREADS) {
            float sum = 0;
            for (long s = 0; s < PARTS; s++) sum += parts_of_group[(s * MR + i) * COLUMNS + e];
            STORE_RESULT
        }
    barrier(CLK_LOCAL_MEM_FENCE); // see FENCE in prelude.cl
#endif
}
#endif

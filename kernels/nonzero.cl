// The nonzero elements of a strided tensor, in row-major order. The host defines A (its dtype), NK (rank), IDX, and one of COUNT,
// ROWS and ELEMENTS. COUNT counts the nonzero elements of every chunk. The sum of the counts of all earlier chunks is the offset of
// a chunk's results. ROWS writes the indices of each nonzero element (a row of RANK indices, for a tensor of `sizes`). ELEMENTS
// writes the element of another tensor (rank NV, elements of the size of V) at the same position. A chunk is processed by a
// work-item on CPUs, and by a group of GROUP work-items on GPUs.

STRIDED_DIMS(Rest, NK)

#ifdef COUNT
#define RESULTS
#else
#ifdef ROWS
typedef struct {
    ulong size[RANK];
} Sizes;
#define RESULTS , __global long *y, ulong y_at, Sizes sizes, ulong most
// PUT writes row `to` of the result: the indices of element i.
#if RANK == 2
// Both indices are stored at once, because a new tensor is aligned to sixteen bytes.
#define PUT(to, i)                                                                                                     \
    {                                                                                                                  \
        const IDX element = i, row = element / (IDX)sizes.size[1];                                                     \
        ((__global long2 *)(y + y_at))[to] = (long2)(row, element - row * (IDX)sizes.size[1]);                         \
    }
#else
#define PUT(to, i)                                                                                                     \
    {                                                                                                                  \
        IDX left = i;                                                                                                  \
        for (int d = RANK - 1; d >= 0; --d)                                                                            \
            y[y_at + (to) * RANK + d] = (long)NEXT(left, sizes.size, d);                                               \
    }
#endif
#else
STRIDED_DIMS(From, NV)
#define RESULTS , __global V *y, ulong y_at, __global const V *v, ulong v_at, From from, ulong most
#define PUT(to, i) y[y_at + (to)] = v[v_at + at_From(&from, i)];
#endif
#endif

#define PARAMETERS                                                                                                     \
    __global const CAT(A, _t) *x, ulong x_at, __global uint *counts, ulong counts_at, Rest rest, ulong n_,             \
        ulong chunk_ RESULTS
#define IS_TRUE(at) (CAT(load_, A)(x, x_at + (at)) != 0)

#ifdef IS_CPU
// The length of a run. Without branches, all nonzero elements of a run are found before they are written.
#define RUN_LEN 256

__kernel void count(PARAMETERS) {
    const IDX n = (IDX)n_, chunk = (IDX)chunk_, item = (IDX)get_global_id(0);
    const IDX inner = (IDX)rest.size[NK - 1];
    const long step = rest.stride[NK - 1];
    IDX i = item * chunk;
    const IDX end = min(i + chunk, n);
    if (i >= n)
        return;
#ifdef COUNT
    uint total = 0;
#else
    ulong to = 0;
    for (IDX k = 0; k < item; ++k)
        to += counts[counts_at + k];
    uint found[RUN_LEN];
#endif
    while (i < end) {
        // A run of elements along the innermost dim.
        IDX len = min(inner - i % inner, end - i);
        const long at = at_Rest(&rest, i);
#ifdef COUNT
        IDX k = 0;
        if (step == 1) {
            CAT(MASK, 16) many = 0;
            for (; k + 16 <= len; k += 16)
                many -= CAT(load16_, A)(x, x_at + at + k) != 0;
            MASK lanes[16];
            vstore16(many, 0, lanes);
            for (int lane = 0; lane < 16; ++lane)
                total += (uint)lanes[lane];
        }
        for (; k < len; ++k)
            total += IS_TRUE(at + (long)k * step);
#else
        len = min(len, (IDX)RUN_LEN);
        uint here = 0;
        for (uint k = 0; k < len; ++k) {
            found[here] = k;
            here += IS_TRUE(at + (long)k * step);
        }
        for (uint k = 0; k < here && to < most; ++k, ++to)
            PUT(to, i + found[k]);
#endif
        i += len;
    }
#ifdef COUNT
    counts[counts_at + item] = total;
#endif
}
#else
// The number of elements of a tile that each work-item processes.
#define PER 16
#define TILE (GROUP * PER)
#define PLUS(a, b) ((a) + (b))

__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void count(PARAMETERS) {
    const IDX n = (IDX)n_, chunk = (IDX)chunk_, group = (IDX)get_group_id(0);
    const IDX first = group * chunk, end = min(first + chunk, n);
    const uint lid = get_local_id(0), lane = lid, lanes = GROUP, step = 1;
#ifdef COUNT
    __local uint scratch[GROUP];
    uint total = 0;
    for (IDX tile = first; tile < end; tile += TILE) {
        #pragma unroll
        for (uint k = 0; k < PER; ++k) {
            const IDX i = tile + k * GROUP + lid;
            if (i < end)
                total += IS_TRUE(at_Rest(&rest, i));
        }
    }
    FOLD(PLUS, total);
    if (lid == 0)
        counts[counts_at + group] = total;
#else
    __local ulong scratch[GROUP];
    __local uchar flags[TILE];
    __local ushort found[TILE];
    __local uint sums[2][GROUP];
    ulong before = 0;
    for (IDX k = lid; k < group; k += GROUP)
        before += counts[counts_at + k];
    FOLD(PLUS, before);
    for (IDX tile = first; tile < end; tile += TILE) {
        // Work-items read interleaved elements, so that loads are coalesced, and then process consecutive elements.
        #pragma unroll
        for (uint k = 0; k < PER; ++k) {
            const IDX i = tile + k * GROUP + lid;
            int flag = 0;
            if (i < end)
                flag = IS_TRUE(at_Rest(&rest, i));
            flags[k * GROUP + lid] = (uchar)flag;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        uchar own[PER];
        vstore16(vload16(lid, flags), 0, own);
        uint count = 0, now = 0;
        #pragma unroll
        for (uint k = 0; k < PER; ++k)
            count += own[k];
        sums[0][lid] = count;
        for (uint by = 1; by < GROUP; by *= 2, now = 1 - now) {
            barrier(CLK_LOCAL_MEM_FENCE);
            sums[1 - now][lid] = sums[now][lid] + (lid >= by ? sums[now][lid - by] : 0);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        const uint here = sums[now][GROUP - 1];
        uint at = sums[now][lid] - count;
        #pragma unroll
        for (uint k = 0; k < PER; ++k)
            if (own[k])
                found[at++] = (ushort)(lid * PER + k);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint k = lid; k < here; k += GROUP)
            if (before + k < most)
                PUT(before + k, tile + found[k]);
        before += here;
    }
#endif
}
#endif

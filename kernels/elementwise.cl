// Elementwise formulas. The host defines `compute` (the formulas), ARGUMENTS and PARAMETERS (the operands), INDEX (a type for all
// positions), and the macros of one of four forms:
// - scalar: `element` computes one position. PER_ITEM is 1 on CPUs, where compilers vectorise across work-items. On GPUs, a
//   work-item computes several elements, a work-group apart, to have more loads in flight.
// - DRAWN: DRAW computes the random numbers for DRAWN adjacent elements (`random.cl`), and ELEMENT computes one of these elements.
// - VEC: `elements` computes VEC adjacent elements, with one load and one store per operand. With TAIL, `element` computes the rest.
// - TILE: TRANSPOSED operands are contiguous along a dim in which the result is not. Tiles of TILE elements along that dim by ACROSS
//   elements along the result's contiguous dim go through local memory, so that both sides are accessed in whole lines. On CPUs, a
//   side of a tile is a line of LINE elements, and tiles are in private memory, which stays in the cache.

#ifdef TILE
#ifdef LINE
// Copies one vector of a line. If the result exceeds the cache, stores are non-temporal, because a plain store would first read the line.
#define LOAD_LINE(from, to) CAT(vstore, LINE)(CAT(vload, LINE)(0, from), 0, to)
#if defined(STREAMED) && defined(__has_builtin)
#if __has_builtin(__builtin_nontemporal_store)
#define STORE_LINE(T, from, to)                                                                                        \
    if (((ulong)(to) & (sizeof(CAT(T, LINE)) - 1)) == 0)                                                               \
        __builtin_nontemporal_store(CAT(vload, LINE)(0, from), (__global CAT(T, LINE) *)(to));                         \
    else                                                                                                               \
        CAT(vstore, LINE)(CAT(vload, LINE)(0, from), 0, to);
#endif
#endif
#ifndef STORE_LINE
#define STORE_LINE(T, from, to) CAT(vstore, LINE)(CAT(vload, LINE)(0, from), 0, to);
#endif
#endif

__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void elementwise(PARAMETERS, const INDEX across,
                                                                             const INDEX down) {
    TRANSPOSED
    const INDEX group = get_group_id(0);
#ifdef LINE
    // Consecutive groups process tiles that are consecutive in the transposed operands.
    const INDEX row = group % down * TILE, column = group / down % across * TILE;
#else
    const INDEX column = group % across * ACROSS, row = group / across % down * TILE;
#endif
    POSITIONS(group / across / down)
    const INDEX columns = min((INDEX)ACROSS, COLUMNS - column), rows = min((INDEX)TILE, ROWS - row);
#ifdef LINE
    if (columns == TILE && rows == TILE) {
        #pragma unroll
        for (uint c = 0; c < TILE; c++) { FETCH_LINE }
        for (uint r = 0; r < TILE; r++) { ELEMENT_LINE }
        return;
    }
    for (uint c = 0; c < columns; c++) {
        for (uint r = 0; r < rows; r++) {
            FETCH
        }
    }
    for (uint r = 0; r < rows; r++) {
        for (uint c = 0; c < columns; c++) {
            ELEMENT
        }
    }
#else
    // Each column of a tile has PAD elements of padding, to avoid bank conflicts in local memory.
    #pragma unroll
    for (uint i = get_local_id(0); i < TILE * ACROSS; i += GROUP) {
        const uint c = i / TILE, r = i % TILE;
        if (c < columns && r < rows) {
            FETCH
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    #pragma unroll
    for (uint i = get_local_id(0); i < TILE * ACROSS; i += GROUP) {
        const uint r = i / ACROSS, c = i % ACROSS;
        if (c < columns && r < rows) {
            ELEMENT
        }
    }
#endif
}
#else
__kernel void elementwise(PARAMETERS, const INDEX count) {
#ifdef VEC
    const INDEX e = (INDEX)get_global_id(0) * VEC;
    if (e + VEC <= count) elements(e, ARGUMENTS);
#ifdef TAIL
    else for (INDEX k = e; k < count; k++) element(k, ARGUMENTS);
#endif
#elif defined(DRAWN)
    const INDEX e = (INDEX)get_global_id(0) * DRAWN;
    if (e >= count) return;
    DRAW
    const uint elements = min((INDEX)DRAWN, count - e);
    for (uint k = 0; k < elements; k++) { ELEMENT }
#elif PER_ITEM == 1
    const INDEX e = get_global_id(0);
    if (e < count) element(e, ARGUMENTS);
#else
    const INDEX group = get_local_size(0);
    const INDEX first = (INDEX)get_group_id(0) * group * PER_ITEM + get_local_id(0);
    #pragma unroll
    for (int k = 0; k < PER_ITEM; k++) {
        const INDEX e = first + k * group;
        if (e < count) element(e, ARGUMENTS);
    }
#endif
}
#endif

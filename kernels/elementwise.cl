// Elementwise: `element` (generated before this: loads, the expressions, stores) for every position.
// ARGUMENTS and PARAMETERS name its operands, INDEX is wide enough for `count`, PER_ITEM is 1 on CPUs, where compilers
// vectorise across work-items; GPUs take several, a work-group apart, to have more loads in flight.

__kernel void elementwise(PARAMETERS, const INDEX count) {
#if PER_ITEM == 1
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

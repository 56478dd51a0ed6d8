// The values of arange and linspace. The host defines T (the dtype), PER_ITEM (elements per work-item), and FLOAT if values are computed in double.

#ifdef FLOAT
// Fused multiply-add is off, because the host rounds the product as well.
#pragma OPENCL FP_CONTRACT OFF
typedef double Value;
#define PUT(at, v) CAT(CAT(store_, T), _F64)(y, y_at + (at), v)
#else
typedef ulong Value; // wraps on overflow
#define PUT(at, v) CAT(CAT(store_, T), _I64)(y, y_at + (at), (long)(v))
#endif

// y[i] = start + i * step for i < middle, and end - (count - 1 - i) * step from `middle` on.
__kernel void sequence(__global CAT(T, _t) *y, ulong y_at, ulong count, Value start, Value step, ulong middle, Value end) {
    const ulong group = get_local_size(0), first = (ulong)get_group_id(0) * group * PER_ITEM + get_local_id(0);
    for (uint k = 0; k < PER_ITEM; ++k) {
        const ulong i = first + k * group;
        if (i >= count)
            return;
        const Value up = start + step * (Value)i, down = end - step * (Value)(count - 1 - i);
        PUT(i, i < middle ? up : down);
    }
}

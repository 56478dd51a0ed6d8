// Fills and copies memory. Each work-item handles sixteen bytes.

// Fills `count` units of sixteen bytes with the pattern, from unit `first` on.
__kernel void fill(__global uint4* y, const ulong first, const uint4 pattern, const ulong count)
{
    const ulong i = get_global_id(0);
    if (i < count) y[first + i] = pattern;
}

// Copies `bytes` bytes. Both ranges begin at multiples of sixteen bytes.
__kernel void copy(__global const uint4* x, const ulong x_first, __global uint4* y, const ulong y_first,
                   const ulong bytes)
{
    const ulong i = get_global_id(0), whole = bytes / 16;
    if (i < whole) {
        y[y_first + i] = x[x_first + i];
    } else if (i == whole) {
        const __global uchar* from = (const __global uchar*)(x + x_first);
        __global uchar* to = (__global uchar*)(y + y_first);
        for (ulong k = whole * 16; k < bytes; k++) to[k] = from[k];
    }
}

// Copies contiguous matrices (triu, tril), with zeros where column - row is in from..to. The host defines T (an unsigned type of the
// element's size), VEC (the number of elements in 16 bytes, or 1), IDX, and INT (a signed type with the width of IDX). A work-item
// copies VEC adjacent elements, which may be in several rows. It reads the elements only if at least one is not replaced by zero.

__kernel void triangle(__global const T *x, ulong x_at, __global T *y, ulong y_at, ulong rows_, ulong columns_, long from_,
                       long to_, ulong count_) {
    const IDX rows = (IDX)rows_, columns = (IDX)columns_, count = (IDX)count_, first = (IDX)get_global_id(0) * VEC;
    const INT from = (INT)from_, to = (INT)to_;
    if (first >= count)
        return;
    IDX row = first;
    IDX column = next_index(&row, columns);
    row %= rows;
    uint kept = 0;
    #pragma unroll
    for (uint k = 0; k < VEC; ++k) {
        const INT diagonal = (INT)column - (INT)row;
        kept |= (uint)(diagonal < from || diagonal >= to) << k;
        if (++column == columns) {
            column = 0;
            row = row + 1 == rows ? 0 : row + 1;
        }
    }
    x += x_at + first;
    y += y_at + first;
#if VEC > 1
    if (first + VEC <= count) {
        union {
            T each[VEC];
            uint word[4];
        } v;
        const uint4 all = kept ? *(__global const uint4 *)x : (uint4)(0);
        // Moved word by word, because compilers split moves of vectors of shorter elements in two.
        v.word[0] = all.x;
        v.word[1] = all.y;
        v.word[2] = all.z;
        v.word[3] = all.w;
        #pragma unroll
        for (uint k = 0; k < VEC; ++k)
            v.each[k] = kept >> k & 1 ? v.each[k] : (T)0;
        *(__global uint4 *)y = (uint4)(v.word[0], v.word[1], v.word[2], v.word[3]);
        return;
    }
#endif
    for (uint k = 0; k < VEC && first + k < count; ++k)
        y[k] = kept >> k & 1 ? x[k] : (T)0;
}

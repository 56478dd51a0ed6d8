// Tensor cores by PTX as inline assembly: tiles in local memory are filled by cp.async, fragments of them loaded by ldmatrix and
// multiplied by mma.sync. Comes before the kernels that are made of it; MMA is the type of the matrices, "f16" or "bf16".

#ifdef MMA
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define WAIT_BUT(n) asm volatile("cp.async.wait_group " TEXT(n) ";")

// Where a chunk of 8 elements lies, in bytes: lines longer than 64 elements are folded into slabs of 64.
static inline uint chunk_at(uint line, uint chunk, const uint lines, const uint length)
{
    if (length >= 64) return (chunk / 8 * lines * 8 + line * 8 + (chunk % 8 ^ (line & 7))) * 16;
    return (line * (length / 8) + (chunk ^ (length == 32 ? line >> 1 & 3 : line >> 2 & 1))) * 16;
}

// 16 bytes to local memory, in pieces of `size`.
static inline void copy_whole(uint to, ulong from, const int size)
{
    if (size == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
    } else {
        #pragma unroll
        for (int i = 0; i < 16; i += size) {
            if (size == 8) asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to + i), "l"(from + i));
            else asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + i), "l"(from + i));
        }
    }
}

// The first `bytes` of them, the others 0: three times the instructions, for edges.
static inline void copy_part(uint to, ulong from, const int size, int bytes)
{
    #pragma unroll
    for (int i = 0; i < 16; i += size) {
        const int n = clamp(bytes - i, 0, size);
        if (size == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n));
        else if (size == 8) asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to + i), "l"(from + i), "r"(n));
        else asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + i), "l"(from + i), "r"(n));
    }
}

#define LDMATRIX(suffix, f, from)                                                                                      \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" suffix ".shared.b16 {%0, %1, %2, %3}, [%4];"                          \
                 : "=r"((f)[0]), "=r"((f)[1]), "=r"((f)[2]), "=r"((f)[3])                                              \
                 : "r"(from))

// c += a b. Read-write operands: separate ones would be read before a loop that is unrolled.
static inline void mma(float c[4], const uint a[4], const uint b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA "." MMA ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

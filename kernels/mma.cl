// Tensor core instructions as inline PTX: cp.async fills tiles in local memory, ldmatrix loads fragments, mma.sync multiplies fragments.
// Precedes the kernels that use these instructions. MMA is the type of the matrices: "f16", "bf16" or "tf32". With "tf32", TF32 is
// defined, and elements are f32 whose last 13 bits are ignored. TF32 tiles are described as if each element were two halves, because an
// instruction multiplies 32 bytes of k.

#ifdef MMA
#ifdef TF32
#define MMA_DEPTH "8"
#define WGMMA_TRANSPOSED(transposed) ""
#else
#define MMA_DEPTH "16"
#define WGMMA_TRANSPOSED(transposed) ", " transposed
#endif
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define WAIT_BUT(n) asm volatile("cp.async.wait_group " TEXT(n) ";")

// Returns the swizzled offset, in bytes, of a chunk of 8 halves. Lines of more than 64 halves are cut into slabs of 64 halves.
static inline uint chunk_at(uint line, uint chunk, const uint lines, const uint length)
{
    if (length >= 64) return (chunk / 8 * lines * 8 + line * 8 + (chunk % 8 ^ (line & 7))) * 16;
    return (line * (length / 8) + (chunk ^ (length == 32 ? line >> 1 & 3 : line >> 2 & 1))) * 16;
}

// Copies 16 bytes to local memory, in copies of `size` bytes.
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

// Copies the first `bytes` of 16 bytes in one instruction, and fills the rest with zeros.
static inline void copy_inside(uint to, ulong from, int bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

// Like copy_inside, but `size` bytes at a time. Used only at edges, because it takes three times as many instructions.
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

// c += a b. c is a read-write operand, because separate input operands would be read before an unrolled loop.
static inline void mma(float c[4], const uint a[4], const uint b[2])
{
    asm volatile("mma.sync.aligned.m16n8k" MMA_DEPTH ".row.col.f32." MMA "." MMA ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#ifdef SM_90A
// wgmma: four warps multiply 64 rows by N columns, directly from local memory. The OpenCL compiler targets an architecture without
// this instruction. So the instruction is written in PTX comments ("//@"), which the host uncomments in the compiled PTX.
#define TEN(tens) "%" tens "0, %" tens "1, %" tens "2, %" tens "3, %" tens "4, %" tens "5, %" tens "6, %" tens "7, %" tens "8, %" tens "9, "
#define NAMES_64 TEN("") TEN("1") TEN("2") "%30, %31"
#define NAMES_128 TEN("") TEN("1") TEN("2") TEN("3") TEN("4") TEN("5") "%60, %61, %62, %63"
#define NAMES_256 TEN("") TEN("1") TEN("2") TEN("3") TEN("4") TEN("5") TEN("6") TEN("7") TEN("8") TEN("9") TEN("10") TEN("11") \
    "%120, %121, %122, %123, %124, %125, %126, %127"
#define F4(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define F16(d, j) F4(d, j), F4(d, j + 1), F4(d, j + 2), F4(d, j + 3)
#define F32(d, j) F16(d, j), F16(d, j + 4)
#define F64(d, j) F32(d, j), F32(d, j + 8)
#define REGISTERS_64(d) F32(d, 0)
#define REGISTERS_128(d) F64(d, 0)
#define REGISTERS_256(d) F64(d, 0), F64(d, 16)
// The operands after the accumulators: whether to add to the accumulators, then both matrices as descriptors, or the left matrix in
// registers.
#define ADD_64 "%32"
#define ADD_128 "%64"
#define ADD_256 "%128"
#define DESCRIBED_64 "%33, %34"
#define DESCRIBED_128 "%65, %66"
#define DESCRIBED_256 "%129, %130"
#define WORDS_64 "{%33, %34, %35, %36}, %37"
#define WORDS_128 "{%65, %66, %67, %68}, %69"
#define WGMMA_TEXT(n, matrices, transposed)                                                                            \
    "//@ {\n//@ .reg .pred add;\n//@ setp.ne.b32 add, " CAT(ADD_, n) ", 0;\n"                                          \
    "//@ wgmma.mma_async.sync.aligned.m64n" TEXT(n) "k" MMA_DEPTH ".f32." MMA "." MMA " {" CAT(NAMES_, n) "}, " matrices            \
    ", add, 1, 1" WGMMA_TRANSPOSED(transposed) ";\n//@ }"
// d = a b + (add ? d : 0)
#define WGMMA(n, d, a, b, transposed, add)                                                                             \
    asm volatile(WGMMA_TEXT(n, CAT(DESCRIBED_, n), transposed) : CAT(REGISTERS_, n)(d) : "r"(add), "l"(a), "l"(b))
// d += a b
#define WGMMA_WORDS(n, d, a0, a1, a2, a3, b, transposed)                                                               \
    asm volatile(WGMMA_TEXT(n, CAT(WORDS_, n), transposed)                                                             \
                 : CAT(REGISTERS_, n)(d)                                                                               \
                 : "r"(1), "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b))
#define BEGIN_MULTIPLY asm volatile("//@ wgmma.fence.sync.aligned;")
#define END_MULTIPLY asm volatile("//@ wgmma.commit_group.sync.aligned;")
#define WAIT_MULTIPLIED(n) "//@ wgmma.wait_group.sync.aligned " #n ";"
// Makes writes to local memory visible to wgmma.
#define FENCE_WGMMA asm volatile("fence.proxy.async.shared::cta;")
#endif
#endif

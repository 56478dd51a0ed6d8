// Tests whether the compiler accepts NVIDIA's tensor core instructions, and whether the device computes them correctly: cp.async to the end of LOCAL
// bytes of local memory, and ldmatrix and mma.sync, or with SM_90A wgmma, in f16 and bf16. The kernel runs on four warps.
//
// a: two matrices [64, 16] (one f16, one bf16); b: two matrices [8, 16]; c: two matrices [64, 8], which are a times b transposed.

static inline void multiply(const uint a[4], const uint b[2], float c[4], const bool bf16)
{
#define MMA(T)                                                                                                         \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." T "." T ".f32 "                                              \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                     \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if (bf16) MMA("bf16");
    else MMA("f16");
}

#ifdef SM_90A
static inline void multiply_group(ulong a, ulong b, float c[4], const bool bf16)
{
#define WGMMA(T)                                                                                                       \
    asm volatile("//@ wgmma.fence.sync.aligned;\n"                                                                     \
                 "//@ wgmma.mma_async.sync.aligned.m64n8k16.f32." T "." T " {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;\n" \
                 "//@ wgmma.commit_group.sync.aligned;\n"                                                              \
                 "//@ wgmma.wait_group.sync.aligned 0;"                                                                \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                      \
                 : "l"(a), "l"(b))
    if (bf16) WGMMA("bf16");
    else WGMMA("f16");
}
#endif

// The offset in bytes of the first half (side 0) or the second half (side 1) of a row of 16 elements.
#define HALF_AT(row, side) ((row) * 32 + (((side) ^ ((row) >> 2 & 1)) * 16))

__kernel __attribute__((reqd_work_group_size(128, 1, 1)))
void probe(const __global ushort* a, const __global ushort* b, __global float* c)
{
    __local uint4 shared[LOCAL / 16] __attribute__((aligned(1024)));
    const uint end = (uint)(ulong)shared + LOCAL / 1024 * 1024, t = get_local_id(0), lane = t % 32, m = t / 32 * 16;
    const uint at_a = end - 3072, at_b = end - 1024;
    #pragma unroll
    for (uint bf16 = 0; bf16 < 2; bf16++) {
        const ulong from_a = (ulong)(a + bf16 * 1024 + t * 8), from_b = (ulong)(b + bf16 * 128 + t % 16 * 8);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at_a + HALF_AT(t / 2, t % 2)), "l"(from_a));
        // The first 16 work-items copy one chunk of b each. The other work-items copy nothing and write zeros after b.
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(t < 16 ? at_b + HALF_AT(t / 2, t % 2) : at_b + 512),
                     "l"(from_b), "r"(t < 16 ? 16 : 0));
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 0;");
        float sum[4] = {0, 0, 0, 0};
#ifdef SM_90A
        asm volatile("fence.proxy.async.shared::cta;");
        barrier(CLK_LOCAL_MEM_FENCE);
        const ulong layout_bits = (ulong)1 << 16 | (ulong)(256 >> 4) << 32 | (ulong)3 << 62;
        multiply_group((at_a & 0x3ffff) >> 4 | layout_bits, (at_b & 0x3ffff) >> 4 | layout_bits, sum, bf16);
#else
        barrier(CLK_LOCAL_MEM_FENCE);
        uint fa[4], fb[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fa[0]), "=r"(fa[1]), "=r"(fa[2]), "=r"(fa[3])
                     : "r"(at_a + HALF_AT(m + lane % 16, lane / 16)));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fb[0]), "=r"(fb[1]), "=r"(fb[2]), "=r"(fb[3])
                     : "r"(at_b + HALF_AT(lane % 8, lane / 8 % 2)));
        multiply(fa, fb, sum, bf16);
#endif
        barrier(CLK_LOCAL_MEM_FENCE);
        #pragma unroll
        for (uint r = 0; r < 4; r++) c[bf16 * 512 + (m + lane / 4 + r / 2 * 8) * 8 + lane % 4 * 2 + r % 2] = sum[r];
    }
}

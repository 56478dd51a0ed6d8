// FOLD reduces v over the `lanes` lanes of a row, which are work-items `step` apart; every lane gets the result. First, 256 lanes
// combine the values of the other lanes, then sixteen lanes combine these 256 values, and finally every lane combines these sixteen
// values. The loops are unrolled by hand so that loads overlap, because a macro cannot contain a loop pragma. Every work-item of
// the group must reach FOLD, with lid, lane and scratch[GROUP] in scope; GROUP is at most 1024. FOLD_IN uses another array than
// `scratch`, which no work-item may have read since its last barrier; alternating between two arrays ensures this. On NVIDIA GPUs,
// whole warps of 32 adjacent lanes first exchange values through registers.
#ifndef IS_CPU
#define TAKE(OP, v, scratch, at, i)                                                                                    \
    if ((i) < lanes)                                                                                                   \
        v = OP(v, scratch[(at) + (i) * step]);
#define TAKE_15(OP, v, s, at, from, by)                                                                                \
    TAKE(OP, v, s, at, from + by)                                                                                      \
    TAKE(OP, v, s, at, from + 2 * by) TAKE(OP, v, s, at, from + 3 * by) TAKE(OP, v, s, at, from + 4 * by)              \
    TAKE(OP, v, s, at, from + 5 * by) TAKE(OP, v, s, at, from + 6 * by) TAKE(OP, v, s, at, from + 7 * by)              \
    TAKE(OP, v, s, at, from + 8 * by) TAKE(OP, v, s, at, from + 9 * by) TAKE(OP, v, s, at, from + 10 * by)             \
    TAKE(OP, v, s, at, from + 11 * by) TAKE(OP, v, s, at, from + 12 * by) TAKE(OP, v, s, at, from + 13 * by)           \
    TAKE(OP, v, s, at, from + 14 * by) TAKE(OP, v, s, at, from + 15 * by)
#define FOLD(OP, v)                                                                                                    \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                                      \
    FOLD_IN(OP, v, scratch)
#define FOLD_IN_MEMORY(OP, v, scratch)                                                                                 \
    scratch[lid] = v;                                                                                                  \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                                      \
    if (lanes > 256) {                                                                                                 \
        if (lane < 256) {                                                                                              \
            TAKE(OP, v, scratch, lid, 256) TAKE(OP, v, scratch, lid, 512) TAKE(OP, v, scratch, lid, 768)               \
            scratch[lid] = v;                                                                                          \
        }                                                                                                              \
        barrier(CLK_LOCAL_MEM_FENCE);                                                                                  \
    }                                                                                                                  \
    if (lanes > 16) {                                                                                                  \
        if (lane < 16) {                                                                                               \
            TAKE_15(OP, v, scratch, lid, 0, 16)                                                                        \
            scratch[lid] = v;                                                                                          \
        }                                                                                                              \
        barrier(CLK_LOCAL_MEM_FENCE);                                                                                  \
    }                                                                                                                  \
    v = scratch[lid - lane * step];                                                                                    \
    TAKE_15(OP, v, scratch, lid - lane * step, 0, 1)
#ifdef __NV_CL_C_VERSION
// Returns the value that v has in the lane of this warp whose number is this lane's number XOR `mask`.
#define EXCHANGE static inline __attribute__((overloadable))
EXCHANGE uint exchange(uint v, uint mask) {
    uint other;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(other) : "r"(v), "r"(mask));
    return other;
}
EXCHANGE int exchange(int v, uint mask) { return as_int(exchange(as_uint(v), mask)); }
EXCHANGE float exchange(float v, uint mask) { return as_float(exchange(as_uint(v), mask)); }
EXCHANGE float2 exchange(float2 v, uint mask) { return (float2)(exchange(v.x, mask), exchange(v.y, mask)); }
EXCHANGE ulong exchange(ulong v, uint mask) { return as_ulong(exchange(as_float2(v), mask)); }
EXCHANGE long exchange(long v, uint mask) { return as_long(exchange(as_float2(v), mask)); }
#ifdef cl_khr_fp64
EXCHANGE double exchange(double v, uint mask) { return as_double(exchange(as_float2(v), mask)); }
EXCHANGE double2 exchange(double2 v, uint mask) { return (double2)(exchange(v.x, mask), exchange(v.y, mask)); }
#endif
#define TAKE_EXCHANGED(OP, v, mask)                                                                                    \
    {                                                                                                                  \
        const __typeof__(v) other = exchange(v, mask);                                                                 \
        v = OP(v, other);                                                                                              \
    }
#define FOLD_IN(OP, v, scratch)                                                                                        \
    if (step == 1 && lanes % 32 == 0) {                                                                                \
        TAKE_EXCHANGED(OP, v, 1u) TAKE_EXCHANGED(OP, v, 2u) TAKE_EXCHANGED(OP, v, 4u) TAKE_EXCHANGED(OP, v, 8u)        \
        TAKE_EXCHANGED(OP, v, 16u)                                                                                     \
        if (lanes > 32) {                                                                                              \
            if (lid % 32 == 0)                                                                                         \
                scratch[lid] = v;                                                                                      \
            barrier(CLK_LOCAL_MEM_FENCE);                                                                              \
            v = scratch[lid - lane];                                                                                   \
            TAKE_15(OP, v, scratch, lid - lane, 0, 32)                                                                 \
            if (lanes > 512) {                                                                                         \
                TAKE(OP, v, scratch, lid - lane, 512)                                                                  \
                TAKE_15(OP, v, scratch, lid - lane, 512, 32)                                                           \
            }                                                                                                          \
        }                                                                                                              \
    } else {                                                                                                           \
        FOLD_IN_MEMORY(OP, v, scratch)                                                                                 \
    }
#else
#define FOLD_IN(OP, v, scratch) FOLD_IN_MEMORY(OP, v, scratch)
#endif
#endif

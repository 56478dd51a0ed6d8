// The first part of every kernel's source: storage types, conversions, primitives of formulas, and random numbers. The host defines
// HAS_F64 if the device computes in double.

#ifdef HAS_F64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif
#pragma OPENCL FP_CONTRACT OFF

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)

// A fence for global memory between the work-groups of a launch. OpenCL 1.2 has no such fence, but compilers that accept NVIDIA's PTX do, and so do CPU
// compilers with BUILTIN_FENCE. If only the last group continues after a barrier, a kernel must end with another barrier: between the last barrier and
// the end, PoCL's compiler makes all work-items take the branch that the first work-item takes.
#ifdef BUILTIN_FENCE
#define FENCE __sync_synchronize()
#else
#define FENCE asm volatile("fence.acq_rel.gpu;" ::: "memory")
#endif

// Records an error that the host reads at its next wait: {code, low half of the index, high half of the index, size of the
// dimension}. The host defines the codes as FAULT_... Only the first error is kept.
static inline void fault_record(volatile __global int* fault, int code, long index, ulong size)
{
    if (atomic_cmpxchg(fault, 0, code) == 0) {
        fault[1] = (int)(index & 0xffffffffL);
        fault[2] = (int)(index >> 32);
        fault[3] = (int)min(size, (ulong)0x7fffffff);
    }
}

// ---- storage types: f16 and bf16 are stored as bits, bool as a byte of 0 or 1 ----

typedef float f32_t;
typedef ushort f16_t;
typedef ushort bf16_t;
typedef long i64_t;
typedef int i32_t;
typedef uchar u8_t;
typedef uint u32_t;
typedef uchar bool_t;
typedef char i8_t;
typedef short i16_t;

// Rounds to nearest, ties to even. A NaN stays a NaN, although its payload is truncated.
static inline ushort bf16_from_float(float v)
{
    uint u = as_uint(v);
    return v != v ? (ushort)((u >> 16) | 0x40) : (ushort)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// Core OpenCL converts halves only in memory. Here the memory is private, so compilers keep the value in registers.
static inline ushort f16_from_float(float v)
{
    ushort bits;
    vstore_half_rte(v, 0, (half*)&bits);
    return bits;
}

// Saturates, rounds towards zero, and returns 0 for NaN.
static inline long long_from_float(float v)
{
    return v != v ? 0 : v >= 9223372036854775808.0f ? LONG_MAX : v <= -9223372036854775808.0f ? LONG_MIN : (long)v;
}

// from_T returns the value of stored bits of dtype T, in the compute type.
static inline float from_f32(f32_t x) { return x; }
static inline float from_f16(f16_t x) { return vload_half(0, (const half*)&x); }
static inline float from_bf16(bf16_t x) { return as_float((uint)x << 16); }
static inline long from_i64(i64_t x) { return x; }
static inline long from_i32(i32_t x) { return x; }
static inline long from_i16(i16_t x) { return x; }
static inline long from_i8(i8_t x) { return x; }
static inline long from_u8(u8_t x) { return x; }
static inline long from_u32(u32_t x) { return x; }
static inline long from_bool(bool_t x) { return x != 0; }

// to_T_C returns the bits of dtype T for a value computed in C. f64 is converted to f16 and bf16 through f32, as on the CPU.
#define BITS_OF_FLOAT(C, T, TO_LONG)                                                                                 \
    static inline f32_t to_f32_##C(T v) { return (float)v; }                                                         \
    static inline f16_t to_f16_##C(T v) { return f16_from_float((float)v); }                                         \
    static inline bf16_t to_bf16_##C(T v) { return bf16_from_float((float)v); }                                      \
    static inline i64_t to_i64_##C(T v) { return TO_LONG(v); }                                                       \
    static inline i32_t to_i32_##C(T v) { return (int)clamp(TO_LONG(v), (long)INT_MIN, (long)INT_MAX); }             \
    static inline i16_t to_i16_##C(T v) { return (short)clamp(TO_LONG(v), (long)SHRT_MIN, (long)SHRT_MAX); }         \
    static inline i8_t to_i8_##C(T v) { return (char)clamp(TO_LONG(v), (long)SCHAR_MIN, (long)SCHAR_MAX); }          \
    static inline u8_t to_u8_##C(T v) { return (uchar)clamp(TO_LONG(v), 0L, (long)UCHAR_MAX); }                      \
    static inline u32_t to_u32_##C(T v) { return (uint)clamp(TO_LONG(v), 0L, (long)UINT_MAX); }                      \
    static inline bool_t to_bool_##C(T v) { return v != 0; }

BITS_OF_FLOAT(F32, float, long_from_float)

static inline f32_t to_f32_I64(long v) { return (float)v; }
static inline f16_t to_f16_I64(long v) { return f16_from_float((float)v); }
static inline bf16_t to_bf16_I64(long v) { return bf16_from_float((float)v); }
static inline i64_t to_i64_I64(long v) { return v; }
static inline i32_t to_i32_I64(long v) { return (int)v; }
static inline i16_t to_i16_I64(long v) { return (short)v; }
static inline i8_t to_i8_I64(long v) { return (char)v; }
static inline u8_t to_u8_I64(long v) { return (uchar)v; }
static inline u32_t to_u32_I64(long v) { return (uint)v; }
static inline bool_t to_bool_I64(long v) { return v != 0; }

// load_T and store_T_C do the same conversions from and to memory.
#define LOAD_OF(D, T) static inline T load_##D(const __global D##_t* p, ulong i) { return from_##D(p[i]); }
#define STORE_OF(D, C, T) static inline void store_##D##_##C(__global D##_t* p, ulong i, T v) { p[i] = to_##D##_##C(v); }
#define STORES_OF(C, T)                                                                                              \
    STORE_OF(f32, C, T)                                                                                              \
    STORE_OF(bf16, C, T)                                                                                             \
    STORE_OF(i64, C, T)                                                                                              \
    STORE_OF(i32, C, T)                                                                                              \
    STORE_OF(i16, C, T)                                                                                              \
    STORE_OF(i8, C, T)                                                                                               \
    STORE_OF(u8, C, T)                                                                                               \
    STORE_OF(u32, C, T)                                                                                              \
    STORE_OF(bool, C, T)                                                                                             \
    static inline void store_f16_##C(__global f16_t* p, ulong i, T v) { vstore_half_rte((float)v, i, (__global half*)p); }

LOAD_OF(f32, float)
#if defined(IS_CPU) && defined(__F16C__)
// This takes one instruction; PoCL's vload_half of a single element calls a subroutine.
static inline float load_f16(const __global f16_t* p, ulong i) { return __builtin_load_halff((const __global half*)p + i); }
#else
static inline float load_f16(const __global f16_t* p, ulong i) { return vload_half(i, (const __global half*)p); }
#endif
LOAD_OF(bf16, float)
LOAD_OF(i64, long)
LOAD_OF(i32, long)
LOAD_OF(i16, long)
LOAD_OF(i8, long)
LOAD_OF(u8, long)
LOAD_OF(u32, long)
LOAD_OF(bool, long)
STORES_OF(F32, float)
STORES_OF(I64, long)

#ifdef HAS_F64
typedef double f64_t;

static inline long long_from_double(double v)
{
    return v != v ? 0 : v >= 9223372036854775808.0 ? LONG_MAX : v <= -9223372036854775808.0 ? LONG_MIN : (long)v;
}

static inline double from_f64(f64_t x) { return x; }
BITS_OF_FLOAT(F64, double, long_from_double)
static inline f64_t to_f64_F32(float v) { return v; }
static inline f64_t to_f64_F64(double v) { return v; }
static inline f64_t to_f64_I64(long v) { return (double)v; }
LOAD_OF(f64, double)
STORES_OF(F64, double)
STORE_OF(f64, F32, float)
STORE_OF(f64, F64, double)
STORE_OF(f64, I64, long)
#endif

// ---- primitives that are not built into OpenCL C ----

#define FLOAT_PRIMITIVES(T)                                                                                          \
    static inline T max_##T(T a, T b) { return a > b || a != a ? a : b; }                                            \
    static inline T min_##T(T a, T b) { return a < b || a != a ? a : b; }                                            \
    static inline T sigmoid_##T(T x)                                                                                 \
    {                                                                                                                \
        T e = exp(-fabs(x));                                                                                         \
        return (x < 0 ? e : (T)1) / (1 + e);                                                                         \
    }

FLOAT_PRIMITIVES(float)
#ifdef HAS_F64
FLOAT_PRIMITIVES(double)
#endif

// Integers wrap around. The arithmetic is unsigned, because signed overflow is undefined.
static inline long max_long(long a, long b) { return a > b ? a : b; }
static inline long min_long(long a, long b) { return a < b ? a : b; }
static inline long neg_long(long x) { return (long)(0UL - (ulong)x); }
static inline long abs_long(long x) { return x < 0 ? neg_long(x) : x; }
static inline long add_long(long a, long b) { return (long)((ulong)a + (ulong)b); }
static inline long sub_long(long a, long b) { return (long)((ulong)a - (ulong)b); }
static inline long mul_long(long a, long b) { return (long)((ulong)a * (ulong)b); }

static inline long div_long(long a, long b, __global int* fault)
{
    if (b == 0) fault_record(fault, FAULT_DIVISION, 0, 0);
    return b == 0 ? 0 : b == -1 ? neg_long(a) : a / b;
}

static inline long rem_long(long a, long b, __global int* fault)
{
    if (b == 0) fault_record(fault, FAULT_DIVISION, 0, 0);
    return b == 0 || b == -1 ? 0 : a % b;
}

static inline long shl_long(long a, long b) { return b < 0 || b > 63 ? 0 : (long)((ulong)a << b); }
static inline long shr_long(long a, long b) { return a >> (b < 0 || b > 63 ? 63 : b); }

static inline long gcd_long(long a, long b)
{
    ulong x = (ulong)abs_long(a), y = (ulong)abs_long(b);
    while (y > 0) {
        ulong rest = x % y;
        x = y;
        y = rest;
    }
    return (long)x;
}

// Computes powers by squaring. For a negative exponent, the result is 0 unless the base is 1 or -1.
static inline long pow_long(long a, long b)
{
    if (b < 0) return a == 1 ? 1 : a == -1 ? 1 - 2 * (b & 1) : 0;
    ulong base = (ulong)a, power = 1;
    for (; b > 0; b >>= 1) {
        if (b & 1) power *= base;
        base *= base;
    }
    return (long)power;
}

// ---- random numbers, with exactly the bits of expr/philox.rs ----

static inline uint4 philox_block(ulong key, ulong stream, ulong block)
{
    uint4 x = (uint4)((uint)block, (uint)(block >> 32), (uint)stream, (uint)(stream >> 32));
    uint k0 = (uint)key, k1 = (uint)(key >> 32);
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        uint a_lo = 0xD2511F53u * x.x, a_hi = mul_hi(0xD2511F53u, x.x);
        uint b_lo = 0xCD9E8D57u * x.z, b_hi = mul_hi(0xCD9E8D57u, x.z);
        x = (uint4)(b_hi ^ x.y ^ k0, b_lo, a_hi ^ x.w ^ k1, a_lo);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return x;
}

static inline uint random_bits(ulong key, ulong stream, ulong index)
{
    uint4 x = philox_block(key, stream, index >> 2);
    uint2 pair = index & 2 ? x.zw : x.xy;
    return index & 1 ? pair.y : pair.x;
}

static inline float random_uniform(ulong key, ulong stream, ulong index)
{
    return (float)(random_bits(key, stream, index) >> 8) * (1.0f / 16777216.0f);
}

// Uses only additions, subtractions and multiplications in a fixed order, so that all devices compute the same bits.
static inline float random_normal(ulong key, ulong stream, ulong index)
{
    uint4 words = philox_block(key, stream, index >> 2);
    uint2 pair = index & 2 ? words.zw : words.xy;

    // t = -2 ln(u)
    uint bits = as_uint((float)((pair.x >> 8) + 1u)) - 0x3F400000u;
    float e = (float)(bits >> 23);
    float z = as_float((bits & 0x007FFFFFu) + 0x3F400000u) - 1.0f;
    float p = 0x1.340c12p-5f;
    p = (p * z - 0x1.74feecp-4f) * z + 0x1.df1c26p-4f;
    p = (p * z - 0x1.04adap-3f) * z + 0x1.24639p-3f;
    p = (p * z - 0x1.5519d2p-3f) * z + 0x1.999764p-3f;
    p = (p * z - 0x1.00006ep-2f) * z + 0x1.55555ap-2f;
    float ln = z + (z * z * z * p - 0.5f * z * z);
    float t = -2.0f * (ln + (e - 24.0f) * 0x1.62e43p-1f);

    // r = sqrt(t)
    float y = as_float(0x5F3759DFu - (as_uint(t) >> 1));
    float half_t = 0.5f * t;
    for (int i = 0; i < 3; i++) y = y * (1.5f - half_t * y * y);
    float r = t * y;

    // cosine for the even element of a pair, sine for the odd element
    uint n = pair.y >> 8;
    uint quarter = (n + 0x00200000u) >> 22;
    float x = (float)(int)(n - (quarter << 22)) * 0x1.921fb6p-22f;
    float w = x * x;
    float s = x * w * ((-0x1.9951fap-13f * w + 0x1.110774p-7f) * w - 0x1.555546p-3f) + x;
    float c = w * w * ((0x1.99e816p-16f * w - 0x1.6c0c28p-10f) * w + 0x1.55554ap-5f) - 0.5f * w + 1.0f;
    uint odd = (uint)index & 1u;
    float v = ((quarter + odd) & 1u) ? s : c;
    uint negative = odd ? quarter & 2u : (quarter + 1u) & 2u;
    return r * (negative ? -v : v);
}

// Declarations of the built-in functions that the other files call, as in clang's header. That header has 18,000 lines, and PoCL includes it twice in
// every program unless its include guard _OPENCL_H_ is defined. The crate therefore defines the guard and prepends this file to its source. A call of a
// function that is not declared here is a build error; the program is then built again with clang's header.

#ifdef cl_khr_fp64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#define IF_DOUBLE(x) x
#else
#define IF_DOUBLE(x)
#endif

#define FUNCTION __attribute__((overloadable))
#define PURE __attribute__((overloadable, pure))
#define CONST __attribute__((overloadable, const))

size_t CONST get_global_id(uint d);
size_t CONST get_global_size(uint d);
size_t CONST get_local_id(uint d);
size_t CONST get_local_size(uint d);
size_t CONST get_group_id(uint d);
size_t CONST get_num_groups(uint d);

void FUNCTION __attribute__((convergent)) barrier(cl_mem_fence_flags flags);

#define INTEGERS_OF(T) T CONST min(T a, T b); T CONST max(T a, T b); T CONST clamp(T x, T low, T high);
INTEGERS_OF(int) INTEGERS_OF(uint) INTEGERS_OF(long) INTEGERS_OF(ulong) INTEGERS_OF(uint16) INTEGERS_OF(ulong16)
int CONST any(int16 x);
int CONST any(long16 x);
uint CONST mul_hi(uint a, uint b);
uint CONST popcount(uint x);
int4 CONST select(int4 a, int4 b, int4 c);
float4 CONST select(float4 a, float4 b, int4 c);
float16 CONST select(float16 a, float16 b, int16 c);

#define ATOMICS_OF(SPACE, T)                                                                                           \
    T FUNCTION atomic_add(volatile SPACE T *p, T v);                                                                   \
    T FUNCTION atomic_inc(volatile SPACE T *p);                                                                        \
    T FUNCTION atomic_max(volatile SPACE T *p, T v);                                                                   \
    T FUNCTION atomic_cmpxchg(volatile SPACE T *p, T old, T v);
ATOMICS_OF(__global, int) ATOMICS_OF(__global, uint) ATOMICS_OF(__local, int) ATOMICS_OF(__local, uint)

// Functions that take scalars or vectors.
#define FLOATS_OF(T, I)                                                                                                \
    T CONST exp(T x); T CONST log(T x); T CONST sqrt(T x); T CONST fabs(T x); T CONST fma(T a, T b, T c);              \
    T CONST fmax(T a, T b); T CONST fmin(T a, T b); T CONST min(T a, T b); T CONST max(T a, T b); I CONST isinf(T x);
FLOATS_OF(float, int) FLOATS_OF(float2, int2) FLOATS_OF(float4, int4) FLOATS_OF(float8, int8) FLOATS_OF(float16, int16)
IF_DOUBLE(FLOATS_OF(double, int) FLOATS_OF(double2, long2) FLOATS_OF(double4, long4) FLOATS_OF(double8, long8))
IF_DOUBLE(FLOATS_OF(double16, long16))

#define FLOAT_OF(T)                                                                                                    \
    T CONST log2(T x); T CONST log10(T x); T CONST log1p(T x); T CONST expm1(T x); T CONST sin(T x); T CONST cos(T x); \
    T CONST tanh(T x); T CONST atan(T x); T CONST erf(T x); T CONST erfc(T x); T CONST lgamma(T x);                    \
    T CONST floor(T x); T CONST ceil(T x); T CONST rint(T x); T CONST trunc(T x); T CONST clamp(T x, T low, T high);   \
    T CONST fmod(T a, T b); T CONST pow(T a, T b); T CONST copysign(T a, T b);
FLOAT_OF(float)
IF_DOUBLE(FLOAT_OF(double))

uint16 CONST convert_uint16(ushort16 x);
uint16 CONST convert_uint16(long16 x);
uint16 CONST convert_uint16(ulong16 x);
ulong16 CONST convert_ulong16(uint16 x);
float16 CONST convert_float16(int16 x);
float16 CONST convert_float16(uint16 x);
ushort16 CONST convert_ushort16(uint16 x);
#define TO_LONG16(T) long16 CONST convert_long16(T x);
TO_LONG16(char16) TO_LONG16(uchar16) TO_LONG16(short16) TO_LONG16(int16) TO_LONG16(uint16) TO_LONG16(long16)

#define VECTORS_IN(SPACE, T, N)                                                                                        \
    T##N PURE vload##N(size_t i, const SPACE T *p);                                                                    \
    void FUNCTION vstore##N(T##N v, size_t i, SPACE T *p);
#define VECTORS_OF(T, N) VECTORS_IN(__global, T, N) VECTORS_IN(__local, T, N) VECTORS_IN(__private, T, N)
#define VECTORS(T) VECTORS_OF(T, 4) VECTORS_OF(T, 8) VECTORS_OF(T, 16)
VECTORS(char) VECTORS(uchar) VECTORS(short) VECTORS(ushort) VECTORS(int) VECTORS(uint) VECTORS(long) VECTORS(ulong)
VECTORS(float)
IF_DOUBLE(VECTORS(double) VECTORS_OF(double, 2))

#define HALVES_IN(SPACE)                                                                                               \
    float PURE vload_half(size_t i, const SPACE half *p);                                                              \
    float16 PURE vload_half16(size_t i, const SPACE half *p);                                                          \
    void FUNCTION vstore_half_rte(float v, size_t i, SPACE half *p);                                                   \
    void FUNCTION vstore_half16_rte(float16 v, size_t i, SPACE half *p);
HALVES_IN(__global) HALVES_IN(__private)

#ifdef __IMAGE_SUPPORT__
float4 PURE read_imagef(read_only image2d_t image, sampler_t sampler, int2 at);
void FUNCTION write_imagef(write_only image2d_t image, int2 at, float4 color);
#endif

#line 1

// Unsigned sort keys with the same order as the elements. Precedes sort.cl and select.cl. -0 equals 0, and NaN is greater than
// every number. The host defines KEY_F32, KEY_F64, KEY_I64 or KEY_I32 (the type in which A is computed; I32 for integers of at most
// four bytes), and LOWEST, the smallest of these integers as a uint. KEY_OF needs a variable `flip`: all bits set for descending
// order, otherwise 0. On CPUs, KEY16_OF computes the keys of sixteen elements.

#ifdef KEY_F32
typedef uint Key;
static inline Key ascending(float v) {
    const uint u = as_uint(v + 0.0f); // -0 becomes 0
    return v != v ? UINT_MAX : u ^ ((uint)(as_int(u) >> 31) | 0x80000000u);
}
#define KEY_T uint
#ifdef IS_CPU
static inline uint16 ascending16(float16 v) {
    const uint16 u = as_uint16(v + 0.0f);
    const uint16 all = as_uint16(as_int16(u) >> 31);
    return (u ^ (all | 0x80000000u)) | as_uint16(v != v);
}
#endif
#elif defined(KEY_F64)
typedef ulong Key;
static inline Key ascending(double v) {
    const ulong u = as_ulong(v + 0.0);
    return v != v ? ULONG_MAX : u ^ ((ulong)(as_long(u) >> 63) | 0x8000000000000000UL);
}
#define KEY_T ulong
#ifdef IS_CPU
static inline ulong16 ascending16(double16 v) {
    const ulong16 u = as_ulong16(v + 0.0);
    const ulong16 all = as_ulong16(as_long16(u) >> 63);
    return (u ^ (all | 0x8000000000000000UL)) | as_ulong16(v != v);
}
#endif
#elif defined(KEY_I64)
typedef ulong Key;
static inline Key ascending(long v) { return (ulong)v ^ 0x8000000000000000UL; }
#define KEY_T ulong
#ifdef IS_CPU
static inline ulong16 ascending16(long16 v) { return as_ulong16(v) ^ 0x8000000000000000UL; }
#endif
#else
typedef uint Key;
static inline Key ascending(long v) { return (uint)v - LOWEST; }
#define KEY_T uint
#ifdef IS_CPU
static inline uint16 ascending16(long16 v) { return convert_uint16(v) - LOWEST; }
#endif
#endif
#define KEY_OF(v) (ascending(v) ^ flip)
#define KEY16_OF(v) (ascending16(v) ^ flip)

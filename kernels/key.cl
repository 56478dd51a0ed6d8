// Comes before sort.cl and select.cl: unsigned keys that order as the elements do. -0 and 0 are equal, NaN is above everything.
// The host gives KEY_F32, KEY_F64, KEY_I64 or KEY_I32 (the type that A computes in; I32 for integers of at most four bytes), LOWEST
// (the smallest of these integers, as uint) and DESCENDING.

#ifdef KEY_F32
typedef uint Key;
static inline Key ascending(float v) {
    const uint u = as_uint(v == 0 ? 0.0f : v);
    return v != v ? UINT_MAX : u >> 31 ? ~u : u | 0x80000000u;
}
#elif defined(KEY_F64)
typedef ulong Key;
static inline Key ascending(double v) {
    const ulong u = as_ulong(v == 0 ? 0.0 : v);
    return v != v ? ULONG_MAX : u >> 63 ? ~u : u | 0x8000000000000000UL;
}
#elif defined(KEY_I64)
typedef ulong Key;
static inline Key ascending(long v) { return (ulong)v ^ 0x8000000000000000UL; }
#else
typedef uint Key;
static inline Key ascending(long v) { return (uint)v - LOWEST; }
#endif
#ifdef DESCENDING
#define KEY_OF(v) (~ascending(v))
#else
#define KEY_OF(v) ascending(v)
#endif

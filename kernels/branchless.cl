// pow and log1p of floats without branches, so that CPU compilers vectorise calls across work-items. Compared with f64, errors are
// below one unit in the last place. NaN, infinities and signed zeros follow C99.

#define HORNER_4(x, a, b, c, d) ((((d) * (x) + (c)) * (x) + (b)) * (x) + (a))

// Returns a to the power of b, as exp2(b log2(a)) computed in double.
static inline float branchless_pow(float a, float b) {
    const double round = 6755399441055744.0; // 1.5 * 2^52: after this is added to a number, the low bits are the rounded integer
    const float magnitude = fabs(a);
    // magnitude = 2^e m with m in [0.75, 1.5), and log(m) = 2 atanh(s) with s = (m - 1) / (m + 1)
    const ulong bits = as_ulong((double)magnitude) - 0x3FE8000000000000UL;
    const double e = (double)((int)(bits >> 32) >> 20);
    const double m = as_double((bits & 0x000FFFFFFFFFFFFFUL) + 0x3FE8000000000000UL);
    const double s = (m - 1) / (m + 1), z = s * s;
    const double high = HORNER_4(z, 1.0 / 9, 1.0 / 11, 1.0 / 13, 1.0 / 15);
    double log2_a = e + 2.8853900817779268 * s * HORNER_4(z, 1.0, 1.0 / 3, 1.0 / 5, 1.0 / 7 + z * high);
    log2_a = magnitude == 0 ? -(double)INFINITY : log2_a;
    log2_a = magnitude < INFINITY ? log2_a : (double)magnitude;
    double t = (double)b * log2_a;
    t = t < -200 ? -200 : t;
    t = t > 200 ? 200 : t;
    const double shifted = t + round, r = (t - (shifted - round)) * 0.6931471805599453;
    const double scale = as_double((as_ulong(shifted) - as_ulong(round) + 1023) << 52);
    const double upper = HORNER_4(r, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880);
    const double middle = 1.0 / 6 + r * (1.0 / 24 + r * (1.0 / 120 + r * upper));
    float y = (float)(HORNER_4(r, 1.0, 1.0, 0.5, middle) * scale);
    const bool integer = trunc(b) == b, odd = integer & (trunc(b * 0.5f) * 2 != b);
    y = ((as_uint(a) >> 31 != 0) & odd) ? -y : y;
    y = ((a < 0) & !integer & (magnitude < INFINITY)) ? NAN : y;
    return ((a == 1) | (b == 0) | ((magnitude == 1) & (fabs(b) == INFINITY))) ? 1 : y;
}

// Returns log(1 + x). u = 1 + x is 2^e (1 + z), with 1 + z in [3/4, 3/2).
static inline float branchless_log1p(float x) {
    const float u = 1 + x;
    const float lost = x > 1 ? 1 - (u - x) : x - (u - 1); // the rounding error of the addition
    const int bits = as_int(u) - 0x3F400000;
    const float e = (float)(bits >> 23);
    const float z = as_float((bits & 0x007FFFFF) + 0x3F400000) - 1;
    const float high = HORNER_4(z, -0.127284288f, 0.116970204f, -0.0910634249f, 0.0376034113f);
    const float middle = -0.166553155f + z * (0.142768025f + z * high);
    const float tail = z * z * z * HORNER_4(z, 0.333333403f, -0.250001639f, 0.199995786f, middle);
    // ln 2 is split into two parts. The first part has 16 bits, so its product with e is exact.
    float y = e * 0.69314575f + (z + (tail - 0.5f * z * z + (e * 1.4286068e-6f + lost / u)));
    y = fabs(x) < 1e-7f ? x : y;
    y = x == -1 ? -INFINITY : y;
    y = x < -1 ? NAN : y;
    return x < INFINITY ? y : x;
}
#define pow branchless_pow
#define log1p branchless_log1p

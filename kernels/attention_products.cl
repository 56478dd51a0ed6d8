// Matrix products of tiles in local memory, for attention on tensor cores. Follows attention.cl and mma.cl, precedes attention_mma.cl.
// Each of WARPS warps has MT x 16 rows of the group's own tile and multiplies them by tiles of OTHER rows. Elements have SIZE bytes: 2
// (f16 or bf16) or 4 (f32). Tiles have lines of DK or DV elements (32 or a multiple of 64), stored in chunks of 16 bytes.
//
// Accumulators: of each 16 x 8 fragment, lane l has rows l / 4 and l / 4 + 8, and columns l % 4 * 2 and l % 4 * 2 + 1.

#define THREADS (32 * WARPS)
#define OWN (WARPS * MT * 16)
#define NT (OTHER / 8)
#define BYTES(lines, length) ((lines) * (length) * SIZE)
#define CHUNK (16 / SIZE)
#define CHUNK_AT(line, chunk, lines, length) chunk_at(line, chunk, lines, (length) * SIZE / 2)

#define EACH(x, n) _Pragma("unroll") for (uint x = 0; x < n; ++x)
#define CLEAR(sum, columns) EACH(i, MT) EACH(c, (columns) / 8) EACH(r, 4) sum[i][c][r] = 0
// The row (of 16) and the column (of 8) that register r of an accumulator fragment holds.
#define ROW_OF(r) ((r) / 2 * 8 + lane / 4)
#define COLUMN_OF(r) (lane % 4 * 2 + (r) % 2)

// MULTIPLY: s = own other^T, for the warp's rows of the tile at `own` and all lines of the tile at `other`, both of `length` elements.
// ADD_PRODUCT: sum += weights other, where `weights` has rows of OTHER elements, and the tile at `other` has lines of `length`
// elements. After DONE, the sums are complete and local memory may be overwritten. WEIGHTS declares a variable for weights. SET_WEIGHTS
// sets the lane's weights of row 16 i + 8 h, in its two columns of fragment c, to x and y.
#if SIZE == 4
#define WEIGHTS(weights) float weights[MT][NT][4]
#define SET_WEIGHTS(weights, i, c, h, x, y) weights[i][c][2 * (h)] = x, weights[i][c][2 * (h) + 1] = y
#define DONE(n, sum)
#define FENCE_WGMMA

// f32 on tensor cores: each x is split into a + b, where a is the closest number with 11 bits and b is the remainder. A product is
// the sum of three products; the product of both remainders is omitted. Errors are as small as in f32: 11 bits of a remainder leave
// 2^-23 of x, and sums of 16 products are added up outside the tensor cores, because tensor cores truncate. Infinities give NaN: if
// a result is not finite, all results are computed again in f32, with `exact` true.
INLINE void cut(const uint x[4], uint a[4], uint b[4])
{
    EACH(r, 4) {
        a[r] = (x[r] + 0x1000) & 0xffffe000;
        b[r] = as_uint(as_float(x[r]) - as_float(a[r]));
    }
}
INLINE void mma_tf32(float c[4], const uint a[4], const uint b0, const uint b1)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// part[i][c] += products over 8 of k, for N fragments of columns, the smallest products first. a and b are the split operands. B(x, c,
// e) is register e of fragment c of x, one of the two terms of b.
#define ADD_EIGHT(part, N, a, b, B)                                                                                               \
    EACH(i, MT) EACH(c, N) mma_tf32(part[i][c], a##_rest[i], B(b, c, 0), B(b, c, 1));                                              \
    EACH(i, MT) EACH(c, N) mma_tf32(part[i][c], a[i], B(b##_rest, c, 0), B(b##_rest, c, 1));                                       \
    EACH(i, MT) EACH(c, N) mma_tf32(part[i][c], a[i], B(b, c, 0), B(b, c, 1));

#define LOCAL_WORDS(type, at) (*(const __local type *)((const __local uchar *)shared + ((at) - (uint)(ulong)shared)))
#define WORD(tile, line, d, lines, length) LOCAL_WORDS(float, (tile) + CHUNK_AT(line, (d) / 4, lines, length) + (d) % 4 * 4)
#define OF_LINES(b, c, e) b[(c) / 2][(c) % 2 * 2 + (e)]
#define MULTIPLY(s, own, other, length)                                                                                           \
    CLEAR(s, OTHER);                                                                                                              \
    if (exact) {                                                                                                                  \
        _Pragma("unroll 1") for (uint d = 0; d < (length); ++d)                                                                   \
            EACH(i, MT) EACH(c, NT) EACH(r, 4)                                                                                    \
                s[i][c][r] = fma(WORD(own, m + 16 * i + ROW_OF(r), d, OWN, length),                                               \
                                 WORD(other, 8 * c + COLUMN_OF(r), d, OTHER, length), s[i][c][r]);                                \
    } else {                                                                                                                      \
        _Pragma("unroll 1") for (uint d = 0; d < (length) / 4; d += 4) {                                                          \
            float part[MT][NT][4];                                                                                                \
            EACH(i, MT) EACH(c, NT) EACH(r, 4) part[i][c][r] = 0;                                                                 \
            EACH(k, 2) {                                                                                                          \
                uint x[4], a[MT][4], a_rest[MT][4], b[NT / 2][4], b_rest[NT / 2][4];                                              \
                EACH(i, MT) {                                                                                                     \
                    LDMATRIX("", x, (own) + CHUNK_AT(m + 16 * i + lane % 16, d + 2 * k + lane / 16, OWN, length));                \
                    cut(x, a[i], a_rest[i]);                                                                                      \
                }                                                                                                                 \
                EACH(n, NT / 2) {                                                                                                 \
                    LDMATRIX("", x, (other) + CHUNK_AT(16 * n + lane % 8 + lane / 16 * 8, d + 2 * k + lane / 8 % 2, OTHER, length)); \
                    cut(x, b[n], b_rest[n]);                                                                                      \
                }                                                                                                                 \
                ADD_EIGHT(part, NT, a, b, OF_LINES)                                                                               \
            }                                                                                                                     \
            EACH(i, MT) EACH(c, NT) EACH(r, 4) s[i][c][r] += part[i][c][r];                                                       \
        }                                                                                                                         \
    }

// The 32 columns of four fragments are interleaved: with one load, a lane loads a column of each fragment. These are four adjacent
// columns of the sum.
#define COLUMN_OF_SUM(c, r) ((c) / 4 * 32 + COLUMN_OF(r) * 4 + (c) % 4)
#define ACROSS_LINES(b, c, e) b[e][c]
// Weights have the layout of accumulators: lane l holds keys 2 l and 2 l + 1 of eight, but in the left operand, tensor cores expect
// keys l and l + 4. So the keys of both operands are permuted in the same way, which leaves the sum over keys unchanged.
#define ADD_PRODUCT(sum, weights, other, length)                                                                                  \
    if (exact) {                                                                                                                  \
        EACH(n, NT) _Pragma("unroll 1") for (uint k = 0; k < 8; ++k)                                                              \
            EACH(i, MT) EACH(h, 2) {                                                                                              \
                const float even = of_lane(weights[i][n][2 * h], lane / 4 * 4 + k / 2);                                           \
                const float odd = of_lane(weights[i][n][2 * h + 1], lane / 4 * 4 + k / 2);                                        \
                EACH(c, (length) / 8) EACH(r, 2)                                                                                  \
                    sum[i][c][2 * h + r] = fma(k % 2 ? odd : even, WORD(other, 8 * n + k, COLUMN_OF_SUM(c, r), OTHER, length),    \
                                               sum[i][c][2 * h + r]);                                                             \
            }                                                                                                                     \
    } else {                                                                                                                      \
        EACH(d, OTHER / 16) EACH(n, (length) / 32) {                                                                              \
            float part[MT][4][4];                                                                                                 \
            EACH(i, MT) EACH(c, 4) EACH(r, 4) part[i][c][r] = 0;                                                                  \
            EACH(k, 2) {                                                                                                          \
                uint a[MT][4], a_rest[MT][4], b[2][4], b_rest[2][4];                                                              \
                EACH(i, MT) {                                                                                                     \
                    const float *of_k = weights[i][2 * d + k];                                                                    \
                    const uint x[4] = {as_uint(of_k[0]), as_uint(of_k[2]), as_uint(of_k[1]), as_uint(of_k[3])};                   \
                    cut(x, a[i], a_rest[i]);                                                                                      \
                }                                                                                                                 \
                EACH(e, 2) {                                                                                                      \
                    const uint line = 16 * d + 8 * k + COLUMN_OF(e);                                                              \
                    const uint4 y = LOCAL_WORDS(uint4, (other) + CHUNK_AT(line, 8 * n + lane / 4, OTHER, length));                \
                    const uint x[4] = {y.x, y.y, y.z, y.w};                                                                       \
                    cut(x, b[e], b_rest[e]);                                                                                      \
                }                                                                                                                 \
                ADD_EIGHT(part, 4, a, b, ACROSS_LINES)                                                                            \
            }                                                                                                                     \
            EACH(i, MT) EACH(c, 4) EACH(r, 4) sum[i][4 * n + c][r] += part[i][c][r];                                              \
        }                                                                                                                         \
    }
INLINE float of_lane(float x, uint lane)
{
    float y;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(y) : "f"(x), "r"(lane));
    return y;
}
#else
#define WEIGHTS(weights) uint weights[MT][NT][2]
#define SET_WEIGHTS(weights, i, c, h, x, y) weights[i][c][h] = halves(x, y)
// Rounds two numbers to halves, and returns both in one register.
INLINE uint halves(float low, float high)
{
    uint both;
    asm("cvt.rn." MMA "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
#ifdef SM_90A
// wgmma descriptors of tiles with 128-byte swizzle: for 16 elements of each line from element d on (ALONG), or for 16 lines from line d
// on (ACROSS). Addresses are in units of 16 bytes.
#define ALONG(tile, lines, d) ((ulong)(64u | 1u << 30) << 32 | ((tile) / 16 + (d) / 64 * (lines) * 8 + (d) % 64 / 8) | 1u << 16)
#define ACROSS(tile, lines, d) ((ulong)(64u | 1u << 30) << 32 | ((tile) / 16 + (d) * 8) | (uint)(lines) * 8 << 16)
#define MULTIPLY(s, own, other, length)                                                                                           \
    BEGIN_MULTIPLY;                                                                                                               \
    EACH(d, (length) / 16)                                                                                                        \
        WGMMA(OTHER, s[0], ALONG((own) + t / 128 * 8192, OWN, 16 * d), ALONG(other, OTHER, 16 * d), "0, 0", d);                    \
    END_MULTIPLY;
#define ADD_PRODUCT(sum, weights, other, length)                                                                                  \
    BEGIN_MULTIPLY;                                                                                                               \
    EACH(d, OTHER / 16)                                                                                                           \
        WGMMA_WORDS(length, sum[0], weights[0][2 * d][0], weights[0][2 * d][1], weights[0][2 * d + 1][0],                          \
                    weights[0][2 * d + 1][1], ACROSS(other, OTHER, 16 * d), "1");                                                 \
    END_MULTIPLY;
#define DONE(n, sum) asm volatile(WAIT_MULTIPLIED(0) : CAT(REGISTERS_, n)(sum[0]));
#else
#define MULTIPLY(s, own, other, length)                                                                                           \
    CLEAR(s, OTHER);                                                                                                              \
    _Pragma("unroll") for (uint d = 0; d < (length); d += 16) {                                                                   \
        uint a[MT][4];                                                                                                            \
        EACH(i, MT) LDMATRIX("", a[i], (own) + chunk_at(m + 16 * i + lane % 16, d / 8 + lane / 16, OWN, length));                 \
        EACH(c, NT / 2) {                                                                                                         \
            uint w[4];                                                                                                            \
            LDMATRIX("", w, (other) + chunk_at(16 * c + lane % 8 + lane / 16 * 8, d / 8 + lane / 8 % 2, OTHER, length));          \
            EACH(i, MT) {                                                                                                         \
                mma(s[i][2 * c], a[i], w);                                                                                        \
                mma(s[i][2 * c + 1], a[i], w + 2);                                                                                \
            }                                                                                                                     \
        }                                                                                                                         \
    }
#define ADD_PRODUCT(sum, weights, other, length)                                                                                  \
    EACH(d, OTHER / 16) {                                                                                                         \
        EACH(c, (length) / 16) {                                                                                                  \
            uint w[4];                                                                                                            \
            LDMATRIX(".trans", w, (other) + chunk_at(16 * d + lane % 16, 2 * c + lane / 16, OTHER, length));                      \
            EACH(i, MT) {                                                                                                         \
                const uint a[4] = {weights[i][2 * d][0], weights[i][2 * d][1], weights[i][2 * d + 1][0],                          \
                                   weights[i][2 * d + 1][1]};                                                                     \
                mma(sum[i][2 * c], a, w);                                                                                         \
                mma(sum[i][2 * c + 1], a, w + 2);                                                                                 \
            }                                                                                                                     \
        }                                                                                                                         \
    }
#define DONE(n, sum)
#define FENCE_WGMMA
#endif

#endif

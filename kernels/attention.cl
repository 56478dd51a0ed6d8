// Scaled dot-product attention without a score matrix in memory (Dao 2023, "FlashAttention-2"): a work-group keeps a tile of queries
// and iterates over tiles of keys and values. The host defines A (dtype), ACC and ACC_NAME (accumulator: float F32, double F64), NB
// (number of batch dims), and one of
//   FORWARD   computes the result and the log-sum-exp of each row of scores. With SPLIT, each group processes only some keys
//             and writes its largest score, its sum of exponentials and its unnormalised result
//   COMBINE   computes the result from what the groups with SPLIT wrote
//   QUERIES   computes the gradient of queries, and delta: the sum of each row of `grad * out`
//   KEYS      computes the gradients of keys and values: a group keeps a tile of keys and iterates over tiles of queries
// MASK is 0 without a mask, 1 for a bool mask and 2 for an additive mask (of dtype Z). With DROPOUT, weights are dropped at random. DK
// and DV are the widths of keys and values, padded to the multiples that tiles need. All devices use this file. It is followed by
// attention_tiles.cl, or for tensor cores (MMA) by attention_mma.cl. In both, the tile that a group keeps has OWN rows, and the tiles
// that the group iterates over have OTHER rows.
//
// The queries of all heads that share a head of keys are the rows of one matrix: row r is query r % queries of head r / queries. Keys
// are therefore read once for all these heads, and gradients of keys are sums over the heads without a separate pass. All sums have a
// fixed order. Every work-item reaches every barrier, because loop counts depend only on the group.

typedef __global const CAT(A, _t) *In;
typedef __global CAT(A, _t) *Out;
typedef __global ACC *Rows;
#if MASK
typedef __global const CAT(Z, _t) *Mask;
#else
typedef In Mask;
#endif

typedef struct {
    long batch[NB];
    long head, row, column;
} Strides;
typedef struct {
    ulong batch[NB];
    ulong batches, heads, queries, keys, width, value_width, causal, parts;
} Sizes;

// Always inlined, because PoCL 3.1 returns NaN if a kernel calls a function with local and private arrays twice.
#define INLINE static inline __attribute__((always_inline))

INLINE long batch_at(const Sizes *n, const Strides *s, uint b) {
    long at = 0;
    for (int d = NB - 1; d > 0; --d) {
        at += (long)(b % (uint)n->batch[d]) * s->batch[d];
        b /= (uint)n->batch[d];
    }
    return at + (long)b * s->batch[0];
}

// Passed as the row length for keys and values. They have one head, so the head index must always be 0.
#define ONE_HEAD 0xffffffffu
INLINE long row_at(const Strides *s, uint r, uint length) {
    return (long)(r / length) * s->head + (long)(r % length) * s->row;
}

#define STORE CAT(CAT(CAT(store_, A), _), ACC_NAME)

// The score x after applying the mask's element at offset `at`; -inf if that element masks the score out.
#if MASK == 1
#define MASKED(x, at) (CAT(load_, Z)(mask, at) ? (x) : -INFINITY)
#elif MASK == 2
#define MASKED(x, at) ((x) + (ACC)CAT(load_, Z)(mask, at))
#else
#define MASKED(x, at) (x)
#endif

// The number of keys that the query of row r attends to.
#define KEYS_OF(r) ((r) >= rows ? 0 : n.causal ? min((r) % queries + 1, keys) : keys)

// The dropout factor of the weight of row r and key j. It equals the factor that `dropout` would apply if all weights were one row-major tensor.
#ifdef DROPOUT
#define KEPT(r, j) ((ACC)random_uniform(key, stream, ((ulong)b * rows + (r)) * keys + (j)) < dropped ? 0 : rescale)
#else
#define KEPT(r, j) ((ACC)1)
#endif

#define OPERAND(type, name) type name, ulong name##_at, const Strides name##_by

// Defines the tile of work-group `group`: batch b, rows `first` to `last`, and `most`, the largest number of keys that any of these
// rows attends to. With a causal mask, the last queries have the most keys, so their tiles start first, to balance the load.
#define SIZES                                                                                                                     \
    const uint queries = n.queries, rows = n.heads * n.queries, keys = n.keys, width = n.width, value_width = n.value_width;
#define TILE_OF_QUERIES(group)                                                                                                    \
    const uint tiles = (rows + OWN - 1) / OWN, b = (group) / tiles;                                                              \
    const uint first = (tiles - 1 - (group) % tiles) * OWN, last = min(first + OWN, rows) - 1;                                    \
    const bool one_head = first / queries == last / queries;                                                                      \
    const uint most = !n.causal ? keys : one_head ? min(last % queries + 1, keys) : min(queries, keys);
#define TILE_OF_KEYS                                                                                                              \
    const uint tiles = (keys + OWN - 1) / OWN, b = (uint)get_group_id(0) / tiles;                                                 \
    const uint first = (uint)get_group_id(0) % tiles * OWN;
#define START(x) (x##_at + batch_at(&n, &x##_by, b))

// The log-sum-exp of row r. It is infinity for a row that attends to no key, so that all weights of the row are 0.
#define BASE(r) ((r) >= rows || lse[lse_at + (ulong)b * rows + (r)] == -INFINITY ? INFINITY : lse[lse_at + (ulong)b * rows + (r)])

#ifdef KEYS
// Returns the first row (at least `r0`) of the next tile of `other` queries in which at least one query attends to key `first`.
INLINE uint next_tile(const Sizes *n, uint r0, uint first, const uint other) {
    const uint queries = n->queries, rows = n->heads * queries;
    for (; n->causal && r0 < rows; r0 += other) {
        const uint last = min(r0 + other, rows) - 1;
        if (r0 / queries != last / queries || last % queries >= first)
            break;
    }
    return r0;
}
#endif

#ifdef COMBINE
// Each work-item computes one element of the result.
__kernel void attention(OPERAND(Out, out), Rows lse, ulong lse_at, const Sizes n, Rows partial, ulong partial_at) {
    const ulong e = get_global_id(0), all = n.batches * n.heads * n.queries;
    const ulong row = e / n.value_width;
    const uint column = e % n.value_width;
    if (row >= all)
        return;
    const uint rows = n.heads * n.queries;
    partial += partial_at + row * n.parts * (DV + 2);
    ACC top = -INFINITY, total = 0, sum = 0;
    for (uint part = 0; part < n.parts; ++part)
        top = fmax(top, partial[part * (DV + 2)]);
    for (uint part = 0; part < n.parts; ++part) {
        const ACC mine = partial[part * (DV + 2)], shrink = mine == -INFINITY ? 0 : exp(mine - top);
        total += partial[part * (DV + 2) + 1] * shrink;
        sum += partial[part * (DV + 2) + 2 + column] * shrink;
    }
    const ulong b = row / rows;
    STORE(out, out_at + batch_at(&n, &out_by, b) + row_at(&out_by, row % rows, n.queries) + (long)column * out_by.column,
          total == 0 ? 0 : sum / total);
    if (column == 0)
        lse[lse_at + row] = top + log(total);
}
#endif

// Heads of queries and keys that have an RMS norm and then rotary positions: docs/contract.md, "Fused layers".
//
// A warp takes 32 / LANES heads. A lane has runs of a head as row.cuh deals them out, and reads those that are rotated
// with them once more: what one lane reads twice, or two lanes read, is in the L1 cache.
//
// Macros, beside those of rotary.cuh
//   PARAM    type of the weights: F32, BF16 or F16
//   LAYOUT   how pairs lie: HALVES or PAIRS
//   LANES    that share a head: 8 for heads of up to 128 entries, 16 for up to 256
//   WARPS, PASSES, VECTOR, WHOLE   1, 1, RUN and 0: rows are aligned
#pragma once

#include "rotary.cuh"
#include "row.cuh"

using Param = Element<PARAM>;

constexpr int RUNS = OWN / RUN;

static_assert(WARPS == 1 && PASSES == 1 && ALIGNED && !WHOLE && (LANES == 8 || LANES == 16));

struct Heads {
    HeadSteps x_step[2], to_step[2];
    Table table;
    i64 tokens, rows, n;  // tokens in a batch; heads of all tokens; and entries of one
    int heads[2], pairs;
    float eps, offset;  // offset: added to the weight
    int once;           // 0: the normalised row is rounded, too, before the product with the weight
};

// The head of this lane.
struct Head {
    bool there;  // a lane without one helps with sums
    int which;   // 0: of queries, 1: of keys
    i64 batch, token, place;
    int head;

    __device__ __forceinline__ Head(const Heads& p, Row& row) {
        i64 mine = row.row * (32 / LANES) + row.lane / LANES;
        row.first = row.lane % LANES / GROUP * contract::VOCAB_BLOCK + row.lane % GROUP * RUN;
        there = mine < p.rows;
        mine = there ? mine : p.rows - 1;
        const int all = p.heads[0] + p.heads[1];
        place = mine >> 31 ? mine / all : u32(mine) / u32(all);
        head = int(mine - place * all);
        which = head >= p.heads[0];
        head -= which ? p.heads[0] : 0;
        batch = place >> 31 ? place / p.tokens : u32(place) / u32(p.tokens);
        token = place - batch * p.tokens;
    }

    template <class Stored>
    __device__ __forceinline__ Stored* at(Stored* tensor, const HeadSteps& step) const {
        return tensor + batch * step.batch + token * step.token + head * step.head;
    }
};

template <class E, int count>
__device__ __forceinline__ void load_some(const typename E::Stored* at, float (&x)[count]) {
    if constexpr (count * sizeof(typename E::Stored) >= 8) {
        load_values<E>(at, x);
    } else {
#pragma unroll
        for (int i = 0; i < count; ++i) x[i] = E::widen(at[i]);
    }
}

// Turns runs of a head, or turns gradients back.
struct Turn {
    const Trig::Stored *cos, *sin;
    bool known;
    int pairs;

    __device__ __forceinline__ Turn(const Heads& p, const Head& head) : pairs(p.pairs) {
        i64 batch = head.batch, row;
        known = p.table.find(batch, head.token, row);
        cos = p.table.cos + batch * p.table.cos_batch + row * p.table.cos_token;
        sin = p.table.sin + batch * p.table.sin_batch + row * p.table.sin_token;
    }

    __device__ __forceinline__ bool turns(int entry) const { return entry < 2 * pairs; }

    // Where the run lies that is rotated with this one, which is itself if pairs are neighbours.
    __device__ __forceinline__ int other(int entry) const {
        return LAYOUT == PAIRS ? entry : entry < pairs ? entry + pairs : entry - pairs;
    }

    __device__ __forceinline__ void operator()(int entry, float (&own)[RUN], const float (&with)[RUN]) const {
        float c[RUN], s[RUN], turned[RUN];
        const bool upper = entry >= pairs;
        if (!known) {
#pragma unroll
            for (int j = 0; j < RUN; ++j) own[j] = __int_as_float(0x7FFFFFFF);
            return;
        }
        if constexpr (LAYOUT == HALVES) {
            const int at = FULL || !upper ? entry : entry - pairs;
            load_values<Trig>(cos + at, c);
            load_values<Trig>(sin + (FULL && GRADIENTS != NONE ? other(entry) : at), s);
        } else if constexpr (FULL) {
            load_values<Trig>(cos + entry, c);
            load_values<Trig>(sin + entry, s);
        } else {
            float of_pairs[2][RUN / 2];
            load_some<Trig>(cos + entry / 2, of_pairs[0]);
            load_some<Trig>(sin + entry / 2, of_pairs[1]);
#pragma unroll
            for (int j = 0; j < RUN; ++j) c[j] = of_pairs[0][j / 2], s[j] = of_pairs[1][j / 2];
        }
#pragma unroll
        for (int j = 0; j < RUN; ++j) {
            const bool second = LAYOUT == PAIRS ? j % 2 == 1 : upper;
            constexpr bool swapped = LAYOUT == PAIRS && GRADIENTS != NONE;
            const float across = product(LAYOUT == PAIRS ? own[j ^ 1] : with[j], s[swapped ? j ^ 1 : j]);
            turned[j] = sum(product(own[j], c[j]), second == (GRADIENTS == NONE) ? across : -across);
        }
#pragma unroll
        for (int j = 0; j < RUN; ++j) own[j] = turned[j];
    }
};

// The sum of a head's terms. Of 32 chains one or two have a block, and the others change nothing.
__device__ __forceinline__ float sum_of_head(const Row& row, float (&terms)[RUNS][RUN]) {
    float x[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] = terms[i / RUN][i % RUN];
    const float block = row.block_sum(x);
    return LANES == 16 ? add_across(block, 8) : block;
}

// What is multiplied with a normalised run.
__device__ __forceinline__ void load_weight(const Heads& p, const Param::Stored* weight, int entry,
                                            float (&w)[RUN]) {
    load_values<Param>(weight + entry, w);
#pragma unroll
    for (int j = 0; j < RUN; ++j) w[j] = p.offset == 0.0f ? w[j] : __fadd_rn(p.offset, w[j]);
}

__device__ __forceinline__ float inverse_root(const Heads& p, const Row& row, float squares) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(row.over_length(squares), p.eps)));
}

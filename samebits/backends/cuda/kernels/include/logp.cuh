// What docs/contract.md, "Log-probabilities", does with logits: statistics of a block, gradients.
#pragma once

#include "functions.cuh"

namespace contract {

struct BlockStatistics {
    float m, s, u;
};

// Of logits that lanes hold as `sum_by_halves` says. Overwrites them.
template <int lanes, int adjacent, bool entropy>
__device__ __forceinline__ BlockStatistics block_statistics(float (&z)[VOCAB_BLOCK / lanes]) {
    constexpr int count = VOCAB_BLOCK / lanes;
    float m = z[0], e[count];
#pragma unroll
    for (int i = 1; i < count; ++i) m = maximum(m, z[i]);
    m = maximum_of_lanes<lanes>(m);
    const float shift = shift_of(m);
#pragma unroll
    for (int i = 0; i < count; ++i) {
        z[i] = __fsub_rn(z[i], shift);
        e[i] = exp(z[i]);
        if (entropy) z[i] = e[i] == 0.0f ? 0.0f : __fmul_rn(z[i], e[i]);
    }
    const float s = sum_by_halves<lanes, adjacent>(e);
    return {m, s, entropy ? sum_by_halves<lanes, adjacent>(z) : 0.0f};
}

// A row on the way back.
template <bool entropy>
struct RowGradient {
    i64 target;
    bool counts;
    int kept;  // the bits of a result that stay: all or none
    float shift, log_sum, g, h, mean;

    template <typename Params>
    __device__ __forceinline__ RowGradient(const Params& p, i64 row)
        : target(p.target[row]), counts(target != p.ignore_index && target >= 0 && target < p.vocabulary),
          kept(counts ? ~0 : 0), shift(p.shift[row]), log_sum(p.log_sum[row]),
          g(__fmul_rn(p.grad[row], p.scale)), h(entropy ? __fmul_rn(p.grad_entropy[row], p.scale) : 0.0f),
          mean(entropy ? p.entropy[row] : 0.0f) {}

    // dz of a logit, but for what NaN it is.
    __device__ __forceinline__ float at(float z, bool is_target) const {
        const float y = __fsub_rn(__fsub_rn(z, shift), log_sum), probability = exp(y);
        float k = g;
        if (entropy) k = __fmaf_rn(h, probability == 0.0f ? 0.0f : __fadd_rn(y, mean), g);
        const float dz = __fmaf_rn(-k, probability, is_target ? g : 0.0f);
        return __int_as_float(__float_as_int(dz) & kept);  // a branch would cost more
    }
};

}  // namespace contract

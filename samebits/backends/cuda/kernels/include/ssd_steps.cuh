// What Mamba 2 needs of its steps, in f32: docs/contract.md, "Recurrent layers". For ssd_steps.cu, and for
// delta_step*.cu, which compute their own token's.
//
// Macros
//   DT, BIAS, SKIP  types of dt, of its bias and of D: F32, BF16 or F16
//   SOFTPLUS        1: steps are softplus(dt + bias); 0: the sum
#pragma once

#include "activations.cuh"
#include "convert.cuh"

struct Steps {
    using Dt = Element<DT>;
    using Bias = Element<BIAS>;
    using Skip = Element<SKIP>;

    const Dt::Stored* dt;      // [tokens, heads]
    const Bias::Stored* bias;  // [heads], or null
    const float* a;            // [heads]
    const Skip::Stored* d;     // [heads, size], or null
    i64 dt_token, dt_head, bias_head, d_head, d_column;
    float lowest, highest;

    // What a step is computed from.
    struct Given {
        Dt::Stored dt;
        Bias::Stored bias;
        float a;
    };
    __device__ __forceinline__ Given read(i64 token, i64 head) const {
        return {dt[token * dt_token + head * dt_head], bias ? bias[head * bias_head] : Bias::Stored{},
                a[head]};
    }

    // A bounded step, and that times A.
    __device__ __forceinline__ void of(const Given& x, float& step, float& decay) const {
        float y = Dt::widen(x.dt);
        if (bias) y = __fadd_rn(y, Bias::widen(x.bias));
        if constexpr (SOFTPLUS) y = contract::softplus(y);
        y = contract::minimum(contract::maximum(y, lowest), highest);
        step = contract::canonical(y);
        decay = contract::canonical(__fmul_rn(y, x.a));
    }

    __device__ __forceinline__ void of(i64 token, i64 head, float& step, float& decay) const {
        of(read(token, head), step, decay);
    }

    __device__ __forceinline__ float skip(i64 head, i64 column) const {
        return Skip::widen(d[head * d_head + column * d_column]);
    }
};

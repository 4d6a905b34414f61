// What a call of Mamba 2 needs of its steps, in f32: docs/contract.md, "Recurrent layers". A thread for each step, and
// one for each column of a head's values, whose D it widens.
//
// Macros
//   DT, BIAS, SKIP  types of dt, of its bias and of D: F32, BF16 or F16
//   SOFTPLUS        1: steps are softplus(dt + bias); 0: the sum

#include "activations.cuh"
#include "convert.cuh"

using Dt = Element<DT>;
using Bias = Element<BIAS>;
using Skip = Element<SKIP>;

struct Params {
    const Dt::Stored* dt;      // [tokens, heads]
    const Bias::Stored* bias;  // [heads], or null
    const float* a;            // [heads]
    const Skip::Stored* d;     // [heads, size], or null
    float *steps, *decays;     // [tokens, heads]: bounded, and times A
    float* skip;               // [heads, size]
    i64 dt_token, dt_head, bias_head, d_head, d_column;
    i64 count;  // of steps
    int heads, size;
    float lowest, highest;
};

extern "C" __global__ void __launch_bounds__(256) ssd_steps(const __grid_constant__ Params p) {
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i < p.count) {
        const i64 head = i % p.heads;
        float step = Dt::widen(p.dt[i / p.heads * p.dt_token + head * p.dt_head]);
        if (p.bias) step = __fadd_rn(step, Bias::widen(p.bias[head * p.bias_head]));
        if constexpr (SOFTPLUS) step = contract::softplus(step);
        step = contract::minimum(contract::maximum(step, p.lowest), p.highest);
        p.steps[i] = contract::canonical(step);
        p.decays[i] = contract::canonical(__fmul_rn(step, p.a[head]));
    } else if (const i64 x = i - p.count; p.d && x < i64(p.heads) * p.size) {
        p.skip[x] = Skip::widen(p.d[x / p.size * p.d_head + x % p.size * p.d_column]);
    }
}

// What kernels of short causal convolutions share: docs/contract.md, "Convolutions".
//
// Macros
//   VALUE    type of all tensors: F32, BF16 or F16
//   TAPS     weights of a channel
//   RESULT   SUM: the sum of products and bias, rounded; SILU: silu of that, rounded again; FAST_SILU: the same for bf16,
//            by functions of the GPU; SILU_GRADIENT: its gradient, given that of silu
#pragma once

#define SUM 0
#define SILU 1
#define FAST_SILU 2
#define SILU_GRADIENT 3

#include "activations.cuh"
#include "launch.cuh"
#include "vectors.cuh"

using Value = Element<VALUE>;

// Weights of neighbouring channels, and what is added last. Products are summed without the +0 that chains begin with: a
// sum of products alone differs from that by the sign of a zero, and +0, or a bias that is not -0, puts it right.
template <int count>
__device__ __forceinline__ void load_channels(const Value::Stored* weight, const Value::Stored* bias,
                                              int channel, float (&w)[count][TAPS], float (&last)[count]) {
    alignas(16) Value::Stored stored[count * TAPS];
    copy_values<Value, count * TAPS>(weight + i64(channel) * TAPS, stored);
#pragma unroll
    for (int i = 0; i < count * TAPS; ++i) w[i / TAPS][i % TAPS] = Value::widen(stored[i]);
#pragma unroll
    for (int i = 0; i < count; ++i) last[i] = 0.0f;
    if (bias) load_values<Value>(bias + channel, last);
#pragma unroll
    for (int i = 0; i < count; ++i) last[i] = __fadd_rn(last[i], 0.0f);
}

template <int count>
__device__ __forceinline__ void round_values(float (&x)[count]) {
#if VALUE != F32
    if constexpr (count % 2 == 0) {
#pragma unroll
        for (int i = 0; i < count; i += 2) {
            const u32 both = Value::pack(x[i], x[i + 1]);
            x[i] = Value::widen(u16(both)), x[i + 1] = Value::widen(u16(both >> 16));
        }
    } else {
        static_assert(count == 1);
        x[0] = rounded_to<Value>(x[0]);
    }
#endif
}

// Results of sums, before they are rounded. `grad` is that of silu.
template <int count>
__device__ __forceinline__ void finish(float (&x)[count], const float (&grad)[count]) {
    if constexpr (RESULT != SUM) {
        round_values(x);
#pragma unroll
        for (int i = 0; i < count; ++i)
            x[i] = RESULT == SILU        ? contract::silu(x[i])
                   : RESULT == FAST_SILU ? contract::fast_silu(x[i])
                                         : contract::silu_gradient(grad[i], x[i]);
    }
}

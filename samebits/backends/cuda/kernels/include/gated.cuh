// What gated activations and their gradients share.
//
// Macros, beside those of gated.cu
//   FAST_SILU   1: silu of bf16 is computed by functions of the GPU
//   BETWEEN     type to which an activation is rounded before its product: F32; or that of IN, where it is not given
#pragma once

#define SILU 0
#define GELU 1
#define GELU_TANH 2
#define SIGMOID 3
#define RELU 4
#define RELU2 5
#define GPT_OSS 6
#define SOFTPLUS 7
#define ALONE 0
#define APART 1
#define ALTERNATING 2

#include "activations.cuh"
#include "launch.cuh"
#include "vectors.cuh"

#ifndef BETWEEN
#define BETWEEN IN
#endif

using In = Element<IN>;
using Between = Element<BETWEEN>;

constexpr int THREADS = 256;

// The activation of a gate, before it is rounded.
__device__ __forceinline__ float activated(float gate, float alpha) {
    if constexpr (ACTIVATION == SILU)
        return FAST_SILU ? contract::fast_silu(gate) : contract::silu(gate);
    else if constexpr (ACTIVATION == GELU)
        return contract::gelu(gate);
    else if constexpr (ACTIVATION == GELU_TANH)
        return contract::gelu_tanh(gate);
    else if constexpr (ACTIVATION == SIGMOID)
        return contract::sigmoid(gate);
    else if constexpr (ACTIVATION == SOFTPLUS)
        return contract::softplus(gate);
    else if constexpr (ACTIVATION == RELU)
        return gate <= 0.0f ? 0.0f : gate;
    else if constexpr (ACTIVATION == RELU2)
        return gate <= 0.0f ? 0.0f : __fmul_rn(gate, gate);
    else
        return __fmul_rn(gate, rounded_to<In>(contract::sigmoid(rounded_to<In>(__fmul_rn(gate, alpha)))));
}

// This thread's gates, and its factors if there are any.
__device__ __forceinline__ void load_gate_and_up(const In::Stored* gates, i64 gate_row, const In::Stored* ups,
                                                 i64 up_row, i64 row, i64 first, float (&gate)[VECTOR],
                                                 float (&up)[VECTOR]) {
    if constexpr (FORM == ALTERNATING) {
        const In::Stored* at = gates + row * gate_row + 2 * first;
        float both[2 * VECTOR];
        if constexpr (VECTOR == 1)
            both[0] = In::widen(at[0]), both[1] = In::widen(at[1]);
        else
            load_values<In>(at, both);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) gate[j] = both[2 * j], up[j] = both[2 * j + 1];
    } else {
        load_values<In>(gates + row * gate_row + first, gate);
        if constexpr (FORM == APART) load_values<In>(ups + row * up_row + first, up);
    }
}

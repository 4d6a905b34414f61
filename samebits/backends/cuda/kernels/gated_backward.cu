// Gradients of gated activations, and of activations alone: docs/contract.md, "Fused layers".
//
// A thread takes VECTOR neighbours of a row, of which it computes both gradients.
//
// Macros
//   IN           type of operands and gradients: F32, BF16 or F16
//   ACTIVATION   SILU, GELU, GELU_TANH, SIGMOID, RELU, RELU2 or GPT_OSS
//   FORM         ALONE: of the gate without a factor; APART: gate and factor, and their gradients, in rows of their own;
//                ALTERNATING: gate and factor side by side
//   VECTOR       entries of a thread: as many as 16 bytes hold, or 1 for operands that are not aligned

#include "gated.cuh"

struct Params {
    const In::Stored *grad, *gate, *up;
    In::Stored *of_gate, *of_up;  // null: this one is not asked for
    i64 grad_row, gate_row, up_row, of_gate_row, of_up_row;
    i64 count;           // threads that have work
    int of_row;          // of a row
    float limit, alpha;  // as in gated.cu
};

// The gradient of a gate, given g of its activation.
__device__ __forceinline__ float of_activated(float g, float gate, float alpha) {
    if constexpr (ACTIVATION == SILU) {
        return contract::silu_gradient(g, gate);
    } else if constexpr (ACTIVATION == GELU) {
        return contract::gelu_gradient(g, gate);
    } else if constexpr (ACTIVATION == GELU_TANH) {
        return contract::gelu_tanh_gradient(g, gate);
    } else if constexpr (ACTIVATION == SIGMOID) {
        return contract::sigmoid_gradient(g, rounded_to<Between>(contract::sigmoid(gate)));
    } else if constexpr (ACTIVATION == RELU) {
        return gate <= 0.0f ? 0.0f : g;
    } else if constexpr (ACTIVATION == RELU2) {
        return gate <= 0.0f ? 0.0f : __fmul_rn(g, rounded_to<Between>(__fadd_rn(gate, gate)));
    } else {
        const float weight = rounded_to<In>(contract::sigmoid(rounded_to<In>(__fmul_rn(gate, alpha))));
        const float of_scaled =
            rounded_to<In>(contract::sigmoid_gradient(rounded_to<In>(__fmul_rn(g, gate)), weight));
        return __fadd_rn(rounded_to<In>(__fmul_rn(g, weight)), rounded_to<In>(__fmul_rn(of_scaled, alpha)));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gated_backward(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= p.count) return;
    const i64 row = p.count >> 31 ? i / p.of_row : u32(i) / u32(p.of_row);
    const i64 first = (i - row * p.of_row) * VECTOR;
    const float limit = rounded_to<In>(p.limit);
    float gate[VECTOR], up[VECTOR], grad[VECTOR];
    load_values<In>(p.grad + row * p.grad_row + first, grad);
    load_gate_and_up(p.gate, p.gate_row, p.up, p.up_row, row, first, gate, up);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        const float a = contract::minimum(gate[j], limit);
        float of_activation = grad[j];
        if constexpr (FORM != ALONE) {
            float b = contract::maximum(contract::minimum(up[j], limit), -limit);
            if constexpr (ACTIVATION == GPT_OSS) b = rounded_to<In>(__fadd_rn(b, 1.0f));
            of_activation = rounded_to<Between>(__fmul_rn(grad[j], b));
            const float of_up = __fmul_rn(grad[j], rounded_to<Between>(activated(a, p.alpha)));
            // Comparisons of NaN are false.
            up[j] = limit == INF || (up[j] >= -limit && up[j] <= limit) ? of_up : 0.0f;
        }
        const float of_gate = of_activated(of_activation, a, p.alpha);
        gate[j] = limit == INF || gate[j] <= limit ? of_gate : 0.0f;
    }
    if constexpr (FORM == ALTERNATING) {
        // Autograd adds gradients of slices, which are rounded, to zeros: -0 becomes +0.
        float both[2 * VECTOR];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            both[2 * j] = __fadd_rn(rounded_to<In>(gate[j]), 0.0f);
            both[2 * j + 1] = __fadd_rn(rounded_to<In>(up[j]), 0.0f);
        }
        In::Stored* to = p.of_gate + row * p.of_gate_row + 2 * first;
        if constexpr (VECTOR == 1)
            to[0] = In::narrow(contract::canonical(both[0])),
            to[1] = In::narrow(contract::canonical(both[1]));
        else
            store_values<In>(to, both);
    } else {
        if (p.of_gate) store_values<In>(p.of_gate + row * p.of_gate_row + first, gate);
        if (FORM == APART && p.of_up) store_values<In>(p.of_up + row * p.of_up_row + first, up);
    }
}

// Gated activations, and activations alone: docs/contract.md, "Fused layers".
//
// A thread takes VECTOR neighbours of a row. It reads them before it writes: the result may take the place of an
// operand.
//
// Macros
//   IN           type of operands and result: F32, BF16 or F16
//   ACTIVATION   SILU, GELU, GELU_TANH, SIGMOID, RELU, RELU2, GPT_OSS, or SOFTPLUS, ALONE
//   FORM         ALONE: of the gate without a factor; APART: gate and factor in rows of their own; ALTERNATING: gate
//                and factor side by side
//   VECTOR       entries of a thread: as many as 16 bytes hold, or 1 for operands that are not aligned

#include "gated.cuh"

struct Params {
    const In::Stored *gate, *up;
    In::Stored* out;
    i64 gate_row, up_row, out_row;
    i64 count;           // threads that have work
    int of_row;          // of a row
    float limit, alpha;  // what gates are not above, and factors not beyond; infinite: none
};

extern "C" __global__ void __launch_bounds__(THREADS) gated(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= p.count) return;
    const i64 row = p.count >> 31 ? i / p.of_row : u32(i) / u32(p.of_row);
    const i64 first = (i - row * p.of_row) * VECTOR;
    const float limit = rounded_to<In>(p.limit);
    float gate[VECTOR], up[VECTOR];
    load_gate_and_up(p.gate, p.gate_row, p.up, p.up_row, row, first, gate, up);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        gate[j] = activated(contract::minimum(gate[j], limit), p.alpha);
        if constexpr (FORM != ALONE) {
            up[j] = contract::maximum(contract::minimum(up[j], limit), -limit);
            if constexpr (ACTIVATION == GPT_OSS) up[j] = rounded_to<In>(__fadd_rn(up[j], 1.0f));
            gate[j] = __fmul_rn(rounded_to<Between>(gate[j]), up[j]);
        }
    }
    store_values<In>(p.out + row * p.out_row + first, gate);
}

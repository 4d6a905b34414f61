// Gated activations, and activations alone: docs/contract.md, "Fused layers".
//
// A thread takes RUNS times VECTOR neighbours of a row. Nobody else reads them, and it reads them before it writes: the
// result may take the place of an operand.
//
// Macros
//   IN           type of operands and result: F32, BF16 or F16
//   ACTIVATION   SILU, GELU, GELU_TANH, SIGMOID, RELU, RELU2, GPT_OSS, or SOFTPLUS, ALONE
//   FORM         ALONE: of the gate without a factor; APART: gate and factor in rows of their own; ALTERNATING: gate
//                and factor side by side
//   VECTOR       entries of a thread: as many as 16 bytes hold, or 1 for operands that are not aligned
//   RUNS         of a thread, which are on their way together

#include "gated.cuh"

struct Params {
    const In::Stored *gate, *up;
    In::Stored* out;
    i64 gate_row, up_row, out_row;
    i64 count;           // runs
    int of_row;          // of a row
    float limit, alpha;  // what gates are not above, and factors not beyond; infinite: none
    int streams;         // whether the result does not stay in the L2 cache
};

extern "C" __global__ void __launch_bounds__(THREADS) gated(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const i64 begin = i64(blockIdx.x) * (RUNS * THREADS) + threadIdx.x;
    const float limit = rounded_to<In>(p.limit);
    float gate[RUNS][VECTOR], up[RUNS][VECTOR];
    In::Stored* to[RUNS];
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
        const i64 i = begin + r * THREADS;
        if (i >= p.count) break;
        const i64 row = p.count >> 31 ? i / p.of_row : u32(i) / u32(p.of_row);
        const i64 first = (i - row * p.of_row) * VECTOR;
        load_gate_and_up(p.gate, p.gate_row, p.up, p.up_row, row, first, gate[r], up[r]);
        to[r] = p.out + row * p.out_row + first;
    }
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
        if (begin + r * THREADS >= p.count) break;
        float (&x)[VECTOR] = gate[r];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) x[j] = activated(contract::minimum(x[j], limit), p.alpha);
        if constexpr (FORM != ALONE) {
            round_values<In>(x);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                float factor = contract::maximum(contract::minimum(up[r][j], limit), -limit);
                if constexpr (ACTIVATION == GPT_OSS) factor = rounded_to<In>(__fadd_rn(factor, 1.0f));
                x[j] = __fmul_rn(x[j], factor);
            }
        }
        store_values<In>(to[r], x, p.streams);
    }
}

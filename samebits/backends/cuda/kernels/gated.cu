// Gated activations, and activations alone: docs/contract.md, "Fused layers".
//
// A thread takes VECTOR neighbours of a row. It reads them before it writes: the result may take the place of an
// operand.
//
// Macros
//   IN           type of operands and result: F32, BF16 or F16
//   ACTIVATION   SILU, GELU, GELU_TANH or GPT_OSS
//   FORM         ALONE: of the gate without a factor; APART: gate and factor in rows of their own; ALTERNATING: gate
//                and factor side by side
//   VECTOR       entries of a thread: as many as 16 bytes hold, or 1 for operands that are not aligned

#define SILU 0
#define GELU 1
#define GELU_TANH 2
#define GPT_OSS 3
#define ALONE 0
#define APART 1
#define ALTERNATING 2

#include "activations.cuh"
#include "launch.cuh"
#include "vectors.cuh"

using In = Element<IN>;

constexpr int THREADS = 256;

struct Params {
    const In::Stored *gate, *up;
    In::Stored* out;
    i64 gate_row, up_row, out_row;
    i64 count;           // threads that have work
    int of_row;          // of a row
    float limit, alpha;  // what gates are not above, and factors not beyond; infinite: none
};

__device__ __forceinline__ float activated(float gate, float alpha) {
    if constexpr (ACTIVATION == SILU)
        return contract::silu(gate);
    else if constexpr (ACTIVATION == GELU)
        return contract::gelu(gate);
    else if constexpr (ACTIVATION == GELU_TANH)
        return contract::gelu_tanh(gate);
    else
        return __fmul_rn(gate, rounded_to<In>(contract::sigmoid(rounded_to<In>(__fmul_rn(gate, alpha)))));
}

extern "C" __global__ void __launch_bounds__(THREADS) gated(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= p.count) return;
    const i64 row = p.count >> 31 ? i / p.of_row : u32(i) / u32(p.of_row);
    const i64 first = (i - row * p.of_row) * VECTOR;
    const float limit = rounded_to<In>(p.limit);
    float gate[VECTOR], up[VECTOR];
    if constexpr (FORM == ALTERNATING) {
        const In::Stored* at = p.gate + row * p.gate_row + 2 * first;
        float both[2 * VECTOR];
        if constexpr (VECTOR == 1)
            both[0] = In::widen(at[0]), both[1] = In::widen(at[1]);
        else
            load_values<In>(at, both);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) gate[j] = both[2 * j], up[j] = both[2 * j + 1];
    } else {
        load_values<In>(p.gate + row * p.gate_row + first, gate);
        if constexpr (FORM == APART) load_values<In>(p.up + row * p.up_row + first, up);
    }
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        gate[j] = activated(contract::minimum(gate[j], limit), p.alpha);
        if constexpr (FORM != ALONE) {
            up[j] = contract::maximum(contract::minimum(up[j], limit), -limit);
            if constexpr (ACTIVATION == GPT_OSS) up[j] = rounded_to<In>(__fadd_rn(up[j], 1.0f));
            gate[j] = __fmul_rn(rounded_to<In>(gate[j]), up[j]);
        }
    }
    store_values<In>(p.out + row * p.out_row + first, gate);
}

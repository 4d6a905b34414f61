// 2^x of every element, as attention takes it: docs/contract.md, "exp2". For proofs.
//
// Macros
//   HARDWARE_EXP2   1: the instruction; 0: the polynomial

#include "functions.cuh"
#include "types.cuh"

#ifndef HARDWARE_EXP2
#error "HARDWARE_EXP2 is needed: #if takes a missing macro for 0"
#endif

struct Params {
    const float* x;
    float* out;
    i64 n;
};

extern "C" __global__ void __launch_bounds__(256) exp2_of_all(const __grid_constant__ Params p) {
    for (i64 i = i64(blockIdx.x) * 256 + threadIdx.x; i < p.n; i += i64(gridDim.x) * 256) {
#if HARDWARE_EXP2
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(p.out[i]) : "f"(p.x[i]));
#else
        p.out[i] = contract::exp2(p.x[i]);
#endif
    }
}

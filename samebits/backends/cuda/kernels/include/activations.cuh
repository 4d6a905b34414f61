// sigmoid, gelu and gradients, bit for bit as docs/contract.md ("Fused layers") has them. silu is in functions.cuh.
#pragma once

#include "functions.cuh"

namespace contract {

__device__ __forceinline__ float sigmoid(float a) { return __fdiv_rn(1.0f, one_and_exp_minus(a)); }

// log(1 + e^x). What the sum 1 + e^-|x| lost is put back by the quotient.
__device__ __forceinline__ float softplus(float x) {
    const float e = exp(-fabsf(x));
    const float sum = __fadd_rn(1.0f, e);
    const float above = sum == 1.0f ? e : __fmul_rn(log(sum), __fdiv_rn(e, __fsub_rn(sum, 1.0f)));
    return x > 0.0f ? __fadd_rn(x, above) : above;
}

// 1 - e^q for the magnitude, where q is the logarithm of erfc.
__device__ __forceinline__ float erf(float x) {
    const float t = minimum(fabsf(x), 4.0f);
    float q = __fmaf_rn(G9, t, G8);
    q = __fmaf_rn(q, t, G7);
    q = __fmaf_rn(q, t, G6);
    q = __fmaf_rn(q, t, G5);
    q = __fmaf_rn(q, t, G4);
    q = __fmaf_rn(q, t, G3);
    q = __fmaf_rn(q, t, G2);
    q = __fmaf_rn(q, t, G1);
    const float y = __fsub_rn(1.0f, exp(__fmul_rn(q, t)));
    return x < 0.0f ? -y : y;
}

__device__ __forceinline__ float gelu(float a) {
    return __fmul_rn(__fmul_rn(a, 0.5f), __fadd_rn(1.0f, erf(__fmul_rn(a, HALF_ROOT))));
}

__device__ __forceinline__ float tanh(float x) {
    const float e = exp(__fmul_rn(fabsf(x), -2.0f));
    const float y = __fsub_rn(1.0f, __fdiv_rn(__fadd_rn(e, e), __fadd_rn(1.0f, e)));
    return x < 0.0f ? -y : y;
}

__device__ __forceinline__ float tanh_of_gelu(float a) {
    const float cube = __fmul_rn(__fmul_rn(a, a), a);
    return tanh(__fmul_rn(TANH_SCALE, __fmaf_rn(TANH_CUBE, cube, a)));
}

__device__ __forceinline__ float gelu_tanh(float a) {
    return __fmul_rn(__fmul_rn(0.5f, a), __fadd_rn(1.0f, tanh_of_gelu(a)));
}

// For all 65,536 values of bf16 it gives the bf16 of silu, on Hopper. The sum is that of 1 and e^-a, divided by 4
// so that its reciprocal is a normal number.
__device__ __forceinline__ float fast_silu(float a) {
    float e, reciprocal;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(a, -LOG2E)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(__fmaf_rn(e, 0.25f, 0.25f)));
    return __fmul_rn(__fmul_rn(a, 0.25f), reciprocal);
}

// Gradients of functions of a, given g of their results.

// From the sigmoid y of a.
__device__ __forceinline__ float silu_gradient_by(float y, float g, float a) {
    return __fmul_rn(__fmul_rn(g, y), __fmaf_rn(a, __fsub_rn(1.0f, y), 1.0f));
}
__device__ __forceinline__ float silu_gradient(float g, float a) {
    return silu_gradient_by(sigmoid(a), g, a);
}

// From the result y.
__device__ __forceinline__ float sigmoid_gradient(float g, float y) {
    return __fmul_rn(__fmul_rn(g, __fsub_rn(1.0f, y)), y);
}

__device__ __forceinline__ float gelu_gradient(float g, float a) {
    const float below = __fmul_rn(0.5f, __fadd_rn(1.0f, erf(__fmul_rn(a, HALF_ROOT))));
    const float density = __fmul_rn(DENSITY, exp(__fmul_rn(__fmul_rn(a, a), -0.5f)));
    return __fmul_rn(g, __fmaf_rn(a, density, below));
}

__device__ __forceinline__ float gelu_tanh_gradient(float g, float a) {
    const float y = tanh_of_gelu(a), half = __fmul_rn(0.5f, a);
    const float slope = __fmul_rn(TANH_SCALE, __fmaf_rn(TANH_SLOPE, __fmul_rn(a, a), 1.0f));
    const float of_tanh = __fmul_rn(__fmul_rn(half, __fmaf_rn(-y, y, 1.0f)), slope);
    return __fmul_rn(g, __fadd_rn(__fmul_rn(0.5f, __fadd_rn(1.0f, y)), of_tanh));
}

}  // namespace contract

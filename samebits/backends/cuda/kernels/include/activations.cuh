// sigmoid, gelu and gradients, bit for bit as docs/contract.md ("Fused layers") has them. silu is in functions.cuh.
#pragma once

#include "functions.cuh"

namespace contract {

constexpr float HALF_ROOT = 0x1.6a09e6p-1f;  // of 1 / 2
constexpr float TANH_SCALE = 0x1.988454p-1f;
constexpr float TANH_CUBE = 0x1.6e4e26p-5f;
constexpr float TANH_SLOPE = 0x1.12ba9cp-3f;  // 3 * TANH_CUBE
constexpr float DENSITY = 0x1.988454p-2f;     // 1 / sqrt(2 * pi)
constexpr float G1 = -0x1.20dd78p+0f;
constexpr float G2 = -0x1.45f28cp-1f;
constexpr float G3 = -0x1.a510c8p-4f;
constexpr float G4 = 0x1.3ada8ap-6f;
constexpr float G5 = 0x1.ed1856p-15f;
constexpr float G6 = -0x1.9d5694p-10f;
constexpr float G7 = 0x1.344168p-11f;
constexpr float G8 = -0x1.bcb54p-14f;
constexpr float G9 = 0x1.0de7eap-17f;

__device__ __forceinline__ float sigmoid(float a) { return __fdiv_rn(1.0f, one_and_exp_minus(a)); }

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

// Gradients of functions of a, given g of their results.

__device__ __forceinline__ float silu_gradient(float g, float a) {
    const float y = sigmoid(a);
    return __fmul_rn(__fmul_rn(g, y), __fmaf_rn(a, __fsub_rn(1.0f, y), 1.0f));
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

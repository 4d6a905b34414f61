// exp, log and sums by halves, bit for bit as docs/contract.md ("Log-probabilities") has them.
#pragma once

#include "constants.cuh"

#define INF __int_as_float(0x7F800000)

namespace contract {

// The larger and the smaller of two; NaN if one is.
__device__ __forceinline__ float maximum(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
#else
    return a > b || a != a ? a : b;
#endif
}

__device__ __forceinline__ float minimum(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
    return smaller;
#else
    return a < b || a != a ? a : b;
#endif
}

// What is subtracted from logits of this maximum: +0 for -inf.
__device__ __forceinline__ float shift_of(float maximum) { return maximum == -INF ? 0.0f : maximum; }

// q with e^x = q 2^n, where t = n + to_integer.
__device__ __forceinline__ float exp_fraction(float x, float t, float to_integer) {
    const float n = __fsub_rn(t, to_integer);
    float f = __fmaf_rn(n, -LN2, x);
    f = __fmaf_rn(n, -LN2_LOW, f);
    float q = __fmaf_rn(E6, f, E5);
    q = __fmaf_rn(q, f, E4);
    q = __fmaf_rn(q, f, E3);
    q = __fmaf_rn(q, f, E2);
    q = __fmaf_rn(q, f, E1);
    return __fmaf_rn(q, f, E0);
}

// q and the bits of 2^n, with e^x = q 2^n.
__device__ __forceinline__ float exp_parts(float x, int& power) {
    constexpr float TO_INTEGER = 12583039.0f;  // 1.5 * 2^23 + 127: the low bits of a sum with it are n + 127
    const float t = __fmaf_rn(x, LOG2E, TO_INTEGER);
    power = __float_as_int(t) << 23;
    return exp_fraction(x, t, TO_INTEGER);
}

// The bits of `exp` for x from -80 to 0: nothing to clamp, and 2^n is added to the exponent of q. Another summand
// gives the same n: the two differ in the direction of ties, and x * LOG2E, of odd factors, is none below 2^22.
__device__ __forceinline__ float exp_near(float x) {
    constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: the low bits of a sum with it are n
    const float t = __fmaf_rn(x, LOG2E, TO_INTEGER);
    return __int_as_float(__float_as_int(exp_fraction(x, t, TO_INTEGER)) + (__float_as_int(t) << 23));
}

// For x <= 0 and NaN; +0 below -87.7.
__device__ __forceinline__ float exp(float x) {
    int power;
    const float q = exp_parts(maximum(x, -88.0f), power);
    return __fmul_rn(q, __int_as_float(power));
}

// 1 + e^-a, by an e^x for x of both signs. No e^x below 2^-92 would change the sum.
__device__ __forceinline__ float one_and_exp_minus(float a) {
    int power;
    float x = maximum(-a, -64.0f);
    x = x > 89.0f ? 89.0f : x;
    const float q = exp_parts(x, power);
    const float half = __fmul_rn(q, __int_as_float(power - (1 << 23)));
    return __fadd_rn(1.0f, __fmul_rn(half, 2.0f));
}

__device__ __forceinline__ float silu(float a) { return __fdiv_rn(a, one_and_exp_minus(a)); }

// 2^x by a polynomial: exact for integers, +0 from -127 down, infinity from 128 on.
__device__ __forceinline__ float exp2(float x) {
    constexpr float TO_INTEGER = 12583039.0f;
    x = x > 128.0f ? 128.0f : maximum(x, -127.0f);
    const float t = __fadd_rn(x, TO_INTEGER);
    const float f = __fsub_rn(x, __fsub_rn(t, TO_INTEGER));
    float q = __fmaf_rn(P6, f, P5);
    q = __fmaf_rn(q, f, P4);
    q = __fmaf_rn(q, f, P3);
    q = __fmaf_rn(q, f, P2);
    q = __fmaf_rn(q, f, P1);
    q = __fmaf_rn(q, f, 1.0f);
    return __fmul_rn(q, __int_as_float(__float_as_int(t) << 23));
}

// For normal x > 0, +0 and NaN.
__device__ __forceinline__ float log(float x) {
    constexpr int SQRT_HALF = 0x3F3504F3;
    const int i = __float_as_int(x) - SQRT_HALF;
    const float k = static_cast<float>(i >> 23);
    const float f = __fsub_rn(__int_as_float((i & 0x7FFFFF) + SQRT_HALF), 1.0f);
    float q = __fmaf_rn(L9, f, L8);
    q = __fmaf_rn(q, f, L7);
    q = __fmaf_rn(q, f, L6);
    q = __fmaf_rn(q, f, L5);
    q = __fmaf_rn(q, f, L4);
    q = __fmaf_rn(q, f, L3);
    q = __fmaf_rn(q, f, L2);
    q = __fmaf_rn(q, f, L1);
    const float y = __fmaf_rn(k, LN2, __fmaf_rn(k, LN2_LOW, __fmaf_rn(q, __fmul_rn(f, f), f)));
    return x > 0.0f ? y : x == 0.0f ? -INF : x;
}

// By halves, the sum of values of which each lane has one, in every group of `lanes` lanes. Every lane gets
// it.
template <int lanes = 32>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int half = lanes / 2; half > 0; half /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xFFFFFFFF, x, half));
    return x;
}

template <int lanes = 32>
__device__ __forceinline__ float maximum_of_lanes(float x) {
#pragma unroll
    for (int half = lanes / 2; half > 0; half /= 2) x = maximum(x, __shfl_xor_sync(0xFFFFFFFF, x, half));
    return x;
}

// Adds halves of the first 2 * half values, until `last` are left.
template <int half, int last, int count>
__device__ __forceinline__ void add_halves(float (&x)[count]) {
    if constexpr (half >= last) {
#pragma unroll
        for (int i = 0; i < half; ++i) x[i] = __fadd_rn(x[i], x[half + i]);
        add_halves<half / 2, last>(x);
    }
}

// The sum of values of which each lane has `count`: `adjacent` side by side, those of the next lane beside
// them, and so on again after the last lane. Overwrites them.
template <int lanes, int adjacent, int count>
__device__ __forceinline__ float sum_by_halves(float (&x)[count]) {
    add_halves<count / 2, adjacent>(x);
#pragma unroll
    for (int i = 0; i < adjacent; ++i) x[i] = sum_of_lanes<lanes>(x[i]);
    add_halves<adjacent / 2, 1>(x);
    return x[0];
}

__device__ __forceinline__ float canonical(float x) { return x != x ? __int_as_float(0x7FFFFFFF) : x; }

}  // namespace contract

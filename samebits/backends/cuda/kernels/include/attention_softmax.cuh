// What attention's kernels share of the softmax: exp2, tanh, and the merge of segments. Bits are those of
// docs/contract.md, "Attention".
//
// Macros
//   HARDWARE_EXP2  1: exp2 is the instruction; 0: the polynomial
#pragma once

#include "functions.cuh"
#include "types.cuh"

#ifndef HARDWARE_EXP2
#error "HARDWARE_EXP2 is needed: #if takes a missing macro for 0"
#endif

namespace scores {

__device__ __forceinline__ float exp2(float x) {
#if HARDWARE_EXP2
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return contract::exp2(x);
#endif
}

// The hyperbolic tangent that a softcap takes.
__device__ __forceinline__ float tanh(float y) {
    const float e = exp2(__fmul_rn(fabsf(y), -2.0f * contract::LOG2E));
    return copysignf(__fdiv_rn(__fsub_rn(1.0f, e), __fadd_rn(1.0f, e)), y);
}

}  // namespace scores

// Segments of a row, merged one after another.
struct Merged {
    float n = -INF, l = 0.0f;

    // Raises n to that of one more; totals are then scaled by x, and what is added by y.
    __device__ __forceinline__ void raise(float n_, float& x, float& y) {
        const float larger = fmaxf(n, n_), shift = contract::shift_of(larger);
        x = scores::exp2(__fsub_rn(n, shift));
        y = scores::exp2(__fsub_rn(n_, shift));
        n = larger;
    }

    // Adds one; O becomes fma(O, x, RNE(o y)).
    __device__ __forceinline__ void add(float n_, float l_, float& x, float& y) {
        raise(n_, x, y);
        l = __fmaf_rn(l, x, __fmul_rn(l_, y));
    }

    // Adds a sink; O becomes O x.
    __device__ __forceinline__ float add_sink(float sink) {
        const float h = __fmul_rn(sink, contract::LOG2E), top = ceilf(h);
        float x, y;
        add(top, scores::exp2(__fsub_rn(h, contract::shift_of(top))), x, y);
        return x;
    }

    __device__ __forceinline__ float inverse() const { return __frcp_rn(l); }
    __device__ __forceinline__ float quotient(float o, float inverse) const {
        return l == 0.0f ? 0.0f : __fmul_rn(__fadd_rn(o, 0.0f), inverse);
    }

    // `lse` may be null.
    __device__ __forceinline__ void store(float* lse, float* lse2, i64 at) const {
        const float log = contract::log(l);
        const float to_base_2 = __fadd_rn(n, __fmul_rn(log, contract::LOG2E));
        lse2[at] = l == 0.0f ? -INF : contract::canonical(to_base_2);
        if (lse) lse[at] = l == 0.0f ? -INF : contract::canonical(__fmaf_rn(n, contract::LN2, log));
    }
};

// What kernels of rotary positions share: docs/contract.md, "Fused layers".
//
// Macros
//   IN, TRIG   types of queries and keys, and of cosines and sines: F32, BF16 or F16
//   FULL       1: cosines and sines are given for each entry of what has positions; 0: for each pair
//   GRADIENTS  NONE: positions are given; else operands are gradients of what has them, and ROUNDED, WIDE or SPLIT
//              says of which code
#pragma once

#define HALVES 0  // entry i beside entry i + pairs
#define PAIRS 1   // entry 2 i beside entry 2 i + 1
#define NONE 0
#define ROUNDED 1
#define WIDE 2
#define SPLIT 3

#include "launch.cuh"
#include "vectors.cuh"

using In = Element<IN>;
using Trig = Element<TRIG>;
constexpr bool IN_ONE_TYPE = IN == TRIG || GRADIENTS == ROUNDED || GRADIENTS == SPLIT;
using Between = Element<IN_ONE_TYPE ? IN : F32>;  // to which products and their sum are rounded
// Autograd adds gradients of parts of a tensor to zeros, but for those of a split: then a sum is never -0.
constexpr bool ADDS_ZERO = GRADIENTS == ROUNDED || GRADIENTS == WIDE;

// How far apart values of batch rows, tokens and heads lie.
struct HeadSteps {
    i64 batch, token, head;
};

// Cosines and sines.
struct Table {
    const Trig::Stored *cos, *sin;
    const void* positions;  // of each token, rows of both; null: they have a row for each token
    i64 cos_batch, cos_token, sin_batch, sin_token, position_batch, position_token;
    i64 rows;  // if there are positions
    i64 wide;  // 1: positions have 64 bits, else 32

    // The row of a token, in `batch` and `row`; false: there is none.
    __device__ __forceinline__ bool find(i64& batch, i64 token, i64& row) const {
        row = token;
        if (!positions) return true;
        const i64 at = batch * position_batch + token * position_token;
        row = wide ? static_cast<const i64*>(positions)[at] : static_cast<const int*>(positions)[at];
        batch = 0;
        return row >= 0 && row < rows;
    }
};

__device__ __forceinline__ float product(float a, float b) { return rounded_to<Between>(__fmul_rn(a, b)); }

__device__ __forceinline__ float sum(float a, float b) {
    const float x = rounded_to<Between>(__fadd_rn(a, b));
    return ADDS_ZERO ? __fadd_rn(x, 0.0f) : x;
}

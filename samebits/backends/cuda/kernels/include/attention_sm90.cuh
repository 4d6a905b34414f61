// What attention's kernels on Hopper share: a thread's values of two rows, 8 apart, in the layout of wgmma's
// accumulators. It has columns 2 (lane % 4) and the next of every eight.
#pragma once

#include "attention_problem.cuh"
#include "attention_softmax.cuh"
#include "convert.cuh"
#include "ring_sm90.cuh"
#include "tile_sm90.cuh"

using Type = Element<INPUT_F16 ? F16 : BF16>;
using Stored = Type::Stored;

// Keeps the compiler from moving work on these registers across a fence or a wait, which name none.
template <int count>
__device__ __forceinline__ void pin(float (&x)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

template <int count>
__device__ __forceinline__ void pin(u32 (&x)[count][4]) {
#pragma unroll
    for (int i = 0; i < 4 * count; ++i) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}

// Rounds values to fragments, 16 columns each, as wgmma takes them from registers.
template <int count>
__device__ __forceinline__ void pack(u32 (&to)[count][4], const float (&x)[8 * count]) {
#pragma unroll
    for (int i = 0; i < 4 * count; ++i) to[i / 4][i % 4] = Type::pack(x[2 * i], x[2 * i + 1]);
}

// Of columns 0, 1, 8, 9, 16, ... to 121, a bit for each below `end`.
__device__ __forceinline__ u32 columns_below(int end) {
    const int count = min(max(end, 0) / 8 * 2 + min(max(end, 0) % 8, 2), 32);
    return count == 32 ? 0xFFFFFFFF : (1u << count) - 1;
}

// Each of four lanes has `w[i]`, a part of line i; then it has line `lane % 4`, by parts.
__device__ __forceinline__ void transpose(u32 (&w)[4]) {
    const u32 lane = threadIdx.x;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool high = lane & step;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (!(i & step)) {
                const u32 sent = high ? w[i] : w[i + step];
                const u32 got = __shfl_xor_sync(0xFFFFFFFF, sent, step);
                (high ? w[i] : w[i + step]) = got;
            }
    }
}

// Issues x = A B^T, for 64 rows of A.
template <typename A, typename B, int depth, int count>
__device__ __forceinline__ void multiply(float (&x)[count], u32 a, u32 b) {
    const auto a_tile = A::descriptor(a);
    const auto b_tile = B::descriptor(b);
#pragma unroll
    for (u32 d = 0; d < depth; d += 16)
        Wgmma<2 * count, 0, 0>::step(x, a_tile.at(A::step(0, d)), b_tile.at(B::step(0, d)), d > 0);
}

// Issues sum += W B; at a `start` sum = W B.
template <typename B, int count, int steps>
__device__ __forceinline__ void accumulate(float (&sum)[count], const u32 (&weights)[steps][4], u32 b,
                                           bool start) {
    const auto b_tile = B::descriptor(b);
#pragma unroll
    for (u32 i = 0; i < steps; ++i)
        WgmmaFragment<2 * count, 1>::step(sum, weights[i], b_tile.at(B::step(0, i * 16)), i > 0 || !start);
}

// Selective state spaces, bit for bit as docs/contract.md ("State spaces") has them.
#pragma once

#include "activations.cuh"

namespace contract {

// e^x for x of both signs.
__device__ __forceinline__ float decay(float x) {
    const float e = exp(x > 0.0f ? -x : x);
    return x > 0.0f ? __fdiv_rn(1.0f, e) : e;
}

// K sums, of which each of 2 HALF lanes, STRIDE apart, has a piece: added by halves, and dealt to the lanes. Lane i of
// them gets those from i K / (2 HALF) on, as many as K / (2 HALF), or at least one.
template <int HALF, int STRIDE = 1, int K>
__device__ __forceinline__ void deal_sums(float (&x)[K], int lane) {
    if constexpr (HALF > 0) {
        if constexpr (K > 1) {
            const bool upper = lane & HALF * STRIDE;
            float kept[K / 2];
#pragma unroll
            for (int i = 0; i < K / 2; ++i) {
                const float mine = upper ? x[K / 2 + i] : x[i], other = upper ? x[i] : x[K / 2 + i];
                kept[i] = __fadd_rn(mine, __shfl_xor_sync(0xFFFFFFFF, other, HALF * STRIDE));
            }
            deal_sums<HALF / 2, STRIDE>(kept, lane);
#pragma unroll
            for (int i = 0; i < K / 2; ++i) x[i] = kept[i];
        } else {
            x[0] = __fadd_rn(x[0], __shfl_xor_sync(0xFFFFFFFF, x[0], HALF * STRIDE));
            deal_sums<HALF / 2, STRIDE>(x, lane);
        }
    }
}

}  // namespace contract

// Entries of a row of states in shared memory: the first four of all pieces, then the others, so that lanes read side
// by side.
template <int LANES>
__device__ __forceinline__ int place_of(int n) {
    return (n & 4 ? 4 * LANES : 0) + n / 8 * 4 + n % 4;
}

template <int LANES>
__device__ __forceinline__ void load_piece(const float* row, int lane, float (&x)[8]) {
    const float4 low = *reinterpret_cast<const float4*>(row + 4 * lane);
    const float4 high = *reinterpret_cast<const float4*>(row + 4 * LANES + 4 * lane);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// The piece of a lane, of a row in memory; zeros where the channel or the entry is none.
template <int size, bool aligned>
__device__ __forceinline__ void load_states(const float* at, bool is, int lane, float (&x)[8]) {
    if constexpr (aligned && size % 8 == 0) {
        float4 low = make_float4(0, 0, 0, 0), high = low;
        if (is && 8 * lane < size) {
            low = *reinterpret_cast<const float4*>(at);
            high = *reinterpret_cast<const float4*>(at + 4);
        }
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = is && 8 * lane + i < size ? at[i] : 0.0f;
    }
}

template <int size, bool aligned>
__device__ __forceinline__ void store_raw(float* at, int lane, const float (&x)[8]) {
    if constexpr (aligned && size % 8 == 0) {
        if (8 * lane >= size) return;
        *reinterpret_cast<float4*>(at) = make_float4(x[0], x[1], x[2], x[3]);
        *reinterpret_cast<float4*>(at + 4) = make_float4(x[4], x[5], x[6], x[7]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (8 * lane + i < size) at[i] = x[i];
    }
}

// NaN becomes canonical.
template <int size, bool aligned>
__device__ __forceinline__ void store_states(float* at, int lane, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = contract::canonical(x[i]);
    store_raw<size, aligned>(at, lane, x);
}

__device__ constexpr int lanes_of(int size) {
    int lanes = 1;
    while (lanes * 8 < size) lanes *= 2;
    return lanes;
}

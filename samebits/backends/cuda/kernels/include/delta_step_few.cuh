// What the kernels for one token of each of few sequences share: delta_step_few.cu and delta_step_few_channels.cu.
#pragma once

#include "delta_step.cuh"
#include "named_barriers.cuh"

static_assert(WIDE == 1);
constexpr u32 ALL = 0xFFFFFFFF;
constexpr int PAIRS = CHUNK / 16;  // blocks of updates

struct Few {
    uint2 left[2][4][PAIRS];  // scores and -weights, of lanes of one in_pair, of each block of updates
    Memory m;                 // whose scores are those of the row's own block, or of its own key alone
};

__device__ __forceinline__ void meet() { wait_for<THREADS>(1); }

__device__ __forceinline__ int count_of(float rows) { return min(max(int(rows), 0), CHUNK); }

// Begins to copy a full chunk.
__device__ __forceinline__ void copy_chunk(Memory& m, const Stored* keys, const Stored* updates,
                                           int columns) {
    copy<KEY_SIZE, KEYS, KEY_SIZE>(m.keys, keys, CHUNK);
    copy<TILE, LINE, VALUE_SIZE>(m.updates, updates, CHUNK, columns);
    cp_async_commit();
}

// What a thread has of the open chunk's updates, with those of row i: the right operands of tensor-core steps. The four
// threads of a column have all of them.
struct Updates {
    u32 of[PAIRS][2];  // of blocks
    u32 of_block[2];   // of the row's own one, without what lies behind its rows
    u32 all[8];        // the column's, of that block
    int in_row, i, block;
    u32 low, high;  // where row i lies in them

    __device__ __forceinline__ Updates(const Stored (&pairs)[PAIRS][4], int i, int block, int in_row,
                                       int in_pair)
        : in_row(in_row), i(i), block(block) {
#pragma unroll
        for (int n = 0; n < PAIRS; ++n)
#pragma unroll
            for (int y = 0; y < 2; ++y) of[n][y] = pairs[n][2 * y] | u32(pairs[n][2 * y + 1]) << 16;
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            u32 both = of[0][y];
#pragma unroll
            for (int n = 1; n < PAIRS; ++n)
                if (block == n * 16) both = of[n][y];
            const int j = block + in_pair + y * 8;
            of_block[y] = j + 1 < i ? both : j < i ? both & 0xFFFF : 0;
        }
        if constexpr (DELTA)
#pragma unroll
            for (int n = 0; n < 8; ++n)
                all[n] = u32(__shfl_sync(ALL, int(of_block[n / 4]), in_row * 4 + n % 4));
        const u32 place = in_pair == (i % 8 & 6) ? ALL : 0;
        low = i % 16 < 8 ? place : 0, high = place & ~low;
    }

    // Carries chains on by the blocks before.
    __device__ __forceinline__ void add_earlier(float (&acc)[4], const uint2 (&left)[PAIRS - 1]) const {
#pragma unroll
        for (int n = 0; n < PAIRS - 1; ++n)
            if (n * 16 < block) {
                const u32 a[4] = {left[n].x, 0, left[n].y, 0};
                mma_m16n8k16<TYPE == BF16>(acc, a, of[n]);
            }
    }

    // The row's update, from what is left of its value behind the blocks before. Weights are those of its own block.
    __device__ __forceinline__ Stored solve(float z, const float* weights, float beta) const {
        const float4* by = reinterpret_cast<const float4*>(weights);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float4 of = by[n];
            z = __fmaf_rn(-of.x, E::widen(u16(all[2 * n])), z);
            z = __fmaf_rn(-of.y, E::widen(u16(all[2 * n] >> 16)), z);
            z = __fmaf_rn(-of.z, E::widen(u16(all[2 * n + 1])), z);
            if (n < 3) z = __fmaf_rn(-of.w, E::widen(u16(all[2 * n + 1] >> 16)), z);
        }
        return E::narrow(__fmul_rn(beta, z));
    }

    // Carries chains on by the row's own block, with its update.
    __device__ __forceinline__ void add_own(float (&acc)[4], uint2 left, Stored update) {
        const u32 placed = u32(update) << i % 2 * 16;
        of_block[0] |= placed & low, of_block[1] |= placed & high;
        const u32 a[4] = {left.x, 0, left.y, 0};
        mma_m16n8k16<TYPE == BF16>(acc, a, of_block);
    }
};

// The epilogue of a plain product: D, or D^T, in memory. Uses the macros OUTPUT, ACCUMULATE, ALIGNED and
// those of accumulators_sm90.cuh. With GROUPED, of a grouped product: groups.cuh.
#pragma once

#ifndef GROUPED
#define GROUPED 0
#endif

#include "accumulators_sm90.cuh"
#include "groups.cuh"

static_assert(PANEL == 0 || (ALIGNED && !ACCUMULATE), "panels are aligned");

struct Params {
    TensorMap a, b, out_map;
#ifdef STEP_MAPS
    TensorMap a_stage, b_stage;  // a and b are maps of a k16 step of a stage, these of a whole stage
#endif
    void* out;
    const void* bias;
    const void* bounds;            // of the sequences, one more than there are of them
    i64 row_stride, batch_stride;  // of the output
    int m, n, k, batch;
    int a_batch, b_batch;  // 0 where one matrix serves the whole batch
    int sequences;
    int group;  // rows of tiles that are taken together, so that their operands stay in L2
#if GROUPED
    Groups groups;
    i64 bias_group;
#endif
#if SEGMENTS > 1
    float* sums;  // of segments that wait for others: memory of warpgroups
#endif
#ifdef SCALED
    const float *scale_a, *scale_b;
    i64 scale_a_row, scale_a_k, scale_b_row, scale_b_k;  // from one scale to the next
#if GROUPED
    i64 scale_group;  // from the scales of one group's matrix to those of the next
#endif
#endif
};

#if GROUPED
__device__ __forceinline__ i64 bias_offset(const Params& p, const TileCoord& tile) {
    return tile.batch * p.bias_group;
}
#endif

// f(accumulators, offset in the output, step from one column to the next there, columns left) for each row of
// this thread's, its pairs of columns lying 8 apart.
template <typename F>
__device__ __forceinline__ void for_each_row(Accumulators& acc, const Params& p, const TileCoord& tile,
                                             u32 thread, F f) {
    Fragment fragment(tile, thread);
    i64 right = TRANSPOSED ? p.row_stride : 1, down = TRANSPOSED ? 1 : p.row_stride;
#pragma unroll
    for (int mma_m = 0; mma_m < MMA_M; ++mma_m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = fragment.row + mma_m * 64 + half * 8;
            bool inside = row < (GROUPED ? tile.m_end : p.m) && (ROWS % 64 == 0 || row < tile.m + int(ROWS));
            f(&acc[mma_m][half * 2],
              (GROUPED == OF_ROWS ? 0 : tile.batch * p.batch_stride) + row * down + fragment.column * right,
              right, inside ? (GROUPED ? tile.n_end : p.n) - fragment.column : 0);
        }
    }
}

#ifndef WIDE
#define WIDE 0
#endif

#if WIDE > 0 && !TRANSPOSED
// Straight from the registers, sixteen bytes a lane: neighbours trade pairs, so that a quad's row is WIDE * 64
// contiguous bytes. Memory of another GPU takes whole lines much faster than sectors. Eight divides n.
__device__ __forceinline__ void trade(float& give, float& keep, int mask, bool upper) {
    float sent = upper ? keep : give;
    sent = __shfl_xor_sync(0xffffffff, sent, mask);
    if (upper)
        keep = sent;
    else
        give = sent;
}

__device__ __forceinline__ void store_wide(Accumulators& acc, const Params& p, const TileCoord& tile,
                                           u32 thread) {
    const Fragment fragment(tile, thread);
    const bool odd = thread % 2, below = thread / 4 % 2;
    constexpr int STEP = WIDE * 16;
    float* out = static_cast<float*>(p.out) + tile.batch * p.batch_stride;
    const int column = fragment.column - fragment.column % 8 + thread / 2 % 2 * 4 + odd * 8;
#pragma unroll
    for (int mma_m = 0; mma_m < MMA_M; ++mma_m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = fragment.row + mma_m * 64 + half * 8;
#pragma unroll
            for (int i = 0; i < BLOCK_N; i += STEP) {
                float quads[WIDE][4];
#pragma unroll
                for (int w = 0; w < WIDE; ++w) {
                    const float* d = &acc[mma_m][half * 2 + (i / 8 + 2 * w) * 4];
                    // [0, 1]: what the even lane keeps, [2, 3]: what it gives for the odd one's
                    float first[2] = {d[0], d[1]}, second[2] = {d[4], d[5]};
#pragma unroll
                    for (int j = 0; j < 2; ++j) trade(second[j], first[j], 1, odd);
                    quads[w][0] = first[0];
                    quads[w][1] = first[1];
                    quads[w][2] = second[0];
                    quads[w][3] = second[1];
                }
                if constexpr (WIDE == 2) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) trade(quads[1][j], quads[0][j], 4, below);
                }
#pragma unroll
                for (int w = 0; w < WIDE; ++w) {
                    const int to_row = WIDE == 2 ? row - below + w : row;
                    const int to = column + i + (WIDE == 2 ? below * 16 : 0);
                    const bool inside = to_row < p.m && (ROWS % 64 == 0 || to_row < tile.m + int(ROWS));
                    if (inside && to < p.n)
                        *reinterpret_cast<float4*>(out + to_row * p.row_stride + to) =
                            make_float4(quads[w][0], quads[w][1], quads[w][2], quads[w][3]);
                }
            }
        }
    }
}
#endif

// Straight from the registers.
template <int type>
__device__ __forceinline__ void store(Accumulators& acc, const Params& p, const TileCoord& tile, u32 thread) {
    using Out = Element<type>;
    for_each_row(acc, p, tile, thread, [&](const float* d, i64 offset, i64 right, int left) {
        auto* to = static_cast<typename Out::Stored*>(p.out) + offset;
#pragma unroll
        for (int i = 0; i < BLOCK_N; i += 8, d += 4) {
            if (ALIGNED && !TRANSPOSED && i + 1 < left) {
                Out::store_pair(to + i, d[0], d[1]);
            } else {
                if (i < left) to[i * right] = Out::narrow(d[0]);
                if (i + 1 < left) to[(i + 1) * right] = Out::narrow(d[1]);
            }
        }
    });
}

struct Output {
    static constexpr u32 smem_bytes = 2 * PANEL_BYTES;  // of shared memory, for a warpgroup
    static constexpr bool overlap_m = !ACCUMULATE && (GROUPED != OF_ROWS || TRANSPOSED);
    static constexpr bool overlap_n = !ACCUMULATE && (GROUPED != OF_ROWS || !TRANSPOSED);

    u32 buffer = 0;

    static __device__ __forceinline__ void prefetch_maps(const Params& p) {
        if constexpr (PANEL > 0) prefetch_tensor_map(p.out_map);
    }
    // What the chains of a tile start from.
    __device__ __forceinline__ void init(Accumulators& acc, const Params& p, const TileCoord& tile,
                                         u32 thread) {
        for_each_row(acc, p, tile, thread, [&](float* d, i64 offset, i64 right, int left) {
            const float* from = static_cast<const float*>(p.out) + offset;
#pragma unroll
            for (int i = 0; i < BLOCK_N; i += 8, d += 4) {
                d[0] = d[1] = 0;
                if constexpr (ACCUMULATE) {
                    // Not in pairs: with a branch between two ways to load, ptxas serialises wgmma (C7515).
                    if (i < left) d[0] = from[i * right];
                    if (i + 1 < left) d[1] = from[(i + 1) * right];
                }
            }
        });
    }
    // What becomes of them.
    __device__ __forceinline__ void apply(Accumulators& acc, u32 panels, const Params& p,
                                          const TileCoord& tile, u32 warpgroup, u32 thread) {
        if constexpr (BIAS != NONE) add_bias<BIAS>(acc, p, tile, thread);
        bool whole = GROUPED != OF_ROWS || tile.m + int(ROWS) <= tile.m_end;  // panels are
        if (PANEL > 0 && whole) {
            TileCoord to = tile;
            if (GROUPED == OF_ROWS) to.batch = 0;  // rows of all groups are one matrix
#pragma unroll
            for (u32 mma_m = 0; mma_m < MMA_M; ++mma_m) {
                if constexpr (PANEL > 0)
                    store_panels<OUTPUT>(acc, mma_m, panels, p, to, warpgroup, thread, buffer);
            }
        } else {
#if WIDE > 0 && !TRANSPOSED
            store_wide(acc, p, tile, thread);
#else
            store<OUTPUT>(acc, p, tile, thread);
#endif
        }
    }
    // The block may not leave while TMA still reads its shared memory.
    __device__ __forceinline__ void drain(u32 thread) {
        if constexpr (PANEL > 0) {
            if (thread == 0) tma_store_wait_read<0>();
        }
    }
};

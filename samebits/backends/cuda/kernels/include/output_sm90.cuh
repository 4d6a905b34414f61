// The epilogue of a plain product: D, or D^T, in memory. Uses the macros OUTPUT, ACCUMULATE, ALIGNED and
// those of accumulators_sm90.cuh. With GROUPED, of a grouped product: groups.cuh.
#pragma once

#ifndef GROUPED
#define GROUPED 0
#endif

#include "accumulators_sm90.cuh"
#include "groups.cuh"

static_assert(PANEL == 0 || OUTPUT != F32, "panels are of 16-bit elements");

// Whether TMA stores the panels: it cannot where rows do not lie multiples of 16 bytes apart.
constexpr bool BY_TMA = PANEL > 0 && ALIGNED;

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

// Stores one wgmma tile of 64 rows where TMA cannot: each warp packs its sixteen lines of a panel, and then
// stores them one by one, in words of four bytes, whatever a row's address. What sticks out at the ends of a
// line are elements.
template <int type>
__device__ __forceinline__ void store_lines(Accumulators& acc, u32 mma_m, u32 panels, const Params& p,
                                            const TileCoord& tile, u32 thread, u32& buffer) {
    static_assert(PANEL == 64, "a lane has a word of each line");
    u32 first = thread / 32 * 16, lane = thread % 32;
    const int row = tile.m + int(mma_m * 64 + first), rows = (GROUPED ? tile.m_end : p.m) - row;
#pragma unroll
    for (u32 column = 0; column < BLOCK_N; column += PANEL) {
        u32 panel = panels + buffer * PANEL_BYTES;
        pack_panel<type>(acc[mma_m], column, panel + panel_offset(thread));
        __syncwarp();  // and no more: lanes that are done pack the other panel
        const int at = tile.n + int(column + 2 * lane), left = (GROUPED ? tile.n_end : p.n) - at;
        u16* to = static_cast<u16*>(p.out) + tile.batch * p.batch_stride + row * p.row_stride + at;
#pragma unroll 4
        for (u32 line = 0; line < 16; ++line, to += p.row_stride) {
            u32 chunk = lane / 4 ^ line % 8;
            u32 pair = load_shared_word(panel + (first + line) * PANEL * 2 + chunk * 16 + lane % 4 * 4);
            u32 next = __shfl_down_sync(0xFFFFFFFF, pair, 1);
            if (int(line) >= rows) break;
            const bool odd = reinterpret_cast<u64>(to) & 2;
            if (odd) {
                if (lane == 0 && left > 0) to[0] = u16(pair);
                pair = __funnelshift_r(pair, next, 16);  // elements 1 and 2
            }
            const int stored = lane == 31 && odd ? min(left, 2) : left;  // element 2 is not in the panel
            if (stored > 1 + odd)
                *reinterpret_cast<u32*>(to + odd) = pair;
            else if (stored > odd)
                to[odd] = u16(pair);
        }
        buffer ^= 1;
    }
}

struct Output {
    static constexpr u32 smem_bytes = 2 * PANEL_BYTES;  // of shared memory, for a warpgroup
    static constexpr bool overlap_m = !ACCUMULATE && (GROUPED != OF_ROWS || TRANSPOSED);
    static constexpr bool overlap_n = !ACCUMULATE && (GROUPED != OF_ROWS || !TRANSPOSED);

    u32 buffer = 0;

    static __device__ __forceinline__ void prefetch_maps(const Params& p) {
        if constexpr (BY_TMA) prefetch_tensor_map(p.out_map);
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
                if constexpr (BY_TMA)
                    store_panels<OUTPUT>(acc, mma_m, panels, p, to, warpgroup, thread, buffer);
                else if constexpr (PANEL > 0)
                    store_lines<OUTPUT>(acc, mma_m, panels, p, to, thread, buffer);
            }
        } else {
            store<OUTPUT>(acc, p, tile, thread);
        }
    }
    // The block may not leave while TMA still reads its shared memory.
    __device__ __forceinline__ void drain(u32 thread) {
        if constexpr (BY_TMA) {
            if (thread == 0) tma_store_wait_read<0>();
        }
    }
};

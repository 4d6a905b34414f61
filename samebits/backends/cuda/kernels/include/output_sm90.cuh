// The epilogue of a plain product: D, or D^T, in memory.
//
//   OUTPUT               F32, BF16 or F16
//   ACCUMULATE           start the chains from the output
//   ALIGNED              the output's rows allow vector stores
#pragma once

#include "accumulators_sm90.cuh"

static_assert(PANEL == 0 || (ALIGNED && OUTPUT != F32), "panels are of 16-bit elements, and aligned");

struct Problem {
    TensorMap a, b, out_map;
    void* out;
    const void* bias;
    const void* bounds;  // of the sequences, one more than there are of them
    long long row_stride, batch_stride;  // of the output
    int m, n, k, batch;
    int a_batch, b_batch;  // 0 where one matrix serves the whole batch
    int sequences;
    int group;  // rows of tiles walked together, so that their operands stay in L2
};

// f(accumulators, offset in the output, step from one column to the next there, columns left) for each row of this
// thread's, its pairs of columns lying 8 apart.
template <typename F>
__device__ __forceinline__ void for_each_row(Accumulators& acc, const Problem& p, const Place& place, u32 thread, F f) {
    Fragment fragment(place, thread);
    long long right = TRANSPOSED ? p.row_stride : 1, down = TRANSPOSED ? 1 : p.row_stride;
#pragma unroll
    for (int band = 0; band < BANDS; ++band) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = fragment.row + band * 64 + half * 8;
            bool inside = row < p.m && (ROWS % 64 == 0 || row < place.m + int(ROWS));
            f(&acc[band][half * 2], place.batch * p.batch_stride + row * down + fragment.column * right, right,
              inside ? p.n - fragment.column : 0);
        }
    }
}

// Straight from the registers.
template <int type>
__device__ __forceinline__ void store(Accumulators& acc, const Problem& p, const Place& place, u32 thread) {
    using Out = Element<type>;
    for_each_row(acc, p, place, thread, [&](const float* d, long long offset, long long right, int left) {
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
    static constexpr u32 bytes = 2 * PANEL_BYTES;  // of shared memory, for a warpgroup
    static constexpr bool recompute_m = !ACCUMULATE, recompute_n = !ACCUMULATE;

    u32 buffer = 0;

    static __device__ __forceinline__ void prepare(const Problem& p) {
        if constexpr (PANEL > 0) prefetch_map(p.out_map);
    }
    // What the chains of a tile start from.
    __device__ __forceinline__ void start(Accumulators& acc, const Problem& p, const Place& place, u32 thread) {
        for_each_row(acc, p, place, thread, [&](float* d, long long offset, long long right, int left) {
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
    __device__ __forceinline__ void finish(Accumulators& acc, u32 panels, const Problem& p, const Place& place,
                                           u32 warpgroup, u32 thread) {
        if constexpr (BIAS != NONE) add_bias<BIAS>(acc, p, place, thread);
        if constexpr (PANEL > 0) {
#pragma unroll
            for (u32 band = 0; band < BANDS; ++band) {
                copy_band<OUTPUT>(acc, band, panels, p, place, warpgroup, thread, buffer);
            }
        } else {
            store<OUTPUT>(acc, p, place, thread);
        }
    }
    // Shared memory must outlive what still reads it.
    __device__ __forceinline__ void end(u32 thread) {
        if constexpr (PANEL > 0) {
            if (thread == 0) copy_out_wait_read<0>();
        }
    }
};

// What epilogues on Hopper do with a warpgroup's accumulators: which elements a thread has, adding a bias,
// storing 16-bit results by TMA. Uses the macros TRANSPOSED, BIAS and PANEL of the kernel.
//
// Element (row, column) of a 64-row wgmma tile lies in thread 4 (row % 8) + column % 8 / 2 of warp row / 16,
// at index column / 8 * 4 + row % 16 / 8 * 2 + column % 2.
#pragma once

#include "convert.cuh"
#include "pipeline_sm90.cuh"

constexpr u32 PANEL_BYTES = 64 * PANEL * 2;

static_assert(PANEL == 0 ||
                  (ROWS % 64 == 0 && PANEL <= BLOCK_N && (TRANSPOSED ? PANEL % 8 : BLOCK_N % PANEL) == 0),
              "panels are whole");

// Row and column of a thread's first element.
struct Fragment {
    int row, column;

    __device__ Fragment(const TileCoord& tile, u32 thread)
        : row(tile.m + thread / 32 * 16 + thread % 32 / 4), column(tile.n + thread % 4 * 2) {}
};

__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (u32 mma_m = 0; mma_m < MMA_M; ++mma_m) {
#pragma unroll
        for (u32 i = 0; i < BLOCK_N / 2; ++i) acc[mma_m][i] = 0;
    }
}

// Where a tile's bias begins.
template <typename Params>
__device__ __forceinline__ i64 bias_offset(const Params&, const TileCoord&) {
    return 0;
}

template <int type, typename Params>
__device__ __forceinline__ void add_bias(Accumulators& acc, const Params& p, const TileCoord& tile,
                                         u32 thread) {
    using Bias = Element<type>;
    Fragment fragment(tile, thread);
    int begin = TRANSPOSED ? fragment.row : fragment.column;
    const auto* bias = static_cast<const typename Bias::Stored*>(p.bias) + bias_offset(p, tile) + begin;
    int left = (TRANSPOSED ? p.m : p.n) - begin;
    auto at = [&](int i) { return i < left ? Bias::widen(bias[i]) : 0; };
    auto add = [](float* d, float first, float second) {
        d[0] = __fadd_rn(d[0], first);
        d[1] = __fadd_rn(d[1], second);
    };
    // Each value is used before the next is loaded: registers are scarce.
    if constexpr (TRANSPOSED) {
#pragma unroll
        for (int half = 0; half < 2 * MMA_M; ++half) {
            float value = at(half / 2 * 64 + half % 2 * 8);
#pragma unroll
            for (int i = 0; i < BLOCK_N / 8; ++i) add(&acc[half / 2][i * 4 + half % 2 * 2], value, value);
        }
    } else {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) {
            float first = at(i * 8), second = at(i * 8 + 1);
#pragma unroll
            for (int half = 0; half < 2 * MMA_M; ++half)
                add(&acc[half / 2][i * 4 + half % 2 * 2], first, second);
        }
    }
}

// Adds it to a thread's eight elements in 16 columns of one wgmma tile, which begin at `column` of the tile.
template <int type, typename Params>
__device__ __forceinline__ void add_bias(float* acc, const Params& p, const TileCoord& tile, u32 thread,
                                         u32 column) {
    using Bias = Element<type>;
    int begin = Fragment(tile, thread).column;
    const auto* bias = static_cast<const typename Bias::Stored*>(p.bias) + begin;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int at = int(column) + i / 2 * 8 + i % 2;
        float value = at < p.n - begin ? Bias::widen(bias[at]) : 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float& d = acc[i / 2 * 4 + half * 2 + i % 2];
            d = __fadd_rn(d, value);
        }
    }
}

// Where this lane's part of a panel begins, for `pack_panel`: its place in the line that it addresses for stmatrix.
// Lines are in TMA's swizzle. A line is a row of the tile, and a warp has sixteen. If transposed, it is a column,
// and a warp has sixteen of its 64 elements.
__device__ __forceinline__ u32 panel_offset(u32 thread) {
    u32 warp = thread / 32, lane = thread % 32;
    if constexpr (TRANSPOSED) {
        u32 line = lane / 16 * 8 + lane % 8;
        return line * 128 + (2 * warp + lane / 8 % 2 ^ line % 8) * 16;
    } else {
        u32 line = warp * 16 + lane % 16;
        return line * PANEL * 2 + (lane / 16 ^ line / (64 / PANEL) % (PANEL / 8)) * 16;
    }
}

// Rounds PANEL columns of one wgmma tile into a panel, sixteen at a time: a matrix of stmatrix has eight.
template <int type>
__device__ __forceinline__ void pack_panel(const float (&acc)[BLOCK_N / 2], u32 column, u32 to) {
    using Out = Element<type>;
#pragma unroll
    for (u32 i = 0; i < PANEL; i += 16) {
        const float* d = &acc[(column + i) / 2];
        const u32 first = Out::pack(d[0], d[1]), below = Out::pack(d[2], d[3]);
        if constexpr (!TRANSPOSED) {
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to ^ i * 2),
                         "r"(first), "r"(below), "r"(Out::pack(d[4], d[5])), "r"(Out::pack(d[6], d[7]))
                         : "memory");
        } else if (i + 16 <= PANEL) {
            asm volatile(
                "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 128),
                "r"(first), "r"(below), "r"(Out::pack(d[4], d[5])), "r"(Out::pack(d[6], d[7]))
                : "memory");
        } else {
            asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to + i * 128),
                         "r"(first), "r"(below)
                         : "memory");
        }
    }
}

// Stores one wgmma tile of 64 rows by TMA, PANEL columns at a time. A panel is written while TMA still reads
// the other: before it is written again, the store before last must have read it. The two take turns across
// tiles too. Where PANEL does not divide a transposed tile, its last panel is moved back into it.
template <int type, typename Params>
__device__ __forceinline__ void store_panels(Accumulators& acc, u32 mma_m, u32 panels, const Params& p,
                                             const TileCoord& tile, u32 warpgroup, u32 thread, u32& buffer) {
    u32 begin = panel_offset(thread);
#pragma unroll
    for (u32 step = 0; step < BLOCK_N; step += PANEL) {
        u32 column = min(step, BLOCK_N - PANEL), panel = panels + buffer * PANEL_BYTES;
        if (thread == 0) tma_store_wait_read<1>();
        named_barrier(EPILOGUE_BARRIER + warpgroup, 128);
        pack_panel<type>(acc[mma_m], column, panel + begin);
        fence_async_proxy();
        named_barrier(EPILOGUE_BARRIER + warpgroup, 128);
        int row = tile.m + mma_m * 64, at = tile.n + column;
        if (thread == 0)
            tma_store(p.out_map, panel, TRANSPOSED ? row : at, TRANSPOSED ? at : row, tile.batch);
        buffer ^= 1;
    }
}

// What epilogues on Hopper do with a warpgroup's accumulators: which elements a thread has, adding a bias,
// storing 16-bit results by TMA. Uses the macros TRANSPOSED, BIAS and PANEL of the kernel.
//
// Element (row, column) of a 64-row wgmma tile lies in thread 4 (row % 8) + column % 8 / 2 of warp row / 16,
// at index column / 8 * 4 + row % 16 / 8 * 2 + column % 2.
#pragma once

#include "convert.cuh"
#include "pipeline_sm90.cuh"

constexpr u32 PANEL_LINE = PANEL * (OUTPUT == F32 ? 4 : 2);  // bytes
constexpr u32 PANEL_BYTES = 64 * PANEL_LINE;

static_assert(PANEL == 0 || (!TRANSPOSED && ROWS % 64 == 0 && BLOCK_N % PANEL == 0), "panels are whole");

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

// Stores one wgmma tile of 64 rows by TMA, PANEL columns at a time. A panel is written while TMA still reads
// the other: before it is written again, the store before last must have read it. The two take turns across
// tiles too.
template <int type, typename Params>
__device__ __forceinline__ void store_panels(Accumulators& acc, u32 mma_m, u32 panels, const Params& p,
                                             const TileCoord& tile, u32 warpgroup, u32 thread, u32& buffer) {
    using Out = Element<type>;
    u32 warp = thread / 32, lane = thread % 32;
    u32 line = warp * 16 + lane % 16;  // whose address this lane gives to stmatrix
    u32 begin = line * PANEL_LINE + (lane / 16 ^ line / (128 / PANEL_LINE) % (PANEL_LINE / 16)) * 16;
    u32 pairs = warp * 16 + lane / 4;  // this lane's line, of 32-bit elements, and 8 below it
#pragma unroll
    for (u32 column = 0; column < BLOCK_N; column += PANEL) {
        u32 panel = panels + buffer * PANEL_BYTES, to = panel + begin;
        if (thread == 0) tma_store_wait_read<1>();
        named_barrier(EPILOGUE_BARRIER + warpgroup, 128);
#pragma unroll
        for (u32 chunk = 0; chunk < PANEL / 8; chunk += OUTPUT == F32 ? 1 : 2) {
            float* d = &acc[mma_m][(column / 8 + chunk) * 4];
            if constexpr (type == F32) {
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    const u32 row = pairs + half * 8;
                    const u32 unit = (chunk * 2 + lane % 4 / 2) ^ row / (128 / PANEL_LINE) % (PANEL_LINE / 16);
                    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(panel + row * PANEL_LINE + unit * 16 +
                                                                          lane % 2 * 8),
                                 "f"(d[half * 2]), "f"(d[half * 2 + 1])
                                 : "memory");
                }
                continue;
            } else {
            asm volatile(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to ^ chunk * 16),
                "r"(Out::pack(d[0], d[1])), "r"(Out::pack(d[2], d[3])), "r"(Out::pack(d[4], d[5])),
                "r"(Out::pack(d[6], d[7]))
                : "memory");
            }
        }
        fence_async_proxy();
        named_barrier(EPILOGUE_BARRIER + warpgroup, 128);
        if (thread == 0) tma_store(p.out_map, panel, tile.n + column, tile.m + mma_m * 64, tile.batch);
        buffer ^= 1;
    }
}

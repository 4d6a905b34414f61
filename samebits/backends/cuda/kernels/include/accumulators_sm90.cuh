// A warpgroup's accumulators: which elements a thread has, adding a bias to them, copying them out in 16
// bits.
//
// Element (row, column) of a 64-row band lies in thread 4 (row % 8) + column % 8 / 2 of warp row / 16, at
// index column / 8 * 4 + row % 16 / 8 * 2 + column % 2.
//
//   TRANSPOSED           D^T is what is wanted: the bias, if any, runs along the rows
//   BIAS                 F32, BF16, F16 or NONE
//   PANEL                columns of the output that leave at a time through shared memory; 0: none do
#pragma once

#include "convert.cuh"
#include "pipeline_sm90.cuh"

constexpr u32 PANEL_BYTES = 64 * PANEL * 2;

static_assert(PANEL == 0 || (!TRANSPOSED && ROWS % 64 == 0 && BLOCK_N % PANEL == 0), "panels are whole");

// The first of this thread's elements.
struct Fragment {
    int row, column;

    __device__ Fragment(const Place& place, u32 thread)
        : row(place.m + thread / 32 * 16 + thread % 32 / 4), column(place.n + thread % 4 * 2) {}
};

__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (u32 band = 0; band < BANDS; ++band) {
#pragma unroll
        for (u32 i = 0; i < BLOCK_N / 2; ++i) acc[band][i] = 0;
    }
}

template <int type, typename Problem>
__device__ __forceinline__ void add_bias(Accumulators& acc, const Problem& p, const Place& place,
                                         u32 thread) {
    using Bias = Element<type>;
    Fragment fragment(place, thread);
    int begin = TRANSPOSED ? fragment.row : fragment.column;
    const auto* bias = static_cast<const typename Bias::Stored*>(p.bias) + begin;
    int left = (TRANSPOSED ? p.m : p.n) - begin;
    auto at = [&](int i) { return i < left ? Bias::widen(bias[i]) : 0; };
    auto add = [](float* d, float first, float second) {
        d[0] = __fadd_rn(d[0], first);
        d[1] = __fadd_rn(d[1], second);
    };
    // Each value is used up before the next is loaded: registers are scarce.
    if constexpr (TRANSPOSED) {
#pragma unroll
        for (int half = 0; half < 2 * BANDS; ++half) {
            float value = at(half / 2 * 64 + half % 2 * 8);
#pragma unroll
            for (int i = 0; i < BLOCK_N / 8; ++i) add(&acc[half / 2][i * 4 + half % 2 * 2], value, value);
        }
    } else {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) {
            float first = at(i * 8), second = at(i * 8 + 1);
#pragma unroll
            for (int half = 0; half < 2 * BANDS; ++half)
                add(&acc[half / 2][i * 4 + half % 2 * 2], first, second);
        }
    }
}

// To a thread's eight elements in 16 columns of one band, which begin at `column` of the tile.
template <int type, typename Problem>
__device__ __forceinline__ void add_bias(float* acc, const Problem& p, const Place& place, u32 thread,
                                         u32 column) {
    using Bias = Element<type>;
    int begin = Fragment(place, thread).column;
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

// A band of 64 rows, through shared memory in panels, each copied out while the next is written. The two
// buffers take turns from tile to tile too: the copy before last has then read the buffer that is written.
template <int type, typename Problem>
__device__ __forceinline__ void copy_band(Accumulators& acc, u32 band, u32 panels, const Problem& p,
                                          const Place& place, u32 warpgroup, u32 thread, u32& buffer) {
    using Out = Element<type>;
    u32 warp = thread / 32, lane = thread % 32;
    u32 line = warp * 16 + lane % 16;  // that this lane addresses for stmatrix
    u32 begin = line * PANEL * 2 + (lane / 16 ^ line / (64 / PANEL) % (PANEL / 8)) * 16;
#pragma unroll
    for (u32 column = 0; column < BLOCK_N; column += PANEL) {
        u32 panel = panels + buffer * PANEL_BYTES, to = panel + begin;
        if (thread == 0) copy_out_wait_read<1>();
        named_barrier(OWN + warpgroup, 128);
#pragma unroll
        for (u32 chunk = 0; chunk < PANEL / 8; chunk += 2) {
            float* d = &acc[band][(column / 8 + chunk) * 4];
            asm volatile(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to ^ chunk * 16),
                "r"(Out::pack(d[0], d[1])), "r"(Out::pack(d[2], d[3])), "r"(Out::pack(d[4], d[5])),
                "r"(Out::pack(d[6], d[7]))
                : "memory");
        }
        async_proxy_fence();
        named_barrier(OWN + warpgroup, 128);
        if (thread == 0) copy_out(p.out_map, panel, place.n + column, place.m + band * 64, place.batch);
        buffer ^= 1;
    }
}

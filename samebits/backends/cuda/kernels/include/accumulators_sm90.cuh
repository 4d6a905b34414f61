// A warpgroup's accumulators: which elements a thread has, adding a bias to them, copying them out in 16 bits.
//
// Element (row, column) of a 64-row band lies in thread 4 (row % 8) + column % 8 / 2 of warp row / 16, at index
// column / 8 * 4 + row % 16 / 8 * 2 + column % 2.
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

// To all columns, or to some.
template <int type, u32 columns = BLOCK_N, typename Problem>
__device__ __forceinline__ void add_bias(Accumulators& acc, const Problem& p, const Place& place, u32 thread,
                                         u32 first_column = 0) {
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
        for (int j = 0; j < columns / 8; ++j) {
            int i = first_column / 8 + j;
            float first = at(i * 8), second = at(i * 8 + 1);
#pragma unroll
            for (int half = 0; half < 2 * BANDS; ++half) add(&acc[half / 2][i * 4 + half % 2 * 2], first, second);
        }
    }
}

// Through shared memory in panels of 64 rows, each copied out while the next is written. The two buffers take
// turns from tile to tile too: the copy before last has then read the buffer that is written.
template <int type, typename Problem, typename Change>
__device__ __forceinline__ void copy_panels(Accumulators& acc, u32 panels, const Problem& p, const Place& place,
                                            u32 warpgroup, u32 thread, u32& buffer, Change change) {
    using Out = Element<type>;
    u32 warp = thread / 32, lane = thread % 32;
    u32 line = warp * 16 + lane % 16;  // that this lane addresses for stmatrix
#pragma unroll
    for (u32 band = 0; band < BANDS; ++band) {
#pragma unroll
        for (u32 column = 0; column < BLOCK_N; column += PANEL) {
            u32 panel = panels + buffer * PANEL_BYTES;
            change(band, column);
            if (thread == 0) copy_out_wait_read<1>();
            named_barrier(OWN + warpgroup, 128);
#pragma unroll
            for (u32 chunk = 0; chunk < PANEL / 8; chunk += 2) {
                float* d = &acc[band][(column / 8 + chunk) * 4];
                u32 swizzle = line / (64 / PANEL) % (PANEL / 8);
                u32 to = panel + line * PANEL * 2 + ((chunk + lane / 16) ^ swizzle) * 16;
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
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
}

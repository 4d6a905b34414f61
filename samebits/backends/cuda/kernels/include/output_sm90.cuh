// Where a warpgroup's accumulators start from and where they go.
//
// Element (row, column) of a 64-row band lies in thread 4 (row % 8) + column % 8 / 2 of warp row / 16, at index
// column / 8 * 4 + row % 16 / 8 * 2 + column % 2.
#pragma once

// This thread's place in a band, and where that is in the output.
struct Fragment {
    int row, column;  // the first of its elements
    long long right;  // from one column to the next in the output

    __device__ Fragment(const Problem& p, const Place& place, u32 thread)
        : row(place.m + thread / 32 * 16 + thread % 32 / 4), column(place.n + thread % 4 * 2),
          right(TRANSPOSED ? p.row_stride : 1) {}

    // f(accumulators, offset in the output, columns left) for each row, its pairs of columns lying 8 apart.
    template <typename F>
    __device__ __forceinline__ void for_each_row(Accumulators& acc, const Problem& p, const Place& place, F f) const {
#pragma unroll
        for (int band = 0; band < BANDS; ++band) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int at = row + band * 64 + half * 8;
                bool inside = at < p.m && (ROWS % 64 == 0 || at < place.m + int(ROWS));
                long long down = TRANSPOSED ? 1 : p.row_stride;
                f(&acc[band][half * 2], place.batch * p.batch_stride + at * down + column * right,
                  inside ? p.n - column : 0);
            }
        }
    }
};

__device__ __forceinline__ void start(Accumulators& acc, const Problem& p, const Place& place, u32 thread) {
    Fragment fragment(p, place, thread);
    fragment.for_each_row(acc, p, place, [&](float* d, long long offset, int left) {
        const float* from = static_cast<const float*>(p.out) + offset;
#pragma unroll
        for (int i = 0; i < BLOCK_N; i += 8, d += 4) {
            d[0] = d[1] = 0;
            if constexpr (ACCUMULATE) {
                // Not in pairs: with a branch between two ways to load, ptxas serialises wgmma (C7515).
                if (i < left) d[0] = from[i * fragment.right];
                if (i + 1 < left) d[1] = from[(i + 1) * fragment.right];
            }
        }
    });
}

template <int type>
__device__ __forceinline__ void add_bias(Accumulators& acc, const Problem& p, const Place& place, u32 thread) {
    using Bias = Element<type>;
    Fragment fragment(p, place, thread);
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
            for (int half = 0; half < 2 * BANDS; ++half) add(&acc[half / 2][i * 4 + half % 2 * 2], first, second);
        }
    }
}

// Straight from the registers.
template <int type>
__device__ __forceinline__ void store(Accumulators& acc, const Problem& p, const Place& place, u32 thread) {
    using Out = Element<type>;
    Fragment fragment(p, place, thread);
    fragment.for_each_row(acc, p, place, [&](const float* d, long long offset, int left) {
        auto* to = static_cast<typename Out::Stored*>(p.out) + offset;
#pragma unroll
        for (int i = 0; i < BLOCK_N; i += 8, d += 4) {
            if (ALIGNED && !TRANSPOSED && i + 1 < left) {
                Out::store_pair(to + i, d[0], d[1]);
            } else {
                if (i < left) to[i * fragment.right] = Out::narrow(d[0]);
                if (i + 1 < left) to[(i + 1) * fragment.right] = Out::narrow(d[1]);
            }
        }
    });
}

// Through shared memory in panels of 64 rows, each copied out while the next is written. The two buffers take
// turns from tile to tile too: the copy before last has then read the buffer that is written.
template <int type>
__device__ __forceinline__ void copy_panels(Accumulators& acc, u32 panels, const Problem& p, const Place& place,
                                            u32 warpgroup, u32 thread, u32& buffer) {
    using Out = Element<type>;
    u32 warp = thread / 32, lane = thread % 32;
    u32 line = warp * 16 + lane % 16;  // that this lane addresses for stmatrix
#pragma unroll
    for (u32 band = 0; band < BANDS; ++band) {
#pragma unroll
        for (u32 column = 0; column < BLOCK_N; column += PANEL) {
            u32 panel = panels + buffer * PANEL_BYTES;
            if (thread == 0) copy_out_wait_read<1>();
            named_barrier(OUT + warpgroup, 128);
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
            named_barrier(OUT + warpgroup, 128);
            if (thread == 0) copy_out(p.out_map, panel, place.n + column, place.m + band * 64, place.batch);
            buffer ^= 1;
        }
    }
}

template <int bias, int output>
__device__ __forceinline__ void finish(Accumulators& acc, u32 panels, const Problem& p, const Place& place,
                                       u32 warpgroup, u32 thread, u32& buffer) {
    if constexpr (bias != NONE) add_bias<bias>(acc, p, place, thread);
    if constexpr (PANEL > 0) {
        copy_panels<output>(acc, panels, p, place, warpgroup, thread, buffer);
    } else {
        store<output>(acc, p, place, thread);
    }
}

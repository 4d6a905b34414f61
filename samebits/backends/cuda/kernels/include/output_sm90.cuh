// Where a warpgroup's accumulators start from and where they go.
//
// Element (row, column) of a 64-row band lies in thread 4 (row % 8) + column % 8 / 2 of warp row / 16, at index
// column / 8 * 4 + row % 16 / 8 * 2 + column % 2.
#pragma once

// f(accumulator, row, column) for each pair of columns of this thread, rows and columns counted in the whole D.
template <typename F>
__device__ __forceinline__ void for_each_pair(Accumulators& acc, const Place& place, u32 thread, F f) {
    u32 warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (u32 band = 0; band < BANDS; ++band) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            u32 row = band * 64 + warp * 16 + half * 8 + lane / 4;
            if (ROWS % 64 != 0 && row >= ROWS) continue;
#pragma unroll
            for (u32 i = 0; i < BLOCK_N / 8; ++i) {
                f(&acc[band][i * 4 + half * 2], place.m + int(row), place.n + int(i * 8 + lane % 4 * 2));
            }
        }
    }
}

__device__ __forceinline__ long long out_index(const Problem& p, int batch, int row, int column) {
    long long at = TRANSPOSED ? column * p.row_stride + row : row * p.row_stride + column;
    return batch * p.batch_stride + at;
}

__device__ __forceinline__ void start(Accumulators& acc, const Problem& p, const Place& place, u32 thread) {
    for_each_pair(acc, place, thread, [&](float* pair, int row, int column) {
        pair[0] = pair[1] = 0;
        if constexpr (ACCUMULATE) {
            const float* from = static_cast<const float*>(p.out) + out_index(p, place.batch, row, column);
            if (row < p.m && column + 1 < p.n && ALIGNED && !TRANSPOSED) {
                float2 both = *reinterpret_cast<const float2*>(from);
                pair[0] = both.x;
                pair[1] = both.y;
            } else if (row < p.m) {
                if (column < p.n) pair[0] = from[0];
                if (column + 1 < p.n) pair[1] = from[TRANSPOSED ? p.row_stride : 1];
            }
        }
    });
}

template <int type>
__device__ __forceinline__ void add_bias(Accumulators& acc, const Problem& p, const Place& place, u32 thread) {
    using Bias = Element<type>;
    const auto* bias = static_cast<const typename Bias::Stored*>(p.bias);
    for_each_pair(acc, place, thread, [&](float* pair, int row, int column) {
        int first = TRANSPOSED ? row : column, second = TRANSPOSED ? row : column + 1;
        int end = TRANSPOSED ? p.m : p.n;
        if (first < end) pair[0] = __fadd_rn(pair[0], Bias::widen(bias[first]));
        if (second < end) pair[1] = __fadd_rn(pair[1], Bias::widen(bias[second]));
    });
}

// Straight from the registers.
template <int type>
__device__ __forceinline__ void store(Accumulators& acc, const Problem& p, const Place& place, u32 thread) {
    using Out = Element<type>;
    for_each_pair(acc, place, thread, [&](float* pair, int row, int column) {
        auto* to = static_cast<typename Out::Stored*>(p.out) + out_index(p, place.batch, row, column);
        if (row < p.m && column + 1 < p.n && ALIGNED && !TRANSPOSED) {
            Out::store_pair(to, pair[0], pair[1]);
        } else if (row < p.m) {
            if (column < p.n) to[0] = Out::narrow(pair[0]);
            if (column + 1 < p.n) to[TRANSPOSED ? p.row_stride : 1] = Out::narrow(pair[1]);
        }
    });
}

// Through shared memory in panels of 64 x 64, each copied out while the next is written.
template <int type>
__device__ __forceinline__ void copy_panels(Accumulators& acc, u32 panels, const Problem& p, const Place& place,
                                            u32 warpgroup, u32 thread) {
    using Out = Element<type>;
    u32 warp = thread / 32, lane = thread % 32;
    u32 line = warp * 16 + lane % 16;  // that this lane addresses for stmatrix
    u32 buffer = 0;
#pragma unroll
    for (u32 band = 0; band < BANDS; ++band) {
#pragma unroll
        for (u32 column = 0; column < BLOCK_N; column += 64) {
            u32 panel = panels + buffer * PANEL_BYTES;
            if (thread == 0) copy_out_wait_read<1>();
            named_barrier(1 + warpgroup, 128);
#pragma unroll
            for (u32 chunk = 0; chunk < 8; chunk += 2) {
                float* d = &acc[band][(column / 8 + chunk) * 4];
                u32 to = panel + line * 128 + ((chunk + lane / 16) ^ (line % 8)) * 16;
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                             "r"(Out::pack(d[0], d[1])), "r"(Out::pack(d[2], d[3])), "r"(Out::pack(d[4], d[5])),
                             "r"(Out::pack(d[6], d[7]))
                             : "memory");
            }
            async_proxy_fence();
            named_barrier(1 + warpgroup, 128);
            if (thread == 0) copy_out(p.out_map, panel, place.n + column, place.m + band * 64, place.batch);
            buffer ^= 1;
        }
    }
}

template <int bias, int output>
__device__ __forceinline__ void finish(Accumulators& acc, u32 panels, const Problem& p, const Place& place,
                                       u32 warpgroup, u32 thread) {
    if constexpr (bias != NONE) add_bias<bias>(acc, p, place, thread);
    if constexpr (COPY_OUT) {
        copy_panels<output>(acc, panels, p, place, warpgroup, thread);
    } else {
        store<output>(acc, p, place, thread);
    }
}

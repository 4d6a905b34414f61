// Tiles of operands in shared memory, widened to f32, and the fragments that threads read from them. Uses the
// macros TILE_K, WARPS_M, WARPS_N and HELPERS of fma.cu.
#pragma once

#include "epilogue.cuh"

constexpr int WARPS = WARPS_M * WARPS_N;  // that multiply; if there are HELPERS, these copy for them
constexpr int THREADS = (WARPS + HELPERS) * 32, COPIERS = (HELPERS ? HELPERS : WARPS) * 32;

// Elements of global memory by row (m of a, n of b) and k, strides in elements.
struct Operand {
    const void* data;
    i64 batch, segment, row, k;
};

template <int KIND>
struct Stored {
    using Type = u16;
};

template <>
struct Stored<F32> {
    using Type = float;
};

enum Copy {
    ALONG_ROWS,    // element by element; neighbouring threads take neighbouring rows
    ALONG_K,       // element by element; neighbouring threads take neighbouring k
    ALONG_UNIT_K,  // the same, and k is contiguous
    FOUR_ROWS,     // four contiguous, aligned rows at a time
    FOUR_K,        // four contiguous, aligned k at a time
};

// Keeps the compiler from computing the addresses of all copies ahead of the loop, which takes too many
// registers.
template <class T>
__device__ __forceinline__ void step(const T*& pointer, i64 elements) {
    pointer += elements;
    asm volatile("" : "+l"(pointer));
}

// TILE_K of k for the rows that WARPS_ x LANES threads take, THREAD each. In shared memory a line is one k
// and runs along the rows, but under FOUR_K, where it is a row and runs along k. Rows that do not exist are
// not loaded: what is computed of them is never stored.
template <int WARPS_, int LANES, int THREAD, int KIND, int COPY>
struct Tile {
    static constexpr int ROWS = WARPS_ * LANES * THREAD;
    static constexpr int NEIGHBOURS = COPY == FOUR_K    ? 1
                                      : THREAD % 4 == 0 ? 4
                                                        : THREAD;  // rows side by side in a thread
    // Threads that copy along k write to different lines and shall meet no bank twice: eight k of four rows
    // do not if lines are four banks apart, 32 k of one row do not if lines are one bank apart. The first
    // keeps lines aligned. Nor shall threads that read different rows under FOUR_K.
    static constexpr int RUN = COPY == FOUR_K ? TILE_K / 4 : NEIGHBOURS == 1 ? 32 : 8;
    static constexpr int PITCH = COPY == FOUR_K ? TILE_K + 4 : NEIGHBOURS == 1 ? ROWS | 1 : ROWS + 4;
    static constexpr int K_PITCH = COPY == FOUR_K ? 1 : PITCH, ROW_PITCH = COPY == FOUR_K ? PITCH : 1;
    static constexpr int SIZE = (COPY == FOUR_K ? ROWS : TILE_K) * PITCH;
    static constexpr bool K_FIRST = COPY == ALONG_K || COPY == ALONG_UNIT_K || COPY == FOUR_K;
    static constexpr int WIDTH = COPY == FOUR_ROWS || COPY == FOUR_K ? 4 : 1;
    static constexpr int K_WIDTH = COPY == FOUR_K ? 4 : 1, ROW_WIDTH = COPY == FOUR_ROWS ? 4 : 1;
    static constexpr bool UNIT_K = COPY == ALONG_UNIT_K || COPY == FOUR_K;
    // What all copying threads copy at once.
    static constexpr int MOST_ROWS = K_FIRST ? COPIERS / RUN : COPIERS * WIDTH;
    static constexpr int AT_ONCE_ROWS = MOST_ROWS < ROWS ? MOST_ROWS : ROWS;
    static constexpr int AT_ONCE_K =
        COPIERS * WIDTH / AT_ONCE_ROWS;  // FOUR_K: its four count here, and not above
    static constexpr bool ASYNC = KIND == F32 && __CUDA_ARCH__ >= 800;
    using Element = typename Stored<KIND>::Type;
    static_assert(TILE_K % (RUN * K_WIDTH) == 0 && SIZE % 4 == 0 && (ROWS & (ROWS - 1)) == 0 &&
                  (COPIERS & (COPIERS - 1)) == 0);

    // The first row of a thread, and how far its row i is from that.
    __device__ static __forceinline__ int own(int warp, int lane) {
        return warp * LANES * THREAD + lane * NEIGHBOURS;
    }
    __device__ static constexpr int row(int i) {
        return i / NEIGHBOURS * LANES * NEIGHBOURS + i % NEIGHBOURS;
    }

    // `count` of k from `first_k` on, to the address in shared memory; WHOLE: that is TILE_K.
    template <bool WHOLE>
    __device__ static __forceinline__ void load(u32 to, const Operand& x, u32 batch, int segment,
                                                int first_row, int rows, int first_k, int count) {
        const int t = threadIdx.x - (THREADS - COPIERS);
        const int line = K_FIRST ? t / RUN % AT_ONCE_ROWS : t * WIDTH % AT_ONCE_ROWS;
        const int k =
            K_FIRST ? (t % RUN + t / (RUN * AT_ONCE_ROWS) * RUN) * K_WIDTH : t * WIDTH / AT_ONCE_ROWS;
        const i64 k_stride = UNIT_K ? 1 : x.k;
        const Element* data = static_cast<const Element*>(x.data) + batch * x.batch + segment * x.segment;
        const Element* from =
            data + (first_row + line) * (COPY == FOUR_ROWS ? 1 : x.row) + (first_k + k) * k_stride;
        const int rows_left = rows - first_row - line, k_left = count - k;
        to += (k * K_PITCH + line * ROW_PITCH) * 4;
        if constexpr (WHOLE && ASYNC) {
            const Element* row = from;
#pragma unroll
            for (int r = 0; r < ROWS; r += AT_ONCE_ROWS) {
                const Element* at = row;
                if (rows_left - r >= ROW_WIDTH && (AT_ONCE_K <= TILE_K || k_left > 0))
#pragma unroll
                    for (int i = 0; i < TILE_K; i += AT_ONCE_K) {
                        const u32 slot = to + (i * K_PITCH + r * ROW_PITCH) * 4;
                        if constexpr (WIDTH == 4)
                            cp_async_16(slot, at);
                        else
                            cp_async_4(slot, at);
                        if constexpr (UNIT_K)
                            at += AT_ONCE_K;
                        else
                            step(at, AT_ONCE_K * k_stride);
                    }
                step(row, AT_ONCE_ROWS * x.row);
            }
            if (COPY != FOUR_ROWS || rows_left <= 0 || rows_left % 4 == 0) return;
        }
        // What is not whole, one by one. Copies through registers too: taken together, they would drive
        // accumulators out.
#pragma unroll 1
        for (int r = 0; r < min(rows_left, ROWS); r += AT_ONCE_ROWS) {
            if (WHOLE && ASYNC && rows_left - r >= ROW_WIDTH) continue;
#pragma unroll 1
            for (int i = 0; i < min(k_left, TILE_K); i += AT_ONCE_K)
                copy(to + (i * K_PITCH + r * ROW_PITCH) * 4, from + r * x.row + i * k_stride,
                     COPY == FOUR_ROWS ? rows_left - r : k_left - i);
        }
    }

    // Up to `count` of WIDTH neighbours.
    __device__ static __forceinline__ void copy(u32 to, const Element* from, int count) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            if (i >= count) break;
            if constexpr (ASYNC)
                cp_async_4(to + i * 4, from + i);
            else
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + i * 4), "f"(widen(from, i, KIND))
                             : "memory");
        }
    }

    // The thread's rows at COUNT k, from k on.
    template <int COUNT>
    __device__ static __forceinline__ void read(float (&f)[COUNT][THREAD], const float* tile, int own,
                                                int k) {
        if constexpr (COPY == FOUR_K && COUNT % 4 == 0) {
#pragma unroll
            for (int i = 0; i < THREAD; ++i)
#pragma unroll
                for (int e = 0; e < COUNT; e += 4) {
                    const float4 x = *reinterpret_cast<const float4*>(tile + (own + row(i)) * PITCH + k + e);
                    f[e][i] = x.x, f[e + 1][i] = x.y, f[e + 2][i] = x.z, f[e + 3][i] = x.w;
                }
        } else {
#pragma unroll
            for (int e = 0; e < COUNT; ++e)
#pragma unroll
                for (int i = 0; i < THREAD; i += NEIGHBOURS) {
                    const float* from = tile + (k + e) * K_PITCH + (own + row(i)) * ROW_PITCH;
                    if constexpr (NEIGHBOURS == 4) {
                        const float4 x = *reinterpret_cast<const float4*>(from);
                        f[e][i] = x.x, f[e][i + 1] = x.y, f[e][i + 2] = x.z, f[e][i + 3] = x.w;
                    } else if constexpr (NEIGHBOURS == 2) {
                        const float2 x = *reinterpret_cast<const float2*>(from);
                        f[e][i] = x.x, f[e][i + 1] = x.y;
                    } else {
                        f[e][i] = *from;
                    }
                }
        }
    }
};

// Tiles of operands in shared memory, widened to f32, and the fragments that threads read from them.
#pragma once

#include "epilogue.cuh"

constexpr int WARPS = WARPS_M * WARPS_N;  // that multiply; HELPERS more only copy
constexpr int THREADS = (WARPS + HELPERS) * 32;

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
    ALONG_ROWS,       // element by element; neighbouring threads take neighbouring rows
    ALONG_K,          // element by element; neighbouring threads take neighbouring k
    ALONG_UNIT_K,     // the same, and k is contiguous
    FOUR_ROWS,        // four contiguous, aligned rows at a time
    FOUR_K,           // four contiguous, aligned k at a time
};

// Keeps the compiler from computing the addresses of all copies ahead of the loop, which takes too many registers.
template <class T>
__device__ __forceinline__ void step(const T*& pointer, i64 elements)
{
    pointer += elements;
    asm volatile("" : "+l"(pointer));
}

// TILE_K of k for the rows that WARPS_ x LANES threads take, THREAD each. In shared memory a line is one k and runs along
// the rows, but under FOUR_K, where it is a row and runs along k.
// Rows that do not exist are not loaded: what is computed of them is never stored.
template <int WARPS_, int LANES, int THREAD, int KIND, int COPY>
struct Tile {
    static constexpr int ROWS = WARPS_ * LANES * THREAD;
    static constexpr int NEIGHBOURS = COPY == FOUR_K ? 1 : THREAD % 4 == 0 ? 4 : THREAD;  // rows side by side in a thread
    // Threads that copy along k write to different lines and shall meet no bank twice: eight k of four rows do not if
    // lines are four banks apart, 32 k of one row do not if lines are one bank apart. The first keeps lines aligned.
    // Nor shall threads that read different rows under FOUR_K.
    static constexpr int RUN = COPY == FOUR_K ? TILE_K / 4 : NEIGHBOURS == 1 ? 32 : 8;
    static constexpr int PITCH = COPY == FOUR_K ? TILE_K + 4 : NEIGHBOURS == 1 ? ROWS | 1 : ROWS + 4;
    static constexpr int K_PITCH = COPY == FOUR_K ? 1 : PITCH, ROW_PITCH = COPY == FOUR_K ? PITCH : 1;
    static constexpr int SIZE = (COPY == FOUR_K ? ROWS : TILE_K) * PITCH;
    static constexpr bool K_FIRST = COPY == ALONG_K || COPY == ALONG_UNIT_K || COPY == FOUR_K;
    static constexpr int WIDTH = COPY == FOUR_ROWS || COPY == FOUR_K ? 4 : 1;
    static constexpr int K_WIDTH = COPY == FOUR_K ? 4 : 1;
    // What all threads copy at once.
    static constexpr int MOST_ROWS = K_FIRST ? THREADS / RUN : THREADS * WIDTH;
    static constexpr int AT_ONCE_ROWS = MOST_ROWS < ROWS ? MOST_ROWS : ROWS;
    static constexpr int AT_ONCE_K = THREADS * WIDTH / AT_ONCE_ROWS;  // FOUR_K: its four count here, and not above
    static constexpr bool ASYNC = KIND == F32 && __CUDA_ARCH__ >= 800;
    // Copies through registers are not taken together, or accumulators would have to leave theirs.
    static constexpr int UNROLL_ROWS = ASYNC ? ROWS / AT_ONCE_ROWS : 1;
    static constexpr int UNROLL_K = ASYNC ? (TILE_K + AT_ONCE_K - 1) / AT_ONCE_K : 1;
    using Element = typename Stored<KIND>::Type;
    static_assert(TILE_K % (RUN * K_WIDTH) == 0 && SIZE % 4 == 0 && (ROWS & (ROWS - 1)) == 0 && (THREADS & (THREADS - 1)) == 0);

    // The first row of a thread, and how far its row i is from that.
    __device__ static __forceinline__ int own(int warp, int lane) { return warp * LANES * THREAD + lane * NEIGHBOURS; }
    __device__ static constexpr int row(int i) { return i / NEIGHBOURS * LANES * NEIGHBOURS + i % NEIGHBOURS; }

    // `count` of k from `first_k` on; WHOLE: that is TILE_K.
    template <bool WHOLE>
    __device__ static __forceinline__ void load(
        float* to, const Operand& x, u32 batch, int segment, int first_row, int rows, int first_k, int count)
    {
        const int t = threadIdx.x;
        const int line = K_FIRST ? t / RUN % AT_ONCE_ROWS : t * WIDTH % AT_ONCE_ROWS;
        const int k = K_FIRST ? (t % RUN + t / (RUN * AT_ONCE_ROWS) * RUN) * K_WIDTH : t * WIDTH / AT_ONCE_ROWS;
        const i64 k_stride = COPY == ALONG_UNIT_K || COPY == FOUR_K ? 1 : x.k;
        const Element* data = static_cast<const Element*>(x.data) + batch * x.batch + segment * x.segment;
        const Element* of_rows = data + (first_row + line) * (COPY == FOUR_ROWS ? 1 : x.row) + (first_k + k) * k_stride;
        const int rows_left = rows - first_row - line, k_left = WHOLE ? TILE_K - k : count - k;
        to += k * K_PITCH + line * ROW_PITCH;
#pragma unroll UNROLL_ROWS
        for (int r = 0; r < ROWS; r += AT_ONCE_ROWS) {
            const Element* from = of_rows;
#pragma unroll UNROLL_K
            for (int i = 0; i < TILE_K; i += AT_ONCE_K) {
                if (r < rows_left && (i < k_left || (WHOLE && AT_ONCE_K <= TILE_K)))
                    copy(to + i * K_PITCH + r * ROW_PITCH, from,
                        COPY == FOUR_ROWS ? rows_left - r : WHOLE ? WIDTH : k_left - i);
                if (COPY == ALONG_UNIT_K || COPY == FOUR_K)
                    from += AT_ONCE_K;
                else
                    step(from, AT_ONCE_K * k_stride);
            }
            step(of_rows, AT_ONCE_ROWS * x.row);
        }
    }

    // Up to `count` of WIDTH neighbours.
    __device__ static __forceinline__ void copy(float* to, const Element* from, int count)
    {
        if constexpr (ASYNC && WIDTH == 4) {
            copy_async_16(shared_address(to), from, min(count, 4) * 4);
        } else if constexpr (ASYNC) {
            copy_async_4(shared_address(to), from);
        } else {
            float value[WIDTH] = {};
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (i < count) value[i] = widen(from, i, KIND);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) to[i] = value[i];
        }
    }

    // A share, one of COUNT, of the thread's rows of COUNT k, from k on.
    template <int COUNT>
    __device__ static __forceinline__ void read(float (&f)[COUNT][THREAD], const float* tile, int own, int k, int share)
    {
        if constexpr (COPY == FOUR_K && COUNT % 4 == 0) {
#pragma unroll
            for (int i = 0; i < THREAD * COUNT / 4; ++i) {
                if (i % COUNT != share) continue;
                const int r = i % THREAD, e = i / THREAD * 4;
                const float4 x = *reinterpret_cast<const float4*>(tile + (own + row(r)) * PITCH + k + e);
                f[e][r] = x.x, f[e + 1][r] = x.y, f[e + 2][r] = x.z, f[e + 3][r] = x.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < THREAD; i += NEIGHBOURS) {
                const float* from = tile + (k + share) * K_PITCH + (own + row(i)) * ROW_PITCH;
                if constexpr (NEIGHBOURS == 4) {
                    const float4 x = *reinterpret_cast<const float4*>(from);
                    f[share][i] = x.x, f[share][i + 1] = x.y, f[share][i + 2] = x.z, f[share][i + 3] = x.w;
                } else if constexpr (NEIGHBOURS == 2) {
                    const float2 x = *reinterpret_cast<const float2*>(from);
                    f[share][i] = x.x, f[share][i + 1] = x.y;
                } else {
                    f[share][i] = *from;
                }
            }
        }
    }
};

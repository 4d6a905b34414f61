// Tiles of operands in shared memory, widened to f32, and the fragments that threads read from them.
#pragma once

#include "epilogue.cuh"

constexpr int THREADS = WARPS_M * WARPS_N * 32;

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

// TILE_K of k for the rows that WARPS x LANES threads take, THREAD each.
//
// K_MAJOR: a line is a row and runs along k; else a line is one k and runs along the rows. VECTOR: four neighbours of
// a line are contiguous and aligned in global memory; else any stride and alignment will do.
// Rows that do not exist are loaded as another, or not at all: what is computed of them is never stored.
template <int WARPS, int LANES, int THREAD, int KIND, bool K_MAJOR, bool VECTOR>
struct Tile {
    static constexpr int ROWS = WARPS * LANES * THREAD;
    static constexpr int NEIGHBOURS = K_MAJOR ? 1 : THREAD % 4 == 0 ? 4 : THREAD;  // rows side by side in a thread
    static constexpr int LINES = K_MAJOR ? ROWS : TILE_K;
    static constexpr int LENGTH = K_MAJOR ? TILE_K : ROWS;
    static constexpr int PITCH = K_MAJOR ? TILE_K + 4 : (ROWS + 3) / 4 * 4;  // lanes in different lines: no bank twice
    static constexpr int SIZE = LINES * PITCH;
    static constexpr int WIDTH = VECTOR ? 4 : 1;
    static constexpr int CHUNKS = LINES * LENGTH / WIDTH;
    static constexpr int PASSES = (CHUNKS + THREADS - 1) / THREADS;
    static constexpr int UNROLL = PASSES <= 8 ? PASSES : 4;  // addresses take registers
    static constexpr bool ASYNC = KIND == F32 && __CUDA_ARCH__ >= 800;
    using Element = typename Stored<KIND>::Type;

    // The first row of a thread, and how far its row i is from that.
    __device__ static __forceinline__ int own(int warp, int lane) { return warp * LANES * THREAD + lane * NEIGHBOURS; }
    __device__ static constexpr int row(int i) { return i / NEIGHBOURS * LANES * NEIGHBOURS + i % NEIGHBOURS; }

    // `count` of k from `first_k` on; WHOLE: that is TILE_K.
    template <bool WHOLE>
    __device__ static __forceinline__ void load(
        float* to, const Operand& x, u32 batch, int segment, int first_row, int rows, int first_k, int count)
    {
        const Element* data = static_cast<const Element*>(x.data) + batch * x.batch + segment * x.segment;
#pragma unroll UNROLL
        for (int pass = 0; pass < PASSES; ++pass) {
            const int chunk = threadIdx.x + pass * THREADS;
            if (CHUNKS % THREADS != 0 && chunk >= CHUNKS) break;
            const int line = chunk * WIDTH / LENGTH, at = chunk * WIDTH % LENGTH;
            if constexpr (K_MAJOR) {
                const i64 row = min(first_row + line, rows - 1);
                const Element* from = data + row * x.row + (first_k + at) * (VECTOR ? 1 : x.k);
                copy(to + line * PITCH + at, from, WHOLE ? WIDTH : min(count - at, WIDTH));
            } else if (WHOLE || line < count) {
                const Element* from = data + (first_row + at) * (VECTOR ? 1 : x.row) + (first_k + line) * x.k;
                copy(to + line * PITCH + at, from, min(rows - first_row - at, WIDTH));
            }
        }
    }

    // `count` of WIDTH neighbours, none if that is negative.
    __device__ static __forceinline__ void copy(float* to, const Element* from, int count)
    {
        if constexpr (ASYNC) {
            if constexpr (VECTOR)
                copy_async_16(shared_address(to), from, max(count, 0) * 4);
            else
                copy_async_4(shared_address(to), from, max(count, 0) * 4);
        } else {
            float value[WIDTH] = {};
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (i < count) value[i] = widen(from, i, KIND);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) to[i] = value[i];
        }
    }

    // Four k, from `k` on, of the thread's rows.
    __device__ static __forceinline__ void read(float (&f)[THREAD][4], const float* tile, int own, int k)
    {
        if constexpr (K_MAJOR) {
#pragma unroll
            for (int i = 0; i < THREAD; ++i) {
                const float4 x = *reinterpret_cast<const float4*>(tile + (own + row(i)) * PITCH + k);
                f[i][0] = x.x, f[i][1] = x.y, f[i][2] = x.z, f[i][3] = x.w;
            }
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e)
#pragma unroll
                for (int i = 0; i < THREAD; i += NEIGHBOURS) {
                    const float* from = tile + (k + e) * PITCH + own + row(i);
                    if constexpr (NEIGHBOURS == 4) {
                        const float4 x = *reinterpret_cast<const float4*>(from);
                        f[i][e] = x.x, f[i + 1][e] = x.y, f[i + 2][e] = x.z, f[i + 3][e] = x.w;
                    } else if constexpr (NEIGHBOURS == 2) {
                        const float2 x = *reinterpret_cast<const float2*>(from);
                        f[i][e] = x.x, f[i + 1][e] = x.y;
                    } else {
                        f[i][e] = *from;
                    }
                }
        }
    }

    __device__ static __forceinline__ float read_one(const float* tile, int own, int i, int k)
    {
        return K_MAJOR ? tile[(own + row(i)) * PITCH + k] : tile[k * PITCH + own + row(i)];
    }
};

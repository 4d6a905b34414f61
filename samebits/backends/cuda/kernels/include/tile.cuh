// Tiles of 16-bit operands in shared memory: one layout for each order that they may have in global memory.
#pragma once

#include "mma.cuh"

// Elements of global memory by row (m of a, n of b) and k, strides in elements.
struct Operand {
    const u16* data;
    i64 batch, segment, row, k;
};

// Up to 16 consecutive k of one segment: one step of the chain. Those past `count` are zeros.
struct Group {
    int segment, k, count;
};

template <int N>
__device__ __forceinline__ Group pick(const Group (&groups)[N], int i)
{
    Group g = groups[0];
#pragma unroll
    for (int j = 1; j < N; ++j)
        if (i == j) g = groups[j];
    return g;
}

// Lines of 16-byte chunks, permuted so that eight lines' equal chunks, as ldmatrix reads them, meet no bank twice.
template <int CHUNKS>
__device__ __forceinline__ int swizzled(int line, int chunk)
{
    constexpr int LINES = CHUNKS < 8 ? 8 / CHUNKS : 1;  // lines that share one sweep of the banks
    constexpr int MASK = CHUNKS < 8 ? CHUNKS - 1 : 7;
    return (line * CHUNKS + (chunk ^ (line / LINES & MASK))) * 16;
}

// A tile of ROWS x DEPTH elements.
//
// K_MAJOR: a line is a row, its chunks run along k; else a line is one k, its chunks run along the rows.
// VECTOR: chunks are contiguous and aligned in global memory and are copied asynchronously; else they are gathered
// element by element, which any stride and alignment allows.
template <int ROWS, int DEPTH, bool K_MAJOR, bool VECTOR, int THREADS>
struct Tile {
    static constexpr int BYTES = ROWS * DEPTH * 2;
    static constexpr int CHUNKS = (K_MAJOR ? DEPTH : ROWS) / 8;
    static constexpr int LINES = K_MAJOR ? ROWS : DEPTH;
    static constexpr int STEP = THREADS / CHUNKS;  // lines that all threads cover in one pass
    static constexpr int PASSES = (LINES + STEP - 1) / STEP;
    static_assert(THREADS % CHUNKS == 0 && (CHUNKS & (CHUNKS - 1)) == 0);

    // `data` is at the operand's batch; rows first_row .. rows - 1 exist, others read as zeros.
    __device__ static __forceinline__ void load(
        u32 to, const u16* data, const Operand& x, int first_row, int rows, const Group (&groups)[DEPTH / 16])
    {
        const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
        if constexpr (K_MAJOR) {
            const Group g = pick(groups, chunk / 2);
            const int k = chunk % 2 * 8, count = min(max(g.count - k, 0), 8);
            const u16* from = data + g.segment * x.segment + (g.k + k) * x.k + (first_row + first) * x.row;
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass, from += STEP * x.row) {
                const int line = first + pass * STEP;
                if (LINES % STEP != 0 && line >= LINES) break;
                copy(to + swizzled<CHUNKS>(line, chunk), from, x.k, first_row + line < rows ? count : 0);
            }
        } else {
            const int row = first_row + chunk * 8, count = min(max(rows - row, 0), 8);
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                const int line = first + pass * STEP;
                if (LINES % STEP != 0 && line >= LINES) break;
                // Where a pass lies inside one group, saying so spares the choice at run time.
                const Group g = STEP <= 16 ? groups[pass * STEP / 16] : pick(groups, line / 16);
                const u16* from = data + g.segment * x.segment + (g.k + line % 16) * x.k + row * x.row;
                copy(to + swizzled<CHUNKS>(line, chunk), from, x.row, line % 16 < g.count ? count : 0);
            }
        }
    }

    // `count` of 8 elements, then zeros.
    __device__ static __forceinline__ void copy(u32 to, const u16* from, i64 stride, int count)
    {
        if constexpr (VECTOR) {
            copy_async_16(to, from, count * 2);
        } else {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 low = 2 * i < count ? from[2 * i * stride] : 0;
                const u32 high = 2 * i + 1 < count ? from[(2 * i + 1) * stride] : 0;
                v[i] = low | high << 16;
            }
            store_shared_16(to, v);
        }
    }

    // The mma fragment of 16 rows (as the 16x16 operand a) at group `g`.
    __device__ static __forceinline__ void fragment_a(u32 (&r)[4], u32 tile, int row, int g)
    {
        const int lane = threadIdx.x % 32;
        if constexpr (K_MAJOR)
            load_matrices<false>(r, tile + swizzled<CHUNKS>(row + lane % 16, g * 2 + lane / 16));
        else
            load_matrices<true>(r, tile + swizzled<CHUNKS>(g * 16 + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2));
    }

    // The mma fragments of 16 rows (as two 16x8 operands b) at group `g`.
    __device__ static __forceinline__ void fragment_b(u32 (&r)[2][2], u32 tile, int row, int g)
    {
        const int lane = threadIdx.x % 32;
        u32 v[4];
        if constexpr (K_MAJOR)
            load_matrices<false>(v, tile + swizzled<CHUNKS>(row + lane % 8 + lane / 16 * 8, g * 2 + lane / 8 % 2));
        else
            load_matrices<true>(v, tile + swizzled<CHUNKS>(g * 16 + lane % 16, row / 8 + lane / 16));
        r[0][0] = v[0], r[0][1] = v[1], r[1][0] = v[2], r[1][1] = v[3];
    }
};

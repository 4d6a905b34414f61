// Tiles of 16-bit operands in shared memory for ldmatrix: one layout for each order that they may have in
// memory.
#pragma once

#include "ptx_sm80.cuh"

// Elements of global memory by row (m of a, n of b) and k, strides in elements.
struct Operand {
    const u16* data;
    i64 batch, segment, row, k;
};

// Up to 16 consecutive k of one segment: one step of the chain. Those past `count` are zeros.
struct Group {
    int segment, k, count;
};

// Lines of 16-byte chunks, permuted so that eight lines' equal chunks, as ldmatrix reads them, meet no bank
// twice.
template <int CHUNKS>
__device__ __forceinline__ int swizzled(int line, int chunk) {
    constexpr int LINES = CHUNKS < 8 ? 8 / CHUNKS : 1;  // lines that share one sweep of the banks
    constexpr int MASK = CHUNKS < 8 ? CHUNKS - 1 : 7;
    return (line * CHUNKS + (chunk ^ (line / LINES & MASK))) * 16;
}

// A tile of ROWS x DEPTH elements.
//
// K_MAJOR: a line is a row, its chunks run along k; else a line is one k, its chunks run along the rows.
// VECTOR: chunks are contiguous and aligned in global memory and are copied asynchronously; else they are
// gathered element by element, which any stride and alignment allows.
template <int ROWS, int DEPTH, bool K_MAJOR, bool VECTOR, int THREADS>
struct Tile {
    static constexpr int BYTES = ROWS * DEPTH * 2;
    static constexpr int CHUNKS = (K_MAJOR ? DEPTH : ROWS) / 8;
    static constexpr int LINES = K_MAJOR ? ROWS : DEPTH;
    static constexpr int STEP = THREADS / CHUNKS;  // lines that all threads cover in one pass
    static constexpr int PASSES = (LINES + STEP - 1) / STEP;
    static constexpr int UNROLL = VECTOR ? PASSES : 4;  // a gathered chunk takes registers until it is stored
    static_assert(THREADS % CHUNKS == 0 && (CHUNKS & (CHUNKS - 1)) == 0);

    // `data` is at the operand's batch; rows first_row .. rows - 1 exist, others read as zeros.
    // WHOLE: the groups are full and follow one another in one segment, as all but a few do.
    template <bool WHOLE>
    __device__ static __forceinline__ void load(u32 to, const u16* data, const Operand& x, int first_row,
                                                int rows, const Group (&groups)[DEPTH / 16]) {
        const i64 row_stride = VECTOR && !K_MAJOR ? 1 : x.row, k_stride = VECTOR && K_MAJOR ? 1 : x.k;
        const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
        const int row = first_row + (K_MAJOR ? first : chunk * 8);
        const auto group = [&](int i) {
            Group g = groups[0];
            if constexpr (WHOLE) {
                g.k += i * 16;
            } else {
#pragma unroll
                for (int j = 1; j < DEPTH / 16; ++j)
                    if (i == j) g = groups[j];
            }
            return g;
        };
        const auto address = [&](const Group& g, int k) {
            return data + g.segment * x.segment + (g.k + k) * k_stride + row * row_stride;
        };
        if constexpr (K_MAJOR) {
            const Group g = group(chunk / 2);
            const int k = chunk % 2 * 8, count = WHOLE ? 8 : min(max(g.count - k, 0), 8);
            const u16* from = address(g, k);
#pragma unroll UNROLL
            for (int pass = 0; pass < PASSES; ++pass, from += STEP * row_stride) {
                const int line = first + pass * STEP;
                if (LINES % STEP != 0 && line >= LINES) break;
                copy(to + swizzled<CHUNKS>(line, chunk), from, k_stride, first_row + line < rows ? count : 0);
            }
        } else {
            const int count = min(max(rows - row, 0), 8);
            const u16* from = address(groups[0], first);
#pragma unroll UNROLL
            for (int pass = 0; pass < PASSES; ++pass, from += STEP * k_stride) {
                const int line = first + pass * STEP;
                if (LINES % STEP != 0 && line >= LINES) break;
                if constexpr (WHOLE) {
                    copy(to + swizzled<CHUNKS>(line, chunk), from, row_stride, count);
                } else {
                    const Group g = group(line / 16);
                    const bool exists = line % 16 < g.count;
                    copy(to + swizzled<CHUNKS>(line, chunk), address(g, line % 16), row_stride,
                         exists ? count : 0);
                }
            }
        }
    }

    // `count` of 8 elements, then zeros.
    __device__ static __forceinline__ void copy(u32 to, const u16* from, i64 stride, int count) {
        if constexpr (VECTOR) {
            cp_async_16(to, from, count * 2);
        } else {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i, from += 2 * stride) {
                const u32 low = 2 * i < count ? __ldg(from) : 0;
                const u32 high = 2 * i + 1 < count ? __ldg(from + stride) : 0;
                v[i] = low | high << 16;
            }
            store_shared_16(to, v);
        }
    }

    // Where this lane reads fragments that begin at `row`, a multiple of the rows that a warp reads, in group
    // 0; as the 16x16 operand a if A, else as two 16x8 operands b. at() moves it on, by XOR since chunks are
    // permuted.
    template <bool A>
    __device__ static __forceinline__ u32 lane_offset(int row) {
        const int lane = threadIdx.x % 32;
        const int r = A ? lane % 16 : lane % 8 + lane / 16 * 8;  // row and chunk of k, if lines are rows
        const int c = A ? lane / 16 : lane / 8 % 2;
        if constexpr (K_MAJOR)
            return swizzled<CHUNKS>(row + r, c);
        else
            return swizzled<CHUNKS>(c * 8 + lane % 8, row / 8 + r / 8);
    }

    // The offset `i` times 16 rows further, in group `g`.
    __device__ static __forceinline__ u32 at(u32 offset, int i, int g) {
        const int lines = K_MAJOR ? i : g, chunks = K_MAJOR ? g : i;
        return (offset ^ chunks * 32) + lines * 16 * CHUNKS * 16;
    }
};

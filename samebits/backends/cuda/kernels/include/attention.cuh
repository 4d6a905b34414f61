// Attention: what its forward and backward kernels share. The problem, tiles in shared memory, products of
// tiles, and scores. Bits are those of docs/contract.md, "Attention".
//
// A warp has 16 rows of a tile, in the layout of mma.m16n8k16's accumulators: a thread has rows lane / 4 and
// 8 below it, and columns 2 (lane % 4) and the next of every eight. Under FMA the layout is the same.
//
// Macros
//   TYPE           BF16 or F16: on tensor cores (sm_80 on); F32: under FMA
//   HEAD, VALUES   sizes of a row of q and k, and of v, multiples of 16; columns past the end are zeros
//   WARPS          of a block
//   VECTOR         1: q, k, v (and g) have rows of whole, aligned, contiguous 16 bytes; 0: any strides
//   MASK           NONE, BOOLEAN, F32, BF16 or F16
//   SOFTCAP        1: scores are capped
//   PAGED          1: k and v lie in pages
//   HARDWARE_EXP2  1: exp2 is the instruction; 0: the polynomial
#pragma once

#include "attention_mask.cuh"
#include "attention_problem.cuh"
#include "attention_softmax.cuh"
#include "convert.cuh"
#include "launch.cuh"
#include "ptx_sm80.cuh"

#if !defined(HARDWARE_EXP2) || !defined(PAGED) || !defined(SOFTCAP)
#error "all macros are needed: #if takes a missing macro for 0"
#endif

constexpr bool FMA = TYPE == F32;

using Type = Element<TYPE>;
using Stored = Type::Stored;

// ---- tiles in shared memory

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u32 bits_of(u16 x) { return x; }

// LINES lines of COLUMNS elements. A line is an odd number of 16-byte chunks: so equal chunks of eight
// neighbouring lines, as ldmatrix reads them, meet no bank twice.
template <int LINES, int COLUMNS>
struct Tile {
    static constexpr int WIDTH = 16 / sizeof(Stored), CHUNKS = COLUMNS / WIDTH;
    static constexpr int PITCH = (CHUNKS | 1) * 16, BYTES = LINES * PITCH;
    static constexpr int OWN = LINES / WARPS, ALL = OWN * CHUNKS;  // lines and chunks that a warp copies
    static constexpr int PASSES = (ALL + 31) / 32;
    static constexpr int UNROLL = !VECTOR ? 1 : 32 % CHUNKS == 0 ? PASSES : 4;  // as registers allow
    static_assert(LINES % WARPS == 0 && OWN <= 32 && COLUMNS % 16 == 0);

    // Lines first, first + 1, ... of `count` that lie `stride` apart; others are zeros, as columns past `columns`.
    static __device__ __forceinline__ void load(u32 to, const Stored* data, int first, int count,
                                                const Strides& strides, int columns) {
        const int warp_line = threadIdx.x / 32 * OWN, lane = threadIdx.x % 32;
        if constexpr (32 % CHUNKS == 0 && ALL % 32 == 0) {  // a lane has the same chunk of every line
            const int line = warp_line + lane / CHUNKS, chunk = lane % CHUNKS;
            const int width = min(max(columns - chunk * WIDTH, 0), WIDTH), index = first + line;
            const Stored* from = data + index * strides.token + chunk * WIDTH * column(strides);
            const i64 step = 32 / CHUNKS * strides.token;
            to += line * PITCH + chunk * 16;
#pragma unroll UNROLL
            for (int pass = 0; pass < PASSES; ++pass, from += step) {
                const bool exists = u32(index + pass * (32 / CHUNKS)) < u32(count);
                copy(to + pass * (32 / CHUNKS) * PITCH, from, strides.column, exists ? width : 0);
            }
        } else {
#pragma unroll UNROLL
            for (int pass = 0; pass < PASSES; ++pass) {
                const int i = pass * 32 + lane, line = warp_line + i / CHUNKS, index = first + line;
                copy_chunk(to, data, i, u32(index) < u32(count) ? index * strides.token : -1, strides,
                           columns);
            }
        }
    }

    // The line, of those that its warp copies, whose place in `data` a lane finds for all of them.
    static __device__ __forceinline__ int own_line() { return threadIdx.x / 32 * OWN + threadIdx.x % 32; }
    static __device__ __forceinline__ bool finds() { return threadIdx.x % 32 < OWN; }

    // Lines of which each lane has found one. `place`: where it begins, or -1: it is zeros.
    static __device__ __forceinline__ void load_found(u32 to, const Stored* data, i64 place,
                                                      const Strides& strides, int columns) {
#pragma unroll UNROLL
        for (int pass = 0; pass < PASSES; ++pass) {
            const int i = pass * 32 + threadIdx.x % 32;
            copy_chunk(to, data, i, __shfl_sync(0xFFFFFFFF, place, i / CHUNKS), strides, columns);
        }
    }

    static __device__ __forceinline__ i64 column(const Strides& strides) {
        return VECTOR ? 1 : strides.column;
    }

    // Chunk `i` of its warp's, of a line that begins at `place`.
    static __device__ __forceinline__ void copy_chunk(u32 to, const Stored* data, int i, i64 place,
                                                      const Strides& strides, int columns) {
        const int line = threadIdx.x / 32 * OWN + i / CHUNKS, chunk = i % CHUNKS;
        const int width = place < 0 ? 0 : min(max(columns - chunk * WIDTH, 0), WIDTH);
        if (ALL % 32 == 0 || i < ALL)
            copy(to + line * PITCH + chunk * 16, data + place + chunk * WIDTH * column(strides),
                 strides.column, width);
    }

    // `count` elements, then zeros: 16 bytes.
    static __device__ __forceinline__ void copy(u32 to, const Stored* from, i64 stride, int count) {
        u32 v[4] = {};
        if constexpr (VECTOR) {
#if __CUDA_ARCH__ >= 800
            return cp_async_16(to, from, count ? 16 : 0);
#else
            if (count) {
                const uint4 x = *reinterpret_cast<const uint4*>(from);
                v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
            }
#endif
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i, from += stride)
                if (i < count) v[i * 4 / WIDTH] |= bits_of(*from) << (FMA ? 0 : i % 2 * 16);
        }
        store_shared_16(to, v);
    }
};

// Stages that are filled in turn; each is read in the order in which it was filled.
template <int STAGES_, int BYTES>
struct Ring {
    u32 memory;
    u32 write_at = 0, read_at = 0;
    static_assert(STAGES_ >= 2);

    static __device__ __forceinline__ u32 after(u32 at) {
        return at == (STAGES_ - 1) * BYTES ? 0 : at + BYTES;
    }
    __device__ __forceinline__ u32 to_fill() {
        const u32 at = memory + write_at;
        write_at = after(write_at);
        return at;
    }
    // The next stage, whole; and all warps have read the one before it, which is the next to fill.
    __device__ __forceinline__ u32 filled() {
        cp_async_wait<STAGES_ - 2>();
        __syncthreads();
        const u32 at = memory + read_at;
        read_at = after(read_at);
        return at;
    }
};

// ---- products of tiles

// acc += A B^T, one plain chain each: the 16 lines from `a` on, 8 N lines from `b` on, `depth` columns.
template <int N, int COLUMNS>
__device__ __forceinline__ void multiply(float (*acc)[4], u32 a, u32 b, int depth) {
    constexpr int PITCH = Tile<WARPS, COLUMNS>::PITCH;
    const int lane = threadIdx.x % 32;
    static_assert(N % 2 == 0);
    if constexpr (FMA) {
        a += lane / 4 * PITCH;
        b += lane % 4 * 2 * PITCH;
        int d = 0;
#pragma unroll 1
        for (; d + 4 <= depth; d += 4) {
            const float4 low = read_shared_4(a + d * 4), high = read_shared_4(a + d * 4 + 8 * PITCH);
#pragma unroll
            for (int j = 0; j < N; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float4 y = read_shared_4(b + d * 4 + (j * 8 + e) * PITCH);
                    float &x0 = acc[j][e], &x1 = acc[j][2 + e];
                    x0 = __fmaf_rn(low.x, y.x, x0), x1 = __fmaf_rn(high.x, y.x, x1);
                    x0 = __fmaf_rn(low.y, y.y, x0), x1 = __fmaf_rn(high.y, y.y, x1);
                    x0 = __fmaf_rn(low.z, y.z, x0), x1 = __fmaf_rn(high.z, y.z, x1);
                    x0 = __fmaf_rn(low.w, y.w, x0), x1 = __fmaf_rn(high.w, y.w, x1);
                }
        }
#pragma unroll 1
        for (; d < depth; ++d) {  // never past the end: fma(0, 0, -0) is +0
            const float low = read_shared(a + d * 4), high = read_shared(a + d * 4 + 8 * PITCH);
#pragma unroll
            for (int j = 0; j < N; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float y = read_shared(b + d * 4 + (j * 8 + e) * PITCH);
                    acc[j][e] = __fmaf_rn(low, y, acc[j][e]);
                    acc[j][2 + e] = __fmaf_rn(high, y, acc[j][2 + e]);
                }
        }
    } else {
        a += lane % 16 * PITCH + lane / 16 * 16;
        b += (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
        for (int d = 0; d < COLUMNS / 16; ++d) {
            u32 fa[4], fb[4];
            ldmatrix_x4<false>(fa, a + d * 32);
#pragma unroll
            for (int j = 0; j < N / 2; ++j) {
                ldmatrix_x4<false>(fb, b + j * 16 * PITCH + d * 32);
                mma_m16n8k16<TYPE == BF16>(acc[2 * j], fa, fb);
                mma_m16n8k16<TYPE == BF16>(acc[2 * j + 1], fa, fb + 2);
            }
        }
    }
}

// acc += W B: 16 columns of weights, two times eight, by N times eight columns of the 16 lines from `b` on; one
// group of the chain. Lines have COLUMNS.
template <int COLUMNS, int N, int KIND = TYPE>
__device__ __forceinline__ void multiply_weights(float (&acc)[N][4], const float (&w0)[4],
                                                 const float (&w1)[4], u32 b) {
    constexpr int PITCH = Tile<WARPS, COLUMNS>::PITCH;
    const int lane = threadIdx.x % 32;
    if constexpr (KIND == F32) {
        b += lane % 4 * 8;
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const int source = (lane & ~3) | k % 8 / 2;
            const float low = __shfl_sync(0xFFFFFFFF, k < 8 ? w0[k % 2] : w1[k % 2], source);
            const float high = __shfl_sync(0xFFFFFFFF, k < 8 ? w0[2 + k % 2] : w1[2 + k % 2], source);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float2 y = read_shared_2(b + k * PITCH + j * 32);
                acc[j][0] = __fmaf_rn(low, y.x, acc[j][0]);
                acc[j][1] = __fmaf_rn(low, y.y, acc[j][1]);
                acc[j][2] = __fmaf_rn(high, y.x, acc[j][2]);
                acc[j][3] = __fmaf_rn(high, y.y, acc[j][3]);
            }
        }
    } else {
        const auto pack = Element<KIND>::pack;
        const u32 fa[4] = {pack(w0[0], w0[1]), pack(w0[2], w0[3]), pack(w1[0], w1[1]), pack(w1[2], w1[3])};
        b += lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
        for (int j = 0; j < N / 2; ++j) {
            u32 fb[4];
            ldmatrix_x4<true>(fb, b + j * 32);
            mma_m16n8k16<KIND == BF16>(acc[2 * j], fa, fb);
            mma_m16n8k16<KIND == BF16>(acc[2 * j + 1], fa, fb + 2);
        }
    }
}

template <int N>
__device__ __forceinline__ void clear(float (&acc)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[j][e] = 0.0f;
}

// Two neighbours of a row of results of `columns`, the first of them at the even `column`. Rows of an even
// size begin at even elements.
__device__ __forceinline__ void store_two(Stored* row, int column, int columns, float first, float second) {
    first = FMA ? contract::canonical(first) : first;  // narrow() does it in 16 bits
    second = FMA ? contract::canonical(second) : second;
    if (columns % 2 == 0) {
        if (column < columns) Type::store_pair(row + column, first, second);
    } else {
        if (column < columns) row[column] = Type::narrow(first);
        if (column + 1 < columns) row[column + 1] = Type::narrow(second);
    }
}

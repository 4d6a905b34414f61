// FP8 values of x[rows, k], and a scale for each block of 128 columns of a row, or of 128 rows, as
// docs/contract.md, "FP8", has them.
//
// Every thread holds 8 neighbouring columns of HELD rows (or of HELD blocks), and reads them once. 16 threads
// have a block's row.
//
// Macros
//   IN        type of x: F32, BF16 or F16
//   E5M2      1: values of e5m2; 0: of e4m3
//   SQUARE    1: blocks of 128 x 128, one for each block of threads; 0: of 1 x 128
//   VECTOR    1: x and the values can be accessed by eight columns at a time

#include "convert.cuh"

using In = Element<IN>;

constexpr int WIDTH = 128, THREADS = 256, OWN = 8, LANES = WIDTH / OWN, LINES = THREADS / LANES;
constexpr int HELD = SQUARE ? WIDTH / LINES : 4;
constexpr float LARGEST = E5M2 ? 57344.0f : 448.0f, SMALLEST = 0x1p-126f;
constexpr u32 INFINITY_BITS = 0x7F800000;

struct Params {
    const In::Stored* x;
    unsigned char* values;
    float* scale;
    i64 x_row, rows;
    int k, blocks;  // of 128 columns in a row
};

// Eight columns, of which `left` are inside.
__device__ __forceinline__ void load(float (&x)[OWN], const In::Stored* from, int left) {
    if constexpr (VECTOR) {
        constexpr int COUNT = 16 / sizeof(In::Stored);
#pragma unroll
        for (int i = 0; i < OWN; i += COUNT) {
            uint4 words{};
            if (left > 0) words = *reinterpret_cast<const uint4*>(from + i);
            const auto* found = reinterpret_cast<const In::Stored*>(&words);
#pragma unroll
            for (int j = 0; j < COUNT; ++j) x[i + j] = In::widen(found[j]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = i < left ? In::widen(from[i]) : 0.0f;
    }
}

// Two values, the first in the lower byte; NaN becomes 0x7F.
__device__ __forceinline__ u32 pack(float low, float high) {
    u16 both;
    if constexpr (E5M2)
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ void store(unsigned char* to, const float (&x)[OWN], float factor, int left) {
    u32 words[OWN / 4];
#pragma unroll
    for (int i = 0; i < OWN / 4; ++i) {
        float y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = __fmul_rn(x[i * 4 + j], factor);
        words[i] = pack(y[0], y[1]) | pack(y[2], y[3]) << 16;
    }
    if constexpr (VECTOR) {
        if (left > 0) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (i < left) to[i] = words[i / 4] >> i % 4 * 8;
    }
}

// As bits, which are in the order of the magnitudes: those of NaN and infinity are the largest.
__device__ __forceinline__ u32 largest_of(const float (&x)[OWN]) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7FFFFFFF);
    return largest;
}

// The block's scale, and what its elements are multiplied by.
__device__ __forceinline__ float scale_of(u32 largest, float& factor) {
    const float nan = __int_as_float(0x7FFFFFFF);
    const float scale = fmaxf(__fdiv_rn(__uint_as_float(largest), LARGEST), SMALLEST);
    factor = largest < INFINITY_BITS ? __fdiv_rn(1.0f, scale) : nan;
    return largest < INFINITY_BITS ? scale : nan;
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize(const __grid_constant__ Params p) {
    const int line = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    i64 row[HELD];
    int column[HELD], left[HELD];
    float x[HELD][OWN];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const u32 block = SQUARE ? blockIdx.x : (blockIdx.x * HELD + i) * LINES + line;
        row[i] = block / p.blocks;
        column[i] = static_cast<int>(block % p.blocks) * WIDTH + lane * OWN;
        if (SQUARE) row[i] = row[i] * WIDTH + i * LINES + line;
        left[i] = row[i] < p.rows ? p.k - column[i] : 0;
        load(x[i], p.x + row[i] * p.x_row + column[i], left[i]);
    }
    u32 largest[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        largest[i] = largest_of(x[i]);
        if (SQUARE && i > 0) largest[0] = max(largest[0], largest[i]);
    }
#if SQUARE
    __shared__ u32 of_warps[THREADS / 32];
    largest[0] = __reduce_max_sync(0xFFFFFFFF, largest[0]);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest[0];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) largest[0] = max(largest[0], of_warps[i]);
    float factor;
    const float scale = scale_of(largest[0], factor);
    if (threadIdx.x == 0) p.scale[blockIdx.x] = scale;
#endif
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
#if !SQUARE
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2)
            largest[i] = max(largest[i], __shfl_xor_sync(0xFFFFFFFF, largest[i], distance));
        float factor;
        const float scale = scale_of(largest[i], factor);
        if (lane == 0 && row[i] < p.rows) p.scale[row[i] * p.blocks + column[i] / WIDTH] = scale;
#endif
        store(p.values + row[i] * p.k + column[i], x[i], factor, left[i]);
    }
}

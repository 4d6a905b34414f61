// FP8 values of x[rows, k], or of silu(x) * up, and a scale for each block of 128 columns of a row, or of 128
// rows, as docs/contract.md, "FP8", has them.
//
// Every thread holds 8 neighbouring columns of HELD rows (or of HELD blocks side by side), and reads them once.
// 16 threads have a block's row. Instructions are a bound, beside memory: so elements of 16 bits stay in pairs
// as long as they can.
//
// Macros
//   IN        type of x: F32, BF16 or F16
//   E5M2      1: values of e5m2; 0: of e4m3
//   SQUARE    1: blocks of 128 x 128, one for each block of threads; 0: of 1 x 128
//   VECTOR    1: x, up and the values can be accessed by eight columns at a time
//   SILU      NO: of x; EXACT: of silu(x) * up; FAST: the same, of bf16, by functions of the GPU

#define NO 0
#define EXACT 1
#define FAST 2

#include "activations.cuh"
#include "convert.cuh"

#if SILU == FAST && IN != BF16
#error "the errors of FAST are small beside a rounding to bf16 alone"
#endif

using In = Element<IN>;

constexpr int WIDTH = 128, THREADS = 256, OWN = 8, LANES = WIDTH / OWN, LINES = THREADS / LANES;
constexpr int HELD = SQUARE ? WIDTH / LINES : SILU ? 2 : 4;  // the host's grid has 2 and 4, too
constexpr int IN_A_WORD = 4 / sizeof(In::Stored);
constexpr float LARGEST = E5M2 ? 57344.0f : 448.0f, SMALLEST = 0x1p-126f;

struct Params {
    const In::Stored *x, *up;
    unsigned char* values;
    float* scale;
    i64 x_row, up_row, rows;
    int k, blocks;  // of 128 columns in a row
};

// Eight columns.
struct Eight {
    u32 words[OWN / IN_A_WORD];

    // Those of which `left` are inside; the others are zeros.
    __device__ __forceinline__ void load(const In::Stored* from, int left) {
        if constexpr (VECTOR) {
#pragma unroll
            for (int i = 0; i < OWN / IN_A_WORD; i += 4) {
                uint4 four{};
                if (left > 0) four = *reinterpret_cast<const uint4*>(from + i * IN_A_WORD);
                words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const auto stored = i < left ? from[i] : In::Stored(0);
                if (IN == F32)
                    words[i] = __float_as_uint(In::widen(stored));
                else
                    words[i / 2] = i % 2 == 0 ? u32(stored) : words[i / 2] | u32(stored) << 16;
            }
        }
    }

    __device__ __forceinline__ float at(int i) const {
        if constexpr (IN == F32)
            return __uint_as_float(words[i]);
        else
            return In::widen(static_cast<In::Stored>(words[i / 2] >> i % 2 * 16));
    }

    // The largest magnitude, as stored: without signs bits are in its order, with infinity and NaN last.
    __device__ __forceinline__ u32 largest() const {
        if constexpr (IN == F32) {
            u32 found = 0;
#pragma unroll
            for (int i = 0; i < OWN; ++i) found = max(found, words[i] & 0x7FFFFFFF);
            return found;
        } else {
            u32 pair = 0;
#pragma unroll
            for (int i = 0; i < OWN / 2; ++i) pair = __vmaxu2(pair, words[i] & 0x7FFF7FFF);
            return max(pair & 0xFFFF, pair >> 16);
        }
    }

    // silu(this) * up, both rounded to their type.
    __device__ __forceinline__ void activate(const Eight& up);
};

__device__ __forceinline__ float silu(float a) {
    return SILU == FAST ? contract::fast_silu(a) : contract::silu(a);
}

__device__ __forceinline__ void Eight::activate(const Eight& up) {
#pragma unroll
    for (int i = 0; i < OWN; i += IN_A_WORD) {
#if IN == F32
        words[i] = __float_as_uint(__fmul_rn(silu(at(i)), up.at(i)));
#else
        words[i / 2] = In::pack(silu(at(i)), silu(at(i + 1)));
        words[i / 2] = In::pack(__fmul_rn(at(i), up.at(i)), __fmul_rn(at(i + 1), up.at(i + 1)));
#endif
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

__device__ __forceinline__ void store(unsigned char* to, const Eight& x, float factor, int left) {
    u32 words[OWN / 4];
#pragma unroll
    for (int i = 0; i < OWN / 4; ++i) {
        float y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = __fmul_rn(x.at(i * 4 + j), factor);
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

// The block's scale, and what its elements are multiplied by.
__device__ __forceinline__ float scale_of(u32 largest, float& factor) {
    constexpr float SHARE = 1 / LARGEST;
    const float m = IN == F32 ? __uint_as_float(largest) : In::widen(static_cast<In::Stored>(largest));
    // m / LARGEST, correctly rounded, since SHARE and the remainder are.
    const float near = __fmul_rn(m, SHARE);
    const float scale = fmaxf(__fmaf_rn(__fmaf_rn(-LARGEST, near, m), SHARE, near), SMALLEST);
    const float nan = __int_as_float(0x7FFFFFFF);
    factor = m < INF ? __frcp_rn(scale) : nan;
    return m < INF ? scale : nan;
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize(const __grid_constant__ Params p) {
    const int line = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const u32 first = SQUARE ? blockIdx.x : (blockIdx.x * LINES + line) * HELD;
    i64 row = first / p.blocks;
    int block = static_cast<int>(first % p.blocks);
    if (SQUARE) row = row * WIDTH + line;
    // Where each piece is, and the columns left from there on.
    i64 from_x[HELD], from_up[HELD], to[HELD];
    int left[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int column = block * WIDTH + lane * OWN;
        left[i] = row < p.rows ? p.k - column : 0;
        from_x[i] = row * p.x_row + column, from_up[i] = row * p.up_row + column, to[i] = row * p.k + column;
        if (SQUARE)
            row += LINES;
        else if (++block == p.blocks)
            block = 0, ++row;
    }
    Eight x[HELD];
#if SILU
    Eight up[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) up[i].load(p.up + from_up[i], left[i]);
#endif
#pragma unroll
    for (int i = 0; i < HELD; ++i) x[i].load(p.x + from_x[i], left[i]);
    u32 largest[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
#if SILU
        x[i].activate(up[i]);
#endif
        largest[i] = x[i].largest();
    }
#if SQUARE
    __shared__ u32 of_warps[THREADS / 32];
    u32 of_all = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) of_all = max(of_all, largest[i]);
    of_all = __reduce_max_sync(0xFFFFFFFF, of_all);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_all;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) of_all = max(of_all, of_warps[i]);
    float factor;
    const float scale = scale_of(of_all, factor);
    if (threadIdx.x == 0) p.scale[blockIdx.x] = scale;
#pragma unroll
    for (int i = 0; i < HELD; ++i) store(p.values + to[i], x[i], factor, left[i]);
#else
    // Of elements of 16 bits, two blocks at a time: one in each half of a word.
    constexpr int TOGETHER = IN == F32 ? 1 : 2;
#pragma unroll
    for (int i = 0; i < HELD; i += TOGETHER) {
        u32 both = TOGETHER == 1 ? largest[i] : largest[i] | largest[i + TOGETHER - 1] << 16;
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2) {
            const u32 other = __shfl_xor_sync(0xFFFFFFFF, both, distance);
            both = TOGETHER == 1 ? max(both, other) : __vmaxu2(both, other);
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
            float factor;
            const float scale = scale_of(TOGETHER == 1 ? both : both >> j * 16 & 0xFFFF, factor);
            if (lane == 0 && left[i + j] > 0) p.scale[first + i + j] = scale;
            store(p.values + to[i + j], x[i + j], factor, left[i + j]);
        }
    }
#endif
}

// What kernels take from CUDA, on a CPU. A NaN that arithmetic gives is canonical there.
#pragma once

#include <cstring>
#include <initializer_list>

// Not <cmath>, with which most kernels take three times as long to compile.
extern "C" {
float ceilf(float) noexcept;
float copysignf(float, float) noexcept;
float fabsf(float) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float sqrtf(float) noexcept;
}

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__
#define __align__(n)

struct Index {
    unsigned x, y, z;
};
inline Index blockIdx, threadIdx, blockDim, gridDim;

struct int2 {
    int x, y;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From>
inline To with_bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof(y));
    return y;
}
inline int __float_as_int(float x) { return with_bits_of<int>(x); }
inline unsigned __float_as_uint(float x) { return with_bits_of<unsigned>(x); }
inline float __int_as_float(int x) { return with_bits_of<float>(x); }
inline float __uint_as_float(unsigned x) { return with_bits_of<float>(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((unsigned long long)(high) << 32 | low) >> (shift & 31));
}

inline float from_arithmetic(float x) { return x != x ? __int_as_float(0x7FFFFFFF) : x; }
inline float __fadd_rn(float a, float b) { return from_arithmetic(a + b); }
inline float __fsub_rn(float a, float b) { return from_arithmetic(a - b); }
inline float __fmul_rn(float a, float b) { return from_arithmetic(a * b); }
inline float __fdiv_rn(float a, float b) { return from_arithmetic(a / b); }
inline float __frcp_rn(float a) { return from_arithmetic(1.0f / a); }
inline float __fsqrt_rn(float a) { return from_arithmetic(sqrtf(a)); }
inline float __fmaf_rn(float a, float b, float c) { return from_arithmetic(fmaf(a, b, c)); }

inline float widened_half(unsigned short x) {
    const unsigned magnitude = (x & 0x7FFFu) << 13, sign = (x & 0x8000u) << 16;
    const float y = __uint_as_float(magnitude) * 0x1p112f;  // exact, of a subnormal one, too
    if (magnitude < 0x0F800000) return __uint_as_float(__float_as_uint(y) | sign);
    return __uint_as_float(magnitude | 0x7F800000 | sign | (magnitude > 0x0F800000) << 22);
}
inline unsigned short narrowed_half(float x) {
    return x != x ? 0x7FFF : with_bits_of<unsigned short>(static_cast<_Float16>(x));
}

// Of a block's threads, which take turns.
void __syncthreads();
int __syncthreads_or(int);
void __syncwarp(unsigned = 0);
float told_by(float x, int lane);  // a lane of the same warp; all of them tell
inline float __shfl_xor_sync(unsigned, float x, int distance) {
    return told_by(x, int(threadIdx.x % 32) ^ distance);
}
inline int __shfl_xor_sync(unsigned, int x, int distance) {
    return __float_as_int(told_by(__int_as_float(x), int(threadIdx.x % 32) ^ distance));
}
inline unsigned __shfl_xor_sync(unsigned, unsigned x, int distance) {
    return __float_as_uint(told_by(__uint_as_float(x), int(threadIdx.x % 32) ^ distance));
}
inline unsigned __match_any_sync(unsigned, int x) {
    unsigned found = 0;
    for (int lane = 0; lane < 32; ++lane)
        found |= unsigned(__float_as_int(told_by(__int_as_float(x), lane)) == x) << lane;
    return found;
}
inline int __shfl_up_sync(unsigned, int x, int distance) {
    const int lane = threadIdx.x % 32;
    return __float_as_int(told_by(__int_as_float(x), lane < distance ? lane : lane - distance));
}
inline float __shfl_sync(unsigned, float x, int lane) { return told_by(x, lane); }
inline int __shfl_sync(unsigned, int x, int lane) { return __float_as_int(told_by(__int_as_float(x), lane)); }
inline long long __shfl_sync(unsigned, long long x, int lane) {
    float halves[2];
    __builtin_memcpy(halves, &x, 8);
    for (float& half : halves) half = told_by(half, lane);
    __builtin_memcpy(&x, halves, 8);
    return x;
}
inline unsigned __ballot_sync(unsigned, bool x) {
    unsigned found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= unsigned(told_by(float(x), lane)) << lane;
    return found;
}
inline bool __any_sync(unsigned all, bool x) { return __ballot_sync(all, x) != 0; }
inline float __shfl_up_sync(unsigned, float x, int distance) {
    const int lane = int(threadIdx.x % 32);
    return told_by(x, lane < distance ? lane : lane - distance);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }

template <class T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
    return a < b ? b : a;
}
template <class T>
inline T atomicAdd(T* to, T x) {
    const T before = *to;
    *to += x;
    return before;
}
inline void __threadfence() {}

extern unsigned char bytes[];  // shared memory
inline unsigned long __cvta_generic_to_shared(const void* p) {
    return static_cast<const unsigned char*>(p) - bytes;
}

// Not called by the kernels that run here.
unsigned __funnelshift_r(unsigned, unsigned, unsigned);

// f32 to and from the stored types, for kernels that know types as these macros: one rounding to nearest
// even; NaN becomes the canonical one (cvt's own).
#pragma once

#include "types.cuh"

#define NONE 0
#define F32 1
#define BF16 2
#define F16 3

template <int type>
struct Element;

template <>
struct Element<F32> {
    using Stored = float;
    static __device__ __forceinline__ float widen(float x) { return x; }
    static __device__ __forceinline__ float narrow(float x) { return x; }
    static __device__ __forceinline__ void store_pair(float* to, float first, float second) {
        *reinterpret_cast<float2*>(to) = make_float2(first, second);
    }
};

template <>
struct Element<BF16> {
    using Stored = u16;
    static __device__ __forceinline__ float widen(u16 x) { return __uint_as_float(u32(x) << 16); }
#if __CUDA_ARCH__ < 800
    static __device__ __forceinline__ u32 rounded(float x) {
        u32 bits = __float_as_uint(x);
        return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    }
#endif
    static __device__ __forceinline__ u32 pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
        u32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
#else
        return rounded(low) | rounded(high) << 16;
#endif
    }
    static __device__ __forceinline__ u16 narrow(float x) { return u16(pack(x, 0)); }
    static __device__ __forceinline__ void store_pair(u16* to, float first, float second) {
        *reinterpret_cast<u32*>(to) = pack(first, second);
    }
};

template <>
struct Element<F16> {
    using Stored = u16;
    static __device__ __forceinline__ float widen(u16 x) {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
        return wide;
    }
    static __device__ __forceinline__ u32 pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
        u32 both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
#else
        u16 first, second;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(first) : "f"(low));
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(second) : "f"(high));
        return first | u32(second) << 16;
#endif
    }
    static __device__ __forceinline__ u16 narrow(float x) { return u16(pack(x, 0)); }
    static __device__ __forceinline__ void store_pair(u16* to, float first, float second) {
        *reinterpret_cast<u32*>(to) = pack(first, second);
    }
};

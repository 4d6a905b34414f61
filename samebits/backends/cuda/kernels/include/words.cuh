// The larger and the smaller of values as they are stored, by words: two of 16 bits, or one of 32. NaN if a value is.
#pragma once

#include "convert.cuh"
#include "functions.cuh"

// `larger` and `smaller` of two words, value by value; `largest` and `least` of the values of one. Here of 16 bits.
template <int type>
struct InWords {
    using Of = Element<type>;

    static __device__ __forceinline__ float low(u32 a) { return Of::widen(u16(a)); }
    static __device__ __forceinline__ float high(u32 a) { return Of::widen(u16(a >> 16)); }

    static __device__ __forceinline__ u32 larger(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 800
        u32 both;
        if constexpr (type == BF16)
            asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
        else
            asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
        return both;
#else
        return Of::pack(contract::maximum(low(a), low(b)), contract::maximum(high(a), high(b)));
#endif
    }
    static __device__ __forceinline__ u32 smaller(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 800
        u32 both;
        if constexpr (type == BF16)
            asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
        else
            asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
        return both;
#else
        return Of::pack(contract::minimum(low(a), low(b)), contract::minimum(high(a), high(b)));
#endif
    }
    static __device__ __forceinline__ float largest(u32 a) { return contract::maximum(low(a), high(a)); }
    static __device__ __forceinline__ float least(u32 a) { return contract::minimum(low(a), high(a)); }
};

template <>
struct InWords<F32> {
    static __device__ __forceinline__ u32 larger(u32 a, u32 b) {
        return __float_as_uint(contract::maximum(__uint_as_float(a), __uint_as_float(b)));
    }
    static __device__ __forceinline__ u32 smaller(u32 a, u32 b) {
        return __float_as_uint(contract::minimum(__uint_as_float(a), __uint_as_float(b)));
    }
    static __device__ __forceinline__ float largest(u32 a) { return __uint_as_float(a); }
    static __device__ __forceinline__ float least(u32 a) { return __uint_as_float(a); }
};

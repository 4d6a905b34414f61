// The larger and the smaller of values as they are stored, by words: two of 16 bits, or one of 32. NaN if a value is.
#pragma once

#include "convert.cuh"
#include "functions.cuh"

// `larger` and `smaller` of two words, value by value; `largest` and `least` of the values of one.
template <int type>
struct InWords;

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

template <>
struct InWords<BF16> {
    using Of = Element<BF16>;

    static __device__ __forceinline__ u32 larger(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 800
        u32 both;
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
        return both;
#else
        return Of::pack(contract::maximum(Of::widen(u16(a)), Of::widen(u16(b))),
                        contract::maximum(Of::widen(u16(a >> 16)), Of::widen(u16(b >> 16))));
#endif
    }
    static __device__ __forceinline__ u32 smaller(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 800
        u32 both;
        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
        return both;
#else
        return Of::pack(contract::minimum(Of::widen(u16(a)), Of::widen(u16(b))),
                        contract::minimum(Of::widen(u16(a >> 16)), Of::widen(u16(b >> 16))));
#endif
    }
    static __device__ __forceinline__ float largest(u32 a) {
        return contract::maximum(Of::widen(u16(a)), Of::widen(u16(a >> 16)));
    }
    static __device__ __forceinline__ float least(u32 a) {
        return contract::minimum(Of::widen(u16(a)), Of::widen(u16(a >> 16)));
    }
};

template <>
struct InWords<F16> {
    using Of = Element<F16>;

    static __device__ __forceinline__ u32 larger(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 800
        u32 both;
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
        return both;
#else
        return Of::pack(contract::maximum(Of::widen(u16(a)), Of::widen(u16(b))),
                        contract::maximum(Of::widen(u16(a >> 16)), Of::widen(u16(b >> 16))));
#endif
    }
    static __device__ __forceinline__ u32 smaller(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 800
        u32 both;
        asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
        return both;
#else
        return Of::pack(contract::minimum(Of::widen(u16(a)), Of::widen(u16(b))),
                        contract::minimum(Of::widen(u16(a >> 16)), Of::widen(u16(b >> 16))));
#endif
    }
    static __device__ __forceinline__ float largest(u32 a) {
        return contract::maximum(Of::widen(u16(a)), Of::widen(u16(a >> 16)));
    }
    static __device__ __forceinline__ float least(u32 a) {
        return contract::minimum(Of::widen(u16(a)), Of::widen(u16(a >> 16)));
    }
};

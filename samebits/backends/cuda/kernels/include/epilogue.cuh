// From f32 accumulators to outputs, for kernels that know types as enum Kind: bias in f32, one rounding,
// canonical NaN.
#pragma once

#include "ptx_sm80.cuh"

enum Kind { F32, BF16, F16, F32_AS_IS };  // the last: no term was added, not even a NaN changes

__device__ __forceinline__ float widen(const void* p, i64 index, int kind) {
    if (kind == F32) return static_cast<const float*>(p)[index];
    const u16 bits = static_cast<const u16*>(p)[index];
    if (kind == BF16) return __uint_as_float(static_cast<u32>(bits) << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// The bits of `value` rounded once, to nearest even, to `kind`; NaN is 0x7FFFFFFF, 0x7FFF in 16 bits.
__device__ __forceinline__ u32 round_bits(float value, int kind) {
    if (kind == F32_AS_IS) return __float_as_uint(value);
    if (kind == F32) return value != value ? 0x7FFFFFFFu : __float_as_uint(value);
    u16 bits;
    if (kind == BF16) {
#if __CUDA_ARCH__ >= 800
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(value));
        bits = static_cast<u16>(pair);
#else
        const u32 x = __float_as_uint(value);
        bits = static_cast<u16>((x + 0x7FFF + (x >> 16 & 1)) >> 16);
#endif
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    }
    return value != value ? 0x7FFFu : bits;
}

// Two of 16 bits at once; the conversion itself gives the NaN that `round_bits` gives.
template <int KIND>
__device__ __forceinline__ u32 round_pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 pair;
    if constexpr (KIND == BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return round_bits(low, KIND) | round_bits(high, KIND) << 16;
#endif
}

// `count` of four neighbours of one output row. `together`: four may be stored at once.
__device__ __forceinline__ void store_four(void* out, i64 index, i64 stride, const float (&value)[4],
                                           int count, int kind, bool together) {
    const bool wide = kind == F32 || kind == F32_AS_IS;
    u32 bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = round_bits(value[i], kind);
    if (together && count == 4) {
        if (wide)
            *reinterpret_cast<uint4*>(static_cast<u32*>(out) + index) =
                make_uint4(bits[0], bits[1], bits[2], bits[3]);
        else
            *reinterpret_cast<uint2*>(static_cast<u16*>(out) + index) =
                make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i >= count) break;
        if (wide)
            static_cast<u32*>(out)[index + i * stride] = bits[i];
        else
            static_cast<u16*>(out)[index + i * stride] = static_cast<u16>(bits[i]);
    }
}

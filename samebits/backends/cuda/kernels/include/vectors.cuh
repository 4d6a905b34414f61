// Values that lie side by side, widened and narrowed, by accesses of 16 or 8 bytes. One value may lie anywhere.
#pragma once

#include "convert.cuh"
#include "functions.cuh"

template <class E, int count>
__device__ __forceinline__ void load_values(const typename E::Stored* at, float (&x)[count]) {
    if constexpr (count == 1) {
        x[0] = E::widen(*at);
    } else {
        constexpr int WORDS = count * int(sizeof(typename E::Stored)) / 4;
        u32 words[WORDS];
        if constexpr (WORDS % 4 == 0) {
#pragma unroll
            for (int w = 0; w < WORDS; w += 4) {
                const uint4 v = *(reinterpret_cast<const uint4*>(at) + w / 4);
                words[w] = v.x, words[w + 1] = v.y, words[w + 2] = v.z, words[w + 3] = v.w;
            }
        } else {
            static_assert(WORDS == 2);
            const uint2 v = *reinterpret_cast<const uint2*>(at);
            words[0] = v.x, words[1] = v.y;
        }
#pragma unroll
        for (int i = 0; i < count; ++i)
            if constexpr (sizeof(typename E::Stored) == 4)
                x[i] = __uint_as_float(words[i]);
            else
                x[i] = E::widen(u16(i % 2 ? words[i / 2] >> 16 : words[i / 2]));
    }
}

// The words of values that lie side by side. NaN becomes canonical.
template <class E, int count, int words>
__device__ __forceinline__ void pack_values(const float (&x)[count], u32 (&to)[words]) {
    static_assert(words * 4 == count * int(sizeof(typename E::Stored)));
#pragma unroll
    for (int i = 0; i < count; ++i)
        if constexpr (sizeof(typename E::Stored) == 4)
            to[i] = __float_as_uint(contract::canonical(x[i]));
        else if (i % 2 == 0)
            to[i / 2] = E::pack(x[i], x[i + 1]);
}

// NaN becomes canonical.
template <class E, int count>
__device__ __forceinline__ void store_values(typename E::Stored* at, const float (&x)[count]) {
    if constexpr (count == 1) {
        *at = E::narrow(contract::canonical(x[0]));
    } else {
        constexpr int WORDS = count * int(sizeof(typename E::Stored)) / 4;
        u32 words[WORDS];
        pack_values<E>(x, words);
        if constexpr (WORDS % 4 == 0) {
#pragma unroll
            for (int w = 0; w < WORDS; w += 4)
                *(reinterpret_cast<uint4*>(at) + w / 4) =
                    make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
        } else {
            static_assert(WORDS == 2);
            *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
        }
    }
}

// Writes 16 bytes of global memory. What streams is the first to leave the L2 cache.
__device__ __forceinline__ void store_16(void* at, u32 a, u32 b, u32 c, u32 d, bool streams) {
#ifdef __CUDA_ARCH__
    if (streams)
        asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                     : "memory");
    else
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                     : "memory");
#else
    *static_cast<uint4*>(at) = make_uint4(a, b, c, d);
#endif
}

// store_values, to global memory by 16 bytes.
template <class E, int count>
__device__ __forceinline__ void store_values(typename E::Stored* at, const float (&x)[count], bool streams) {
    if constexpr (count == 1) {
        store_values<E>(at, x);
    } else {
        u32 words[count * sizeof(typename E::Stored) / 4];
        pack_values<E>(x, words);
#pragma unroll
        for (int w = 0; w < int(sizeof(words) / 4); w += 4)
            store_16(reinterpret_cast<u32*>(at) + w, words[w], words[w + 1], words[w + 2], words[w + 3],
                     streams);
    }
}

// Copies values, whatever they are.
template <class E, int count>
__device__ __forceinline__ void copy_values(const typename E::Stored* from, typename E::Stored* to) {
    constexpr int BYTES = count * int(sizeof(typename E::Stored));
    if constexpr (count > 1 && BYTES % 16 == 0)
#pragma unroll
        for (int i = 0; i < BYTES / 16; ++i)
            *(reinterpret_cast<uint4*>(to) + i) = *(reinterpret_cast<const uint4*>(from) + i);
    else
#pragma unroll
        for (int i = 0; i < count; ++i) to[i] = from[i];
}

// The value after a rounding to a type.
template <class E>
__device__ __forceinline__ float rounded_to(float x) {
    return E::widen(E::narrow(x));
}

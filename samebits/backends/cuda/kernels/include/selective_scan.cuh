// What the kernels of Mamba's scan share: where a block's sequence lies, and tiles of tokens and channels, which are
// loaded as they are stored, while the tile before is computed.
//
// Macros, beside those of the kernels
//   IN, DT, GATE, OF_BC   types of x, of delta, of z or NONE, of B and C
//   SIZE       N, entries of a channel's state
//   THREADS    of a block
//   TILE       tokens: a multiple of CHUNK
//   ALONG      whether tokens lie side by side in memory, and then in shared memory, too; else channels
//   VECTOR     of them in one access to memory: 8 or 1
//   BC_ALONG   whether tokens of B and C lie side by side, else perhaps states
//   BC_VECTOR  of them in one access: 8 or 1
//   SOFTPLUS   of delta
#pragma once

#include "convert.cuh"
#include "state_space.cuh"
#include "vectors.cuh"

using In = Element<IN>;
using Dt = Element<DT>;
using Bc = Element<OF_BC>;
using Gate = Element<GATE == NONE ? F32 : GATE>;

constexpr int LANES = lanes_of(SIZE);
constexpr int CHANNELS = THREADS / LANES;
constexpr int ROW = 8 * LANES;
constexpr int ROW_PITCH = ROW + 4;
constexpr int PITCH = ALONG ? TILE + 4 : CHANNELS;
constexpr int CELLS = PITCH * (ALONG ? CHANNELS : TILE);
constexpr int CHUNK = 8;  // tokens between the states that gradients begin from

__device__ constexpr int share(int count) { return (count + THREADS - 1) / THREADS; }

constexpr int GROUPS = share(TILE * CHANNELS / VECTOR);        // accesses of a thread
constexpr int BC_LINE = (BC_ALONG ? TILE : SIZE) / BC_VECTOR;  // accesses of a line of B or C
constexpr int OF_EACH = BC_LINE * (BC_ALONG ? SIZE : TILE);

// Where values of a tile are in shared memory.
__device__ __forceinline__ int cell(int d, int t) { return ALONG ? d * PITCH + t : t * PITCH + d; }

// Of a matrix for each row: [channels, tokens] if ALONG, else [tokens, channels].
struct Strides {
    i64 row, line;

    __device__ __forceinline__ i64 at(int r, int c, int t) const {
        return r * row + (ALONG ? c * line + t : t * line + c);
    }
};

// Of B or C.
struct OfStates {
    i64 row, group, state, token;
};

// A sequence: tokens from start up to stop of a row.
struct Span {
    int row, start, stop;
};

__device__ __forceinline__ Span span_of(const int* offsets, int sequence, int rows, int tokens) {
    if (!offsets) return {sequence, 0, tokens};
    const i64 all = i64(rows) * tokens;
    const i64 first = min(max(i64(offsets[sequence]), i64(0)), all);
    const i64 last = min(max(i64(offsets[sequence + 1]), first), all);
    const int row = int(first / max(tokens, 1));
    const i64 before = i64(row) * tokens;
    return {row, int(first - before), int(min(last - before, i64(tokens)))};
}

// Values as they are stored.
template <class E, int count = VECTOR>
struct Raw {
    static constexpr int WORDS = count == 1 ? 1 : count * int(sizeof(typename E::Stored)) / 4;
    u32 words[WORDS];

    __device__ __forceinline__ void load(const typename E::Stored* at) {
        if constexpr (count == 1) {
            if constexpr (sizeof(typename E::Stored) == 4)
                words[0] = __float_as_uint(*at);
            else
                words[0] = *at;
        } else {
#pragma unroll
            for (int w = 0; w < WORDS; w += 4) {
                const uint4 v = *(reinterpret_cast<const uint4*>(at) + w / 4);
                words[w] = v.x, words[w + 1] = v.y, words[w + 2] = v.z, words[w + 3] = v.w;
            }
        }
    }

    __device__ __forceinline__ float operator[](int i) const {
        if constexpr (sizeof(typename E::Stored) == 4)
            return __uint_as_float(words[i]);
        else
            return E::widen(u16(i % 2 ? words[i / 2] >> 16 : words[i / 2]));
    }
};

// A thread's place in a tile: VECTOR tokens from t on, or channels from d on.
struct Place {
    int d, t;

    __device__ __forceinline__ explicit Place(int group) {
        constexpr int OF_LINE = (ALONG ? TILE : CHANNELS) / VECTOR;
        const int at = group * THREADS + threadIdx.x, line = at / OF_LINE, along = at % OF_LINE * VECTOR;
        d = ALONG ? line : along, t = ALONG ? along : line;
    }
    __device__ __forceinline__ int channel(int i) const { return ALONG ? d : d + i; }
    __device__ __forceinline__ int token(int i) const { return ALONG ? t + i : t; }
    __device__ __forceinline__ int in_shared() const { return cell(d, t); }
    __device__ __forceinline__ bool is_in_tile() const { return d < CHANNELS && t < TILE; }
    // Whether it has values: the block has `width` channels, and the tile tokens from low up to high.
    __device__ __forceinline__ bool is(int width, int low, int high) const {
        return d < width && t < TILE && t + (ALONG ? VECTOR : 1) > low && t < high;
    }
};

template <class E>
__device__ __forceinline__ void load_tile(const typename E::Stored* from, const Strides& strides, int row,
                                          int channel, int token, int width, int low, int high,
                                          Raw<E> (&to)[GROUPS]) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const Place at(g);
        if (at.is(width, low, high)) to[g].load(from + strides.at(row, channel + at.d, token + at.t));
    }
}

__device__ __forceinline__ void put(float* to, const float (&x)[VECTOR]) {
    if constexpr (VECTOR == 1) {
        *to = x[0];
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i += 4)
            *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
}

// A channel's values of some tokens, from a multiple of `count` on.
template <int count>
__device__ __forceinline__ void take(const float* from, int d, int t, float (&x)[count]) {
    if constexpr (ALONG && count % 4 == 0) {
#pragma unroll
        for (int i = 0; i < count; i += 4) {
            const float4 v = *reinterpret_cast<const float4*>(from + cell(d, t + i));
            x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < count; ++i) x[i] = from[cell(d, t + i)];
    }
}

// Results of a place that has values; not those of another sequence's tokens.
template <class E>
__device__ __forceinline__ void store_tile(typename E::Stored* to, const Place& place, int low, int high,
                                           const float (&x)[VECTOR]) {
    if (!ALONG || (place.t >= low && place.t + VECTOR <= high)) {
        store_values<E>(to, x);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            if (place.t + i >= low && place.t + i < high) to[i] = E::narrow(contract::canonical(x[i]));
    }
}

// A thread's part of a tile's B and C; zeros where a token is none of the sequence.
template <bool with_c>
struct Both {
    static constexpr int COUNT = share((1 + with_c) * OF_EACH);
    Raw<Bc, BC_VECTOR> values[COUNT];

    struct Place {
        int which, n, t;

        __device__ __forceinline__ explicit Place(int i) {
            const int item = i * THREADS + threadIdx.x, at = item % OF_EACH;
            which = item / OF_EACH;
            const int line = at / BC_LINE, along = at % BC_LINE * BC_VECTOR;
            n = BC_ALONG ? line : along, t = BC_ALONG ? along : line;
        }
        __device__ __forceinline__ int state(int i) const { return BC_ALONG ? n : n + i; }
        __device__ __forceinline__ int token(int i) const { return BC_ALONG ? t + i : t; }
    };

    __device__ __forceinline__ void load(const Bc::Stored* b, const Bc::Stored* c, const OfStates& of_b,
                                         const OfStates& of_c, int row, int group, int token, int low,
                                         int high) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const Place at(i);
            const OfStates& of = at.which ? of_c : of_b;
            if (at.which <= with_c && at.t + (BC_ALONG ? BC_VECTOR : 1) > low && at.t < high)
                values[i].load((at.which ? c : b) + row * of.row + group * of.group + at.n * of.state +
                               (token + at.t) * of.token);
        }
    }
    __device__ __forceinline__ void store(float (*b)[ROW_PITCH], float (*c)[ROW_PITCH], int low,
                                          int high) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const Place at(i);
            if (at.which > with_c) continue;
#pragma unroll
            for (int j = 0; j < BC_VECTOR; ++j) {
                const int t = at.token(j);
                (at.which ? c : b)[t][place_of<LANES>(at.state(j))] =
                    t >= low && t < high ? values[i][j] : 0.0f;
            }
        }
    }
};

// The least of a channel's decays, or NaN if one of them is above zero.
__device__ __forceinline__ float least_of(const float (&own)[8]) {
    float least = 0.0f;
    bool above = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        least = contract::minimum(least, own[i]);
        above |= own[i] > 0.0f;
    }
    if (above) least = __int_as_float(0x7FFFFFFF);
#pragma unroll
    for (int half = LANES / 2; half > 0; half /= 2)
        least = contract::minimum(least, __shfl_xor_sync(0xFFFFFFFF, least, half));
    return least;
}

// a / b by the steps of a GPU's own division, which branches for each quotient: here it does once for all of them.
template <int count>
__device__ __forceinline__ void divide(const float (&a)[count], const float (&b)[count], float (&q)[count]) {
#if __CUDA_ARCH__ >= 800
    bool far = false;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        float r;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b[i]));
        r = __fmaf_rn(r, __fmaf_rn(-b[i], r, 1.0f), r);
        q[i] = __fmul_rn(a[i], r);
        q[i] = __fmaf_rn(r, __fmaf_rn(-b[i], q[i], a[i]), q[i]);
        const float size = fabsf(a[i]);  // the remainder is exact, and no step leaves the normal numbers
        far |= !(size >= 0x1p-60f && size <= 0x1p+60f && b[i] >= 0x1p-30f && b[i] <= 0x1p+60f);
    }
    if (!far) return;
#endif
#pragma unroll
    for (int i = 0; i < count; ++i) q[i] = __fdiv_rn(a[i], b[i]);
}

// contract::softplus, sigmoid and silu of each.
template <int count>
__device__ __forceinline__ void softplus_all(float (&x)[count]) {
    float e[count], sum[count], a[count], b[count], q[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
        e[i] = contract::exp(-fabsf(x[i]));
        sum[i] = __fadd_rn(1.0f, e[i]);
        a[i] = sum[i] == 1.0f ? 1.0f : e[i], b[i] = sum[i] == 1.0f ? 1.0f : __fsub_rn(sum[i], 1.0f);
    }
    divide(a, b, q);
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const float above = sum[i] == 1.0f ? e[i] : __fmul_rn(contract::log(sum[i]), q[i]);
        x[i] = x[i] > 0.0f ? __fadd_rn(x[i], above) : above;
    }
}

template <int count>
__device__ __forceinline__ void sigmoid_all(const float (&x)[count], float (&y)[count]) {
    float one[count], sum[count];
#pragma unroll
    for (int i = 0; i < count; ++i) one[i] = 1.0f, sum[i] = contract::one_and_exp_minus(x[i]);
    divide(one, sum, y);
}

template <int count>
__device__ __forceinline__ void silu_all(const float (&x)[count], float (&y)[count]) {
    float sum[count];
#pragma unroll
    for (int i = 0; i < count; ++i) sum[i] = contract::one_and_exp_minus(x[i]);
    divide(x, sum, y);
}

// What softplus takes of a place, or steps: 0 where it has no values.
template <class Delta>
__device__ __forceinline__ void raw_steps(const Place& place, int width, int low, int high,
                                          const Delta& delta, const float* bias, int channel,
                                          float (&raw)[VECTOR]) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const int t = place.token(i);
        raw[i] = place.channel(i) < width && t >= low && t < high ? delta[i] : 0.0f;
    }
    if (bias && place.is(width, low, high))
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) raw[i] = __fadd_rn(raw[i], bias[channel + place.channel(i)]);
}

// Whether `exp_near` is the decay of a step, for all states of a channel. The product of the step and the least of
// their decays is the least of all products, since rounding keeps an order.
__device__ __forceinline__ bool is_near(float step, float least) {
    return step >= 0.0f && __fmul_rn(step, least) >= -80.0f;
}

template <bool near>
__device__ __forceinline__ float decay_of(float step, float own) {
    const float x = __fmul_rn(step, own);
    return near ? contract::exp_near(x) : contract::decay(x);
}

// Sums over tokens for every column, each one chain in f32 over ascending tokens: docs/contract.md, "Row
// reductions".
//
// column_sums: a block takes some columns. Stages of TOKENS tokens go round its first warps, the producers: each
// copies its stages into shared memory, widens and normalises them, by itself. The last warp adds them up: a lane
// carries one chain, of a column's gradients or of its products. It waits for nothing but the stage that is next,
// so a token costs little more than one addition's latency.
//
// Macros
//   GRAD     type of the summed values: F32, BF16 or F16
//   X        type of what a norm was taken of, or NONE: there is none
//   OUT      type of the results: F32, BF16 or F16
//   VECTOR   entries of one access to memory: 16 bytes' worth of GRAD, or 1
//   PRODUCERS, DEPTH  warps of column_sums beside the last one, and stages that each copies ahead
//   COLUMNS           of a block: 8 or 16, or 32 where there is no x
//   TOKENS            of a stage: 32, or more where a block has a multiprocessor to itself

#ifndef X
#error "X is needed: #if takes a missing macro for 0"
#endif

#include "convert.cuh"
#include "functions.cuh"
#include "launch.cuh"
#include "named_barriers.cuh"
#include "ptx_sm80.cuh"

constexpr int THREADS = 32 * (PRODUCERS + 1);
constexpr bool ALONE = TOKENS > 32;
constexpr int BLOCKS = ALONE            ? 1
                       : VECTOR == 1    ? 2
                       : PRODUCERS == 8 ? 4
                                        : 3;  // of a multiprocessor: as many as shared memory has room for
constexpr int PITCH =
    TOKENS + 4;  // floats from column to column: the lanes' reads of four meet no bank twice

using Grad = Element<GRAD>;
using Out = Element<OUT>;
using Of = Element<X == NONE ? F32 : X>;

template <class E>
using Raw = typename E::Stored[TOKENS][COLUMNS];

// A stage as it is copied.
struct Copied {
    alignas(16) Raw<Grad> grads;
#if X != NONE
    alignas(16) Raw<Of> entries;
    alignas(16) float means[TOKENS], scales[TOKENS];
#endif
};

// A stage as it is added up.
struct Terms {
    alignas(16) float grads[COLUMNS][PITCH];
#if X != NONE
    alignas(16) float normalised[COLUMNS][PITCH];
#endif
};

// A producer's shared memory.
struct Stages {
    Copied copied[DEPTH];
    Terms terms;
};

// The named barriers of a producer: its terms are full, and they are empty again.
__device__ __forceinline__ int full(int producer) { return producer; }
__device__ __forceinline__ int empty(int producer) { return PRODUCERS + producer; }

// Where a token is in what was copied. Tokens four apart, which lanes read together, meet no bank twice: groups of
// four that would begin at the same bank begin with another token each.
template <class E>
__device__ __forceinline__ int place(int token) {
    constexpr int BYTES = COLUMNS * int(sizeof(typename E::Stored));
    constexpr int OTHERS = BYTES < 64 ? 3 : BYTES == 64 ? 1 : 0;
    return token ^ (token >> (BYTES < 32 ? 3 : 2) & OTHERS);
}

struct ColumnsParams {
    const Grad::Stored* grad;
    const void* x;
    const float *means, *scales;  // of every token; means is null for an RMS norm
    Out::Stored *product, *sum;   // sums of grad * normalised x, and of grad; the first is null without x
    i64 grad_row, x_row, tokens, n;
};

// Copies a stage's part of a matrix, with zeros beyond it.
template <class E>
__device__ __forceinline__ void copy(Raw<E>& to, const typename E::Stored* from, i64 step, i64 token,
                                     i64 column, int lane, const ColumnsParams& p) {
    constexpr int RUN = VECTOR == 1 ? 1 : 16 / int(sizeof(typename E::Stored));
    constexpr int ACROSS = COLUMNS / RUN, DOWN = 32 / ACROSS;
    const int c = lane % ACROSS * RUN;
    i64 at = token + lane / ACROSS;
    const typename E::Stored* source = from + at * step + column + c;
#pragma unroll
    for (int t = lane / ACROSS; t < TOKENS; t += DOWN, at += DOWN, source += DOWN * step) {
        const bool inside = at < p.tokens && column + c < p.n;
        if constexpr (RUN == 1) {
            to[place<E>(t)][c] = inside ? *source : typename E::Stored(0);
        } else {
#if __CUDA_ARCH__ >= 800
            cp_async_16(shared_address(&to[place<E>(t)][c]), inside ? source : from, inside ? 16 : 0);
#else
            const uint4 zero = make_uint4(0, 0, 0, 0);
            *reinterpret_cast<uint4*>(&to[place<E>(t)][c]) =
                inside ? *reinterpret_cast<const uint4*>(source) : zero;
#endif
        }
    }
}

__device__ __forceinline__ void copy(float& to, const float* from, bool inside) {
#if __CUDA_ARCH__ >= 800
    if (inside)
        cp_async_4(shared_address(&to), from);
    else
        to = 0.0f;
#else
    to = inside ? *from : 0.0f;
#endif
}

__device__ __forceinline__ void copy(Copied& to, i64 token, i64 column, int lane, const ColumnsParams& p) {
    copy<Grad>(to.grads, p.grad, p.grad_row, token, column, lane, p);
#if X != NONE
    copy<Of>(to.entries, static_cast<const Of::Stored*>(p.x), p.x_row, token, column, lane, p);
#pragma unroll
    for (int t = lane; t < TOKENS; t += 32) {
        const bool inside = token + t < p.tokens;
        copy(to.scales[t], p.scales + token + t, inside);
        if (p.means) copy(to.means[t], p.means + token + t, inside);
    }
#endif
}

template <class E>
__device__ __forceinline__ float2 widen_pair(const typename E::Stored* from) {
    if constexpr (sizeof(typename E::Stored) == 4) {
        return *reinterpret_cast<const float2*>(from);
    } else {
        const u32 both = *reinterpret_cast<const u32*>(from);
        return make_float2(E::widen(u16(both)), E::widen(u16(both >> 16)));
    }
}

// Four tokens of two columns for a lane. Eight lanes write four pairs of columns of eight tokens: no bank twice.
__device__ __forceinline__ void widen(const Copied& from, Terms& to, int lane, bool centred) {
    constexpr int PAIRS = COLUMNS / 2, UNROLLED = ALONE ? 4 : 2;
#pragma unroll UNROLLED
    for (int i = lane; i < TOKENS / 4 * PAIRS; i += 32) {
        const int c = 2 * (i % 4 + i / 8 % (PAIRS / 4) * 4), first = 4 * (i / 4 % 2 + i / (2 * PAIRS) * 2);
        float2 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = widen_pair<Grad>(&from.grads[place<Grad>(first + j)][c]);
        *reinterpret_cast<float4*>(&to.grads[c][first]) = make_float4(v[0].x, v[1].x, v[2].x, v[3].x);
        *reinterpret_cast<float4*>(&to.grads[c + 1][first]) = make_float4(v[0].y, v[1].y, v[2].y, v[3].y);
#if X != NONE
        float means[4] = {}, scales[4];
        if (centred) *reinterpret_cast<float4*>(means) = *reinterpret_cast<const float4*>(from.means + first);
        *reinterpret_cast<float4*>(scales) = *reinterpret_cast<const float4*>(from.scales + first);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            v[j] = widen_pair<Of>(&from.entries[place<Of>(first + j)][c]);
            if (centred) v[j] = make_float2(__fsub_rn(v[j].x, means[j]), __fsub_rn(v[j].y, means[j]));
            v[j] = make_float2(__fmul_rn(v[j].x, scales[j]), __fmul_rn(v[j].y, scales[j]));
        }
        *reinterpret_cast<float4*>(&to.normalised[c][first]) = make_float4(v[0].x, v[1].x, v[2].x, v[3].x);
        *reinterpret_cast<float4*>(&to.normalised[c + 1][first]) =
            make_float4(v[0].y, v[1].y, v[2].y, v[3].y);
#endif
    }
}

// The stages of one producer: every PRODUCERS-th.
__device__ __forceinline__ void produce(Stages& own, int producer, i64 stages, i64 column, int lane,
                                        const ColumnsParams& p) {
#pragma unroll
    for (int ahead = 0; ahead < DEPTH; ++ahead) {
        const i64 stage = producer + ahead * PRODUCERS;
        if (stage < stages) copy(own.copied[ahead], stage * TOKENS, column, lane, p);
        cp_async_commit();  // empty ones too, so that their number tells which stage is whole
    }
    int at = 0;
    for (i64 stage = producer; stage < stages; stage += PRODUCERS) {
        cp_async_wait<DEPTH - 1>();
        __syncwarp();
        if (stage >= PRODUCERS) wait_for<64>(empty(producer));
        widen(own.copied[at], own.terms, lane, p.means);
        arrive_at<64>(full(producer));
        __syncwarp();
        const i64 ahead = stage + DEPTH * PRODUCERS;
        if (ahead < stages) copy(own.copied[at], ahead * TOKENS, column, lane, p);
        cp_async_commit();
        at = at + 1 == DEPTH ? 0 : at + 1;
    }
}

// Some tokens of a lane's chain. They are read while those before them are added, of the stage before, too.
struct Batch {
    static constexpr int FOURS = ALONE ? 4 : 2;         // with eight tokens, reading takes longer than adding
    static constexpr int COUNT = TOKENS / (4 * FOURS);  // of a stage
    float4 g[FOURS], y[FOURS];

    __device__ __forceinline__ void read(const Terms& terms, int at, int c, bool product) {
#pragma unroll
        for (int i = 0; i < FOURS; ++i) {
            const int token = 4 * (at * FOURS + i);
            g[i] = *reinterpret_cast<const float4*>(&terms.grads[c][token]);
            y[i] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
#if X != NONE
            if (product) y[i] = *reinterpret_cast<const float4*>(&terms.normalised[c][token]);
#endif
        }
    }

    // Zeros beyond the last token change nothing.
    __device__ __forceinline__ float add_to(float chain) const {
#pragma unroll
        for (int i = 0; i < FOURS; ++i) {
            chain = __fmaf_rn(g[i].x, y[i].x, chain);
            chain = __fmaf_rn(g[i].y, y[i].y, chain);
            chain = __fmaf_rn(g[i].z, y[i].z, chain);
            chain = __fmaf_rn(g[i].w, y[i].w, chain);
        }
        return chain;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    column_sums(const __grid_constant__ ColumnsParams p) {
    extern __shared__ Stages own[];
    let_kernel_behind_start();
    const i64 column = i64(blockIdx.x) * COLUMNS;
    const i64 stages = (p.tokens + TOKENS - 1) / TOKENS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < PRODUCERS) {
        produce(own[warp], warp, stages, column, lane, p);
        return;
    }
    const int c = lane % COLUMNS;
    const bool product = lane / COLUMNS == 1;  // lanes that are left over repeat sums, and store none
    float chain = 0.0f;
    Batch here{};
    int producer = 0;
    for (i64 stage = 0; stage < stages; ++stage) {
        wait_for<64>(full(producer));
#pragma unroll
        for (int i = 0; i < Batch::COUNT; ++i) {
            Batch next;
            next.read(own[producer].terms, i, c, product);
            chain = here.add_to(chain);
            here = next;
            const i64 before = stage - 1;  // it is empty as soon as its last batch is added
            if (i == 0 && before >= 0 && before + PRODUCERS < stages)
                arrive_at<64>(empty((producer + PRODUCERS - 1) % PRODUCERS));
        }
        producer = producer + 1 == PRODUCERS ? 0 : producer + 1;
    }
    chain = here.add_to(chain);
    if (column + c >= p.n || lane / COLUMNS > (X != NONE)) return;
    if (product)
        p.product[column + c] = Out::narrow(contract::canonical(__fadd_rn(chain, 0.0f)));
    else
        p.sum[column + c] = Out::narrow(contract::canonical(chain));
}

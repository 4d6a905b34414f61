// Sums over tokens for every column, each one chain in f32 over ascending tokens: docs/contract.md, "Row
// reductions".
//
// column_sums: a block takes 16 columns, or 32 where there is no x. Its first eight warps copy tokens into
// shared memory, STAGES - 1 stages of 64 ahead, and widen and normalise the stage after the one that the last
// warp adds up. A lane of that warp carries one chain: of a column's gradients, or of its products.
// embedding_backward: a block takes a row of the embedding, a thread some columns.
//
// Macros
//   GRAD     type of the summed values: F32, BF16 or F16
//   X        type of what a norm was taken of, or NONE: there is none
//   OUT      type of the results: F32, BF16 or F16
//   VECTOR   entries of one access to memory: 16 bytes' worth of GRAD, or 1

#ifndef X
#error "X is needed: #if takes a missing macro for 0"
#endif

#include "convert.cuh"
#include "functions.cuh"
#include "ptx_sm80.cuh"

constexpr int COPIERS = 256;
constexpr int THREADS = COPIERS + 32;
constexpr int COLUMNS = X == NONE ? 32 : 16;
constexpr int TOKENS = 64;  // of a stage
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
    float means[TOKENS], scales[TOKENS];
#endif
};

// A stage as it is added up.
struct Terms {
    alignas(16) float grads[COLUMNS][PITCH];
#if X != NONE
    alignas(16) float normalised[COLUMNS][PITCH];
#endif
};

constexpr int STAGES = (48 * 1024 - 2 * int(sizeof(Terms))) / int(sizeof(Copied));  // with both, 48 KiB
static_assert(STAGES >= 2);

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
                                     i64 column, const ColumnsParams& p) {
    constexpr int RUN = VECTOR == 1 ? 1 : 16 / int(sizeof(typename E::Stored));
    for (int i = threadIdx.x; i < TOKENS * COLUMNS / RUN; i += COPIERS) {
        const int at = i / (COLUMNS / RUN), c = i % (COLUMNS / RUN) * RUN;
        const bool inside = token + at < p.tokens && column + c < p.n;
        const typename E::Stored* source = from + (inside ? (token + at) * step + column + c : 0);
        if constexpr (RUN == 1) {
            to[at][c] = inside ? *source : typename E::Stored(0);
        } else {
#if __CUDA_ARCH__ >= 800
            cp_async_16(shared_address(&to[at][c]), source, inside ? 16 : 0);
#else
            const uint4 zero = make_uint4(0, 0, 0, 0);
            *reinterpret_cast<uint4*>(&to[at][c]) = inside ? *reinterpret_cast<const uint4*>(source) : zero;
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

__device__ __forceinline__ void copy(Copied& to, i64 token, i64 column, const ColumnsParams& p) {
    copy<Grad>(to.grads, p.grad, p.grad_row, token, column, p);
#if X != NONE
    copy<Of>(to.entries, static_cast<const Of::Stored*>(p.x), p.x_row, token, column, p);
    const int at = threadIdx.x % TOKENS;
    const bool inside = token + at < p.tokens;
    if (threadIdx.x < TOKENS)
        copy(to.scales[at], p.scales + token + at, inside);
    else if (threadIdx.x < 2 * TOKENS && p.means)
        copy(to.means[at], p.means + token + at, inside);
#endif
}

// Four tokens of a column for a thread.
__device__ __forceinline__ void widen(const Copied& from, Terms& to, bool centred) {
    for (int i = threadIdx.x; i < TOKENS / 4 * COLUMNS; i += COPIERS) {
        const int c = i % COLUMNS, first = i / COLUMNS * 4;
        float g[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) g[j] = Grad::widen(from.grads[first + j][c]);
        *reinterpret_cast<float4*>(&to.grads[c][first]) = make_float4(g[0], g[1], g[2], g[3]);
#if X != NONE
        float y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float wide = Of::widen(from.entries[first + j][c]);
            y[j] = __fmul_rn(centred ? __fsub_rn(wide, from.means[first + j]) : wide, from.scales[first + j]);
        }
        *reinterpret_cast<float4*>(&to.normalised[c][first]) = make_float4(y[0], y[1], y[2], y[3]);
#endif
    }
}

// A stage of this lane's chain. Zeros beyond the last token change nothing.
__device__ __forceinline__ float add(const Terms& terms, float chain, int c, bool product) {
#pragma unroll
    for (int first = 0; first < TOKENS; first += 4) {
        const float4 g = *reinterpret_cast<const float4*>(&terms.grads[c][first]);
        float4 y = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
#if X != NONE
        if (product) y = *reinterpret_cast<const float4*>(&terms.normalised[c][first]);
#endif
        chain = __fmaf_rn(g.x, y.x, chain);
        chain = __fmaf_rn(g.y, y.y, chain);
        chain = __fmaf_rn(g.z, y.z, chain);
        chain = __fmaf_rn(g.w, y.w, chain);
    }
    return chain;
}

extern "C" __global__ void __launch_bounds__(THREADS) column_sums(const __grid_constant__ ColumnsParams p) {
    __shared__ Copied copied[STAGES];
    __shared__ Terms terms[2];
    const i64 column = i64(blockIdx.x) * COLUMNS;
    const int stages = int((p.tokens + TOKENS - 1) / TOKENS);
    const bool copies = threadIdx.x < COPIERS;
    const int lane = threadIdx.x % 32, c = lane % COLUMNS;
    const bool product = X != NONE && lane >= COLUMNS;

    if (copies)
        for (int stage = 0; stage < STAGES - 1; ++stage) {
            if (stage < stages) copy(copied[stage], i64(stage) * TOKENS, column, p);
            cp_async_commit();  // empty ones too, so that their number tells which stage is whole
        }
    float chain = 0.0f;
    for (int stage = 0; stage <= stages; ++stage) {
        if (copies) cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (copies && stage < stages) {
            const int ahead = stage + STAGES - 1;
            if (ahead < stages) copy(copied[ahead % STAGES], i64(ahead) * TOKENS, column, p);
            cp_async_commit();
            widen(copied[stage % STAGES], terms[stage % 2], p.means);
        } else if (!copies && stage > 0) {
            chain = add(terms[(stage - 1) % 2], chain, c, product);
        }
    }
    if (copies || column + c >= p.n) return;
    if (product)
        p.product[column + c] = Out::narrow(contract::canonical(__fadd_rn(chain, 0.0f)));
    else
        p.sum[column + c] = Out::narrow(contract::canonical(chain));
}

struct EmbeddingParams {
    const Grad::Stored* grad;
    const i64 *tokens, *starts;  // tokens sorted by id, ascending within it, and where each id's begin
    Out::Stored* out;
    i64 grad_row, n;
    i64 padding;
};

// A block for each row of the embedding.
extern "C" __global__ void __launch_bounds__(COPIERS)
    embedding_backward(const __grid_constant__ EmbeddingParams p) {
    const i64 id = blockIdx.x;
    const i64 first = p.starts[id], last = id == p.padding ? first : p.starts[id + 1];
    for (i64 column = i64(threadIdx.x) * VECTOR; column < p.n; column += COPIERS * VECTOR) {
        float sums[VECTOR] = {};
        for (i64 i = first; i < last; ++i) {
            alignas(16) Grad::Stored row[VECTOR];
            const Grad::Stored* from = p.grad + p.tokens[i] * p.grad_row + column;
            if constexpr (VECTOR > 1)
                *reinterpret_cast<uint4*>(row) = *reinterpret_cast<const uint4*>(from);
            else
                row[0] = *from;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) sums[j] = __fadd_rn(sums[j], Grad::widen(row[j]));
        }
#pragma unroll
        for (int j = 0; j < VECTOR; j += VECTOR > 1 ? 2 : 1) {
            Out::Stored* to = p.out + id * p.n + column + j;
            if constexpr (VECTOR > 1)
                Out::store_pair(to, contract::canonical(sums[j]), contract::canonical(sums[j + 1]));
            else
                *to = Out::narrow(contract::canonical(sums[j]));
        }
    }
}

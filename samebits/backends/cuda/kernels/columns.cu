// Sums over tokens for every column, each one chain in f32 over ascending tokens: docs/contract.md, "Row
// reductions".
//
// column_sums: a block takes 32 columns. All its warps load tokens into shared memory, 64 at a time and one
// stage ahead; one warp carries the chains on. embedding_backward: a block takes a row of the embedding, a
// thread some columns.
//
// Macros
//   GRAD   type of the summed values: F32, BF16 or F16
//   X      type of what a norm was taken of, or NONE: there is none
//   OUT    type of the results: F32, BF16 or F16

#ifndef X
#error "X is needed: #if takes a missing macro for 0"
#endif

#include "convert.cuh"
#include "functions.cuh"

constexpr int THREADS = 256;
constexpr int COLUMNS = 32;
constexpr int WARPS = THREADS / COLUMNS;
constexpr int TOKENS = 64;  // in a stage of shared memory

using Grad = Element<GRAD>;
using Out = Element<OUT>;

struct ColumnsParams {
    const Grad::Stored* grad;
    const void* x;
    const float *means, *scales;  // of every token; means is null for an RMS norm
    Out::Stored *product, *sum;   // sums of grad * normalised x, and of grad; the first is null without x
    i64 grad_row, x_row, tokens, n;
};

extern "C" __global__ void __launch_bounds__(THREADS) column_sums(const __grid_constant__ ColumnsParams p) {
    __shared__ float grads[2][TOKENS][COLUMNS];
    __shared__ float normalised[X == NONE ? 1 : 2][X == NONE ? 1 : TOKENS][COLUMNS];
    const int lane = threadIdx.x % COLUMNS, warp = threadIdx.x / COLUMNS;
    const i64 column = i64(blockIdx.x) * COLUMNS + lane;

    const auto load = [&](int stage, i64 first) {
#pragma unroll
        for (int i = 0; i < TOKENS / WARPS; ++i) {
            const int at = i * WARPS + warp;
            const i64 token = first + at;
            if (token >= p.tokens || column >= p.n) continue;
            grads[stage][at][lane] = Grad::widen(p.grad[token * p.grad_row + column]);
#if X != NONE
            const float wide =
                Element<X>::widen(static_cast<const Element<X>::Stored*>(p.x)[token * p.x_row + column]);
            normalised[stage][at][lane] =
                __fmul_rn(p.means ? __fsub_rn(wide, p.means[token]) : wide, p.scales[token]);
#endif
        }
    };

    float product = 0.0f, sum = 0.0f;
    load(0, 0);
    __syncthreads();
    for (i64 first = 0; first < p.tokens; first += TOKENS) {
        const int stage = first / TOKENS % 2;
        // The warp that carries the chains fetches as well: the others' loads are in flight meanwhile.
        if (first + TOKENS < p.tokens) load(1 - stage, first + TOKENS);
        if (warp == 0 && column < p.n) {
            const int count = int(min(p.tokens - first, i64(TOKENS)));
#pragma unroll 8
            for (int i = 0; i < count; ++i) {
                sum = __fadd_rn(sum, grads[stage][i][lane]);
#if X != NONE
                product = __fmaf_rn(grads[stage][i][lane], normalised[stage][i][lane], product);
#endif
            }
        }
        __syncthreads();
    }
    if (warp > 0 || column >= p.n) return;
    p.sum[column] = Out::narrow(contract::canonical(sum));
#if X != NONE
    p.product[column] = Out::narrow(contract::canonical(__fadd_rn(product, 0.0f)));
#endif
}

struct EmbeddingParams {
    const Grad::Stored* grad;
    const i64 *tokens, *starts;  // tokens sorted by id, ascending within it, and where each id's begin
    Out::Stored* out;
    i64 grad_row, n;
    i64 padding;
};

// A block for each row of the embedding.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_backward(const __grid_constant__ EmbeddingParams p) {
    const i64 id = blockIdx.x;
    const i64 first = p.starts[id], last = id == p.padding ? first : p.starts[id + 1];
    for (i64 column = threadIdx.x; column < p.n; column += THREADS) {
        float sum = 0.0f;
        for (i64 i = first; i < last; ++i)
            sum = __fadd_rn(sum, Grad::widen(p.grad[p.tokens[i] * p.grad_row + column]));
        p.out[id * p.n + column] = Out::narrow(contract::canonical(sum));
    }
}

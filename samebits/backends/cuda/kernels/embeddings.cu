// Gradients of embeddings: for every id and column one chain in f32 over ascending tokens: docs/contract.md, "Row
// reductions".
//
// embedding_backward: a block takes a row of the embedding, a thread some columns. embedding_many: a warp takes some
// columns of a row with many tokens. embedding_few: a warp takes some columns of the row of a token, of few tokens,
// whose ids are not sorted.
//
// Macros
//   GRAD     type of the summed values: F32, BF16 or F16
//   OUT      type of the results: F32, BF16 or F16
//   VECTOR   entries of one access to memory: 16 bytes' worth of GRAD, or 1
//   MANY     tokens with one id, beyond which its row is embedding_many's

#include "convert.cuh"
#include "functions.cuh"

using Grad = Element<GRAD>;
using Out = Element<OUT>;

constexpr int THREADS = 256;

struct Params {
    const Grad::Stored* grad;
    const i64 *ids, *tokens, *starts;  // sorted; their tokens, ascending within an id; where each id's begin.
                                       // embedding_few has ids in the order of tokens alone
    Out::Stored* out;
    i64 grad_row, n, count;
    i64 padding;
};

__device__ __forceinline__ void store(const Params& p, i64 id, i64 column, const float (&sums)[VECTOR]) {
#pragma unroll
    for (int j = 0; j < VECTOR; j += VECTOR > 1 ? 2 : 1) {
        Out::Stored* to = p.out + id * p.n + column + j;
        if constexpr (VECTOR > 1)
            Out::store_pair(to, contract::canonical(sums[j]), contract::canonical(sums[j + 1]));
        else
            *to = Out::narrow(contract::canonical(sums[j]));
    }
}

// Some columns of a token's gradients.
struct Part {
    alignas(16) Grad::Stored entries[VECTOR];

    __device__ __forceinline__ void read(const Grad::Stored* from) {
        if constexpr (VECTOR > 1)
            *reinterpret_cast<uint4*>(entries) = *reinterpret_cast<const uint4*>(from);
        else
            entries[0] = *from;
    }

    __device__ __forceinline__ void add_to(float (&sums)[VECTOR]) const {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sums[j] = __fadd_rn(sums[j], Grad::widen(entries[j]));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) embedding_backward(const __grid_constant__ Params p) {
    const i64 id = blockIdx.x;
    const i64 first = p.starts[id], last = id == p.padding ? first : p.starts[id + 1];
    if (last - first > MANY) return;
    for (i64 column = i64(threadIdx.x) * VECTOR; column < p.n; column += THREADS * VECTOR) {
        float sums[VECTOR] = {};
        for (i64 i = first; i < last; ++i) {
            Part row;
            row.read(p.grad + p.tokens[i] * p.grad_row + column);
            row.add_to(sums);
        }
        store(p, id, column, sums);
    }
}

// Of MANY tokens, read while those before them are added.
struct Parts {
    Part parts[MANY];

    // Lane i has the token i, of `count`. Zeros beyond them change nothing.
    __device__ __forceinline__ void read(i64 token, i64 count, i64 column, const Params& p) {
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
            const i64 at = __shfl_sync(0xFFFFFFFF, token, i) * p.grad_row + column;
            parts[i] = {};
            if (i < count && column < p.n) parts[i].read(p.grad + at);
        }
    }
};

// A warp takes some columns of a row whose chain is long. Its tokens hold a place that is a multiple of MANY.
extern "C" __global__ void __launch_bounds__(32) embedding_many(const __grid_constant__ Params p) {
    const i64 place = i64(blockIdx.x) * MANY, id = p.ids[place];
    if (id < 0 || id >= p.count || id == p.padding) return;
    const i64 first = p.starts[id], last = p.starts[id + 1];
    if (last - first <= MANY || place - first >= MANY) return;  // few, or another warp's
    const auto token = [&](i64 i) { return i + threadIdx.x < last ? p.tokens[i + threadIdx.x] : 0; };
    for (i64 left = i64(blockIdx.y) * 32 * VECTOR; left < p.n; left += i64(gridDim.y) * 32 * VECTOR) {
        const i64 column = left + threadIdx.x * VECTOR;
        float sums[VECTOR] = {};
        Parts here;
        here.read(token(first), last - first, column, p);
        i64 coming = token(first + MANY);
        for (i64 i = first; i < last; i += MANY) {
            Parts next;
            next.read(coming, last - i - MANY, column, p);
            coming = token(i + 2 * MANY);
#pragma unroll
            for (int j = 0; j < MANY; ++j) here.parts[j].add_to(sums);
            here = next;
        }
        if (column < p.n) store(p, id, column, sums);
    }
}

// A warp takes some columns of the row of its token's id, unless that was an earlier token's.
extern "C" __global__ void __launch_bounds__(32) embedding_few(const __grid_constant__ Params p) {
    const i64 mine = blockIdx.x, tokens = gridDim.x, id = p.ids[mine];
    const auto with_id = [&](i64 from, i64 to) {  // which of 32 tokens
        return __ballot_sync(0xFFFFFFFF, from + threadIdx.x < to && p.ids[from + threadIdx.x] == id);
    };
    if (id < 0 || id >= p.count || id == p.padding) return;
    for (i64 from = 0; from < mine; from += 32)
        if (with_id(from, mine)) return;
    for (i64 left = i64(blockIdx.y) * 32 * VECTOR; left < p.n; left += i64(gridDim.y) * 32 * VECTOR) {
        const i64 column = left + threadIdx.x * VECTOR;
        float sums[VECTOR] = {};
        for (i64 from = mine; from < tokens; from += 32) {
            for (u32 rest = with_id(from, tokens); rest;) {
                Part parts[8];  // which are read at once
                int count = 0;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    if (rest && column < p.n)
                        parts[j].read(p.grad + (from + __ffs(rest) - 1) * p.grad_row + column);
                    count += rest != 0;
                    rest &= rest - 1;
                }
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    if (j < count && column < p.n) parts[j].add_to(sums);
            }
        }
        if (column < p.n) store(p, id, column, sums);
    }
}

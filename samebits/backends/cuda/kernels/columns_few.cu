// Sums over few tokens for every column, each one chain in f32 over ascending tokens: docs/contract.md, "Row
// reductions". Such are gradients of what was broadcast over some heads, or over a small batch.
//
// A thread has VECTOR neighbouring columns. Columns lie in runs; each token's runs lie as those of the first.
//
// Macros
//   GRAD     type of the summed values: F32, BF16 or F16
//   OUT      type of the results: F32, BF16 or F16
//   VECTOR   entries of one access to memory: 16 bytes' worth of GRAD, or 1

#include "launch.cuh"
#include "vectors.cuh"

constexpr int THREADS = 256;
constexpr int AHEAD = 8;  // tokens that are read at once

using Grad = Element<GRAD>;
using Out = Element<OUT>;

struct Params {
    const Grad::Stored* grad;
    Out::Stored* out;
    i64 token, run;  // from one to the next
    i64 count;       // threads that have work
    i64 of_run;      // of a run
    i64 tokens;
};

extern "C" __global__ void __launch_bounds__(THREADS) few_column_sums(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= p.count) return;
    const i64 run = p.count >> 31 ? i / p.of_run : u32(i) / u32(p.of_run);
    const Grad::Stored* from = p.grad + run * p.run + (i - run * p.of_run) * VECTOR;
    const int tokens = int(p.tokens);
    float sum[VECTOR] = {};
#pragma unroll 1
    for (int first = 0; first < tokens; first += AHEAD) {
        float x[AHEAD][VECTOR];
#pragma unroll
        for (int t = 0; t < AHEAD; ++t)
            if (first + t < tokens) load_values<Grad>(from + (first + t) * p.token, x[t]);
#pragma unroll
        for (int t = 0; t < AHEAD; ++t)
#pragma unroll
            for (int j = 0; j < VECTOR; ++j)
                if (first + t < tokens) sum[j] = __fadd_rn(sum[j], x[t][j]);
    }
    store_values<Out>(p.out + i * VECTOR, sum);
}

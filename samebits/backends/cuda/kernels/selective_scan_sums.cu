// Gradients of B or C from their sums over blocks of channels: docs/contract.md, "State spaces". A row's sum is that
// of "Row reductions"; a thread takes that of one state and token.
//
// Macros
//   OUT    type of the results: F32, BF16 or F16
//   SIZE   N, states
//   RUNS   runs of 128 blocks

#include "convert.cuh"
#include "functions.cuh"
#include "launch.cuh"

using Out = Element<OUT>;

constexpr int THREADS = 128;
// Other chains would be +0, and no chain is -0: they would change nothing.
constexpr int CHAINS = RUNS == 1    ? 1
                       : RUNS == 2  ? 2
                       : RUNS <= 4  ? 4
                       : RUNS <= 8  ? 8
                       : RUNS <= 16 ? 16
                                    : contract::CHAINS;

struct Params {
    const float* of_blocks;  // [tokens of all rows, groups, blocks, N]
    Out::Stored* out;        // [rows, groups, N, tokens]
    i64 sums;
    int blocks, groups, tokens;
};

// By halves, the sum of the blocks first, first + half, first + 2 half, ... of a run of 128.
template <int half>
__device__ __forceinline__ float sum_of_run(const float* from, int first, int blocks) {
    if constexpr (half == contract::VOCAB_BLOCK) {
        return first < blocks ? from[i64(first) * SIZE] : 0.0f;
    } else {
        const float x = sum_of_run<2 * half>(from, first, blocks);
        return __fadd_rn(x, sum_of_run<2 * half>(from, first + half, blocks));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) selective_scan_sums(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= p.sums) return;
    const i64 row = at / SIZE;  // of a token and a group
    const int n = int(at % SIZE), group = int(row % p.groups);
    const i64 token = row / p.groups;
    const float* from = p.of_blocks + row * p.blocks * SIZE + n;
    float chains[CHAINS] = {};
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        const int first = i * contract::VOCAB_BLOCK;
        float& chain = chains[i % CHAINS];
        chain = __fadd_rn(chain, sum_of_run<1>(from + i64(first) * SIZE, 0, p.blocks - first));
    }
    contract::add_halves<CHAINS / 2, 1>(chains);
    const i64 to = ((token / p.tokens * p.groups + group) * SIZE + n) * p.tokens + token % p.tokens;
    p.out[to] = Out::narrow(contract::canonical(chains[0]));
}

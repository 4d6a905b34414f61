// Gradients of logits (dz) for a part of the vocabulary on Hopper: docs/contract.md, "Log-probabilities".
//
// The product of hidden states (A) and weights (B) gives the logits once more, in registers alone. The
// epilogue turns each into its gradient, rounds it to 16 bits and stores it by TMA.
//
// Warps, barriers and timeline are those of the main loop: pipeline_sm90.cuh. Each warpgroup has two panels
// of shared memory and writes one while TMA stores the other.
//
//   warpgroup 0  |mma 0 |gradients 0, 64 rows at a time|mma 2 |gradients 2
//   TMA                   |store|store|store|store|             |store|store
//   warpgroup 1         |mma 1 |gradients 1                    |mma 3 |
//
// Macros
//   INPUT_F16            1: f16 operands; 0: bf16
//   A_MN, B_MN           1: the operand is contiguous along m (n); 0: along k; here both are 0
//   BLOCK_M, BLOCK_N     rows and columns of a tile
//   BLOCK_K              k in a stage, a multiple of 32
//   STAGES               stages of the ring, 2 or more
//   WARPGROUPS           consumer warpgroups of a block
//   SHARE                consumer warpgroups on one tile: 1 (ping-pong) or WARPGROUPS (cooperative)
//   CLUSTER              blocks of a cluster: their tiles lie side by side and share A by multicast
//   BLOCKS               blocks on one multiprocessor
//   AHEAD                stages of A prefetched into L2 before the previous kernel ends
//   EARLY                1: blocks of the next kernel may start as these leave; 0: when all have left
//   FOLDED               1: k is a multiple of 64, so that one box may hold several columns (tile_sm90.cuh)
//   TRANSPOSED           1: the kernel's D is the transpose of the output; here 0
//   OUTPUT               type of the gradients: BF16 or F16
//   BIAS                 type of the bias: NONE, F32, BF16 or F16
//   PANEL                columns of D that leave in one TMA store, a divisor of BLOCK_N
//   RAGGED               0 here: no sequences
//   ENTROPY              1: with gradients of entropies too

#if !defined(INPUT_F16) || !defined(RAGGED)
#error "INPUT_F16 and RAGGED are needed: #if takes a missing macro for 0"
#endif

#include "accumulators_sm90.cuh"
#include "logp.cuh"

struct Params {
    TensorMap a, b, out_map;
    const void* bias;
    const i64* target;
    const float *shift, *log_sum, *entropy, *grad, *grad_entropy;
    i64 first, vocabulary, ignore_index;
    int m, n, k;
    int group;
    float scale;

    static constexpr int batch = 1, a_batch = 0, b_batch = 0, sequences = 0;
    static constexpr const void* bounds = nullptr;
};

struct GradLogits {
    static constexpr u32 smem_bytes = 2 * PANEL_BYTES;
    static constexpr bool overlap_m = true, overlap_n = true;

    u32 buffer = 0;

    static __device__ void prefetch_maps(const Params& p) { prefetch_tensor_map(p.out_map); }

    __device__ __forceinline__ void init(Accumulators& acc, const Params&, const TileCoord&, u32) {
        clear(acc);
    }

    __device__ __forceinline__ void apply(Accumulators& acc, u32 panels, const Params& p,
                                          const TileCoord& tile, u32 warpgroup, u32 thread) {
        Fragment fragment(tile, thread);
#pragma unroll
        for (u32 mma_m = 0; mma_m < MMA_M; ++mma_m) {
            auto row = [&](int half) {
                int token = min(fragment.row + int(mma_m) * 64 + half * 8,
                                p.m - 1);  // what lies below is not written
                return contract::RowGradient<ENTROPY>(p, token);
            };
            auto column_of = [&](const contract::RowGradient<ENTROPY>& of) {
                return of.counts ? int(of.target - p.first) - fragment.column : -1;
            };
            const contract::RowGradient<ENTROPY> gradients[2] = {row(0), row(1)};
            const int targets[2] = {column_of(gradients[0]), column_of(gradients[1])};
#pragma unroll
            for (u32 column = 0; column < BLOCK_N; column += 16) {
                __syncwarp();  // no more elements at a time: registers are scarce
                float* d = &acc[mma_m][column / 2];
                if constexpr (BIAS != NONE) add_bias<BIAS>(d, p, tile, thread, column);
#pragma unroll
                for (u32 i = 0; i < 8; ++i) {
                    u32 half = i / 2 % 2, at = column + i / 4 * 8 + i % 2;
                    d[i] = gradients[half].at(__fmul_rn(d[i], p.scale), int(at) == targets[half]);
                }
            }
            store_panels<OUTPUT>(acc, mma_m, panels, p, tile, warpgroup, thread, buffer);
        }
    }

    // The block may not leave while TMA still reads its shared memory.
    __device__ void drain(u32 thread) {
        if (thread == 0) tma_store_wait_read<0>();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    grad_logits_sm90(const __grid_constant__ Params p) {
    pipeline<GradLogits>(p);
}

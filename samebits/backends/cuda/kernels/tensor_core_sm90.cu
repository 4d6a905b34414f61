// Tensor-core product on Hopper: D = A B (+ bias), or D += A B, for bf16 and f16 operands that TMA can read.
//
// Each element of D is one chain over ascending groups of 16 k in an f32 accumulator, rounded once.
//
// Warps, barriers and timeline are those of the main loop: pipeline_sm90.cuh. The epilogue is in
// output_sm90.cuh: consumers add the bias and store, straight from registers or through panels of shared
// memory, by TMA where it can write the output. Each warpgroup has two panels and writes one while TMA stores
// the other.
//
//   warpgroup    |pack 0|pack 1|pack 2|pack 3|
//   TMA                 |store 0|store 1|store 2|store 3|    pack 2 waits until store 0 has read its panel
//
// Macros
//   INPUT_F16            1: f16 operands; 0: bf16
//   A_MN, B_MN           1: the operand is contiguous along m (n); 0: along k
//   BLOCK_M, BLOCK_N     rows and columns of a tile
//   BLOCK_K              k in a stage, a multiple of 32
//   STAGES               stages of the ring, 2 or more
//   WARPGROUPS           consumer warpgroups of a block
//   SHARE                consumer warpgroups on one tile: 1 (ping-pong) or WARPGROUPS (cooperative)
//   CLUSTER              blocks of a cluster: their tiles lie side by side and share A by multicast
//   BLOCKS               blocks on one multiprocessor
//   AHEAD                stages of A prefetched into L2 before the previous kernel ends
//   EARLY                1: blocks of the next kernel may start as these leave; 0: when all have left
//   BESIDE               1: blocks run beside those of the previous kernel, and end after them; absent: they
//                        wait for it first
//   FOLDED               1: k is a multiple of 64, so that one box may hold several columns (tile_sm90.cuh)
//   TRANSPOSED           1: the kernel's D is the transpose of the output
//   OUTPUT               type of the output: F32, BF16 or F16
//   BIAS                 type of the bias: NONE, F32, BF16 or F16
//   PANEL                columns of D that go through shared memory at once, a divisor of BLOCK_N unless
//                        TRANSPOSED; 0: they leave from registers
//   RAGGED               1: k holds sequences, each of which starts a new group of 16; 0: it does not
//   BOUND                integer type of the sequences' bounds: int or long long
//   ACCUMULATE           1: chains start from the output, which is f32; 0: from +0
//   ALIGNED              1: the output's rows are whole units of 16 bytes, for TMA or vector stores
//   SEGMENTS             segments of k, a power of two, each a chain of its own; absent: k is one chain
//   HELD, SHARED         with SEGMENTS: levels of their tree whose sums wait in registers, in shared memory

#if !defined(INPUT_F16) || !defined(RAGGED)
#error "INPUT_F16 and RAGGED are needed: #if takes a missing macro for 0"
#endif

#include "output_sm90.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    tensor_core_sm90(const __grid_constant__ Params p) {
    // Without a wait, L1 may hold what lay there before. Plain loads read these; all else comes out of L2.
    if constexpr (BESIDE && (BIAS != NONE || ACCUMULATE || RAGGED)) __threadfence();
    pipeline<Output>(p);
}

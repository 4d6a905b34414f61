// Statistics of logits on Hopper, for log-probabilities: docs/contract.md, "Log-probabilities".
//
// The product of hidden states and weights gives logits, which stay in registers, but for those that a
// backward is to read (KEPT). The epilogue turns each block of 128 entries of the vocabulary into its maximum,
// its sum of exponentials and, for entropies, a weighted sum. It also writes the logit of each target.
//
// A is the hidden states and B the weights. TRANSPOSED, for few tokens, it is the other way round: then the
// vocabulary has the tall side of the tile.
//
// Warps, barriers and timeline are those of the main loop: pipeline_sm90.cuh. The epilogue reduces
//   many tokens   in registers: four lanes have the logits of a token, and shuffle
//   few tokens    through shared memory: a warp takes the logits of a token, all of them side by side
//
//   warpgroup 0   |mma 0 |statistics 0|mma 2 |statistics 2
//   warpgroup 1          |mma 1 |statistics 1|mma 3 |statistics 3    (many tokens: two teams, ping-pong)
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
//   TRANSPOSED           1: the kernel's D is the transpose of the output
//   OUTPUT               not used here
//   BIAS                 type of the bias: NONE, F32, BF16 or F16
//   PANEL                columns of D that leave in one TMA store, 0 here: nothing leaves by TMA
//   RAGGED               0 here: no sequences
//   ENTROPY              1: also what entropies need
//   KEPT                 1: also the logits of the vocabulary's first entries, for the backward

#if !defined(INPUT_F16) || !defined(RAGGED) || !defined(KEPT)
#error "INPUT_F16, RAGGED and KEPT are needed: #if takes a missing macro for 0"
#endif

#include "accumulators_sm90.cuh"
#include "logp.cuh"

using contract::VOCAB_BLOCK;

static_assert((TRANSPOSED ? ROWS : BLOCK_N) % VOCAB_BLOCK == 0,
              "a warpgroup has whole blocks of the vocabulary");

constexpr int NOWHERE = -(1 << 30);  // below every index

struct Params {
    TensorMap a, b;
    const void* bias;
    const i64* target;
    float *m_b, *s_b, *u_b;  // [tokens, blocks]
    float* target_logit;
    int m, n, k;
    int group;
    int blocks;
    float scale;
#if KEPT
    float* logits;  // [tokens, kept], with the bias and unscaled; rows are at multiples of 16 bytes
    i64 logits_row;
    int kept;  // whole blocks, or the whole vocabulary
#endif

    static constexpr int batch = 1, a_batch = 0, b_batch = 0, sequences = 0;
    static constexpr const void* bounds = nullptr;

    __device__ __forceinline__ void store(int token, int block,
                                          const contract::BlockStatistics& found) const {
        i64 at = i64(token) * blocks + block;
        m_b[at] = found.m;
        s_b[at] = found.s;
        if (ENTROPY) u_b[at] = found.u;
    }
    // Its target counted from `first`; NOWHERE if it is none of the vocabulary's entries.
    __device__ __forceinline__ int target_from(int first, int token) const {
        i64 found = target[token];
        return found >= 0 && found < (TRANSPOSED ? m : n) ? int(found) - first : NOWHERE;
    }
};

struct Statistics {
    static constexpr u32 line = (VOCAB_BLOCK + 4) * 4;  // in bytes, of a token's logits; no bank conflicts
    static constexpr u32 smem_bytes = TRANSPOSED ? BLOCK_N * line : 0;
    static constexpr bool overlap_m = !TRANSPOSED,
                          overlap_n = TRANSPOSED;  // tokens; blocks of the vocabulary stay whole

    static __device__ void prefetch_maps(const Params&) {}

    __device__ __forceinline__ void init(Accumulators& acc, const Params&, const TileCoord&, u32) {
        clear(acc);
    }

    __device__ __forceinline__ void apply(Accumulators& acc, u32 shared, const Params& p,
                                          const TileCoord& tile, u32 warpgroup, u32 thread) {
        if constexpr (BIAS != NONE) add_bias<BIAS>(acc, p, tile, thread);
#if KEPT
        if constexpr (!TRANSPOSED) keep(acc, p, tile, thread);
#endif
        if constexpr (TRANSPOSED) {
            few_tokens(acc, shared, p, tile, warpgroup, thread);
        } else {
            many_tokens(acc, p, tile, thread);
        }
    }

    __device__ void drain(u32) {}

  private:
#if KEPT
    // Past the L2 cache where it can: the operands of other tiles are worth more there.
    __device__ __forceinline__ void keep(const Accumulators& acc, const Params& p, const TileCoord& tile,
                                         u32 thread) {
        Fragment fragment(tile, thread);
#pragma unroll
        for (int i = 0; i < 2 * MMA_M; ++i) {
            int token = fragment.row + i * 8 + i / 2 * 48;
            float* to = p.logits + token * p.logits_row + fragment.column;
            int left = token < p.m ? p.kept - fragment.column : 0;
#pragma unroll
            for (int j = 0; j < BLOCK_N / 8; ++j) {
                const float* d = &acc[i / 2][j * 4 + i % 2 * 2];
                if (j * 8 < left) __stcs(reinterpret_cast<float2*>(to + j * 8), make_float2(d[0], d[1]));
            }
        }
    }
#endif

    // Four lanes have the logits of a token, in registers.
    __device__ __forceinline__ void many_tokens(Accumulators& acc, const Params& p, const TileCoord& tile,
                                                u32 thread) {
        Fragment fragment(tile, thread);
        int target[2 * MMA_M];
#pragma unroll
        for (int i = 0; i < 2 * MMA_M; ++i) {
            int token = fragment.row + i * 8 + i / 2 * 48;
            target[i] = token < p.m ? p.target_from(fragment.column, token) : NOWHERE;
        }
#pragma unroll
        for (int i = 0; i < 2 * MMA_M; ++i) {
            int token = fragment.row + i * 8 + i / 2 * 48;
#pragma unroll
            for (int block = 0; block < BLOCK_N / VOCAB_BLOCK; ++block) {
                float z[VOCAB_BLOCK / 4];
                int first = block * VOCAB_BLOCK, left = p.n - fragment.column - first;
#pragma unroll
                for (int j = 0; j < VOCAB_BLOCK / 8; ++j) {
                    const float* d = &acc[i / 2][(first / 8 + j) * 4 + i % 2 * 2];
                    z[2 * j] = __fmul_rn(d[0], p.scale);
                    z[2 * j + 1] = __fmul_rn(d[1], p.scale);
                }
                if (left < VOCAB_BLOCK) {
#pragma unroll
                    for (int j = 0; j < VOCAB_BLOCK / 4; ++j)
                        if (j / 2 * 8 + j % 2 >= left) z[j] = -INF;
                }
                if (u32(target[i] - first) < VOCAB_BLOCK) {
#pragma unroll
                    for (int j = 0; j < VOCAB_BLOCK / 4; ++j)
                        if (j / 2 * 8 + j % 2 == target[i] - first) p.target_logit[token] = z[j];
                }
                auto found = contract::block_statistics<4, 2, ENTROPY>(z);
                int b = tile.n / VOCAB_BLOCK + block;
                if (token < p.m && b < p.blocks && thread % 4 == 0) p.store(token, b, found);
            }
        }
    }

    // Through shared memory: a warp has the logits of a token.
    __device__ __forceinline__ void few_tokens(Accumulators& acc, u32 shared, const Params& p,
                                               const TileCoord& tile, u32 warpgroup, u32 thread) {
        constexpr int WARPS = 4;
        int warp = thread / 32, lane = thread % 32;
        int token = tile.n + warp + lane * WARPS;  // whose target this lane knows
        int known = lane < int(BLOCK_N) / WARPS && token < p.n ? p.target_from(tile.m, token) : NOWHERE;

        named_barrier(EPILOGUE_BARRIER + warpgroup, 128);  // all have read the tile before
        Fragment fragment({0, 0, 0}, thread);
#pragma unroll
        for (int i = 0; i < 2 * MMA_M; ++i) {
            u32 to = shared + fragment.column * line + (fragment.row + i * 8 + i / 2 * 48) * 4;
#pragma unroll
            for (int j = 0; j < BLOCK_N / 4; ++j)
                store_shared(to + (j / 2 * 8 + j % 2) * line, acc[i / 2][j / 2 * 4 + i % 2 * 2 + j % 2]);
        }
        named_barrier(EPILOGUE_BARRIER + warpgroup, 128);
#pragma unroll 2
        for (int column = warp; column < BLOCK_N; column += WARPS) {
            int token = tile.n + column;
            int target = __shfl_sync(0xFFFFFFFF, known, column / WARPS);
            if (token >= p.n) break;
            float z[VOCAB_BLOCK / 32];
#pragma unroll
            for (int i = 0; i < VOCAB_BLOCK / 32; ++i) {
                int v = lane + 32 * i;
                float d = load_shared(shared + column * line + v * 4);
#if KEPT
                if (tile.m + v < p.kept) p.logits[token * p.logits_row + tile.m + v] = d;
#endif
                z[i] = tile.m + v < p.m ? __fmul_rn(d, p.scale) : -INF;
                if (v == target) p.target_logit[token] = z[i];
            }
            auto found = contract::block_statistics<32, 1, ENTROPY>(z);
            if (lane == 0) p.store(token, tile.m / VOCAB_BLOCK, found);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    statistics_sm90(const __grid_constant__ Params p) {
    pipeline<Statistics>(p);
}

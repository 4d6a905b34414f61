// What Hopper's block-scaled FP8 products do with their tiles: each block of k is a chain of four k32 steps from
// +0 on the tensor cores. Then D = fma(chain, scale_a scale_b, D) in f32, in ascending order: the chain is
// promoted. The bias follows, and one rounding.
//
// Warps, barriers and the ring are those of the main loop: pipeline_sm90.cuh. It counts k in elements of 16
// bits, so to it a pair of FP8 elements is one element. Consumers promote a chain while the tensor cores are
// busy with the next: that of the other warpgroup, or with CHAINS >= 2 their own.
//
//   CHAINS == 1   tensor cores     |0: block 0|1: block 0|0: block 1|1: block 1|
//                 warpgroup 0                 |promote   |          |promote
//                 warpgroup 1                            |promote   |
//   CHAINS == 2   tensor cores     |block 0|block 1|block 2|block 3|
//                 each warpgroup           |promote|promote|promote|
//
// A chain's steps wait for each other. Where tiles are narrow, that is longer than they take: so several chains
// are in flight.
//
// Macros: those of tensor_core_sm90.cu, with BLOCK_K 64, A_MN, B_MN, FOLDED, RAGGED and ACCUMULATE 0, and
//   A_E5M2, B_E5M2       1: the operand is of e5m2; 0: of e4m3
//   A_ROWS, B_ROWS       1: every row of A (column of B) has scales of its own; 0: 128 of them share theirs
//   CHAINS               chains of a warpgroup that are in flight or being promoted
//   SCALED               for output_sm90.cuh: there are parameters for scales
#pragma once

#if !defined(A_E5M2) || !defined(B_E5M2)
#error "A_E5M2 and B_E5M2 are needed: #if takes a missing macro for 0"
#endif

#include "output_sm90.cuh"
#include "wgmma_fp8_sm90.cuh"

static_assert(BLOCK_K == 64 && !A_MN && !B_MN && !ACCUMULATE && SHARE == WARPGROUPS);
static_assert(128 % ROWS == 0 && 128 % BLOCK_N == 0, "a warpgroup's tile has one scale of blocks of 128");

// Tiles do not overlap, so that they begin where a scale does.
struct ScaledOutput : Output {
    static constexpr bool overlap_m = A_ROWS, overlap_n = B_ROWS;
};

// Not to be moved by the compiler: behind it stands the wait for the chain.
__device__ __forceinline__ float load_scale(const float* from) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
    return x;
}

// Where the scales of a thread's rows and columns are, for the block of k that is next.
struct ScalePointers {
    const float *rows[A_ROWS ? 2 * MMA_M : 1], *columns;  // the latter of column 0 with B_ROWS

    __device__ __forceinline__ ScalePointers(const Params& p, const TileCoord& tile, u32 thread) {
        const float *of_a = p.scale_a, *of_b = p.scale_b;
#if GROUPED
        (TRANSPOSED ? of_a : of_b) += tile.batch * p.scale_group;
#endif
#pragma unroll
        for (int i = 0; i < int(A_ROWS ? 2 * MMA_M : 1); ++i) {
            const int row = A_ROWS ? Fragment(tile, thread).row + i / 2 * 64 + i % 2 * 8 : tile.m;
            rows[i] = of_a + min(row, p.m - 1) / (A_ROWS ? 1 : 128) * p.scale_a_row;
        }
        columns = of_b + (B_ROWS ? 0 : min(tile.n, p.n - 1) / 128 * p.scale_b_row);
    }
};

// The scales of a thread's rows and columns, for one block of k.
struct Scales {
    float rows[A_ROWS ? 2 * MMA_M : 1], columns[B_ROWS ? BLOCK_N / 4 : 1];

    __device__ __forceinline__ void load(ScalePointers& from, const Params& p, const TileCoord& tile,
                                         u32 thread) {
#pragma unroll
        for (u32 i = 0; i < (A_ROWS ? 2 * MMA_M : 1); ++i) {
            rows[i] = load_scale(from.rows[i]);
            from.rows[i] += p.scale_a_k;
        }
        if constexpr (B_ROWS) {
            const int first = Fragment(tile, thread).column;
#pragma unroll
            for (int i = 0; i < BLOCK_N / 4; ++i) {
                const int column = min(first + i / 2 * 8 + i % 2, p.n - 1);
                columns[i] = load_scale(from.columns + column * p.scale_b_row);
            }
        } else {
            columns[0] = load_scale(from.columns);
        }
        from.columns += p.scale_b_k;
    }

    __device__ __forceinline__ void promote(Accumulators& acc, const Accumulators& chain) const {
#pragma unroll
        for (u32 row = 0; row < 2 * MMA_M; ++row) {
            const float of_row = rows[A_ROWS ? row : 0];
            const float both = __fmul_rn(of_row, columns[0]);
#pragma unroll
            for (u32 i = 0; i < BLOCK_N / 4; ++i) {
                const u32 at = i / 2 * 4 + row % 2 * 2 + i % 2;
                const float scale = B_ROWS ? __fmul_rn(of_row, columns[B_ROWS ? i : 0]) : both;
                acc[row / 2][at] = __fmaf_rn(chain[row / 2][at], scale, acc[row / 2][at]);
            }
        }
    }
};

// The compiler does not know that a chain changes until it is waited for.
__device__ __forceinline__ void arrived(Accumulators& chain) {
#pragma unroll
    for (u32 mma_m = 0; mma_m < MMA_M; ++mma_m) {
#pragma unroll
        for (u32 i = 0; i < BLOCK_N / 2; ++i) asm volatile("" : "+f"(chain[mma_m][i])::"memory");
    }
}

// A warpgroup at one tile.
struct Blocks {
    const SharedStorage& shared;
    const Params& p;
    const TileCoord& tile;
    const u32 member, thread;
    Ring<STAGES>& ring;
    ScalePointers scales_at;
    u32 used;  // the stage to release

    // Begins the chain of the next block.
    __device__ __forceinline__ void begin(Accumulators& chain, Scales& scales) {
        scales.load(scales_at, p, tile, thread);
        mbarrier_wait(shared.full + ring.stage * 8, ring.parity);
        auto a = ATile::descriptor(shared.a + ring.stage * A_BYTES + ATile::step(member * ROWS, 0));
        auto b = BTile::descriptor(shared.b + ring.stage * B_BYTES);
        wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < BLOCK_K; k += 16) {
#pragma unroll
            for (u32 mma_m = 0; mma_m < MMA_M; ++mma_m)
                WgmmaFp8<BLOCK_N>::step(chain[mma_m], a.at(ATile::step(mma_m * 64, k)),
                                        b.at(BTile::step(0, k)), k > 0);
        }
        wgmma_commit();
        ring.step();
    }

    // Waits for the oldest chain, while `pending` others stay in flight, and adds it.
    template <int pending>
    __device__ __forceinline__ void end(Accumulators& acc, Accumulators& chain, const Scales& scales) {
        wgmma_wait<pending>();
        arrived(chain);
        release(shared, used, thread);
        if (++used == STAGES) used = 0;
        scales.promote(acc, chain);
    }
};

// All chains of a tile, `count` of them in flight or being promoted.
template <int count>
struct Chains {
    Accumulators chains[count];
    Scales scales[count];

    static __device__ __forceinline__ void run(Blocks& blocks, Accumulators& acc, u32 k_blocks) {
        Chains at;
        if (k_blocks < count) {
            for (u32 block = 0; block < k_blocks; ++block) at.alone(blocks, acc);
            return;
        }
#pragma unroll
        for (int i = 0; i < count - 1; ++i) blocks.begin(at.chains[i], at.scales[i]);
        u32 left = k_blocks - (count - 1);  // blocks that have not begun
        for (; left >= count; left -= count) at.some<count>(blocks, acc);
        at.last<0>(blocks, acc, left);
    }

    __device__ __forceinline__ void alone(Blocks& blocks, Accumulators& acc) {
        blocks.begin(chains[0], scales[0]);
        blocks.end<0>(acc, chains[0], scales[0]);
    }

    // Begins `more` chains, and ends as many.
    template <int more>
    __device__ __forceinline__ void some(Blocks& blocks, Accumulators& acc) {
#pragma unroll
        for (int i = 0; i < more; ++i) {
            const int next = (i + count - 1) % count;
            blocks.begin(chains[next], scales[next]);
            blocks.end<count - 1>(acc, chains[i], scales[i]);
        }
    }

    // Begins the chains that are left, fewer than `count`, and ends all.
    template <int more>
    __device__ __forceinline__ void last(Blocks& blocks, Accumulators& acc, u32 left) {
        if constexpr (more + 1 < count) {
            if (left != more) return last<more + 1>(blocks, acc, left);
        }
        some<more>(blocks, acc);
        finish<more, count - 2>(blocks, acc);
    }

    // Ends the chains in flight, of which the oldest is at `first`, and `pending` are younger.
    template <int first, int pending>
    __device__ __forceinline__ void finish(Blocks& blocks, Accumulators& acc) {
        if constexpr (pending >= 0) {
            blocks.end<pending>(acc, chains[first % count], scales[first % count]);
            finish<first + 1, pending - 1>(blocks, acc);
        }
    }
};

struct ScaledConsumer {
    template <typename Epilogue, typename Scheduler>
    static __device__ __forceinline__ void run(const SharedStorage& shared, const Params& p,
                                               const Scheduler& scheduler, u32 rank, u32 member) {
        const u32 thread = threadIdx.x % 128, k_blocks = KBlocks::count(p.k, p.bounds, p.sequences);
        Ring<STAGES> ring;
        Epilogue epilogue;
        for (u32 index = blockIdx.x / CLUSTER; index < scheduler.count; index += gridDim.x / CLUSTER) {
            TileCoord tile = scheduler.at(index, rank);
            tile.m += member * ROWS;
            Accumulators acc;
            clear(acc);
            Blocks blocks{shared, p, tile, member, thread, ring, {p, tile, thread}, ring.stage};
            Chains<CHAINS>::run(blocks, acc, k_blocks);
            epilogue.apply(acc, shared.own + member * Epilogue::smem_bytes, p, tile, member, thread);
        }
        epilogue.drain(thread);
    }
};

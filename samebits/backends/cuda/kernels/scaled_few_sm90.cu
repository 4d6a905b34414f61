// Block-scaled FP8 product on Hopper for few tokens, transposed: the rows of a tile are 64 weights, its columns
// all tokens. PARTS blocks of a cluster share a tile, each with every PARTS-th block of k.
//
// Chains of different blocks of k do not depend on each other, only their promotion has an order. So each chain
// goes from the block that multiplied it to the one that owns its rows, by distributed shared memory. Then that
// one promotes all chains of its rows, in ascending order: the bits are those of scaled_sm90.cu.
//
//   block 0   |chains 0, 2, 4 ..|all have arrived|promote rows 0 to 31  |
//   block 1   |chains 1, 3, 5 ..|                |promote rows 32 to 63 |
//
// Shared memory, behind the ring and its barriers: SLOTS floats for the chains, [block of k][token][own row], then
// the scales, [block of k][own row or one] and [block of k][token].
//
// Macros: those of scaled_sm90.cuh, with TRANSPOSED and B_ROWS 1, CLUSTER 1 and BLOCK_M 64, for a block loads its
// own tiles alone; and
//   PARTS   blocks of a cluster: a power of two up to 8
#define SCALED 1

#include "scaled_sm90.cuh"

static_assert(CHAINS <= STAGES, "all chains in flight wait for their stages");
static_assert(TRANSPOSED && B_ROWS && CLUSTER == 1 && BLOCK_M == 64 && WARPGROUPS == 1);

constexpr u32 OWN_ROWS = 64 / PARTS;               // whose chains a block promotes
constexpr u32 OWN = OWN_ROWS * BLOCK_N;            // elements
constexpr u32 ROW_SCALES = A_ROWS ? OWN_ROWS : 1;  // of a block of k

struct FewStorage : SharedStorage {
    u32 slots, row_scales, token_scales;

    __device__ FewStorage(unsigned char* raw, u32 k_blocks) : SharedStorage(raw, 0) {
        slots = (table + 15) & ~15u;
        row_scales = slots + k_blocks * OWN * 4;
        token_scales = row_scales + k_blocks * ROW_SCALES * 4;
    }
};

// The warpgroup that multiplies, at every PARTS-th block of k.
struct Multiplier {
    const FewStorage& shared;
    const u32 thread;
    u32 block;  // of k, the next one
    Ring<STAGES> ring;

    // The chains of so many blocks, in flight at once.
    template <int count>
    __device__ __forceinline__ void some() {
        float chains[count][BLOCK_N / 2];
        const u32 first = ring.stage;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            mbarrier_wait(shared.full + ring.stage * 8, ring.parity);
            auto a = ATile::descriptor(shared.a + ring.stage * A_BYTES);
            auto b = BTile::descriptor(shared.b + ring.stage * B_BYTES);
            wgmma_fence();
#pragma unroll
            for (u32 k = 0; k < BLOCK_K; k += 16)
                WgmmaFp8<BLOCK_N>::step(chains[i], a.at(ATile::step(0, k)), b.at(BTile::step(0, k)), k > 0);
            wgmma_commit();
            ring.step();
        }
        wgmma_wait<0>();
        u32 stage = first;
#pragma unroll
        for (int i = 0; i < count; ++i) {
#pragma unroll
            for (u32 j = 0; j < BLOCK_N / 2; ++j) asm volatile("" : "+f"(chains[i][j])::"memory");
            release(shared, stage, thread);
            if (++stage == STAGES) stage = 0;
            send(chains[i]);
            block += PARTS;
        }
    }

    __device__ __forceinline__ void send(const float (&chain)[BLOCK_N / 2]) const {
        const u32 row = thread / 32 * 16 + thread % 32 / 4, token = thread % 4 * 2;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 at = row + half * 8, own = at % OWN_ROWS;
            const u32 to = mapa(shared.slots + block * OWN * 4, at / OWN_ROWS);
#pragma unroll
            for (u32 i = 0; i < BLOCK_N / 4; ++i)
                store_shared_cluster(to + ((token + i / 2 * 8 + i % 2) * OWN_ROWS + own) * 4,
                                     chain[i / 2 * 4 + half * 2 + i % 2]);
        }
    }

    // The chains that are left, fewer than `count`.
    template <int count>
    __device__ __forceinline__ void last(u32 left) {
        if constexpr (count > 1) {
            if (left == count - 1)
                some<count - 1>();
            else
                last<count - 1>(left);
        }
    }
};

// Scales of this block's rows and of all tokens. Rows and tokens that do not exist have those of the last.
__device__ __forceinline__ void load_scales(const FewStorage& shared, const Params& p, int row, u32 k_blocks,
                                            u32 thread) {
    for (u32 i = thread; i < k_blocks * ROW_SCALES; i += 128) {
        const int at = min(row + int(i % ROW_SCALES), p.m - 1) / (A_ROWS ? 1 : 128);
        store_shared(shared.row_scales + i * 4, p.scale_a[at * p.scale_a_row + i / ROW_SCALES * p.scale_a_k]);
    }
    for (u32 i = thread; i < k_blocks * BLOCK_N; i += 128) {
        const int at = min(int(i % BLOCK_N), p.n - 1);
        store_shared(shared.token_scales + i * 4, p.scale_b[at * p.scale_b_row + i / BLOCK_N * p.scale_b_k]);
    }
}

template <int bias>
__device__ __forceinline__ void promote(const FewStorage& shared, const Params& p, int first_row,
                                        u32 k_blocks, u32 thread) {
    using Out = Element<OUTPUT>;
    for (u32 at = thread; at < OWN; at += 128) {
        const u32 own = at % OWN_ROWS, token = at / OWN_ROWS;
        float acc = 0;
#pragma unroll 8
        for (u32 block = 0; block < k_blocks; ++block) {
            const float of_row = load_shared(shared.row_scales + (block * ROW_SCALES + own % ROW_SCALES) * 4);
            const float of_token = load_shared(shared.token_scales + (block * BLOCK_N + token) * 4);
            const float chain = load_shared(shared.slots + (block * OWN + at) * 4);
            acc = __fmaf_rn(chain, __fmul_rn(of_row, of_token), acc);
        }
        const int row = first_row + int(own);
        if (row >= p.m || int(token) >= p.n) continue;
        if constexpr (bias != NONE) {
            using Bias = Element<bias>;
            acc = __fadd_rn(acc, Bias::widen(static_cast<const typename Bias::Stored*>(p.bias)[row]));
        }
        static_cast<typename Out::Stored*>(p.out)[i64(token) * p.row_stride + row] = Out::narrow(acc);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    scaled_few_sm90(const __grid_constant__ Params p) {
    extern __shared__ unsigned char raw[];
    const u32 k_blocks = (u32(p.k) + BLOCK_K - 1) / BLOCK_K, rank = cluster_rank();
    const FewStorage shared(raw, k_blocks);
    const int row = int(blockIdx.x / PARTS) * 64, own_row = row + int(rank * OWN_ROWS);
    if (threadIdx.x == CONSUMERS) {
        prefetch_tensor_map(p.a);
        prefetch_tensor_map(p.b);
        for (u32 stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared.full + stage * 8, 1);
            mbarrier_init(shared.empty + stage * 8, 1);
        }
        mbarrier_init_fence();
    }
    cluster_sync();  // all blocks have begun, so that their shared memory may be written
    griddepcontrol_wait();
    if constexpr (EARLY) griddepcontrol_launch_dependents();
    const u32 warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    if (warp == CONSUMERS / 32) {
        if (threadIdx.x == CONSUMERS) {
            Ring<STAGES> ring;
            for (u32 block = rank; block < k_blocks; block += PARTS) {
                const u32 full = shared.full + ring.stage * 8;
                mbarrier_wait(shared.empty + ring.stage * 8, ring.parity ^ 1);
                mbarrier_arrive_expect_tx(full, A_BYTES + B_BYTES);
                ATile::load(shared.a + ring.stage * A_BYTES, p.a, full, row, block * BLOCK_K, 0, 0);
                BTile::load(shared.b + ring.stage * B_BYTES, p.b, full, 0, block * BLOCK_K, 0, 0);
                ring.step();
            }
        }
        __syncwarp();
    } else {
        load_scales(shared, p, own_row, k_blocks, threadIdx.x);
        Multiplier multiplier{shared, threadIdx.x, rank, {}};
        u32 left = k_blocks > rank ? (k_blocks - rank + PARTS - 1) / PARTS : 0;
        for (; left >= CHAINS; left -= CHAINS) multiplier.some<CHAINS>();
        multiplier.last<CHAINS>(left);
    }
    cluster_sync();  // all chains have arrived, and all scales
    if (warp < CONSUMERS / 32) promote<BIAS>(shared, p, own_row, k_blocks, threadIdx.x);
}

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
// Shared memory, behind the ring and its barriers: slots for the chains, [block of k][thread that multiplied them]
// [its four elements], then the scales, [block of k][token] and [block of k][own row or one].
//
// Macros: those of scaled_sm90.cuh, with TRANSPOSED and B_ROWS 1, CLUSTER 1, BLOCK_M 64 and BLOCK_N 8, for a block
// loads its own tiles alone; and
//   PARTS   blocks of a cluster: 2 or 4
#define SCALED 1

#include "ptx_sm80.cuh"
#include "scaled_sm90.cuh"

static_assert(CHAINS <= STAGES, "all chains in flight wait for their stages");
static_assert(TRANSPOSED && B_ROWS && CLUSTER == 1 && BLOCK_M == 64 && BLOCK_N == 8 && WARPGROUPS == 1);
static_assert(PARTS <= 4, "rows of a warp have one owner");

constexpr u32 OWN = 128 / PARTS;                   // threads of a block whose chains one owns
constexpr u32 OWN_ROWS = 64 / PARTS;               // which these have
constexpr u32 OWN_BYTES = OWN_ROWS * BLOCK_N * 4;  // of a block of k
constexpr u32 ROW_SCALES = A_ROWS ? OWN_ROWS : 1;  // of a block of k

struct FewStorage : SharedStorage {
    u32 slots, token_scales, row_scales;

    __device__ FewStorage(unsigned char* raw, u32 k_blocks) : SharedStorage(raw, 0) {
        slots = (table + 15) & ~15u;
        token_scales = slots + k_blocks * OWN_BYTES;
        row_scales = token_scales + k_blocks * BLOCK_N * 4;
    }
};

// The warpgroup that multiplies, at every PARTS-th block of k.
struct Multiplier {
    const FewStorage& shared;
    const u32 thread, tokens;
    u32 block;  // of k, the next one
    Ring<STAGES> ring;

    // The chains of so many blocks, in flight at once.
    template <int count>
    __device__ __forceinline__ void some() {
        float chains[count][4];
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
            for (float& x : chains[i]) asm volatile("" : "+f"(x)::"memory");
            release(shared, stage, thread);
            if (++stage == STAGES) stage = 0;
            send(chains[i]);
            block += PARTS;
        }
    }

    // To the block that owns the rows of this warp, without tokens that do not exist.
    __device__ __forceinline__ void send(const float (&chain)[4]) const {
        const u32 to = shared.slots + block * OWN_BYTES + thread % OWN * 16;
        if (thread % 4 * 2 < tokens) store_shared_cluster(mapa(to, thread / OWN), chain);
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

// Begins to copy the scales of this block's rows and of all tokens. Rows and tokens that do not exist have those
// of the last.
__device__ __forceinline__ void copy_scales(const FewStorage& shared, const Params& p, int row, u32 k_blocks,
                                            u32 thread) {
    for (u32 i = thread; i < k_blocks * ROW_SCALES; i += 128) {
        const int at = min(row + int(i % ROW_SCALES), p.m - 1) / (A_ROWS ? 1 : 128);
        cp_async_4(shared.row_scales + i * 4, p.scale_a + at * p.scale_a_row + i / ROW_SCALES * p.scale_a_k);
    }
    for (u32 i = thread; i < k_blocks * BLOCK_N; i += 128) {
        const int at = min(int(i % BLOCK_N), p.n - 1);
        cp_async_4(shared.token_scales + i * 4, p.scale_b + at * p.scale_b_row + i / BLOCK_N * p.scale_b_k);
    }
    cp_async_commit();
}

// Two tokens of a row.
template <int bias>
__device__ __forceinline__ void promote(const FewStorage& shared, const Params& p, int first_row,
                                        u32 k_blocks, u32 thread) {
    using Out = Element<OUTPUT>;
    const u32 own = thread / 64 * 16 + thread % 64 / 8 + thread % 2 * 8, token = thread % 8 / 2 * 2;
    const int row = first_row + int(own);
    if (own >= OWN_ROWS || row >= p.m || int(token) >= p.n) return;
    float acc[2] = {};
#pragma unroll 8
    for (u32 block = 0; block < k_blocks; ++block) {
        const float of_row = load_shared(shared.row_scales + (block * ROW_SCALES + own % ROW_SCALES) * 4);
        const float2 of_tokens = read_shared_2(shared.token_scales + (block * BLOCK_N + token) * 4);
        const float2 chain = read_shared_2(shared.slots + block * OWN_BYTES + thread * 8);
        acc[0] = __fmaf_rn(chain.x, __fmul_rn(of_row, of_tokens.x), acc[0]);
        acc[1] = __fmaf_rn(chain.y, __fmul_rn(of_row, of_tokens.y), acc[1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (int(token) + i >= p.n) continue;
        if constexpr (bias != NONE) {
            using Bias = Element<bias>;
            acc[i] = __fadd_rn(acc[i], Bias::widen(static_cast<const typename Bias::Stored*>(p.bias)[row]));
        }
        static_cast<typename Out::Stored*>(p.out)[i64(token + i) * p.row_stride + row] = Out::narrow(acc[i]);
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
        copy_scales(shared, p, own_row, k_blocks, threadIdx.x);
        Multiplier multiplier{shared, threadIdx.x, u32(p.n), rank, {}};
        u32 left = k_blocks > rank ? (k_blocks - rank + PARTS - 1) / PARTS : 0;
        for (; left >= CHAINS; left -= CHAINS) multiplier.some<CHAINS>();
        multiplier.last<CHAINS>(left);
        cp_async_wait<0>();
    }
    cluster_sync();  // all chains have arrived, and all scales
    if (warp < CONSUMERS / 32) promote<BIAS>(shared, p, own_row, k_blocks, threadIdx.x);
}

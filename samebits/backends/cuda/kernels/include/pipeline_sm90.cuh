// The main loop of products on Hopper: D[m, n] = one chain over ascending k of A[m, k] B[k, n] for each element,
// tile after tile, each handed to an epilogue in registers.
//
// One warp copies tiles of A and B into a ring of shared-memory stages (TMA; the blocks of a cluster share those of
// A); warpgroups multiply them (wgmma) and run the epilogue while the ring fills again. Blocks stay and take
// tile after tile. K is never split, so the tile shape, and all else the host chooses, leaves the bits alone:
//
//   A_MN, B_MN           operand contiguous along m (n) rather than k
//   BLOCK_M, _N, _K      tile of one block; a warpgroup has BLOCK_M / SHARE rows of it
//   WARPGROUPS           warpgroups that multiply
//   SHARE                warpgroups on one tile: all of them, or 1: each its own tile, one in its epilogue while
//                        the other multiplies
//   FOLDED               k is a multiple of 64: maps along k may be folded into columns (tile_sm90.cuh)
//   CLUSTER              tiles side by side that share A
//   STAGES, BLOCKS       length of the ring; blocks on one multiprocessor
//   AHEAD                stages of A brought into L2 while the kernel before this one ends
//   EARLY                blocks of the next kernel start as these leave, not when all have left
//   RAGGED               K holds sequences, each starting a new group of 16
//
// A kernel calls `pipeline` with its Problem, which has the members used here, and its Epilogue, of which every
// warpgroup has one: see output_sm90.cuh. Its recompute_m and recompute_n say whether rows and columns may be computed
// by two tiles, which then write the same bits.
#pragma once

#include "ragged.cuh"
#include "tile_sm90.cuh"
#include "wgmma.cuh"

// Registers move from the copying warp to the multiplying ones, whole warpgroups at a time.
constexpr bool MOVE_REGISTERS = WARPGROUPS > 1 && BLOCKS == 1;
constexpr u32 COPYING = 40, MULTIPLYING = WARPGROUPS == 2 ? 232 : WARPGROUPS == 3 ? 152 : 88;
constexpr u32 CONSUMERS = WARPGROUPS * 128;
constexpr u32 THREADS = CONSUMERS + (MOVE_REGISTERS ? 128 : 32);
constexpr u32 TEAMS = WARPGROUPS / SHARE;

constexpr u32 ROWS = BLOCK_M / SHARE;             // of a warpgroup
constexpr u32 BANDS = (ROWS + 63) / 64;           // 64-row matrix products of a warpgroup
using Accumulators = float[BANDS][BLOCK_N / 2];

// Named barriers: a warpgroup's own, for its epilogue; then a team's.
enum : u32 { OWN = 1, CLEARED = OWN + WARPGROUPS, TURN = CLEARED + TEAMS };

static_assert(!A_MN || ROWS % 64 == 0, "A contiguous along m comes in columns of 64");
static_assert(!MOVE_REGISTERS || COPYING + WARPGROUPS * MULTIPLYING <= THREADS / 128 * (65536 / THREADS / 8 * 8),
              "no more registers than the block starts with");
static_assert(!RAGGED || (A_MN && B_MN), "sequences lie along the rows of both operands");

using ATile = Tile<A_MN, FOLDED && !A_MN && BLOCK_K / 64 % CLUSTER == 0, BLOCK_M, BLOCK_K, CLUSTER>;
using BTile = Tile<B_MN, FOLDED && !B_MN, BLOCK_N, BLOCK_K, 1>;
constexpr u32 A_BYTES = ATile::bytes, B_BYTES = BTile::bytes;  // of a stage

struct Place {
    int m, n, batch;
};

// Where the last tile begins: moved back, so that it ends where the matrix does. Lines outside of it are copied in
// several times as slowly as lines inside.
template <bool AGAIN, u32 BLOCK, u32 STEP>
__device__ __forceinline__ int last_tile(int size) {
    if (!AGAIN) return 0x7FFFFFFF;
    return max(size - int(BLOCK) + int(STEP - 1), 0) / STEP * STEP;
}

// The tiles of this cluster in the order in which it takes them.
template <typename Epilogue>
struct Walk {
    u32 rows, columns, per_matrix, count, group;
    int last_m, last_n;

    // In steps of 16 bytes of the output, which copies out must keep, and of a sector of operands contiguous along m
    // or n.
    template <typename Problem>
    __device__ explicit Walk(const Problem& p)
        : rows((p.m + BLOCK_M - 1) / BLOCK_M), columns((p.n + BLOCK_N * CLUSTER - 1) / (BLOCK_N * CLUSTER)),
          per_matrix(rows * columns), count(per_matrix * p.batch), group(p.group),
          last_m(last_tile<Epilogue::recompute_m, BLOCK_M, A_MN ? 16 : 1>(p.m)),
          last_n(last_tile<Epilogue::recompute_n, BLOCK_N, B_MN ? 16 : 8>(p.n)) {}

    __device__ Place at(u32 index, u32 rank) const {
        u32 batch = index / per_matrix;
        index -= batch * per_matrix;
        u32 band = index / (group * columns);
        index -= band * group * columns;
        u32 height = min(group, rows - band * group);
        u32 column = index / height;
        u32 row = band * group + index - column * height;
        return {min(int(row * BLOCK_M), last_m), min(int((column * CLUSTER + rank) * BLOCK_N), last_n), int(batch)};
    }
};

// Position in the ring of stages.
struct Ring {
    u32 stage = 0, parity = 0;

    __device__ void step() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ void skip(u32 steps) {
        stage += steps;
        parity ^= stage / STAGES & 1;
        stage %= STAGES;
    }
};

struct Shared {
    u32 a, b, epilogue, full, empty;

    __device__ Shared(unsigned char* raw, u32 epilogue_bytes) {
        u32 start = shared_address(raw);
        u32 base = (start + 1023) & ~1023u;  // a whole period of the swizzle
        a = base;
        b = a + STAGES * A_BYTES;
        epilogue = b + STAGES * B_BYTES;
        full = epilogue + WARPGROUPS * epilogue_bytes;
        empty = full + STAGES * 8;
    }
};

// A is read before what the previous kernel wrote is known to be there. That is safe: L2 is where it will be
// written, and nothing but L2 is filled here.
template <typename Problem, typename Epilogue>
__device__ __forceinline__ void prefetch(const Problem& p, const Walk<Epilogue>& walk, u32 rank) {
    u32 index = blockIdx.x / CLUSTER;
    Place place = walk.at(index, rank);
    for (int i = 0; i < AHEAD && i * BLOCK_K < p.k; ++i) {
        ATile::prefetch(p.a, place.m, i * BLOCK_K, place.batch * p.a_batch, rank);
    }
}

template <typename Problem, typename Epilogue>
__device__ __forceinline__ void produce(const Shared& shared, const Problem& p, const Walk<Epilogue>& walk, u32 rank) {
    constexpr u32 bytes = A_BYTES + B_BYTES;
    Ring ring;
    for (u32 index = blockIdx.x / CLUSTER; index < walk.count; index += gridDim.x / CLUSTER) {
        Place place = walk.at(index, rank);
        KBlocks blocks(p.k, p.bounds, p.sequences);
        while (blocks.next()) {
            u32 full = shared.full + ring.stage * 8;
            barrier_wait(shared.empty + ring.stage * 8, ring.parity ^ 1);
            barrier_expect(full, bytes);
            ATile::load(shared.a + ring.stage * A_BYTES, p.a, full, place.m, blocks.start(),
                        place.batch * p.a_batch, rank);
            BTile::load(shared.b + ring.stage * B_BYTES, p.b, full, place.n, blocks.start(),
                        place.batch * p.b_batch, 0);
            ring.step();
        }
    }
}

__device__ __forceinline__ void release(const Shared& shared, u32 stage, u32 thread) {
    u32 empty = shared.empty + stage * 8;
    if constexpr (CLUSTER == 1) {
        if (thread == 0) barrier_arrive(empty);
    } else {
        if (thread < CLUSTER) barrier_arrive_at(empty, thread);
    }
}

template <typename Problem, typename Epilogue>
__device__ __forceinline__ void consume(const Shared& shared, const Problem& p, const Walk<Epilogue>& walk, u32 rank,
                                        u32 warpgroup) {
    u32 team = TEAMS == 1 ? 0 : warpgroup / SHARE, member = warpgroup % SHARE;
    u32 thread = threadIdx.x % 128;
    u32 k_blocks = KBlocks::count(p.k, p.bounds, p.sequences);
    u32 clusters = gridDim.x / CLUSTER;
    Ring ring;
    ring.skip(team * k_blocks);
    Epilogue epilogue;
    for (u32 index = blockIdx.x / CLUSTER + team * clusters; index < walk.count; index += TEAMS * clusters) {
        Place place = walk.at(index, rank);
        place.m += member * ROWS;
        Accumulators acc;
        epilogue.start(acc, p, place, thread);

        // Teams take the ring in turns: a barrier can be waited for only one round ahead.
        if (TEAMS > 1 && index >= clusters) named_barrier(TURN + team, 2 * SHARE * 128);
        u32 previous = 0;
        bool ready = false;
        KBlocks blocks(p.k, p.bounds, p.sequences);
        for (u32 block = 0; block < k_blocks; ++block) {
            if (!ready) barrier_wait(shared.full + ring.stage * 8, ring.parity);
            u32 a = shared.a + ring.stage * A_BYTES, b = shared.b + ring.stage * B_BYTES;
            if constexpr (RAGGED) {
                blocks.next();
                int valid = blocks.valid();  // rows of k inside their sequence
                if (valid < BLOCK_K) {
                    ATile::clear(a, valid, member * 128 + thread, SHARE * 128);
                    BTile::clear(b, valid, member * 128 + thread, SHARE * 128);
                    async_proxy_fence();
                    named_barrier(CLEARED + team, SHARE * 128);
                }
            }
            auto a_tile = ATile::descriptor(a + ATile::step(member * ROWS, 0));
            auto b_tile = BTile::descriptor(b);
            Ring next = ring;
            next.step();
            wgmma_begin();
#pragma unroll
            for (u32 k = 0; k < BLOCK_K; k += 16) {
                // In the middle of a block, so that the tensor cores have work meanwhile.
                if (k == BLOCK_K / 32 * 16) {
                    wgmma_commit();
                    wgmma_wait<1>();  // for the block before this one
                    if (block > 0) release(shared, previous, thread);
                    ready = block + 1 < k_blocks && barrier_try(shared.full + next.stage * 8, next.parity);
                }
#pragma unroll
                for (u32 band = 0; band < BANDS; ++band) {
                    Wgmma<BLOCK_N, A_MN, B_MN>::step(acc[band], a_tile.at(ATile::step(band * 64, k)),
                                                     b_tile.at(BTile::step(0, k)));
                }
            }
            wgmma_commit();
            previous = ring.stage;
            ring = next;
        }
        if constexpr (TEAMS > 1) named_barrier_arrive(TURN + (team + 1) % TEAMS, 2 * SHARE * 128);
        wgmma_wait<0>();
        if (k_blocks > 0) release(shared, previous, thread);
        ring.skip((TEAMS - 1) * k_blocks);

        epilogue.finish(acc, shared.epilogue + warpgroup * Epilogue::bytes, p, place, warpgroup, thread);
    }
    epilogue.end(thread);
}

// The whole kernel, for all of its threads.
template <typename Epilogue, typename Problem>
__device__ __forceinline__ void pipeline(const Problem& p) {
    extern __shared__ unsigned char raw[];
    Shared shared(raw, Epilogue::bytes);
    u32 rank = CLUSTER == 1 ? 0 : cluster_rank();
    Walk<Epilogue> walk(p);

    if (threadIdx.x == CONSUMERS) {
        prefetch_map(p.a);
        prefetch_map(p.b);
        Epilogue::prepare(p);
        for (u32 stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared.full + stage * 8, 1);
            barrier_init(shared.empty + stage * 8, SHARE * CLUSTER);
        }
        barrier_init_fence();
    }
    if constexpr (CLUSTER == 1) {
        __syncthreads();
    } else {
        cluster_sync();
    }
    if (AHEAD > 0 && threadIdx.x == CONSUMERS) prefetch(p, walk, rank);
    wait_for_previous_kernel();
    if constexpr (EARLY) let_next_kernel_start();

    // Read from one lane, so that the compiler knows it, and all addresses made of it, to be uniform in a warp.
    u32 warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    if (warpgroup == WARPGROUPS) {
        if constexpr (MOVE_REGISTERS) give_registers<COPYING>();
        if (threadIdx.x == CONSUMERS) produce(shared, p, walk, rank);
        __syncwarp();
    } else {
        if constexpr (MOVE_REGISTERS) take_registers<MULTIPLYING>();
        consume(shared, p, walk, rank, WARPGROUPS == 1 ? 0 : warpgroup);
    }
    // A block must outlive the copies and arrivals that the others send it.
    if constexpr (CLUSTER > 1) cluster_sync();
}

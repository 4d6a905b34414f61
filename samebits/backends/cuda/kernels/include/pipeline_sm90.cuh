// The main loop of tensor-core products on Hopper: persistent, warp-specialized, from TMA to WGMMA.
//
// It computes D[m, n] = A[m, k] B[k, n], each element as one chain over ascending groups of 16 k, and hands
// each tile of D to an epilogue in registers. K is never split. So the tile shape, and all else that the host
// chooses, leaves the bits alone.
//
// Warps of a block
//   WARPGROUPS warpgroups  consumers: wgmma, then the epilogue
//   1 warp                 producer: one thread issues all TMA loads. With MOVE_REGISTERS it is a whole
//                          warpgroup, for setmaxnreg counts by warpgroups; its registers go to the consumers.
//
// Consumers form TEAMS of SHARE warpgroups; a team works on one tile.
//   SHARE == WARPGROUPS    cooperative: one team, each warpgroup with BLOCK_M / SHARE rows
//   SHARE == 1             ping-pong: teams take tiles in turns, one in its epilogue while the other
//                          multiplies
//
// Barriers
//   full[stage]            mbarrier, producer to consumers: all bytes of A and B have arrived
//   empty[stage]           mbarrier, consumers to producers: every consumer of the stage has read it. With a
//                          cluster these are the consumers of all its blocks, for each block loads a slice of
//                          A for all of them
//   EPILOGUE_BARRIER       named, one for each warpgroup: for what it does with its own shared memory
//   CLEARED_BARRIER        named, one for each team: rows of k past the end of a sequence are zeros (RAGGED)
//   ORDER_BARRIER          named, one for each team: the other team has left the ring, this one may wait for
//                          its stages
//
// Timeline, ping-pong
//   producer     |load 0|load 1|load 2|load 3|load 4|            up to STAGES stages ahead, across tiles
//   warpgroup 0         |mma 0 |epilogue 0   |mma 2 |epilogue 2
//   warpgroup 1                |mma 1 |epilogue 1   |mma 3 |epilogue 3
//
// Timeline, cooperative
//   producer     |load 0|load 1       |load 2        |   the ring fills during epilogues
//   warpgroups          |mma 0 |epilogue 0|mma 1 |epilogue 1
//
// A kernel calls `pipeline` with its Params, which have the members used here, and its Epilogue, of which
// every warpgroup has one:
//   smem_bytes             shared memory of a warpgroup
//   overlap_m, overlap_n   whether two tiles may compute the same rows (columns), and both write the same
//                          bits
//   prefetch_maps(p)       for its own tensor maps
//   init(acc, ...)         what the chains of a tile start from
//   apply(acc, ...)        what becomes of them
//   drain(thread)          until nothing reads its shared memory
// With SEGMENTS, k is cut into so many segments, of p.k each. The operands' maps have them as batches, so that
// what lies past a segment's end reads as zero. Their sums are added by a tree (segments_sm90.cuh). Teams take
// turns with every segment: while one adds, the other multiplies. One team of several warpgroups adds a segment
// while its tensor cores multiply the next one.
//
// With BESIDE, the kernel runs beside the one before it on the stream, which computes another part of the same
// output. All blocks of that one have waited for what came before (they launch dependents behind their wait), or
// have left, so what they read may be read. This kernel ends after it: who waits for this one has waited for both.
//
// Grouped products have a scheduler of their own: see TileScheduler, which has what one needs.
#pragma once

#include "k_blocks_sm90.cuh"
#include "ring_sm90.cuh"
#include "segments_sm90.cuh"
#include "tile_sm90.cuh"
#include "wgmma_sm90.cuh"

#ifndef BESIDE
#define BESIDE 0
#endif

// Registers move from the producer to the consumers, whole warpgroups at a time.
constexpr bool MOVE_REGISTERS = WARPGROUPS > 1 && BLOCKS == 1;
constexpr u32 PRODUCER_REGISTERS = 40;
constexpr u32 CONSUMER_REGISTERS = WARPGROUPS == 2 ? 232 : WARPGROUPS == 3 ? 152 : 88;
constexpr u32 CONSUMERS = WARPGROUPS * 128;
constexpr u32 THREADS = CONSUMERS + (MOVE_REGISTERS ? 128 : 32);
constexpr u32 TEAMS = WARPGROUPS / SHARE;

constexpr u32 ROWS = BLOCK_M / SHARE;    // of a warpgroup
constexpr u32 MMA_M = (ROWS + 63) / 64;  // wgmma tiles of 64 rows in a warpgroup
using Accumulators = float[MMA_M][BLOCK_N / 2];

// Segments follow each other without a break.
constexpr bool JOINED = TEAMS == 1 && WARPGROUPS > 1 && HELD > 0;
using Sums = SegmentSums<MMA_M, BLOCK_N / 2, JOINED>;
// A warpgroup's own shared memory: sums wait where its epilogue works, but never while it does.
template <typename Epilogue>
constexpr u32 WARPGROUP_BYTES =
    Epilogue::smem_bytes > Sums::shared_bytes ? Epilogue::smem_bytes : Sums::shared_bytes;

// Named barriers; 0 is __syncthreads.
enum : u32 {
    EPILOGUE_BARRIER = 1,
    CLEARED_BARRIER = EPILOGUE_BARRIER + WARPGROUPS,
    ORDER_BARRIER = CLEARED_BARRIER + TEAMS
};

static_assert(!MOVE_REGISTERS || PRODUCER_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS <=
                                     THREADS / 128 * (65536 / THREADS / 8 * 8),
              "no more registers than the block starts with");
static_assert(SEGMENTS == 1 || (TEAMS <= 2 && !RAGGED));
static_assert(SHARE == 1 || SHARE == WARPGROUPS, "ping-pong or cooperative");
static_assert(BLOCK_K % 32 == 0 && BLOCK_M % SHARE == 0 && STAGES >= 2);
static_assert(!RAGGED || (A_MN && B_MN), "sequences lie along the rows of both operands");

using ATile = Tile<A_MN, FOLDED && !A_MN && BLOCK_K / 64 % CLUSTER == 0, BLOCK_M, BLOCK_K, CLUSTER>;
using BTile = Tile<B_MN, FOLDED && !B_MN, BLOCK_N, BLOCK_K, 1>;
constexpr u32 A_BYTES = ATile::bytes, B_BYTES = BTile::bytes;  // of a stage

static_assert(!A_MN || ROWS % 64 == 0 || (ROWS == 32 && SHARE == 1),
              "A contiguous along m comes in columns of 64, or in one of 32");
static_assert(ROWS != 32 || !A_MN || STAGES * B_BYTES >= A_BYTES,
              "what is read behind a column of 32, and dropped, is in shared memory");

struct TileCoord {
    int m, n, batch;
    int m_end, n_end;  // what lies beyond is not the tile's
};

// Where the last tile begins. It is moved back to end where the matrix does, if tiles may overlap: TMA takes
// several times as long for lines outside of a matrix.
template <bool OVERLAP, u32 BLOCK, u32 STEP>
__device__ __forceinline__ int last_tile_start(int size) {
    if (!OVERLAP) return 0x7FFFFFFF;
    return max(size - int(BLOCK) + int(STEP - 1), 0) / STEP * STEP;
}

// The order in which a cluster takes tiles: `group` rows of tiles at a time, down their columns.
template <typename Epilogue>
struct TileScheduler {
    static constexpr bool VARIED = false;  // whether tiles may have other blocks of k than the one before
    u32 rows, columns, per_matrix, count, group;
    int last_m, last_n, m, n;

    // Tiles move in steps that keep TMA stores at 16 bytes, and loads of operands contiguous along m or n at
    // sectors. Along m, TMA stores only with TRANSPOSED and ALIGNED: m is then a multiple of 8.
    template <typename Params>
    __device__ explicit TileScheduler(const Params& p)
        : rows((p.m + BLOCK_M - 1) / BLOCK_M), columns((p.n + BLOCK_N * CLUSTER - 1) / (BLOCK_N * CLUSTER)),
          per_matrix(rows * columns), count(per_matrix * p.batch), group(p.group),
          last_m(last_tile_start<Epilogue::overlap_m, BLOCK_M, A_MN ? 16 : 1>(p.m)),
          last_n(last_tile_start<Epilogue::overlap_n, BLOCK_N, B_MN ? 16 : 8>(p.n)), m(p.m), n(p.n) {}

    // For all threads, once what earlier kernels wrote may be read.
    template <typename Params>
    __device__ __forceinline__ void prepare(const Params&, u32) {}

    template <typename Params>
    __device__ __forceinline__ KBlocks blocks(const Params& p, const TileCoord&) const {
        return KBlocks(p.k, p.bounds, p.sequences);
    }

    // For a whole warp.
    template <typename Params>
    __device__ __forceinline__ u32 number_of_blocks(const Params& p, const TileCoord&) const {
        return KBlocks::count(p.k, p.bounds, p.sequences);
    }

    __device__ TileCoord at(u32 index, u32 rank) const {
        u32 batch = index / per_matrix;
        index -= batch * per_matrix;
        u32 taken = index / (group * columns);
        index -= taken * group * columns;
        u32 height = min(group, rows - taken * group);
        u32 column = index / height;
        u32 row = taken * group + index - column * height;
        return {min(int(row * BLOCK_M), last_m), min(int((column * CLUSTER + rank) * BLOCK_N), last_n),
                int(batch), m, n};
    }
};

struct SharedStorage {
    u32 a, b, own, full, empty, table;

    __device__ SharedStorage(unsigned char* raw, u32 own_bytes) {
        u32 start = shared_address(raw);
        u32 base = (start + 1023) & ~1023u;  // a whole period of the swizzle
        a = base;
        b = a + STAGES * A_BYTES;
        own = b + STAGES * B_BYTES;
        full = own + WARPGROUPS * own_bytes;
        empty = full + STAGES * 8;
        table = empty + STAGES * 8;
    }
};

// This runs before the previous kernel is known to have written A. That is safe: it writes to L2, and only L2
// is filled.
template <typename Params, typename Scheduler>
__device__ __forceinline__ void prefetch_a(const Params& p, const Scheduler& scheduler, u32 rank) {
    u32 index = blockIdx.x / CLUSTER;
    TileCoord tile = scheduler.at(index, rank);
    for (int i = 0; i < AHEAD && i * BLOCK_K < p.k; ++i) {
        ATile::prefetch(p.a, tile.m, i * BLOCK_K, tile.batch * p.a_batch, rank);
    }
}

template <typename Params, typename Scheduler>
__device__ __forceinline__ void producer(const SharedStorage& shared, const Params& p,
                                         const Scheduler& scheduler, u32 rank) {
    constexpr u32 bytes = A_BYTES + B_BYTES;
    const u32 clusters = gridDim.x / CLUSTER;
    Ring<STAGES> ring;
    auto load = [&](const TileCoord& tile) {
        KBlocks blocks = scheduler.blocks(p, tile);
        while (blocks.next()) {
            u32 full = shared.full + ring.stage * 8;
            mbarrier_wait(shared.empty + ring.stage * 8, ring.parity ^ 1);
            mbarrier_arrive_expect_tx(full, bytes);
            ATile::load(shared.a + ring.stage * A_BYTES, p.a, full, tile.m, blocks.start(),
                        tile.batch * p.a_batch, rank);
            BTile::load(shared.b + ring.stage * B_BYTES, p.b, full, tile.n, blocks.start(),
                        tile.batch * p.b_batch, 0);
            ring.step();
        }
    };
#if SEGMENTS > 1
    // Segments of tiles, in the order in which teams take them. The place of a tile takes some hundred cycles of
    // divisions, so not for each segment: nothing is loaded meanwhile.
    for (u32 first = blockIdx.x / CLUSTER; first < scheduler.count; first += TEAMS * clusters) {
        TileCoord tile = scheduler.at(first, rank);
        TileCoord second = TEAMS > 1 ? scheduler.at(first + clusters, rank) : tile;
        for (u32 segment = 0; segment < SEGMENTS; ++segment) {
            tile.batch = second.batch = segment;  // as the maps have it
            load(tile);
            if (TEAMS > 1 && first + clusters < scheduler.count) load(second);
        }
    }
#else
    for (u32 index = blockIdx.x / CLUSTER; index < scheduler.count; index += clusters)
        load(scheduler.at(index, rank));
#endif
}

__device__ __forceinline__ void release(const SharedStorage& shared, u32 stage, u32 thread) {
    u32 empty = shared.empty + stage * 8;
    if constexpr (CLUSTER == 1) {
        if (thread == 0) mbarrier_arrive(empty);
    } else {
        if (thread < CLUSTER) mbarrier_arrive_remote(empty, thread);
    }
}

// Blocks of k of the tiles that other teams take from `index` on, `count` tiles.
template <typename Params, typename Scheduler>
__device__ __forceinline__ u32 blocks_of_others(const Params& p, const Scheduler& scheduler, u32 index,
                                                u32 count) {
    u32 sum = 0;
    for (u32 i = 0; i < count; ++i, index += gridDim.x / CLUSTER)
        if (index < scheduler.count) sum += scheduler.number_of_blocks(p, scheduler.at(index, 0));
    return sum;
}

template <typename Epilogue, typename Params, typename Scheduler>
__device__ __forceinline__ void consumer(const SharedStorage& shared, const Params& p,
                                         const Scheduler& scheduler, u32 rank, u32 warpgroup) {
    u32 team = TEAMS == 1 ? 0 : warpgroup / SHARE, member = warpgroup % SHARE;
    u32 thread = threadIdx.x % 128;
    u32 k_blocks = Scheduler::VARIED ? 0 : KBlocks::count(p.k, p.bounds, p.sequences);
    u32 clusters = gridDim.x / CLUSTER;
    Ring<STAGES> ring;
    if constexpr (Scheduler::VARIED)
        ring.skip(blocks_of_others(p, scheduler, blockIdx.x / CLUSTER, team));
    else
        ring.skip(team * k_blocks);
    Epilogue epilogue;
    for (u32 index = blockIdx.x / CLUSTER + team * clusters; index < scheduler.count;
         index += TEAMS * clusters) {
        TileCoord tile = scheduler.at(index, rank);
        if constexpr (Scheduler::VARIED) k_blocks = scheduler.number_of_blocks(p, tile);
        tile.m += member * ROWS;
        // Teams take the ring in turns: an mbarrier can be waited for only one phase ahead.
        auto wait_for_turn = [&](bool turns) {
            if (turns) named_barrier(ORDER_BARRIER + team, 2 * SHARE * 128);
        };
        auto hand_on = [&](bool turns) {
            if (turns) named_barrier_arrive(ORDER_BARRIER + (team + 1) % TEAMS, 2 * SHARE * 128);
        };
#if SEGMENTS == 1
        Accumulators acc;
        epilogue.init(acc, p, tile, thread);
        wait_for_turn(TEAMS > 1 && index >= clusters);
#endif
        u32 previous = 0;
        bool ready = false;
        KBlocks blocks = scheduler.blocks(p, tile);
        // The products of one stage. `held`: whether the stage before is not released yet.
        auto multiply = [&](Accumulators& acc, u32 block, bool held) {
            if (!ready) mbarrier_wait(shared.full + ring.stage * 8, ring.parity);
            u32 a = shared.a + ring.stage * A_BYTES, b = shared.b + ring.stage * B_BYTES;
            if constexpr (RAGGED) {
                blocks.next();
                if (blocks.valid() < BLOCK_K) {  // rows of k outside of their sequence
                    ATile::clear(a, blocks.valid(), BLOCK_K, member * 128 + thread, SHARE * 128);
                    BTile::clear(b, blocks.valid(), BLOCK_K, member * 128 + thread, SHARE * 128);
                    fence_async_proxy();
                    named_barrier(CLEARED_BARRIER + team, SHARE * 128);
                }
            }
            auto a_tile = ATile::descriptor(a + ATile::step(member * ROWS, 0));
            auto b_tile = BTile::descriptor(b);
            Ring<STAGES> next = ring;
            next.step();
            wgmma_fence();
#pragma unroll
            for (u32 k = 0; k < BLOCK_K; k += 16) {
                // The stage before is released in the middle of this one, so that the tensor cores have work
                // meanwhile.
                if (k == BLOCK_K / 32 * 16) {
                    wgmma_commit();
                    wgmma_wait<1>();  // of the stage before
                    if (held) release(shared, previous, thread);
                    ready =
                        block + 1 < k_blocks && mbarrier_try_wait(shared.full + next.stage * 8, next.parity);
                }
#pragma unroll
                for (u32 mma_m = 0; mma_m < MMA_M; ++mma_m) {
                    // A segment starts from +0 in its first step: nothing need be cleared between two.
                    Wgmma<BLOCK_N, A_MN, B_MN>::step(acc[mma_m], a_tile.at(ATile::step(mma_m * 64, k)),
                                                     b_tile.at(BTile::step(0, k)),
                                                     SEGMENTS == 1 || block > 0 || k > 0);
                }
            }
            wgmma_commit();
            previous = ring.stage;
            ring = next;
        };
        auto complete = [&] {
            wgmma_wait<0>();
            if (k_blocks > 0) release(shared, previous, thread);
        };
#if SEGMENTS > 1
        // Whether the other team has a tile in the turn of this one's: not after the last tile of all.
        const bool others = TEAMS > 1 && (team > 0 || index + clusters < scheduler.count);
        auto begin = [&](Accumulators& acc, u32 segment, bool joined) {
            wait_for_turn(segment > 0 ? others : TEAMS > 1 && index >= clusters);
            if (SHARED && segment == (HELD > 0)) {  // soon a sum waits where the last tile's panels are
                epilogue.drain(thread);
                named_barrier(EPILOGUE_BARRIER + warpgroup, 128);
            }
            if constexpr (JOINED) multiply(acc, 0, joined);
        };
        auto go_on = [&](Accumulators& acc) {
            for (u32 block = JOINED; block < k_blocks; ++block) multiply(acc, block, JOINED || block > 0);
            hand_on(others);
            if constexpr (!JOINED) complete();
            if (others) ring.skip(k_blocks);
        };
        extern __shared__ unsigned char raw[];
        void* waiting = raw + (shared.own - shared_address(raw)) + warpgroup * WARPGROUP_BYTES<Epilogue>;
        Accumulators sets[HELD + 1];
        Accumulators& acc =
            Sums::all(sets, {waiting, p.sums, blockIdx.x * WARPGROUPS + warpgroup, thread, k_blocks > 0},
                      begin, go_on, complete);
        if constexpr (SHARED) named_barrier(EPILOGUE_BARRIER + warpgroup, 128);  // none waits there any more
#else
        for (u32 block = 0; block < k_blocks; ++block) multiply(acc, block, block > 0);
        hand_on(TEAMS > 1);
        complete();
        if constexpr (Scheduler::VARIED)
            ring.skip(blocks_of_others(p, scheduler, index + clusters, TEAMS - 1));
        else  // not by a function: some schedules would spill
            ring.skip((TEAMS - 1) * k_blocks);
#endif

        epilogue.apply(acc, shared.own + warpgroup * WARPGROUP_BYTES<Epilogue>, p, tile, warpgroup, thread);
    }
    epilogue.drain(thread);
}

// What consumers do with their tiles: here, one chain over all of k.
struct ChainConsumer {
    template <typename Epilogue, typename Scheduler, typename Params>
    static __device__ __forceinline__ void run(const SharedStorage& shared, const Params& p,
                                               const Scheduler& scheduler, u32 rank, u32 warpgroup) {
        consumer<Epilogue>(shared, p, scheduler, rank, warpgroup);
    }
};

// The whole kernel, for all of its threads.
template <typename Epilogue, typename Scheduler = TileScheduler<Epilogue>, typename Consumer = ChainConsumer,
          typename Params>
__device__ __forceinline__ void pipeline(const Params& p) {
    extern __shared__ unsigned char raw[];
    SharedStorage shared(raw, WARPGROUP_BYTES<Epilogue>);
    u32 rank = CLUSTER == 1 ? 0 : cluster_rank();
    Scheduler scheduler(p);

    if (threadIdx.x == CONSUMERS) {
        prefetch_tensor_map(p.a);
        prefetch_tensor_map(p.b);
        Epilogue::prefetch_maps(p);
        for (u32 stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared.full + stage * 8, 1);
            mbarrier_init(shared.empty + stage * 8, SHARE * CLUSTER);
        }
        mbarrier_init_fence();
    }
    if constexpr (CLUSTER == 1) {
        __syncthreads();
    } else {
        cluster_sync();
    }
    if (AHEAD > 0 && threadIdx.x == CONSUMERS) prefetch_a(p, scheduler, rank);
    if constexpr (!BESIDE) griddepcontrol_wait();
    if constexpr (EARLY) griddepcontrol_launch_dependents();
    scheduler.prepare(p, shared.table);

    // Read from one lane: then the compiler knows it, and all addresses made of it, to be uniform in a warp.
    u32 warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    if (warpgroup == WARPGROUPS) {
        if constexpr (MOVE_REGISTERS) setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS) producer(shared, p, scheduler, rank);
        __syncwarp();
    } else {
        if constexpr (MOVE_REGISTERS) setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer::template run<Epilogue>(shared, p, scheduler, rank, WARPGROUPS == 1 ? 0 : warpgroup);
    }
    // Other blocks of the cluster may still copy into this one and arrive at its barriers.
    if constexpr (CLUSTER > 1) cluster_sync();
    if constexpr (BESIDE) griddepcontrol_wait();
}

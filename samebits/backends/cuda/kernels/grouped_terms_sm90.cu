// Grouped products on Hopper that sum over every group's rows (groups.cuh), for bf16 and f16 matrices whose
// sizes are multiples of 64. k is a group's rows, in which each sequence begins a new k16 step. Each element is
// the chain of tensor_core_sm90.cu.
//
// A stage of the ring holds STEPS steps, of one sequence or of several. So only the last step of a sequence has
// rows that are not its own: those of what follows it. They become zeros before consumers see the stage.
//
// Warps of a block
//   WARPGROUPS warpgroups  consumers: wgmma, then the epilogue
//   2 warps                producers, one for each operand: a thread issues its TMA loads, a box for each step, or
//                          one for a stage within a sequence
//   2 warps                cleaners: write the zeros
//
// Barriers, besides those of pipeline_sm90.cuh
//   landed[stage]          mbarrier, producer to cleaners: all bytes of the stage have arrived
//   full[stage]            mbarrier, cleaners to consumers: and rows that are not the sequences' are zeros
//
// In shared memory a step of an operand is [columns / 64][16][64], and a stage is its steps.
//
// Macros: those of tensor_core_sm90.cu, and GROUPED, which is OF_TERMS. A_MN and B_MN are 1, RAGGED and FOLDED are
// 0: the loads are none of Tile's.

#if !defined(INPUT_F16) || !defined(GROUPED)
#error "INPUT_F16 and GROUPED are needed: #if takes a missing macro for 0"
#endif

#define STEP_MAPS
#include "term_groups_sm90.cuh"

constexpr int STEP = 16;
constexpr u32 STEPS = BLOCK_K / STEP;  // of a stage
constexpr u32 CLEANERS = 2;            // warps

static_assert(GROUPED == OF_TERMS && A_MN && B_MN && !RAGGED && AHEAD == 0 && MOVE_REGISTERS);
static_assert(STEPS <= 4 && STEPS % CLUSTER == 0, "a byte of a word for each step");

// A step of an operand in shared memory, and how TMA loads it. `sharers` blocks of a cluster need the same steps:
// each copies some columns of a step to all, or some steps of a stage.
template <u32 size, u32 sharers>
struct StepTile : Tile<true, false, size, STEP, 1> {
    using Base = Tile<true, false, size, STEP, 1>;
    static_assert(size % 64 == 0 && size / 64 % sharers == 0);

    static __device__ __forceinline__ void copy(u32 to, const TensorMap& map, u32 barrier, int k,
                                                u32 column) {
        if constexpr (sharers == 1)
            tma_load(to, map, barrier, 0, k, column, 0);
        else
            tma_load_multicast(to, map, barrier, 0, k, column, 0, (1 << sharers) - 1);
    }
    static __device__ __forceinline__ void load_step(u32 to, const TensorMap& map, u32 barrier, int row,
                                                     int k, u32 slice) {
        u32 column = slice * (Base::columns / sharers);
        copy(to + column * Base::column_bytes, map, barrier, k, row / 64 + column);
    }
    static __device__ __forceinline__ void load_stage(u32 to, const TensorMap& map, u32 barrier, int row,
                                                      int k, u32 slice) {
        u32 step = slice * (STEPS / sharers);
        copy(to + step * Base::bytes, map, barrier, k + int(step) * STEP, row / 64);
    }
};
using AStep = StepTile<BLOCK_M, CLUSTER>;
using BStep = StepTile<BLOCK_N, 1>;
static_assert(AStep::bytes * STEPS == A_BYTES && BStep::bytes * STEPS == B_BYTES);

// The steps of a group, in order. Bounds outside [0, k_end] are taken as the nearer end, and a sequence that ends
// before it starts is empty.
class KSteps {
    const int* bounds;
    int left, k_end, k, end, next_bound;

    static __device__ int inside(int bound, int k_end) { return min(max(bound, 0), k_end); }

  public:
    __device__ KSteps(const TermGroup& group, int k_end)
        : bounds(group.bounds), left(group.sequences), k_end(k_end), k(0), end(0), next_bound(0) {
        if (left > 0) {
            k = end = inside(bounds[0], k_end);
            next_bound = bounds[1];
            k -= STEP;
        }
    }
    // Only while there is a next one.
    __device__ void next() {
        k += STEP;
        while (k >= end && left > 0) {
            k = end;
            end = inside(next_bound, k_end);
            ++bounds;
            // Fetched a sequence ahead: the copies of this one hide the wait.
            if (--left > 0) next_bound = bounds[1];
        }
    }
    __device__ void next_of_sequence(int steps) { k += steps * STEP; }
    __device__ int start() const { return k; }
    __device__ int left_in_sequence() const { return end - k; }

    // For a whole warp.
    static __device__ u32 count(const int* bounds, int sequences, int k_end) {
        u32 steps = 0;
        for (int i = threadIdx.x % 32; i < sequences; i += 32) {
            int length = inside(bounds[i + 1], k_end) - inside(bounds[i], k_end);
            steps += u32(max(length, 0) + STEP - 1) / STEP;
        }
        return __reduce_add_sync(0xFFFFFFFF, steps);
    }
};

struct Storage : SharedStorage {
    u32 landed,
        dirty;  // dirty: a word for each stage, whose bytes are the numbers of rows to clear in its steps

    __device__ explicit Storage(unsigned char* raw) : SharedStorage(raw, Output::smem_bytes) {
        landed = table, dirty = landed + STAGES * 8;
        table = dirty + (STAGES + 1) / 2 * 8;
    }
};

struct Scheduler : TileScheduler<Output> {
    const TermGroup* groups = nullptr;  // of steps

    __device__ explicit Scheduler(const Params& p) : TileScheduler<Output>(p) {}

    __device__ __forceinline__ void prepare(const Params& p, u32 shared) {
        groups = make_term_groups(p.groups, shared, [&](const int* bounds, int sequences) {
            return KSteps::count(bounds, sequences, p.k);
        });
    }
    __device__ __forceinline__ u32 stages(u32 group) const {
        return (groups[group].parts + STEPS - 1) / STEPS;
    }

    // Stages of the tiles that other teams take from `index` on, `teams` tiles.
    __device__ __forceinline__ u32 stages_of_others(u32 index, u32 teams) const {
        u32 sum = 0;
        for (u32 i = 0; i < teams; ++i, index += gridDim.x / CLUSTER)
            if (index < count) sum += stages(index / per_matrix);
        return sum;
    }
};

// Loads operand A or B, whose step tiles are `Step`. `row`: where the tile begins along m or n.
template <typename Step, bool A>
__device__ __forceinline__ void produce(const Storage& shared, const Params& p, const Scheduler& scheduler,
                                        u32 rank) {
    const u32 slice = A ? rank : 0;
    const TensorMap &of_step = A ? p.a : p.b, &of_stage = A ? p.a_stage : p.b_stage;
    Ring<STAGES> ring;
    for (u32 index = blockIdx.x / CLUSTER; index < scheduler.count; index += gridDim.x / CLUSTER) {
        const TileCoord tile = scheduler.at(index, rank);
        const int row = A ? tile.m : tile.n;
        const TermGroup& group = scheduler.groups[tile.batch];
        KSteps steps(group, p.k);
        for (u32 left = group.parts; left > 0;) {
            u32 landed = shared.landed + ring.stage * 8, dirty = 0, count = min(left, STEPS);
            u32 to = (A ? shared.a : shared.b) + ring.stage * (Step::bytes * STEPS);
            steps.next();
            mbarrier_wait(shared.empty + ring.stage * 8, ring.parity ^ 1);
            if (steps.left_in_sequence() >= BLOCK_K) {
                Step::load_stage(to, of_stage, landed, row, steps.start(), slice);
                steps.next_of_sequence(STEPS - 1);
            } else {
                for (u32 i = 0; i < count; ++i) {
                    if (i > 0) steps.next();
                    Step::load_step(to + i * Step::bytes, of_step, landed, row, steps.start(), slice);
                    dirty |= u32(max(STEP - steps.left_in_sequence(), 0)) << i * 8;
                }
            }
            if (A)
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared.dirty + ring.stage * 4), "r"(dirty)
                             : "memory");
            mbarrier_arrive_expect_tx(landed, count * Step::bytes);
            left -= count;
            ring.step();
        }
    }
}

// Zeroes the last `rows` rows of a step. A warp takes every CLEANERS-th column; the swizzle moves nothing out of
// a line.
template <typename Step>
__device__ __forceinline__ void clear_rows(u32 step, u32 rows, u32 warp) {
    for (u32 column = warp; column < Step::columns; column += CLEANERS) {
        u32 end = step + (column + 1) * Step::column_bytes;
        for (u32 i = threadIdx.x % 32; i < rows * (Step::line_bytes / 16); i += 32)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(end - (i + 1) * 16), "r"(0)
                         : "memory");
    }
}

__device__ __forceinline__ void clean(const Storage& shared, const Scheduler& scheduler, u32 warp) {
    Ring<STAGES> ring;
    for (u32 index = blockIdx.x / CLUSTER; index < scheduler.count; index += gridDim.x / CLUSTER) {
        u32 stages = scheduler.stages(index / scheduler.per_matrix);
        for (; stages > 0; --stages) {
            mbarrier_wait(shared.landed + ring.stage * 8, ring.parity);
            u32 dirty;
            asm volatile("ld.shared.b32 %0, [%1];"
                         : "=r"(dirty)
                         : "r"(shared.dirty + ring.stage * 4)
                         : "memory");
            for (u32 i = 0; dirty > 0; ++i, dirty >>= 8) {
                u32 rows = dirty & 0xFF;
                clear_rows<AStep>(shared.a + ring.stage * A_BYTES + i * AStep::bytes, rows, warp);
                clear_rows<BStep>(shared.b + ring.stage * B_BYTES + i * BStep::bytes, rows, warp);
            }
            fence_async_proxy();
            warp_arrive(shared.full + ring.stage * 8);
            ring.step();
        }
    }
}

__device__ __forceinline__ void multiply(Accumulators& acc, u32 a, u32 b, u32 step, u32 member) {
    auto a_tile = AStep::descriptor(a + AStep::step(member * ROWS, 0)), b_tile = BStep::descriptor(b);
#pragma unroll
    for (u32 mma_m = 0; mma_m < MMA_M; ++mma_m)
        Wgmma<BLOCK_N, 1, 1>::step(acc[mma_m], a_tile.at(step * AStep::bytes + AStep::step(mma_m * 64, 0)),
                                   b_tile.at(step * BStep::bytes));
}

__device__ __forceinline__ void consume(const Storage& shared, const Params& p, const Scheduler& scheduler,
                                        u32 rank, u32 warpgroup) {
    u32 team = TEAMS == 1 ? 0 : warpgroup / SHARE, member = warpgroup % SHARE;
    u32 thread = threadIdx.x % 128, clusters = gridDim.x / CLUSTER;
    Ring<STAGES> ring;
    ring.skip(scheduler.stages_of_others(blockIdx.x / CLUSTER, team));
    Output epilogue;
    for (u32 index = blockIdx.x / CLUSTER + team * clusters; index < scheduler.count;
         index += TEAMS * clusters) {
        TileCoord tile = scheduler.at(index, rank);
        const u32 steps = scheduler.groups[tile.batch].parts, whole = steps / STEPS, rest = steps % STEPS;
        tile.m += member * ROWS;
        Accumulators acc;
        epilogue.init(acc, p, tile, thread);
        // Teams take the ring in turns: an mbarrier can be waited for only one phase ahead.
        if (TEAMS > 1 && index >= clusters) named_barrier(ORDER_BARRIER + team, 2 * SHARE * 128);
        u32 previous = 0;
        bool ready = false;
        for (u32 block = 0; block < whole; ++block) {
            if (!ready) mbarrier_wait(shared.full + ring.stage * 8, ring.parity);
            u32 a = shared.a + ring.stage * A_BYTES, b = shared.b + ring.stage * B_BYTES;
            Ring<STAGES> next = ring;
            next.step();
            wgmma_fence();
#pragma unroll
            for (u32 step = 0; step < STEPS; ++step) {
                // The stage before is released in the middle of this one, so that the tensor cores have work
                // meanwhile.
                if (step == STEPS / 2) {
                    wgmma_commit();
                    wgmma_wait<1>();  // of the stage before
                    if (block > 0) release(shared, previous, thread);
                    ready = block + 1 < whole + (rest > 0) &&
                            mbarrier_try_wait(shared.full + next.stage * 8, next.parity);
                }
                multiply(acc, a, b, step, member);
            }
            wgmma_commit();
            previous = ring.stage;
            ring = next;
        }
        if (rest > 0) {
            if (!ready) mbarrier_wait(shared.full + ring.stage * 8, ring.parity);
            u32 a = shared.a + ring.stage * A_BYTES, b = shared.b + ring.stage * B_BYTES;
            wgmma_fence();
#pragma unroll 1
            for (u32 step = 0; step < rest; ++step) multiply(acc, a, b, step, member);
            wgmma_commit();
            wgmma_wait<1>();
            if (whole > 0) release(shared, previous, thread);
            previous = ring.stage;
            ring.step();
        }
        if constexpr (TEAMS > 1) named_barrier_arrive(ORDER_BARRIER + (team + 1) % TEAMS, 2 * SHARE * 128);
        wgmma_wait<0>();
        if (steps > 0) release(shared, previous, thread);
        if constexpr (TEAMS > 1) ring.skip(scheduler.stages_of_others(index + clusters, TEAMS - 1));
        epilogue.apply(acc, shared.own + warpgroup * Output::smem_bytes, p, tile, warpgroup, thread);
    }
    epilogue.drain(thread);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    grouped_terms_sm90(const __grid_constant__ Params p) {
    extern __shared__ unsigned char raw[];
    const Storage shared(raw);
    const u32 rank = CLUSTER == 1 ? 0 : cluster_rank();
    Scheduler scheduler(p);
    if (threadIdx.x == CONSUMERS) {
        for (const TensorMap* map : {&p.a, &p.b, &p.a_stage, &p.b_stage}) prefetch_tensor_map(*map);
        Output::prefetch_maps(p);
        for (u32 stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared.landed + stage * 8, 2);
            mbarrier_init(shared.full + stage * 8, CLEANERS * WARP_ARRIVALS);
            mbarrier_init(shared.empty + stage * 8, SHARE * CLUSTER);
        }
        mbarrier_init_fence();
    }
    if constexpr (CLUSTER == 1)
        __syncthreads();
    else
        cluster_sync();
    griddepcontrol_wait();
    if constexpr (EARLY) griddepcontrol_launch_dependents();
    scheduler.prepare(p, shared.table);

    // Read from one lane: then the compiler knows it, and all addresses made of it, to be uniform in a warp.
    const u32 warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    if (warp >= CONSUMERS / 32) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const u32 role = warp - CONSUMERS / 32;
        if (role == 0 && threadIdx.x % 32 == 0) produce<AStep, true>(shared, p, scheduler, rank);
        if (role == 1 && threadIdx.x % 32 == 0) produce<BStep, false>(shared, p, scheduler, rank);
        if (role >= 2) clean(shared, scheduler, role - 2);
        __syncwarp();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(shared, p, scheduler, rank, warp / 4);
    }
    // Other blocks of the cluster may still copy into this one and arrive at its barriers.
    if constexpr (CLUSTER > 1) cluster_sync();
    if (blockIdx.x == 0 && !p.groups.good(THREADS))
        asm volatile("trap;");  // a call would serialise wgmma (C7510)
}

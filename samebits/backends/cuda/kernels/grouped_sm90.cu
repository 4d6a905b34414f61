// Grouped products on Hopper, for bf16 and f16 operands that TMA can read: a product for every group of rows,
// or a sum over every group of rows (groups.cuh). Each element is the chain of tensor_core_sm90.cu.
//
// Groups of rows: row_groups_sm90.cuh. Groups of terms: k is a group's rows, in which each sequence begins a new
// block. Of them, too, every block makes a table in shared memory first.
//
// Macros: those of tensor_core_sm90.cu, and
//   GROUPED   OF_ROWS or OF_TERMS; RAGGED with the latter. AHEAD is 0: offsets may not be read so early

#if !defined(INPUT_F16) || !defined(RAGGED) || !defined(GROUPED)
#error "INPUT_F16, RAGGED and GROUPED are needed: #if takes a missing macro for 0"
#endif

#include "row_groups_sm90.cuh"

static_assert(AHEAD == 0 && (GROUPED == OF_TERMS) == RAGGED);

#if GROUPED == OF_ROWS
using Scheduler = RowScheduler<Output>;
#else
struct Scheduler : TileScheduler<Output> {
    static constexpr bool VARIED = true;

    // Of a group: where its sequences' bounds are, the number of sequences, and that of their blocks.
    struct Group {
        const int* bounds;
        int sequences;
        u32 blocks;
    };
    const Group* groups = nullptr;

    __device__ explicit Scheduler(const Params& p) : TileScheduler<Output>(p) {}

    __device__ __forceinline__ void prepare(const Params& p, u32 shared) {
        auto* group = reinterpret_cast<Group*>(table_at(shared));
        auto* whole = reinterpret_cast<int*>(group + p.groups.count);  // of groups without sequences
        for (int i = threadIdx.x; i < p.groups.count; i += THREADS) {
            if (p.groups.runs) {
                group[i] = {p.groups.bounds(i), p.groups.sequences(i), 0};
            } else {
                whole[2 * i] = p.groups.first(i), whole[2 * i + 1] = p.groups.end(i);
                group[i] = {whole + 2 * i, 1, 0};
            }
        }
        __syncthreads();
        for (int i = threadIdx.x / 32; i < p.groups.count; i += THREADS / 32) {
            u32 blocks = KBlocks::count(p.k, group[i].bounds, group[i].sequences);
            if (threadIdx.x % 32 == 0) group[i].blocks = blocks;
        }
        __syncthreads();
        groups = group;
    }

    __device__ __forceinline__ KBlocks blocks(const Params& p, const TileCoord& tile) const {
        return KBlocks(p.k, groups[tile.batch].bounds, groups[tile.batch].sequences);
    }
    __device__ __forceinline__ u32 number_of_blocks(const Params&, const TileCoord& tile) const {
        return groups[tile.batch].blocks;
    }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) grouped_sm90(const __grid_constant__ Params p) {
    pipeline<Output, Scheduler>(p);
    if (blockIdx.x == 0 && !p.groups.good(THREADS))
        asm volatile("trap;");  // a call would serialise wgmma (C7510)
}

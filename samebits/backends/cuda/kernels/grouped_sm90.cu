// Grouped products on Hopper, for bf16 and f16 operands that TMA can read: a product for every group of rows,
// or a sum over every group of rows (groups.cuh). Each element is the chain of tensor_core_sm90.cu.
//
// Groups of rows: row_groups_sm90.cuh. Groups of terms: term_groups_sm90.cuh; k is a group's rows, in which each
// sequence begins a new block.
//
// Macros: those of tensor_core_sm90.cu, and
//   GROUPED   OF_ROWS or OF_TERMS; RAGGED with the latter. AHEAD is 0: offsets may not be read so early

#if !defined(INPUT_F16) || !defined(RAGGED) || !defined(GROUPED)
#error "INPUT_F16, RAGGED and GROUPED are needed: #if takes a missing macro for 0"
#endif

#include "term_groups_sm90.cuh"

static_assert(AHEAD == 0 && (GROUPED == OF_TERMS) == RAGGED);

#if GROUPED == OF_ROWS
using Scheduler = RowScheduler<Output>;
#else
struct Scheduler : TileScheduler<Output> {
    static constexpr bool VARIED = true;

    const TermGroup* groups = nullptr;  // of blocks

    __device__ explicit Scheduler(const Params& p) : TileScheduler<Output>(p) {}

    __device__ __forceinline__ void prepare(const Params& p, u32 shared) {
        groups = make_term_groups(p.groups, shared, [&](const int* bounds, int sequences) {
            return KBlocks::count(p.k, bounds, sequences);
        });
    }

    __device__ __forceinline__ KBlocks blocks(const Params& p, const TileCoord& tile) const {
        return KBlocks(p.k, groups[tile.batch].bounds, groups[tile.batch].sequences);
    }
    __device__ __forceinline__ u32 number_of_blocks(const Params&, const TileCoord& tile) const {
        return groups[tile.batch].parts;
    }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) grouped_sm90(const __grid_constant__ Params p) {
    pipeline<Output, Scheduler>(p);
    if (blockIdx.x == 0 && !p.groups.good(THREADS))
        asm volatile("trap;");  // a call would serialise wgmma (C7510)
}

// Grouped block-scaled FP8 products on Hopper: every group of rows has a matrix in FP8, and its scales.
//
// Tiles are those of row_groups_sm90.cuh, and what becomes of one is in scaled_sm90.cuh. Each row has the bits that
// scaled_sm90.cu gives it with its group's matrix.
//
// Macros: those of scaled_sm90.cuh with GROUPED OF_ROWS and AHEAD 0, and
//   MASKED    as in groups.cuh

#if !defined(GROUPED) || !defined(MASKED)
#error "GROUPED and MASKED are needed: #if takes a missing macro for 0"
#endif
#define SCALED 1

#include "row_groups_sm90.cuh"
#include "scaled_sm90.cuh"

static_assert(AHEAD == 0 && GROUPED == OF_ROWS);

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    scaled_grouped_sm90(const __grid_constant__ Params p) {
    pipeline<ScaledOutput, RowScheduler<ScaledOutput>, ScaledConsumer>(p);
    if (blockIdx.x == 0 && !p.groups.good(THREADS))
        asm volatile("trap;");  // a call would serialise wgmma (C7510)
}

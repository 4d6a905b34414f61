// Block-scaled FP8 product on Hopper: D = sum of scale_a scale_b (A B) over blocks of 128 along k (+ bias).
//
// Macros: those of scaled_sm90.cuh.
#define SCALED 1

#include "scaled_sm90.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) scaled_sm90(const __grid_constant__ Params p) {
    pipeline<ScaledOutput, TileScheduler<ScaledOutput>, ScaledConsumer>(p);
}

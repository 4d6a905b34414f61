// D[m, n] = one chain over ascending k of A[m, k] B[k, n], on Hopper.
//
// -D: what pipeline_sm90.cuh (the main loop), accumulators_sm90.cuh and output_sm90.cuh (the epilogue) ask
// for.
#include "output_sm90.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul_sm90(const __grid_constant__ Problem p) {
    pipeline<Output>(p);
}

// What the two kernels of products under FMA on Hopper share: parameters, and how threads share the work.
// chains.
#pragma once

#include "convert.cuh"
#include "ptx_sm90.cuh"
#include "ring_sm90.cuh"
#include "tile_order.cuh"

struct Params {
    TensorMap a, b;
    float* out;
    i64 out_batch, out_row, out_col;
    const float* acc;
    i64 acc_batch, acc_row, acc_col;
    const void* bias;
    i64 bias_stride;
    int m, n, k, tiles_m, tiles_n;
    int a_batch, b_batch;                       // 0 where one matrix serves the whole batch
    int closing_zero, out_together, bias_kind;  // closing_zero: a zero term ends the chain
};

// Which rows and columns of its warp's tile a lane has, of LANES_M rows of lanes. Neighbours share a row of
// a, and lanes two apart a column of b: then 16 lanes read 16 bytes each at once, not 8.
__device__ __forceinline__ int lane_row(int lane) { return lane / 2 % LANES_M; }
__device__ __forceinline__ int lane_column(int lane) { return lane / (2 * LANES_M) * 2 + lane % 2; }

__device__ __forceinline__ float bias_at(const Params& p, int col) {
    const i64 index = col * p.bias_stride;
    if (p.bias_kind == F32) return static_cast<const float*>(p.bias)[index];
    const u16 bits = static_cast<const u16*>(p.bias)[index];
    return p.bias_kind == BF16 ? Element<BF16>::widen(bits) : Element<F16>::widen(bits);
}

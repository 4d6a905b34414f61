// What the two kernels of products under FMA on Hopper share: their parameters, and where a block's tile is.
#pragma once

#include "convert.cuh"

using i64 = long long;

constexpr int BAND = 8;  // rows of tiles walked together, so that their operands stay in L2

struct Params {
    TensorMap a, b;
    float* out;
    i64 out_batch, out_row, out_col;
    const float* acc;
    i64 acc_batch, acc_row, acc_col;
    const void* bias;
    i64 bias_stride;
    int m, n, k, tiles_m, tiles_n;
    int a_batch, b_batch;                  // 0 where one matrix serves the whole batch
    int closing_zero, out_together, bias_kind;  // closing_zero: a zero term ends the chain
};

// The tile of a block, by rows and columns of tiles, and its matrix of the batch.
struct TileOf {
    int m, n, batch;

    __device__ __forceinline__ TileOf(const Params& p, u32 block)
    {
        const u32 tiles = static_cast<u32>(p.tiles_m) * p.tiles_n, tile = block % tiles;
        const u32 band = tile / (BAND * p.tiles_n), band_rows = min(p.tiles_m - band * BAND, static_cast<u32>(BAND));
        const u32 in_band = tile % (BAND * p.tiles_n);
        batch = block / tiles, m = band * BAND + in_band % band_rows, n = in_band / band_rows;
    }
};

__device__ __forceinline__ float bias_at(const Params& p, int col)
{
    const i64 index = col * p.bias_stride;
    if (p.bias_kind == F32) return static_cast<const float*>(p.bias)[index];
    const u16 bits = static_cast<const u16*>(p.bias)[index];
    return p.bias_kind == BF16 ? Element<BF16>::widen(bits) : Element<F16>::widen(bits);
}

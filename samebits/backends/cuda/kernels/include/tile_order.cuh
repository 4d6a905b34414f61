// The order in which blocks take the tiles of an output.
#pragma once

#include "types.cuh"

// Tiles of GROUP_M rows of tiles are taken down their columns, one column after another, so that the operands
// of tiles that run side by side stay in L2.
constexpr int GROUP_M = 8;

// The tile of a block, by rows and columns of tiles, and its matrix of the batch.
struct TileOf {
    int m, n, batch;

    template <typename Params>
    __device__ __forceinline__ TileOf(const Params& p, u32 block) {
        const u32 tiles = static_cast<u32>(p.tiles_m) * p.tiles_n, tile = block % tiles;
        const u32 group = tile / (GROUP_M * p.tiles_n);
        const u32 height = min(p.tiles_m - group * GROUP_M, static_cast<u32>(GROUP_M));
        const u32 in_group = tile % (GROUP_M * p.tiles_n);
        batch = block / tiles, m = group * GROUP_M + in_group % height, n = in_group / height;
    }
};

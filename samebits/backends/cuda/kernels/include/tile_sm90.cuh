// Tiles of an operand in shared memory: how TMA loads them, how rows past the end of a sequence are cleared,
// and the descriptors by which wgmma reads them.
#pragma once

#include "wgmma_sm90.cuh"

// `size` rows (m or n) by `depth` of k, as columns of 64 elements:
//   contiguous along k:       [depth / 64][size][64]
//   contiguous along m or n:  [size / 64][depth][64], or with 32 for 64 where size is no multiple of 64
// `sharers` blocks of a cluster need the same tile: each copies one slice to all. A slice is some lines of
// every column, in a box each; or, where the map is `folded`, some of the columns, in one box, whose third
// dimension counts columns (which k must fill).
template <bool mn_major, bool folded, u32 size, u32 depth, u32 sharers>
struct Tile {
    static constexpr u32 width = mn_major && size % 64 != 0 ? 32 : 64;
    static constexpr u32 line_bytes = width * 2;
    static constexpr u32 lines = (mn_major ? depth : size) / (folded ? 1 : sharers);  // in a box
    static constexpr u32 columns = ((mn_major ? size : depth) + width - 1) / width;
    static constexpr u32 column_bytes = (mn_major ? depth : size) * line_bytes;
    static constexpr u32 bytes = columns * column_bytes;
    static_assert(lines % 8 == 0 && lines * (folded ? 1 : sharers) * line_bytes == column_bytes,
                  "whole swizzle periods");
    static_assert(lines <= 256, "a box has at most 256 lines");
    static_assert(!folded || (!mn_major && columns % sharers == 0),
                  "columns of k, the same number for each block");

    // f(offset in the tile, coordinates) for each box that this block copies.
    template <typename F>
    static __device__ __forceinline__ void for_each_box(int row, int k, u32 slice, F f) {
        if constexpr (folded) {
            u32 column = slice * (columns / sharers);
            f(column * column_bytes, 0, row, k / 64 + column);
        } else {
#pragma unroll
            for (u32 column = 0; column < columns; ++column) {
                u32 line = slice * lines;
                int along = (mn_major ? row : k) + column * width, across = (mn_major ? k : row) + line;
                f(column * column_bytes + line * line_bytes, along, across, 0);
            }
        }
    }

    // `slice` is this block's among the sharers, which are all of its cluster.
    static __device__ __forceinline__ void load(u32 tile, const TensorMap& map, u32 barrier, int row, int k,
                                                int batch, u32 slice) {
        constexpr u16 mask = (1 << sharers) - 1;
        for_each_box(row, k, slice, [&](u32 to, int x, int y, int z) {
            if constexpr (sharers == 1) {
                tma_load(tile + to, map, barrier, x, y, z, batch);
            } else {
                tma_load_multicast(tile + to, map, barrier, x, y, z, batch, mask);
            }
        });
    }

    // Brings this block's slice into L2.
    static __device__ __forceinline__ void prefetch(const TensorMap& map, int row, int k, int batch,
                                                    u32 slice) {
        for_each_box(row, k, slice, [&](u32, int x, int y, int z) { tma_prefetch(map, x, y, z, batch); });
    }

    // Zeroes k from `valid` to `end`; the swizzle moves nothing out of a line. Contiguous along m or n only.
    static __device__ __forceinline__ void clear(u32 tile, u32 valid, u32 end, u32 thread, u32 threads) {
        u32 chunks = (end - valid) * (line_bytes / 16);
        for (u32 column = 0; column < columns; ++column) {
            for (u32 i = thread; i < chunks; i += threads) {
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + column * column_bytes +
                                                                              valid * line_bytes + i * 16),
                             "r"(0)
                             : "memory");
            }
        }
    }

    static __device__ __forceinline__ Descriptor<line_bytes> descriptor(u32 tile) {
        return {tile, mn_major ? column_bytes : 16};
    }

    // Where in the tile a k16 step begins.
    static __device__ __forceinline__ constexpr u32 step(u32 row, u32 k) {
        return mn_major ? row / width * column_bytes + k * line_bytes
                        : k / 64 * column_bytes + row * line_bytes + k % 64 * 2;
    }
};

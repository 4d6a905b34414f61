// One operand's tile in shared memory: how it is copied in, cleared past the end, and shown to the tensor cores.
#pragma once

#include "wgmma.cuh"

// `size` rows (m or n) by `depth` of k, in the 128-byte swizzle.
//   contiguous along k:       [depth / 64][size][64], copied in boxes of 64 k by rows
//   contiguous along m or n:  [size / 64][depth][64], copied in boxes of 64 rows by k
// `sharers` blocks of a cluster need the same tile: each copies one slice of it to all.
template <bool mn_major, u32 size, u32 depth, u32 sharers>
struct Tile {
    static constexpr u32 lines = (mn_major ? depth : size) / sharers;  // of 128 bytes, in one box
    static constexpr u32 boxes = (mn_major ? size : depth) / 64;
    static constexpr u32 box_bytes = (mn_major ? depth : size) * 128;
    static_assert(lines * sharers * 128 == box_bytes && lines % 8 == 0, "slices are whole periods of the swizzle");
    static_assert(lines <= 256, "a box has at most 256 lines");

    // `slice` is this block's among the sharers, which are the blocks first, first + stride, ... of the cluster.
    static __device__ __forceinline__ void load(u32 tile, const TensorMap& map, u32 barrier, int row, int k,
                                                int batch, u32 slice, u32 stride, u32 first) {
        u16 mask = 0;
        for (u32 i = 0; i < sharers; ++i) mask |= 1 << (first + i * stride);
#pragma unroll
        for (u32 box = 0; box < boxes; ++box) {
            u32 to = tile + box * box_bytes + slice * lines * 128;
            int x = mn_major ? row + box * 64 : k + box * 64;
            int y = mn_major ? k + slice * lines : row + slice * lines;
            if constexpr (sharers == 1) {
                copy_in(to, map, barrier, x, y, batch);
            } else {
                copy_in_multicast(to, map, barrier, x, y, batch, mask);
            }
        }
    }

    // Brings this block's slice into L2.
    static __device__ __forceinline__ void prefetch(const TensorMap& map, int row, int k, int batch, u32 slice) {
#pragma unroll
        for (u32 box = 0; box < boxes; ++box) {
            int x = mn_major ? row + box * 64 : k + box * 64;
            int y = mn_major ? k + slice * lines : row + slice * lines;
            prefetch_to_l2(map, x, y, batch);
        }
    }

    // Zeroes all k from `valid` on; the swizzle moves nothing out of a line. Contiguous along m or n only.
    static __device__ __forceinline__ void clear(u32 tile, u32 valid, u32 thread, u32 threads) {
        u32 chunks = (depth - valid) * 8;
        for (u32 box = 0; box < boxes; ++box) {
            for (u32 i = thread; i < chunks; i += threads) {
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + box * box_bytes + valid * 128 +
                                                                             i * 16),
                             "r"(0)
                             : "memory");
            }
        }
    }

    static __device__ __forceinline__ Descriptor descriptor(u32 tile) {
        return Descriptor(tile, mn_major ? box_bytes : 16);
    }

    // Where in the tile a k16 step begins.
    static __device__ __forceinline__ constexpr u32 step(u32 row, u32 k) {
        return mn_major ? row / 64 * box_bytes + k * 128 : k / 64 * box_bytes + row * 128 + k % 64 * 2;
    }
};

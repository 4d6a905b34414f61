// Which tiles of a grouped product on Hopper come next, where every group of rows has a matrix (groups.cuh).
//
// Every block makes a table of the groups in shared memory first. Grids are as large as they may have to be, since no
// host code knows the offsets.
#pragma once

#include "output_sm90.cuh"

__device__ __forceinline__ int* table_at(u32 shared) {
    return reinterpret_cast<int*>(__cvta_shared_to_generic(shared));
}

// The tiles of groups of rows: those of a group follow each other, in panels of `panel` rows of tiles, down the columns
// of one panel and then of the next. So a group of one panel reads its matrix from memory once, and a panel's rows
// do not flow through L2 again for each column of a large group. A tile that reaches past its group also loads other
// groups' rows, and drops their results. Rows are along m, or with TRANSPOSED along n.
template <typename Epilogue>
struct RowScheduler {
    static constexpr bool VARIED = false;
    static constexpr int TALL = TRANSPOSED ? BLOCK_N : BLOCK_M;
    static constexpr int WIDE = TRANSPOSED ? BLOCK_M : BLOCK_N * CLUSTER;
    static_assert(CLUSTER == 1 || !TRANSPOSED);

    u32 columns, count = 0, groups, panel;
    int last, wide, height;
    const int* tiles;  // the number of tiles of rows before each group, and that of all
    const int* ends;   // of the groups

    __device__ explicit RowScheduler(const Params& p)
        : columns(((TRANSPOSED ? p.m : p.n) + WIDE - 1) / WIDE), groups(p.groups.count), panel(p.group),
          last(last_tile_start<TRANSPOSED ? Epilogue::overlap_m : Epilogue::overlap_n,
                               TRANSPOSED ? BLOCK_M : BLOCK_N,
                               (TRANSPOSED ? A_MN : B_MN) ? 16 : (TRANSPOSED ? 1 : 8)>(TRANSPOSED ? p.m
                                                                                                  : p.n)),
          wide(TRANSPOSED ? p.m : p.n), height(MASKED ? p.groups.height() : 0) {}

    __device__ __forceinline__ void prepare(const Params& p, u32 shared) {
        int *before = table_at(shared), *end = before + groups + 1;
        for (u32 i = threadIdx.x; i < groups; i += THREADS) {
            end[i] = p.groups.end(i);
            before[i + 1] = (end[i] - p.groups.first(i) + TALL - 1) / TALL;
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            int sum = 0;
            for (u32 base = 0; base < groups; base += 32) {
                u32 i = base + threadIdx.x;
                int here = i < groups ? before[i + 1] : 0;
#pragma unroll
                for (int d = 1; d < 32; d *= 2) {
                    int left = __shfl_up_sync(0xFFFFFFFF, here, d);
                    if (threadIdx.x >= d) here += left;
                }
                __syncwarp();
                if (i < groups) before[i + 1] = sum + here;
                sum += __shfl_sync(0xFFFFFFFF, here, 31);
            }
            if (threadIdx.x == 0) before[0] = 0;
        }
        __syncthreads();
        tiles = before, ends = end;
        count = before[groups] * columns;
        write_zeros(p);
    }

    // Rows of no group.
    __device__ __forceinline__ void write_zeros(const Params& p) {
        using Out = Element<OUTPUT>;
        auto* out = static_cast<typename Out::Stored*>(p.out);
        if constexpr (MASKED) {
            constexpr int WARPS = THREADS / 32, TOGETHER = ALIGNED && OUTPUT != F32 ? 8 : 1;
            for (int row = blockIdx.x * WARPS + threadIdx.x / 32; row < p.groups.rows;
                 row += gridDim.x * WARPS) {
                if (row < ends[row / height]) continue;
                for (int i = threadIdx.x % 32 * TOGETHER; i < wide; i += 32 * TOGETHER) {
                    auto* to = out + row * p.row_stride + i;
                    if constexpr (TOGETHER == 8)
                        *reinterpret_cast<uint4*>(to) = uint4{};
                    else
                        *to = typename Out::Stored(0);
                }
            }
            return;
        }
        i64 first = groups == 0 ? 0 : p.groups.end(groups - 1), size = i64(p.groups.rows - first) * wide;
        for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < size; i += i64(gridDim.x) * THREADS) {
            out[(first + i / wide) * p.row_stride + i % wide] = typename Out::Stored(0);
        }
    }

    __device__ TileCoord at(u32 index, u32 rank) const {
        u32 group = 0;  // the last one whose tiles begin at `index` or before, and are not none
        for (u32 step = 1u << (31 - __clz(groups | 1)); step > 0; step /= 2)
            if (group + step < groups && tiles[group + step] * columns <= index) group += step;
        u32 before = tiles[group], rows = tiles[group + 1] - before;
        index -= before * columns;
        u32 above = 0;  // rows of tiles in the panels before
        if (rows > panel) {
            above = index / (panel * columns) * panel;
            index -= above * columns;
            rows = min(panel, rows - above);
        }
        u32 column = index / rows, row = above + index - column * rows;
        int start = (MASKED ? int(group) * height : group == 0 ? 0 : ends[group - 1]) + int(row) * TALL;
        int across = min(int((column * CLUSTER + rank) * (TRANSPOSED ? BLOCK_M : BLOCK_N)), last);
        if (TRANSPOSED) return {across, start, int(group), wide, ends[group]};
        return {start, across, int(group), ends[group], wide};
    }

    __device__ __forceinline__ KBlocks blocks(const Params& p, const TileCoord&) const {
        return KBlocks(p.k, nullptr, 0);
    }
    __device__ __forceinline__ u32 number_of_blocks(const Params& p, const TileCoord&) const {
        return KBlocks::count(p.k, nullptr, 0);
    }
};

// Grouped products on Hopper, for bf16 and f16 operands that TMA can read: a product for every group of rows,
// or a sum over every group of rows (groups.cuh). Each element is the chain of tensor_core_sm90.cu.
//
// Groups of rows: the tiles of a group follow each other, all its rows for each of its matrix's columns, so
// that the matrix is read from memory once. A tile that reaches past its group also loads other groups' rows,
// and drops their results. Groups of terms: k is a group's rows, in which each sequence begins a new block.
//
// Every block makes a table of the groups in shared memory first. Grids are as large as they may have to be,
// since no host code knows the offsets.
//
// Macros: those of tensor_core_sm90.cu, and
//   GROUPED   OF_ROWS or OF_TERMS; RAGGED with the latter. AHEAD is 0: offsets may not be read so early

#if !defined(INPUT_F16) || !defined(RAGGED) || !defined(GROUPED)
#error "INPUT_F16, RAGGED and GROUPED are needed: #if takes a missing macro for 0"
#endif

#include "output_sm90.cuh"

static_assert(AHEAD == 0 && (GROUPED == OF_TERMS) == RAGGED);

__device__ __forceinline__ int* table_at(u32 shared) {
    return reinterpret_cast<int*>(__cvta_shared_to_generic(shared));
}

#if GROUPED == OF_ROWS
// Rows are along m, or with TRANSPOSED along n.
struct Scheduler {
    static constexpr bool VARIED = false;
    static constexpr int TALL = TRANSPOSED ? BLOCK_N : BLOCK_M;
    static constexpr int WIDE = TRANSPOSED ? BLOCK_M : BLOCK_N * CLUSTER;
    static_assert(CLUSTER == 1 || !TRANSPOSED);

    u32 columns, count = 0, groups;
    int last, wide;
    const int* tiles;  // the number of tiles of rows before each group, and that of all
    const int* ends;   // of the groups

    __device__ explicit Scheduler(const Params& p)
        : columns(((TRANSPOSED ? p.m : p.n) + WIDE - 1) / WIDE), groups(p.groups.count),
          last(last_tile_start<!ACCUMULATE, TRANSPOSED ? BLOCK_M : BLOCK_N,
                               (TRANSPOSED ? A_MN : B_MN) ? 16 : (TRANSPOSED ? 1 : 8)>(TRANSPOSED ? p.m
                                                                                                  : p.n)),
          wide(TRANSPOSED ? p.m : p.n) {}

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
        i64 first = groups == 0 ? 0 : p.groups.end(groups - 1), size = i64(p.groups.rows - first) * wide;
        for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < size; i += i64(gridDim.x) * THREADS) {
            using Out = Element<OUTPUT>;
            static_cast<typename Out::Stored*>(p.out)[(first + i / wide) * p.row_stride + i % wide] =
                typename Out::Stored(0);
        }
    }

    __device__ TileCoord at(u32 index, u32 rank) const {
        u32 group = 0;  // the last one whose tiles begin at `index` or before, and are not none
        for (u32 step = 1u << (31 - __clz(groups | 1)); step > 0; step /= 2)
            if (group + step < groups && tiles[group + step] * columns <= index) group += step;
        u32 before = tiles[group], rows = tiles[group + 1] - before;
        index -= before * columns;
        u32 column = index / rows, row = index - column * rows;
        int start = (group == 0 ? 0 : ends[group - 1]) + int(row) * TALL;
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
#else
struct Scheduler : TileScheduler<Output> {
    static constexpr bool VARIED = true;
    const int* whole;  // without sequences, the first row and the end of every group

    __device__ explicit Scheduler(const Params& p) : TileScheduler<Output>(p), whole(nullptr) {}

    __device__ __forceinline__ void prepare(const Params& p, u32 shared) {
        if (p.groups.runs) return;
        int* table = table_at(shared);
        for (int i = threadIdx.x; i < p.groups.count; i += THREADS)
            table[2 * i] = p.groups.first(i), table[2 * i + 1] = p.groups.end(i);
        __syncthreads();
        whole = table;
    }

    __device__ __forceinline__ KBlocks blocks(const Params& p, const TileCoord& tile) const {
        if (whole) return KBlocks(p.k, whole + 2 * tile.batch, 1);
        return KBlocks(p.k, p.groups.bounds(tile.batch), p.groups.sequences(tile.batch));
    }
    __device__ __forceinline__ u32 number_of_blocks(const Params& p, const TileCoord& tile) const {
        if (whole) return KBlocks::count(p.k, whole + 2 * tile.batch, 1);
        return KBlocks::count(p.k, p.groups.bounds(tile.batch), p.groups.sequences(tile.batch));
    }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) grouped_sm90(const __grid_constant__ Params p) {
    pipeline<Output, Scheduler>(p);
    if (blockIdx.x == 0 && !p.groups.good(THREADS))
        asm volatile("trap;");  // a call would serialise wgmma (C7510)
}

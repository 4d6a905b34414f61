// Groups of rows, or of terms, between offsets on the device.
//
// Wrong offsets end in an assertion, or a trap, which block 0 makes. Until it stops the GPU nothing is read out of
// place: offsets outside of the rows are taken as the nearer end, a group that ends before it starts as empty.
#pragma once

#include "types.cuh"

// What a kernel's macro GROUPED may be: every group of rows has a matrix, every group of terms a result.
#define OF_ROWS 1
#define OF_TERMS 2

#ifndef MASKED
#define MASKED 0  // 1: every group has as many rows, and a result for the first offs[g] of them
#endif

extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line,
                                        const char* function, size_t char_size);

struct Groups {
    const int* offs;  // the ends of `count` groups; the first starts at 0. MASKED: the numbers of their rows
    const int* runs;  // the sequences of groups of terms: bounds() and sequences(); null: a group is one
    int count, rows;

    // The bounds of a group. Number `count` are the rows after the last offset; there are none from there on.
    __device__ __forceinline__ int first(int group) const {
        if (MASKED) return group * height();
        return group == 0 ? 0 : group > count ? rows : inside(offs[group - 1]);
    }
    __device__ __forceinline__ int end(int group) const {
        if (MASKED) return first(group) + min(max(offs[group], 0), height());
        return group >= count ? rows : max(inside(offs[group]), first(group));
    }
    // Rows that a group has, with those that are masked.
    __device__ __forceinline__ int height() const { return count > 0 ? rows / count : 0; }
    __device__ __forceinline__ int inside(int offset) const { return min(max(offset, 0), rows); }

    // The first rows of a group's sequences, and the end of the last one.
    __device__ __forceinline__ const int* bounds(int group) const { return runs + first(group) + group; }
    __device__ __forceinline__ int sequences(int group) const { return runs[rows + count + group]; }

    // Whether this thread's share of the offsets is in order. All threads of block 0 ask.
    __device__ __forceinline__ bool good(int threads) const {
        bool good = true;
        for (int i = threadIdx.x; i < count; i += threads)
            good = good && (MASKED || i == 0 ? 0 : offs[i - 1]) <= offs[i] &&
                   offs[i] <= (MASKED ? height() : rows);
        return good;
    }
    __device__ __forceinline__ void check(int threads) const {
        if (!good(threads))
            __assertfail("offs never decreases and lies within the number of rows", "samebits", 0, "", 1);
    }
};

// A tile of a group's own rows.
struct RowsOfTile {
    int group;       // Groups::count for rows after the last offset, more for a tile that does not exist
    int first, end;  // the tile's first row, and the end of the group

    // The `index`-th tile of `tile` rows, if every group is cut by itself. For a whole warp.
    __device__ __forceinline__ RowsOfTile(const Groups& groups, int tile, int index)
        : group(groups.count + 1), first(groups.rows), end(groups.rows) {
        const int lane = threadIdx.x % 32;
        for (int base = 0; base <= groups.count; base += 32) {
            const int from = groups.first(base + lane), to = groups.end(base + lane);
            const int tiles = (to - from + tile - 1) / tile;
            int sum = tiles;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int before = __shfl_up_sync(0xFFFFFFFF, sum, d);
                if (lane >= d) sum += before;
            }
            const u32 past = __ballot_sync(0xFFFFFFFF, sum > index);
            if (past) {
                const int found = __ffs(past) - 1;
                group = base + found;
                first = __shfl_sync(0xFFFFFFFF, from, found) +
                        (index - __shfl_sync(0xFFFFFFFF, sum - tiles, found)) * tile;
                end = __shfl_sync(0xFFFFFFFF, to, found);
                return;
            }
            index -= __shfl_sync(0xFFFFFFFF, sum, 31);
        }
    }
};

// The universal kernels compute a grouped product as a batch of others: with these changes of a block's
// parameters.

// Whether the block has a tile to compute. All its threads call it, and write +0 to rows of no group.
template <int HEIGHT, int WIDTH, int BLOCK, typename Params>
__device__ __forceinline__ bool take_rows(const Params& p, u32& group, int& first_row, int& end_row,
                                          int first_col, int out_bytes) {
    const RowsOfTile rows(p.groups, HEIGHT, first_row / HEIGHT);
    group = rows.group, first_row = rows.first, end_row = rows.end;
    if (rows.group == p.groups.count)
        for (int i = threadIdx.x; i < HEIGHT * WIDTH; i += BLOCK) {
            const int row = first_row + i / WIDTH, col = first_col + i % WIDTH;
            const i64 index = row * p.out_row + col * p.out_col;
            if (row >= end_row || col >= p.n) continue;
            if (out_bytes == 4)
                static_cast<u32*>(p.out)[index] = 0;
            else
                static_cast<u16*>(p.out)[index] = 0;
        }
    return rows.group < p.groups.count;
}

template <typename Params>
__device__ __forceinline__ void take_terms(Params& p, int group, int (&bounds)[2]) {
    if (p.groups.runs) {
        p.spans = p.groups.bounds(group), p.segments = p.groups.sequences(group);
    } else {
        bounds[0] = p.groups.first(group), bounds[1] = p.groups.end(group);
        p.spans = bounds, p.segments = 1;
    }
}

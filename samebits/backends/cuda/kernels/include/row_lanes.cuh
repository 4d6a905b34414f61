// Rows that lie in two dimensions, of which a warp may take several at a time.
//
// Macros, beside those of row_matrix.cuh
//   LANES    0, or how many lanes share a row: 8 for one block of 128 entries, 16 for two. Then a warp takes several
//            rows at a time, WARPS and PASSES are 1, and rows are aligned
#pragma once

#include "norm.cuh"

static_assert(LANES == 0 || (WARPS == 1 && PASSES == 1 && ALIGNED && !WHOLE));

// Rows in two dimensions: `inner` of them lie side by side, in steps of their own.
struct Steps {
    i64 outer, inner;
};

struct Spot {
    i64 outer, inner;

    __device__ __forceinline__ Spot(const Row& row, i64 rows, i64 of_inner) {
        const bool narrow = LANES > 0 && rows >> 31 == 0;  // a division of 64 bits takes as long as the rest
        outer = of_inner == 1 ? row.row : narrow ? u32(row.row) / u32(of_inner) : row.row / of_inner;
        inner = row.row - outer * of_inner;
    }

    template <class Stored>
    __device__ __forceinline__ Stored* in(Stored* matrix, Steps step) const {
        return matrix + outer * step.outer + inner * step.inner;
    }
};

// Finds this lane's row. Whether there is one: a lane without a row helps with sums.
__device__ __forceinline__ bool find_row(Row& row, i64 rows) {
    bool found = true;
    if constexpr (LANES > 0) {
        const i64 mine = row.row * (32 / LANES) + row.lane / LANES;
        found = mine < rows;
        row.row = found ? mine : rows - 1;
        row.first = row.lane % LANES / GROUP * contract::VOCAB_BLOCK + row.lane % GROUP * RUN;
    }
    return found;
}

// The sum of a row's terms.
template <class Terms>
__device__ __forceinline__ float sum_of_row(Row& row, Terms terms) {
    if constexpr (LANES == 0) return row.sum(terms);
    // Of 32 chains one or two have a block, and the others change nothing.
    float x[OWN];
    terms(0, x);
    const float block = row.block_sum(x);
    return LANES == 16 ? add_across(block, 8) : block;
}

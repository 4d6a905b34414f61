// What delta_scores_backward.cu leaves of a chunk, for one head: all that the pass over the chunks multiplies, but
// queries, keys and gradients. With tensor cores, the delta rule and one decay for each head.
#pragma once

#include "delta_backward.cuh"

constexpr int BLOCKS_OF_ROWS = CHUNK / 16;

// Right operands are of 16 rows i along k by 16 keys j, in the order of a warp's registers: of a thread 16 bytes.
struct Scores {
    uint4 scores[BLOCKS_OF_ROWS][BLOCKS_OF_ROWS][32];  // [rows, keys], of queries, times the scale
    uint4 weights[BLOCKS_OF_ROWS * (BLOCKS_OF_ROWS - 1) / 2][32];  // of keys, negative, below the diagonal
    float own[BLOCKS_OF_ROWS][16][16];                             // within a block, negative, [row, key]
    float betas[CHUNK], read[CHUNK];  // and by what updates' gradients are multiplied for the matrix's
    float since[CHUNK], left[CHUNK];  // decays from the chunk's start, times the scale, and to its end
    float kept, pad[3];               // of the matrix

    static __device__ __forceinline__ int below(int rows, int keys) { return rows * (rows - 1) / 2 + keys; }
};

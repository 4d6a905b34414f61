// What the pass over chunks with the delta rule has of queries and keys: delta_begin.cu or delta_prepare.cu leave it for
// delta_chunks.cu.
#pragma once

#include "delta.cuh"

// What the triangular system of a chunk has of its keys, for one head. Rows that are not there have weights of zero.
struct System {
#if !BY_CHANNEL
    // Decays from the chunk's start: their sums, and what is left. What of a row is left at the chunk's end.
    float sums[CHUNK], since[CHUNK], left[CHUNK];
#endif
    float betas[CHUNK];
    float own[CHUNK / 16][16][16];  // negated weights of [block, key, row] in the row's own block
    // Those of blocks before, rounded, as right operands of 16 x 16: of block 1, 2, 2, 3, 3, 3.
    uint4 earlier[6][32];
};

// Of its queries, rounded, up to the diagonal, as left operands of 16 x 16.
struct QueryScores {
    uint4 blocks[10][32];
};

// The groups of a product on Hopper that sums over every group's rows (groups.cuh): a table in shared memory, which
// every block makes first.
#pragma once

#include "row_groups_sm90.cuh"

// Of a group: where its sequences' bounds are, the number of sequences, and that of their parts along k, as a
// kernel cuts them.
struct TermGroup {
    const int* bounds;
    int sequences;
    u32 parts;
};

// For all threads of a block. `count(bounds, sequences)` is the number of parts, for a whole warp.
template <typename Count>
__device__ __forceinline__ const TermGroup* make_term_groups(const Groups& groups, u32 shared, Count count) {
    auto* table = reinterpret_cast<TermGroup*>(table_at(shared));
    auto* whole = reinterpret_cast<int*>(table + groups.count);  // of groups without sequences
    for (int i = threadIdx.x; i < groups.count; i += THREADS) {
        if (groups.runs) {
            table[i] = {groups.bounds(i), groups.sequences(i), 0};
        } else {
            whole[2 * i] = groups.first(i), whole[2 * i + 1] = groups.end(i);
            table[i] = {whole + 2 * i, 1, 0};
        }
    }
    __syncthreads();
    for (int i = threadIdx.x / 32; i < groups.count; i += THREADS / 32) {
        u32 parts = count(table[i].bounds, table[i].sequences);
        if (threadIdx.x % 32 == 0) table[i].parts = parts;
    }
    __syncthreads();
    return table;
}

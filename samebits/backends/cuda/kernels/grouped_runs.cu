// Where the sequences of every group's rows begin and end, for grouped products that sum over rows:
// Groups::runs of groups.cuh. A block takes a group, and goes through its rows.

#include "groups.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;

struct Params {
    const int* offs;
    int* runs;
    const int* sequences;  // of every row; a new one begins where two neighbours of a group differ
    int count, rows;
};

extern "C" __global__ void __launch_bounds__(THREADS) grouped_runs(const Params p) {
    __shared__ int of_warps[2][WARPS];
    const Groups groups{p.offs, nullptr, p.count, p.rows};
    const int group = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = groups.first(group), end = groups.end(group);
    int* const bounds = p.runs + first + group;
    int found = 0;
    for (int base = first, turn = 0; base < end; base += THREADS, turn ^= 1) {
        const int row = base + threadIdx.x;
        const bool begins = row < end && (row == first || p.sequences[row] != p.sequences[row - 1]);
        const u32 begin = __ballot_sync(0xFFFFFFFF, begins);
        if (lane == 0) of_warps[turn][warp] = __popc(begin);
        __syncthreads();  // two turns' counts: none is overwritten before all have read it
        int before = 0, all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            before += w < warp ? of_warps[turn][w] : 0;
            all += of_warps[turn][w];
        }
        if (begins) bounds[found + before + __popc(begin & ((1u << lane) - 1))] = row;
        found += all;
    }
    if (threadIdx.x == 0) bounds[found] = end, p.runs[p.rows + p.count + group] = found;
}

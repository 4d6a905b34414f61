// Linear attention without the delta rule, the first of three launches: decays of all chunks, side by side.
//
// docs/contract.md, "Recurrent layers", has the sums. A warp takes one head in one chunk. It also sets aside the rows of
// the open chunk that a state had, for linear_states.cu puts others in their place while blocks of linear_rows.cu
// still need them.
//
// Macros: TYPE, KEY_SIZE, WARPS, HARDWARE_EXP2 and WEIGHTED are those of delta.cu.

#include "linear_begin.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) linear_begin(const __grid_constant__ Params p) {
    const int place = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int sequence = sequence_of(p, place);
    const float* state = p.state ? p.state + sequence * p.words : nullptr;
    const Chunks mine(p, sequence, state ? min(max(int(state[0]), 0), CHUNK) : 0);
    const int chunk = place - first_chunk(mine.begin, sequence);
    if (head >= p.heads || chunk < 0) return;
    if (state && chunk == 0 && head == 0 && lane == 0) p.counts[sequence] = mine.before;
    if (chunk >= mine.number()) return;

    const i64 index = i64(place) * p.heads + head;
    find_decays(p, mine, chunk, head, state, index, p.decays[index]);
    if (const int first = mine.first(chunk)) copy_opened(p, sequence, head, state, first);
}

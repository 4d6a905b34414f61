// Linear attention without the delta rule, the first of three launches: decays of all chunks, side by side.
//
// docs/contract.md, "Recurrent layers", has the sums. A warp takes one head in one chunk. It also sets aside the rows of
// the open chunk that a state had, for linear_states.cu puts others in their place while blocks of linear_rows.cu
// still need them.
//
// Macros: TYPE, KEY_SIZE, WARPS, HARDWARE_EXP2 and WEIGHTED are those of delta.cu.

#include "linear.cuh"

// By one warp.
__device__ __forceinline__ void copy_words(Stored* to, const float* from, int elements) {
#pragma unroll 8
    for (int x = threadIdx.x % 32; x < (elements * SIZE + 3) / 4; x += 32)
        reinterpret_cast<float*>(to)[x] = from[x];
}

extern "C" __global__ void __launch_bounds__(THREADS) linear_begin(const __grid_constant__ Params p) {
    const int place = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int sequence = sequence_of(p, place);
    const float* state = p.state ? p.state + sequence * p.words : nullptr;
    const Chunks mine(p, sequence, state ? min(max(int(state[0]), 0), CHUNK) : 0);
    const int chunk = place - first_chunk(mine.begin, sequence);
    if (head >= p.heads || chunk < 0) return;
    if (state && chunk == 0 && head == 0 && lane == 0) p.counts[sequence] = mine.before;
    if (chunk >= mine.number()) return;

    const int first = mine.first(chunk), count = mine.count(chunk);
    const float* decays = first ? state + p.decays_at + head * CHUNK : nullptr;
    float sums[2], sum = first ? decays[first - 1] : 0.0f;
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        const int i = x * 32 + lane;
        const bool given = p.g && i >= first && i < count;
        const i64 at = (mine.token(chunk) + i) * p.g_token + head * p.g_head;
        sums[x] = given ? __fmul_rn(p.g[at], contract::LOG2E) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        sum = __fadd_rn(sum, __shfl_sync(0xFFFFFFFF, sums[i / 32], i % 32));
        if (i % 32 == lane) sums[i / 32] = sum;
    }
    const i64 index = i64(place) * p.heads + head;
    const int full = mine.before / CHUNK;  // chunks that records leave out
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        const int i = x * 32 + lane;
        const float own = i < first ? decays[i] : sums[x];
        p.decays[index].sums[i] = own;
        float left = i < count ? exp2_of(__fsub_rn(sum, own)) : 0.0f;
        const bool keeps = p.records && chunk >= full && i < count;
        const Record record(p.records, index - i64(full) * p.heads, p.key_size, p.size);
        if (keeps) record.decays[i] = own;
#if WEIGHTED
        const i64 at = (mine.token(chunk) + i) * p.weight_token + head * p.weight_head;
        const float weight = i < first   ? state[p.row_weights + head * CHUNK + i]
                             : i < count ? p.weights[at]
                                         : 0.0f;
        p.decays[index].weights[i] = weight, left = i < count ? __fmul_rn(left, weight) : 0.0f;
        if (keeps) record.weights[i] = weight;
#endif
        p.decays[index].left[i] = left;
    }
    if (!first) return;
    copy_words(opened_keys(p, sequence, head), state + p.keys + i64(head) * CHUNK * p.key_size * SIZE / 4,
               first * p.key_size);
    copy_words(opened_updates(p, sequence, head), state + p.updates + i64(head) * CHUNK * p.size * SIZE / 4,
               first * p.size);
}

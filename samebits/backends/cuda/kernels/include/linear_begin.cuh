// What comes first of linear attention by chunks, for one head of one chunk, by one warp: linear_begin.cu, delta_begin.cu.
#pragma once

#include "linear.cuh"

// The chunk's decays and weights, which gradients keep in its record. Its `index` is that of its place and head.
__device__ __forceinline__ void find_decays(const Params& p, const Chunks& mine, int chunk, int head,
                                            const float* state, i64 index, Decays& to) {
    const int lane = threadIdx.x % 32, first = mine.first(chunk), count = mine.count(chunk);
    const float* decays = first ? state + p.decays_at + head * CHUNK : nullptr;
    float gammas[2], sums[2], sum = first ? decays[first - 1] : 0.0f;
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        const int i = x * 32 + lane;
        const bool given = p.g && i >= first && i < count;
        const i64 at = (mine.token(chunk) + i) * p.g_token + head * p.g_head;
        gammas[x] = given ? __fmul_rn(p.g[at], contract::LOG2E) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        sum = __fadd_rn(sum, __shfl_sync(0xFFFFFFFF, gammas[i / 32], i % 32));
        if (i % 32 == lane) sums[i / 32] = sum;
    }
    const int full = mine.before / CHUNK;  // chunks that records leave out
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        const int i = x * 32 + lane;
        const float own = i < first ? decays[i] : sums[x];
        to.sums[i] = own;
        float left = i < count ? exp2_of(__fsub_rn(sum, own)) : 0.0f;
        const bool keeps = p.records && chunk >= full && i < count;
        const Record record(p.records, index - i64(full) * p.heads, p.key_size, p.size);
        if (keeps) record.decays[i] = own;
#if WEIGHTED
        const i64 at = (mine.token(chunk) + i) * p.weight_token + head * p.weight_head;
        const float weight = i < first   ? state[p.row_weights + head * CHUNK + i]
                             : i < count ? p.weights[at]
                                         : 0.0f;
        to.weights[i] = weight, left = i < count ? __fmul_rn(left, weight) : 0.0f;
        if (keeps) record.weights[i] = weight;
#endif
        to.left[i] = left;
    }
}

__device__ __forceinline__ void copy_words(Stored* to, const float* from, int elements) {
#pragma unroll 8
    for (int x = threadIdx.x % 32; x < (elements * SIZE + 3) / 4; x += 32)
        reinterpret_cast<float*>(to)[x] = from[x];
}

// Sets the rows aside that a state had of its open chunk.
__device__ __forceinline__ void copy_opened(const Params& p, int sequence, int head, const float* state,
                                            int rows) {
    copy_words(opened_keys(p, sequence, head), state + p.keys + i64(head) * CHUNK * p.key_size * SIZE / 4,
               rows * p.key_size);
    copy_words(opened_updates(p, sequence, head), state + p.updates + i64(head) * CHUNK * p.size * SIZE / 4,
               rows * p.size);
}

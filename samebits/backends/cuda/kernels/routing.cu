// The experts of tokens and their weights, from a router's logits: docs/contract.md, "Routing".
//
// A warp has a token. Lane l holds the logits of the experts l, l + 32, ..., so a block of 128 of the contract is four
// of each lane, and halves meet first in a lane, then across lanes. Lane j keeps what was chosen j-th.
//
// An expert is chosen by an unsigned number that is ordered as scores are, with one zero and one NaN, which is the
// largest: first the largest number of all lanes, then the lowest expert that has it. What is chosen becomes 0, which
// is below -inf.
//
// Macros
//   IN, OUT   types of logits and weights: F32, BF16 or F16
//   SCORE     SOFTMAX, SIGMOID or LOGITS
//   BLOCKS    of 128 experts: 1, 2, 4 or 8
//   GROUPED   1: experts are chosen within groups

#define SOFTMAX 0
#define SIGMOID 1
#define LOGITS 2

#include "activations.cuh"
#include "convert.cuh"
#include "launch.cuh"

using In = Element<IN>;
using Out = Element<OUT>;

constexpr int WARPS = 4, EACH = 4 * BLOCKS;  // experts of a lane
constexpr u32 ALL = 0xFFFFFFFF;

static_assert(contract::VOCAB_BLOCK == 128 && BLOCKS <= contract::CHAINS);

struct Params {
    const In::Stored* logits;
    const float* bias;  // or null
    Out::Stored* weights;
    i64* experts;
    i64 row, tokens;  // entries from row to row of the logits
    int count, k;     // experts, and those of a token
    int groups, top_groups, renormalize;
    float eps, scale;
};

__device__ __forceinline__ u32 order_of(float x) {
    const int bits = __float_as_int(__fadd_rn(x, 0.0f));
    return x != x ? ALL : bits < 0 ? ~u32(bits) : u32(bits) | 0x80000000;
}

__device__ __forceinline__ float ordered(u32 x) {
    return __uint_as_float(x == ALL ? 0x7FFFFFFF : x & 0x80000000 ? x & 0x7FFFFFFF : ~x);
}

constexpr u32 HIDDEN = 0x007FFFFF;  // order_of(-INF)

__device__ __forceinline__ u32 largest_of_lanes(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL, x);
#else
#pragma unroll
    for (int half = 16; half > 0; half /= 2) x = max(x, __shfl_xor_sync(ALL, x, half));
    return x;
#endif
}

// The softmax of entries of which lane l has those from l on, every 32nd. Others are -inf.
template <int blocks>
__device__ __forceinline__ void softmax(float (&z)[4 * blocks]) {
    float m[blocks], chains[blocks], largest = -INF;
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
        m[b] = contract::maximum(contract::maximum(z[4 * b], z[4 * b + 1]),
                                 contract::maximum(z[4 * b + 2], z[4 * b + 3]));
        m[b] = contract::maximum_of_lanes(m[b]);
        largest = contract::maximum(largest, m[b]);
    }
    const float shift = contract::shift_of(largest);
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
        const float beside = contract::shift_of(m[b]);
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) e[i] = contract::exp(__fsub_rn(z[4 * b + i], beside));
        chains[b] = __fmaf_rn(contract::sum_by_halves<32, 1>(e), contract::exp(__fsub_rn(m[b], shift)), 0.0f);
    }
    contract::add_halves<blocks / 2, 1>(chains);
#pragma unroll
    for (int i = 0; i < 4 * blocks; ++i)
        z[i] = contract::canonical(__fdiv_rn(contract::exp(__fsub_rn(z[i], shift)), chains[0]));
}

// Takes the largest of all lanes out, the lowest of equal ones. Returns its number.
template <int count>
__device__ __forceinline__ int take_largest(u32 (&order)[count], int lane) {
    u32 own = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) own = max(own, order[i]);
    const u32 largest = largest_of_lanes(own);
    u32 first = 0;  // of this lane, counted down from ALL
#pragma unroll
    for (int i = count - 1; i >= 0; --i) first = order[i] == largest ? ALL - u32(i * 32 + lane) : first;
    const int found = int(ALL - largest_of_lanes(first));
#pragma unroll
    for (int i = 0; i < count; ++i)
        if (found == i * 32 + lane) order[i] = 0;
    return found;
}

// Hides experts outside of the groups with the largest sums of their two largest.
__device__ __forceinline__ void hide_groups(const Params& p, u32 (&order)[EACH], u32* all, int lane) {
    const int size = p.count / p.groups;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (i * 32 + lane < p.count) all[i * 32 + lane] = order[i];
    __syncwarp();
    u32 sum[1] = {0};
    if (lane < p.groups) {
        u32 first = 0, second = 0;
        int at = lane % size;  // lanes begin at several banks
        for (int i = 0; i < size; ++i) {
            const u32 x = all[lane * size + at];
            second = max(second, min(first, x)), first = max(first, x);
            at = at + 1 == size ? 0 : at + 1;
        }
        sum[0] = order_of(__fadd_rn(ordered(first), ordered(second)));
    }
    u32 shown = 0;
    for (int i = 0; i < p.top_groups; ++i) shown |= 1u << take_largest(sum, lane);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int expert = i * 32 + lane;
        if (expert < p.count && !(shown >> expert / size & 1)) order[i] = HIDDEN;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) topk_routing(const __grid_constant__ Params p) {
    const int lane = threadIdx.x % 32;
    const i64 token = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (token >= p.tokens) return;
    float scores[EACH];
    const In::Stored* logits = p.logits + token * p.row;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int expert = i * 32 + lane;
        scores[i] = expert < p.count ? In::widen(logits[expert]) : -INF;
    }
    if constexpr (SCORE == SOFTMAX) softmax<BLOCKS>(scores);
    u32 order[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int expert = i * 32 + lane;
        if constexpr (SCORE == SIGMOID) scores[i] = contract::canonical(contract::sigmoid(scores[i]));
        float x = scores[i];
        if (SCORE != LOGITS && p.bias && expert < p.count) x = __fadd_rn(x, p.bias[expert]);
        order[i] = expert < p.count ? order_of(x) : 0;
    }
#if GROUPED
    __shared__ u32 all[WARPS][32 * EACH];
    hide_groups(p, order, all[threadIdx.x / 32], lane);
#endif
    float own = SCORE == LOGITS ? -INF : 0.0f;
    int chosen = 0;
    for (int j = 0; j < p.k; ++j) {
        const int expert = take_largest(order, lane);
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) score = expert == i * 32 + lane ? scores[i] : score;
        score = __shfl_sync(ALL, score, expert % 32);
        if (lane == j) own = score, chosen = expert;
    }
    if constexpr (SCORE == LOGITS) {
        float z[4] = {own, -INF, -INF, -INF};
        softmax<1>(z);
        own = z[0];
    } else {
        if (p.renormalize) {
            const float total = contract::sum_of_lanes<16>(own);
            own = __fdiv_rn(own, __fadd_rn(total, p.eps));
        }
        own = __fmul_rn(own, p.scale);
    }
    if (lane < p.k) {
        p.weights[token * p.k + lane] = Out::narrow(contract::canonical(own));
        p.experts[token * p.k + lane] = chosen;
    }
}

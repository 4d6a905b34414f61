// Log-probabilities from logits in memory, in f32 and in the order of docs/contract.md, "Log-probabilities".
//
//   block_statistics   a warp takes a block of 128 entries of the vocabulary
//   combine            a warp takes the statistics of a row, a lane a chain
//   combine_few        a block takes them: all of it weighs, 1024 blocks at a time through shared memory; one
//                      warp sums
//   combine_ids        a block takes them likewise, and then the logits of several ids of its row
//   grad_logits        a thread takes eight logits
//   first_unknown      a few blocks look for a target that is neither ignored nor in the vocabulary
//
// Macros
//   LOGITS, GRADS   types of logits and of their gradients: F32, BF16 or F16
//   ENTROPY         1: also what entropies need

#include "convert.cuh"
#include "logp.cuh"

using contract::VOCAB_BLOCK;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

using Logits = Element<LOGITS>;
using Grads = Element<GRADS>;

constexpr int LANE =
    VOCAB_BLOCK / 32;  // entries of a block that a lane has: 32 apart, so that halves meet in it

struct StatisticsParams {
    const Logits::Stored* logits;
    i64 logits_row;
    const i64* target;  // null: there is none
    float *m, *s, *u;   // from the first of these blocks on
    float* target_logit;
    i64 first, width;  // of the entries that `logits` has
    int blocks;        // in a row of m, s and u
    float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    block_statistics(const __grid_constant__ StatisticsParams p) {
    const u32 groups = u32((p.width + WARPS * VOCAB_BLOCK - 1) / (WARPS * VOCAB_BLOCK));
    const i64 row = blockIdx.x / groups, block = (blockIdx.x % groups) * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const i64 v = block * VOCAB_BLOCK + lane;
    if (block * VOCAB_BLOCK >= p.width) return;

    const Logits::Stored* logits = p.logits + row * p.logits_row;
    float z[LANE];
#pragma unroll
    for (int i = 0; i < LANE; ++i)
        z[i] = v + 32 * i < p.width ? __fmul_rn(Logits::widen(logits[v + 32 * i]), p.scale) : -INF;
    if (p.target) {
        const i64 target = p.target[row] - p.first;
#pragma unroll
        for (int i = 0; i < LANE; ++i)
            if (v + 32 * i == target && target < p.width) p.target_logit[row] = z[i];
    }

    const auto found = contract::block_statistics<32, 1, ENTROPY>(z);
    if (lane > 0) return;
    const i64 at = row * p.blocks + block;
    p.m[at] = found.m;
    p.s[at] = found.s;
    if (ENTROPY) p.u[at] = found.u;
}

struct CombineParams {
    const float *m, *s, *u, *target_logit;
    const i64* target;
    float *logp, *entropy, *shift, *log_sum;
    i64 vocabulary, ignore_index;
    int rows, blocks;
};

// A row's results, from the sums over its blocks.
__device__ __forceinline__ void finish(const CombineParams& p, i64 row, float shift, float sum, float u) {
    const i64 target = p.target[row];
    const bool ignored = target == p.ignore_index, known = target >= 0 && target < p.vocabulary;
    const float log_sum = contract::canonical(contract::log(sum)), nan = __int_as_float(0x7FFFFFFF);
    p.shift[row] = contract::canonical(shift);
    p.log_sum[row] = log_sum;
    if (ignored)
        p.logp[row] = 0.0f;
    else
        p.logp[row] =
            known ? contract::canonical(__fsub_rn(__fsub_rn(p.target_logit[row], shift), log_sum)) : nan;
    if (ENTROPY) {
        const float entropy = __fsub_rn(log_sum, __fdiv_rn(u, sum));
        p.entropy[row] = ignored ? 0.0f : known ? contract::canonical(entropy) : nan;
    }
}

// A warp for each row, a lane for each chain.
extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ CombineParams p) {
    static_assert(contract::CHAINS == 32);
    const i64 row = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= p.rows) return;
    const i64 start = row * p.blocks;

    // Unrolled, so that many loads are under way at once.
    float largest = -INF;
#pragma unroll 8
    for (int b = lane; b < p.blocks; b += 32) largest = contract::maximum(largest, p.m[start + b]);
    const float shift = contract::shift_of(contract::maximum_of_lanes(largest));
    float s_chain = 0.0f, u_chain = 0.0f;
#pragma unroll 8
    for (int b = lane; b < p.blocks; b += 32) {
        const float s = p.s[start + b], a = __fsub_rn(p.m[start + b], shift), w = contract::exp(a);
        s_chain = __fmaf_rn(s, w, s_chain);
        if (ENTROPY && w != 0.0f) u_chain = __fmaf_rn(__fmaf_rn(a, s, p.u[start + b]), w, u_chain);
    }
    const float sum = contract::sum_of_lanes(s_chain);
    const float u = ENTROPY ? contract::sum_of_lanes(u_chain) : 0.0f;
    if (lane == 0) finish(p, row, shift, sum, u);
}

constexpr int PIECE = 1024;  // blocks of the vocabulary that are weighed at once

struct RowSums {
    float shift, sum, u;  // the sums in the first warp alone
};

// The sums over a row's blocks by a block of threads: all of it loads and weighs, and each lane of its first warp
// keeps a chain.
__device__ __forceinline__ RowSums sums_of_row(const float* m, const float* s, const float* u, int blocks) {
    static_assert(contract::CHAINS == 32 && PIECE % contract::CHAINS == 0);
    __shared__ float maxima[32], weights[PIECE], sums[PIECE], products[ENTROPY ? PIECE : 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // Unrolled, so that many loads are under way at once.
    float largest = -INF;
#pragma unroll 8
    for (int b = threadIdx.x; b < blocks; b += THREADS) largest = contract::maximum(largest, m[b]);
    largest = contract::maximum_of_lanes(largest);
    if (lane == 0) maxima[warp] = largest;
    __syncthreads();
    const float shift = contract::shift_of(contract::maximum_of_lanes(maxima[lane % WARPS]));

    float s_chain = 0.0f, u_chain = 0.0f;
    for (int first = 0; first < blocks; first += PIECE) {
        const int count = min(PIECE, blocks - first);
#pragma unroll
        for (int i = 0; i < PIECE / THREADS; ++i) {
            const int at = threadIdx.x + i * THREADS;
            if (at >= count) break;
            const int b = first + at;
            const float a = __fsub_rn(m[b], shift);
            sums[at] = s[b];
            weights[at] = contract::exp(a);
            if (ENTROPY) products[at] = __fmaf_rn(a, s[b], u[b]);
        }
        __syncthreads();
        if (warp == 0) {
#pragma unroll 8
            for (int at = lane; at < count; at += 32) {
                const float w = weights[at];
                s_chain = __fmaf_rn(sums[at], w, s_chain);
                if (ENTROPY && w != 0.0f) u_chain = __fmaf_rn(products[at], w, u_chain);
            }
        }
        __syncthreads();
    }
    if (warp > 0) return {shift, 0.0f, 0.0f};
    return {shift, contract::sum_of_lanes(s_chain), ENTROPY ? contract::sum_of_lanes(u_chain) : 0.0f};
}

extern "C" __global__ void __launch_bounds__(THREADS) combine_few(const __grid_constant__ CombineParams p) {
    const i64 row = blockIdx.x, start = row * p.blocks;
    const RowSums found = sums_of_row(p.m + start, p.s + start, p.u + start, p.blocks);
    if (threadIdx.x == 0) finish(p, row, found.shift, found.sum, found.u);
}

struct IdsParams {
    const float *m, *s;
    const Logits::Stored* logits;
    const void* ids;
    float* out;
    i64 logits_row, ids_row, vocabulary;
    int count, blocks;  // ids of a row, and blocks of the vocabulary
    int wide;           // 1: ids have 64 bits, else 32
};

extern "C" __global__ void __launch_bounds__(THREADS) combine_ids(const __grid_constant__ IdsParams p) {
    __shared__ float log_sum_of_row;
    const i64 row = blockIdx.x, start = row * p.blocks;
    const RowSums found = sums_of_row(p.m + start, p.s + start, nullptr, p.blocks);
    if (threadIdx.x == 0) log_sum_of_row = contract::log(found.sum);
    __syncthreads();
    const float log_sum = log_sum_of_row, nan = __int_as_float(0x7FFFFFFF);
    for (int i = threadIdx.x; i < p.count; i += THREADS) {
        const i64 at = row * p.ids_row + i;
        const i64 id = p.wide ? static_cast<const i64*>(p.ids)[at] : static_cast<const int*>(p.ids)[at];
        float y = nan;
        if (id >= 0 && id < p.vocabulary) {
            const float z = Logits::widen(p.logits[row * p.logits_row + id]);
            y = contract::canonical(__fsub_rn(__fsub_rn(z, found.shift), log_sum));
        }
        p.out[row * p.count + i] = y;
    }
}

struct GradParams {
    const Logits::Stored* logits;
    i64 logits_row;
    const i64* target;
    const float *shift, *log_sum, *entropy, *grad, *grad_entropy;
    Grads::Stored* out;
    i64 out_row, first, width, vocabulary, ignore_index;
    float scale;
};

constexpr int GRADS_PER_THREAD = 8;

extern "C" __global__ void __launch_bounds__(THREADS) grad_logits(const __grid_constant__ GradParams p) {
    const u32 groups = u32((p.width + THREADS * GRADS_PER_THREAD - 1) / (THREADS * GRADS_PER_THREAD));
    const i64 row = blockIdx.x / groups,
              v = i64(blockIdx.x % groups) * THREADS * GRADS_PER_THREAD + threadIdx.x;
    const contract::RowGradient<ENTROPY> gradient(p, row);
    const Logits::Stored* logits = p.logits + row * p.logits_row;
    Grads::Stored* out = p.out + row * p.out_row;
    // All are loaded before the first is used, so that many loads are under way at once.
    float z[GRADS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < GRADS_PER_THREAD; ++i)
        z[i] = v + i * THREADS < p.width ? Logits::widen(logits[v + i * THREADS]) : 0.0f;
#pragma unroll
    for (int i = 0; i < GRADS_PER_THREAD; ++i) {
        const i64 at = v + i * THREADS;
        if (at >= p.width) return;
        const float dz = gradient.at(__fmul_rn(z[i], p.scale), at + p.first == gradient.target);
        out[at] = Grads::narrow(contract::canonical(dz));
    }
}

struct TargetParams {
    const i64* target;
    i64* first;  // of every block
    i64 count, vocabulary, ignore_index;
};

// The first target that each block finds to be neither ignored nor in the vocabulary; `count` if there is
// none.
extern "C" __global__ void __launch_bounds__(THREADS) first_unknown(const __grid_constant__ TargetParams p) {
    __shared__ i64 found[WARPS];
    i64 first = p.count;
#pragma unroll 4
    for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < p.count; i += i64(gridDim.x) * THREADS) {
        const i64 target = p.target[i];
        if ((target < 0 || target >= p.vocabulary) && target != p.ignore_index) first = min(first, i);
    }
#pragma unroll
    for (int half = 16; half > 0; half /= 2) first = min(first, __shfl_xor_sync(0xFFFFFFFF, first, half));
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = first;
    __syncthreads();
    if (threadIdx.x > 0) return;
#pragma unroll
    for (int i = 1; i < WARPS; ++i) first = min(first, found[i]);
    p.first[blockIdx.x] = first;
}

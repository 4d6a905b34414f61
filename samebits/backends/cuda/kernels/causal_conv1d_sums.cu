// Gradients of weights and biases of short causal convolutions: docs/contract.md, "Convolutions".
//
// Each is one chain over the tokens of all rows, in order. A block takes some channels, in two halves: a thread of the
// first has a channel's first taps, and one of the second the others and the bias. Stages of TOKENS tokens go round in
// shared memory; what taps see of the stage before is in registers.
//
// Macros
//   VALUE         type of all tensors: F32, BF16 or F16
//   TAPS          weights of a channel
//   VECTOR        entries of one access to memory: 16 bytes' worth, or 1
//   OF_CHANNELS   whether channels lie side by side, and not tokens
//   PACKED        whether rows consist of several sequences
//   CHANNELS, TOKENS, DEPTH   of a block; of a stage, a multiple of 8; and stages

#include "convert.cuh"
#include "functions.cuh"
#include "launch.cuh"
#include "ptx_sm80.cuh"
#include "vectors.cuh"

using Value = Element<VALUE>;
using Stored = Value::Stored;

constexpr int THREADS = 2 * CHANNELS;
constexpr int LAGS = TAPS - 1;
constexpr int SIDE = 16 / int(sizeof(Stored));  // entries of 16 bytes
constexpr int AHEAD = 8;                        // tokens that a thread reads at once

// Rows of shared memory: of a token's channels, or of a channel's tokens, which begin at other banks each.
constexpr int ROWS = OF_CHANNELS ? TOKENS : CHANNELS, COLUMNS = OF_CHANNELS ? CHANNELS : TOKENS;
constexpr int PITCH = OF_CHANNELS ? COLUMNS : (COLUMNS / SIDE | 1) * SIDE;

struct Stage {
    alignas(16) Stored grad[ROWS * PITCH];
    alignas(16) Stored x[ROWS * PITCH];
    alignas(16) int at[PACKED ? TOKENS : 4];
};

struct Params {
    const Stored *grad, *x, *before;  // without states before: null
    const int* at;                    // with PACKED: how many tokens lie before each in its sequence
    Stored *of_weight, *of_bias;      // null: this one is not asked for
    i64 grad_batch, grad_channel, grad_token, x_batch, x_channel, x_token;
    i64 before_batch, before_channel, before_token;
    int rows, channels, tokens;
};

// Copies a stage's part of a tensor, of which `from` has the first entry. What lies beyond it is left out.
__device__ __forceinline__ void copy(Stored* to, const Stored* from, i64 by_channel, i64 by_token,
                                     int channels, int tokens) {
    constexpr int ACROSS = COLUMNS / VECTOR, DOWN = THREADS / ACROSS,
                  UNROLLED = VECTOR == 1 ? 4 : ROWS / DOWN;
    const i64 by_row = OF_CHANNELS ? by_token : by_channel, by_column = OF_CHANNELS ? by_channel : by_token;
    const int row = threadIdx.x / ACROSS, column = threadIdx.x % ACROSS * VECTOR;
    const int rows = column < (OF_CHANNELS ? channels : tokens) ? OF_CHANNELS ? tokens : channels : 0;
    from += row * by_row + column * by_column;
    to += row * PITCH + column;
#pragma unroll UNROLLED
    for (int r = 0; r < ROWS; r += DOWN, from += DOWN * by_row, to += DOWN * PITCH)
        if (row + r < rows) {
#if __CUDA_ARCH__ >= 800
            if constexpr (VECTOR > 1)
                cp_async_16(shared_address(to), from);
            else
#endif
                copy_values<Value, VECTOR>(from, to);
        }
}

// Neighbouring tokens of a channel.
__device__ __forceinline__ void read(const Stored* from, int first, int c, float (&x)[AHEAD]) {
    if constexpr (OF_CHANNELS) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) x[i] = Value::widen(from[(first + i) * PITCH + c]);
    } else {
        load_values<Value>(from + c * PITCH + first, x);
    }
}

// A thread's chains: of taps from FIRST to END, and of the bias.
template <int FIRST, int END, bool BIAS>
struct Chains {
    float sums[END - FIRST + BIAS] = {};
    float seen[LAGS + AHEAD];  // the tokens before, and those that are added

    // A row begins.
    __device__ __forceinline__ void start(const Params& p, int row, int channel) {
#pragma unroll
        for (int j = 0; j < LAGS; ++j)
            seen[j] =
                p.before && channel < p.channels
                    ? Value::widen(
                          p.before[row * p.before_batch + channel * p.before_channel + j * p.before_token])
                    : 0.0f;
    }

    // `count` tokens of a stage. The next ones are read while some are added.
    __device__ __forceinline__ void add(const Stage& stage, int c, int count) {
        float grads[AHEAD], x[AHEAD];
        read(stage.grad, 0, c, grads), read(stage.x, 0, c, x);
#pragma unroll 2
        for (int first = 0; first < count; first += AHEAD) {
            float g[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) g[i] = grads[i], seen[LAGS + i] = x[i];
            const int next = min(first + AHEAD, TOKENS - AHEAD);
            read(stage.grad, next, c, grads), read(stage.x, next, c, x);
            if (first + AHEAD <= count)
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) add(stage, first, i, g[i]);
            else
#pragma unroll
                for (int i = 0; i < AHEAD; ++i)
                    if (first + i < count) add(stage, first, i, g[i]);
#pragma unroll
            for (int j = 0; j < LAGS; ++j) seen[j] = seen[AHEAD + j];
        }
    }

    __device__ __forceinline__ void add(const Stage& stage, int first, int i, float g) {
#pragma unroll
        for (int k = FIRST; k < END; ++k) {
            const bool beyond = PACKED && LAGS - k > stage.at[first + i];
            sums[k - FIRST] = __fadd_rn(sums[k - FIRST], __fmul_rn(beyond ? 0.0f : seen[k + i], g));
        }
        if constexpr (BIAS) sums[END - FIRST] = __fadd_rn(sums[END - FIRST], g);
    }

    __device__ __forceinline__ void store(const Params& p, int channel) const {
        if (channel >= p.channels) return;
        if (p.of_weight)
#pragma unroll
            for (int k = FIRST; k < END; ++k)
                p.of_weight[i64(channel) * TAPS + k] = Value::narrow(contract::canonical(sums[k - FIRST]));
        if constexpr (BIAS)
            if (p.of_bias) p.of_bias[channel] = Value::narrow(contract::canonical(sums[END - FIRST]));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) causal_conv1d_sums(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Stage* const stages = reinterpret_cast<Stage*>(bytes);
    let_kernel_behind_start();
    const int channel = int(blockIdx.x) * CHANNELS, c = threadIdx.x % CHANNELS;
    const i64 all = i64(p.rows) * ((p.tokens + TOKENS - 1) / TOKENS);
    constexpr int HALF = (TAPS + 1) / 2;
    const bool is_first = threadIdx.x < CHANNELS;
    Chains<0, HALF, false> first;
    Chains<HALF, TAPS, true> second;
    int next_row = 0, next = 0;  // what is copied next
    int row = 0, token = 0;      // what is added
    for (i64 stage = 1 - DEPTH; stage < all; ++stage) {
        if (stage >= 0) {
            cp_async_wait<DEPTH - 2>();
            __syncthreads();  // it is there, and the one before is not read any more
        }
        if (stage + DEPTH - 1 < all) {
            Stage& to = stages[u32(stage + DEPTH - 1) % DEPTH];
            const int channels = p.channels - channel, tokens = p.tokens - next;
            copy(to.grad, p.grad + next_row * p.grad_batch + channel * p.grad_channel + next * p.grad_token,
                 p.grad_channel, p.grad_token, channels, tokens);
            copy(to.x, p.x + next_row * p.x_batch + channel * p.x_channel + next * p.x_token, p.x_channel,
                 p.x_token, channels, tokens);
            if constexpr (PACKED)
                for (int i = threadIdx.x; i < min(TOKENS, tokens); i += THREADS)
                    to.at[i] = p.at[i64(next_row) * p.tokens + next + i];
            next += TOKENS;
            if (next >= p.tokens) next = 0, ++next_row;
        }
        cp_async_commit();  // empty ones too, so that their number tells which stage is whole
        if (stage < 0) continue;
        const Stage& from = stages[u32(stage) % DEPTH];
        const int count = min(TOKENS, p.tokens - token);
        if (is_first) {
            if (token == 0) first.start(p, row, channel + c);
            first.add(from, c, count);
        } else {
            if (token == 0) second.start(p, row, channel + c);
            second.add(from, c, count);
        }
        token += TOKENS;
        if (token >= p.tokens) token = 0, ++row;
    }
    is_first ? first.store(p, channel + c) : second.store(p, channel + c);
}

// Short causal convolutions, each channel by itself: docs/contract.md, "Convolutions".
//
// Also the gradient of x, which is such a convolution of the gradients backwards in time. A thread keeps the weights of
// its channels, and reads each token once: with OF_CHANNELS it takes VECTOR neighbouring channels of a run of tokens,
// else PIECES pieces of VECTOR neighbouring tokens of one channel, and those just before each.
//
// Macros, beside those of causal_conv1d.cuh
//   VECTOR        neighbours of a thread, side by side in memory; with 1 they may lie anywhere
//   OF_CHANNELS   whether neighbours are channels
//   BACKWARDS     whether a token sees those behind it, not those before it
//   PACKED        whether rows consist of several sequences
//   LANES         neighbouring threads that take pieces of the same channel; 1 with OF_CHANNELS

#include "causal_conv1d.cuh"

constexpr int THREADS = 128;
constexpr int PIECES = 4;  // and tokens that are read at once
constexpr int LAGS = TAPS - 1;

struct Params {
    const Value::Stored *x, *weight, *bias, *before;  // without bias or states before: null
    const Value::Stored* grad;                        // of silu, with the strides of out
    Value::Stored* out;
    const int* at;  // with PACKED: how many tokens lie before each in its sequence, [batch, tokens]
    i64 x_batch, x_channel, x_token, out_batch, out_channel, out_token;
    i64 before_batch, before_channel, before_token;
    u32 count;                  // of LANES threads that have work
    int channels, tokens, run;  // run: tokens of a thread with OF_CHANNELS
};

// How many lags a token may look, along its row.
__device__ __forceinline__ int reach(const int* at, int t, int tokens) {
    if constexpr (!BACKWARDS) return PACKED ? at[t] : LAGS;
    int lags = 0;
#pragma unroll
    for (int lag = 1; lag <= LAGS; ++lag)
        if (t + lag < tokens && (!PACKED || at[t + lag] >= lag)) lags = lag;
    return lags;
}

// The chain over taps, and the last term. x has an entry for each tap.
template <bool CUT>
__device__ __forceinline__ float convolved(const float (&x)[TAPS], const float (&w)[TAPS], float last,
                                           int reach) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < TAPS; ++k) {
        const bool beyond = CUT && LAGS - k > reach;
        if constexpr (CUT && BACKWARDS)  // no term
            sum = beyond ? sum : __fadd_rn(sum, __fmul_rn(x[k], w[k]));
        else if (k == 0)
            sum = __fmul_rn(beyond ? 0.0f : x[k], w[k]);
        else
            sum = __fadd_rn(sum, __fmul_rn(beyond ? 0.0f : x[k], w[k]));
    }
    return __fadd_rn(sum, last);
}

// A token's values, as they are stored.
struct Raw {
    static constexpr int WORDS = VECTOR == 1 ? 1 : VECTOR * int(sizeof(Value::Stored)) / 4;
    u32 words[WORDS];

    __device__ __forceinline__ void read(const Value::Stored* from) {
        if constexpr (VECTOR == 1) {
            if constexpr (VALUE == F32)
                words[0] = __float_as_uint(*from);
            else
                words[0] = *from;
        } else if constexpr (WORDS == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(from);
            words[0] = v.x, words[1] = v.y;
        } else {
            const uint4 v = *reinterpret_cast<const uint4*>(from);
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        }
    }

    __device__ __forceinline__ float widened(int i) const {
        if constexpr (VALUE == F32)
            return __uint_as_float(words[i]);
        else
            return Value::widen(u16(i % 2 ? words[i / 2] >> 16 : words[i / 2]));
    }
};

// Channels side by side. Time runs backwards with BACKWARDS, so that what is seen always lies before.
__device__ __forceinline__ void channels(const Params& p, i64 batch, int run, int channel) {
    float w[VECTOR][TAPS], last[VECTOR];
    load_channels(p.weight, p.bias, channel, w, last);
    const i64 x_step = BACKWARDS ? -p.x_token : p.x_token, out_step = BACKWARDS ? -p.out_token : p.out_token;
    const i64 begin = BACKWARDS ? p.tokens - 1 : 0;
    const int first = run * p.run, end = min(first + p.run, p.tokens);
    const Value::Stored* x =
        p.x + batch * p.x_batch + channel * p.x_channel + begin * p.x_token + first * x_step;
    const i64 to = batch * p.out_batch + channel * p.out_channel + begin * p.out_token + first * out_step;
    Value::Stored* out = p.out + to;
    const Value::Stored* grad = p.grad + (RESULT == SILU_GRADIENT ? to : 0);
    const int* at = PACKED ? p.at + batch * p.tokens : nullptr;
    float line[LAGS + PIECES][VECTOR];
#pragma unroll
    for (int j = 0; j < LAGS; ++j) {
        const int t = first - LAGS + j;
        if (t >= 0)
            load_values<Value>(x + (j - LAGS) * x_step, line[j]);
        else
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                line[j][i] =
                    p.before
                        ? Value::widen(p.before[batch * p.before_batch + (channel + i) * p.before_channel +
                                                (LAGS + t) * p.before_token])
                        : 0.0f;
    }
    Raw next[PIECES] = {};
    const auto read = [&](int t) {
#pragma unroll
        for (int j = 0; j < PIECES; ++j, x += x_step)
            if (t + j < end) next[j].read(x);
    };
    read(first);
    for (int t = first; t < end; t += PIECES) {
#pragma unroll
        for (int j = 0; j < PIECES; ++j)
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) line[LAGS + j][i] = next[j].widened(i);
        Raw grads[PIECES] = {};
        if constexpr (RESULT == SILU_GRADIENT)
#pragma unroll
            for (int j = 0; j < PIECES; ++j, grad += out_step)
                if (t + j < end) grads[j].read(grad);
        read(t + PIECES);
#pragma unroll
        for (int j = 0; j < PIECES; ++j, out += out_step) {
            if (t + j >= end) break;
            const int lags =
                BACKWARDS || PACKED ? reach(at, BACKWARDS ? p.tokens - 1 - t - j : t + j, p.tokens) : LAGS;
            float sum[VECTOR], given[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                float seen[TAPS];
#pragma unroll
                for (int k = 0; k < TAPS; ++k) seen[k] = line[j + k][i];
                sum[i] = lags >= LAGS ? convolved<false>(seen, w[i], last[i], LAGS)
                                      : convolved<true>(seen, w[i], last[i], lags);
                given[i] = grads[j].widened(i);
            }
            finish(sum, given);
            store_values<Value>(out, sum);
        }
#pragma unroll
        for (int j = 0; j < LAGS; ++j)
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) line[j][i] = line[j + PIECES][i];
    }
}

// Tokens side by side, with those that they see beside them: x[LAGS + i] is the i-th, or x[i] with BACKWARDS.
__device__ __forceinline__ void beside(const Params& p, i64 batch, int channel, const Value::Stored* x, int t,
                                       float (&line)[LAGS + VECTOR]) {
    float here[VECTOR];
    load_values<Value>(x + t * p.x_token, here);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) line[BACKWARDS ? i : LAGS + i] = here[i];
    if (VECTOR > 1 && LAGS > 0 && LAGS <= 4 && (BACKWARDS ? t + VECTOR < p.tokens : t > 0)) {
        float others[4];
        load_values<Value>(BACKWARDS ? x + t + VECTOR : x + t - 4, others);
#pragma unroll
        for (int j = 0; j < LAGS; ++j)
            if constexpr (BACKWARDS)
                line[VECTOR + j] = others[j];
            else
                line[j] = others[4 - LAGS + j];
        return;
    }
#pragma unroll
    for (int j = 0; j < LAGS; ++j) {
        const int from = BACKWARDS ? t + VECTOR + j : t - LAGS + j;
        float seen = 0.0f;
        if (from >= 0 && from < p.tokens)
            seen = Value::widen(x[from * p.x_token]);
        else if (p.before)
            seen = Value::widen(p.before[batch * p.before_batch + channel * p.before_channel +
                                         (LAGS + from) * p.before_token]);
        line[BACKWARDS ? VECTOR + j : j] = seen;
    }
}

// The sums of tokens side by side, from t on.
template <bool CUT>
__device__ __forceinline__ void convolve(const float (&line)[LAGS + VECTOR], const float (&w)[TAPS],
                                         float last, const int* at, int t, int tokens, float (&sum)[VECTOR]) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        float seen[TAPS];
#pragma unroll
        for (int k = 0; k < TAPS; ++k) seen[k] = line[BACKWARDS ? i + LAGS - k : i + k];
        sum[i] = convolved<CUT>(seen, w, last, CUT ? reach(at, t + i, tokens) : LAGS);
    }
}

__device__ __forceinline__ void tokens(const Params& p, i64 batch, int channel, int first) {
    float w[1][TAPS], last[1];
    load_channels(p.weight, p.bias, channel, w, last);
    const Value::Stored* x = p.x + batch * p.x_batch + channel * p.x_channel;
    const i64 to = batch * p.out_batch + channel * p.out_channel;
    const int* at = PACKED ? p.at + batch * p.tokens : nullptr;
    float line[PIECES][LAGS + VECTOR], given[PIECES][VECTOR] = {};
#pragma unroll
    for (int j = 0; j < PIECES; ++j) {
        const int t = first + j * LANES * VECTOR;
        if (t >= p.tokens) break;
        beside(p, batch, channel, x, t, line[j]);
        if constexpr (RESULT == SILU_GRADIENT) load_values<Value>(p.grad + to + t * p.out_token, given[j]);
    }
#pragma unroll
    for (int j = 0; j < PIECES; ++j) {
        const int t = first + j * LANES * VECTOR;
        if (t >= p.tokens) return;
        float sum[VECTOR];
        if (PACKED || (BACKWARDS && t + VECTOR + LAGS > p.tokens))
            convolve<true>(line[j], w[0], last[0], at, t, p.tokens, sum);
        else
            convolve<false>(line[j], w[0], last[0], at, t, p.tokens, sum);
        finish(sum, given[j]);
        store_values<Value>(p.out + to + t * p.out_token, sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, TAPS <= 4 ? 5 : 1)
    causal_conv1d(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    u32 index = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    if (index >= p.count) return;
    // Of a thread with OF_CHANNELS, else of LANES neighbours: tokens of a row, and what lies across.
    const u32 along = OF_CHANNELS ? p.run : LANES * VECTOR * PIECES, runs = (p.tokens + along - 1) / along;
    const u32 across = OF_CHANNELS ? p.channels / VECTOR : p.channels;
    if constexpr (OF_CHANNELS) {
        const u32 row = index / across, batch = row / runs;
        channels(p, batch, int(row - batch * runs), int(index - row * across) * VECTOR);
    } else {
        const u32 row = index / runs, batch = row / across;
        const int first = int((index - row * runs) * along + threadIdx.x % LANES * VECTOR);
        if (first < p.tokens) tokens(p, batch, int(row - batch * across), first);
    }
}

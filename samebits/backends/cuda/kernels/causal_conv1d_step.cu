// The next tokens of short causal convolutions, whose states are moved on in place: docs/contract.md, "Convolutions".
//
// A thread has its channels' states, which no other one reads, and all of their tokens.
//
// Macros, beside those of causal_conv1d.cuh
//   VECTOR   channels of a thread
//   KEPT     with more than one channel, inputs in a state; channels and states lie side by side, and there is one token

#include "causal_conv1d.cuh"

constexpr int THREADS = 64;
constexpr int LAGS = TAPS - 1;

struct Params {
    const Value::Stored *x, *weight, *bias;  // without bias: null
    Value::Stored *out, *state;
    i64 x_batch, x_channel, x_token, out_batch, out_channel, out_token, state_batch, state_channel,
        state_token;
    u32 count;  // threads that have work
    int channels, tokens, kept;
};

// The chain over taps, and the last term.
__device__ __forceinline__ float convolved(const float (&x)[TAPS], const float (&w)[TAPS], float last) {
    float sum = __fmul_rn(x[0], w[0]);
#pragma unroll
    for (int k = 1; k < TAPS; ++k) sum = __fadd_rn(sum, __fmul_rn(x[k], w[k]));
    return __fadd_rn(sum, last);
}

__device__ __forceinline__ void any(const Params& p, i64 batch, int channel) {
    const Value::Stored* x = p.x + batch * p.x_batch + channel * p.x_channel;
    Value::Stored* out = p.out + batch * p.out_batch + channel * p.out_channel;
    Value::Stored* state = p.state + batch * p.state_batch + channel * p.state_channel;
    float seen[TAPS], w[1][TAPS], last[1];
    load_channels(p.weight, p.bias, channel, w, last);
#pragma unroll
    for (int j = 0; j < LAGS; ++j) seen[j] = Value::widen(state[(p.kept - LAGS + j) * p.state_token]);
    for (int t = 0; t < p.tokens; ++t) {
        seen[LAGS] = Value::widen(x[t * p.x_token]);
        float sum[1] = {convolved(seen, w[0], last[0])};
        finish(sum, sum);
        store_values<Value>(out + t * p.out_token, sum);
#pragma unroll
        for (int j = 0; j < LAGS; ++j) seen[j] = seen[j + 1];
    }
    for (int j = 0; j < p.kept; ++j) {  // ascending: what is read lies behind what was written
        const int from = j + p.tokens;
        state[j * p.state_token] =
            from < p.kept ? state[from * p.state_token] : x[(from - p.kept) * p.x_token];
    }
}

// States are 16-byte words of this thread's channels.
template <int kept>
__device__ __forceinline__ void neighbours(const Params& p, i64 batch, int channel) {
    using Stored = Value::Stored;
    alignas(16) Stored x[VECTOR], state[VECTOR * kept], moved[VECTOR * kept];
    Stored* const at = p.state + batch * p.state_batch + i64(channel) * kept;
    copy_values<Value, VECTOR>(p.x + batch * p.x_batch + channel, x);
    copy_values<Value, VECTOR * kept>(at, state);
    float w[VECTOR][TAPS], last[VECTOR], sum[VECTOR];
    load_channels(p.weight, p.bias, channel, w, last);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        float seen[TAPS];
#pragma unroll
        for (int j = 0; j < LAGS; ++j) seen[j] = Value::widen(state[i * kept + kept - LAGS + j]);
        seen[LAGS] = Value::widen(x[i]);
        sum[i] = convolved(seen, w[i], last[i]);
#pragma unroll
        for (int j = 0; j < kept; ++j) moved[i * kept + j] = j + 1 < kept ? state[i * kept + j + 1] : x[i];
    }
    copy_values<Value, VECTOR * kept>(moved, at);
    finish(sum, sum);
    store_values<Value>(p.out + batch * p.out_batch + channel, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) causal_conv1d_step(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const u32 index = blockIdx.x * THREADS + threadIdx.x;
    if (index >= p.count) return;
    const u32 columns = p.channels / VECTOR, batch = index / columns;
    const int channel = int(index - batch * columns) * VECTOR;
    if constexpr (VECTOR == 1)
        any(p, batch, channel);
    else
        neighbours<KEPT>(p, batch, channel);
}

// Short causal convolutions, each channel by itself: docs/contract.md, "Convolutions".
//
// A thread takes VECTOR neighbours, which lie side by side in memory: channels if OF_CHANNELS, else tokens. A step of
// decoding also moves on the state, whose channels no other thread reads.
//
// Macros
//   VALUE         type of all tensors: F32, BF16 or F16
//   TAPS          weights of a channel
//   VECTOR        neighbours of a thread; with 1 they may lie anywhere
//   OF_CHANNELS   whether neighbours are channels
//   SILU          whether the rounded sum goes through silu, and is rounded again
//   STATE         whether tokens follow a state, which is moved on; then a thread has all tokens of its channels

#include "convert.cuh"
#include "functions.cuh"
#include "launch.cuh"
#include "vectors.cuh"

using Value = Element<VALUE>;

constexpr int THREADS = 256;

struct Params {
    const Value::Stored *x, *weight, *bias, *before;  // without bias or states before: null
    Value::Stored *out, *state;
    const int*
        at;  // how many tokens lie before each in its sequence, [batch, tokens]; null: as many as in its row
    i64 x_batch, x_channel, x_token, out_batch, out_channel, out_token;
    i64 before_batch, before_channel, before_token, state_batch, state_channel, state_token, weight_channel;
    i64 count;                   // threads that have work
    int channels, tokens, kept;  // kept: inputs in a state
};

// What the tap sees that lies `lag` tokens before token t.
__device__ __forceinline__ void seen(const Params& p, i64 batch, int channel, int t, int lag, int place,
                                     float (&x)[VECTOR]) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) x[i] = 0.0f;
    if (OF_CHANNELS || VECTOR == 1) {
        if (lag > place) return;
        if (t >= lag)
            load_values<Value>(p.x + batch * p.x_batch + channel * p.x_channel + (t - lag) * p.x_token, x);
        else if (p.before)
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                x[i] = Value::widen(p.before[batch * p.before_batch + (channel + i) * p.before_channel +
                                             (TAPS - 1 + t - lag) * p.before_token]);
    }
}

__device__ __forceinline__ float finished(float sum, float bias, bool biased) {
    if (biased) sum = __fadd_rn(sum, bias);
    if constexpr (SILU) sum = contract::silu(rounded_to<Value>(sum));
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) causal_conv1d(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const i64 index = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= p.count) return;
    const int rows = STATE ? 1 : OF_CHANNELS ? p.tokens : p.channels;
    const int columns = (OF_CHANNELS || STATE ? p.channels : p.tokens) / VECTOR;
    const i64 batch = index / (i64(rows) * columns);
    const int rest = int(index - batch * rows * columns);
    const int row = rest / columns, column = (rest - row * columns) * VECTOR;
    const int channel = OF_CHANNELS || STATE ? column : row;
    float w[TAPS][VECTOR], bias[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        bias[i] = p.bias ? Value::widen(p.bias[channel + (OF_CHANNELS ? i : 0)]) : 0.0f;
#pragma unroll
        for (int k = 0; k < TAPS; ++k)
            w[k][i] = Value::widen(p.weight[(channel + (OF_CHANNELS ? i : 0)) * p.weight_channel + k]);
    }
    if constexpr (OF_CHANNELS || VECTOR == 1) {
        const int first = STATE ? 0 : OF_CHANNELS ? row : column;
        const int last = STATE ? p.tokens : first + 1;
        for (int t = first; t < last; ++t) {
            const int place = p.at ? p.at[batch * p.tokens + t] : TAPS;
            float sum[VECTOR] = {};
#pragma unroll
            for (int k = 0; k < TAPS; ++k) {
                float x[VECTOR];
                seen(p, batch, channel, t, TAPS - 1 - k, place, x);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(x[i], w[k][i]));
            }
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) sum[i] = finished(sum[i], bias[i], p.bias);
            store_values<Value>(p.out + batch * p.out_batch + channel * p.out_channel + t * p.out_token, sum);
        }
    } else {  // neighbours are tokens of one channel: each is read once, with those before the first
        const Value::Stored* x = p.x + batch * p.x_batch + channel * p.x_channel;
        float line[TAPS - 1 + VECTOR], here[VECTOR];
        load_values<Value>(x + column, here);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) line[TAPS - 1 + i] = here[i];
#pragma unroll
        for (int i = 0; i < TAPS - 1; ++i) {
            const int t = column - (TAPS - 1) + i;
            line[i] = t >= 0     ? Value::widen(x[t])
                      : p.before ? Value::widen(p.before[batch * p.before_batch + channel * p.before_channel +
                                                         (TAPS - 1 + t) * p.before_token])
                                 : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const int place = p.at ? p.at[batch * p.tokens + column + i] : TAPS;
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < TAPS; ++k)
                sum = __fadd_rn(sum, __fmul_rn(TAPS - 1 - k > place ? 0.0f : line[i + k], w[k][0]));
            here[i] = finished(sum, bias[0], p.bias);
        }
        store_values<Value>(p.out + batch * p.out_batch + channel * p.out_channel + column, here);
    }
    if constexpr (STATE) {
        Value::Stored* state = p.state + batch * p.state_batch + channel * p.state_channel;
        const Value::Stored* x = p.x + batch * p.x_batch + channel * p.x_channel;
        for (int j = 0; j < p.kept; ++j) {  // ascending: what is read lies behind what was written
            const int from = j + p.tokens;
            for (int i = 0; i < VECTOR; ++i)
                state[i * p.state_channel + j * p.state_token] =
                    from < p.kept ? state[i * p.state_channel + from * p.state_token]
                                  : x[i * p.x_channel + (from - p.kept) * p.x_token];
        }
    }
}

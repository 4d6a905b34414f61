// A token of Mamba's scan for each sequence: docs/contract.md, "State spaces". States are written in place.
//
// LANES lanes of a warp have a channel's state, 8 entries each. All of them compute the channel's step: memory bounds it.
//
// Macros
//   IN, DT, GATE, OF_BC   types of x, of raw steps, of z or NONE, of B and C
//   SIZE       N, entries of a channel's state
//   SOFTPLUS   of steps
//   ALIGNED    whether states and decays lie at multiples of 16 bytes
//   VECTOR     entries of B and C in one access: 8 or 1

#include "convert.cuh"
#include "launch.cuh"
#include "state_space.cuh"
#include "vectors.cuh"

using In = Element<IN>;
using Dt = Element<DT>;
using Bc = Element<OF_BC>;
using Gate = Element<GATE == NONE ? F32 : GATE>;

constexpr int THREADS = 128;
constexpr int LANES = lanes_of(SIZE);
constexpr int CHANNELS = THREADS / LANES;

struct Params {
    const In::Stored* x;
    const Dt::Stored* steps;
    const Gate::Stored* z;
    const Bc::Stored *b, *c;
    const float *decays, *skip, *bias;
    float* states;
    In::Stored* out;
    i64 x_row, steps_row, z_row, b_row, b_group, c_row, c_group, states_row;
    int channels, of_group, blocks;  // blocks: of a group
    float lowest, highest;           // of steps
};

// The piece of a lane, of B or C.
__device__ __forceinline__ void load_of_states(const Bc::Stored* at, int lane, float (&x)[8]) {
    if constexpr (VECTOR == 8) {
        load_values<Bc>(at + 8 * lane, x);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = 8 * lane + i < SIZE ? Bc::widen(at[8 * lane + i]) : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) selective_scan_step(const __grid_constant__ Params p) {
    const int group = blockIdx.y / p.blocks, block = blockIdx.y % p.blocks;
    const int width = min(CHANNELS, p.of_group - block * CHANNELS);
    const int lane = threadIdx.x % LANES, d = threadIdx.x / LANES;
    const bool is = d < width;
    const int channel = group * p.of_group + block * CHANNELS + (is ? d : 0);  // all lanes take part in sums
    const i64 sequence = blockIdx.x;
    float* const state = p.states + sequence * p.states_row + i64(channel) * SIZE + 8 * lane;
    wait_for_kernel_before();
    let_kernel_behind_start();
    float s[8], own[8], b[8] = {}, c[8] = {}, y[1] = {};
    load_states<SIZE, ALIGNED>(state, is, lane, s);
    load_states<SIZE, ALIGNED>(p.decays + i64(channel) * SIZE + 8 * lane, is, lane, own);
    if (8 * lane < SIZE) {
        load_of_states(p.b + sequence * p.b_row + group * p.b_group, lane, b);
        load_of_states(p.c + sequence * p.c_row + group * p.c_group, lane, c);
    }
    const float x = In::widen(p.x[sequence * p.x_row + channel]);
    float u = Dt::widen(p.steps[sequence * p.steps_row + channel]);
    if (p.bias) u = __fadd_rn(u, p.bias[channel]);
    if constexpr (SOFTPLUS) u = contract::softplus(u);
    u = contract::minimum(contract::maximum(u, p.lowest), p.highest);
    const float v = __fmul_rn(u, x);
    float a[8];
    bool near = true;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        a[i] = __fmul_rn(u, own[i]);
        near = near && a[i] <= 0.0f && a[i] >= -80.0f;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = near ? contract::exp_near(a[i]) : contract::decay(a[i]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (SIZE % 8 && 8 * lane + i >= SIZE) continue;
        s[i] = __fmaf_rn(a[i], s[i], __fmul_rn(v, b[i]));
        y[0] = __fmaf_rn(s[i], c[i], y[0]);
    }
    if (8 * lane >= SIZE) y[0] = 0.0f;
    contract::deal_sums<LANES / 2>(y, lane);
    if (!is) return;
    store_states<SIZE, ALIGNED>(state, lane, s);
    if (lane) return;
    if (p.skip) y[0] = __fadd_rn(y[0], __fmul_rn(p.skip[channel], x));
    if constexpr (GATE)
        y[0] = __fmul_rn(y[0], contract::silu(Gate::widen(p.z[sequence * p.z_row + channel])));
    p.out[sequence * p.channels + channel] = In::narrow(contract::canonical(y[0]));
}

// Selective state spaces, token after token: docs/contract.md, "State spaces".
//
// LANES lanes of a warp have the state of KEPT channels, 8 entries of each in a lane. A block has CHANNELS channels of
// one group and one sequence, and goes through its tokens in tiles: the next tile's values are on their way from memory
// while one is computed. A step of decoding is a tile of one token, which starts from raw values of dt.
//
// Macros
//   IN, DT, GATE   types of x, B and C; of steps (F32) or raw dt; of z in a step, or NONE
//   SIZE           N, entries of a channel's state
//   OWN            whether each state of a channel has a decay, else each head
//   KEPT           channels of a thread: a power of two, at most LANES
//   TILE           tokens
//   STEP           whether it is a step of decoding: sequence s has the token s, and states are written in place
//   SOFTPLUS       of dt, in a step
//   WIDE           whether results are F32, else IN
//   ALIGNED        whether states and decays lie at multiples of 16 bytes

#include "convert.cuh"
#include "launch.cuh"
#include "state_space.cuh"
#include "vectors.cuh"

using In = Element<IN>;
using Dt = Element<DT>;
using Out = Element<WIDE ? F32 : IN>;

constexpr int THREADS = 128;
constexpr int LANES = lanes_of(SIZE);
constexpr int CHANNELS = THREADS / LANES * KEPT;
constexpr int ROW = 8 * LANES;

struct Params {
    const In::Stored *x, *b, *c;
    const Dt::Stored* steps;  // [tokens, channels or heads]
    const float *decays, *skip, *bias;
    const float* before;  // states; null: zeros
    const int* offsets;   // of sequences
    const void* z;
    Out::Stored* out;
    float* after;
    i64 x_row, b_row, c_row, steps_row, z_row, out_row, states_row, b_group, c_group;
    int channels, of_group, of_head, blocks, tokens;  // blocks: of a group
    float lowest, highest;                            // of steps, in a step
};

__device__ __forceinline__ float step_of(const Params& p, float dt, int head) {
    if constexpr (STEP) {
        if (p.bias) dt = __fadd_rn(dt, p.bias[head]);
        if constexpr (SOFTPLUS) dt = contract::softplus(dt);
        dt = contract::minimum(contract::maximum(dt, p.lowest), p.highest);
    }
    return dt;
}

// A thread's share of count values.
__device__ constexpr int share(int count) { return (count + THREADS - 1) / THREADS; }

struct Tile {
    float b[share(TILE * SIZE)], c[share(TILE * SIZE)], x[share(TILE * CHANNELS)], u[share(TILE * CHANNELS)];

    __device__ __forceinline__ void load(const Params& p, i64 first, i64 stop, int group, int channel,
                                         int width) {
#pragma unroll
        for (int i = 0; i < share(TILE * SIZE); ++i) {
            const int at = i * THREADS + threadIdx.x, t = at / SIZE, n = at % SIZE;
            const bool is = t < TILE && first + t < stop;
            b[i] = is ? In::widen(p.b[(first + t) * p.b_row + group * p.b_group + n]) : 0.0f;
            c[i] = is ? In::widen(p.c[(first + t) * p.c_row + group * p.c_group + n]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < share(TILE * CHANNELS); ++i) {
            const int at = i * THREADS + threadIdx.x, t = at / CHANNELS, d = at % CHANNELS;
            const bool is = t < TILE && first + t < stop && d < width;
            x[i] = is ? In::widen(p.x[(first + t) * p.x_row + channel + d]) : 0.0f;
            u[i] = is ? Dt::widen(p.steps[(first + t) * p.steps_row + (channel + d) / p.of_head]) : 0.0f;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) state_space(const __grid_constant__ Params p) {
    __shared__ __align__(16) float b[TILE][ROW], c[TILE][ROW];
    __shared__ float factor[TILE][CHANNELS], v[TILE][CHANNELS],
        y[TILE][CHANNELS];  // factor: u if OWN, else a
    const int group = blockIdx.y / p.blocks, block = blockIdx.y % p.blocks;
    const int channel = group * p.of_group + block * CHANNELS;
    const int width = min(CHANNELS, p.of_group - block * CHANNELS);
    const int lane = threadIdx.x % LANES, first_kept = threadIdx.x / LANES * KEPT;
    wait_for_kernel_before();
    let_kernel_behind_start();
    const i64 sequence = blockIdx.x;
    const i64 start = STEP ? sequence : min(max(p.offsets[sequence], 0), p.tokens);
    const i64 stop = STEP ? sequence + 1 : min(max(p.offsets[sequence + 1], 0), p.tokens);
    const i64 at_states = sequence * p.states_row + i64(channel + first_kept) * SIZE + 8 * lane;
    float s[KEPT][8], own[OWN ? KEPT : 1][8];
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const bool is = first_kept + k < width;
        load_states<SIZE, ALIGNED>(p.before + at_states + k * SIZE, is && p.before, lane, s[k]);
        if constexpr (OWN)
            load_states<SIZE, ALIGNED>(p.decays + i64(channel + first_kept + k) * SIZE + 8 * lane, is, lane,
                                       own[k]);
    }
    Tile next;
    next.load(p, start, stop, group, channel, width);
    for (i64 first = start; first < stop; first += TILE) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < share(TILE * SIZE); ++i) {
            const int at = i * THREADS + threadIdx.x, t = at / SIZE;
            if (t < TILE) {
                b[t][place_of<LANES>(at % SIZE)] = next.b[i];
                c[t][place_of<LANES>(at % SIZE)] = next.c[i];
            }
        }
#pragma unroll
        for (int i = 0; i < share(TILE * CHANNELS); ++i) {
            const int at = i * THREADS + threadIdx.x, t = at / CHANNELS, d = at % CHANNELS;
            if (t < TILE && d < width) {
                const int head = (channel + d) / p.of_head;
                const float u = step_of(p, next.u[i], head);
                factor[t][d] = OWN ? u : contract::decay(__fmul_rn(u, p.decays[head]));
                v[t][d] = __fmul_rn(u, next.x[i]);
            }
        }
        if (first + TILE < stop) next.load(p, first + TILE, stop, group, channel, width);
        __syncthreads();
        const int count = int(min(i64(TILE), stop - first));
#pragma unroll 2
        for (int t = 0; t < count; ++t) {
            float bn[8], cn[8], acc[KEPT];
            load_piece<LANES>(b[t], lane, bn);
            load_piece<LANES>(c[t], lane, cn);
#pragma unroll
            for (int k = 0; k < KEPT; ++k) {
                const float a = factor[t][first_kept + k], vk = v[t][first_kept + k];
                acc[k] = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    if (SIZE < ROW && 8 * lane + i >= SIZE) continue;
                    const float an = OWN ? contract::decay(__fmul_rn(a, own[OWN ? k : 0][i])) : a;
                    s[k][i] = __fmaf_rn(an, s[k][i], __fmul_rn(vk, bn[i]));
                    acc[k] = __fmaf_rn(s[k][i], cn[i], acc[k]);
                }
            }
            contract::deal_sums<LANES / 2>(acc, lane);
            if (lane % (LANES / KEPT) == 0) y[t][first_kept + lane / (LANES / KEPT)] = acc[0];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < share(TILE * CHANNELS); ++i) {
            const int at = i * THREADS + threadIdx.x, t = at / CHANNELS, d = at % CHANNELS;
            if (t >= count || d >= width) continue;
            float result = y[t][d];
            if (p.skip) {
                const float x = In::widen(p.x[(first + t) * p.x_row + channel + d]);
                result = __fadd_rn(result, __fmul_rn(p.skip[channel + d], x));
            }
#if STEP && GATE
            const auto* z = reinterpret_cast<const Element<GATE>::Stored*>(p.z);
            result = __fmul_rn(result,
                               contract::silu(Element<GATE>::widen(z[(first + t) * p.z_row + channel + d])));
#endif
            p.out[(first + t) * p.out_row + channel + d] = Out::narrow(contract::canonical(result));
        }
    }
#pragma unroll
    for (int k = 0; k < KEPT; ++k)
        if (first_kept + k < width) store_states<SIZE, ALIGNED>(p.after + at_states + k * SIZE, lane, s[k]);
}

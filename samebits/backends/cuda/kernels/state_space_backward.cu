// Gradients of selective state spaces: docs/contract.md, "State spaces".
//
// A block has the 32 channels of one block of a group, and one sequence: LANES lanes of a warp a channel, 8 entries of
// its state in each. First it goes through the tokens in order, and keeps the states before every CHUNK of them in
// memory. Then it goes back chunk by chunk: it computes the chunk's states again, which it keeps in registers.
// The channels of warp w are w, w + WARPS, ...: so sums over channels by halves begin within warps.
//
// Macros
//   IN        type of x, B and C: F32, BF16 or F16
//   GRAD      type of the gradient of outputs
//   SIZE      N, entries of a channel's state
//   OWN       whether each state of a channel has a decay, else each head
//   ALIGNED   whether states and decays lie at multiples of 16 bytes
//   BUFFERS   2: sums of a token are read while the next one's are written; 1: in less memory, in turns

#include "convert.cuh"
#include "state_space.cuh"
#include "vectors.cuh"

using In = Element<IN>;
using Grad = Element<GRAD>;

constexpr int LANES = lanes_of(SIZE);
constexpr int CHANNELS = contract::CHANNEL_BLOCK;
constexpr int THREADS = CHANNELS * LANES;
constexpr int SLOTS = 32 / LANES;  // channels of a warp
constexpr int WARPS = CHANNELS / SLOTS;
constexpr int ROW = 8 * LANES;
constexpr int CHUNK = 8;

struct Params {
    const Grad::Stored* grad;
    const In::Stored *x, *b, *c;
    const float *steps, *decays, *before,
        *of_after;  // states before, and the gradient of those after; null: zeros
    const int* offsets;
    float *chunks, *dv, *dw, *db, *dc, *da, *of_before;
    i64 grad_row, x_row, b_row, c_row, steps_row, b_group, c_group;
    int channels, of_group, of_head, blocks, tokens;
};

struct Shared {
    float b[CHUNK][ROW], c[CHUNK][ROW];
    float u[CHUNK][CHANNELS], a[CHUNK][CHANNELS], v[CHUNK][CHANNELS], g[CHUNK][CHANNELS];
    float dv[CHUNK][CHANNELS], dw[CHUNK][CHANNELS];
    float sums[BUFFERS][2][WARPS][ROW];
};

__device__ constexpr int share(int count) { return (count + THREADS - 1) / THREADS; }

struct Values {
    float b[share(CHUNK * SIZE)], c[share(CHUNK * SIZE)];
    float x[share(CHUNK * CHANNELS)], u[share(CHUNK * CHANNELS)], g[share(CHUNK * CHANNELS)];

    template <bool back>
    __device__ __forceinline__ void load(const Params& p, i64 first, i64 stop, int group, int channel,
                                         int width) {
#pragma unroll
        for (int i = 0; i < share(CHUNK * SIZE); ++i) {
            const int at = i * THREADS + threadIdx.x, t = at / SIZE, n = at % SIZE;
            const bool is = t < CHUNK && first + t < stop;
            b[i] = is ? In::widen(p.b[(first + t) * p.b_row + group * p.b_group + n]) : 0.0f;
            if (back) c[i] = is ? In::widen(p.c[(first + t) * p.c_row + group * p.c_group + n]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < share(CHUNK * CHANNELS); ++i) {
            const int at = i * THREADS + threadIdx.x, t = at / CHANNELS, d = at % CHANNELS;
            const bool is = t < CHUNK && first + t < stop && d < width;
            x[i] = is ? In::widen(p.x[(first + t) * p.x_row + channel + d]) : 0.0f;
            u[i] = is ? p.steps[(first + t) * p.steps_row + (channel + d) / p.of_head] : 0.0f;
            if (back) g[i] = is ? Grad::widen(p.grad[(first + t) * p.grad_row + channel + d]) : 0.0f;
        }
    }

    template <bool back>
    __device__ __forceinline__ void store(const Params& p, Shared& to, int channel, int width) const {
#pragma unroll
        for (int i = 0; i < share(CHUNK * SIZE); ++i) {
            const int at = i * THREADS + threadIdx.x, t = at / SIZE;
            if (t >= CHUNK) continue;
            to.b[t][place_of<LANES>(at % SIZE)] = b[i];
            if (back) to.c[t][place_of<LANES>(at % SIZE)] = c[i];
        }
#pragma unroll
        for (int i = 0; i < share(CHUNK * CHANNELS); ++i) {
            const int at = i * THREADS + threadIdx.x, t = at / CHANNELS, d = at % CHANNELS;
            if (t >= CHUNK || d >= width) continue;
            to.u[t][d] = u[i];
            if (!OWN) to.a[t][d] = contract::decay(__fmul_rn(u[i], p.decays[(channel + d) / p.of_head]));
            to.v[t][d] = __fmul_rn(u[i], x[i]);
            if (back) to.g[t][d] = g[i];
        }
    }
};

__device__ __forceinline__ void decays_of(const Shared& at, int t, int d, const float (&own)[8],
                                          float (&a)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = OWN ? contract::decay(__fmul_rn(at.u[t][d], own[i])) : at.a[t][d];
}

// The state after a token.
__device__ __forceinline__ void advance(const Shared& at, int t, int d, int lane, const float (&own)[8],
                                        const float (&from)[8], float (&to)[8]) {
    float b[8], a[8];
    load_piece<LANES>(at.b[t], lane, b);
    decays_of(at, t, d, own, a);
    const float v = at.v[t][d];
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = __fmaf_rn(a[i], from[i], __fmul_rn(v, b[i]));
}

// Sums over the channels of a block from those of its warps, by halves.
__device__ __forceinline__ void add_warps(const Params& p, const Shared& at, int buffer, i64 token, int group,
                                          int block) {
    for (int i = threadIdx.x; i < 2 * SIZE; i += THREADS) {
        const int which = i / SIZE, n = i % SIZE;
        float x[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) x[w] = at.sums[buffer][which][w][n];
        contract::add_halves<WARPS / 2, 1>(x);
        (which ? p.dc : p.db)[((token * (p.channels / p.of_group) + group) * p.blocks + block) * SIZE + n] =
            x[0];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) state_space_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) char memory[];
    Shared& at = *reinterpret_cast<Shared*>(memory);
    const int group = blockIdx.y / p.blocks, block = blockIdx.y % p.blocks;
    const int channel = group * p.of_group + block * CHANNELS;
    const int width = min(CHANNELS, p.of_group - block * CHANNELS);
    const int lane = threadIdx.x % LANES, slot = threadIdx.x % 32 / LANES, warp = threadIdx.x / 32;
    const int d = warp + WARPS * slot;
    const bool is = d < width;
    const i64 sequence = blockIdx.x;
    const i64 start = min(max(p.offsets[sequence], 0), p.tokens);
    const i64 stop = min(max(p.offsets[sequence + 1], 0), p.tokens);
    const i64 state = (sequence * p.channels + channel + d) * SIZE + 8 * lane;
    const i64 own_at = i64(channel + d) * SIZE + 8 * lane;
    const i64 of_chunk = i64(p.channels) * SIZE;
    const i64 first_chunk = (start / CHUNK + sequence) * of_chunk + own_at;
    float own[8] = {}, s[CHUNK + 1][8];
    if constexpr (OWN) load_states<SIZE, ALIGNED>(p.decays + own_at, is, lane, own);
    load_states<SIZE, ALIGNED>(p.before + state, is && p.before, lane, s[0]);
    Values next;
    next.load<false>(p, start, stop, group, channel, width);
    i64 chunk = first_chunk;
    for (i64 first = start; first < stop; first += CHUNK, chunk += of_chunk) {
        if (is) store_raw<SIZE, ALIGNED>(p.chunks + chunk, lane, s[0]);
        if (first + CHUNK >= stop) break;  // the last one's tokens lead to no chunk
        __syncthreads();
        next.store<false>(p, at, channel, width);
        next.load<false>(p, first + CHUNK, stop, group, channel, width);
        __syncthreads();
#pragma unroll
        for (int t = 0; t < CHUNK; ++t) advance(at, t, d, lane, own, s[0], s[0]);
    }
    float carried[8], alpha[8] = {};
    load_states<SIZE, ALIGNED>(p.of_after + state, is && p.of_after, lane, carried);
    i64 first = start + (stop - start + CHUNK - 1) / CHUNK * CHUNK - CHUNK;
    if (start < stop) next.load<true>(p, first, stop, group, channel, width);
    int buffer = 0;
    for (; first >= start; first -= CHUNK, chunk -= of_chunk) {
        __syncthreads();
        next.store<true>(p, at, channel, width);
        if (first > start) next.load<true>(p, first - CHUNK, stop, group, channel, width);
        load_states<SIZE, ALIGNED>(p.chunks + chunk, is, lane, s[0]);
        __syncthreads();
        const int count = int(min(i64(CHUNK), stop - first));
#pragma unroll
        for (int t = 0; t < CHUNK; ++t) advance(at, t, d, lane, own, s[t], s[t + 1]);
#pragma unroll
        for (int t = CHUNK - 1; t >= 0; --t) {
            if (t >= count) continue;
            float b[8], c[8], a[8], of_b[8], of_c[8], both[2] = {};
            load_piece<LANES>(at.b[t], lane, b);
            load_piece<LANES>(at.c[t], lane, c);
            decays_of(at, t, d, own, a);
            const float g = is ? at.g[t][d] : 0.0f, v = is ? at.v[t][d] : 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                of_b[i] = of_c[i] = 0.0f;
                if (SIZE < ROW && 8 * lane + i >= SIZE) continue;
                const float r = __fmaf_rn(g, c[i], carried[i]);
                of_b[i] = is ? __fmul_rn(r, v) : 0.0f;
                of_c[i] = is ? __fmul_rn(g, s[t + 1][i]) : 0.0f;
                both[0] = __fmaf_rn(r, b[i], both[0]);
                carried[i] = __fmul_rn(a[i], r);
                if constexpr (OWN) {
                    const float q = __fmul_rn(carried[i], s[t][i]);
                    both[1] = __fmaf_rn(q, own[i], both[1]);
                    alpha[i] = __fmaf_rn(q, at.u[t][d], alpha[i]);
                } else {
                    both[1] = __fmaf_rn(carried[i], s[t][i], both[1]);
                }
            }
            if constexpr (LANES == 1) {
                at.dv[t][d] = both[0], at.dw[t][d] = both[1];
            } else {
                contract::deal_sums<LANES / 2>(both, lane);
                if (lane % (LANES / 2) == 0) (lane ? at.dw : at.dv)[t][d] = both[0];
            }
            contract::deal_sums<SLOTS / 2, LANES>(of_b, threadIdx.x);
            contract::deal_sums<SLOTS / 2, LANES>(of_c, threadIdx.x);
            constexpr int KEPT = SLOTS < 8 ? 8 / SLOTS : 1, SHARED_BY = SLOTS > 8 ? SLOTS / 8 : 1;
            if (slot % SHARED_BY == 0)
#pragma unroll
                for (int i = 0; i < KEPT; ++i) {
                    const int n = 8 * lane + slot / SHARED_BY * KEPT + i;
                    at.sums[buffer][0][warp][n] = of_b[i];
                    at.sums[buffer][1][warp][n] = of_c[i];
                }
            __syncthreads();
            add_warps(p, at, buffer, first + t, group, block);
            if (BUFFERS == 1)
                __syncthreads();
            else
                buffer ^= 1;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < share(CHUNK * CHANNELS); ++i) {
            const int place = i * THREADS + threadIdx.x, t = place / CHANNELS, e = place % CHANNELS;
            if (t >= count || e >= width) continue;
            p.dv[(first + t) * p.channels + channel + e] = at.dv[t][e];
            p.dw[(first + t) * p.channels + channel + e] = at.dw[t][e];
        }
    }
    if (!is) return;
    store_raw<SIZE, ALIGNED>(p.of_before + state, lane, carried);
    if constexpr (OWN) store_raw<SIZE, ALIGNED>(p.da + state, lane, alpha);
}

// The scan of Mamba, token after token: docs/contract.md, "State spaces", each of whose states has a decay of its own.
//
// LANES lanes of a warp have a channel's state, 8 entries each. A block has CHANNELS channels of one group and one
// sequence, and goes through its tokens in tiles: the next tile is on its way from memory while one is computed. What
// happens once for a token and channel (softplus, skip, gate) is dealt to all threads, by shared memory.
// Where every decay of a tile is e^x with x from -80 to 0, `exp_near` computes it, in 11 instructions.
//
// Macros, beside those of selective_scan.cuh
//   AHEAD     tokens whose steps, decays and sums are computed side by side
//   STATES    whether it writes the states before every CHUNK tokens, for gradients, and no outputs
//   ALIGNED   whether states and decays lie at multiples of 16 bytes

#include "launch.cuh"
#include "selective_scan.cuh"

struct Params {
    const In::Stored* x;
    const Dt::Stored* delta;
    const Gate::Stored* z;
    const Bc::Stored *b, *c;
    const float *decays, *skip, *bias;
    const float* before;  // states; null: zeros
    const int* offsets;   // of sequences in the tokens of all rows; null: rows are sequences
    In::Stored* out;
    float *after, *chunks;
    Strides of_x, of_delta, of_z, of_out;
    OfStates of_b, of_c;
    int rows, channels, groups, of_group, blocks, tokens;  // blocks: of a group; tokens: of a row
};

struct Shared {
    float b[TILE][ROW_PITCH], c[TILE][ROW_PITCH];
    float u[CELLS], v[CELLS], y[CELLS];
    float least[CHANNELS];
};

struct Values {
    Raw<In> x[GROUPS];
    Raw<Dt> delta[GROUPS];
    Raw<Gate> z[GROUPS];
    Both<!STATES> both;

    __device__ __forceinline__ void load(const Params& p, const Span& span, int group, int channel, int width,
                                         int token) {
        const int low = span.start - token, high = span.stop - token;
        load_tile<In>(p.x, p.of_x, span.row, channel, token, width, low, high, x);
        load_tile<Dt>(p.delta, p.of_delta, span.row, channel, token, width, low, high, delta);
        if constexpr (GATE && !STATES)
            load_tile<Gate>(p.z, p.of_z, span.row, channel, token, width, low, high, z);
        both.load(p.b, p.c, p.of_b, p.of_c, span.row, group, token, low, high);
    }
};

// Tokens of a tile, from t0 on, for a thread's states: first their decays, then the states, then the sums.
template <bool near>
__device__ __forceinline__ void advance(Shared& at, int t0, int low, int high, int channel, int lane,
                                        const float (&own)[8], float (&s)[8]) {
    float acc[AHEAD] = {}, u[AHEAD], v[AHEAD];
    take(at.u, channel, t0, u);
    take(at.v, channel, t0, v);
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
        const int t = t0 + j;
        if (!near && (t < low || t >= high)) continue;
        float bn[8], cn[8];
        load_piece<LANES>(at.b[t], lane, bn);
        if constexpr (!STATES) load_piece<LANES>(at.c[t], lane, cn);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (SIZE < ROW && 8 * lane + i >= SIZE) continue;
            s[i] = __fmaf_rn(decay_of<near>(u[j], own[i]), s[i], __fmul_rn(v[j], bn[i]));
            if constexpr (!STATES) acc[j] = __fmaf_rn(s[i], cn[i], acc[j]);
        }
    }
    if constexpr (!STATES) {
        contract::deal_sums<LANES / 2>(acc, lane);
        constexpr int SUMS = AHEAD < LANES ? 1 : AHEAD / LANES, SHARED_BY = LANES * SUMS / AHEAD;
        if (lane % SHARED_BY == 0)
#pragma unroll
            for (int i = 0; i < SUMS; ++i) at.y[cell(channel, t0 + lane / SHARED_BY * SUMS + i)] = acc[i];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) selective_scan(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Shared& at = *reinterpret_cast<Shared*>(bytes);
    const int group = blockIdx.y / p.blocks, block = blockIdx.y % p.blocks;
    const int channel = group * p.of_group + block * CHANNELS;
    const int width = min(CHANNELS, p.of_group - block * CHANNELS);
    const int lane = threadIdx.x % LANES, d = threadIdx.x / LANES;
    wait_for_kernel_before();
    let_kernel_behind_start();
    const Span span = span_of(p.offsets, blockIdx.x, p.rows, p.tokens);
    const i64 at_state = (i64(blockIdx.x) * p.channels + channel + d) * SIZE + 8 * lane;
    float s[8], own[8];
    load_states<SIZE, ALIGNED>(p.before + at_state, d < width && p.before, lane, s);
    load_states<SIZE, ALIGNED>(p.decays + i64(channel + d) * SIZE + 8 * lane, d < width, lane, own);
    const float least = least_of(own);
    if (lane == 0) at.least[d] = least;
    const int first = span.start / CHUNK * CHUNK;
    i64 chunk = 0;
    if constexpr (STATES)
        chunk = ((i64(span.row) * p.tokens + span.start) / CHUNK + 2 * i64(blockIdx.x)) * p.channels * SIZE +
                i64(channel + d) * SIZE + 8 * lane;
    Values next;
    if (span.start < span.stop) next.load(p, span, group, channel, width, first);
    __syncthreads();
    for (int token = first; token < span.stop; token += TILE) {
        const Values now = next;
        const int low = span.start - token, high = span.stop - token;
        bool far = false;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const Place place(g);
            if (!place.is_in_tile()) continue;
            float u[VECTOR], v[VECTOR];
            raw_steps(place, width, low, high, now.delta[g], p.bias, channel, u);
            if constexpr (SOFTPLUS) softplus_all(u);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const int e = place.channel(i), t = place.token(i);
                const bool is = e < width && t >= low && t < high;
                // Another token changes no state: e^0 = 1, and the sum with -0 is the other summand.
                u[i] = is ? u[i] : 0.0f;
                v[i] = is ? __fmul_rn(u[i], now.x[g][i]) : -0.0f;
                far |= !is_near(u[i], at.least[e]);
            }
            put(at.u + place.in_shared(), u);
            put(at.v + place.in_shared(), v);
        }
        now.both.store(at.b, at.c, low, high);
        if (high > TILE) next.load(p, span, group, channel, width, token + TILE);
        far = __syncthreads_or(far);
        const int end = min(high, TILE);
#pragma unroll 1
        for (int t = 0; t < end; t += AHEAD) {
            if constexpr (STATES)
                if (t % CHUNK == 0) {
                    if (d < width) store_raw<SIZE, ALIGNED>(p.chunks + chunk, lane, s);
                    chunk += i64(p.channels) * SIZE;
                }
            if (far)
                advance<false>(at, t, low, high, d, lane, own, s);
            else
                advance<true>(at, t, low, high, d, lane, own, s);
        }
        __syncthreads();
        if constexpr (STATES) continue;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const Place place(g);
            if (!place.is(width, low, high)) continue;
            float y[VECTOR];
            load_values<Element<F32>>(at.y + place.in_shared(), y);
            if (p.skip)
#pragma unroll
                for (int i = 0; i < VECTOR; ++i)
                    y[i] = __fadd_rn(y[i], __fmul_rn(p.skip[channel + place.channel(i)], now.x[g][i]));
            if constexpr (GATE) {
                float z[VECTOR], gate[VECTOR];
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) z[i] = now.z[g][i];
                silu_all(z, gate);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) y[i] = __fmul_rn(y[i], gate[i]);
            }
            store_tile<In>(p.out + p.of_out.at(span.row, channel + place.d, token + place.t), place, low,
                           high, y);
        }
    }
    if (d < width && !STATES) store_states<SIZE, ALIGNED>(p.after + at_state, lane, s);
}

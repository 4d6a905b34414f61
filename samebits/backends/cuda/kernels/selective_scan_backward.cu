// Gradients of Mamba's scan: docs/contract.md, "State spaces".
//
// A block has the 32 channels of one block of a group, and one sequence, LANES lanes a channel. It goes back through
// the tokens in tiles, and in chunks, from the states before each chunk, which selective_scan.cu has written: it
// computes a chunk's decays and states again, and keeps them in registers. Sums over channels are by shared memory,
// where a thread adds what all channels have left for four states of a token.
//
// Macros, beside those of selective_scan.cuh
//   SUMMED    tokens whose sums over channels are taken at once
//   ALIGNED   whether states and decays lie at multiples of 16 bytes

#include "activations.cuh"
#include "selective_scan.cuh"

static_assert(CHANNELS == contract::CHANNEL_BLOCK);

constexpr int TERM_PITCH =
    LANES <= 4 ? ROW + 4 * LANES : ROW;  // lanes write, and read, without meeting a bank twice
constexpr int PLANE = CHANNELS * TERM_PITCH + ROW % 32;

struct Params {
    const In::Stored *grad, *x;
    const Dt::Stored* delta;
    const Gate::Stored* z;
    const Bc::Stored *b, *c;
    const float *decays, *skip, *bias, *chunks;
    const float* of_after;  // gradients of states; null: zeros
    const int* offsets;
    In::Stored* dx;
    Dt::Stored* ddelta;
    Gate::Stored* dz;
    float *of_bias, *of_skip;  // terms of their gradients, [tokens of all rows, channels], or null
    float *db, *dc, *da, *of_before;
    Strides of_grad, of_x, of_delta, of_z, of_out;
    OfStates of_b, of_c;
    int rows, channels, groups, of_group, blocks, tokens;
};

struct Shared {
    float b[TILE][ROW_PITCH], c[TILE][ROW_PITCH];
    float u[CELLS], v[CELLS], g[CELLS], dv[CELLS], dw[CELLS];
#if GATE
    float y[CELLS];
#endif
    float least[CHANNELS];
    float terms[SUMMED][2][PLANE];
};

struct Values {
    Raw<In> grad[GROUPS], x[GROUPS];
    Raw<Dt> delta[GROUPS];
    Raw<Gate> z[GROUPS];
    Both<true> both;

    __device__ __forceinline__ void load(const Params& p, const Span& span, int group, int channel, int width,
                                         int token) {
        const int low = span.start - token, high = span.stop - token;
        load_tile<In>(p.grad, p.of_grad, span.row, channel, token, width, low, high, grad);
        load_tile<In>(p.x, p.of_x, span.row, channel, token, width, low, high, x);
        load_tile<Dt>(p.delta, p.of_delta, span.row, channel, token, width, low, high, delta);
        if constexpr (GATE) load_tile<Gate>(p.z, p.of_z, span.row, channel, token, width, low, high, z);
        both.load(p.b, p.c, p.of_b, p.of_c, span.row, group, token, low, high);
    }
};

// A chunk's decays and states, from s[0] on; with a gate outputs, too.
template <bool near>
__device__ __forceinline__ void compute_again(Shared& at, int t0, int low, int high, int d, int lane,
                                              const float (&own)[8], float (&s)[CHUNK + 1][8],
                                              float (&a)[CHUNK][8]) {
    float u[CHUNK], v[CHUNK], y[CHUNK] = {};
    take(at.u, d, t0, u);
    take(at.v, d, t0, v);
#pragma unroll
    for (int t = 0; t < CHUNK; ++t) {
        const bool is = near || (t0 + t >= low && t0 + t < high);
        float b[8], c[8];
        load_piece<LANES>(at.b[t0 + t], lane, b);
        if constexpr (GATE) load_piece<LANES>(at.c[t0 + t], lane, c);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            a[t][i] = is ? decay_of<near>(u[t], own[i]) : 1.0f;
            s[t + 1][i] = s[t][i];
            if (SIZE < ROW && 8 * lane + i >= SIZE) continue;
            s[t + 1][i] = __fmaf_rn(a[t][i], s[t][i], __fmul_rn(v[t], b[i]));
            if constexpr (GATE) y[t] = __fmaf_rn(s[t + 1][i], c[i], y[t]);
        }
    }
#if GATE
    contract::deal_sums<LANES / 2>(y, lane);
    constexpr int SUMS = CHUNK < LANES ? 1 : CHUNK / LANES, SHARED_BY = LANES * SUMS / CHUNK;
    if (lane % SHARED_BY == 0)
#pragma unroll
        for (int i = 0; i < SUMS; ++i) at.y[cell(d, t0 + lane / SHARED_BY * SUMS + i)] = y[i];
#endif
}

// Four neighbours' sums over the channels first, first + half, first + 2 half, ..., by halves.
template <int half>
__device__ __forceinline__ float4 sum_of_channels(const float* terms, int first) {
    if constexpr (half == CHANNELS) {
        return *reinterpret_cast<const float4*>(terms + first * TERM_PITCH);
    } else {
        const float4 x = sum_of_channels<2 * half>(terms, first);
        const float4 y = sum_of_channels<2 * half>(terms, first + half);
        return make_float4(__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y), __fadd_rn(x.z, y.z),
                           __fadd_rn(x.w, y.w));
    }
}

// Of SUMMED tokens from t0 on. `to`: that of the tile's first token, in db or dc.
__device__ __forceinline__ void add_channels(const Params& p, const Shared& at, i64 to, int t0, int low,
                                             int high) {
    constexpr int QUADS = ROW / 4;
#pragma unroll
    for (int k = 0; k < share(SUMMED * 2 * QUADS); ++k) {
        const int item = k * THREADS + threadIdx.x, quad = item % QUADS, which = item / QUADS % 2,
                  slot = item / (2 * QUADS), t = t0 + slot;
        const int n = quad < LANES ? 8 * quad : 8 * (quad - LANES) + 4;
        if (slot >= SUMMED || n >= SIZE || t < low || t >= high) continue;
        const float4 sum = sum_of_channels<1>(at.terms[slot][which] + 4 * quad, 0);
        float* at_sum = (which ? p.dc : p.db) + to + i64(t) * p.groups * p.blocks * SIZE + n;
        if constexpr (SIZE % 4 == 0) {
            *reinterpret_cast<float4*>(at_sum) = sum;
        } else {
            const float all[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (n + i < SIZE) at_sum[i] = all[i];
        }
    }
}

// Back through a chunk's tokens. `whole`: all of them are the sequence's, and all channels the group's.
template <bool whole>
__device__ __forceinline__ void go_back(const Params& p, Shared& at, i64 of_sums, int t0, int low, int high,
                                        int d, int lane, bool is, const float (&own)[8],
                                        const float (&s)[CHUNK + 1][8], const float (&a)[CHUNK][8],
                                        float (&carried)[8], float (&alpha)[8]) {
    float u[CHUNK], v[CHUNK], g[CHUNK];
    take(at.u, d, t0, u);
    take(at.v, d, t0, v);
    take(at.g, d, t0, g);
#pragma unroll
    for (int t = CHUNK - 1; t >= 0; --t) {
        if (whole || (t0 + t >= low && t0 + t < high)) {
            float b[8], c[8], of_b[8], of_c[8], both[2] = {};
            load_piece<LANES>(at.b[t0 + t], lane, b);
            load_piece<LANES>(at.c[t0 + t], lane, c);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                of_b[i] = of_c[i] = 0.0f;
                if (SIZE < ROW && 8 * lane + i >= SIZE) continue;
                const float r = __fmaf_rn(g[t], c[i], carried[i]);
                of_b[i] = __fmul_rn(r, v[t]);
                of_c[i] = __fmul_rn(g[t], s[t + 1][i]);
                both[0] = __fmaf_rn(r, b[i], both[0]);
                carried[i] = __fmul_rn(a[t][i], r);
                const float q = __fmul_rn(carried[i], s[t][i]);
                both[1] = __fmaf_rn(q, own[i], both[1]);
                alpha[i] = __fmaf_rn(q, u[t], alpha[i]);
            }
            if (whole || is) {
                float* terms = &at.terms[t % SUMMED][0][d * TERM_PITCH + 4 * lane];
#pragma unroll
                for (int which = 0; which < 2; ++which, terms += PLANE) {
                    const float (&x)[8] = which ? of_c : of_b;
                    *reinterpret_cast<float4*>(terms) = make_float4(x[0], x[1], x[2], x[3]);
                    *reinterpret_cast<float4*>(terms + 4 * LANES) = make_float4(x[4], x[5], x[6], x[7]);
                }
            }
            if constexpr (LANES == 1) {
                at.dv[cell(d, t0 + t)] = both[0], at.dw[cell(d, t0 + t)] = both[1];
            } else {
                contract::deal_sums<LANES / 2>(both, lane);
                if (lane % (LANES / 2) == 0) (lane ? at.dw : at.dv)[cell(d, t0 + t)] = both[0];
            }
        }
        if (t % SUMMED == 0) {
            __syncthreads();
            add_channels(p, at, of_sums, t0 + t, low, high);
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    selective_scan_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Shared& at = *reinterpret_cast<Shared*>(bytes);
    const int group = blockIdx.y / p.blocks, block = blockIdx.y % p.blocks;
    const int channel = group * p.of_group + block * CHANNELS;
    const int width = min(CHANNELS, p.of_group - block * CHANNELS);
    const int lane = threadIdx.x % LANES, d = threadIdx.x / LANES;
    const bool is = d < width;
    const Span span = span_of(p.offsets, blockIdx.x, p.rows, p.tokens);
    const i64 of_chunk = i64(p.channels) * SIZE, own_at = i64(channel + d) * SIZE + 8 * lane;
    const i64 state = blockIdx.x * of_chunk + own_at;
    const i64 row_before = i64(span.row) * p.tokens;
    const i64 first_chunk = ((row_before + span.start) / CHUNK + 2 * i64(blockIdx.x)) * of_chunk + own_at;
    float own[8], carried[8], alpha[8] = {}, before[8];
    load_states<SIZE, ALIGNED>(p.decays + own_at, is, lane, own);
    load_states<SIZE, ALIGNED>(p.of_after + state, is && p.of_after, lane, carried);
    const float least = least_of(own);
    if (lane == 0) at.least[d] = least;
    if (!is)  // the sums' last channels are +0
        for (int i = 0; i < SUMMED * 2; ++i)
            for (int n = 0; n < 8; ++n) at.terms[i / 2][i % 2][d * TERM_PITCH + 8 * lane + n] = 0.0f;
    const int first = span.start / CHUNK * CHUNK;
    int token = first + (span.stop - first + TILE - 1) / TILE * TILE - TILE;
    Values next;
    if (span.start < span.stop) {
        next.load(p, span, group, channel, width, token);
        load_states<SIZE, ALIGNED>(p.chunks + first_chunk + (span.stop - 1 - first) / CHUNK * of_chunk, is,
                                   lane, before);
    }
    __syncthreads();
    for (; token >= first; token -= TILE) {
        const Values now = next;
        const int low = span.start - token, high = span.stop - token;
        bool far = false;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            const Place place(i);
            if (!place.is_in_tile()) continue;
            float u[VECTOR], v[VECTOR], g[VECTOR];
            raw_steps(place, width, low, high, now.delta[i], p.bias, channel, u);
            if constexpr (SOFTPLUS) softplus_all(u);
            if constexpr (GATE) {
                float z[VECTOR];
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) z[j] = now.z[i][j];
                silu_all(z, g);
            }
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                const int e = place.channel(j), t = place.token(j);
                const bool within = e < width && t >= low && t < high;
                u[j] = within ? u[j] : 0.0f;
                v[j] = within ? __fmul_rn(u[j], now.x[i][j]) : -0.0f;
                g[j] = within ? (GATE ? __fmul_rn(now.grad[i][j], g[j]) : now.grad[i][j]) : 0.0f;
                far |= !is_near(u[j], at.least[e]);
            }
            put(at.u + place.in_shared(), u);
            put(at.v + place.in_shared(), v);
            put(at.g + place.in_shared(), g);
        }
        now.both.store(at.b, at.c, low, high);
        if (token > first) next.load(p, span, group, channel, width, token - TILE);
        far = __syncthreads_or(far);
        const i64 of_sums = ((row_before + token) * p.groups + group) * p.blocks * SIZE + i64(block) * SIZE;
#pragma unroll 1
        for (int t0 = TILE - CHUNK; t0 >= 0; t0 -= CHUNK) {
            if (t0 >= high) continue;
            float s[CHUNK + 1][8], a[CHUNK][8];
#pragma unroll
            for (int i = 0; i < 8; ++i) s[0][i] = before[i];
            if (token + t0 > first)
                load_states<SIZE, ALIGNED>(
                    p.chunks + first_chunk + ((token + t0 - first) / CHUNK - 1) * of_chunk, is, lane, before);
            if (far)
                compute_again<false>(at, t0, low, high, d, lane, own, s, a);
            else
                compute_again<true>(at, t0, low, high, d, lane, own, s, a);
            if (width == CHANNELS && t0 >= low && t0 + CHUNK <= high)
                go_back<true>(p, at, of_sums, t0, low, high, d, lane, is, own, s, a, carried, alpha);
            else
                go_back<false>(p, at, of_sums, t0, low, high, d, lane, is, own, s, a, carried, alpha);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            const Place place(i);
            if (!place.is(width, low, high)) continue;
            float dx[VECTOR], dr[VECTOR], of_skip[VECTOR], skip[VECTOR] = {};
            if (p.skip)
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) skip[j] = p.skip[channel + place.channel(j)];
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                const int in_shared = place.in_shared() + j;
                const float x = now.x[i][j], g = at.g[in_shared], dv = at.dv[in_shared];
                dx[j] = __fmul_rn(dv, at.u[in_shared]);
                if (p.skip) dx[j] = __fadd_rn(dx[j], __fmul_rn(g, skip[j]));
                of_skip[j] = __fmul_rn(g, x);
                dr[j] = __fadd_rn(__fmul_rn(dv, x), at.dw[in_shared]);
            }
            if constexpr (SOFTPLUS) {
                float raw[VECTOR], slope[VECTOR];
                raw_steps(place, width, low, high, now.delta[i], p.bias, channel, raw);
                sigmoid_all(raw, slope);
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) dr[j] = __fmul_rn(dr[j], slope[j]);
            }
            const i64 to = p.of_out.at(span.row, channel + place.d, token + place.t);
#if GATE
            float z[VECTOR], s[VECTOR], dz[VECTOR];
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) z[j] = now.z[i][j];
            sigmoid_all(z, s);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                float y = at.y[place.in_shared() + j];
                if (p.skip) y = __fadd_rn(y, __fmul_rn(skip[j], now.x[i][j]));
                dz[j] = contract::silu_gradient_by(s[j], __fmul_rn(now.grad[i][j], y), z[j]);
            }
            store_tile<Gate>(p.dz + to, place, low, high, dz);
#endif
            store_tile<In>(p.dx + to, place, low, high, dx);
            store_tile<Dt>(p.ddelta + to, place, low, high, dr);
            put(at.dw + place.in_shared(), dr);  // read by this thread alone, until here
            put(at.dv + place.in_shared(), of_skip);
        }
        if (p.of_bias || p.of_skip) {  // rows of channels
            __syncthreads();
            for (int i = threadIdx.x; i < TILE * CHANNELS; i += THREADS) {
                const int t = i / CHANNELS, e = i % CHANNELS;
                if (t < low || t >= high || e >= width) continue;
                const i64 to = (row_before + token + t) * p.channels + channel + e;
                if (p.of_bias) p.of_bias[to] = at.dw[cell(e, t)];
                if (p.of_skip) p.of_skip[to] = at.dv[cell(e, t)];
            }
        }
    }
    if (!is) return;
    store_raw<SIZE, ALIGNED>(p.of_before + state, lane, carried);
    store_raw<SIZE, ALIGNED>(p.da + state, lane, alpha);
}

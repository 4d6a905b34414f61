// All gradients of a norm in one launch: of its rows, its weight and its bias. docs/contract.md, "Row reductions".
//
// The first `parts` blocks sum over tokens, for COLUMNS columns each; the others take rows. Both begin with the first
// token, and none waits for another. They go on at about the same pace, so one kind finds in the L2 cache what the
// other has read from memory.
//
// A block of columns: stages of TOKENS tokens go round its first warps, the producers. Each has its next stage on the
// way into registers, widens and normalises it, and writes pairs of a gradient and a normalised value into shared
// memory. The last ADDERS warps carry the chains: a lane has both of each of its columns.
//
// Macros, beside those of norm.cuh
//   SUMS      type of the gradients of weight and bias: F32, BF16 or F16
//   COLUMNS   of a block
//   EACH      columns of a lane that adds: 1, or 2
//   AHEAD     runs of 16 bytes of each matrix that a lane of a producer has on their way

#include "named_barriers.cuh"
#include "norm.cuh"

#ifndef SLOTS  // trial: stages that each lane copies ahead, into shared memory
#define SLOTS 0
#endif
#ifndef BATCH_TOKENS  // trial: tokens times columns that a lane reads ahead
#define BATCH_TOKENS 8
#endif
#ifndef IDLE  // trial: warps that do nothing
#define IDLE 0
#endif

using Sums = Element<SUMS>;

constexpr int ADDERS = COLUMNS > 32 * EACH ? COLUMNS / (32 * EACH) : 1;
constexpr int PRODUCERS = THREADS / 32 - ADDERS - IDLE;  // two barriers for each
constexpr int ACROSS = COLUMNS / RUN;             // lanes that share a token
constexpr int DOWN = 32 / ACROSS;                 // tokens of an access
constexpr int TOKENS = AHEAD * DOWN;
constexpr int MEETING = 32 * (1 + ADDERS);  // threads at a barrier

// Pairs of two columns, in order of their place in a run, then of their run: lanes write side by side. Tokens that a
// warp writes at a time meet no bank twice.
constexpr int PITCH = COLUMNS / 2 + (ACROSS < 8 ? ACROSS : 0);

constexpr int BATCH = BATCH_TOKENS / EACH;  // tokens that a lane reads while it adds earlier ones

static_assert(ACROSS >= 1 && ACROSS <= 32 && TOKENS % BATCH == 0 && ALIGNED && PRODUCERS <= 7);

struct Params {
    NormGradParams of_rows;
    Sums::Stored *weight_grad, *bias_grad;
    i64 parts;
};

// The barriers of a producer: its stage is full, and it is empty again.
__device__ __forceinline__ int full(int producer) { return 1 + producer; }
__device__ __forceinline__ int empty(int producer) { return 1 + PRODUCERS + producer; }

// A lane's part of a stage, as it is stored; zeros beyond the matrix.
struct Part {
    u32 grads[AHEAD][RUN_WORDS<In>], entries[AHEAD][RUN_WORDS<In>];
    float scales[AHEAD], means[AHEAD];

    __device__ __forceinline__ void read(const NormGradParams& p, i64 stage, i64 column, int lane) {
        const bool known = column < p.n;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const i64 token = stage * TOKENS + i * DOWN + lane / ACROSS;
            const bool inside = known && token < p.rows;
#pragma unroll
            for (int w = 0; w < RUN_WORDS<In>; ++w) grads[i][w] = entries[i][w] = 0;
            scales[i] = means[i] = 0.0f;
            if (inside) {
                load_words<RUN_WORDS<In>>(p.grad + token * p.grad_row + column, grads[i]);
                load_words<RUN_WORDS<In>>(p.x + token * p.x_row + column, entries[i]);
                scales[i] = p.scales[token];
                if (p.means) means[i] = p.means[token];
            }
        }
    }

#if SLOTS > 0
    __device__ __forceinline__ void take(const uint4* runs, const float* of_tokens) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            load_words<RUN_WORDS<In>>(runs + (2 * i) * 32, grads[i]);
            load_words<RUN_WORDS<In>>(runs + (2 * i + 1) * 32, entries[i]);
            scales[i] = of_tokens[(2 * i) * 32];
            means[i] = of_tokens[(2 * i + 1) * 32];
        }
    }
#endif

    template <bool CENTRED>
    __device__ __forceinline__ void write(float4* to, int lane) const {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            float4* token = to + (i * DOWN + lane / ACROSS) * PITCH + lane % ACROSS;
#pragma unroll
            for (int pair = 0; pair < RUN / 2; ++pair) {
                float g[2], y[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    g[j] = value(grads[i], 2 * pair + j);
                    y[j] = value(entries[i], 2 * pair + j);
                    if (CENTRED) y[j] = __fsub_rn(y[j], means[i]);
                    y[j] = __fmul_rn(y[j], scales[i]);
                }
                token[pair * ACROSS] = make_float4(g[0], y[0], g[1], y[1]);
            }
        }
    }

    static __device__ __forceinline__ float value(const u32* words, int i) {
        if constexpr (RUN_WORDS<In> == RUN)
            return __uint_as_float(words[i]);
        else
            return In::widen(u16(i % 2 ? words[i / 2] >> 16 : words[i / 2]));
    }
};

#if SLOTS > 0
constexpr int SLOT_RUNS = 2 * AHEAD * 32;  // of a producer's stage

// A lane's own copies of its parts of the next stages: only it reads them.
struct Copies {
    uint4* runs;
    float* of_tokens;

    __device__ __forceinline__ void fetch(const NormGradParams& p, i64 stage, int slot, i64 column, int lane) {
        const bool known = column < p.n;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const i64 token = stage * TOKENS + i * DOWN + lane / ACROSS;
            const bool inside = known && token < p.rows;
            uint4* run = runs + slot * SLOT_RUNS + (2 * i) * 32;
            float* of = of_tokens + slot * SLOT_RUNS + (2 * i) * 32;
            cp_async_16(shared_address(run), inside ? p.grad + token * p.grad_row + column : p.grad,
                        inside ? 16 : 0);
            cp_async_16(shared_address(run + 32), inside ? p.x + token * p.x_row + column : p.x,
                        inside ? 16 : 0);
            if (inside) {
                cp_async_4(shared_address(of), p.scales + token);
                if (p.means) cp_async_4(shared_address(of + 32), p.means + token);
            } else {
                of[0] = of[32] = 0.0f;
            }
        }
    }
};

template <bool CENTRED>
__device__ __forceinline__ void produce(const NormGradParams& p, float4* terms, i64 stages, int producer,
                                        int lane) {
    extern __shared__ uint4 memory[];
    const i64 column = i64(blockIdx.x) * COLUMNS + lane % ACROSS * RUN;
    uint4* rings = memory + PRODUCERS * (TOKENS * PITCH);
    Copies ring{rings + producer * (SLOTS * SLOT_RUNS) + lane,
              reinterpret_cast<float*>(rings + PRODUCERS * (SLOTS * SLOT_RUNS)) +
                  producer * (SLOTS * SLOT_RUNS) + lane};
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
        ring.fetch(p, producer + slot * PRODUCERS, slot, column, lane);
        cp_async_commit();
    }
    int slot = 0;
    for (i64 stage = producer; stage < stages; stage += PRODUCERS) {
        cp_async_wait<SLOTS - 1>();
        Part here;
        here.take(ring.runs + slot * SLOT_RUNS, ring.of_tokens + slot * SLOT_RUNS);
        if (stage >= PRODUCERS) wait_for<MEETING>(empty(producer));
        here.write<CENTRED>(terms, lane);
        arrive_at<MEETING>(full(producer));
        ring.fetch(p, stage + SLOTS * PRODUCERS, slot, column, lane);
        cp_async_commit();
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
    }
}
#else
// The stages of one producer: every PRODUCERS-th.
template <bool CENTRED>
__device__ __forceinline__ void produce(const NormGradParams& p, float4* terms, i64 stages, int producer,
                                        int lane) {
    const i64 column = i64(blockIdx.x) * COLUMNS + lane % ACROSS * RUN;
    Part next;
    next.read(p, producer, column, lane);
    for (i64 stage = producer; stage < stages; stage += PRODUCERS) {
        if (stage >= PRODUCERS) wait_for<MEETING>(empty(producer));
        next.write<CENTRED>(terms, lane);
        arrive_at<MEETING>(full(producer));
        next.read(p, stage + PRODUCERS, column, lane);
    }
}
#endif

// A token's pairs of this lane's columns.
struct Pairs {
    float2 of[EACH];

    __device__ __forceinline__ void read(const float2* from) {
        if constexpr (EACH == 2) {
            const float4 both = *reinterpret_cast<const float4*>(from);
            of[0] = make_float2(both.x, both.y), of[1] = make_float2(both.z, both.w);
        } else {
            of[0] = *from;
        }
    }
};

// The columns' chains.
__device__ __forceinline__ void add(const Params& p, const float2* terms, i64 stages, int adder, int lane) {
    const int own = (adder * 32 + lane) * EACH;
    const int place = own % COLUMNS;  // lanes that are left over repeat sums, and store none
    Pairs next[BATCH];
    const auto read = [&](int producer, int batch) {
        const float2* from = terms + (producer * TOKENS + batch * BATCH) * (2 * PITCH) + place;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) next[i].read(from + i * (2 * PITCH));
    };
    float weight[EACH] = {}, bias[EACH] = {};
    if (stages > 0) {
        wait_for<MEETING>(full(0));
        read(0, 0);
    }
    int producer = 0;
    for (i64 stage = 0; stage < stages; ++stage) {
        const int following = producer + 1 == PRODUCERS ? 0 : producer + 1;
#pragma unroll
        for (int batch = 0; batch < TOKENS / BATCH; ++batch) {
            Pairs here[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) here[i] = next[i];
            if (batch + 1 < TOKENS / BATCH) {
                read(producer, batch + 1);
            } else if (stage + 1 < stages) {
                wait_for<MEETING>(full(following));
                read(following, 0);
            }
            // Zeros beyond the last token change nothing.
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
#pragma unroll
                for (int c = 0; c < EACH; ++c) {
                    weight[c] = __fmaf_rn(here[i].of[c].x, here[i].of[c].y, weight[c]);
                    bias[c] = __fadd_rn(bias[c], here[i].of[c].x);
                }
        }
        if (stage + PRODUCERS < stages) arrive_at<MEETING>(empty(producer));
        producer = following;
    }
    if (own >= COLUMNS) return;
#pragma unroll
    for (int c = 0; c < EACH; ++c) {
        const int pair = (place + c) / 2;
        const i64 column =
            i64(blockIdx.x) * COLUMNS + pair % ACROSS * RUN + pair / ACROSS * 2 + (place + c) % 2;
        if (column >= p.of_rows.n) return;
        p.weight_grad[column] = Sums::narrow(contract::canonical(__fadd_rn(weight[c], 0.0f)));
        p.bias_grad[column] = Sums::narrow(contract::canonical(bias[c]));
    }
}

template <bool CENTRED>
__device__ __forceinline__ void gradients(const Params& p, Told (&told)[ROWS]) {
    extern __shared__ uint4 memory[];
    const int warp = Row::warp_of_block(), lane = threadIdx.x % 32;
    if (blockIdx.x >= p.parts) {
        Row row(told, p.of_rows.n);
        row.row -= p.parts * ROWS;
        if (row.row < p.of_rows.rows) norm_backward_rows<CENTRED>(p.of_rows, row);
        return;
    }
    const i64 stages = (p.of_rows.rows + TOKENS - 1) / TOKENS;
    if (warp < PRODUCERS)
        produce<CENTRED>(p.of_rows, reinterpret_cast<float4*>(memory) + warp * (TOKENS * PITCH), stages, warp,
                         lane);
    else if (warp >= PRODUCERS + IDLE)
        add(p, reinterpret_cast<const float2*>(memory), stages, warp - PRODUCERS - IDLE, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_gradients(const __grid_constant__ Params p) {
    __shared__ Told told[ROWS];
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (p.of_rows.means)
        gradients<true>(p, told);
    else
        gradients<false>(p, told);
}

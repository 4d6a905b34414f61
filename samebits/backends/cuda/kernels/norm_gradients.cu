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
#define BATCH_TOKENS (COLUMNS <= 16 ? 16 : 8)
#endif
#ifndef STAGES_TOGETHER  // trial: stages whose additions are one piece of code, or 0: those of all producers
#define STAGES_TOGETHER 0
#endif
#ifndef PAIRED  // trial: lanes read two tokens at a time
#define PAIRED 0
#endif
#ifndef IDLE  // trial: warps that do nothing
#define IDLE 0
#endif

using Sums = Element<SUMS>;

constexpr int ADDERS = COLUMNS > 32 * EACH ? COLUMNS / (32 * EACH) : 1;
constexpr int PRODUCERS = THREADS / 32 - ADDERS - IDLE;  // two barriers for each
constexpr int ACROSS = COLUMNS / RUN;                    // lanes that share a token
constexpr int DOWN = 32 / ACROSS;                        // tokens of an access
constexpr int TOKENS = AHEAD * DOWN;
constexpr int MEETING = 32 * (1 + ADDERS);  // threads at a barrier

#if PAIRED
// Columns of two tokens, in order of their place in a run, then of their run: lanes write side by side. What eight of
// them write meets no bank twice.
constexpr int PITCH = COLUMNS + (ACROSS < 8 ? ACROSS : 0);
constexpr int TERMS = TOKENS / 2 * PITCH;
#else
// Pairs of two columns, in order of their place in a run, then of their run: lanes write side by side. Tokens that a
// warp writes at a time meet no bank twice.
constexpr int PITCH = COLUMNS / 2 + (ACROSS < 8 ? ACROSS : 0);
constexpr int TERMS = TOKENS * PITCH;
#endif

constexpr int BATCH = BATCH_TOKENS / EACH;  // tokens that a lane reads while it adds earlier ones

constexpr int TOGETHER = STAGES_TOGETHER ? STAGES_TOGETHER : PRODUCERS;

static_assert(PRODUCERS % TOGETHER == 0);
static_assert(ACROSS >= 1 && ACROSS <= 32 && TOKENS % BATCH == 0 && ALIGNED && PRODUCERS <= 7);

// The place in a stage of a lane's run.
__device__ __forceinline__ int token_of(int lane, int i) {
    return PAIRED ? lane / ACROSS * AHEAD + i : i * DOWN + lane / ACROSS;
}

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
            const i64 token = stage * TOKENS + token_of(lane, i);
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

#if PAIRED
    template <bool CENTRED>
    __device__ __forceinline__ void write(float4* to, int lane) const {
        float4* first = to + lane / ACROSS * PITCH + lane % ACROSS;
#pragma unroll
        for (int i = 0; i < AHEAD; i += 2)
#pragma unroll
            for (int column = 0; column < RUN; ++column) {
                float g[2], y[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    g[j] = value(grads[i + j], column);
                    y[j] = value(entries[i + j], column);
                    if (CENTRED) y[j] = __fsub_rn(y[j], means[i + j]);
                    y[j] = __fmul_rn(y[j], scales[i + j]);
                }
                first[i / 2 * (DOWN * PITCH) + column * ACROSS] = make_float4(g[0], y[0], g[1], y[1]);
            }
    }
#else
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
#endif

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

    __device__ __forceinline__ void fetch(const NormGradParams& p, i64 stage, int slot, i64 column,
                                          int lane) {
        const bool known = column < p.n;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const i64 token = stage * TOKENS + token_of(lane, i);
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
    uint4* rings = memory + PRODUCERS * TERMS;
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

// A lane's columns in some tokens.
#if PAIRED
using Terms = float4;

struct Batch {
    static constexpr int PAIRS = BATCH / 2, LANES = COLUMNS < 32 ? COLUMNS : 32;
    float4 two[PAIRS][EACH];

    __device__ __forceinline__ void read(const float4* stage, int batch) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int pair = batch * PAIRS + i;
            const float4* from = stage + (pair % (AHEAD / 2) * DOWN + pair / (AHEAD / 2)) * PITCH;
#pragma unroll
            for (int c = 0; c < EACH; ++c) two[i][c] = from[c * LANES];
        }
    }

    // Zeros beyond the last token change nothing.
    __device__ __forceinline__ void add_to(float (&weight)[EACH], float (&bias)[EACH]) const {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
#pragma unroll
            for (int c = 0; c < EACH; ++c) {
                weight[c] = __fmaf_rn(two[i][c].x, two[i][c].y, weight[c]);
                bias[c] = __fadd_rn(bias[c], two[i][c].x);
                weight[c] = __fmaf_rn(two[i][c].z, two[i][c].w, weight[c]);
                bias[c] = __fadd_rn(bias[c], two[i][c].z);
            }
    }

    static __device__ __forceinline__ int place(int adder, int lane) {
        return adder * (32 * EACH) + lane % LANES;
    }
    static __device__ __forceinline__ int column(int place, int c) {
        return (place + c * LANES) % ACROSS * RUN + (place + c * LANES) / ACROSS;
    }
};
#else
using Terms = float2;

struct Batch {
    float2 of[BATCH][EACH];

    __device__ __forceinline__ void read(const float2* stage, int batch) {
        const float2* from = stage + batch * BATCH * (2 * PITCH);
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if constexpr (EACH == 2) {
                const float4 both = *reinterpret_cast<const float4*>(from + i * (2 * PITCH));
                of[i][0] = make_float2(both.x, both.y), of[i][1] = make_float2(both.z, both.w);
            } else {
                of[i][0] = from[i * (2 * PITCH)];
            }
    }

    // Zeros beyond the last token change nothing.
    __device__ __forceinline__ void add_to(float (&weight)[EACH], float (&bias)[EACH]) const {
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
#pragma unroll
            for (int c = 0; c < EACH; ++c) {
                weight[c] = __fmaf_rn(of[i][c].x, of[i][c].y, weight[c]);
                bias[c] = __fadd_rn(bias[c], of[i][c].x);
            }
    }

    static __device__ __forceinline__ int place(int adder, int lane) {
        return (adder * 32 + lane) * EACH % COLUMNS;
    }
    static __device__ __forceinline__ int column(int place, int c) {
        const int pair = (place + c) / 2;
        return pair % ACROSS * RUN + pair / ACROSS * 2 + (place + c) % 2;
    }
};
#endif

// The columns' chains. Some stages are one piece of code, in which reads of terms come long before these are added:
// between two turns of a loop the compiler leaves no time for that.
__device__ __forceinline__ void add(const Params& p, const Terms* terms, i64 stages, int adder, int lane) {
    const int place = Batch::place(adder, lane);
    Batch here{};
    float weight[EACH] = {}, bias[EACH] = {};
    int first = 0;
    for (i64 stage = 0; stage < stages; stage += TOGETHER) {
#pragma unroll
        for (int turn = 0; turn < TOGETHER; ++turn) {
            wait_for<MEETING>(full(first + turn));
#pragma unroll
            for (int batch = 0; batch < TOKENS / BATCH; ++batch) {
                Batch next;
                next.read(terms + (first + turn) * (TERMS * int(sizeof(float4) / sizeof(Terms))) + place,
                          batch);
                here.add_to(weight, bias);
                here = next;
                const i64 before = stage + turn - 1;
                if (batch == 0 && before >= 0 && before + PRODUCERS < stages)
                    arrive_at<MEETING>(empty((first + turn + PRODUCERS - 1) % PRODUCERS));
            }
        }
        first = first + TOGETHER == PRODUCERS ? 0 : first + TOGETHER;
    }
    here.add_to(weight, bias);
    if (lane * EACH >= COLUMNS) return;  // lanes that are left over repeat sums
#pragma unroll
    for (int c = 0; c < EACH; ++c) {
        const i64 column = i64(blockIdx.x) * COLUMNS + Batch::column(place, c);
        if (column >= p.of_rows.n) continue;
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
    constexpr int ROUND = TOGETHER * TOKENS;
    const i64 stages = (p.of_rows.rows + ROUND - 1) / ROUND * TOGETHER;
    if (warp < PRODUCERS)
        produce<CENTRED>(p.of_rows, reinterpret_cast<float4*>(memory) + warp * TERMS, stages, warp, lane);
    else if (warp >= PRODUCERS + IDLE)
        add(p, reinterpret_cast<const Terms*>(memory), stages, warp - PRODUCERS - IDLE, lane);
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

// All gradients of a norm in one launch: of its rows, its weight and its bias. docs/contract.md, "Row reductions".
//
// The first `parts` blocks sum over tokens, for COLUMNS columns each; the others take rows. Both begin with the first
// token, and none waits for another. They go on at about the same pace, so one kind finds in the L2 cache what the
// other has read from memory.
//
// A block of columns: stages of TOKENS tokens go round its first warps, the producers. Each has its next stage on the
// way into registers, widens and normalises it, and writes gradients and normalised values, of two tokens side by side,
// into shared memory. The last ADDERS warps carry the chains: a lane has both of each of its columns.
//
// Macros, beside those of norm.cuh
//   SUMS      type of the gradients of weight and bias: F32, BF16 or F16
//   COLUMNS   of a block
//   EACH      columns of a lane that adds: 1, or 2
//   AHEAD     runs of 16 bytes of each matrix that a lane of a producer has on their way

#include "named_barriers.cuh"
#include "norm.cuh"

using Sums = Element<SUMS>;

constexpr int ADDERS = COLUMNS > 32 * EACH ? COLUMNS / (32 * EACH) : 1;
constexpr int PRODUCERS = THREADS / 32 - ADDERS;  // two barriers for each
constexpr int ACROSS = COLUMNS / RUN;             // lanes that share a token
constexpr int DOWN = 32 / ACROSS;                 // tokens of an access
constexpr int TOKENS = AHEAD * DOWN;
constexpr int MEETING = 32 * (1 + ADDERS);  // threads at a barrier

// Columns of two tokens, in order of their place in a run, then of their run: lanes write side by side. What eight of
// them write meets no bank twice.
constexpr int PITCH = COLUMNS + (ACROSS < 8 ? ACROSS : 0);
constexpr int TERMS = TOKENS / 2 * PITCH;

// What a lane reads at a time, while it adds what it read before: pairs of tokens, of EACH columns, LANES apart.
constexpr int PAIRS = (COLUMNS <= 16 ? 8 : 4) / EACH;
constexpr int LANES = COLUMNS < 32 ? COLUMNS : 32;
constexpr int BATCHES = TOKENS / (2 * PAIRS);

static_assert(ACROSS >= 1 && ACROSS <= 32 && AHEAD % 2 == 0 && TOKENS == BATCHES * 2 * PAIRS && ALIGNED);
// The adder waits for the next stage before it frees the last one.
static_assert(PRODUCERS >= 2 && PRODUCERS <= 7 && COLUMNS % (LANES * EACH) == 0);

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

    __device__ __forceinline__ void read(const NormGradParams& p, int stage, i64 column, int lane) {
        const bool known = column < p.n;
        const i64 first = i64(stage) * TOKENS + lane / ACROSS * AHEAD;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const i64 token = first + i;
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

    static __device__ __forceinline__ float value(const u32* words, int i) {
        if constexpr (RUN_WORDS<In> == RUN)
            return __uint_as_float(words[i]);
        else
            return In::widen(u16(i % 2 ? words[i / 2] >> 16 : words[i / 2]));
    }
};

// The stages of one producer: every PRODUCERS-th.
template <bool CENTRED>
__device__ __forceinline__ void produce(const NormGradParams& p, float4* terms, int stages, int producer,
                                        int lane) {
    const i64 column = i64(blockIdx.x) * COLUMNS + lane % ACROSS * RUN;
    Part next;
    next.read(p, producer, column, lane);
    for (int stage = producer; stage < stages; stage += PRODUCERS) {
        if (stage >= PRODUCERS) wait_for<MEETING>(empty(producer));
        next.write<CENTRED>(terms, lane);
        arrive_at<MEETING>(full(producer));
        next.read(p, stage + PRODUCERS, column, lane);
    }
}

// A lane's columns in some pairs of tokens.
struct Batch {
    float4 pairs[PAIRS][EACH];

    __device__ __forceinline__ void read(const float4* stage, int batch) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int pair = batch * PAIRS + i;
            const float4* from = stage + (pair % (AHEAD / 2) * DOWN + pair / (AHEAD / 2)) * PITCH;
#pragma unroll
            for (int c = 0; c < EACH; ++c) pairs[i][c] = from[c * LANES];
        }
    }

    // Zeros beyond the last token change nothing.
    __device__ __forceinline__ void add_to(float (&weight)[EACH], float (&bias)[EACH]) const {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
#pragma unroll
            for (int c = 0; c < EACH; ++c) {
                const float4 pair = pairs[i][c];
                weight[c] = __fmaf_rn(pair.x, pair.y, weight[c]);
                bias[c] = __fadd_rn(bias[c], pair.x);
                weight[c] = __fmaf_rn(pair.z, pair.w, weight[c]);
                bias[c] = __fadd_rn(bias[c], pair.z);
            }
    }
};

// The columns' chains. A round, one stage of each producer, is one piece of code, in which a batch is read long before
// it is added, from stage to stage, too: between two turns of a loop the compiler leaves no time for that. A stage is
// empty once its last batch is added, after the first read of the next stage.
__device__ __forceinline__ void add(const Params& p, const float4* terms, int stages, int adder, int lane) {
    const int place = adder * (32 * EACH) + lane % LANES;
    Batch here{};
    float weight[EACH] = {}, bias[EACH] = {};
    for (int round = 0; round < stages; round += PRODUCERS) {
#pragma unroll
        for (int producer = 0; producer < PRODUCERS; ++producer) {
            wait_for<MEETING>(full(producer));
#pragma unroll
            for (int batch = 0; batch < BATCHES; ++batch) {
                Batch next;
                next.read(terms + producer * TERMS + place, batch);
                here.add_to(weight, bias);
                here = next;
                const int before = round + producer - 1;
                if (batch == 0 && before >= 0 && before + PRODUCERS < stages)
                    arrive_at<MEETING>(empty((producer + PRODUCERS - 1) % PRODUCERS));
            }
        }
    }
    here.add_to(weight, bias);
    if (lane * EACH >= COLUMNS) return;  // lanes that are left over repeat sums
#pragma unroll
    for (int c = 0; c < EACH; ++c) {
        const int at = place + c * LANES;
        const i64 column = i64(blockIdx.x) * COLUMNS + at % ACROSS * RUN + at / ACROSS;
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
    constexpr int ROUND = PRODUCERS * TOKENS;
    const int stages = int((p.of_rows.rows + ROUND - 1) / ROUND) * PRODUCERS;
    if (warp < PRODUCERS)
        produce<CENTRED>(p.of_rows, reinterpret_cast<float4*>(memory) + warp * TERMS, stages, warp, lane);
    else
        add(p, reinterpret_cast<const float4*>(memory), stages, warp - PRODUCERS, lane);
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

// Sums of few long rows: docs/contract.md, "Row reductions". All blocks of threads but a row's last one sum blocks
// of 128 entries, a step of all 32 chains at a time. The last one adds the steps up as they come. It starts after
// the others, so it never waits for one that has not started.
//
// A sum of a step is stored as the complement of its bits. That is never zero: no addition gives a NaN of all ones.
// So zero, which is there first, stands for a sum that is still to come.
//
// Macros: IN, OUT and VECTOR as in rows.cu. WARPS is 8 and PASSES 0.

#include "named_barriers.cuh"
#include "row_matrix.cuh"

#ifndef ONLY  // trial, for times alone: 0 all, 1 the adding blocks, 2 those that sum
#define ONLY 0
#endif
#ifndef HAND  // trial: 1: readers hand their steps over one by one
#define HAND 0
#endif
#ifndef PRE  // trial: 1: the next steps are on their way while some are summed
#define PRE 0
#endif
#ifndef DEFER  // trial: 1: only sums wait for the kernel before, which makes zeros of them; x is ready
#define DEFER 0
#endif
#ifndef STEPS_EACH
#define STEPS_EACH 32
#endif
#ifndef STEPS_AHEAD
#define STEPS_AHEAD 4
#endif

using In = Element<IN>;
using Out = Element<OUT>;

constexpr int CHAINS = contract::CHAINS;
constexpr int AHEAD = STEPS_AHEAD;        // steps that a block has on their way
constexpr int ADDERS = THREADS / 32 - 1;  // warps that read steps for the first one
constexpr int EACH = STEPS_EACH;          // steps that one reads at a time
constexpr int ROUND = ADDERS * EACH;      // steps that they read together
constexpr int TOGETHER = 16;              // steps whose sums are in registers

static_assert(4 * WARPS == CHAINS && PASSES == 0 && ROUND % TOGETHER == 0);

enum { SUM, MEAN, NORM };

struct Params {
    const In::Stored* x;
    u32* sums;  // [rows, steps, CHAINS]
    Out::Stored* out;
    i64 x_row, n, steps;
    int what;
};

__device__ __forceinline__ void sum_steps(const Params& p) {
    __shared__ Told told[ROWS];
    const Row row(told, p.n);
    Entries<In, 65> x(p.x + blockIdx.y * p.x_row, 0, row);  // so many words are not held
    x.begin(0);
    u32* sums = p.sums + blockIdx.y * p.steps * CHAINS + row.warp * 4 + row.lane / GROUP;
#if PRE
    u32 next[AHEAD][WORDS<In>];
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) x.load_at((i64(blockIdx.x) * AHEAD + s) * PASS, next[s]);
#endif
    for (i64 first = i64(blockIdx.x) * AHEAD; first < p.steps; first += i64(gridDim.x - 1) * AHEAD) {
        u32 words[AHEAD][WORDS<In>];
#if PRE
#pragma unroll
        for (int s = 0; s < AHEAD; ++s)
#pragma unroll
            for (int w = 0; w < WORDS<In>; ++w) words[s][w] = next[s][w];
#pragma unroll
        for (int s = 0; s < AHEAD; ++s)
            x.load_at((first + i64(gridDim.x - 1) * AHEAD + s) * PASS, next[s]);
#else
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) x.load_at((first + s) * PASS, words[s]);
#endif
#if DEFER
        wait_for_kernel_before();
#endif
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
            float terms[OWN];
            widen_words<In>(words[s], terms);
            if (p.what == NORM)
#pragma unroll
                for (int i = 0; i < OWN; ++i) terms[i] = __fmul_rn(terms[i], terms[i]);
            const u32 sum = ~__float_as_uint(row.block_sum(terms));
            if (row.lane % GROUP == 0 && first + s < p.steps)
                asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(sums + (first + s) * CHAINS),
                             "r"(sum)
                             : "memory");
        }
    }
}

__device__ __forceinline__ u32 sum_so_far(const u32* at) {
    u32 sum;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(sum) : "l"(at) : "memory");
    return sum;
}

// What a lane of a warp reads: a chain's sums of some steps.
struct Part {
    u32 sums[EACH];

    __device__ __forceinline__ void ask(const u32* from, i64 step, i64 steps) {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            sums[i] = step + i < steps ? sum_so_far(from + (step + i) * CHAINS) : ~0u;
    }

    __device__ __forceinline__ bool misses_one() const {
        bool misses = false;
#pragma unroll
        for (int i = 0; i < EACH; ++i) misses |= sums[i] == 0;
        return misses;
    }

    // Asks again, for all missing ones at once: one after the other each would take as long.
    __device__ __forceinline__ void tell(const u32* from, i64 step, float (*to)[CHAINS], int lane) {
        while (misses_one()) {
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (sums[i] == 0) sums[i] = sum_so_far(from + (step + i) * CHAINS);
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) to[i][lane] = __uint_as_float(~sums[i]);
    }
};

__device__ __forceinline__ float add_round(const float (*from)[CHAINS], float chain, int lane) {
    float next[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) next[i] = from[i][lane];
#pragma unroll
    for (int first = 0; first < ROUND; first += TOGETHER) {
        float here[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) here[i] = next[i];
        if (first + TOGETHER < ROUND)
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) next[i] = from[first + TOGETHER + i][lane];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) chain = __fadd_rn(chain, here[i]);  // zeros beyond change nothing
    }
    return chain;
}

__device__ __forceinline__ void finish(const Params& p, float chain, int lane) {
    float sum = contract::sum_of_lanes(chain);
    if (p.what == MEAN) sum = __fdiv_rn(sum, static_cast<float>(p.n));
    if (p.what == NORM) sum = __fsqrt_rn(sum);
    if (lane == 0) p.out[blockIdx.y] = Out::narrow(contract::canonical(sum));
}

#if HAND
constexpr int MEETING = 64;
__device__ __forceinline__ int full(int reader) { return 1 + reader; }
__device__ __forceinline__ int empty(int reader) { return 1 + ADDERS + reader; }

// Parts of EACH steps go round the readers; the first warp adds them up.
__device__ __forceinline__ void add_steps(const Params& p) {
    extern __shared__ float parts[][EACH][CHAINS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, reader = warp - 1;
    const u32* from = p.sums + blockIdx.y * p.steps * CHAINS + lane;
    const i64 count = (p.steps + EACH - 1) / EACH;
    if (warp > 0) {
        Part part;
        part.ask(from, i64(reader) * EACH, p.steps);
        for (i64 at = reader; at < count; at += ADDERS) {
            Part next;
            next.ask(from, (at + ADDERS) * EACH, p.steps);
            while (part.misses_one()) {
#pragma unroll
                for (int i = 0; i < EACH; ++i)
                    if (part.sums[i] == 0) part.sums[i] = sum_so_far(from + (at * EACH + i) * CHAINS);
            }
            if (at >= ADDERS) wait_for<MEETING>(empty(reader));
#pragma unroll
            for (int i = 0; i < EACH; ++i) parts[reader][i][lane] = __uint_as_float(~part.sums[i]);
            arrive_at<MEETING>(full(reader));
            part = next;
        }
        return;
    }
    float chain = 0.0f, next[TOGETHER];
    const auto read = [&](int of, int first) {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) next[i] = parts[of][first + i][lane];
    };
    wait_for<MEETING>(full(0));
    read(0, 0);
    int here = 0;
    for (i64 at = 0; at < count; ++at) {
        const int following = here + 1 == ADDERS ? 0 : here + 1;
#pragma unroll
        for (int first = 0; first < EACH; first += TOGETHER) {
            float terms[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) terms[i] = next[i];
            if (first + TOGETHER < EACH) {
                read(here, first + TOGETHER);
            } else if (at + 1 < count) {
                wait_for<MEETING>(full(following));
                read(following, 0);
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) chain = __fadd_rn(chain, terms[i]);
        }
        if (at + ADDERS < count) arrive_at<MEETING>(empty(here));
        here = following;
    }
    finish(p, chain, lane);
}
#else
__device__ __forceinline__ void add_steps(const Params& p) {
    extern __shared__ float rounds[][ROUND][CHAINS];  // two
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32* from = p.sums + blockIdx.y * p.steps * CHAINS + lane;
    const i64 count = (p.steps + ROUND - 1) / ROUND;
    const int own = (warp - 1) * EACH;
    float chain = 0.0f;
    Part part;
    if (warp > 0) part.ask(from, own, p.steps);
    for (i64 round = 0; round <= count; ++round) {
        if (warp == 0) {
            if (round > 0) chain = add_round(rounds[(round - 1) % 2], chain, lane);
        } else if (round < count) {
            Part next;
            next.ask(from, (round + 1) * ROUND + own, p.steps);
            part.tell(from, round * ROUND + own, rounds[round % 2] + own, lane);
            part = next;
        }
        __syncthreads();
    }
    if (warp == 0) finish(p, chain, lane);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) long_sums(const __grid_constant__ Params p) {
#if !DEFER
    wait_for_kernel_before();
#endif
    let_kernel_behind_start();
    if (blockIdx.x < gridDim.x - 1) {
        if (ONLY != 1) sum_steps(p);
    } else {
#if DEFER
        wait_for_kernel_before();
#endif
        if (ONLY != 2) add_steps(p);
    }
}

#if DEFER
// Makes zeros of the sums. The kernel behind may start at once: it waits before it touches them.
extern "C" __global__ void __launch_bounds__(THREADS) clear_sums(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const i64 count = p.steps * (CHAINS / 4);
    uint4* to = reinterpret_cast<uint4*>(p.sums) + blockIdx.y * count;
    for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < count; i += i64(gridDim.x) * THREADS)
        to[i] = make_uint4(0, 0, 0, 0);
}
#endif

// Sums of few long rows: docs/contract.md, "Row reductions". All blocks of threads but a row's last one sum blocks
// of 128 entries, a step of all 32 chains at a time. The last one adds the steps up as they come. It starts after
// the others, so it never waits for one that has not started.
//
// A sum of a step is stored as the complement of its bits. That is never zero: no addition gives a NaN of all ones.
// So zero, which is there first, stands for a sum that is still to come.
//
// Macros: IN, OUT and VECTOR as in rows.cu, and AHEAD, the steps that a block has on their way. WARPS is 8 and
// PASSES 0.

#include "row_matrix.cuh"

using In = Element<IN>;
using Out = Element<OUT>;

constexpr int CHAINS = contract::CHAINS;
constexpr int ADDERS = THREADS / 32 - 1;  // warps that read steps for the first one
constexpr int EACH = 32;                  // steps that one reads at a time
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
    for (i64 first = i64(blockIdx.x) * AHEAD; first < p.steps; first += i64(gridDim.x - 1) * AHEAD) {
        u32 words[AHEAD][WORDS<In>];
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) x.load_at((first + s) * PASS, words[s]);
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
    __device__ __forceinline__ void tell(const u32* from, i64 step, float4 (*to)[CHAINS], int lane) {
        while (misses_one()) {
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (sums[i] == 0) sums[i] = sum_so_far(from + (step + i) * CHAINS);
        }
#pragma unroll
        for (int i = 0; i < EACH; i += 4)
            to[i / 4][lane] = make_float4(__uint_as_float(~sums[i]), __uint_as_float(~sums[i + 1]),
                                          __uint_as_float(~sums[i + 2]), __uint_as_float(~sums[i + 3]));
    }
};

// A chain, and its next steps, which are read while those before them are added.
struct Chain {
    float sum = 0.0f;
    float4 next[TOGETHER / 4] = {};  // zeros change nothing

    __device__ __forceinline__ void add(const float4 (*from)[CHAINS], int lane) {
#pragma unroll
        for (int first = 0; first < ROUND; first += TOGETHER) {
            float4 here[TOGETHER / 4];
#pragma unroll
            for (int i = 0; i < TOGETHER / 4; ++i) here[i] = next[i];
#pragma unroll
            for (int i = 0; i < TOGETHER / 4; ++i) next[i] = from[first / 4 + i][lane];
            add_up(here);
        }
    }

    __device__ __forceinline__ void add_up(const float4 (&steps)[TOGETHER / 4]) {
#pragma unroll
        for (int i = 0; i < TOGETHER / 4; ++i) {
            sum = __fadd_rn(sum, steps[i].x);
            sum = __fadd_rn(sum, steps[i].y);
            sum = __fadd_rn(sum, steps[i].z);
            sum = __fadd_rn(sum, steps[i].w);
        }
    }
};

__device__ __forceinline__ void add_steps(const Params& p) {
    extern __shared__ float4 rounds[][ROUND / 4][CHAINS];  // two
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32* from = p.sums + blockIdx.y * p.steps * CHAINS + lane;
    const i64 count = (p.steps + ROUND - 1) / ROUND;
    const int own = (warp - 1) * EACH;
    Chain chain;
    Part parts[2];
    if (warp > 0) parts[0].ask(from, own, p.steps);
    for (i64 begin = 0; begin <= count; begin += 2) {  // two, so that parts stay in their registers
#pragma unroll
        for (int turn = 0; turn < 2; ++turn) {
            const i64 round = begin + turn;
            if (warp == 0) {
                if (0 < round && round <= count) chain.add(rounds[1 - turn], lane);
            } else if (round < count) {
                parts[1 - turn].ask(from, (round + 1) * ROUND + own, p.steps);
                parts[turn].tell(from, round * ROUND + own, rounds[turn] + own / 4, lane);
            }
            __syncthreads();
        }
    }
    if (warp > 0) return;
    chain.add_up(chain.next);
    float sum = contract::sum_of_lanes(chain.sum);
    if (p.what == MEAN) sum = __fdiv_rn(sum, static_cast<float>(p.n));
    if (p.what == NORM) sum = __fsqrt_rn(sum);
    if (lane == 0) p.out[blockIdx.y] = Out::narrow(contract::canonical(sum));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) long_sums(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (blockIdx.x < gridDim.x - 1)
        sum_steps(p);
    else
        add_steps(p);
}

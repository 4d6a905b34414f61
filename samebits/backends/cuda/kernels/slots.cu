// Rows of a layer of experts: copied to their slots, and summed over the slots of a token.
//
// take_slots: out[numbers[i]] = x[i / slots], times weights[i].
// sum_slots: out[i] = the sum over j < SLOTS of row numbers[i * SLOTS + j] of x, times weights[i * SLOTS + j].
// Without numbers it is x[i, j], at strides. Few terms are one block of docs/contract.md, "Row reductions".
// route: where slots are that were sorted by their experts, where those of each expert end, and their sequences.
//
// Products and sums have the type of weights, if that is F32, and are rounded to it. A thread of sum_slots has one
// access to memory for each row that it reads. In take_slots a token is read once: a block has 256 / lanes tokens, or a
// piece of one, and a thread some columns of a token. Lanes are a power of two, so that nothing is divided.
//
// Macros
//   TYPE      of rows: F32, BF16 or F16; route has none
//   WEIGHT    of weights: TYPE, or F32 in sum_slots
//   VECTOR    entries of one access to memory: 16 bytes' worth, or 1
//   SLOTS     terms of a sum; nothing in take_slots
//   WEIGHTED  1: there are weights

#include "launch.cuh"
#include "vectors.cuh"

using E = Element<TYPE>;
using Weight = Element<WEIGHT>;
using Out = Weight;
using Stored = E::Stored;

template <class S>
struct alignas(VECTOR * sizeof(S)) RunOf {
    S of[VECTOR];
};
using Run = RunOf<Stored>;

struct Params {
    const Stored* x;
    const Weight::Stored* weights;
    const i64* numbers;
    Out::Stored* out;
    i64 count, n;      // tokens, and entries of a row
    i64 outer, inner;  // entries from x[i] to x[i + 1], and from row to row
    i64 slots;         // of a token
};

struct TakeParams : Params {
    i64 lanes;    // threads of a token in a block: 2 to that power
    i64 streams;  // whether what is written does not stay in the L2 cache
};

__device__ __forceinline__ const Run& run(const Stored* at) { return *reinterpret_cast<const Run*>(at); }

// A token, and its columns that are this thread's.
struct Mine {
    i64 token, first, step;
    __device__ __forceinline__ explicit Mine(const TakeParams& p) {
        const int lanes = int(p.lanes), thread = threadIdx.x;
        token = (i64(blockIdx.x) << (8 - lanes)) + (thread >> lanes);
        first = ((i64(blockIdx.y) << lanes) + (thread & ((1 << lanes) - 1))) * VECTOR;
        step = (i64(gridDim.y) << lanes) * VECTOR;
    }
};

// Writes a run, times the weight if there are any.
__device__ __forceinline__ void store_product(Stored* to, const Run& x, float weight, bool streams) {
    if constexpr (WEIGHTED) {
        float products[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) products[i] = __fmul_rn(E::widen(x.of[i]), weight);
        store_values<E>(to, products, streams);
    } else if constexpr (VECTOR == 1) {
        *to = x.of[0];
    } else {
        const uint4& words = reinterpret_cast<const uint4&>(x);
        store_16(to, words.x, words.y, words.z, words.w, streams);
    }
}

constexpr int READ = 2;   // runs of a thread on their way
constexpr int AHEAD = 8;  // slots whose places and weights are

extern "C" __global__ void __launch_bounds__(256) take_slots(const __grid_constant__ TakeParams p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const Mine mine(p);
    if (mine.token >= p.count) return;
    const Stored* const from = p.x + mine.token * p.inner;
    const i64 first_slot = mine.token * p.slots;
    const int slots = int(p.slots);
    for (i64 column = mine.first; column < p.n; column += READ * mine.step) {
        Run runs[READ];
#pragma unroll
        for (int i = 0; i < READ; ++i)
            if (column + i * mine.step < p.n) runs[i] = run(from + column + i * mine.step);
        for (int slot = 0; slot < slots; slot += AHEAD) {
            Stored* to[AHEAD];
            float weights[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) {
                const i64 at = first_slot + min(slot + j, slots - 1);  // so that no read waits for a branch
                to[j] = reinterpret_cast<Stored*>(p.out) + p.numbers[at] * p.n + column;
                if (WEIGHTED) weights[j] = Weight::widen(p.weights[at]);
            }
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) {
                if (slot + j >= slots) break;
#pragma unroll
                for (int i = 0; i < READ; ++i)
                    if (column + i * mine.step < p.n)
                        store_product(to[j] + i * mine.step, runs[i], weights[j], p.streams);
            }
        }
    }
}

__device__ __forceinline__ float times(Stored x, float weight) {
    return Out::widen(Out::narrow(E::widen(x) * weight));
}

// A row of out and its entries, of this thread. Returns whether there is one.
__device__ __forceinline__ bool find(const Params& p, i64& row, i64& column) {
    const i64 thread = i64(blockIdx.x) * 256 + threadIdx.x, runs = p.n / VECTOR;
    row = thread / runs;
    column = (thread - row * runs) * VECTOR;
    return row < p.count;
}

// Leaves the sum by halves in the first of 2 * HALF terms. A loop over halves would not be unrolled.
template <int HALF>
__device__ __forceinline__ void add_halves(float* terms) {
    if constexpr (HALF > 0) {
#pragma unroll
        for (int j = 0; j < HALF; ++j) terms[j] += terms[j + HALF];
        add_halves<HALF / 2>(terms);
    }
}

extern "C" __global__ void __launch_bounds__(256) sum_slots(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    i64 row, column;
    if (!find(p, row, column)) return;
    Run runs[SLOTS];
    float weights[SLOTS];
#pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
        const i64 slot = row * SLOTS + j;
        const i64 at = p.numbers ? p.numbers[slot] * p.inner : row * p.outer + j * p.inner;
        runs[j] = run(p.x + at + column);
        if (WEIGHTED) weights[j] = Weight::widen(p.weights[slot]);
    }
    static_assert(SLOTS <= 16, "more slots are summed as rows");
    constexpr int TERMS = SLOTS > 8 ? 16 : SLOTS > 4 ? 8 : SLOTS > 2 ? 4 : SLOTS;
    RunOf<Out::Stored> sums;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        float terms[TERMS];
#pragma unroll
        for (int j = 0; j < TERMS; ++j) {
            if (j >= SLOTS)
                terms[j] = 0.0f;
            else
                terms[j] = WEIGHTED ? times(runs[j].of[i], weights[j]) : E::widen(runs[j].of[i]);
        }
        add_halves<TERMS / 2>(terms);
        sums.of[i] = Out::narrow(contract::canonical(terms[0] + 0.0f));
    }
    *reinterpret_cast<RunOf<Out::Stored>*>(p.out + row * p.n + column) = sums;
}

struct RouteParams {
    const i64 *experts, *order;  // sorted, and the slots that they are of
    i64* places;                 // the inverse of order
    int *ends, *sequences;       // of each expert; of each slot, or null
    i64 slots, count, each;      // slots; experts; slots of a sequence
};

// A thread has a slot, and the experts that end before it. One more thread has the end.
extern "C" __global__ void __launch_bounds__(256) route(const __grid_constant__ RouteParams p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i > p.slots) return;
    if (i < p.slots) {
        const i64 slot = p.order[i];
        p.places[slot] = i;
        if (p.sequences) p.sequences[i] = int(slot / p.each);
    }
    const i64 here = i < p.slots ? min(p.experts[i], p.count) : p.count;
    for (i64 e = i > 0 ? max(p.experts[i - 1], i64(0)) : 0; e < here; ++e) p.ends[e] = int(i);
}

// Rows of a layer of experts: copied to their slots, and summed over the slots of a token.
//
// take_slots: out[i] = x[numbers[i] / slots], times weights[numbers[i]].
// sum_slots: out[i] = the sum over j < SLOTS of row numbers[i * SLOTS + j] of x, times weights[i * SLOTS + j].
// Without numbers it is x[i, j], at strides. Few terms are one block of docs/contract.md, "Row reductions".
// route: where slots are that were sorted by their experts, where those of each expert end, and their sequences.
//
// Products and sums have the type of weights, if that is F32, and are rounded to it. A thread has one access to memory
// for each row that it reads.
//
// Macros
//   TYPE      of rows: F32, BF16 or F16; route has none
//   WEIGHT    of weights: TYPE, or F32 in sum_slots
//   VECTOR    entries of one access to memory: 16 bytes' worth, or 1
//   SLOTS     terms of a sum; nothing in take_slots
//   WEIGHTED  1: there are weights

#include "convert.cuh"
#include "functions.cuh"
#include "launch.cuh"

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
    i64 count, n;      // rows of out, and their entries
    i64 outer, inner;  // entries from x[i] to x[i + 1], and from row to row
    i64 slots;         // of a token
};

__device__ __forceinline__ float times(Stored x, float weight) {
    return Out::widen(Out::narrow(E::widen(x) * weight));
}

__device__ __forceinline__ const Run& run(const Stored* at) { return *reinterpret_cast<const Run*>(at); }

// A row of out and its entries, of this thread. Returns whether there is one.
__device__ __forceinline__ bool find(const Params& p, i64& row, i64& column) {
    const i64 thread = i64(blockIdx.x) * 256 + threadIdx.x, runs = p.n / VECTOR;
    row = thread / runs;
    column = (thread - row * runs) * VECTOR;
    return row < p.count;
}

extern "C" __global__ void __launch_bounds__(256) take_slots(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    i64 row, column;
    if (!find(p, row, column)) return;
    const i64 slot = p.numbers[row];
    Run found = run(p.x + slot / p.slots * p.inner + column);
    if (WEIGHTED) {
        const float weight = Weight::widen(p.weights[slot]);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            found.of[i] = E::narrow(contract::canonical(E::widen(found.of[i]) * weight));
    }
    *reinterpret_cast<Run*>(p.out + row * p.n + column) = found;
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

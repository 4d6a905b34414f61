// Rotary positions of queries and keys, and their gradients: docs/contract.md, "Fused layers".
//
// A block takes one token. A thread rotates VECTOR pairs of a head, or copies 2 * VECTOR entries that are not rotated.
// It reads all that it needs before it writes: where results lie as operands do, they may be the same memory.
//
// Macros, beside those of rotary.cuh
//   FROM, TO   how pairs lie in operands and in results: HALVES or PAIRS
//   VECTOR     pairs of a thread: as many as 16 bytes have entries, or 1 for operands that are not aligned

#include "rotary.cuh"

constexpr int THREADS = 128;

struct Params {
    const In::Stored* from[2];  // queries and keys
    In::Stored* to[2];
    HeadSteps from_step[2], to_step[2];
    Table table;
    i64 tokens;  // in a batch, fewer than blocks
    int heads[2];
    int pairs, rest;  // of a head: pairs, and entries that are not rotated; 0: they are in their place
};

// This thread's pairs, or what belongs to them.
template <class E, int layout>
__device__ __forceinline__ void load_pairs(const typename E::Stored* at, int first, int pairs,
                                           float (&a)[VECTOR], float (&b)[VECTOR]) {
    if constexpr (layout == HALVES) {
        load_values<E>(at + first, a);
        load_values<E>(at + pairs + first, b);
    } else {
        float both[2 * VECTOR];
        if constexpr (VECTOR == 1)
            both[0] = E::widen(at[2 * first]), both[1] = E::widen(at[2 * first + 1]);
        else
            load_values<E>(at + 2 * first, both);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) a[i] = both[2 * i], b[i] = both[2 * i + 1];
    }
}

__device__ __forceinline__ void load_factors(const Trig::Stored* at, int first, int pairs, float (&a)[VECTOR],
                                             float (&b)[VECTOR]) {
    if constexpr (FULL) {
        load_pairs<Trig, GRADIENTS == NONE ? TO : FROM>(at, first, pairs, a, b);
    } else {
        load_values<Trig>(at + first, a);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) b[i] = a[i];
    }
}

// Entries that are not rotated.
template <int count>
__device__ __forceinline__ void pass_on(const In::Stored* from, In::Stored* to) {
    if constexpr (ADDS_ZERO) {
        float x[count];
        load_values<In>(from, x);
#pragma unroll
        for (int i = 0; i < count; ++i) x[i] = __fadd_rn(x[i], 0.0f);
        store_values<In>(to, x);
    } else {
        copy_values<In, count>(from, to);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) rotary(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const i64 batch = blockIdx.x / u32(p.tokens), token = blockIdx.x - batch * p.tokens;
    const int rotated = p.pairs / VECTOR, of_head = rotated + (p.rest + 2 * VECTOR - 1) / (2 * VECTOR);
    const int task = blockIdx.y * THREADS + threadIdx.x;
    int head = task / of_head;
    const int part = task - head * of_head;
    const int which = head >= p.heads[0];
    head -= which ? p.heads[0] : 0;
    if (which && head >= p.heads[1]) return;
    const HeadSteps &from_step = p.from_step[which], &to_step = p.to_step[which];
    const In::Stored* from =
        p.from[which] + batch * from_step.batch + token * from_step.token + head * from_step.head;
    In::Stored* to = p.to[which] + batch * to_step.batch + token * to_step.token + head * to_step.head;
    if (part >= rotated) {
        const int first = (part - rotated) * 2 * VECTOR, left = p.rest - first;
        from += 2 * p.pairs + first, to += 2 * p.pairs + first;
        if (left >= 2 * VECTOR)
            pass_on<VECTOR>(from, to), pass_on<VECTOR>(from + VECTOR, to + VECTOR);
        else
            for (int i = 0; i < left; ++i) pass_on<1>(from + i, to + i);
        return;
    }
    i64 row, of_table = batch;
    const bool known = p.table.find(of_table, token, row);
    const int first = part * VECTOR;
    float a[VECTOR], b[VECTOR], cos[2][VECTOR], sin[2][VECTOR];
    load_pairs<In, FROM>(from, first, p.pairs, a, b);
    if (known) {
        load_factors(p.table.cos + of_table * p.table.cos_batch + row * p.table.cos_token, first, p.pairs,
                     cos[0], cos[1]);
        load_factors(p.table.sin + of_table * p.table.sin_batch + row * p.table.sin_token, first, p.pairs,
                     sin[0], sin[1]);
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const float x = a[i], y = b[i];
        constexpr bool forward = GRADIENTS == NONE;  // gradients are turned the other way
        const float sin_of_y = product(y, sin[forward ? 0 : 1][i]),
                    sin_of_x = product(x, sin[forward ? 1 : 0][i]);
        a[i] = sum(product(x, cos[0][i]), forward ? -sin_of_y : sin_of_y);
        b[i] = sum(product(y, cos[1][i]), forward ? sin_of_x : -sin_of_x);
        if (!known) a[i] = b[i] = __int_as_float(0x7FFFFFFF);
    }
    if constexpr (TO == HALVES) {
        store_values<In>(to + first, a);
        store_values<In>(to + p.pairs + first, b);
    } else if constexpr (VECTOR == 1) {
        store_values<In>(to + 2 * first, a);
        store_values<In>(to + 2 * first + 1, b);
    } else {
        float both[2 * VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) both[2 * i] = a[i], both[2 * i + 1] = b[i];
        store_values<In>(to + 2 * first, both);
    }
}

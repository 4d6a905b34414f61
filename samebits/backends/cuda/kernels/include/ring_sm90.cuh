// Positions in a ring of pipeline stages. Stage s has two mbarriers: `full`, which the producer's copies
// complete, and `empty`, at which consumers arrive once they have read it. Both change phase once in each
// round of the ring.
#pragma once

#include "types.cuh"

// The position of a thread that takes stages in order. A consumer waits for `full` with `parity`, the
// producer for `empty` with `parity ^ 1`: in the first round, in which all stages are free, that wait returns
// at once.
template <u32 stages>
struct Ring {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void step() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void skip(u32 steps) {
        stage += steps;
        parity ^= stage / stages & 1;
        stage %= stages;
    }
};

// The same for a thread that counts blocks of k rather than to keep a position.
template <int stages>
__device__ __forceinline__ u32 stage_of(u32 block) {
    return block % stages;
}

template <int stages>
__device__ __forceinline__ u32 parity_of(u32 block) {
    return block / stages % 2;
}

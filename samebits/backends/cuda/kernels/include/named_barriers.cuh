// Barriers by number, 1 to 15, at which some warps of a block meet. One waits for what others did before they
// arrived.
#pragma once

template <int threads>
__device__ __forceinline__ void wait_for(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(threads) : "memory");
}

template <int threads>
__device__ __forceinline__ void arrive_at(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(threads) : "memory");
}

// Which blocks of k the producer loads and the consumers multiply, in order. Each thread keeps its own count.
#pragma once

#include "ptx_sm90.cuh"

#if RAGGED
// Every sequence starts a new block; its last block reaches past its end. Bounds outside [0, k] are taken as
// the nearer end, and a sequence that ends before it starts is empty. So nothing is read out of place, and
// producer and consumers always count alike.
class KBlocks {
    const BOUND* bounds;
    int left, k_end, k, end, next_end;

    static __device__ int inside(BOUND bound, int k_end) {
        return int(min(max(bound, static_cast<BOUND>(0)), static_cast<BOUND>(k_end)));
    }

  public:
    __device__ KBlocks(int k_end, const void* raw, int sequences)
        : bounds(static_cast<const BOUND*>(raw)), left(sequences), k_end(k_end), k(0), end(0), next_end(0) {
        if (left > 0) {
            k = end = inside(bounds[0], k_end);
            next_end = inside(bounds[1], k_end);
            k -= BLOCK_K;
        }
    }

    __device__ bool next() {
        k += BLOCK_K;
        while (k >= end) {
            if (left <= 0) return false;
            k = end;
            end = next_end;
            ++bounds;
            // Fetched a sequence ahead: the copies of this one hide the wait.
            if (--left > 0) next_end = inside(bounds[1], k_end);
        }
        return true;
    }
    __device__ int start() const { return k; }
    __device__ int valid() const { return min(end - k, BLOCK_K); }

    // For a whole warp.
    static __device__ u32 count(int k_end, const void* raw, int sequences) {
        const BOUND* bounds = static_cast<const BOUND*>(raw);
        u32 blocks = 0;
        for (int i = threadIdx.x % 32; i < sequences; i += 32) {
            int length = inside(bounds[i + 1], k_end) - inside(bounds[i], k_end);
            blocks += u32(max(length, 0) + BLOCK_K - 1) / BLOCK_K;
        }
        return __reduce_add_sync(0xFFFFFFFF, blocks);
    }
};
#else
class KBlocks {
    int k = -BLOCK_K, end;

  public:
    __device__ KBlocks(int k_end, const void*, int) : end(k_end) {}
    __device__ bool next() { return (k += BLOCK_K) < end; }
    __device__ int start() const { return k; }
    __device__ int valid() const { return BLOCK_K; }
    static __device__ u32 count(int k_end, const void*, int) { return (k_end + BLOCK_K - 1) / BLOCK_K; }
};
#endif

// The rows of a mask, as kernels of attention read them: docs/contract.md, "Attention", "Positions".
//
// A row of a tile is a query of one head. What a row shows is often the first part of what the next one shows:
// under causal masks, padding and gaps. Rows of a tile are therefore taken in runs of which this is true: all of
// them have the keys that the last one shows, in order, and each sees the first ones of these.
//
// Macros
//   MASK   BOOLEAN, F32, BF16 or F16; or NONE: then this is not used
#pragma once

#include "attention_problem.cuh"
#include "convert.cuh"
#include "functions.cuh"

#define BOOLEAN 4

constexpr bool MASKED = MASK != NONE, FLOAT_MASK = MASKED && MASK != BOOLEAN;
constexpr int SEGMENT_KEYS = KEYS * BLOCKS;

using Mask = Element<FLOAT_MASK ? MASK : F32>;

// What a float mask adds to a score in base 2 where it hides a key, or less.
constexpr float HIDES = -8192.0f;

__device__ __forceinline__ float bias_at(const Problem& x, i64 at) {
    return __fmul_rn(Mask::widen(static_cast<const Mask::Stored*>(x.mask)[at]), contract::LOG2E);
}

// Whether a float mask shows a key to which it adds `b`.
__device__ __forceinline__ bool shows(float b) { return !(__fmul_rn(b, contract::LOG2E) <= HIDES); }

__device__ __forceinline__ bool shows(const Problem& x, i64 at) {
    if constexpr (FLOAT_MASK) return shows(Mask::widen(static_cast<const Mask::Stored*>(x.mask)[at]));
    return static_cast<const unsigned char*>(x.mask)[at] != 0;
}

// What attention_mask.cu has found.
struct Rows {
    const int2* found;  // [batch, heads, queries]: keys shown, ~ if a run begins here; see attention_mask.cu
    // [batch, heads, queries, segments]: the key with which each segment begins; at last
    // whether the row adds anything but zeros to a score, and the end
    const int* begins;
    int heads;     // of q, or 1 if the mask is the same for all
    int segments;  // and two

    __device__ __forceinline__ i64 row(const Problem& x, int batch, int head, int query) const {
        return (i64(batch) * heads + (heads > 1 ? head : 0)) * x.queries + query;
    }
    __device__ __forceinline__ int count(i64 row) const {
        const int n = found[row].x;
        return n < 0 ? ~n : n;
    }
    __device__ __forceinline__ bool adds(i64 row) const { return begins[row * segments + segments - 2]; }
    // The last segment that begins no later than with this key.
    __device__ __forceinline__ int segment_of(i64 row, int count, int key) const {
        int segment = 0;
        while ((segment + 1) * SEGMENT_KEYS < count && begins[row * segments + segment + 1] <= key) ++segment;
        return segment;
    }
    // The query behind those of the run that begins at `query`, of a tile of one head (or of any, if they have one
    // mask) that ends before `end`.
    __device__ __forceinline__ int query_run_end(const Problem& x, int batch, int head, int query,
                                                 int end) const {
        for (int first = query + 1; first < end; first += 32) {
            const int i = first + threadIdx.x % 32;
            const u32 begins = __ballot_sync(0xFFFFFFFF, i < end && found[row(x, batch, head, i)].x < 0);
            if (begins) return first + __ffs(begins) - 1;
        }
        return end;
    }
    // The row behind those of the run that begins at `row`, of a tile that ends before `end`. `head`: that of k.
    __device__ __forceinline__ int run_end(const Problem& x, int batch, int head, int row, int end) const {
        for (int first = row + 1; first < end; first += 32) {
            const int i = first + threadIdx.x % 32, member = i % x.group;
            const bool begins = i < end && (heads > 1 || member == 0) &&
                                found[this->row(x, batch, head * x.group + member, i / x.group)].x < 0;
            const u32 found_one = __ballot_sync(0xFFFFFFFF, begins);
            if (found_one) return first + __ffs(found_one) - 1;
        }
        return end;
    }
};

// The keys that a row shows, by their positions, in shared memory. A warp finds them ahead of their use.
template <int blocks>
struct KeysInBlocks {
    static constexpr int COUNT = blocks * KEYS;  // that are held

    int held[COUNT];
    i64 row;   // of the mask
    int keys;  // of the sequence
    int next;  // key to look at
    int found;
    int unused;

    __device__ __forceinline__ int at(int position) const { return held[position % COUNT]; }

    // Goes to the `position` that key `next` has.
    __device__ __forceinline__ void start(i64 row_, int keys_, int next_, int position) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) row = row_, keys = keys_, next = next_, found = position;
        __syncwarp();
    }

    // Finds keys at positions before `wanted`, and no more than KEYS - 1 others. For one warp.
    __device__ __forceinline__ void find(const Problem& x, int wanted) {
        const int lane = threadIdx.x % 32;
        const u32 below = (1u << lane) - 1;
        int count = found, from = next;
        while (count < wanted && from < keys) {
            bool shown[KEYS / 32];
#pragma unroll
            for (int i = 0; i < KEYS / 32; ++i) {
                const int key = from + i * 32 + lane;
                shown[i] = key < keys && shows(x, row + key * x.mask_key);
            }
#pragma unroll
            for (int i = 0; i < KEYS / 32; ++i) {
                const u32 all = __ballot_sync(0xFFFFFFFF, shown[i]);
                if (shown[i]) held[(count + __popc(all & below)) % COUNT] = from + i * 32 + lane;
                count += __popc(all);
            }
            from += KEYS;
        }
        __syncwarp();  // all lanes have read where to begin
        if (lane == 0) found = count, next = from;
        __syncwarp();
    }
};

using ShownKeys = KeysInBlocks<4>;

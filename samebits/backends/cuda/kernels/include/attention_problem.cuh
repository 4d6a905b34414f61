// A call of attention as kernels see it: its problem, its sequences, and how packed ones are cut into tiles.
// Bits are those of docs/contract.md, "Attention".
#pragma once

#include "types.cuh"

constexpr int KEYS = 128;  // of a block
constexpr int BLOCKS = 4;  // of a segment

// ---- the problem

struct Strides {
    i64 batch, token, head, column;  // in elements; `batch` is the page's if PAGED, for k and v
};

// A query's position: that of its first one is 0; its slot's; or that of its last one is its last key's.
enum Align { FIRST, SLOTS, LAST };

struct Problem {
    // [batch + 1] bounds of packed sequences; [batch] first and last slots of keys; pages [batch, ...]. Null
    // where there are none.
    const int *cu_q, *cu_k, *key_start, *key_length, *pages;
    i64 pages_batch;
    const void* mask;
    i64 mask_batch, mask_head, mask_query, mask_key;
    int batch, heads, group;        // heads of k, and heads of q that share one
    int queries, keys;              // slots in a tensor, of all sequences if packed; of the pages in a table
    int head, values;               // real sizes
    int page, page_count;           // slots of a page, and pages that there are
    int window_left, window_right;  // -1: no bound; causal is a right window of 0
    int align;                      // enum Align
    float c;                        // RNE(scale LOG2E); with a softcap RNE(softcap LOG2E)
    float cap;                      // RNE(scale / softcap)
    float scale;
    int unused;
};

// Bounds from memory may be wrong, and then still read nothing elsewhere.
__device__ __forceinline__ int bound(const int* bounds, int i, int last) {
    return min(max(bounds[i], 0), last);
}

// A sequence of the batch. Queries and keys are counted from its first ones.
struct Sequence {
    int batch, first_query, queries, first_key, keys;
    int offset;                  // of a query's position among the keys
    i64 batch_of_q, batch_of_k;  // indices in the tensors: 0 if packed

    Sequence() = default;
    __device__ __forceinline__ Sequence(const Problem& x, int b) : batch(b) {
        first_query = x.cu_q ? bound(x.cu_q, b, x.queries) : 0;
        queries = x.cu_q ? max(0, bound(x.cu_q, b + 1, x.queries) - first_query) : x.queries;
        if (x.cu_k) {
            const int begin = bound(x.cu_k, b, x.keys), end = bound(x.cu_k, b + 1, x.keys);
            first_key = begin;
            keys = max(0, end - begin);
        } else {
            first_key = x.key_start ? bound(x.key_start, b, x.keys) : 0;
            keys = max(0, (x.key_length ? bound(x.key_length, b, x.keys) : x.keys) - first_key);
        }
        offset = x.align == LAST ? keys - queries : x.align == SLOTS && x.key_start ? -first_key : 0;
        batch_of_q = x.cu_q ? 0 : b;
        batch_of_k = x.cu_k || x.pages ? 0 : b;
    }

    // The keys that a query may see, but for masks: first to last - 1. Neither falls as the query rises.
    __device__ __forceinline__ int first_seen(const Problem& x, int query) const {
        return x.window_left < 0 ? 0 : max(0, query + offset - x.window_left);
    }
    __device__ __forceinline__ int last_seen(const Problem& x, int query) const {
        return x.window_right < 0 ? keys : max(0, min(keys, query + offset + x.window_right + 1));
    }

    __device__ __forceinline__ i64 mask_row(const Problem& x, int query, int head) const {
        return batch * x.mask_batch + head * x.mask_head + (first_query + query) * x.mask_query +
               first_key * x.mask_key;
    }

    // Rows of [.., heads of q] that come before a query's.
    __device__ __forceinline__ i64 row(const Problem& x, int query, int head) const {
        return (batch_of_q * x.queries + first_query + query) * (x.heads * x.group) + head;
    }
};

struct Place {
    int batch, tile;  // batch < 0: there is no such tile
};

// Tile `index` of those of `height` that cut each packed sequence's tokens times `rows`. All sequences behind the last
// token are empty: in the capture of a CUDA graph there may be as many as tokens.
__device__ __forceinline__ Place place_in_packed(const int* bounds, int batch, int last, int rows, int height,
                                                 int index) {
    const int lane = threadIdx.x % 32;
    for (int first = 0, before = 0, end = 0; first < batch && end < last; first += 32) {
        const int b = first + lane;
        int through = 0;
        if (b < batch) {
            end = bound(bounds, b + 1, last);
            const int tokens = max(0, end - bound(bounds, b, last));
            through = static_cast<int>((i64(tokens) * rows + height - 1) / height);
        }
        const int own = through;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int below = __shfl_up_sync(0xFFFFFFFF, through, step);
            if (lane >= step) through += below;
        }
        const u32 found = __ballot_sync(0xFFFFFFFF, before + through > index);
        if (found) {
            const int source = __ffs(found) - 1;
            return {first + source, index - before - __shfl_sync(0xFFFFFFFF, through - own, source)};
        }
        before += __shfl_sync(0xFFFFFFFF, through, 31);
        end = __shfl_sync(0xFFFFFFFF, end, 31);
    }
    return {-1, 0};
}

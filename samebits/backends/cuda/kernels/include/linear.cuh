// What the kernels of linear attention by chunks share: linear_*.cu, and with the delta rule delta_begin.cu, delta_chunks.cu,
// delta_states.cu.
#pragma once

#define TENSOR_CORE 1
#ifndef BY_CHANNEL
#define BY_CHANNEL 0
#endif
#include "delta_system.cuh"

// Threads that copy: those of more warps, which have no part of the matrix, or all.
#ifndef HELPERS
#define HELPERS 0
#endif
constexpr int COPIERS = HELPERS ? 32 * HELPERS : THREADS;
__device__ __forceinline__ int copier() { return HELPERS ? threadIdx.x - THREADS : threadIdx.x; }

// Of a chunk's rows, for one head. Those that are not there have the last one's sum, and leave nothing.
struct Decays {
    float sums[CHUNK];  // from the chunk's start
    float left[CHUNK];  // what of a row is left at the chunk's end, times its weight
#if WEIGHTED
    float weights[CHUNK];
#endif
};

#if GRADIENTS
// Of a backward.
struct Gradients {
    const Stored* grad;
    const float* of_closed;
    // What the kernels leave for each other.
    float*
        starts;  // [places, heads, size, key size], padded to 16: matrices at chunks' starts; null without dg
    uint4* matrices;  // [places, heads]: gradients of those at chunks' ends, as Params::matrices
    float*
        kept;  // [places, heads, key size]: of a chunk's last decay, by what the next matrix has of this one
    float* rows;  // [2, tokens, heads, key size]: dq and dk of each head, where some share them
    Stored *dq, *dk, *dv;
    float *dg, *dweights, *dinitial;
    i64 grad_token, grad_head;
};
#endif

struct Params {
    const Stored *q, *k, *v;
    const float *g, *beta, *weights, *skip, *initial;
    float *state, *closed;
    Stored* out;  // float, if `wide`
    const int* spans;
    unsigned char* records;
    // What the kernels leave for each other.
    int* counts;      // [sequences]: rows of their open chunks that states had; null without states
    Stored* opened;   // [sequences, heads]: keys and updates of these rows
    Decays* decays;   // [places, heads]
    uint4* matrices;  // [places, heads]: at chunks' starts, rounded, transposed, as left operands of 16 x 16
    System* systems;  // [places, heads], with the delta rule
    QueryScores* scores;  // [places, heads]: of its queries
    float* z;             // [tokens, heads, size], of the delta rule, for its gradients
    i64 q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head,
        weight_token, weight_head;
    i64 words;                                          // of a sequence's state
    int matrix, keys, updates, decays_at, row_weights;  // where they are in it
    int key_size, size, heads, group, tokens, sequences;
    int shared, wide;  // heads of a block of linear_rows.cu
    float scale;
#if GRADIENTS
    Gradients of;
#endif
#if BY_CHANNEL
    const Prepared* prepared;  // [places, heads]
#endif
};

__device__ __forceinline__ int rows_before(const Params& p, int sequence) {
    return p.counts ? min(max(p.counts[sequence], 0), CHUNK) : 0;  // offsets that do not ascend leave one out
}

// Keys of the rows that a sequence's state had; their updates are behind them.
__device__ __forceinline__ Stored* opened_keys(const Params& p, int sequence, int head) {
    return p.opened + (i64(sequence) * p.heads + head) * CHUNK * (p.key_size + p.size);
}
__device__ __forceinline__ Stored* opened_updates(const Params& p, int sequence, int head) {
    return opened_keys(p, sequence, head) + CHUNK * p.key_size;
}

// Copies rows `first` to `last` - 1, of `size` elements. Those from `count` on are zeros.
template <int LINE, int WIDTH, class T>
__device__ __forceinline__ void copy_rows(T* to, const T* from, i64 line, int first, int last, int count,
                                          int size) {
    constexpr int SIZE = sizeof(T), PER = 16 / SIZE, EACH = WIDTH / PER,
                  STEP = COPIERS / EACH;                                    // of a row; rows at a time
    constexpr bool KEEPS_PLACE = COPIERS % EACH == 0 && CHUNK % STEP == 0;  // a thread, in each row
    if ((reinterpret_cast<u64>(from) | u64(line) * SIZE) % 16) {
#pragma unroll 1
        for (int x = first * WIDTH + copier(); x < last * WIDTH; x += COPIERS) {
            const int row = x / WIDTH, at = x % WIDTH;
            to[row * LINE + at] = row < count && at < size ? from[row * line + at] : T();
        }
    } else if (KEEPS_PLACE && first == 0 && min(last, count) == CHUNK && size >= WIDTH) {
        const int own = copier() / EACH, at = copier() % EACH * PER;
        const u32 address = shared_address(to + own * LINE + at);
        from += own * line + at;
#pragma unroll
        for (int row = 0; row < CHUNK; row += STEP, from += STEP * line)
            cp_async_16(address + row * LINE * SIZE, from);
    } else {
#pragma unroll 1
        for (int x = first * EACH + copier(); x < last * EACH; x += COPIERS) {
            const int row = x / EACH, at = x % EACH * PER;
            const int bytes = row < count ? min(max(size - at, 0) * SIZE, 16) : 0;
            cp_async_16(shared_address(to + row * LINE + at), bytes ? from + row * line + at : from, bytes);
        }
    }
}

// A chunk's rows: up to `first` those that the state had, then tokens.
template <int LINE, int WIDTH>
__device__ __forceinline__ void load_rows(Stored* to, const Stored* opened, int opened_line,
                                          const Stored* given, i64 line, int first, int count, int size) {
    if (first) copy_rows<LINE, WIDTH>(to, opened, opened_line, 0, first, first, size);
    copy_rows<LINE, WIDTH>(to, given, line, first, CHUNK, count, size);
}

// The same of queries or gradients: up to `first` zeros, then tokens.
template <int LINE, int WIDTH>
__device__ __forceinline__ void load_given(Stored* to, const Stored* given, i64 line, int first, int count,
                                           int size) {
    if (first) copy_rows<LINE, WIDTH>(to, given, 0, 0, first, 0, 0);
    copy_rows<LINE, WIDTH>(to, given, line, first, CHUNK, count, size);
}

// Copies a whole struct.
template <class T>
__device__ __forceinline__ void load_whole(T& to, const T& from) {
#pragma unroll
    for (int x = copier(); x < int(sizeof(T) / 16); x += COPIERS)
        cp_async_16(shared_address(&to) + x * 16, reinterpret_cast<const uint4*>(&from) + x);
}

constexpr int SCORES = 10;  // blocks of 16 x 16, up to the diagonal

// The block of 16 x 16 scores at a place of their triangle, up to the diagonal: its first row and column.
__device__ __forceinline__ int row_of(int block) { return ((block >= 1) + (block >= 3) + (block >= 6)) * 16; }
__device__ __forceinline__ int column_of(int block) {
    const int row = row_of(block) / 16;
    return (block - row * (row + 1) / 2) * 16;
}

// Products of a warp's OWN blocks of scores: of rows that `left` and `right` give for a block's place.
template <int OWN, class Left, class Right>
__device__ __forceinline__ void multiply_scores(float (&found)[OWN][2][4], const Left& left_of,
                                                const Right& right_of) {
#pragma unroll
    for (int x = 0; x < OWN; ++x) {
        const int block = threadIdx.x / 32 + x * WARPS;
        if (block >= SCORES) continue;
        const Stored *lefts = left_of(block), *rights = right_of(block);
#pragma unroll 4
        for (int d = 0; d < KEY_SIZE; d += 16) {
            u32 left[4], right[4];
            ldmatrix_x4<false>(left, by_rows(lefts + d, KEYS));
            ldmatrix_x4<false>(right, by_columns(rights + d, KEYS));
            mma_m16n8k16<TYPE == BF16>(found[x][0], left, right);
            mma_m16n8k16<TYPE == BF16>(found[x][1], left, right + 2);
        }
    }
}

// Loads queries and keys of a chunk, which heads from `first_head` on have in common.
__device__ __forceinline__ void load_queries_and_keys(const Params& p, Stored* queries, Stored* keys,
                                                      int sequence, int first_head, i64 token, int first,
                                                      int count) {
    const int key_head = first_head / p.group;
    load_given<KEYS, KEY_SIZE>(queries, p.q + key_head * p.q_head + token * p.q_token, p.q_token, first,
                               count, p.key_size);
    load_rows<KEYS, KEY_SIZE>(keys, opened_keys(p, sequence, first_head), p.key_size,
                              p.k + key_head * p.k_head + token * p.k_token, p.k_token, first, count,
                              p.key_size);
}

// D of the columns that a lane has of a warp's 16 * WIDE from `column` on; zeros if there is none.
template <int WIDE>
__device__ __forceinline__ void read_skips(const Params& p, float (&skips)[WIDE * 4], int head, int column) {
#pragma unroll
    for (int x = 0; x < WIDE * 4; ++x) {
        const int e = column + x / 2 * 8 + threadIdx.x % 4 * 2 + x % 2;
        skips[x] = p.skip && e < p.size ? p.skip[i64(head) * p.size + e] : 0.0f;
    }
}

// Stores a warp's 16 * WIDE columns of rows `first` to `count` - 1, of which the first `columns` are there.
template <int WIDE, int LINE>
__device__ __forceinline__ void store_columns(Stored* to, i64 line, const Stored* from, int first, int count,
                                              int columns) {
    const int lane = threadIdx.x % 32;
    if ((reinterpret_cast<u64>(to) | u64(line) * SIZE) % 16 == 0 && columns % 8 == 0) {
#pragma unroll 4
        for (int x = lane; x < CHUNK * WIDE * 2; x += 32) {
            const int i = x / (WIDE * 2), e = x % (WIDE * 2) * 8;
            if (i >= first && i < count && e < columns)
                *reinterpret_cast<uint4*>(to + i * line + e) =
                    *reinterpret_cast<const uint4*>(from + i * LINE + e);
        }
    } else {
        for (int x = lane; x < CHUNK * WIDE * 16; x += 32) {
            const int i = x / (WIDE * 16), e = x % (WIDE * 16);
            if (i >= first && i < count && e < columns) to[i * line + e] = from[i * LINE + e];
        }
    }
}

// What the kernels of delta rules' gradients share: their parameters, and where a chunk's rows are.
#pragma once

#include "delta.cuh"

struct Scores;  // delta_scores.cuh
struct System;  // delta_system.cuh

struct Params {
    const Stored *q, *grad;
    const float *beta, *skip, *state, *of_closed;
    unsigned char* records;
    Stored *dv, *dq, *dk;  // [tokens, heads, size], or key heads
    float *sums_of_dq,
        *sums_of_dk;  // [tokens, heads, key size], for delta_sums_backward.cu; null where none share keys
    float *dg, *dbeta, *dweights, *dinitial;
    const int* spans;
    i64 q_token, q_head, grad_token, grad_head, beta_token, beta_head, words;
    int key_size, size, heads, group, tokens, sequences;
    float scale;
#if BY_CHANNEL
    const Prepared* prepared;
    const System* systems;  // where matrices are held in registers
#else
    Scores* scores;  // where matrices are held in registers
#endif
};

// Rows of a chunk: those from `before` on are tokens of this call.
struct Span {
    int chunks, before, count;
    i64 token;  // of row 0, if that were one

    __device__ __forceinline__ Span(const Params& p, int sequence, int chunk) {
        const Tokens mine(p.spans, sequence, p.sequences, p.tokens);
        const int begin = mine.begin, end = mine.end;
        const int open = p.state ? min(max(int(p.state[sequence * p.words]), 0), CHUNK) % CHUNK : 0;
        chunks = begin < end ? (open + end - begin + CHUNK - 1) / CHUNK : 0;
        before = chunk ? 0 : open;
        count = min(open + end - begin - chunk * CHUNK, CHUNK);
        token = i64(begin) - open + i64(chunk) * CHUNK;
    }
};

// Copies a chunk's rows of `size` elements, of which those from `first` to `last` - 1 exist; the others are zeros.
template <int STEP, int WIDTH>
__device__ __forceinline__ void copy_rows(Stored* to, const Stored* from, i64 line, int first, int last,
                                          int size) {
    constexpr int PER = 16 / SIZE, EACH = WIDTH / PER, ROWS = THREADS / EACH;  // of a row; rows at a time
    constexpr bool KEEPS_PLACE = THREADS % EACH == 0 && CHUNK % ROWS == 0;     // a thread, in each row
    const bool aligned = (reinterpret_cast<u64>(from) | u64(line) * SIZE) % 16 == 0;
    if (KEEPS_PLACE && aligned && first == 0 && last == CHUNK && size >= WIDTH) {
        const int own = threadIdx.x / EACH, at = threadIdx.x % EACH * PER;
        const u32 target = shared_address(to + own * STEP + at);
        from += own * line + at;
#pragma unroll
        for (int row = 0; row < CHUNK; row += ROWS, from += ROWS * line)
            cp_async_16(target + row * STEP * SIZE, from);
    } else if (aligned) {
#pragma unroll 1
        for (int x = threadIdx.x; x < CHUNK * WIDTH / PER; x += THREADS) {
            const int row = x / (WIDTH / PER), at = x % (WIDTH / PER) * PER;
            const int bytes = row >= first && row < last ? min(max(size - at, 0) * SIZE, 16) : 0;
            cp_async_16(shared_address(to + row * STEP + at), bytes ? from + row * line + at : from, bytes);
        }
    } else {
#pragma unroll 1
        for (int x = threadIdx.x; x < CHUNK * WIDTH; x += THREADS) {
            const int row = x / WIDTH, at = x % WIDTH;
            const bool exists = row >= first && row < last && at < size;
            to[row * STEP + at] = exists ? from[row * line + at] : E::narrow(0.0f);
        }
    }
}

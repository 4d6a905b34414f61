// Gradients of a chunk's rows with tensor cores, operands in shared memory, the delta rule and one decay for each head.
#pragma once

#include "delta_backward.cuh"
#include "sums_of_rows.cuh"

struct Memory {
    Stored keys[CHUNK * KEYS], queries[CHUNK * KEYS], updates[CHUNK * VALUES];
    union {
        Stored of_rows[2][CHUNK * VALUES];  // gradients of results, and of z
        float rows[CHUNK * LINE];           // once these were read
    };
    Stored of_scores[CHUNK * COLUMNS], of_mutual[CHUNK * COLUMNS];
    float decays[CHUNK], since[CHUNK], left[CHUNK], sums[CHUNK], written[CHUNK], kept[KEY_SIZE], total[4];
};
constexpr int BLOCKS = sizeof(Memory) <= 113 << 10 ? 2 : 1;  // of a multiprocessor

__device__ __forceinline__ void of_head(const Params& p, Memory& m, const Span& span, int place, int head) {
    const i64 line = i64(p.heads) * p.key_size, at = span.token * line + i64(head) * p.key_size;
    const int count = span.count, before = span.before, last = count - 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Record record(p.records, i64(place) * p.heads + head, p.key_size, p.size);

    Rights<false> matrix(record.rights, p.size);
    copy_rows<VALUES, VALUE_SIZE>(m.updates, record.updates, p.size, 0, count, p.size);
    copy_rows<VALUES, VALUE_SIZE>(m.of_rows[0], p.grad + head * p.grad_head + span.token * p.grad_token,
                                  p.grad_token, before, count, p.size);
    copy_rows<VALUES, VALUE_SIZE>(m.of_rows[1], record.of_z, p.size, 0, count, p.size);
    cp_async_commit();
    copy_rows<KEYS, KEY_SIZE>(m.keys, record.keys, p.key_size, 0, count, p.key_size);
    copy_rows<KEYS, KEY_SIZE>(m.queries, p.q + head / p.group * p.q_head + span.token * p.q_token, p.q_token,
                              before, count, p.key_size);
    cp_async_commit();
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
        const float decay = i < count ? record.decays[i] : 0.0f;
        m.decays[i] = decay, m.since[i] = exp2_of(decay);
        m.left[i] = exp2_of(__fsub_rn(record.decays[last], decay));
    }
    for (int d = THREADS - 1 - threadIdx.x; d < KEY_SIZE; d += THREADS)
        m.kept[d] = d < p.key_size ? record.kept[d] : 0.0f;
    cp_async_wait<1>();
    __syncthreads();

    // Of scores, times decays.
    {
        const int row = warp / 2 * 16, column = warp % 2 * 32;
        float of[2][4][4] = {};
#pragma unroll 1
        for (int e = 0; e < p.size; e += 16) {
            u32 right[2][4], left[4];
#pragma unroll
            for (int x = 0; x < 2; ++x)
                ldmatrix_x4<false>(right[x], by_columns(m.updates + (column + x * 16) * VALUES + e, VALUES));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                ldmatrix_x4<false>(left, by_rows(m.of_rows[n] + row * VALUES + e, VALUES));
#pragma unroll
                for (int x = 0; x < 4; ++x)
                    mma_m16n8k16<TYPE == BF16>(of[n][x], left, right[x / 2] + x % 2 * 2);
            }
        }
#pragma unroll
        for (int x = 0; x < 8; ++x) {
            const int i = row + lane / 4 + x % 2 * 8, j = column + x / 2 * 8 + lane % 4 * 2;
            float scores[2], mutual[2];
#pragma unroll
            for (int y = 0; y < 2; ++y) {
                const int at = x % 2 * 2 + y;
                const bool seen = j + y <= i && i < count;
                const float decay = seen ? exp2_of(__fsub_rn(m.decays[i], m.decays[j + y])) : 0.0f;
                scores[y] = seen ? __fmul_rn(__fmul_rn(of[0][x / 2][at], p.scale), decay) : 0.0f;
                mutual[y] = seen && j + y < i ? __fmul_rn(-of[1][x / 2][at], decay) : 0.0f;
            }
            E::store_pair(m.of_scores + i * COLUMNS + j, scores[0], scores[1]);
            E::store_pair(m.of_mutual + i * COLUMNS + j, mutual[0], mutual[1]);
        }
    }
    cp_async_wait<0>();
    __syncthreads();

    // Of queries, and of keys as rows of scores: by what they read of the matrix and of the keys before them.
    Sums read[2];
    matrix.multiply(m.of_rows[0], read);
    read[0].each([&](int i, int, float* c) {
        const float factor = __fmul_rn(m.since[i], p.scale);
        c[0] = i < count ? __fmul_rn(c[0], factor) : 0.0f, c[1] = i < count ? __fmul_rn(c[1], factor) : 0.0f;
    });
    read[0].add<false>(m.of_scores, m.keys, count);
    read[1].each([&](int i, int, float* c) {
        c[0] = i < count ? __fmul_rn(c[0], -m.since[i]) : 0.0f;
        c[1] = i < count ? __fmul_rn(c[1], -m.since[i]) : 0.0f;
    });
    read[1].add<false>(m.of_mutual, m.keys, count);
    Rights<false> of_matrix(record.rights + KEY_SIZE * VALUE_SIZE / 8, p.size);
    __syncthreads();
    read[0].put(m.rows);
    __syncthreads();
    store_rows(m.rows, before, count, p.key_size, at, line, p.dq, p.sums_of_dq);
    float sum = 0.0f;  // of this thread's row: of its decay
    if (p.dg && threadIdx.x < CHUNK)
        sum = chain(m.queries + threadIdx.x * KEYS, m.rows + threadIdx.x * LINE, p.key_size, sum);

    // Of keys, as what the next matrix consists of.
    Sums next[1];
    of_matrix.multiply(m.updates, next);
    next[0].each([&](int j, int, float* c) {
        c[0] = j < count ? __fmul_rn(c[0], m.left[j]) : 0.0f;
        c[1] = j < count ? __fmul_rn(c[1], m.left[j]) : 0.0f;
    });
    __syncthreads();
    next[0].put(m.rows);
    if (p.dg) {
        __syncthreads();
        const int x = threadIdx.x - CHUNK;
        if (x >= 0 && x < count) m.written[x] = chain(m.keys + x * KEYS, m.rows + x * LINE, p.key_size, 0.0f);
        if (threadIdx.x == THREADS - 1) m.total[0] = sum_of(m.kept, p.key_size);
    }

    // As columns of scores.
    Sums columns;
    columns.add<true>(m.of_scores, m.queries, count);
    columns.add<true>(m.of_mutual, m.keys, count);
    columns.each([&](int j, int d, float* c) {
        const float2 x = *reinterpret_cast<const float2*>(m.rows + j * LINE + d);
        c[0] = __fadd_rn(c[0], x.x), c[1] = __fadd_rn(c[1], x.y);
    });
    __syncthreads();
    columns.each_with(read[1], [&](int j, int d, float* c, const float* x) {
        *reinterpret_cast<float2*>(m.rows + j * LINE + d) =
            make_float2(__fadd_rn(x[0], c[0]), __fadd_rn(x[1], c[1]));
        c[0] = __fsub_rn(x[0], c[0]), c[1] = __fsub_rn(x[1], c[1]);
    });
    __syncthreads();
    store_rows(m.rows, before, count, p.key_size, at, line, p.dk, p.sums_of_dk);

    // Of decays: a row's running sum scales what the row reads, and inversely what is read of it.
    if (!p.dg) return;
    __syncthreads();
    columns.put(m.rows);
    __syncthreads();
    if (threadIdx.x < CHUNK)
        m.sums[threadIdx.x] =
            chain(m.keys + threadIdx.x * KEYS, m.rows + threadIdx.x * LINE, p.key_size, sum);
    if (threadIdx.x == THREADS - 1) m.total[0] = __fadd_rn(sum_of(m.written, count), m.total[0]);
    __syncthreads();
    if (threadIdx.x == 0) running_sums(m.sums, count, m.total[0]);
    __syncthreads();
    for (int i = before + threadIdx.x; i < count; i += THREADS)
        p.dg[(span.token + i) * p.heads + head] = contract::canonical(m.sums[i]);
}

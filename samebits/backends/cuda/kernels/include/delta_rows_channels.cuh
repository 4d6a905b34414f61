// Gradients of a chunk's rows with tensor cores, operands in shared memory, the delta rule and a decay for each channel.
//
// Between blocks of 16 rows sums are products, by warps that share the columns of keys, whose right operands get their
// decays in registers. Within a block a thread has a channel: its rows' queries, keys and decays, and all three sums, are
// in registers, so one exponential serves gradients of the row's query, of its key and of the other row's key.
#pragma once

#include "delta_backward.cuh"
#include "sums_of_rows.cuh"

constexpr int BLOCK = 16;
constexpr int TASKS = (CHUNK / BLOCK * KEY_SIZE + THREADS - 1) / THREADS;  // channels of blocks, of a thread
constexpr int BLOCKS = 1;

struct Memory {
    Stored keys[CHUNK * KEYS], queries[CHUNK * KEYS], updates[CHUNK * VALUES];
    union {
        Stored of_rows[2][CHUNK * VALUES];  // gradients of results, and of z
        float rows[CHUNK * LINE];           // once these were read
    };
    Stored of_scores[CHUNK * COLUMNS], of_mutual[CHUNK * COLUMNS];
    // Both within the row's own block, [key, row], where they are not rounded. Those of rows that are not there are -0.
    float own[2][CHUNK * BLOCK];
    union {
        float decays[CHUNK * LINE];
        float of_decays[CHUNK * LINE];  // once these were read
    };
    float kept[KEY_SIZE];
};

// A row's sums over its own block, and those of the block's keys, for one channel.
struct Own {
    float of_query[BLOCK], of_key[BLOCK];

    static __device__ __forceinline__ int channel(int task) {
        return (threadIdx.x + task * THREADS) % KEY_SIZE;
    }
    static __device__ __forceinline__ int row(int task) {
        return (threadIdx.x + task * THREADS) / KEY_SIZE * BLOCK;
    }
    static __device__ __forceinline__ bool has(int task) {
        return CHUNK / BLOCK * KEY_SIZE % THREADS == 0 || row(task) < CHUNK;
    }

    // Carries them on over a block's rows, of which the first `count` are there. The others add -0 * 0. Those of a key
    // over later rows are put in `columns`.
    __device__ __forceinline__ void add(const Memory& m, int task, int count, float* columns) {
        const int d = channel(task), row0 = row(task);
        float key[BLOCK], sum[BLOCK];
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            key[i] = E::widen(m.keys[(row0 + i) * KEYS + d]);
            sum[i] = i < count ? m.decays[(row0 + i) * LINE + d] : -INF;
        }
#pragma unroll
        for (int j = 0; j < BLOCK; ++j) {
            const float *of_scores = m.own[0] + (row0 + j) * BLOCK,
                        *of_mutual = m.own[1] + (row0 + j) * BLOCK;
            float by[BLOCK], column = 0.0f;
#pragma unroll
            for (int i = j; i < BLOCK; ++i) {
                by[i] = exp2_of(__fsub_rn(sum[i], sum[j]));
                const float query = E::widen(m.queries[(row0 + i) * KEYS + d]);
                const float read = __fmul_rn(key[j], by[i]);
                of_query[i] = __fmaf_rn(of_scores[i], read, of_query[i]);
                of_key[i] = __fmaf_rn(of_mutual[i], read, of_key[i]);
                column = __fmaf_rn(of_scores[i], __fmul_rn(query, by[i]), column);
            }
#pragma unroll
            for (int i = j; i < BLOCK; ++i)
                column = __fmaf_rn(of_mutual[i], __fmul_rn(key[i], by[i]), column);
            columns[(row0 + j) * LINE + d] = column;
        }
    }
};

// Calls `f` with each of a thread's elements: its place among rows of floats, its task and its row in the block.
template <class F>
__device__ __forceinline__ void for_own(const F& f) {
#pragma unroll
    for (int task = 0; task < TASKS; ++task)
#pragma unroll
        for (int i = 0; i < BLOCK; ++i)
            if (Own::has(task)) f((Own::row(task) + i) * LINE + Own::channel(task), task, i);
}

// The right operand of a step over rows from `row` on, for 16 channels: rows of x times their decays `by`.
__device__ __forceinline__ void decayed(u32 (&to)[4], const Stored* x, int row, int channel,
                                        const float (&by)[4][2]) {
    ldmatrix_x4<true>(to, by_rows(x + row * KEYS + channel, KEYS));
#pragma unroll
    for (int r = 0; r < 4; ++r)
        to[r] = E::pack(__fmul_rn(E::widen(u16(to[r])), by[r][0]),
                        __fmul_rn(E::widen(u16(to[r] >> 16)), by[r][1]));
}

// Those decays: of each row to G of the row `reference`, or, SINCE, from there.
template <bool SINCE>
__device__ __forceinline__ void decays_of(float (&by)[4][2], const float* decays, int row, int channel,
                                          const float* reference) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int d = channel + r / 2 * 8 + lane / 4;
        const float from = reference[d];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float sum = decays[(row + lane % 4 * 2 + r % 2 * 8 + n) * LINE + d];
            by[r][n] = exp2_of(SINCE ? __fsub_rn(sum, from) : __fsub_rn(from, sum));
        }
    }
}

__device__ __forceinline__ void of_head(const Params& p, Memory& m, const Span& span, int place, int head) {
    const i64 line = i64(p.heads) * p.key_size, at = span.token * line + i64(head) * p.key_size;
    const int count = span.count, before = span.before;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 index = i64(place) * p.heads + head;
    const Record record(p.records, index, p.key_size, p.size);
    const Prepared& prepared = p.prepared[index];

    copy_rows<KEYS, KEY_SIZE>(m.queries, p.q + head / p.group * p.q_head + span.token * p.q_token, p.q_token,
                              before, count, p.key_size);
    copy_rows<KEYS, KEY_SIZE>(m.keys, record.keys, p.key_size, 0, count, p.key_size);
    copy_rows<VALUES, VALUE_SIZE>(m.updates, record.updates, p.size, 0, count, p.size);
    copy_rows<VALUES, VALUE_SIZE>(m.of_rows[0], p.grad + head * p.grad_head + span.token * p.grad_token,
                                  p.grad_token, before, count, p.size);
    copy_rows<VALUES, VALUE_SIZE>(m.of_rows[1], record.of_z, p.size, 0, count, p.size);
    copy_prepared<LINE, KEY_SIZE>(m.decays, prepared.decays[0], CHUNK);
    cp_async_commit();

    for (int d = threadIdx.x; d < p.key_size; d += THREADS) m.kept[d] = record.kept[d];
    cp_async_wait<0>();
    __syncthreads();

    // Of scores.
    {
        constexpr int EACH = WARPS / 4, WIDE = CHUNK / 16 / EACH;  // warps of 16 rows; 16 columns of a warp
        const int row = warp / EACH * 16, column = warp % EACH * WIDE * 16;
        float of[2][WIDE * 2][4] = {};
#pragma unroll 1
        for (int e = 0; e < p.size; e += 16) {
            u32 right[WIDE][4], left[4];
#pragma unroll
            for (int x = 0; x < WIDE; ++x)
                ldmatrix_x4<false>(right[x], by_columns(m.updates + (column + x * 16) * VALUES + e, VALUES));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                ldmatrix_x4<false>(left, by_rows(m.of_rows[n] + row * VALUES + e, VALUES));
#pragma unroll
                for (int x = 0; x < WIDE * 2; ++x)
                    mma_m16n8k16<TYPE == BF16>(of[n][x], left, right[x / 2] + x % 2 * 2);
            }
        }
#pragma unroll
        for (int x = 0; x < WIDE * 4; ++x) {
            const int i = row + lane / 4 + x % 2 * 8, j = column + x / 2 * 8 + lane % 4 * 2;
            float scores[2], mutual[2];
#pragma unroll
            for (int y = 0; y < 2; ++y) {
                const int at = x % 2 * 2 + y;
                const bool seen = j + y <= i && i < count;
                scores[y] = seen ? __fmul_rn(of[0][x / 2][at], p.scale) : 0.0f;
                mutual[y] = seen && j + y < i ? -of[1][x / 2][at] : 0.0f;
            }
            E::store_pair(m.of_scores + i * COLUMNS + j, scores[0], scores[1]);
            E::store_pair(m.of_mutual + i * COLUMNS + j, mutual[0], mutual[1]);
#pragma unroll
            for (int y = 0; y < 2 && i / BLOCK == j / BLOCK; ++y) {
                const int at = (j + y) * BLOCK + i % BLOCK;
                m.own[0][at] = i < count ? scores[y] : -0.0f, m.own[1][at] = i < count ? mutual[y] : -0.0f;
            }
        }
    }

    // By the matrices at the chunk's start and end.
    Sums read[2], next[1];
    Rights<false>(record.rights, p.size).multiply(m.of_rows[0], read);
    read[0].each_with(read[1], [&](int i, int d, float* of_query, float* of_key) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float since = exp2_of(m.decays[i * LINE + d + n]);
            of_query[n] = i < count ? __fmul_rn(of_query[n], __fmul_rn(since, p.scale)) : 0.0f;
            of_key[n] = i < count ? __fmul_rn(of_key[n], -since) : 0.0f;
        }
    });
    Rights<false>(record.rights + KEY_SIZE * VALUE_SIZE / 8, p.size).multiply(m.updates, next);
    const float* last = m.decays + (count - 1) * LINE;
    next[0].each([&](int j, int d, float* c) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float left = exp2_of(__fsub_rn(last[d + n], m.decays[j * LINE + d + n]));
            c[n] = j < count ? __fmul_rn(c[n], left) : 0.0f;
        }
    });
    __syncthreads();

    // Of queries, and of keys as rows of scores: by the keys of earlier blocks.
#pragma unroll
    for (int g = 0; g < Sums::GROUPS; ++g)
#pragma unroll
        for (int t = 0; t < Sums::TALL; ++t) {
            const int row = Sums::row(t), channel = Sums::channel(g);
            if (!Sums::has(g) || row == 0 || row >= count) continue;
            const float* reference = m.decays + (row - 1) * LINE;
            float found[2][2][4] = {};
#pragma unroll 1
            for (int k = 0; k < row; k += 16) {
                u32 right[4], left[4];
                float by[4][2];
                decays_of<false>(by, m.decays, k, channel, reference);
                decayed(right, m.keys, k, channel, by);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const Stored* from = (n ? m.of_mutual : m.of_scores) + row * COLUMNS + k;
                    ldmatrix_x4<false>(left, by_rows(from, COLUMNS));
#pragma unroll
                    for (int x = 0; x < 2; ++x) mma_m16n8k16<TYPE == BF16>(found[n][x], left, right + x * 2);
                }
            }
#pragma unroll
            for (int x = 0; x < 8; ++x) {
                const int i = row + lane / 4 + x / 2 % 2 * 8;
                const int d = channel + x / 4 * 8 + lane % 4 * 2 + x % 2;
                if (i >= count) continue;
                const float by = exp2_of(__fsub_rn(m.decays[i * LINE + d], reference[d]));
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    float& c = read[n].c[g][t][x / 4][x % 4];
                    c = __fadd_rn(c, __fmul_rn(found[n][x / 4][x % 4], by));
                }
            }
        }

    // By those of their own block, and of these keys.
    next[0].put(m.rows);
    __syncthreads();
    for (int d = threadIdx.x; d < p.key_size; d += THREADS) {
        float written = __fmul_rn(E::widen(m.keys[d]), m.rows[d]);
#pragma unroll 8
        for (int j = 1; j < CHUNK; ++j)
            if (j < count)
                written = __fadd_rn(written, __fmul_rn(E::widen(m.keys[j * KEYS + d]), m.rows[j * LINE + d]));
        m.kept[d] = __fadd_rn(written, m.kept[d]);
    }
    __syncthreads();
    Own own[TASKS];
    read[0].put(m.rows);
    __syncthreads();
    for_own([&](int at, int task, int i) { own[task].of_query[i] = m.rows[at]; });
    __syncthreads();
    read[1].put(m.rows);
    __syncthreads();
    for_own([&](int at, int task, int i) { own[task].of_key[i] = m.rows[at]; });
    __syncthreads();
#pragma unroll
    for (int task = 0; task < TASKS; ++task)
        if (Own::has(task)) own[task].add(m, task, count - Own::row(task), m.rows);
    __syncthreads();

    // Of keys, by the rows of later blocks, and as what the next matrix consists of.
    Sums columns;
    columns.each(
        [&](int j, int d, float* c) { c[0] = m.rows[j * LINE + d], c[1] = m.rows[j * LINE + d + 1]; });
#pragma unroll 1
    for (int row = BLOCK; row < count; row += BLOCK) {
        const float* reference = m.decays + (row - 1) * LINE;
#pragma unroll
        for (int g = 0; g < Sums::GROUPS; ++g) {
            if (!Sums::has(g)) continue;
            const int channel = Sums::channel(g);
            u32 right[2][4];
            float by[4][2];
            decays_of<true>(by, m.decays, row, channel, reference);
            decayed(right[0], m.queries, row, channel, by);
            decayed(right[1], m.keys, row, channel, by);
#pragma unroll
            for (int t = 0; t < Sums::TALL; ++t) {
                const int row0 = Sums::row(t);
                if (row0 >= row) continue;
                float found[2][2][4] = {};
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    u32 left[4];
                    const Stored* from = (n ? m.of_mutual : m.of_scores) + row * COLUMNS + row0;
                    ldmatrix_x4<true>(left, by_columns(from, COLUMNS));
#pragma unroll
                    for (int x = 0; x < 2; ++x)
                        mma_m16n8k16<TYPE == BF16>(found[n][x], left, right[n] + x * 2);
                }
#pragma unroll
                for (int x = 0; x < 8; ++x) {
                    const int j = row0 + lane / 4 + x / 2 % 2 * 8;
                    const int d = channel + x / 4 * 8 + lane % 4 * 2 + x % 2;
                    const float left = exp2_of(__fsub_rn(reference[d], m.decays[j * LINE + d]));
                    float& c = columns.c[g][t][x / 4][x % 4];
                    c = __fadd_rn(c, __fmul_rn(found[0][x / 4][x % 4], left));
                    c = __fadd_rn(c, __fmul_rn(found[1][x / 4][x % 4], left));
                }
            }
        }
    }
    columns.each_with(next[0], [&](int, int, float* c, const float* x) {
        c[0] = __fadd_rn(c[0], x[0]), c[1] = __fadd_rn(c[1], x[1]);
    });
    __syncthreads();

    // Results. Of decays: a row's running sum scales what the row reads, and inversely what is read of it.
    for_own([&](int at, int task, int i) { m.rows[at] = own[task].of_query[i]; });
    __syncthreads();
    store_rows(m.rows, before, count, p.key_size, at, line, p.dq, p.sums_of_dq);
    __syncthreads();
    columns.put(m.rows);
    __syncthreads();
    for_own([&](int at, int task, int i) {
        const int of = (Own::row(task) + i) * KEYS + Own::channel(task);
        const float of_row = own[task].of_key[i], of_column = m.rows[at];
        m.rows[at] = __fadd_rn(of_row, of_column);
        m.of_decays[at] = __fadd_rn(__fmul_rn(E::widen(m.queries[of]), own[task].of_query[i]),
                                    __fmul_rn(E::widen(m.keys[of]), __fsub_rn(of_row, of_column)));
    });
    __syncthreads();
    store_rows(m.rows, before, count, p.key_size, at, line, p.dk, p.sums_of_dk);
    for (int d = threadIdx.x; d < p.key_size; d += THREADS) {
        float sum = 0.0f;
#pragma unroll 8
        for (int i = CHUNK - 1; i >= 0; --i) {
            if (i >= count || i < before) continue;
            const float mine = m.of_decays[i * LINE + d];
            sum = i == count - 1 ? __fadd_rn(mine, m.kept[d]) : __fadd_rn(sum, mine);
            p.dg[((span.token + i) * p.heads + head) * p.key_size + d] = contract::canonical(sum);
        }
    }
}

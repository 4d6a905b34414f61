// Gradients of linear attention without the delta rule: of queries, keys and decays of all chunks, side by side.
//
// docs/contract.md, "Recurrent layers", has the sums. A block takes one head in one chunk. Operands are in shared memory,
// sums in registers, as in delta_rows_registers.cuh. Where heads share one of keys, delta_sums_backward.cu adds their
// gradients of that.
//
// Macros: TYPE, KEY_SIZE, WARPS, HARDWARE_EXP2 and WEIGHTED are those of delta.cu.
//   VALUE_SIZE  of v, up to a multiple of 16

#include "linear.cuh"
#include "sums_of_rows.cuh"

struct Memory {
    Stored keys[CHUNK * KEYS], queries[CHUNK * KEYS], values[CHUNK * VALUES];
    union {
        Stored grads[CHUNK * VALUES];
        float rows[CHUNK * LINE];  // once those were read
    };
    Stored of_scores[CHUNK * COLUMNS];
    Decays decays;
    float since[CHUNK], written[CHUNK], of_decays[CHUNK], kept[KEY_SIZE], total[4];
};
constexpr int BLOCKS = sizeof(Memory) <= 113 << 10 ? 2 : 1;  // of a multiprocessor

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    linear_rows_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int place = blockIdx.x, head = blockIdx.y, sequence = sequence_of(p, place);
    const Chunks mine(p, sequence, rows_before(p, sequence));
    const int chunk = place - first_chunk(mine.begin, sequence);
    if (chunk < 0 || chunk >= mine.number()) return;
    const int before = mine.first(chunk), count = mine.count(chunk);
    if (before == count) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key_head = head / p.group;
    const i64 token = mine.token(chunk), index = i64(place) * p.heads + head;
    const i64 line = i64(p.heads) * p.key_size, at = token * line + i64(head) * p.key_size;

    constexpr int ENTRIES = KEY_SIZE * VALUE_SIZE / 8;
    Rights<true> matrix(p.matrices + index * ENTRIES, p.size);
    load_rows<VALUES, VALUE_SIZE>(m.values, opened_updates(p, sequence, head), p.size,
                                  p.v + head * p.v_head + token * p.v_token, p.v_token, before, count,
                                  p.size);
    load_given<VALUES, VALUE_SIZE>(m.grads, p.of.grad + head * p.of.grad_head + token * p.of.grad_token,
                                   p.of.grad_token, before, count, p.size);
    load_whole(m.decays, p.decays[index]);
    cp_async_commit();
    load_rows<KEYS, KEY_SIZE>(m.keys, opened_keys(p, sequence, head), p.key_size,
                              p.k + key_head * p.k_head + token * p.k_token, p.k_token, before, count,
                              p.key_size);
    load_given<KEYS, KEY_SIZE>(m.queries, p.q + key_head * p.q_head + token * p.q_token, p.q_token, before,
                               count, p.key_size);
    cp_async_commit();
    for (int d = THREADS - 1 - threadIdx.x; p.of.dg && d < KEY_SIZE; d += THREADS)
        m.kept[d] = d < p.key_size ? p.of.kept[index * p.key_size + d] : 0.0f;
    cp_async_wait<1>();
    __syncthreads();
    const float* sums = m.decays.sums;
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) m.since[i] = exp2_of(sums[i]);

    // Of scores, times decays.
    {
        const int row = warp / 2 * 16, column = warp % 2 * 32;
        float of[4][4] = {};
#pragma unroll 1
        for (int e = 0; e < p.size; e += 16) {
            u32 right[2][4], left[4];
#pragma unroll
            for (int x = 0; x < 2; ++x)
                ldmatrix_x4<false>(right[x], by_columns(m.values + (column + x * 16) * VALUES + e, VALUES));
            ldmatrix_x4<false>(left, by_rows(m.grads + row * VALUES + e, VALUES));
#pragma unroll
            for (int x = 0; x < 4; ++x) mma_m16n8k16<TYPE == BF16>(of[x], left, right[x / 2] + x % 2 * 2);
        }
#pragma unroll
        for (int x = 0; x < 8; ++x) {
            const int i = row + lane / 4 + x % 2 * 8, j = column + x / 2 * 8 + lane % 4 * 2;
            float scores[2];
#pragma unroll
            for (int y = 0; y < 2; ++y) {
                const bool seen = j + y <= i && i < count;
                float decay = seen ? exp2_of(__fsub_rn(sums[i], sums[j + y])) : 0.0f;
#if WEIGHTED
                if (seen) decay = __fmul_rn(decay, m.decays.weights[j + y]);
#endif
                const float score = __fmul_rn(of[x / 2][x % 2 * 2 + y], p.scale);
                scores[y] = seen ? __fmul_rn(score, decay) : 0.0f;
            }
            E::store_pair(m.of_scores + i * COLUMNS + j, scores[0], scores[1]);
        }
    }
    cp_async_wait<0>();
    __syncthreads();

    // Of queries: by what they read of the matrix and of the keys before them.
    Sums read[1];
    matrix.multiply(m.grads, read);
    read[0].each([&](int i, int, float* c) {
        const float factor = __fmul_rn(m.since[i], p.scale);
        c[0] = i < count ? __fmul_rn(c[0], factor) : 0.0f, c[1] = i < count ? __fmul_rn(c[1], factor) : 0.0f;
    });
    read[0].add<false>(m.of_scores, m.keys, count);
    Rights<true> of_matrix(p.of.matrices + index * ENTRIES, p.size);
    __syncthreads();
    read[0].put(m.rows);
    __syncthreads();
    float* of_heads = p.of.rows;
    store_rows(m.rows, before, count, p.key_size, at, line, p.of.dq, of_heads);
    float sum = 0.0f;  // of this thread's row: of its decay
    if (p.of.dg && threadIdx.x < CHUNK)
        sum = chain(m.queries + threadIdx.x * KEYS, m.rows + threadIdx.x * LINE, p.key_size, sum);

    // Of keys, as what the next matrix consists of.
    Sums next[1];
    of_matrix.multiply(m.values, next);
    next[0].each([&](int j, int, float* c) {
        c[0] = j < count ? __fmul_rn(c[0], m.decays.left[j]) : 0.0f;
        c[1] = j < count ? __fmul_rn(c[1], m.decays.left[j]) : 0.0f;
    });
    if (p.of.dg) {
        __syncthreads();
        next[0].put(m.rows);
        __syncthreads();
        const int x = threadIdx.x - CHUNK;
        if (x >= 0 && x < count) m.written[x] = chain(m.keys + x * KEYS, m.rows + x * LINE, p.key_size, 0.0f);
        if (threadIdx.x == THREADS - 1) m.total[0] = sum_of(m.kept, p.key_size);
    }

    // As columns of scores. All sums begin with those of keys as rows of scores, of which there are none: +0.
    Sums columns;
    columns.add<true>(m.of_scores, m.queries, count);
    __syncthreads();
    columns.each_with(next[0], [&](int j, int d, float* c, const float* x) {
        const float of_keys[2] = {__fadd_rn(c[0], x[0]), __fadd_rn(c[1], x[1])};
        *reinterpret_cast<float2*>(m.rows + j * LINE + d) =
            make_float2(__fadd_rn(0.0f, of_keys[0]), __fadd_rn(0.0f, of_keys[1]));
        c[0] = __fsub_rn(0.0f, of_keys[0]), c[1] = __fsub_rn(0.0f, of_keys[1]);
    });
    __syncthreads();
    store_rows(m.rows, before, count, p.key_size, at, line, p.of.dk,
               of_heads ? of_heads + i64(p.tokens) * line : nullptr);

    // Of decays: a row's running sum scales what the row reads, and inversely what is read of it.
    if (!p.of.dg) return;
    __syncthreads();
    columns.put(m.rows);
    __syncthreads();
    if (threadIdx.x < CHUNK)
        m.of_decays[threadIdx.x] =
            chain(m.keys + threadIdx.x * KEYS, m.rows + threadIdx.x * LINE, p.key_size, sum);
    if (threadIdx.x == THREADS - 1) m.total[0] = __fadd_rn(sum_of(m.written, count), m.total[0]);
    __syncthreads();
    if (threadIdx.x == 0) running_sums(m.of_decays, count, m.total[0]);
    __syncthreads();
    for (int i = before + threadIdx.x; i < count; i += THREADS)
        p.of.dg[(token + i) * p.heads + head] = contract::canonical(m.of_decays[i]);
}

// The delta rule with one decay for each head, the first of two launches: what the chunks need of keys, queries and
// decays, all chunks side by side.
//
// docs/contract.md, "Recurrent layers", has the sums. A block takes one head of one chunk. One of its warps also does
// what linear_begin.cu does.
//
// Macros: TYPE, KEY_SIZE, WARPS and HARDWARE_EXP2 are those of delta.cu.

#define WEIGHTED 0
#include "linear_begin.cuh"

struct Memory {
    Stored keys[CHUNK * KEYS], queries[CHUNK * KEYS];
    Decays decays;
};

extern "C" __global__ void __launch_bounds__(THREADS, 6) delta_begin(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int place = blockIdx.x, head = blockIdx.y, sequence = sequence_of(p, place);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, in_row = lane / 4, in_pair = lane % 4 * 2;
    const float* state = p.state ? p.state + sequence * p.words : nullptr;
    const Chunks mine(p, sequence, state ? min(max(int(state[0]), 0), CHUNK) : 0);
    const int chunk = place - first_chunk(mine.begin, sequence);
    if (chunk < 0) return;
    if (state && chunk == 0 && head == 0 && threadIdx.x == 0) p.counts[sequence] = mine.before;
    if (chunk >= mine.number()) return;

    const int first = mine.first(chunk), count = mine.count(chunk), key_head = head / p.group;
    const i64 token = mine.token(chunk), index = i64(place) * p.heads + head;
    if (first)
        copy_rows<KEYS, KEY_SIZE>(
            m.keys, reinterpret_cast<const Stored*>(state + p.keys) + i64(head) * CHUNK * p.key_size,
            p.key_size, 0, first, first, p.key_size);
    copy_rows<KEYS, KEY_SIZE>(m.keys, p.k + key_head * p.k_head + token * p.k_token, p.k_token, first, CHUNK,
                              count, p.key_size);
    if (first) copy_rows<KEYS, KEY_SIZE>(m.queries, p.q, 0, 0, first, 0, 0);  // zeros
    copy_rows<KEYS, KEY_SIZE>(m.queries, p.q + key_head * p.q_head + token * p.q_token, p.q_token, first,
                              CHUNK, count, p.key_size);
    cp_async_commit();
    System& to = p.systems[index];
    if (warp == 0) {
        find_decays(p, mine, chunk, head, state, index, m.decays);
        if (first) copy_opened(p, sequence, head, state, first);
    } else if (warp > 1) {
        for (int i = threadIdx.x - 64; i < CHUNK; i += THREADS - 64) {
            const bool given = i >= first && i < count;
            to.betas[i] = given ? p.beta[(token + i) * p.beta_token + head * p.beta_head] : 0.0f;
        }
    }
    cp_async_wait<0>();
    __syncthreads();
    const float* sums = m.decays.sums;
    for (int i = threadIdx.x; i < CHUNK; i += THREADS)
        to.sums[i] = sums[i], to.since[i] = exp2_of(sums[i]), to.left[i] = m.decays.left[i];

    for (int block = warp; block < 10; block += WARPS) {
        const int row = row_of(block), column = column_of(block);
        float of_keys[2][4] = {}, of_queries[2][4] = {};
#pragma unroll
        for (int d = 0; d < KEY_SIZE; d += 16) {
            u32 left[4], right[4];
            ldmatrix_x4<false>(right, by_columns(m.keys + column * KEYS + d, KEYS));
            ldmatrix_x4<false>(left, by_rows(m.keys + row * KEYS + d, KEYS));
            mma_m16n8k16<TYPE == BF16>(of_keys[0], left, right);
            mma_m16n8k16<TYPE == BF16>(of_keys[1], left, right + 2);
            ldmatrix_x4<false>(left, by_rows(m.queries + row * KEYS + d, KEYS));
            mma_m16n8k16<TYPE == BF16>(of_queries[0], left, right);
            mma_m16n8k16<TYPE == BF16>(of_queries[1], left, right + 2);
        }
#pragma unroll
        for (int x = 0; x < 8; ++x) {
            const int i = row + in_row + x / 2 % 2 * 8, j = column + x / 4 * 8 + in_pair + x % 2;
            const float weight = j <= i ? exp2_of(__fsub_rn(sums[i], sums[j])) : 0.0f;
            float& y = of_keys[x / 4][x % 4];
            y = j < i ? -__fmul_rn(y, weight) : 0.0f;
            if (row == column) to.own[row / 16][j % 16][i % 16] = y;
            float& of_query = of_queries[x / 4][x % 4];
            of_query = j <= i ? __fmul_rn(of_query, weight) : 0.0f;
        }
        const auto pair = [](const float (&of)[2][4], int half, int i) {
            return E::pack(of[half][i], of[half][i + 1]);
        };
        p.scores[index].blocks[block][lane] = make_uint4(pair(of_queries, 0, 0), pair(of_queries, 0, 2),
                                                         pair(of_queries, 1, 0), pair(of_queries, 1, 2));
        if (row > column)
            to.earlier[block - row / 16][lane] = make_uint4(pair(of_keys, 0, 0), pair(of_keys, 1, 0),
                                                            pair(of_keys, 0, 2), pair(of_keys, 1, 2));
    }
}

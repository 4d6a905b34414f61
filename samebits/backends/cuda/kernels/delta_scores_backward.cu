// Gradients of the delta rule, before the pass over the chunks: scores and decays of all of them.
//
// docs/contract.md, "Recurrent layers", has the sums. A block takes one head's chunk, and a warp 16 keys of it.
//
// Macros: TYPE, KEY_SIZE, WARPS, and HARDWARE_EXP2 are those of delta.cu; tensor cores, the delta rule, no BY_CHANNEL.

#include "delta_scores.cuh"

static_assert(WARPS == BLOCKS_OF_ROWS);

struct Memory {
    Stored keys[CHUNK * KEYS], queries[CHUNK * KEYS];
    float decays[CHUNK];
};

// Products of 16 keys with rows, by blocks of 16 from the keys' own on.
struct Products {
    float c[BLOCKS_OF_ROWS][2][4] = {};

    __device__ __forceinline__ void add(const u32 (&keys)[4], const Stored* rows, int first) {
#pragma unroll
        for (int n = 0; n < BLOCKS_OF_ROWS; ++n) {
            if (n < first) continue;
            u32 right[4];
            ldmatrix_x4<false>(right, by_columns(rows + n * 16 * KEYS, KEYS));
            mma_m16n8k16<TYPE == BF16>(c[n][0], keys, right);
            mma_m16n8k16<TYPE == BF16>(c[n][1], keys, right + 2);
        }
    }

    // Calls `f` with each element's key and row, within the chunk.
    template <class F>
    __device__ __forceinline__ void each(int n, int first, const F& f) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int x = 0; x < 8; ++x)
            f(first * 16 + lane / 4 + x % 4 / 2 * 8, n * 16 + x / 4 * 8 + lane % 4 * 2 + x % 2,
              c[n][x / 4][x % 4]);
    }

    __device__ __forceinline__ uint4 packed(int n) const {
        const auto pair = [&](int half, int i) { return E::pack(c[n][half][i], c[n][half][i + 1]); };
        return make_uint4(pair(0, 0), pair(1, 0), pair(0, 2), pair(1, 2));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_scores_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int place = blockIdx.x, head = blockIdx.y, block = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int sequence = sequence_of(p, place);
    const int chunk = place - first_chunk(Tokens(p.spans, sequence, p.sequences, p.tokens).begin, sequence);
    if (chunk < 0 || chunk >= Span(p, sequence, 0).chunks) return;
    const Span span(p, sequence, chunk);
    const int count = span.count;
    const i64 index = i64(place) * p.heads + head;
    const Record record(p.records, index, p.key_size, p.size);
    Scores& to = p.scores[index];

    copy_rows<KEYS, KEY_SIZE>(m.keys, record.keys, p.key_size, 0, count, p.key_size);
    copy_rows<KEYS, KEY_SIZE>(m.queries, p.q + head / p.group * p.q_head + span.token * p.q_token, p.q_token,
                              span.before, count, p.key_size);
    cp_async_commit();
    const float last = record.decays[count - 1];
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
        const float decay = i < count ? record.decays[i] : 0.0f, since = exp2_of(decay);
        m.decays[i] = decay;
        to.since[i] = i < count ? __fmul_rn(since, p.scale) : 0.0f;
        to.left[i] = i < count ? exp2_of(__fsub_rn(last, decay)) : 0.0f;
        const bool given = i < count && i >= span.before;
        to.betas[i] = given ? p.beta[(span.token + i) * p.beta_token + head * p.beta_head] : 0.0f;
        to.read[i] = i < count ? -since : 0.0f;
    }
    if (threadIdx.x == 0) to.kept = exp2_of(last);
    cp_async_wait<0>();
    __syncthreads();

    Products of_queries, of_keys;
#pragma unroll 2
    for (int d = 0; d < KEY_SIZE; d += 16) {
        u32 keys[4];
        ldmatrix_x4<false>(keys, by_rows(m.keys + block * 16 * KEYS + d, KEYS));
        of_queries.add(keys, m.queries + d, block);
        of_keys.add(keys, m.keys + d, block);
    }
    const auto decayed = [&](int j, int i, float c) {
        return __fmul_rn(c, exp2_of(__fsub_rn(m.decays[i], m.decays[j])));
    };
#pragma unroll
    for (int n = 0; n < BLOCKS_OF_ROWS; ++n) {
        of_queries.each(n, block, [&](int j, int i, float& c) {
            const float y = j <= i && i < count ? decayed(j, i, c) : 0.0f;
            c = i < count ? __fmul_rn(y, p.scale) : 0.0f;
        });
        to.scores[n][block][lane] = of_queries.packed(n);
        if (n < block) continue;
        of_keys.each(n, block, [&](int j, int i, float& c) {
            c = -(j < i && i < count ? decayed(j, i, c) : 0.0f);
            if (n == block) to.own[n][i % 16][j % 16] = c;
        });
        if (n > block) to.weights[Scores::below(n, block)][lane] = of_keys.packed(n);
    }
}

// What does not depend on a state, of delta rules with a decay for each channel: docs/contract.md, "Recurrent layers".
//
// A block takes one head of one chunk. It computes the running sums of decays; the scores of the chunk's queries and
// keys by its keys; and the operands that the pass over the chunks multiplies, times their decays. That pass then is
// the one of delta rules with one decay for each head.
//
// Scores by keys of earlier blocks are products, a warp for 16 x 16 of them. Those by keys of a row's own block are
// chains in which each channel of each pair has its own exponential: a thread for two rows and two keys.
//
// Besides the chunks of a call's tokens, there is the one that a state has, if nothing of the call goes into it: a
// full one, or that of a sequence without tokens. Its place is behind the others of its sequence.
//
// Macros: TYPE, TENSOR_CORE, KEY_SIZE, HARDWARE_EXP2 and KEEP are those of delta.cu.
//   SYSTEMS  1: before delta_chunks.cu, which takes scores as tensor-core steps do, or delta_states.cu; 0: before delta.cu

#define BY_CHANNEL 1
#define WEIGHTED 0
#define WARPS 8

#include "delta_system.cuh"

struct Params {
    const Stored *q, *k;
    const float *g, *state;
    Prepared* prepared;
    unsigned char* records;  // KEEP: for gradients, which need all rows, and keys as they are
    const int* spans;
    i64 q_token, q_head, k_token, k_head, g_token, g_head, words;
    int keys, decays;  // where they are in a state
    int key_size, size, heads, group, tokens, sequences;
    float scale;  // of queries and of their scores
#if SYSTEMS
    const float* beta;
    int* counts;  // as those of linear.cuh, like the next two
    System* systems;
    QueryScores* scores;
    i64 beta_token, beta_head;
#endif
};

// Of 16 rows in shared memory those with even numbers come first. So eight neighbours, and eight rows two apart, lie in
// banks of their own.
constexpr int BLOCK = 16, APART = 64;  // bytes between both halves
template <class T>
__device__ __forceinline__ int place_of(int row, int line) {
    const int of_block = BLOCK * line + APART / int(sizeof(T));
    return row / BLOCK * of_block + row % BLOCK / 2 * line + row % 2 * (of_block - BLOCK / 2 * line);
}
struct Memory {
    Stored keys[CHUNK / BLOCK * (BLOCK * KEYS + APART / SIZE)];
    Stored queries[CHUNK / BLOCK * (BLOCK * KEYS + APART / SIZE)];
    float decays[CHUNK / BLOCK * (BLOCK * DECAYS + APART / 4)];
};
__device__ __forceinline__ int row_of_keys(int i) { return place_of<Stored>(i, KEYS); }
__device__ __forceinline__ int row_of_decays(int i) { return place_of<float>(i, DECAYS); }

__device__ __forceinline__ float2 two_of(const Stored* from) {
    if constexpr (SIZE == 4) {
        return *reinterpret_cast<const float2*>(from);
    } else {
        const u32 both = *reinterpret_cast<const u32*>(from);
        return make_float2(E::widen(Stored(both)), E::widen(Stored(both >> 16)));
    }
}
__device__ __forceinline__ float2 two_of_decays(const float* from) {
    return *reinterpret_cast<const float2*>(from);
}
// Decays of two channels, from row `to` to row `from` of G.
__device__ __forceinline__ float2 decay(float2 to, float2 from) {
    return make_float2(exp2_of(__fsub_rn(to.x, from.x)), exp2_of(__fsub_rn(to.y, from.y)));
}
__device__ __forceinline__ float2 times(float2 x, float2 y) {
    return make_float2(__fmul_rn(x.x, y.x), __fmul_rn(x.y, y.y));
}
__device__ __forceinline__ void store_four(Stored* to, const float2 (&x)[2]) {
#if TENSOR_CORE
    *reinterpret_cast<uint2*>(to) = make_uint2(E::pack(x[0].x, x[0].y), E::pack(x[1].x, x[1].y));
#else
    E::store_pair(to, x[0].x, x[0].y), E::store_pair(to + 2, x[1].x, x[1].y);
#endif
}

// Copies rows from `begin` on, of `size` elements: those from `first` to `last` - 1 exist, the others are zeros.
__device__ __forceinline__ void copy_rows(Stored* to, const Stored* from, i64 line, int begin, int end,
                                          int first, int last, int size) {
    constexpr int PER = 16 / SIZE, EACH = KEY_SIZE / PER;
    if ((reinterpret_cast<u64>(from) | u64(line) * SIZE) % 16 == 0) {
#pragma unroll 4
        for (int x = begin * EACH + threadIdx.x; x < end * EACH; x += THREADS) {
            const int row = x / EACH, at = x % EACH * PER;
            const int bytes = row >= first && row < last ? min(max(size - at, 0) * SIZE, 16) : 0;
            cp_async_16(shared_address(to + row_of_keys(row) + at), bytes ? from + row * line + at : from,
                        bytes);
        }
    } else {
#pragma unroll 1
        for (int x = begin * KEY_SIZE + threadIdx.x; x < end * KEY_SIZE; x += THREADS) {
            const int row = x / KEY_SIZE, at = x % KEY_SIZE;
            const bool exists = row >= first && row < last && at < size;
            to[row_of_keys(row) + at] = exists ? from[row * line + at] : E::narrow(0.0f);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, KEY_SIZE* SIZE > 256 ? 1 : 3)
    delta_prepare(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int place = blockIdx.x, head = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const int sequence = sequence_of(p, place);
    const Tokens mine(p.spans, sequence, p.sequences, p.tokens);
    const int chunk = place - first_chunk(mine.begin, sequence);
    const float* state = p.state ? p.state + sequence * p.words : nullptr;
    const int held = state ? min(max(int(state[0]), 0), CHUNK) : 0, open = held % CHUNK;
    const int given = mine.end - mine.begin, chunks = given ? (open + given + CHUNK - 1) / CHUNK : 0;
    if (chunk < 0 || chunk > chunks) return;
#if SYSTEMS
    if (state && chunk == 0 && head == 0 && threadIdx.x == 0) p.counts[sequence] = held;
#endif
    const bool is_states = chunk == chunks;  // the chunk of no token
    if (is_states && (given ? held < CHUNK : !held)) return;
    const int before = is_states ? held : chunk ? 0 : open;
    const int count = is_states ? held : min(open + given - chunk * CHUNK, CHUNK);
    const i64 token = i64(mine.begin) - open + i64(chunk) * CHUNK;  // of row 0, if that were one
    const int first = KEEP ? 0 : before;                            // row whose scores are needed
    const i64 index = i64(place) * p.heads + head;
    Prepared& to = p.prepared[index];
#if SYSTEMS
    System& system = p.systems[index];
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
        const bool is_token = i >= before && i < count;
        system.betas[i] = is_token ? p.beta[(token + i) * p.beta_token + head * p.beta_head] : 0.0f;
    }
#endif

    // Rows that are not there are zeros, and so are queries of those before this call's.
    const i64 of_state = i64(head) * CHUNK * p.key_size;
    const int key_head = head / p.group;
    if (before)
        copy_rows(m.keys, reinterpret_cast<const Stored*>(state + p.keys) + of_state, p.key_size, 0, before,
                  0, before, p.key_size);
    copy_rows(m.keys, p.k + key_head * p.k_head + token * p.k_token, p.k_token, before, CHUNK, before, count,
              p.key_size);
    copy_rows(m.queries, p.q + key_head * p.q_head + token * p.q_token, p.q_token, 0, CHUNK, before, count,
              p.key_size);
    cp_async_commit();

    // Running sums: of rows that are not there, that of the last one. A thread has a channel of some rows.
    constexpr int PARTS = 2 * KEY_SIZE <= THREADS ? 2 : 1, EACH = CHUNK / PARTS;
    const int part = threadIdx.x / KEY_SIZE, channel = threadIdx.x % KEY_SIZE;
    static_assert(KEY_SIZE <= THREADS);
    float gammas[EACH] = {};  // or sums that a state has
    if (part < PARTS && channel < p.key_size) {
        const float* g = p.g + head * p.g_head + (token + part * EACH) * p.g_token + channel;
        const float* held = state + p.decays + of_state + part * EACH * p.key_size + channel;
        if (!before && count == CHUNK) {  // with no branch between loads
#pragma unroll
            for (int x = 0; x < EACH; ++x) gammas[x] = g[x * p.g_token];
        } else {
#pragma unroll
            for (int x = 0; x < EACH; ++x) {
                const int i = part * EACH + x;
                if (i < count) gammas[x] = i < before ? held[x * p.key_size] : g[x * p.g_token];
            }
        }
    }
#pragma unroll
    for (int n = 0; n < PARTS; ++n) {
        if (n) __syncthreads();
        if (part != n) continue;
        float sum = n ? m.decays[row_of_decays(n * EACH - 1) + channel] : 0.0f;
#pragma unroll
        for (int x = 0; x < EACH; ++x) {
            const int i = n * EACH + x;
            sum = i < before ? gammas[x] : __fadd_rn(sum, __fmul_rn(gammas[x], contract::LOG2E));
            m.decays[row_of_decays(i) + channel] = sum;
        }
    }
    cp_async_wait<0>();
    __syncthreads();

    // Operands.
    const float* last = m.decays + row_of_decays(count - 1);
    for (int d = threadIdx.x; d < KEY_SIZE; d += THREADS) to.kept[d] = exp2_of(last[d]);
    const bool keeps_decays = !SYSTEMS || KEEP || (state && chunk == chunks - 1);
#pragma unroll 2
    for (int x = threadIdx.x; x < CHUNK * KEY_SIZE / 4; x += THREADS) {
        const int i = x / (KEY_SIZE / 4), d = x % (KEY_SIZE / 4) * 4;
        const float4 four = *reinterpret_cast<const float4*>(m.decays + row_of_decays(i) + d);
        const float2 sums[2] = {make_float2(four.x, four.y), make_float2(four.z, four.w)};
        const float2 zero = make_float2(0.0f, 0.0f), scale = make_float2(p.scale, p.scale);
        if (keeps_decays) *reinterpret_cast<float4*>(to.decays[i] + d) = four;
        float2 read[2], written[2], asks[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int at = row_of_keys(i) + d + n * 2;
            const float2 key = two_of(m.keys + at), query = two_of(m.queries + at);
            float2 since = zero, left = zero;
            if (i < count)
                since = decay(sums[n], zero), left = decay(two_of_decays(last + d + n * 2), sums[n]);
            read[n] = times(key, since), written[n] = times(key, left);
            asks[n] = times(query, times(since, scale));
        }
        store_four(to.queries[i] + d, asks);
        store_four(to.keys[i] + d, read);
        store_four(to.written[i] + d, written);
    }
    if constexpr (KEEP) {
        const Record record(p.records, index, p.key_size, p.size);
        for (int x = threadIdx.x; x < count * p.key_size; x += THREADS)
            record.keys[x] = m.keys[row_of_keys(x / p.key_size) + x % p.key_size];
    }

    // Scores of two neighbouring keys.
    const auto store = [&](int i, int j, float2 of_query, float2 of_key) {
        const bool exists = i >= first && i < count;
        const float y[4] = {exists && j <= i ? __fmul_rn(of_query.x, p.scale) : 0.0f,
                            exists && j < i ? __fmul_rn(of_query.y, p.scale) : 0.0f,
                            exists && j < i ? of_key.x : 0.0f, exists && j + 1 < i ? of_key.y : 0.0f};
#if !SYSTEMS || KEEP
        E::store_pair(to.scores[i] + j, y[0], y[1]);
        *reinterpret_cast<float2*>(to.weights[i] + j) = make_float2(y[2], y[3]);
#endif
#if SYSTEMS
        const int row = i / 16, column = j / 16, below = i % 16 / 8, right = j % 16 / 8;
        const int lane = i % 8 * 4 + j % 8 / 2;
        const auto put = [&](uint4* block, int at, float x, float y) {
            reinterpret_cast<u32*>(block + lane)[at] = E::pack(x, y);
        };
        if (!KEEP && column <= row)
            put(p.scores[index].blocks[row * (row + 1) / 2 + column], below + 2 * right, y[0], y[1]);
        if (column < row)
            put(system.earlier[row * (row - 1) / 2 + column], 2 * below + right, -y[2], -y[3]);
        else if (column == row)
            system.own[row][j % 16][i % 16] = -y[2], system.own[row][j % 16 + 1][i % 16] = -y[3];
#endif
    };
    const float2 none = make_float2(0.0f, 0.0f);
    for (int x = threadIdx.x; x < CHUNK * CHUNK / 2; x += THREADS) {
        const int i = x / (CHUNK / 2), j = x % (CHUNK / 2) * 2;
        const bool own = j / 16 == i / 16, computed = i / 16 * 16 < count && i / 16 * 16 + 16 > first;
        if (own ? j / 2 > i / 2 : j > i || !computed) store(i, j, none, none);
    }

    // By keys of the row's own block.
    constexpr int OWN = 36, OWN_WARPS = (4 * OWN + 31) / 32;
    if (threadIdx.x < 4 * OWN) {
        const int block = threadIdx.x / OWN * 16;
        int row = 0, key = threadIdx.x % OWN;
        while (key > row) key -= ++row;
        const int i = block + row * 2, j = block + key * 2;
        float2 of_query[2] = {none, none}, of_key[2] = {none, none};
        const auto add = [&](float query, float of_row, float of_column, float sum, float earlier, float& x,
                             float& y) {
            const float by = exp2_of(__fsub_rn(sum, earlier));
            x = __fmaf_rn(__fmul_rn(query, of_column), by, x);
            y = __fmaf_rn(__fmul_rn(of_row, of_column), by, y);
        };
        if (i < count && i + 1 >= first)
#pragma unroll 2
            for (int d = 0; d < p.key_size; d += 2) {  // behind the last channel are zeros, which add +0
                float2 query[2], of_row[2], sum[2], of_column[2], earlier[2];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    query[n] = two_of(m.queries + row_of_keys(i + n) + d);
                    of_row[n] = two_of(m.keys + row_of_keys(i + n) + d);
                    sum[n] = two_of_decays(m.decays + row_of_decays(i + n) + d);
                    of_column[n] = two_of(m.keys + row_of_keys(j + n) + d);
                    earlier[n] = two_of_decays(m.decays + row_of_decays(j + n) + d);
                }
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    float2 &x = of_query[n], &y = of_key[n];
                    add(query[n].x, of_row[n].x, of_column[0].x, sum[n].x, earlier[0].x, x.x, y.x);
                    add(query[n].x, of_row[n].x, of_column[1].x, sum[n].x, earlier[1].x, x.y, y.y);
                    add(query[n].y, of_row[n].y, of_column[0].y, sum[n].y, earlier[0].y, x.x, y.x);
                    add(query[n].y, of_row[n].y, of_column[1].y, sum[n].y, earlier[1].y, x.y, y.y);
                }
            }
        store(i, j, of_query[0], of_key[0]);
        store(i + 1, j, of_query[1], of_key[1]);
    }

    // By those of earlier blocks, as products.
#if TENSOR_CORE
    const int in_row = lane / 4, in_pair = lane % 4 * 2;
    for (int tile = warp - OWN_WARPS; tile >= 0 && tile < 6; tile += WARPS - OWN_WARPS) {
        const int block = tile < 1 ? 1 : tile < 3 ? 2 : 3, row0 = block * 16;
        const int key0 = (tile - block * (block - 1) / 2) * 16;
        if (row0 >= count || row0 + 16 <= first) continue;
        const float* reference = m.decays + row_of_decays(row0 - 1);
        float of_queries[2][4] = {}, of_keys[2][4] = {};
#pragma unroll 1
        for (int k = in_pair; k < KEY_SIZE; k += 16) {
            u32 a_query[4], a_key[4], b[2][2];
            float2 from[2];
#pragma unroll
            for (int x = 0; x < 2; ++x) from[x] = two_of_decays(reference + k + x * 8);
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int row = row0 + in_row + x % 2 * 8, d = k + x / 2 * 8;
                const float2 by = decay(two_of_decays(m.decays + row_of_decays(row) + d), from[x / 2]);
                const float2 query = times(two_of(m.queries + row_of_keys(row) + d), by);
                const float2 key = times(two_of(m.keys + row_of_keys(row) + d), by);
                a_query[x] = E::pack(query.x, query.y), a_key[x] = E::pack(key.x, key.y);
            }
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int row = key0 + in_row + x / 2 * 8, d = k + x % 2 * 8;
                const float2 by = decay(from[x % 2], two_of_decays(m.decays + row_of_decays(row) + d));
                const float2 key = times(two_of(m.keys + row_of_keys(row) + d), by);
                b[x / 2][x % 2] = E::pack(key.x, key.y);
            }
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                mma_m16n8k16<TYPE == BF16>(of_queries[x], a_query, b[x]);
                mma_m16n8k16<TYPE == BF16>(of_keys[x], a_key, b[x]);
            }
        }
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const float *query = of_queries[x / 2] + x % 2 * 2, *key = of_keys[x / 2] + x % 2 * 2;
            store(row0 + in_row + x % 2 * 8, key0 + x / 2 * 8 + in_pair, make_float2(query[0], query[1]),
                  make_float2(key[0], key[1]));
        }
    }
#else
    for (int x = threadIdx.x; x < CHUNK * CHUNK / 2; x += THREADS) {
        const int i = x / (CHUNK / 2), j = x % (CHUNK / 2) * 2, row0 = i / 16 * 16;
        if (j >= row0 || row0 >= count || row0 + 16 <= first) continue;
        const float *reference = m.decays + row_of_decays(row0 - 1), *sums = m.decays + row_of_decays(i);
        float of_query[2] = {}, of_key[2] = {};
        for (int d = 0; d < p.key_size; ++d) {
            const float by = exp2_of(__fsub_rn(sums[d], reference[d]));
            const auto rounded = [&](float y) { return E::widen(E::narrow(y)); };
            const float query = rounded(__fmul_rn(E::widen(m.queries[row_of_keys(i) + d]), by));
            const float of_row = rounded(__fmul_rn(E::widen(m.keys[row_of_keys(i) + d]), by));
            for (int n = 0; n < 2; ++n) {
                const float left = exp2_of(__fsub_rn(reference[d], m.decays[row_of_decays(j + n) + d]));
                const float key = rounded(__fmul_rn(E::widen(m.keys[row_of_keys(j + n) + d]), left));
                of_query[n] = __fmaf_rn(query, key, of_query[n]);
                of_key[n] = __fmaf_rn(of_row, key, of_key[n]);
            }
        }
        store(i, j, make_float2(of_query[0], of_query[1]), make_float2(of_key[0], of_key[1]));
    }
#endif
}

// Gradients of delta rules and linear attention, from chunk to chunk: of updates and values, and of matrices.
//
// docs/contract.md, "Recurrent layers", has the sums. A block takes TILE columns of one head's values in one sequence,
// and goes through the sequence's chunks from the last to the first. It holds the gradient of the matrix at the chunk's
// end, transposed, in shared memory, and keeps it, and those of updates and z, in the chunk's record: the rest of the
// gradients needs all columns, and is computed by delta_rows_backward.cu.
//
// Macros: TYPE, TENSOR_CORE, KEY_SIZE, TILE, WARPS, HARDWARE_EXP2, DELTA, BY_CHANNEL and WEIGHTED are delta.cu's.
//   STAGES     2: what is read of the chunk before is copied while one is computed; 1: it is not
//   REGISTERS  1, with two stages: the gradient of the matrix lies in registers: include/delta_matrices_registers.cuh
//
// With a decay for each channel, delta_prepare.cu has computed scores, and operands times their decays.

#include "delta_backward.cuh"

#if REGISTERS
#include "delta_matrices_registers.cuh"
#else
// Rows in shared memory, padded so that fragments are read without conflicts of banks.
constexpr int COLUMNS = CHUNK + PAD;                                           // in elements
constexpr int MATRIX = KEY_SIZE + 8, WEIGHTS = CHUNK + 8, UPDATES = TILE + 8;  // in floats

struct Memory {
    Stored keys[STAGES][CHUNK * KEYS], queries[STAGES][CHUNK * KEYS];
#if BY_CHANNEL
    Stored readers[STAGES][CHUNK * KEYS];                // keys that read the matrix; `keys` close a chunk
    Stored grads[TILE * COLUMNS], of_z[TILE * COLUMNS];  // [column, row]
    Stored scores[STAGES][CHUNK * COLUMNS];              // [query, key], times the scale
    float weights[STAGES][CHUNK * WEIGHTS];              // [row, key]
    float kept[STAGES][KEY_SIZE];
#else
    Stored grads[TILE * COLUMNS], scaled[TILE * COLUMNS], of_z[TILE * COLUMNS];  // [column, row]
    Stored scores[CHUNK * COLUMNS];  // [key, query], times the scale
    float weights[CHUNK * WEIGHTS];  // of keys, negative, [key, row]
#endif
    float matrix[TILE * MATRIX], of_updates[CHUNK * UPDATES];
#if !BY_CHANNEL
    float decays[CHUNK];
#endif
    float betas[CHUNK];  // or weights
};

#if BY_CHANNEL
// An operand with its sign turned.
template <class T>
struct Minus {
    static constexpr bool PAIRS = T::PAIRS;
    T of;
    __device__ __forceinline__ float operator()(int row, int k) const { return -of(row, k); }
    __device__ __forceinline__ u32 pair(int row, int k) const { return of.pair(row, k) ^ 0x80008000; }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    delta_matrices_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int tile = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
    const int first_column = tile * TILE, columns = min(TILE, p.size - first_column);
    const int begin = Tokens(p.spans, sequence, p.sequences, p.tokens).begin;
    const i64 own = (i64(sequence) * p.heads + head) * p.key_size * p.size;  // of a matrix

    for (int x = threadIdx.x; x < KEY_SIZE * TILE; x += THREADS) {
        const int d = x / TILE, e = x % TILE;
        const bool given = p.of_closed && d < p.key_size && e < columns;
        m.matrix[e * MATRIX + d] = given ? p.of_closed[own + i64(d) * p.size + first_column + e] : 0.0f;
    }
    __syncthreads();

    // Rows that are not there are zeros, and so are queries and gradients of those before this call's.
    const auto load = [&](int chunk) {
#if BY_CHANNEL
        const Prepared& from = p.prepared[i64(first_chunk(begin, sequence) + chunk) * p.heads + head];
        const int stage = chunk % STAGES;
        copy_prepared<KEYS, KEY_SIZE>(m.keys[stage], from.written[0], CHUNK);
        copy_prepared<KEYS, KEY_SIZE>(m.queries[stage], from.queries[0], CHUNK);
        copy_prepared<KEYS, KEY_SIZE>(m.readers[stage], from.keys[0], CHUNK);
        copy_prepared<COLUMNS, CHUNK>(m.scores[stage], from.scores[0], CHUNK);
        copy_prepared<WEIGHTS, CHUNK>(m.weights[stage], from.weights[0], CHUNK);
        copy_prepared<KEY_SIZE, KEY_SIZE>(m.kept[stage], from.kept, 1);
#else
        const Span rows(p, sequence, chunk);
        const Record record(p.records, i64(first_chunk(begin, sequence) + chunk) * p.heads + head, p.key_size,
                            p.size);
        const Stored* q = p.q + head / p.group * p.q_head + rows.token * p.q_token;
        copy_rows<KEYS, KEY_SIZE>(m.keys[chunk % STAGES], record.keys, p.key_size, 0, rows.count, p.key_size);
        copy_rows<KEYS, KEY_SIZE>(m.queries[chunk % STAGES], q, p.q_token, rows.before, rows.count,
                                  p.key_size);
#endif
        cp_async_commit();
    };
    int chunk = Span(p, sequence, 0).chunks - 1;
    if (STAGES == 2 && chunk >= 0) load(chunk);
    for (; chunk >= 0; --chunk) {
        const Span rows(p, sequence, chunk);
        const int count = rows.count;
        const Record record(p.records, i64(first_chunk(begin, sequence) + chunk) * p.heads + head, p.key_size,
                            p.size);

        if (STAGES == 1) load(chunk);
        const Stored *own_keys = m.keys[chunk % STAGES], *own_queries = m.queries[chunk % STAGES];
        const Stored* grad = p.grad + head * p.grad_head + first_column;
        for (int x = threadIdx.x; x < CHUNK * TILE; x += THREADS) {
            const int i = x / TILE, e = x % TILE;
            const bool exists = i < count && i >= rows.before && e < columns;
            m.grads[e * COLUMNS + i] = exists ? grad[(rows.token + i) * p.grad_token + e] : E::narrow(0.0f);
            m.of_z[e * COLUMNS + i] = E::narrow(0.0f);
        }
        for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
            const bool exists = DELTA && i < count && i >= rows.before;
            m.betas[i] = exists ? p.beta[(rows.token + i) * p.beta_token + head * p.beta_head] : 0.0f;
#if WEIGHTED
            m.betas[i] = i < count ? record.weights[i] : 0.0f;
#endif
        }
#if !BY_CHANNEL
        for (int i = threadIdx.x; i < CHUNK; i += THREADS) m.decays[i] = i < count ? record.decays[i] : 0.0f;
#endif
        // The gradient of the matrix at this chunk's end.
        for (int x = threadIdx.x; x < p.key_size * TILE; x += THREADS) {
            const int d = x / TILE, e = x % TILE;
            if (e < columns) record.of_matrix[i64(d) * p.size + first_column + e] = m.matrix[e * MATRIX + d];
        }
        cp_async_wait<0>();
        __syncthreads();
        if (STAGES == 2 && chunk) load(chunk - 1);

        const Rows keys{own_keys, KEYS};
        const auto zero = [](int, int, float& c) { c = 0.0f; };
#if BY_CHANNEL
        const Stored* readers = m.readers[chunk % STAGES];
        const float* kept = m.kept[chunk % STAGES];
        const Columns scores{m.scores[chunk % STAGES], COLUMNS};
        const auto weights_from = [&](int row) {
            return Minus<Turned<Floats> >{{{m.weights[chunk % STAGES] + row, WEIGHTS}}};
        };
        const auto weight = [&](int j, int i) { return -m.weights[chunk % STAGES][i * WEIGHTS + j]; };
#else
        const float last = m.decays[count - 1];
        const Rows scores{m.scores, COLUMNS};
        const auto weights_from = [&](int row) { return Floats{m.weights + row * WEIGHTS, WEIGHTS}; };
        const auto weight = [&](int j, int i) { return m.weights[j * WEIGHTS + i]; };
        const Rows queries{own_queries, KEYS};
        for_tiles<CHUNK, CHUNK>([&](TileOf<CHUNK>& t) {
            t.each(zero);
            t.add(0, p.key_size, keys, queries);
            t.each([&](int j, int i, float& c) {
                const bool seen = j <= i && i < count;
                const float y = seen ? __fmul_rn(c, exp2_of(__fsub_rn(m.decays[i], m.decays[j]))) : 0.0f;
                m.scores[j * COLUMNS + i] = E::narrow(i < count ? __fmul_rn(y, p.scale) : 0.0f);
            });
            if constexpr (DELTA) {
                t.each(zero);
                t.add(0, p.key_size, keys, keys);
                t.each([&](int j, int i, float& c) {
                    const bool seen = j < i && i < count;
                    const float y = seen ? __fmul_rn(c, exp2_of(__fsub_rn(m.decays[i], m.decays[j]))) : 0.0f;
                    m.weights[j * WEIGHTS + i] = -y;
                });
            }
        });
#endif
        __syncthreads();

        // Of updates: by the next matrix, by results, then by the updates of later rows.
        const Rows grads{m.grads, COLUMNS}, of_z{m.of_z, COLUMNS};
        for_tiles<CHUNK, TILE>([&](TileOf<TILE>& t) {
            t.each(zero);
            t.add(0, p.key_size, keys, Floats{m.matrix, MATRIX});
#if !BY_CHANNEL
            t.each([&](int j, int, float& c) {
                c = j < count ? __fmul_rn(c, exp2_of(__fsub_rn(last, m.decays[j]))) : 0.0f;
            });
#endif
            t.add(0, count, scores, grads);
            t.each([&](int j, int e, float& c) { m.of_updates[j * UPDATES + e] = c; });
        });
        __syncthreads();
        if constexpr (DELTA) {
            for (int row = (count - 1) / 16 * 16; row >= 0; row -= 16) {
                if (row + 16 < count) {
                    for_tiles<16, TILE>([&](TileOf<TILE>& t) {
                        const auto start = [&](int j, int e, float& c) {
                            c = m.of_updates[(row + j) * UPDATES + e];
                        };
                        t.each(start);
                        t.add(row + 16, count, weights_from(row), of_z);
                        t.each([&](int j, int e, float& c) { m.of_updates[(row + j) * UPDATES + e] = c; });
                    });
                    __syncthreads();
                }
                for (int e = threadIdx.x; e < TILE; e += THREADS) {
                    float u[16];
#pragma unroll
                    for (int j = 0; j < 16; ++j) u[j] = m.of_updates[(row + j) * UPDATES + e];
#pragma unroll
                    for (int i = 15; i >= 0; --i) {
                        if (row + i >= count) continue;
                        const Stored z = E::narrow(__fmul_rn(u[i], m.betas[row + i]));
                        m.of_z[e * COLUMNS + row + i] = z;
                        m.of_updates[(row + i) * UPDATES + e] = u[i];
#pragma unroll
                        for (int j = 0; j < i; ++j)
                            u[j] = __fmaf_rn(weight(row + j, row + i), E::widen(z), u[j]);
                    }
                }
                __syncthreads();
            }
        }
        for (int x = threadIdx.x; x < count * TILE; x += THREADS) {
            const int i = x / TILE, e = x % TILE;
            if (e >= columns) continue;
            const float u = m.of_updates[i * UPDATES + e];
#if WEIGHTED
            float value = __fmul_rn(u, m.betas[i]);
            if (p.skip)
                value = __fadd_rn(value, __fmul_rn(p.skip[head * p.size + first_column + e],
                                                   E::widen(m.grads[e * COLUMNS + i])));
            const Stored z = E::narrow(value);
#else
            const Stored z = DELTA ? m.of_z[e * COLUMNS + i] : E::narrow(u);
#endif
            if constexpr (DELTA || WEIGHTED) record.of_updates[i64(i) * p.size + first_column + e] = u;
            if constexpr (DELTA) {
                record.of_z[i64(i) * p.size + first_column + e] = z;
            }
            if (i >= rows.before) p.dv[((rows.token + i) * p.heads + head) * p.size + first_column + e] = z;
        }

        // Of the matrix at the chunk's start.
#if BY_CHANNEL
        for_tiles<KEY_SIZE, TILE>([&](TileOf<TILE>& t) {
            t.each([&](int d, int e, float& c) { c = __fmul_rn(m.matrix[e * MATRIX + d], kept[d]); });
            t.add(0, count, Columns{own_queries, KEYS}, grads);
            t.add(0, count, Minus<Columns>{{readers, KEYS}}, of_z);
            t.each([&](int d, int e, float& c) { m.matrix[e * MATRIX + d] = c; });
        });
        __syncthreads();
#else
        const auto scale = [&](const Stored* from, float by) {
            for (int x = threadIdx.x; x < TILE * CHUNK; x += THREADS) {
                const int at = x / CHUNK * COLUMNS + x % CHUNK;
                const float factor = __fmul_rn(exp2_of(m.decays[x % CHUNK]), by);
                const float y = __fmul_rn(E::widen(from[at]), factor);
                m.scaled[at] = E::narrow(x % CHUNK < count ? y : 0.0f);
            }
        };
        const auto add_to_matrix = [&](const Stored* of, float kept) {
            for_tiles<KEY_SIZE, TILE>([&](TileOf<TILE>& t) {
                t.each([&](int d, int e, float& c) { c = __fmul_rn(m.matrix[e * MATRIX + d], kept); });
                t.add(0, count, Columns{of, KEYS}, Rows{m.scaled, COLUMNS});
                t.each([&](int d, int e, float& c) { m.matrix[e * MATRIX + d] = c; });
            });
        };
        scale(m.grads, p.scale);
        __syncthreads();
        add_to_matrix(own_queries, exp2_of(last));
        __syncthreads();
        if constexpr (DELTA) {
            scale(m.of_z, -1.0f);
            __syncthreads();
            add_to_matrix(own_keys, 1.0f);
            __syncthreads();
        }
#endif
    }

    for (int x = threadIdx.x; p.dinitial && x < p.key_size * TILE; x += THREADS) {
        const int d = x / TILE, e = x % TILE;
        if (e < columns)
            p.dinitial[own + i64(d) * p.size + first_column + e] =
                contract::canonical(m.matrix[e * MATRIX + d]);
    }
}
#endif

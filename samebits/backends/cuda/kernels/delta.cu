// Delta rules and linear attention: docs/contract.md, "Recurrent layers".
//
// A block takes TILE columns of one head's values in one sequence, and goes through the sequence's chunks in order.
// It holds the matrix of these columns, transposed, in shared memory. Rows are taken ROWS at a time, a window: a
// whole chunk, or a part of it for calls of few tokens. For each window:
//
//   1. Products of its keys and queries with the chunk's keys, and with the matrix. Warps share rows and columns.
//   2. The triangular system, 16 rows after 16: a product with the updates of earlier rows, then a thread for each
//      column goes on row by row.
//   3. Results: products of the scores with all updates so far.
//   4. If the chunk is full and tokens follow, the matrix at its end.
//
// The order of every sum is the contract's, so ROWS, TILE and WARPS change no bit. The next window's operands are
// copied while one is computed, if STAGES is 2.
//
// With a decay for each channel, scores and the operands of step 1 are there: they are copied. Keys as such are not
// needed, but times the decays left to the chunk's end.
//
// Blocks of one head share its rows in a state. They are written by the block that comes last to having read them.
//
// Macros
//   TYPE           F32, BF16 or F16, of q, k and v
//   TENSOR_CORE    1: chains of mma steps; 0: of fused multiply-adds
//   KEY_SIZE       of q and k, up to a multiple of 16
//   TILE           columns of a block, a multiple of 16
//   ROWS           rows of a window: 16 or 64
//   WARPS          in a block
//   STAGES         1 or 2
//   HARDWARE_EXP2  1: the instruction; 0: the polynomial
//   DELTA          1: with the delta rule; 0: updates are values
//   VECTOR         1: rows of q, k and v can be copied by 16 bytes
//   BY_CHANNEL     1: a decay for each channel of a key, with the delta rule, after delta_prepare.cu
//   WEIGHTED       1: rows have weights, without the delta rule and with one decay for each head
//   KEEP           1: chunks are kept for gradients, in place of results

#include "delta_forward.cuh"

// Rows in shared memory, padded so that fragments are read without conflicts of banks.
constexpr int VALUES = TILE + PAD, COLUMNS = CHUNK + PAD;                        // in elements
constexpr int MATRIX = KEY_SIZE + 8, WEIGHTS = CHUNK + 8, RESIDUALS = TILE + 8;  // in floats

struct Memory {
    Stored keys[STAGES][CHUNK * KEYS], queries[STAGES][ROWS * KEYS], values[STAGES][ROWS * VALUES];
#if BY_CHANNEL
    Stored readers[STAGES][ROWS * KEYS];  // keys that read the matrix; `keys` close a chunk
    Stored updates[TILE * COLUMNS], scores[STAGES][ROWS * COLUMNS];
    float matrix[TILE * MATRIX], weights[STAGES][ROWS * WEIGHTS], residuals[ROWS * RESIDUALS];
    float kept[STAGES][KEY_SIZE];
#else
    Stored updates[TILE * COLUMNS], scaled[TILE * COLUMNS], scores[1][ROWS * COLUMNS];
    float matrix[TILE * MATRIX], weights[1][ROWS * WEIGHTS], residuals[ROWS * RESIDUALS];
#endif
#if !TENSOR_CORE
    float results[ROWS * RESIDUALS];
#endif
#if !BY_CHANNEL
    float decays[CHUNK], gammas[STAGES][ROWS];
#endif
    float betas[STAGES][ROWS];
    int is_last;
#if WEIGHTED
    float row_weights[CHUNK];  // which come in place of betas
#endif
};

// Copies `count` rows of `size` elements behind each other, of which `given` exist; the others are zeros.
template <int LINE, int WIDTH>
__device__ __forceinline__ void copy_rows(Stored* to, const Stored* from, i64 step, int count, int given,
                                          int size) {
#if VECTOR
    constexpr int PER = 16 / SIZE, CHUNKS = WIDTH / PER;
    for (int i = threadIdx.x; i < count * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, at = i % CHUNKS * PER;
        const int bytes = row < given ? min(max(size - at, 0) * SIZE, 16) : 0;
        cp_async_16(shared_address(to + row * LINE + at), bytes ? from + row * step + at : from, bytes);
    }
#else
    for (int i = threadIdx.x; i < count * WIDTH; i += THREADS) {
        const int row = i / WIDTH, at = i % WIDTH;
        to[row * LINE + at] = row < given && at < size ? from[row * step + at] : E::narrow(0.0f);
    }
#endif
}

struct Block {
    const Params& p;
    Memory& m;
    const int head, first_column, columns;
    const Stored *q, *k, *v;
    const float *g, *beta;
    [[maybe_unused]] const Prepared* prepared;

    // Starts copying a window of the chunk at `place`: `given` tokens from `token` on, into its rows from `row` on.
    __device__ __forceinline__ void load(int stage, int token, int row, int given, int place) const {
        const int local = row % ROWS, count = ROWS - local;
        const i64 at = token;
#if BY_CHANNEL
        const Prepared& from = prepared[i64(place) * p.heads];
        if (row == 0) load_written(stage, place);
        copy_prepared<KEYS, KEY_SIZE>(m.readers[stage], from.keys[row - local], ROWS);
        copy_prepared<WEIGHTS, CHUNK>(m.weights[stage], from.weights[row - local], ROWS);
        if constexpr (!KEEP) {
            copy_prepared<KEYS, KEY_SIZE>(m.queries[stage], from.queries[row - local], ROWS);
            copy_prepared<COLUMNS, CHUNK>(m.scores[stage], from.scores[row - local], ROWS);
        }
#else
        copy_rows<KEYS, KEY_SIZE>(m.keys[stage] + row * KEYS, k + at * p.k_token, p.k_token, count, given,
                                  p.key_size);
        copy_rows<KEYS, KEY_SIZE>(m.queries[stage] + local * KEYS, q + at * p.q_token, p.q_token, count,
                                  given, p.key_size);
#endif
        copy_rows<VALUES, TILE>(m.values[stage] + local * VALUES, v + at * p.v_token, p.v_token, count, given,
                                columns);
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const bool exists = i < given;
#if !BY_CHANNEL
            m.gammas[stage][local + i] =
                exists && g ? __fmul_rn(g[(at + i) * p.g_token], contract::LOG2E) : 0.0f;
#endif
#if WEIGHTED
            m.betas[stage][local + i] =
                exists ? p.weights[(at + i) * p.weight_token + head * p.weight_head] : 0.0f;
#else
            m.betas[stage][local + i] = exists && beta ? beta[(at + i) * p.beta_token] : 0.0f;
#endif
        }
        cp_async_commit();
    }

#if BY_CHANNEL
    // What closes the chunk at `place`.
    __device__ __forceinline__ void load_written(int stage, int place) const {
        const Prepared& from = prepared[i64(place) * p.heads];
        copy_prepared<KEYS, KEY_SIZE>(m.keys[stage], from.written[0], CHUNK);
        copy_prepared<KEY_SIZE, KEY_SIZE>(m.kept[stage], from.kept, 1);
    }

    __device__ __forceinline__ float since(int) const { return 1.0f; }  // operands have it
#else
    // Sums of the decays of rows `first` to `count` - 1 of a window, in order, by one warp.
    __device__ __forceinline__ void sum_decays(int stage, int first, int count) const {
        const int lane = threadIdx.x, base = first / ROWS * ROWS;
        if (threadIdx.x >= 32) return;
        float mine[(ROWS + 31) / 32], sum = first ? m.decays[first - 1] : 0.0f;
#pragma unroll
        for (int x = 0; x < (ROWS + 31) / 32; ++x) {
            const int i = x * 32 + lane;
            mine[x] = i < ROWS && base + i >= first && base + i < count ? m.gammas[stage][i] : 0.0f;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            sum = __fadd_rn(sum, __shfl_sync(0xFFFFFFFF, mine[i / 32], i % 32));
            if (i % 32 == lane) mine[i / 32] = sum;
        }
#pragma unroll
        for (int x = 0; x < (ROWS + 31) / 32; ++x) {
            const int i = base + x * 32 + lane;
            if (i >= first && i < base + ROWS)
                m.decays[i] = mine[x];  // those of rows that are not there stay finite
#if WEIGHTED
            if (i >= first && i < base + ROWS) m.row_weights[i] = m.betas[stage][i - base];
#endif
        }
    }

    // The weights of a pair: decay from row j to row i.
    __device__ __forceinline__ float decay(int i, int j) const {
        return exp2_of(__fsub_rn(m.decays[i], m.decays[j]));
    }

    __device__ __forceinline__ void store_scores(int base, int local, int j, float of_key,
                                                 float of_query) const {
        const int i = base + local;
        float weight = j <= i ? decay(i, j) : 0.0f;
#if WEIGHTED
        of_query = __fmul_rn(of_query, weight), weight = m.row_weights[j];
#endif
        m.scores[0][local * COLUMNS + j] = E::narrow(j <= i ? __fmul_rn(of_query, weight) : 0.0f);
        m.weights[0][local * WEIGHTS + j] = j < i ? __fmul_rn(of_key, weight) : 0.0f;
    }

    // From the chunk's start to row i.
    __device__ __forceinline__ float since(int i) const { return exp2_of(m.decays[i]); }
#endif

    // Of row i of the chunk.
    __device__ __forceinline__ void store_result(i64 token, int i, int e, float acc) const {
        if (e >= columns) return;
        const i64 at = (token * p.heads + head) * p.size + first_column + e;
        float y = __fmul_rn(__fadd_rn(acc, 0.0f), p.scale);
#if WEIGHTED
        if (p.skip) y = with_skip(y, p.skip[head * p.size + first_column + e], m.updates[e * COLUMNS + i]);
        if (p.wide) {
            reinterpret_cast<float*>(p.out)[at] = contract::canonical(y);
            return;
        }
#endif
        p.out[at] = E::narrow(contract::canonical(y));
    }

    // Rows `first` to `count` - 1 of the chunk, of one window; the first is token `token`.
    __device__ __forceinline__ void window(int stage, int token, int first, int count) const {
        const int base = first / ROWS * ROWS;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const Stored* scores = m.scores[BY_CHANNEL ? stage : 0];
        const float* weights = m.weights[BY_CHANNEL ? stage : 0];
#if BY_CHANNEL
        const Stored* readers = m.readers[stage] - base * KEYS;
#else
        const Stored* readers = m.keys[stage];
#endif
#if TENSOR_CORE
        constexpr int TILES = ROWS / 16, PARTS = WARPS / TILES;  // tiles of rows; parts of the columns
        constexpr int KEY_TILES = (CHUNK / 8 + PARTS - 1) / PARTS,
                      VALUE_TILES = (TILE / 8 + PARTS - 1) / PARTS;
        const int tile = warp % TILES, part = warp / TILES, in_row = lane / 4, in_pair = lane % 4 * 2;
        const int row0 = base + tile * 16;  // of the chunk
        const bool active = row0 + 16 > first && row0 < count;
        float results[VALUE_TILES][4] = {};
        if (active) {
            float of_keys[KEY_TILES][4] = {}, of_queries[KEY_TILES][4] = {}, read[VALUE_TILES][4] = {};
            const int lane_at = lane % 16 * KEYS + lane / 16 * 8;
            const u32 key_rows = shared_address(readers + row0 * KEYS + lane_at);
            const u32 query_rows = shared_address(m.queries[stage] + tile * 16 * KEYS + lane_at);
#pragma unroll 2
            for (int d = 0; d < KEY_SIZE; d += 16) {
                u32 a_key[4], a_query[4], b[2];
                ldmatrix_x4<false>(a_query, query_rows + d * 2);
                if constexpr (DELTA) ldmatrix_x4<false>(a_key, key_rows + d * 2);
#pragma unroll
                for (int x = 0; !BY_CHANNEL && x < KEY_TILES; ++x) {
                    const int j = (x * PARTS + part) * 8;
                    if (j >= row0 + 16 || j >= CHUNK) continue;
                    const u32* from =
                        reinterpret_cast<const u32*>(m.keys[stage] + (j + in_row) * KEYS + d + in_pair);
                    b[0] = from[0], b[1] = from[4];
                    mma_m16n8k16<TYPE == BF16>(of_queries[x], a_query, b);
                    if constexpr (DELTA) mma_m16n8k16<TYPE == BF16>(of_keys[x], a_key, b);
                }
#pragma unroll
                for (int y = 0; y < VALUE_TILES; ++y) {
                    const int e = (y * PARTS + part) * 8;
                    if (e >= TILE) continue;
                    const float* from = m.matrix + (e + in_row) * MATRIX + d + in_pair;
                    const float2 low = *reinterpret_cast<const float2*>(from);
                    const float2 high = *reinterpret_cast<const float2*>(from + 8);
                    b[0] = E::pack(low.x, low.y), b[1] = E::pack(high.x, high.y);
                    mma_m16n8k16<TYPE == BF16>(results[y], a_query, b);
                    if constexpr (DELTA) mma_m16n8k16<TYPE == BF16>(read[y], a_key, b);
                }
            }
#if !BY_CHANNEL
#pragma unroll
            for (int x = 0; x < KEY_TILES; ++x) {
                const int j = (x * PARTS + part) * 8 + in_pair;
                if (j >= CHUNK) continue;
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    store_scores(base, tile * 16 + in_row + c / 2 * 8, j + c % 2, of_keys[x][c],
                                 of_queries[x][c]);
            }
#endif
#pragma unroll
            for (int y = 0; y < VALUE_TILES; ++y) {
                const int e = (y * PARTS + part) * 8 + in_pair;
                if (e >= TILE) continue;
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int local = tile * 16 + in_row + c / 2 * 8;
                    const float decay = since(base + local);
                    const float value = E::widen(m.values[stage][local * VALUES + e + c % 2]);
                    if constexpr (DELTA)
                        m.residuals[local * RESIDUALS + e + c % 2] =
                            __fsub_rn(value, __fmul_rn(read[y][c], decay));
                    results[y][c] = __fmul_rn(results[y][c], decay);
                }
            }
        }
#else
        for (int x = threadIdx.x; !BY_CHANNEL && x < ROWS * CHUNK; x += THREADS) {
            const int local = x / CHUNK, j = x % CHUNK, i = base + local;
            float of_key = 0.0f, of_query = 0.0f;
            if (j <= i && i >= first && i < count)
                for (int d = 0; d < p.key_size; ++d) {
                    const float key = E::widen(m.keys[stage][j * KEYS + d]);
                    of_query = __fmaf_rn(E::widen(m.queries[stage][local * KEYS + d]), key, of_query);
                    of_key = __fmaf_rn(E::widen(m.keys[stage][i * KEYS + d]), key, of_key);
                }
#if !BY_CHANNEL
            store_scores(base, local, j, of_key, of_query);
#endif
        }
        for (int x = threadIdx.x; x < ROWS * TILE; x += THREADS) {
            const int local = x / TILE, e = x % TILE, i = base + local;
            if (i < first || i >= count) continue;
            float read = 0.0f, result = 0.0f;
            for (int d = 0; d < p.key_size; ++d) {
                const float s = E::widen(E::narrow(m.matrix[e * MATRIX + d]));
                result = __fmaf_rn(E::widen(m.queries[stage][local * KEYS + d]), s, result);
                read = __fmaf_rn(E::widen(readers[i * KEYS + d]), s, read);
            }
            const float decay = since(i), value = E::widen(m.values[stage][local * VALUES + e]);
            m.residuals[local * RESIDUALS + e] = __fsub_rn(value, __fmul_rn(read, decay));
            m.results[local * RESIDUALS + e] = __fmul_rn(result, decay);
        }
#endif
        __syncthreads();

        if constexpr (DELTA) {
            for (int row = first / 16 * 16; row < count; row += 16) {
                const int local = row - base;
                if (row > 0) {
#if TENSOR_CORE
                    for (int e = warp * 8; e < TILE; e += WARPS * 8) {
                        float acc[4];
                        float* at = m.residuals + (local + in_row) * RESIDUALS + e + in_pair;
                        acc[0] = at[0], acc[1] = at[1];
                        acc[2] = at[8 * RESIDUALS], acc[3] = at[8 * RESIDUALS + 1];
                        for (int j = 0; j < row; j += 16) {
                            u32 a[4], b[2];
                            const float* from = weights + (local + in_row) * WEIGHTS + j + in_pair;
#pragma unroll
                            for (int x = 0; x < 4; ++x) {
                                const float2 pair =
                                    *reinterpret_cast<const float2*>(from + x % 2 * 8 * WEIGHTS + x / 2 * 8);
                                a[x] = E::pack(-pair.x, -pair.y);
                            }
                            const u32* update = reinterpret_cast<const u32*>(
                                m.updates + (e + in_row) * COLUMNS + j + in_pair);
                            b[0] = update[0], b[1] = update[4];
                            mma_m16n8k16<TYPE == BF16>(acc, a, b);
                        }
                        at[0] = acc[0], at[1] = acc[1];
                        at[8 * RESIDUALS] = acc[2], at[8 * RESIDUALS + 1] = acc[3];
                    }
#else
                    for (int x = threadIdx.x; x < 16 * TILE; x += THREADS) {
                        const int i = local + x / TILE, e = x % TILE;
                        float acc = m.residuals[i * RESIDUALS + e];
                        for (int j = 0; j < row; ++j)
                            acc = __fmaf_rn(E::widen(E::narrow(-weights[i * WEIGHTS + j])),
                                            E::widen(m.updates[e * COLUMNS + j]), acc);
                        m.residuals[i * RESIDUALS + e] = acc;
                    }
#endif
                    __syncthreads();
                }
                for (int e = threadIdx.x; e < TILE; e += THREADS) {
                    float z[16];
#pragma unroll
                    for (int i = 0; i < 16; ++i) z[i] = m.residuals[(local + i) * RESIDUALS + e];
                    Stored* own = m.updates + e * COLUMNS + row;
#pragma unroll
                    for (int j = 0; j < 16; ++j) {
                        if (row + j >= first) own[j] = E::narrow(__fmul_rn(m.betas[stage][local + j], z[j]));
                        const float u = E::widen(own[j]);
                        if constexpr (KEEP) m.residuals[(local + j) * RESIDUALS + e] = z[j];
#pragma unroll
                        for (int i = j + 1; i < 16; ++i)
                            z[i] = __fmaf_rn(-weights[(local + i) * WEIGHTS + row + j], u, z[i]);
                    }
                }
                __syncthreads();
            }
        } else {
            for (int x = threadIdx.x; x < ROWS * TILE; x += THREADS) {
                const int local = x / TILE, e = x % TILE;
                if (base + local >= first)
                    m.updates[e * COLUMNS + base + local] = m.values[stage][local * VALUES + e];
            }
            __syncthreads();
        }
        if constexpr (KEEP) return;

#if TENSOR_CORE
        if (active) {
            const u32 score_rows = shared_address(scores + (tile * 16 + lane % 16) * COLUMNS + lane / 16 * 8);
            for (int j = 0; j < row0 + 16; j += 16) {
                u32 a[4], b[2];
                ldmatrix_x4<false>(a, score_rows + j * 2);
#pragma unroll
                for (int y = 0; y < VALUE_TILES; ++y) {
                    const int e = (y * PARTS + part) * 8;
                    if (e >= TILE) continue;
                    const u32* update =
                        reinterpret_cast<const u32*>(m.updates + (e + in_row) * COLUMNS + j + in_pair);
                    b[0] = update[0], b[1] = update[4];
                    mma_m16n8k16<TYPE == BF16>(results[y], a, b);
                }
            }
#pragma unroll
            for (int y = 0; y < VALUE_TILES; ++y)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int e = (y * PARTS + part) * 8 + in_pair + c % 2;
                    const int i = row0 + in_row + c / 2 * 8;
                    if (e < TILE && i >= first && i < count)
                        store_result(token + i - first, i, e, results[y][c]);
                }
        }
#else
        for (int x = threadIdx.x; x < ROWS * TILE; x += THREADS) {
            const int local = x / TILE, e = x % TILE, i = base + local;
            if (i < first || i >= count) continue;
            float acc = m.results[local * RESIDUALS + e];
            for (int j = 0; j <= i; ++j)
                acc = __fmaf_rn(E::widen(scores[local * COLUMNS + j]), E::widen(m.updates[e * COLUMNS + j]),
                                acc);
            store_result(token + i - first, i, e, acc);
        }
#endif
    }

    // Rows `from` to `count` - 1 of the chunk, z of those from `first` on, and with its first rows its matrix.
    __device__ __forceinline__ void keep(const Record& record, int stage, int from, int first, int count,
                                         bool begins) const {
        const int base = first / ROWS * ROWS;
        for (int x = threadIdx.x; x < (count - from) * TILE; x += THREADS) {
            const int i = from + x / TILE, e = x % TILE;
            if (e >= columns) continue;
            record.updates[i64(i) * p.size + first_column + e] = m.updates[e * COLUMNS + i];
            if (DELTA && i >= first)
                record.z[i64(i) * p.size + first_column + e] = m.residuals[(i - base) * RESIDUALS + e];
#if WEIGHTED
            record.z[i64(i) * p.size + first_column + e] = E::widen(m.updates[e * COLUMNS + i]);
#endif
        }
        if (begins) write_matrix(record.matrix, false);
#if !BY_CHANNEL
        if (first_column) return;
        for (int x = threadIdx.x; x < (count - from) * p.key_size; x += THREADS) {
            const int i = from + x / p.key_size, d = x % p.key_size;
            record.keys[i * p.key_size + d] = m.keys[stage][i * KEYS + d];
        }
        for (int i = from + threadIdx.x; i < count; i += THREADS) record.decays[i] = m.decays[i];
#endif
#if WEIGHTED
        for (int i = from + threadIdx.x; i < count; i += THREADS) record.weights[i] = m.row_weights[i];
#endif
    }

    // The matrix at the end of a chunk with `count` rows.
    __device__ __forceinline__ void close(int stage, int count) const {
#if BY_CHANNEL
        const auto kept = [&](int d) { return m.kept[stage][d]; };
        const Stored* added = m.updates;
        for (int x = threadIdx.x; x < TILE * CHUNK; x += THREADS)
            if (x % CHUNK >= count) m.updates[x / CHUNK * COLUMNS + x % CHUNK] = E::narrow(0.0f);
#else
        const float last = m.decays[count - 1], over_chunk = exp2_of(last);
        const auto kept = [&](int) { return over_chunk; };
        const Stored* added = m.scaled;
        for (int x = threadIdx.x; x < TILE * CHUNK; x += THREADS) {
            const int e = x / CHUNK, j = x % CHUNK;
            float left = j < count ? exp2_of(__fsub_rn(last, m.decays[j])) : 0.0f;
#if WEIGHTED
            if (j < count) left = __fmul_rn(left, m.row_weights[j]);
#endif
            const float u = j < count ? E::widen(m.updates[e * COLUMNS + j]) : 0.0f;
            m.scaled[e * COLUMNS + j] = E::narrow(__fmul_rn(u, left));
        }
        for (int x = threadIdx.x + count * KEYS; x < CHUNK * KEYS; x += THREADS)
            m.keys[stage][x] = E::narrow(0.0f);  // of an earlier chunk
#endif
        __syncthreads();
#if TENSOR_CORE
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, in_row = lane / 4, in_pair = lane % 4 * 2;
        for (int d = warp * 8; d < KEY_SIZE; d += WARPS * 8) {
            u32 b[2][4];  // of four groups of 16 rows
            ldmatrix_x4<true>(b[0], shared_address(m.keys[stage] + lane * KEYS + d));
            ldmatrix_x4<true>(b[1], shared_address(m.keys[stage] + (32 + lane) * KEYS + d));
#pragma unroll
            for (int e = 0; e < TILE; e += 16) {
                float acc[4];
                float* at = m.matrix + (e + in_row) * MATRIX + d + in_pair;
                const float left[2] = {kept(d + in_pair), kept(d + in_pair + 1)};
                acc[0] = __fmul_rn(at[0], left[0]), acc[1] = __fmul_rn(at[1], left[1]);
                acc[2] = __fmul_rn(at[8 * MATRIX], left[0]), acc[3] = __fmul_rn(at[8 * MATRIX + 1], left[1]);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    u32 a[4];
                    ldmatrix_x4<false>(
                        a, shared_address(added + (e + lane % 16) * COLUMNS + j * 16 + lane / 16 * 8));
                    mma_m16n8k16<TYPE == BF16>(acc, a, b[j / 2] + j % 2 * 2);
                }
                at[0] = acc[0], at[1] = acc[1];
                at[8 * MATRIX] = acc[2], at[8 * MATRIX + 1] = acc[3];
            }
        }
#else
        for (int x = threadIdx.x; x < TILE * KEY_SIZE; x += THREADS) {
            const int e = x / KEY_SIZE, d = x % KEY_SIZE;
            float acc = __fmul_rn(m.matrix[e * MATRIX + d], kept(d));
            for (int j = 0; j < count; ++j)
                acc = __fmaf_rn(E::widen(m.keys[stage][j * KEYS + d]), E::widen(added[e * COLUMNS + j]), acc);
            m.matrix[e * MATRIX + d] = acc;
        }
#endif
        __syncthreads();
    }

    // The matrix of these columns, to or from `[key size, size]` of a head.
    __device__ __forceinline__ void read_matrix(const float* from) const {
        for (int x = threadIdx.x; x < KEY_SIZE * TILE; x += THREADS) {
            const int d = x / TILE, e = x % TILE;
            m.matrix[e * MATRIX + d] =
                from && d < p.key_size && e < columns ? from[i64(d) * p.size + first_column + e] : 0.0f;
        }
    }

    __device__ __forceinline__ void write_matrix(float* to, bool canonical) const {
        for (int x = threadIdx.x; x < p.key_size * TILE; x += THREADS) {
            const int d = x / TILE, e = x % TILE;
            const float s = m.matrix[e * MATRIX + d];
            if (e < columns) to[i64(d) * p.size + first_column + e] = canonical ? contract::canonical(s) : s;
        }
    }
};

// Whether this is the last of `blocks` blocks to arrive, all of which have read what they need by then. One thread.
__device__ __forceinline__ bool arrives_last(int* mark, int blocks) {
    __threadfence();
    const bool last = atomicAdd(mark, 1) == blocks - 1;
    if (last) *mark = 0;
    return last;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int tile = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z, tiles = gridDim.x;
    const int key_head = head / p.group, first_column = tile * TILE;
    const int columns = min(TILE, p.size - first_column);
    const Block block{p,
                      m,
                      head,
                      first_column,
                      columns,
                      p.q + key_head * p.q_head,
                      p.k + key_head * p.k_head,
                      p.v + head * p.v_head + first_column,
                      p.g ? p.g + head * p.g_head : nullptr,
                      p.beta ? p.beta + head * p.beta_head : nullptr,
                      p.prepared + head};
    const Tokens mine(p.spans, sequence, gridDim.z, p.tokens);
    const int begin = mine.begin, end = mine.end;
    float* state = p.state ? p.state + sequence * p.words : nullptr;
    const i64 own = i64(head) * p.key_size * p.size;  // of a matrix

    // What the sequence goes on with. Rows that are not there are zeros.
    int before = 0;
    [[maybe_unused]] int chunk = first_chunk(begin, sequence);  // its place
    for (int x = threadIdx.x; x < TILE * COLUMNS; x += THREADS) m.updates[x] = E::narrow(0.0f);
#if !BY_CHANNEL
    for (int x = threadIdx.x; x < CHUNK; x += THREADS) m.decays[x] = 0.0f;
#endif
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        for (int x = threadIdx.x; x < CHUNK * KEYS; x += THREADS) m.keys[s][x] = E::narrow(0.0f);
        for (int x = threadIdx.x; x < ROWS * KEYS; x += THREADS) m.queries[s][x] = E::narrow(0.0f);
        for (int x = threadIdx.x; x < ROWS * VALUES; x += THREADS) m.values[s][x] = E::narrow(0.0f);
#if !BY_CHANNEL
        for (int x = threadIdx.x; x < ROWS; x += THREADS) m.gammas[s][x] = 0.0f;
#endif
        for (int x = threadIdx.x; x < ROWS; x += THREADS) m.betas[s][x] = 0.0f;
    }
    __syncthreads();
    if (state) {
        before = min(max(int(state[0]), 0), CHUNK);
        block.read_matrix(state + p.matrix + own);
#if BY_CHANNEL
        const Stored* updates =
            reinterpret_cast<const Stored*>(state + p.updates) + i64(head) * CHUNK * p.size;
        if (before) {
            const int chunks = (before % CHUNK + end - begin + CHUNK - 1) / CHUNK;  // if there are tokens
            block.load_written(0, chunk + (begin < end && before == CHUNK ? chunks : 0));
            cp_async_commit();
            cp_async_wait<0>();
        }
#else
        const Stored* keys = reinterpret_cast<const Stored*>(state + p.keys) + i64(head) * CHUNK * p.key_size;
        const Stored* updates =
            reinterpret_cast<const Stored*>(state + p.updates) + i64(head) * CHUNK * p.size;
        const float* decays = state + p.decays + i64(head) * CHUNK;
        for (int x = threadIdx.x; x < before * p.key_size; x += THREADS)
            m.keys[0][x / p.key_size * KEYS + x % p.key_size] = keys[x];
#endif
        for (int x = threadIdx.x; x < before * TILE; x += THREADS) {
            const int j = x / TILE, e = x % TILE;
            if (e < columns) m.updates[e * COLUMNS + j] = updates[j * p.size + first_column + e];
        }
#if !BY_CHANNEL
        for (int x = threadIdx.x; x < before; x += THREADS) m.decays[x] = decays[x];
#endif
#if WEIGHTED
        for (int j = threadIdx.x; j < before; j += THREADS)
            m.row_weights[j] = state[p.row_weights + head * CHUNK + j];
#endif
        __syncthreads();
        if (threadIdx.x == 0) {
            int* marks = reinterpret_cast<int*>(state + p.marks);
            m.is_last = arrives_last(marks + 1 + head, tiles);
            const int rows = before + end - begin;  // a full chunk stays open
            if (arrives_last(marks, tiles * gridDim.y))
                state[0] = float(end == begin ? before : (rows - 1) % CHUNK + 1);
        }
    } else {
        block.read_matrix(p.initial ? p.initial + sequence * i64(p.heads) * p.key_size * p.size + own
                                    : nullptr);
    }

    const auto window_of = [](int count, int left) { return min(ROWS - count % ROWS, left); };
    int token = begin, count = before, stage = 0, written = before;
    if (token < end && count < CHUNK) block.load(0, token, count, window_of(count, end - token), chunk);
    bool replaced = false;
    [[maybe_unused]] int kept = 0;  // rows of the chunk
    while (token < end) {
        if (count == CHUNK) {  // the state's chunk was full
            block.close(stage, count);
            replaced = true, count = written = 0;
            block.load(stage, token, 0, window_of(0, end - token), chunk);
        }
        cp_async_wait<0>();
        __syncthreads();
        const int given = window_of(count, end - token), next = count + given;
        const int left = end - token - given, other = (stage + 1) % STAGES;
        const bool ahead = STAGES == 2 && ROWS == CHUNK && left > 0;
        if (ahead) block.load(other, token + given, 0, window_of(0, left), chunk + 1);
#if !BY_CHANNEL
        block.sum_decays(stage, count, next);
        __syncthreads();
#endif
        block.window(stage, token, count, next);
        __syncthreads();
#if KEEP
        const Record record(p.records, i64(chunk) * p.heads + head, p.key_size, p.size);
        block.keep(record, stage, kept, count, next, kept == 0);
        kept = next;
        __syncthreads();
#endif
        token += given, count = next;
        if (count == CHUNK && left > 0) {
            block.close(stage, count);
            replaced = true, count = written = kept = 0;
            ++chunk;
        }
        if (ahead)
            stage = other;
        else if (left > 0)
            block.load(stage, token, count, window_of(count, left), chunk);
    }

    if (state) {
        if (replaced) block.write_matrix(state + p.matrix + own, false);
        Stored* keys = reinterpret_cast<Stored*>(state + p.keys) + i64(head) * CHUNK * p.key_size;
        Stored* updates = reinterpret_cast<Stored*>(state + p.updates) + i64(head) * CHUNK * p.size;
        float* decays = state + p.decays + i64(head) * CHUNK * (BY_CHANNEL ? p.key_size : 1);
        for (int x = threadIdx.x; x < (count - written) * TILE; x += THREADS) {
            const int j = written + x / TILE, e = x % TILE;
            if (e < columns) updates[j * p.size + first_column + e] = m.updates[e * COLUMNS + j];
        }
        if (begin < end && m.is_last) {  // without tokens no barrier lies between
#if BY_CHANNEL
            const Stored* rows = block.k + i64(end - count) * p.k_token;  // of row 0, if that were a token
            for (int x = written * p.key_size + threadIdx.x; x < count * p.key_size; x += THREADS) {
                const int j = x / p.key_size, d = x % p.key_size;
                keys[x] = rows[j * p.k_token + d];
                decays[x] = block.prepared[i64(chunk) * p.heads].decays[j][d];
            }
#else
            for (int x = threadIdx.x; x < (count - written) * p.key_size; x += THREADS) {
                const int j = written + x / p.key_size, d = x % p.key_size;
                keys[j * p.key_size + d] = m.keys[stage][j * KEYS + d];
            }
            for (int i = written + threadIdx.x; i < count; i += THREADS) decays[i] = m.decays[i];
#endif
#if WEIGHTED
            for (int j = written + threadIdx.x; j < count; j += THREADS)
                state[p.row_weights + head * CHUNK + j] = m.row_weights[j];
#endif
        }
    }
    if (p.closed) {
        __syncthreads();
        if (count) block.close(stage, count);
        block.write_matrix(p.closed + sequence * i64(p.heads) * p.key_size * p.size + own, true);
    }
}

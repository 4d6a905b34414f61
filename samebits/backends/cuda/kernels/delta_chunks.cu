// The delta rule, the second of two launches: updates, results, and the matrix from chunk to chunk. The first is
// delta_begin.cu, or with a decay for each channel delta_prepare.cu.
//
// docs/contract.md, "Recurrent layers", has the sums. A block takes 16 columns of values for each of WARPS warps, of one
// head in one sequence, and goes through the chunks in order. A chunk's latency is what counts, so warps have roles:
//
//   matrix   A warp has its columns' part of the matrix in registers, transposed, with all channels of keys. It finds
//            what a chunk's keys read of it, a block of 16 rows after the other, and adds each block's updates.
//   solvers  A warp solves the triangular systems of two such warps' columns, one for each lane. Updates take the place of
//            values in shared memory. They tell each other by barriers what is there. A turn of each one's loop is a
//            block: where blocks had code of their own, warps waited for instructions.
//   results  As many warps as have the matrix compute the results of the chunk before: of its matrix, rounded, and its
//            updates. Results take the place of updates.
//   HELPERS  Warps that copy the operands of chunks to come.
//
// With a decay for each channel, keys and queries come times their decays, so that nothing of this kernel is scaled but
// the matrix.
//
// Macros: TYPE, KEY_SIZE, WARPS, HARDWARE_EXP2 and BY_CHANNEL are those of delta.cu.
//   STAGES    chunks in shared memory, at least 3
//   LEAVES_Z  1: for a backward, which then needs no system solved again, solvers leave it z of each row

#define WEIGHTED 0
#define HELPERS (WARPS > 2 ? 1 : 2)
#define SYSTEMS 1
#include "launch.cuh"
#include "linear_part.cuh"
#include "named_barriers.cuh"

constexpr int TILE = 16 * WARPS, STEPS = KEY_SIZE / 16, VALUES = TILE + PAD;
constexpr int AHEAD = STAGES - 2;  // chunks on their way
// Chunks whose keys are in shared memory, and whose queries are. With a decay for each channel these are copied when their
// results are next, and keys are not needed for them.
constexpr int KEPT_KEYS = BY_CHANNEL ? STAGES - 1 : STAGES;
constexpr int Z_LINE = CHUNK + 4;  // floats of a column of z, padded
// Warps of the matrix that share a solver, and these; columns of a solver; threads that meet at the barriers of these.
constexpr int SHARED = WARPS == 1 ? 1 : 2, SOLVERS = WARPS / SHARED, SOLVED = 16 * SHARED,
              MET = 32 * (SHARED + 1);
constexpr int FIRST_RESULT = 32 * (WARPS + HELPERS), FIRST_SOLVER = FIRST_RESULT + THREADS;
constexpr int ALL = FIRST_SOLVER + 32 * SOLVERS;

struct Memory {
    Stored keys[KEPT_KEYS][CHUNK * KEYS], values[STAGES][CHUNK * VALUES];
#if BY_CHANNEL
    Stored written[KEPT_KEYS][CHUNK * KEYS];  // keys times decays to the chunk's end
    float over_chunk[KEPT_KEYS][KEY_SIZE];
#endif
    System systems[KEPT_KEYS];
    float z[WARPS][16 * Z_LINE];         // [column, row]
    uint4 matrix[2][WARPS][STEPS * 32];  // of this chunk and the one before, as left operands of 16 x 16
    Stored queries[KEPT_KEYS][CHUNK * KEYS];
    QueryScores scores[KEPT_KEYS];
};

// Of 16 x 16 elements.
__device__ __forceinline__ void step(float (&acc)[2][4], const u32 (&left)[4], const u32 (&right)[4]) {
    mma_m16n8k16<TYPE == BF16>(acc[0], left, right);
    mma_m16n8k16<TYPE == BF16>(acc[1], left, right + 2);
}

// What warps of the matrix and solvers need of a chunk. `values` and `z` are of their columns.
struct Chunk {
    const Stored *keys, *written;  // which read the matrix, and which are written to it
    const float* over_chunk;       // what is left of the matrix, or of each of its channels
    Stored* values;
    const System& system;
    float* z;
    int first, count;  // rows that are tokens of this call
    int barrier;

    // A block's rows of 16 columns of values, or of what has taken their place, as left operand.
    __device__ __forceinline__ void rows(u32 (&left)[4], int block, int column) const {
        ldmatrix_x4<true>(left, by_columns(values + block * 16 * VALUES + column, VALUES));
    }

    // Calls `f` with pairs of rows of 16 columns of a block in z, and with the sums of a step at their place.
    template <class F>
    static __device__ __forceinline__ void each(float* z, float (&acc)[2][4], const F& f) {
        z += threadIdx.x % 32 / 4 * Z_LINE + threadIdx.x % 4 * 2;
#pragma unroll
        for (int x = 0; x < 4; ++x)
            f(*reinterpret_cast<float2*>(z + x % 2 * 8 * Z_LINE + x / 2 * 8), acc[x / 2] + x % 2 * 2);
    }
    static __device__ __forceinline__ void put(float* z, float (&acc)[2][4]) {
        each(z, acc, [](float2& to, const float* c) { to = make_float2(c[0], c[1]); });
    }

    // z of a block without updates: values, and what is read of the matrix. Without those of block 0, if these are given.
    template <bool GIVEN = false>
    __device__ __forceinline__ void read(const u32 (&matrix)[STEPS][4], int block,
                                         const u32 (&updates)[4] = {}) const {
        u32 right[STEPS][4], value[4];
        float acc[2][4] = {};
#pragma unroll
        for (int x = 0; x < STEPS; ++x)
            ldmatrix_x4<false>(right[x], by_columns(keys + block * 16 * KEYS + x * 16, KEYS));
        rows(value, block, 0);
#pragma unroll
        for (int x = 0; x < STEPS; ++x) step(acc, matrix[x], right[x]);
#pragma unroll
        for (int x = 0; x < 2; ++x) {
#if !BY_CHANNEL
            const float* of_row = system.since + block * 16 + x * 8 + threadIdx.x % 4 * 2;
            const float2 since = *reinterpret_cast<const float2*>(of_row);
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[x][i] = __fmul_rn(acc[x][i], i % 2 ? since.y : since.x);
#endif
#pragma unroll
            for (int i = 0; i < 4; ++i)
                acc[x][i] = __fsub_rn(E::widen(Stored(value[x * 2 + i / 2] >> i % 2 * 16)), acc[x][i]);
        }
        if constexpr (GIVEN) take_out(acc, block, 0, updates);
        put(z + block * 16, acc);
    }

    // Takes updates of a block, times their weights, from z of a later one.
    __device__ __forceinline__ void take_out(float (&acc)[2][4], int block, int earlier,
                                             const u32 (&updates)[4]) const {
        const uint4 weights = system.earlier[block * (block - 1) / 2 + earlier][threadIdx.x % 32];
        const u32 right[4] = {weights.x, weights.y, weights.z, weights.w};
        step(acc, updates, right);
    }

    // Carries the matrix on, to the chunk's end. `rounded` gets that of its start. Keys come to registers while it waits for
    // updates.
    __device__ __forceinline__ void carry(Part<STEPS>& part, uint4* rounded) const {
        u32 matrix[STEPS][4], right[STEPS][4];
#pragma unroll
        for (int x = 0; x < STEPS; ++x) part.rounded(x, matrix[x]);
#pragma unroll 1
        for (int block = 0; block < 2; ++block) {
            read(matrix, block);
            if (block == 0) meet();
        }
#pragma unroll
        for (int x = 0; x < STEPS; ++x)
            rounded[x * 32 + threadIdx.x % 32] =
                make_uint4(matrix[x][0], matrix[x][1], matrix[x][2], matrix[x][3]);
#pragma unroll
        for (int x = 0; x < STEPS * 8; ++x) {
            float& c = part.c[x / 8][x / 4 % 2][x % 4];
            const int d = x / 4 * 8 + threadIdx.x % 4 * 2 + x % 2;
            c = __fmul_rn(c, over_chunk[BY_CHANNEL ? d : 0]);
        }
#pragma unroll 1
        for (int block = 0; block < 4; ++block) {
#pragma unroll
            for (int x = 0; x < STEPS; ++x)
                ldmatrix_x4<true>(right[x], by_rows(written + block * 16 * KEYS + x * 16, KEYS));
            meet();
            u32 updates[4], left[4];
            rows(updates, block, 0);
#pragma unroll
            for (int i = 0; i < 4; ++i) left[i] = updates[i];
#if !BY_CHANNEL
            scale_pairs(left, system.left + block * 16);
#endif
#pragma unroll
            for (int x = 0; x < STEPS; ++x) step(part.c[x], left, right[x]);
            if (block == 0) {
#pragma unroll 1
                for (int later = 2; later < 4; ++later) read<true>(matrix, later, updates);
            } else if (block == 1) {
                float acc[2][4];
                each(z + 3 * 16, acc, [](const float2& from, float* c) { c[0] = from.x, c[1] = from.y; });
                take_out(acc, 3, 1, updates);
                put(z + 3 * 16, acc);
            }
        }
    }

    // Warps of the matrix and their solver: what one of them has done until then, the other goes on from. Until updates of a
    // block are there, the matrix has been read for the next one.
    __device__ __forceinline__ void meet() const { wait_for<MET>(barrier); }

    // Takes the updates of the block before from z of a block. The warps of the matrix have taken out those of others.
    __device__ __forceinline__ void take_out_last(int block) const {
        float acc[SHARED][2][4];
#pragma unroll
        for (int x = 0; x < SHARED; ++x)
            each(z + x * 16 * Z_LINE + block * 16, acc[x],
                 [](const float2& from, float* c) { c[0] = from.x, c[1] = from.y; });
#pragma unroll
        for (int x = 0; x < SHARED; ++x) {
            u32 updates[4];
            rows(updates, block - 1, x * 16);
            take_out(acc[x], block, block - 1, updates);
        }
#pragma unroll
        for (int x = 0; x < SHARED; ++x) put(z + x * 16 * Z_LINE + block * 16, acc[x]);
        __syncwarp();
    }

    // Asks for a block's weights of row j. It takes longer to get them than to solve a row: NEXT rows are on their way.
    static constexpr int NEXT = WARPS > 2 && LEAVES_Z ? 6 : 8;  // as many as there are registers for
    __device__ __forceinline__ void load_weights(float (&weights)[16][16], int block, int j) const {
#pragma unroll
        for (int i = (j + 1) / 4 * 4; j < 15 && i < 16; i += 4)
            put_four(weights[j] + i, *reinterpret_cast<const float4*>(system.own[block][j] + i));
    }
    static __device__ __forceinline__ void put_four(float* to, const float4& from) {
        to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
    }

    // Solves a block's rows, a column by each lane. If not all rows are tokens of this call, values have the others'
    // updates: those that the state had, or zeros. Then all meet, and `leaves`, if it is there, gets z of the lane's column,
    // a row `line` behind the last one.
    template <bool WHOLE>
    __device__ __forceinline__ void solve(float (&weights)[16][16], int block, float* leaves,
                                          i64 line) const {
        const int column = threadIdx.x % SOLVED, row0 = block * 16;
        float4* of_column = reinterpret_cast<float4*>(z + column * Z_LINE + row0);
        Stored* to = values + row0 * VALUES + column;
        float y[16], betas[16], u[16];
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            put_four(y + i, of_column[i / 4]);
            put_four(betas + i, *reinterpret_cast<const float4*>(system.betas + row0 + i));
        }
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            u[j] = rounded(__fmul_rn(betas[j], y[j]));
            if (!WHOLE && (row0 + j < first || row0 + j >= count)) u[j] = E::widen(to[j * VALUES]);
#pragma unroll
            for (int i = j + 1; i < 16; ++i) y[i] = __fmaf_rn(weights[j][i], u[j], y[i]);
            if (j + NEXT < 16) load_weights(weights, block, j + NEXT);
        }
        if constexpr (!WHOLE) __syncwarp();
        if (SOLVED == 32 || threadIdx.x % 32 < SOLVED) {
#pragma unroll
            for (int j = 0; j < 16; ++j) to[j * VALUES] = E::narrow(u[j]);
        }
        __syncwarp();
        meet();
#if LEAVES_Z
        if (leaves) {
            leaves += row0 * line;
#pragma unroll
            for (int i = 0; i < 16; ++i, leaves += line)
                if (WHOLE || (row0 + i >= first && row0 + i < count)) *leaves = y[i];
        }
        __syncwarp();
#endif
    }

    // Updates of all blocks.
    __device__ __forceinline__ void solve_all(float* leaves, i64 line) const {
#pragma unroll 1
        for (int block = 0; block < 4; ++block) {
            float weights[16][16];
#pragma unroll
            for (int j = 0; j < NEXT; ++j) load_weights(weights, block, j);
            if (block == 0)
                meet();
            else
                take_out_last(block);
            if (block * 16 >= first && block * 16 + 16 <= count)
                solve<true>(weights, block, leaves, line);
            else
                solve<false>(weights, block, leaves, line);
        }
    }
};

// A chunk's results, in place of updates, by a warp for 16 columns.
__device__ __forceinline__ void find_results(const Stored* queries, Stored* updates, const uint4* matrix,
                                             const QueryScores& scores, [[maybe_unused]] const System& system,
                                             float scale) {
    const int lane = threadIdx.x % 32, in_row = lane / 4, in_pair = lane % 4 * 2;
    float acc[4][2][4] = {};
#pragma unroll 1
    for (int x = 0; x < STEPS; ++x) {
        const uint4 both = matrix[x * 32 + lane];
        const u32 right[4] = {both.x, both.z, both.y, both.w};
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            u32 left[4];
            ldmatrix_x4<false>(left, by_rows(queries + t * 16 * KEYS + x * 16, KEYS));
            mma_m16n8k16<TYPE == BF16>(acc[t][0], left, right);
            mma_m16n8k16<TYPE == BF16>(acc[t][1], left, right + 2);
        }
    }
#if !BY_CHANNEL
#pragma unroll
    for (int x = 0; x < 32; ++x) {
        float& y = acc[x / 8][x / 4 % 2][x % 4];
        y = __fmul_rn(y, system.since[x / 8 * 16 + x / 2 % 2 * 8 + in_row]);
    }
#endif
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 right[4];
        ldmatrix_x4<true>(right, by_rows(updates + j * 16 * VALUES, VALUES));
#pragma unroll
        for (int t = j; t < 4; ++t) {
            const uint4 score = scores.blocks[t * (t + 1) / 2 + j][lane];
            const u32 left[4] = {score.x, score.y, score.z, score.w};
            mma_m16n8k16<TYPE == BF16>(acc[t][0], left, right);
            mma_m16n8k16<TYPE == BF16>(acc[t][1], left, right + 2);
        }
    }
    __syncwarp();  // all lanes have read updates
    const auto result = [&](float y) { return contract::canonical(__fmul_rn(__fadd_rn(y, 0.0f), scale)); };
#pragma unroll
    for (int x = 0; x < 16; ++x) {
        const float* c = acc[x / 4][x / 2 % 2] + x % 2 * 2;
        const int i = x / 4 * 16 + x % 2 * 8 + in_row, e = x / 2 % 2 * 8 + in_pair;
        E::store_pair(updates + i * VALUES + e, result(c[0]), result(c[1]));
    }
    __syncwarp();
}

// Stores 16 columns of rows `first` to `last` - 1, of which `columns` exist, by one warp.
__device__ __forceinline__ void store_rows(Stored* to, i64 line, const Stored* from, int first, int last,
                                           int columns) {
    const bool whole = (reinterpret_cast<u64>(to) | u64(line) * SIZE) % 16 == 0 && columns % 8 == 0;
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int x = first * 2 + lane; whole && x < last * 2; x += 32) {
        const int i = x / 2, e = x % 2 * 8;
        if (e < columns)
            *reinterpret_cast<uint4*>(to + i * line + e) =
                *reinterpret_cast<const uint4*>(from + i * VALUES + e);
    }
    for (int x = first * 16 + lane; !whole && x < last * 16; x += 32) {
        const int i = x / 16, e = x % 16;
        if (e < columns) to[i * line + e] = from[i * VALUES + e];
    }
}

// The roles of a block's warps. Each goes through the chunks by itself, so that it has all registers.
struct Block {
    const Params& p;
    Memory& m;
    const Chunks rows;
    const int chunks, head, sequence, first_column;
    const i64 place, own, of_sequence;  // of the first chunk, and of a matrix in a state and in a call
    float* const state;

    // Of a state, which has the matrix at the start of the chunk that stays open.
    __device__ __forceinline__ bool stays(int chunk) const {
        return state && rows.rows > rows.before && chunk == chunks - 1;
    }
#if BY_CHANNEL
    __device__ __forceinline__ i64 index(int chunk) const {
        const int full = rows.before / CHUNK;  // what is prepared of it comes last
        return (place + (chunk < full ? chunks - 1 : chunk - full)) * p.heads + head;
    }
#else
    __device__ __forceinline__ i64 index(int chunk) const { return (place + chunk) * p.heads + head; }
#endif
    // Rows of results, from a chunk's first one and a column on.
    __device__ __forceinline__ i64 result(int chunk, int column) const {
        return (rows.token(chunk) * p.heads + head) * p.size + column;
    }

    // All have done with a chunk, and the next one is there. Twice: racecheck loses hold of the first time, where some have
    // met at barriers of their own.
    static __device__ __forceinline__ void meet_all() {
        wait_for<ALL>(15);
        __syncthreads();
    }

    __device__ __forceinline__ void load_queries(int chunk) const {
        if (chunk < 0 || chunk >= chunks) return;
        const int stage = chunk % KEPT_KEYS;
#if BY_CHANNEL
        copy_rows<KEYS, KEY_SIZE>(m.queries[stage], p.prepared[index(chunk)].queries[0], KEY_SIZE, 0, CHUNK,
                                  CHUNK, KEY_SIZE);
#else
        load_given<KEYS, KEY_SIZE>(m.queries[stage],
                                   p.q + head / p.group * p.q_head + rows.token(chunk) * p.q_token, p.q_token,
                                   rows.first(chunk), rows.count(chunk), p.key_size);
#endif
        load_whole(m.scores[stage], p.scores[index(chunk)]);
    }

    __device__ __forceinline__ void load(int chunk) const {
        load_queries(BY_CHANNEL ? chunk - 1 : chunk);
        if (chunk >= chunks) return;
        const int stage = chunk % KEPT_KEYS, first = rows.first(chunk), count = rows.count(chunk);
        const i64 token = rows.token(chunk);
#if BY_CHANNEL
        const Prepared& from = p.prepared[index(chunk)];
        const auto whole = [](Stored* to, const Stored* from) {
            copy_rows<KEYS, KEY_SIZE>(to, from, KEY_SIZE, 0, CHUNK, CHUNK, KEY_SIZE);
        };
        whole(m.keys[stage], from.keys[0]), whole(m.written[stage], from.written[0]);
        load_whole(m.over_chunk[stage], from.kept);
        // Nobody else has these columns, so they are read where they are, before they are written.
        const Stored* opened =
            reinterpret_cast<const Stored*>(state + p.updates) + i64(head) * CHUNK * p.size;
#else
        const Stored* opened = opened_updates(p, sequence, head);
        load_rows<KEYS, KEY_SIZE>(m.keys[stage], opened_keys(p, sequence, head), p.key_size,
                                  p.k + head / p.group * p.k_head + token * p.k_token, p.k_token, first,
                                  count, p.key_size);
#endif
        load_rows<VALUES, TILE>(m.values[chunk % STAGES], opened + first_column, p.size,
                                p.v + head * p.v_head + first_column + token * p.v_token, p.v_token, first,
                                count, p.size - first_column);
        load_whole(m.systems[stage], p.systems[index(chunk)]);
    }

    __device__ __forceinline__ void help() const {
        for (int chunk = 0; chunk < AHEAD; ++chunk) {
            load(chunk);
            cp_async_commit();
        }
        for (int chunk = 0; chunk <= chunks; ++chunk) {
            cp_async_wait<AHEAD - 1>();
            meet_all();
            load(chunk + AHEAD);
            cp_async_commit();
        }
    }

    // What a warp whose first 16 columns these are needs of a chunk.
    __device__ __forceinline__ Chunk of(int chunk, int warp) const {
        const int stage = chunk % KEPT_KEYS;
#if BY_CHANNEL
        const Stored* written = m.written[stage];
        const float* over_chunk = m.over_chunk[stage];
#else
        const Stored* written = m.keys[stage];
        const float* over_chunk = m.systems[stage].since + CHUNK - 1;
#endif
        return Chunk{m.keys[stage],    written,   over_chunk,        m.values[chunk % STAGES] + warp * 16,
                     m.systems[stage], m.z[warp], rows.first(chunk), rows.count(chunk),
                     1 + warp / SHARED};
    }

    __device__ __forceinline__ void matrices(int warp) const {
        Part<STEPS> part;
        part.first_key = 0, part.first_column = first_column + warp * 16;
        part.read(p, state ? state + p.matrix + own : p.initial ? p.initial + of_sequence : nullptr);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            meet_all();
            if (chunk && stays(chunk)) part.write(p, computed_here(state + p.matrix + own, state), false);
            of(chunk, warp).carry(part, m.matrix[chunk % 2][warp]);
        }
        meet_all();
        if (p.closed) part.write(p, p.closed + of_sequence, true);
    }

    __device__ __forceinline__ void solve(int warp) const {
        const int lane = threadIdx.x % 32, column = first_column + warp * 16 + lane;
        const bool leaves = lane < SOLVED && column < p.size;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            meet_all();
            float* z = leaves ? p.z + result(chunk, column) : nullptr;
            of(chunk, warp).solve_all(z, i64(p.heads) * p.size);
        }
        meet_all();
    }

    // Leaves the rows of the open chunk in the state.
    __device__ __forceinline__ void keep(int chunk, const Stored* values, int column, int thread) const {
        const int stage = chunk % KEPT_KEYS, first = rows.first(chunk), count = rows.count(chunk);
        Stored* updates = reinterpret_cast<Stored*>(state + p.updates) + i64(head) * CHUNK * p.size;
        store_rows(updates + column, p.size, values, first, count, p.size - column);
        if (first_column) return;
        Stored* to = reinterpret_cast<Stored*>(state + p.keys) + i64(head) * CHUNK * p.key_size;
#if BY_CHANNEL
        const i64 line = p.k_token;
        const Stored* from = p.k + head / p.group * p.k_head + rows.token(chunk) * line;
        const float* decays = p.prepared[index(chunk)].decays[0];
        float* to_decays = state + p.decays_at + i64(head) * CHUNK * p.key_size;
#pragma unroll 4
        for (int x = first * KEY_SIZE + thread; x < count * KEY_SIZE; x += THREADS)
            if (x % KEY_SIZE < p.key_size) to_decays[x / KEY_SIZE * p.key_size + x % KEY_SIZE] = decays[x];
#else
        constexpr int line = KEYS;
        const Stored* from = m.keys[stage];
        for (int i = first + thread; i < count; i += THREADS)
            state[p.decays_at + head * CHUNK + i] = m.systems[stage].sums[i];
#endif
        const u64 places = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | u64(line) * SIZE;
        const bool whole = places % 16 == 0 && p.key_size % 8 == 0;
#pragma unroll 4
        for (int x = thread; whole && x < CHUNK * (KEY_SIZE / 8); x += THREADS) {
            const int i = x / (KEY_SIZE / 8), d = x % (KEY_SIZE / 8) * 8;
            if (i >= first && i < count && d < p.key_size)
                *reinterpret_cast<uint4*>(to + i * p.key_size + d) =
                    *reinterpret_cast<const uint4*>(from + i * line + d);
        }
        for (int x = first * p.key_size + thread; !whole && x < count * p.key_size; x += THREADS)
            to[x] = from[x / p.key_size * line + x % p.key_size];
        if (head == 0 && thread == 0) state[0] = float(count);
    }

    // By `thread` of those for results.
    __device__ __forceinline__ void results(int thread) const {
        const int warp = thread / 32, column = first_column + warp * 16;
        meet_all();
        for (int chunk = 0; chunk < chunks; ++chunk) {
            meet_all();
            const int stage = chunk % KEPT_KEYS;
            Stored* values = m.values[chunk % STAGES] + warp * 16;
            if (stays(chunk)) keep(chunk, values, column, thread);
            find_results(m.queries[stage], values, m.matrix[chunk % 2][warp], m.scores[stage],
                         m.systems[stage], p.scale);
            store_rows(p.out + result(chunk, column), i64(p.heads) * p.size, values, rows.first(chunk),
                       rows.count(chunk), p.size - column);
        }
    }
};

extern "C" __global__ void __launch_bounds__(ALL, 1) delta_chunks(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const int thread = threadIdx.x, head = blockIdx.y, sequence = blockIdx.z;
    const Chunks rows(p, sequence, rows_before(p, sequence));
    const i64 own = i64(head) * p.key_size * p.size;
    const Block block{p,
                      *reinterpret_cast<Memory*>(bytes),
                      rows,
                      rows.number(),
                      head,
                      sequence,
                      int(blockIdx.x) * TILE,
                      first_chunk(rows.begin, sequence),
                      own,
                      sequence * i64(p.heads) * p.key_size * p.size + own,
                      p.state ? p.state + sequence * p.words : nullptr};
    if (thread < THREADS)
        block.matrices(thread / 32);
    else if (thread < FIRST_RESULT)
        block.help();
    else if (thread < FIRST_SOLVER)
        block.results(thread - FIRST_RESULT);
    else
        block.solve((thread - FIRST_SOLVER) / 32 * SHARED);
}

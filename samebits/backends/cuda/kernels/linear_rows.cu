// Linear attention without the delta rule, the last of three launches: the results of all chunks, side by side.
//
// docs/contract.md, "Recurrent layers", has the sums. A block takes TILE columns of values in one chunk, for some heads
// that share one of keys, one after the other: products of queries and keys are theirs in common. Operands are in
// shared memory, sums in registers. A warp has all rows of its columns, so it reads its part of a matrix once.
//
// Macros: TYPE, KEY_SIZE, WARPS, HARDWARE_EXP2 and WEIGHTED are those of delta.cu.
//   TILE    columns of a block, a multiple of 16 * WARPS
//   STAGES  heads whose operands are in shared memory

#include "linear.cuh"

constexpr int KEY_STEPS = KEY_SIZE / 16, WIDE = TILE / 16 / WARPS, COLUMNS = CHUNK + PAD, VALUES = TILE + PAD;
constexpr int OWN = (SCORES + WARPS - 1) / WARPS;  // a warp's blocks of scores

struct Memory {
    Stored queries[CHUNK * KEYS], keys[CHUNK * KEYS];
    Stored values[STAGES][CHUNK * VALUES], scores[CHUNK * COLUMNS];
    uint4 matrix[STAGES][TILE / 16 * KEY_STEPS * 32];
    Decays decays[STAGES];
};

constexpr int BLOCKS = sizeof(Memory) <= 113 << 10 ? 2 : 1;  // of a multiprocessor

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) linear_rows(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int place = blockIdx.x, first_head = blockIdx.y * p.shared, first_column = blockIdx.z * TILE;
    const int sequence = sequence_of(p, place);
    const Chunks mine(p, sequence, rows_before(p, sequence));
    const int chunk = place - first_chunk(mine.begin, sequence);
    if (chunk < 0 || chunk >= mine.number()) return;
    const int first = mine.first(chunk), count = mine.count(chunk);
    if (first == count) return;
    const i64 token = mine.token(chunk);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, in_row = lane / 4, in_pair = lane % 4 * 2;
    const int value_steps = (p.size + 15) / 16, first_step = first_column / 16;

    const auto load = [&](int n) {
        const int stage = n % STAGES, head = first_head + n;
        load_rows<VALUES, TILE>(m.values[stage], opened_updates(p, sequence, head) + first_column, p.size,
                                p.v + head * p.v_head + token * p.v_token + first_column, p.v_token, first,
                                count, p.size - first_column);
        const i64 index = i64(place) * p.heads + head;
        const uint4* from = p.matrices + (index * value_steps + first_step) * KEY_STEPS * 32;
        const int steps = min(TILE / 16, value_steps - first_step);
#pragma unroll 4
        for (int x = threadIdx.x; x < steps * KEY_STEPS * 32; x += THREADS)
            cp_async_16(shared_address(m.matrix[stage] + x), from + x);
        load_whole(m.decays[stage], p.decays[index]);
    };
    load_queries_and_keys(p, m.queries, m.keys, sequence, first_head, token, first, count);
    cp_async_commit();
    for (int n = 0; n < STAGES; ++n) {
        if (n < p.shared) load(n);
        cp_async_commit();
    }

    cp_async_wait<STAGES>();
    __syncthreads();
    float of_queries[OWN][2][4] = {};
    multiply_scores(
        of_queries, [&](int block) { return m.queries + row_of(block) * KEYS; },
        [&](int block) { return m.keys + column_of(block) * KEYS; });

    const int own_step = warp * WIDE;  // the first 16 columns of this warp, of the block's
    const auto has = [&](int x) { return first_step + own_step + x < value_steps; };
    for (int n = 0; n < p.shared; ++n) {
        const int stage = n % STAGES, head = first_head + n;
        cp_async_wait<STAGES - 1>();
        __syncthreads();
        const float* sums = m.decays[stage].sums;
#pragma unroll
        for (int x = 0; x < OWN * 4; ++x) {
            const int block = warp + x / 4 * WARPS;
            if (block >= SCORES) continue;
            const int i = row_of(block) + in_row + x % 2 * 8, j = column_of(block) + x / 2 % 2 * 8 + in_pair;
            float y[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float product = of_queries[x / 4][x / 2 % 2][x % 2 * 2 + c];
                y[c] = j + c <= i ? __fmul_rn(product, exp2_of(__fsub_rn(sums[i], sums[j + c]))) : 0.0f;
#if WEIGHTED
                if (j + c <= i) y[c] = __fmul_rn(y[c], m.decays[stage].weights[j + c]);
#endif
            }
            E::store_pair(m.scores + i * COLUMNS + j, y[0], y[1]);
        }

        float results[WIDE][4][2][4] = {};  // of columns, rows
#pragma unroll 2
        for (int d = 0; d < KEY_STEPS; ++d) {
            u32 right[WIDE][4], left[4];
#pragma unroll
            for (int x = 0; x < WIDE; ++x) {
                if (!has(x)) continue;
                const uint4 both = m.matrix[stage][((own_step + x) * KEY_STEPS + d) * 32 + lane];
                right[x][0] = both.x, right[x][1] = both.z, right[x][2] = both.y, right[x][3] = both.w;
            }
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                ldmatrix_x4<false>(left, by_rows(m.queries + t * 16 * KEYS + d * 16, KEYS));
#pragma unroll
                for (int x = 0; x < WIDE * 2; ++x)
                    if (has(x / 2))
                        mma_m16n8k16<TYPE == BF16>(results[x / 2][t][x % 2], left, right[x / 2] + x % 2 * 2);
            }
        }
#pragma unroll
        for (int y = 0; y < 8; ++y) {
            const float since = exp2_of(sums[y * 8 + in_row]);
#pragma unroll
            for (int x = 0; x < WIDE * 4; ++x) {
                float& c = results[x / 4][y / 2][x / 2 % 2][y % 2 * 2 + x % 2];
                c = __fmul_rn(c, since);
            }
        }
        __syncthreads();
        Stored* values = m.values[stage] + own_step * 16;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 right[WIDE][4], left[4];
#pragma unroll
            for (int x = 0; x < WIDE; ++x)
                if (has(x)) ldmatrix_x4<true>(right[x], by_rows(values + j * 16 * VALUES + x * 16, VALUES));
#pragma unroll
            for (int t = j; t < 4; ++t) {
                ldmatrix_x4<false>(left, by_rows(m.scores + t * 16 * COLUMNS + j * 16, COLUMNS));
#pragma unroll
                for (int x = 0; x < WIDE * 2; ++x)
                    if (has(x / 2))
                        mma_m16n8k16<TYPE == BF16>(results[x / 2][t][x % 2], left, right[x / 2] + x % 2 * 2);
            }
        }

        // They take the place of this warp's values, from where rows are stored by 16 bytes.
        __syncwarp();
        const int column = first_column + own_step * 16;
        const i64 line = i64(p.heads) * p.size, at = token * line + i64(head) * p.size + column;
#if WEIGHTED
        float skips[WIDE * 4];
        read_skips<WIDE>(p, skips, head, column);
#endif
#pragma unroll
        for (int x = 0; x < WIDE * 16; ++x) {
            const int group = x / 16 * 2 + x / 2 % 2;  // of 8 columns
            const float* c = results[x / 16][x / 4 % 4][x / 2 % 2] + x % 2 * 2;
            const int i = x / 4 % 4 * 16 + x % 2 * 8 + in_row, e = group * 8 + in_pair;
            float y[2];
#pragma unroll
            for (int of = 0; of < 2; ++of) {
                y[of] = __fmul_rn(__fadd_rn(c[of], 0.0f), p.scale);
#if WEIGHTED
                const float value = E::widen(values[i * VALUES + e + of]);
                if (p.skip) y[of] = __fadd_rn(y[of], __fmul_rn(skips[group * 2 + of], value));
#endif
                y[of] = contract::canonical(y[of]);
            }
#if WEIGHTED
            if (p.wide) {
                float* to = reinterpret_cast<float*>(p.out) + at + i * line + e;
                if (i >= first && i < count && column + e < p.size) to[0] = y[0];
                if (i >= first && i < count && column + e + 1 < p.size) to[1] = y[1];
                continue;
            }
#endif
            E::store_pair(values + i * VALUES + e, y[0], y[1]);
        }
        __syncwarp();
        if (!p.wide) store_columns<WIDE, VALUES>(p.out + at, line, values, first, count, p.size - column);
        __syncthreads();
        if (n + STAGES < p.shared) load(n + STAGES);
        cp_async_commit();
    }
}

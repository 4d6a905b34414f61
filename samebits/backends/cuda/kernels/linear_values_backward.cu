// Gradients of linear attention without the delta rule: of values and weights of all chunks, side by side.
//
// docs/contract.md, "Recurrent layers", has the sums. A block takes one chunk, for some heads that share one of keys, one
// after the other, and of each TILE columns of values after TILE: products of keys and queries are theirs in common. It is
// linear_rows.cu with keys in place of queries, and gradients in place of values.
//
// Macros: TYPE, KEY_SIZE, WARPS, HARDWARE_EXP2 and WEIGHTED are those of delta.cu.
//   VALUE_SIZE  of v, up to a multiple of 16
//   TILE        columns at a time, a multiple of 16 * WARPS

#include "linear.cuh"

constexpr int KEY_STEPS = KEY_SIZE / 16, VALUE_STEPS = VALUE_SIZE / 16, WIDE = TILE / 16 / WARPS;
constexpr int TILES = (VALUE_SIZE + TILE - 1) / TILE,
              ROWS = THREADS < CHUNK ? CHUNK / THREADS : 1;  // of a thread
constexpr int COLUMNS = CHUNK + PAD, VALUES = TILE + PAD, FLOATS = TILE + 4;
constexpr int OWN = (SCORES + WARPS - 1) / WARPS;  // a warp's blocks of scores

struct Memory {
    Stored queries[CHUNK * KEYS], keys[CHUNK * KEYS];
    Stored grads[CHUNK * VALUES], scores[CHUNK * COLUMNS];  // [key, query], times the scale
    union {
        uint4 matrix[TILE / 16 * KEY_STEPS * 32];
        float of_updates[CHUNK * FLOATS];  // once that was read
    };
    Decays decays;
#if WEIGHTED
    Stored values[CHUNK * VALUES];
#endif
};

constexpr int BLOCKS = sizeof(Memory) <= 113 << 10 ? 2 : 1;  // of a multiprocessor

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    linear_values_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int place = blockIdx.x, first_head = blockIdx.y * p.shared, sequence = sequence_of(p, place);
    const Chunks mine(p, sequence, rows_before(p, sequence));
    const int chunk = place - first_chunk(mine.begin, sequence);
    if (chunk < 0 || chunk >= mine.number()) return;
    const int first = mine.first(chunk), count = mine.count(chunk);
    if (first == count) return;
    const i64 token = mine.token(chunk);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, in_row = lane / 4, in_pair = lane % 4 * 2;

    const auto load = [&](int n) {
        const int head = first_head + n / TILES, step = n % TILES * (TILE / 16), column = step * 16;
        const i64 index = i64(place) * p.heads + head;
        load_given<VALUES, TILE>(m.grads,
                                 p.of.grad + head * p.of.grad_head + token * p.of.grad_token + column,
                                 p.of.grad_token, first, count, p.size - column);
        const uint4* from = p.of.matrices + (index * VALUE_STEPS + step) * KEY_STEPS * 32;
        const int steps = min(TILE / 16, VALUE_STEPS - step);
#pragma unroll 4
        for (int x = threadIdx.x; x < steps * KEY_STEPS * 32; x += THREADS)
            cp_async_16(shared_address(m.matrix + x), from + x);
        load_whole(m.decays, p.decays[index]);
#if WEIGHTED
        load_rows<VALUES, TILE>(m.values, opened_updates(p, sequence, head) + column, p.size,
                                p.v + head * p.v_head + token * p.v_token + column, p.v_token, first, count,
                                p.size - column);
#endif
        cp_async_commit();
    };
    load_queries_and_keys(p, m.queries, m.keys, sequence, first_head, token, first, count);
    cp_async_commit();
    load(0);

    cp_async_wait<1>();
    __syncthreads();
    float of_keys[OWN][2][4] = {};
    multiply_scores(
        of_keys, [&](int block) { return m.keys + column_of(block) * KEYS; },
        [&](int block) { return m.queries + row_of(block) * KEYS; });
    // Below the diagonal they are zeros, which the chains go through, too.
    for (int x = threadIdx.x; x < CHUNK * CHUNK; x += THREADS) {
        const int j = x / CHUNK, i = x % CHUNK;
        if (i / 16 < j / 16) m.scores[j * COLUMNS + i] = E::narrow(__fmul_rn(0.0f, p.scale));
    }

    const int own_step = warp * WIDE;  // the first 16 columns of this warp, of the tile's
#if WEIGHTED
    float of_weights[ROWS];
#endif
    for (int n = 0; n < p.shared * TILES; ++n) {
        const int head = first_head + n / TILES, tile = n % TILES, column = tile * TILE + own_step * 16;
        const auto has = [&](int x) { return VALUE_SIZE % TILE == 0 || column + x * 16 < VALUE_SIZE; };
        cp_async_wait<0>();
        __syncthreads();
        const float* sums = m.decays.sums;
#pragma unroll
        for (int x = 0; x < OWN * 4; ++x) {
            const int block = warp + x / 4 * WARPS;
            if (block >= SCORES) continue;
            const int j = column_of(block) + in_row + x % 2 * 8, i = row_of(block) + x / 2 % 2 * 8 + in_pair;
            float y[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float product = of_keys[x / 4][x / 2 % 2][x % 2 * 2 + c];
                y[c] = j <= i + c ? __fmul_rn(product, exp2_of(__fsub_rn(sums[i + c], sums[j]))) : 0.0f;
                y[c] = i + c < count ? __fmul_rn(y[c], p.scale) : 0.0f;
            }
            E::store_pair(m.scores + j * COLUMNS + i, y[0], y[1]);
        }

        float results[WIDE][4][2][4] = {};  // of columns, rows
#pragma unroll 1
        for (int d = 0; d < KEY_STEPS; ++d) {
            u32 right[WIDE][4], left[4];
#pragma unroll
            for (int x = 0; x < WIDE; ++x) {
                if (!has(x)) continue;
                const uint4 both = m.matrix[((own_step + x) * KEY_STEPS + d) * 32 + lane];
                right[x][0] = both.x, right[x][1] = both.z, right[x][2] = both.y, right[x][3] = both.w;
            }
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                ldmatrix_x4<false>(left, by_rows(m.keys + t * 16 * KEYS + d * 16, KEYS));
#pragma unroll
                for (int x = 0; x < WIDE * 2; ++x)
                    if (has(x / 2))
                        mma_m16n8k16<TYPE == BF16>(results[x / 2][t][x % 2], left, right[x / 2] + x % 2 * 2);
            }
        }
#pragma unroll
        for (int y = 0; y < 8; ++y) {
            const int j = y * 8 + in_row;
            const float left = exp2_of(__fsub_rn(sums[CHUNK - 1], sums[j]));
#pragma unroll
            for (int x = 0; x < WIDE * 4; ++x) {
                float& c = results[x / 4][y / 2][x / 2 % 2][y % 2 * 2 + x % 2];
                c = j < count ? __fmul_rn(c, left) : 0.0f;
            }
        }
        __syncthreads();
        Stored* grads = m.grads + own_step * 16;
#pragma unroll 1
        for (int i = 0; i < count; i += 16) {
            u32 right[WIDE][4], left[4];
#pragma unroll
            for (int x = 0; x < WIDE; ++x)
                if (has(x)) ldmatrix_x4<true>(right[x], by_rows(grads + i * VALUES + x * 16, VALUES));
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                ldmatrix_x4<false>(left, by_rows(m.scores + t * 16 * COLUMNS + i, COLUMNS));
#pragma unroll
                for (int x = 0; x < WIDE * 2; ++x)
                    if (has(x / 2))
                        mma_m16n8k16<TYPE == BF16>(results[x / 2][t][x % 2], left, right[x / 2] + x % 2 * 2);
            }
        }

        // They take the place of this warp's gradients of results, from where rows are stored by 16 bytes.
        __syncwarp();
#if WEIGHTED
        float skips[WIDE * 4];
        read_skips<WIDE>(p, skips, head, column);
#endif
#pragma unroll
        for (int x = 0; x < WIDE * 16; ++x) {
            const int group = x / 16 * 2 + x / 2 % 2;  // of 8 columns
            const float* c = results[x / 16][x / 4 % 4][x / 2 % 2] + x % 2 * 2;
            const int j = x / 4 % 4 * 16 + x % 2 * 8 + in_row, e = group * 8 + in_pair;
            float y[2] = {c[0], c[1]};
#if WEIGHTED
            *reinterpret_cast<float2*>(m.of_updates + j * FLOATS + own_step * 16 + e) =
                make_float2(c[0], c[1]);
#pragma unroll
            for (int of = 0; of < 2; ++of) {
                y[of] = __fmul_rn(y[of], m.decays.weights[j]);
                const float grad = E::widen(grads[j * VALUES + e + of]);
                if (p.skip) y[of] = __fadd_rn(y[of], __fmul_rn(skips[group * 2 + of], grad));
            }
#endif
            E::store_pair(grads + j * VALUES + e, y[0], y[1]);
        }
        __syncwarp();
        const i64 line = i64(p.heads) * p.size;
        store_columns<WIDE, VALUES>(p.of.dv + token * line + i64(head) * p.size + column, line, grads, first,
                                    count, p.size - column);
        __syncthreads();
#if WEIGHTED
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int j = threadIdx.x + r * THREADS;
            if (j < first || j >= count) continue;
            of_weights[r] = chain(m.values + j * VALUES, m.of_updates + j * FLOATS,
                                  min(TILE, p.size - tile * TILE), tile ? of_weights[r] : 0.0f);
            if (tile == TILES - 1)
                p.of.dweights[(token + j) * p.heads + head] = contract::canonical(of_weights[r]);
        }
        __syncthreads();
#endif
        if (n + 1 < p.shared * TILES) load(n + 1);
    }
}

// One token for each of few sequences, by the delta rule with a decay for each channel. As in delta_step_few.cu, what
// bounds it is one latency of memory, and the row of instructions that one warp has.
//
//   * Warps have code of their own: one for each 8 columns, and eight for scores. The matrix, updates and all of the
//     token are asked for at once. Keys and decays take more bytes than a block's matrix, so those behind the count are
//     not read: the own block's come straight into registers, and those of earlier blocks into shared memory.
//   * The longest row of instructions is a score within the row's own block: a fused multiply-add for each channel.
//     Eight warps compute the products and exponentials of two rows each, and leave them in shared memory. One warp then
//     has all chains, those of 16 keys by the query and by the key.
//   * Meanwhile six warps have the scores of eight earlier keys each, and others multiply the matrix. A barrier is
//     between the warps alone that need it.
//
// Macros: those of delta_step.cu. TILE is 32 and WARPS 12, or TILE is 64 and WARPS 16.

#include "delta_step_few.cuh"

static_assert(BY_CHANNEL && DELTA && TILE == 8 * (WARPS - SCORE_WARPS));
constexpr int KEY_WARPS = 6, LAST = 6, CHAINS = 7;  // of those with scores: with earlier keys, and others
constexpr int QUADS = KEY_SIZE / 4, EACH = (QUADS + 31) / 32;  // four channels: in a row, and of a lane
constexpr int SPREAD = KEY_SIZE + 8;                           // of a row of decays of earlier blocks

// Barriers. `meet` has the first.
enum { QUERIES = 2, FACTORS, COUNTED, EARLIER, OWN };

struct Shared {
    Few few;  // a full chunk; else keys and decays of earlier blocks
    // Of the own block's scores: exponentials, and products with the query and with the key.
    float by[16][DECAYS], products[2][16][DECAYS];
    float reference[DECAYS];  // the sums at the end of the block before
};

__device__ __forceinline__ void read(float (&x)[4], const float* from) {
    const float4 all = *reinterpret_cast<const float4*>(from);
    x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
}

__device__ __forceinline__ void write(float* to, const float (&x)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}

__device__ __forceinline__ float element(const u32 (&pairs)[2], int x) {
    return E::widen(u16(pairs[x / 2] >> x % 2 * 16));
}

// A full chunk, with what is left of its keys at its end.
__device__ __forceinline__ void take_chunk(Memory& m, const Stored* keys, const float* decays,
                                           const Stored* updates, int columns) {
    copy<KEY_SIZE, DECAYS, KEY_SIZE>(m.decays, decays, CHUNK);
    copy_chunk(m, keys, updates, columns);
    cp_async_wait<0>();
    meet();
    const float* last = m.decays + (CHUNK - 1) * DECAYS;
    for (int x = threadIdx.x; x < CHUNK * KEY_SIZE; x += THREADS) {
        const int j = x / KEY_SIZE, d = x % KEY_SIZE;
        Stored& key = m.keys[j * KEYS + d];
        key = E::narrow(__fmul_rn(E::widen(key), exp2_of(__fsub_rn(last[d], m.decays[j * DECAYS + d]))));
    }
    meet();
}

extern "C" __global__ void __launch_bounds__(THREADS, WARPS == 12 && KEY_SIZE <= 128 ? 2 : 1)
    delta_step_few_channels(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Shared& s = *reinterpret_cast<Shared*>(bytes);
    Few& f = s.few;
    Memory& m = f.m;
    const int head = blockIdx.y, first_column = blockIdx.x * TILE, tiles = gridDim.x;
    const i64 token = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, in_row = lane / 4, in_pair = lane % 4 * 2;
    const int columns = min(TILE, VALUE_SIZE - first_column);
    float* state = p.state + token * p.words;
    Stored* keys = reinterpret_cast<Stored*>(state + p.keys) + i64(head) * CHUNK * KEY_SIZE;
    Stored* updates =
        reinterpret_cast<Stored*>(state + p.updates) + i64(head) * CHUNK * VALUE_SIZE + first_column;
    float* decays = state + p.decays + i64(head) * CHUNK * KEY_SIZE;
    float* matrix = state + p.matrix + i64(head) * KEY_SIZE * VALUE_SIZE + first_column;

    if (warp >= COLUMN_WARPS) {
        const int part = warp - COLUMN_WARPS;
        const Stored* q = p.q + token * p.q_token + head / p.group * p.q_head;
        const Stored* k = p.k + token * p.k_token + head / p.group * p.k_head;
        const float* g = p.g + token * p.g_token + head * p.g_head;
        const int channel = min(lane * 4, KEY_SIZE - 4);
        const Stored *own_keys = computed_here(keys + part * KEY_SIZE + channel, p.state),
                     *of_keys = computed_here(keys + part * 8 * KEY_SIZE, p.state);
        const float *own_decays = computed_here(decays + part * KEY_SIZE + channel, p.state),
                    *all_decays = computed_here(decays + channel, p.state),
                    *of_decays = computed_here(decays + part * 8 * KEY_SIZE, p.state);
        // Into the L2 cache, whatever the kernel before may still write; and so all addresses are there.
        prefetch_to_l2(state), prefetch_to_l2(q + channel), prefetch_to_l2(k + channel);
        prefetch_to_l2(g + channel), prefetch_to_l2(own_keys), prefetch_to_l2(own_decays);
        prefetch_to_l2(all_decays), prefetch_to_l2(of_keys), prefetch_to_l2(of_decays);
        wait_for_kernel_before();
        let_kernel_behind_start();

        const float rows = state[0];
        u32 own[EACH][2][2];  // of the query and the key
        float gammas[EACH][4];
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const int d = (n * 32 + lane) * 4;
            if (d >= KEY_SIZE) continue;
#pragma unroll
            for (int y = 0; y < 2; ++y) {
                own[n][0][y] = *reinterpret_cast<const u32*>(q + d + 2 * y);
                own[n][1][y] = *reinterpret_cast<const u32*>(k + d + 2 * y);
            }
#pragma unroll
            for (int x = 0; x < 4; ++x) gammas[n][x] = g[d + x];
        }
        const int before = count_of(rows);
        int* marks = reinterpret_cast<int*>(state + p.marks);
        int of_head = 0;
        if (before == CHUNK) {  // who writes the count, and row 0 behind a full chunk: delta_step.cu
            take_chunk(m, keys, decays, updates, columns);
            if (part == LAST && lane == 0) {
                __threadfence();
                of_head = atomicAdd(marks + 1 + head, 1);
            }
        }
        const int i = before % CHUNK, block = i / 16 * 16;

        // All rows that there are: of the own block, two of each warp, and of those before.
        float sums[EACH][4], references[EACH][4], from[EACH][2][4];
        u32 of_rows[EACH][2][2];
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const int d = (n * 32 + lane) * 4;
            if (d >= KEY_SIZE) continue;
#pragma unroll
            for (int x = 0; x < 4; ++x) sums[n][x] = references[n][x] = 0.0f;
            const u32 first = block * KEY_SIZE;
            if (i) read(sums[n], all_decays + n * 128 + u32(i - 1) * KEY_SIZE);
#pragma unroll
            for (int y = 0; y < 2; ++y)
                if (block + part + y * 8 < i) {
                    const Stored* key = own_keys + first + (y * 8 * KEY_SIZE + n * 128);
                    const uint2 pairs = *reinterpret_cast<const uint2*>(key);
                    of_rows[n][y][0] = pairs.x, of_rows[n][y][1] = pairs.y;
                    read(from[n][y], own_decays + first + (y * 8 * KEY_SIZE + n * 128));
                }
            if (block) read(references[n], all_decays + first + (n * 128 - KEY_SIZE));
        }
        const bool has_keys = part < KEY_WARPS && part * 8 < block;
        if (has_keys) {
            copy<KEY_SIZE, SPREAD, KEY_SIZE, 8, 32>(m.decays + part * 8 * SPREAD, of_decays, 8, KEY_SIZE,
                                                    lane);
            copy<KEY_SIZE, KEYS, KEY_SIZE, 8, 32>(m.keys + part * 8 * KEYS, of_keys, 8, KEY_SIZE, lane);
        }

        // The query and the key times decays, from the chunk's start on and from its last block's.
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const int d = (n * 32 + lane) * 4;
            if (d >= KEY_SIZE) continue;
#pragma unroll
            for (int x = 0; x < 4; ++x)
                sums[n][x] =
                    __fadd_rn(needed_from_here(sums[n][x]), __fmul_rn(gammas[n][x], contract::LOG2E));
            if (part < 4) {
                const int of_key = part % 2;
                float y[4];
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float since = part < 2 ? sums[n][x] : __fsub_rn(sums[n][x], references[n][x]);
                    y[x] = __fmul_rn(of_key ? element(own[n][1], x) : element(own[n][0], x), exp2_of(since));
                }
                *reinterpret_cast<uint2*>(m.own + (SINCE_START + part) * KEYS + d) =
                    make_uint2(E::pack(y[0], y[1]), E::pack(y[2], y[3]));
            } else if (part == 4) {
                write(s.reference + d, references[n]);
            }
        }
        constexpr int OF_QUERIES = 32 * (2 + COLUMN_WARPS);
        if (part < 2) arrive_at<OF_QUERIES>(QUERIES);

        // Factors of the own block's scores.
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            const int r = part + y * 8, mine = i % 16;
            if (r > mine) continue;
#pragma unroll
            for (int n = 0; n < EACH; ++n) {
                const int d = (n * 32 + lane) * 4;
                if (d >= KEY_SIZE) continue;
                float by[4], products[2][4];
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float key = r < mine ? element(of_rows[n][y], x) : element(own[n][1], x);
                    by[x] = exp2_of(__fsub_rn(sums[n][x], r < mine ? from[n][y][x] : sums[n][x]));
#pragma unroll
                    for (int z = 0; z < 2; ++z) products[z][x] = __fmul_rn(element(own[n][z], x), key);
                }
                write(s.by[r] + d, by);
#pragma unroll
                for (int z = 0; z < 2; ++z) write(s.products[z][r] + d, products[z]);
            }
        }
        wait_for<32 * SCORE_WARPS>(FACTORS);

        if (part == CHAINS) {
            const int of_key = lane / 16, r = lane % 16;
            const float *by = s.by[r], *x = s.products[of_key][r];
            float acc = 0.0f;
#pragma unroll
            for (int d = 0; d < KEY_SIZE; d += 4) {
                float products[4], factors[4];
                read(products, x + d), read(factors, by + d);
#pragma unroll
                for (int y = 0; y < 4; ++y) acc = __fmaf_rn(products[y], factors[y], acc);
            }
            // Rows behind this one: garbage. Scores lie as a left operand has them.
            if (of_key)
                m.weights[r] = block + r < i ? acc : 0.0f;
            else
                m.scores[r % 8 / 2 * 4 + r / 8 * 2 + r % 2] = E::narrow(block + r <= i ? acc : 0.0f);
            arrive_at<32 * (1 + COLUMN_WARPS)>(OWN);
        } else if (part < KEY_WARPS) {
            if (has_keys) {
                cp_async_commit(), cp_async_wait<0>();
                __syncwarp();
                const int j = part * 8 + in_row;
                const Stored *left = m.own + (SINCE_BLOCK + in_row % 2) * KEYS, *of = m.keys + j * KEYS;
                const float* sums = m.decays + j * SPREAD;
                float acc[4] = {};
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    u32 a[4] = {}, b[2];
#pragma unroll
                    for (int y = 0; y < 2; ++y) {
                        const int d = step * 16 + y * 8 + in_pair;
                        const float2 to = *reinterpret_cast<const float2*>(s.reference + d),
                                     from = *reinterpret_cast<const float2*>(sums + d);
                        const u32 key = *reinterpret_cast<const u32*>(of + d);
                        a[2 * y] = *reinterpret_cast<const u32*>(left + d);
                        b[y] = E::pack(__fmul_rn(E::widen(u16(key)), exp2_of(__fsub_rn(to.x, from.x))),
                                       __fmul_rn(E::widen(u16(key >> 16)), exp2_of(__fsub_rn(to.y, from.y))));
                    }
                    mma_m16n8k16<TYPE == BF16>(acc, a, b);
                }
                if (in_row < 2) {
                    u32* to = reinterpret_cast<u32*>(&f.left[in_row][in_pair / 2][part / 2]);
                    to[part % 2] = in_row ? E::pack(-acc[0], -acc[1]) : E::pack(acc[0], acc[1]);
                }
            }
            arrive_at<32 * (KEY_WARPS + COLUMN_WARPS)>(EARLIER);
        } else {  // the count, and the chunk's next row
            wait_for<32 * (1 + COLUMN_WARPS)>(COUNTED);
            const int of_all = lane == 0 ? atomicAdd(marks, 1) : 0, of_last = __shfl_sync(ALL, of_head, 0);
            if (before == CHUNK ? of_last == tiles - 1 : blockIdx.x == 0) {
#pragma unroll
                for (int n = 0; n < EACH; ++n) {
                    const int d = (n * 32 + lane) * 4;
                    if (d >= KEY_SIZE) continue;
                    *reinterpret_cast<uint2*>(keys + i * KEY_SIZE + d) =
                        make_uint2(own[n][1][0], own[n][1][1]);
                    write(decays + i * KEY_SIZE + d, sums[n]);
                }
                if (lane == 0 && before == CHUNK) marks[1 + head] = 0;
            }
            if (lane == 0 && of_all == tiles * int(gridDim.y) - 1) state[0] = float(i + 1), *marks = 0;
        }
        return;
    }

    // The matrix, updates and values.
    const int of_column = warp * COLUMNS;  // the first one of the warp
    const Stored* v = p.v + token * p.v_token + head * p.v_head + first_column + of_column;
    const float* own_matrix = matrix + of_column + (u32(in_pair) * VALUE_SIZE + u32(in_row));
    const Warp w{m, matrix + of_column, own_matrix, columns - of_column, warp, lane, in_row, in_pair};
    const bool is = w.has(0);  // the warp's columns are there
    const Stored* own_updates = updates + (in_pair * VALUE_SIZE + of_column + in_row);
    Stored* own_update = computed_here(updates + of_column + in_row, p.state);
    Stored* out = computed_here(
        p.out + (token * p.heads + head) * VALUE_SIZE + first_column + of_column + in_pair, p.out);
    const float* of_beta = p.beta + token * p.beta_token + head * p.beta_head;
    constexpr int LINES = TILE / 32;  // of a row
    for (int x = threadIdx.x; x < KEY_SIZE * LINES; x += 32 * COLUMN_WARPS)
        if (const int e = x % LINES * 32; e < columns) prefetch_to_l2(matrix + x / LINES * VALUE_SIZE + e);
    if (is) prefetch_to_l2(own_matrix), prefetch_to_l2(own_updates), prefetch_to_l2(v);
    prefetch_to_l2(state), prefetch_to_l2(of_beta);
    wait_for_kernel_before();
    let_kernel_behind_start();

    const float rows = state[0];
    Wide<float> of_matrix[STEPS][4];
    Stored pairs[PAIRS][4] = {};       // of updates
    Stored values[2] = {}, value = 0;  // of the thread's results, and of its update
    const float beta = *of_beta;
    if (is) {
#pragma unroll
        for (int x = 0; x < STEPS; ++x) w.read(of_matrix[x], x * 16);
#pragma unroll
        for (int n = 0; n < 2; ++n) values[n] = v[in_pair + n];
        value = v[in_row];
#pragma unroll
        for (int n = 0; n < PAIRS; ++n)
#pragma unroll
            for (int y = 0; y < 4; ++y) pairs[n][y] = own_updates[(n * 16 + row_of(y)) * VALUE_SIZE];
    }
    __syncwarp();  // the compiler moves nothing behind it that was asked for before
    const int before = count_of(rows);
    if (before == CHUNK) {
        take_chunk(m, keys, decays, updates, columns);
        if (is) {
            w.close();
#pragma unroll
            for (int x = 0; x < STEPS; ++x) w.read(of_matrix[x], x * 16);
        }
    }
    const int i = before % CHUNK, block = i / 16 * 16;
    arrive_at<32 * (1 + COLUMN_WARPS)>(COUNTED);

    wait_for<32 * (2 + COLUMN_WARPS)>(QUERIES);
    float acc[4] = {};
    const Stored* left_row = m.own + (SINCE_START + in_row % 2) * KEYS + in_pair;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const u32* from = reinterpret_cast<const u32*>(left_row + step * 16);
        const u32 a[4] = {from[0], 0, from[4], 0};
        if (is) {
            const Wide<float>(&x)[4] = of_matrix[step];
            const u32 b[2] = {E::pack(x[0].x[0], x[1].x[0]), E::pack(x[2].x[0], x[3].x[0])};
            mma_m16n8k16<TYPE == BF16>(acc, a, b);
        }
    }
    if (in_row % 2 == 1)
#pragma unroll
        for (int y = 0; y < 2; ++y) acc[y] = __fsub_rn(E::widen(values[y]), acc[y]);
    Updates of_rows(pairs, i, block, in_row, in_pair);

    wait_for<32 * (KEY_WARPS + COLUMN_WARPS)>(EARLIER);
    if (is) {
        uint2 left[PAIRS - 1];
#pragma unroll
        for (int n = 0; n < PAIRS - 1; ++n) left[n] = f.left[in_row % 2][in_pair / 2][n];
        of_rows.add_earlier(acc, left);
        if (in_row == 1)  // so that it is there before the warp waits
            *reinterpret_cast<float2*>(m.residuals + of_column + in_pair) = make_float2(acc[0], acc[1]);
    }
    wait_for<32 * (1 + COLUMN_WARPS)>(OWN);
    if (!is) return;
    const Stored update = of_rows.solve(m.residuals[of_column + in_row], m.weights, beta);
    of_rows.add_own(acc, reinterpret_cast<const uint2*>(m.scores)[in_pair / 2], update);
    if (in_row == 0) {
        float y[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) y[n] = contract::canonical(__fmul_rn(__fadd_rn(acc[n], 0.0f), p.scale));
        *reinterpret_cast<u32*>(out) = E::pack(y[0], y[1]);
    }
    if (in_pair == 0) own_update[u32(i) * VALUE_SIZE] = update;
}

// One token for each of few sequences, by delta rules and linear attention with one decay for each head: what
// delta_step.cu has for 32 columns of values. There are too few blocks to hide anything, so what bounds it is one
// latency of memory, and the row of instructions that one warp has.
//
//   * Nothing that is read waits for anything else: not for the count of the chunk's rows either. What lies behind it
//     is garbage, and goes nowhere. And nothing is computed before all is asked for, not even two halves of a register
//     put together.
//   * Operands go straight from memory into the registers of tensor-core steps. Four warps have the columns' matrix and
//     updates, and four the keys. Each kind has code of its own, so it waits for nothing that the other one reads.
//   * There is one barrier, before the scores are read. They are rounded by then, and lie as a left operand has them.
//   * The query is row 0 of a step's left operand and the key is row 1, whatever the rule: the row's own score is the
//     query's with the key as a right operand, which has the same registers. Of updates, all rows of the left operand
//     are these two in turn, which takes no branch: nobody needs the others.
//   * A column's row is solved by the four threads that have its updates.
//
// Macros: those of delta_step.cu. TILE is 32 and WARPS 8.

#include "delta_step_few.cuh"

static_assert(TILE == 32 && WARPS == 8 && !BY_CHANNEL);
constexpr int TILES = 2;  // of keys, of a warp that has them

// Element `at` of 64, of which each lane has two.
__device__ __forceinline__ float of_both(float2 x, int at) {
    const float low = __shfl_sync(ALL, x.x, at / 2), high = __shfl_sync(ALL, x.y, at / 2);
    return at % 2 ? high : low;
}

// The sum of gammas from the chunk's start to its row i.
__device__ __forceinline__ float decay_of(float2 decays, int i, float gamma) {
    const float last = of_both(decays, max(i - 1, 0));
    return __fadd_rn(i ? last : 0.0f, gamma);
}

extern "C" __global__ void __launch_bounds__(THREADS, KEY_SIZE > 128 ? 1 : 2)
    delta_step_few(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Few& f = *reinterpret_cast<Few*>(bytes);
    Memory& m = f.m;
    const int head = blockIdx.y, first_column = blockIdx.x * TILE, tiles = gridDim.x;
    const i64 token = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, in_row = lane / 4, in_pair = lane % 4 * 2;
    const int columns = min(TILE, VALUE_SIZE - first_column);
    const bool has_columns = warp < COLUMN_WARPS;
    const int of_column = warp % COLUMN_WARPS * COLUMNS;  // the first one of the warp
    const Stored* q = p.q + token * p.q_token + head / p.group * p.q_head;
    const Stored* k = p.k + token * p.k_token + head / p.group * p.k_head;
    const Stored* v = p.v + token * p.v_token + head * p.v_head + first_column + of_column;
    float* state = p.state + token * p.words;
    Stored* keys = reinterpret_cast<Stored*>(state + p.keys) + i64(head) * CHUNK * KEY_SIZE;
    Stored* updates =
        reinterpret_cast<Stored*>(state + p.updates) + i64(head) * CHUNK * VALUE_SIZE + first_column;
    float* decays = state + p.decays + i64(head) * CHUNK;
    float* weights = state + p.row_weights + i64(head) * CHUNK;
    float* matrix = state + p.matrix + i64(head) * KEY_SIZE * VALUE_SIZE + first_column + of_column;
    const float* own_matrix = matrix + (u32(in_pair) * VALUE_SIZE + u32(in_row));
    const Warp w{m, matrix, own_matrix, columns - of_column, warp, lane, in_row, in_pair};
    const bool is = has_columns && w.has(0);  // the warp's columns are there
    const int part = warp - COLUMN_WARPS;     // of the keys

    // Of the thread: addresses are computed before the kernel before has ended.
    const Stored* own_keys = keys + (part * TILES * 8 + in_row) * KEY_SIZE + in_pair;
    const Stored* own_updates = updates + (in_pair * VALUE_SIZE + of_column + in_row);
    const i64 at = (token * p.heads + head) * VALUE_SIZE + first_column + of_column + in_pair;
    Stored* out = p.out + at;
    const float* of_beta = DELTA ? p.beta + token * p.beta_token + head * p.beta_head : nullptr;
    const float* of_g = p.g ? p.g + token * p.g_token + head * p.g_head : nullptr;

    // Into the L2 cache, whatever the kernel before may still write.
    for (int d = threadIdx.x; d < KEY_SIZE; d += THREADS) prefetch_to_l2(matrix - of_column + d * VALUE_SIZE);
    wait_for_kernel_before();
    let_kernel_behind_start();

    // All is asked for before anything waits: the query and the key, and what a head has for each row.
    float rows;  // the other warps ask for it behind their keys
    if (has_columns) rows = state[0];
    u32 own[STEPS][2] = {};
    if (in_row < 2) {
        const Stored* from = (in_row ? k : q) + in_pair;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int y = 0; y < 2; ++y)
                own[step][y] = *reinterpret_cast<const u32*>(from + step * 16 + y * 8);
    }
    const float2 of_decays = *reinterpret_cast<const float2*>(decays + 2 * lane);
    [[maybe_unused]] const float beta = DELTA ? *of_beta : 0.0f;
#ifdef DT
    using Skip = Steps::Skip;
    const Steps::Given of_step = p.steps.read(token, head);
    const Skip::Stored* d = p.steps.d;
    const i64 d_head = p.steps.d_head, d_column = p.steps.d_column;
#else
    const float g = of_g ? *of_g : 0.0f;
#if WEIGHTED
    using Skip = Element<F32>;
    const float own_weight = p.weights[token * p.weight_token + head * p.weight_head];
    const float* d = p.skip;
    const i64 d_head = p.size, d_column = 1;
#endif
#endif
#if WEIGHTED
    const float2 of_weights = *reinterpret_cast<const float2*>(weights + 2 * lane);
    Skip::Stored skip[2] = {};  // of the thread's results
    if (d && is)
#pragma unroll
        for (int n = 0; n < 2; ++n)
            skip[n] = d[head * d_head + (first_column + of_column + in_pair + n) * d_column];
#endif

    if (!has_columns) {
        u32 of_keys[TILES][STEPS][2];
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int n = 0; n < TILES; ++n)
#pragma unroll
                for (int y = 0; y < 2; ++y)
                    of_keys[n][step][y] =
                        *reinterpret_cast<const u32*>(own_keys + n * 8 * KEY_SIZE + step * 16 + y * 8);
        const int before = count_of(state[0]);
#ifdef DT
        float own_weight, g;
        p.steps.of(of_step, own_weight, g);
#endif
        const float gamma = __fmul_rn(g, contract::LOG2E);

        // Who writes the count, and row 0 behind a full chunk: delta_step.cu.
        constexpr int LAST = WARPS - 1;
        int* marks = reinterpret_cast<int*>(state + p.marks);
        int of_head = 0;
        if (before == CHUNK) {
            copy_chunk(m, keys, updates, columns);
            if (warp == LAST) {
                m.decays[2 * lane] = of_decays.x, m.decays[2 * lane + 1] = of_decays.y;
#if WEIGHTED
                m.weights[2 * lane] = of_weights.x, m.weights[2 * lane + 1] = of_weights.y;
#endif
            }
            cp_async_wait<0>();
            meet();
            if (warp == LAST && lane == 0) {
                __threadfence();
                of_head = atomicAdd(marks + 1 + head, 1);
            }
            meet();  // the weights are read
        }
        const int i = before % CHUNK;
        const float decay = decay_of(of_decays, i, gamma);
        float chains[TILES][4] = {}, since[TILES][2];
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const int j = (part * TILES + n) * 8 + in_pair;
            since[n][0] = exp2_of(__fsub_rn(decay, __shfl_sync(ALL, of_decays.x, j / 2)));
            since[n][1] = exp2_of(__fsub_rn(decay, __shfl_sync(ALL, of_decays.y, j / 2)));
        }
        if (part == 0) {  // the score of the row's own key
            float mine[4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const u32 a[4] = {own[step][0], 0, own[step][1], 0};
                mma_m16n8k16<TYPE == BF16>(mine, a, own[step]);  // column 1
            }
            float score = __fmul_rn(mine[1], exp2_of(__fsub_rn(decay, decay)));
#if WEIGHTED
            score = __fmul_rn(score, own_weight);
#endif
            if (lane == 0) m.scores[0] = E::narrow(score);
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const u32 a[4] = {own[step][0], 0, own[step][1], 0};
#pragma unroll
            for (int n = 0; n < TILES; ++n) mma_m16n8k16<TYPE == BF16>(chains[n], a, of_keys[n][step]);
        }
        uint2 both = {};
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const int j = (part * TILES + n) * 8 + in_pair;
            float c[2];
#pragma unroll
            for (int y = 0; y < 2; ++y) {
                c[y] = __fmul_rn(chains[n][y], since[n][y]);
#if WEIGHTED
                c[y] = __fmul_rn(c[y], __shfl_sync(ALL, y ? of_weights.y : of_weights.x, j / 2));
#endif
                if (j + y >= i) c[y] = 0.0f;
            }
            if (DELTA && in_row == 1) *reinterpret_cast<float2*>(m.weights + j) = make_float2(c[0], c[1]);
            (n ? both.y : both.x) = DELTA && in_row == 1 ? E::pack(-c[0], -c[1]) : E::pack(c[0], c[1]);
        }
        if (in_row < 1 + DELTA) f.left[in_row][in_pair / 2][part] = both;
        meet();  // and all warps have used the count
        if (warp != LAST) return;
        const int of_all = lane == 0 ? atomicAdd(marks, 1) : 0, of_last = __shfl_sync(ALL, of_head, 0);
        if (before == CHUNK ? of_last == tiles - 1 : blockIdx.x == 0) {
            if (in_row == 1)
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
#pragma unroll
                    for (int y = 0; y < 2; ++y)
                        *reinterpret_cast<u32*>(keys + i * KEY_SIZE + step * 16 + y * 8 + in_pair) =
                            own[step][y];
            if (lane == 0) decays[i] = decay;
#if WEIGHTED
            if (lane == 0) weights[i] = own_weight;
#endif
            if (lane == 0 && before == CHUNK) marks[1 + head] = 0;
        }
        if (lane == 0 && of_all == tiles * int(gridDim.y) - 1) state[0] = float(i + 1), *marks = 0;
        return;
    }

    // The matrix, updates and values.
    Wide<float> of_matrix[STEPS][4];
    Stored pairs[PAIRS][4] = {};       // of updates
    Stored values[2] = {}, value = 0;  // of the thread's results, and of its update
    Stored* own_update = updates + of_column + in_row;
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
    const int before = count_of(rows);
#ifdef DT
    float own_weight, g;
    p.steps.of(of_step, own_weight, g);
#endif
    const float gamma = __fmul_rn(g, contract::LOG2E);
    if (before == CHUNK) {
        copy_chunk(m, keys, updates, columns);
        cp_async_wait<0>();
        meet();
        if (is) {
            w.close();
#pragma unroll
            for (int x = 0; x < STEPS; ++x) w.read(of_matrix[x], x * 16);
        }
        meet();  // the weights are read
    }
    const int i = before % CHUNK, block = i / 16 * 16;
    const float decay = decay_of(of_decays, i, gamma);

    // Products with the matrix.
    float acc[4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const u32 a[4] = {own[step][0], 0, own[step][1], 0};
        if (is) {
            const Wide<float>(&s)[4] = of_matrix[step];
            const u32 b[2] = {E::pack(s[0].x[0], s[1].x[0]), E::pack(s[2].x[0], s[3].x[0])};
            mma_m16n8k16<TYPE == BF16>(acc, a, b);
        }
    }
    const float since = exp2_of(decay);
#pragma unroll
    for (int y = 0; y < 2; ++y) {
        acc[y] = __fmul_rn(acc[y], since);
        if (DELTA && in_row % 2 == 1) acc[y] = __fsub_rn(E::widen(values[y]), acc[y]);
    }
    Updates of_rows(pairs, i, block, in_row, in_pair);
    meet();
    if (!is) return;
    const uint2* from = f.left[DELTA ? in_row % 2 : 0][in_pair / 2];
    const u32 score = u32(m.scores[0]) << i % 2 * 16;
    uint2 left[PAIRS - 1];
#pragma unroll
    for (int n = 0; n < PAIRS - 1; ++n) left[n] = from[n];
    const uint2 last = from[block / 16];
    of_rows.add_earlier(acc, left);
    // The four threads of a column have its update.
    Stored update = value;
    if constexpr (DELTA) {
        const float z0 = __shfl_sync(ALL, acc[0], 4 + in_row / 2),
                    z1 = __shfl_sync(ALL, acc[1], 4 + in_row / 2);
        update = of_rows.solve(in_row % 2 ? z1 : z0, m.weights + block, beta);
    }
    if (in_pair == 0) own_update[i * VALUE_SIZE] = update;
    of_rows.add_own(acc, make_uint2(last.x | (score & of_rows.low), last.y | (score & of_rows.high)), update);

    if (in_row == 0) {
        float y[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            y[n] = __fmul_rn(__fadd_rn(acc[n], 0.0f), p.scale);
#if WEIGHTED
            if (d) y[n] = with_skip(y[n], Skip::widen(skip[n]), values[n]);
#endif
            y[n] = contract::canonical(y[n]);
        }
#if WEIGHTED
        if (p.wide)
            *reinterpret_cast<float2*>(reinterpret_cast<float*>(p.out) + at) = make_float2(y[0], y[1]);
        else
#endif
            *reinterpret_cast<u32*>(out) = E::pack(y[0], y[1]);
    }
}

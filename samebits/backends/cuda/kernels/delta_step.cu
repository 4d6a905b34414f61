// One token for each sequence, by delta rules and linear attention: docs/contract.md, "Recurrent layers". The same as
// delta.cu, for whole rows of 16-bit types under TENSOR_CORE.
//
// A block takes TILE columns of one head's values in one sequence, and each of its warps as many of them. What bounds it
// is the matrix, which is read once: straight into registers, AHEAD steps before it is needed.
//
//   * The query is row 0 of a step's left operand and the key is row 1, so both are multiplied with what was read.
//     The other rows are zeros.
//   * A column of the right operand may be any of the values': a step's order is along k alone. Column n of a warp's
//     tile x is its column WIDE * n + x, so a thread reads WIDE neighbours at once.
//   * Keys and updates of the open chunk are copied to shared memory meanwhile. Warps share the scores. From there on
//     each warp has columns of its own, and waits for no other.
//   * Tiles of 32 columns are for few sequences, whose time is that of one block. All of the matrix is on its way at
//     once there, and its products and the scores, chains that need the same left operand, run side by side.
//
// With a decay for each channel, the decays of the open chunk's rows are copied, too. The token's query and key are
// multiplied by theirs first: for the matrix, and for the keys of earlier blocks. Six warps have the scores of eight
// earlier keys each, and two those of the row's own block, a chain for each pair of lanes.
//
// A state whose chunk is full gets the matrix at the chunk's end first: once in 64 tokens.
//
// Macros
//   TYPE           BF16 or F16, of q, k and v
//   KEY_SIZE       of q and k, a multiple of 16
//   VALUE_SIZE     of v, a multiple of 8
//   TILE           columns of a block: 32, 64 or 128; BY_CHANNEL 64 or 128
//   WARPS          4; BY_CHANNEL 8
//   HARDWARE_EXP2  1: the instruction; 0: the polynomial
//   DELTA          1: with the delta rule; 0: updates are values
//   BY_CHANNEL     1: a decay for each channel of a key, with the delta rule
//   WEIGHTED       1: rows have weights, without the delta rule
//   DT, BIAS, SKIP, SOFTPLUS  with them weights, decays and D are computed: include/ssd_steps.cuh
//
// Pairs of q and k lie at multiples of 4 bytes, states and results at multiples of 16.

#include "delta_step.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) delta_step(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int head = blockIdx.y, first_column = blockIdx.x * TILE, tiles = gridDim.x;
    const i64 token = blockIdx.z;  // the only one of its sequence
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, in_row = lane / 4, in_pair = lane % 4 * 2;
    const int columns = min(TILE, VALUE_SIZE - first_column);
    const Stored* q = p.q + token * p.q_token + head / p.group * p.q_head;
    const Stored* k = p.k + token * p.k_token + head / p.group * p.k_head;
    const Stored* v = p.v + token * p.v_token + head * p.v_head + first_column;
    float* state = p.state + token * p.words;
    Stored* keys = reinterpret_cast<Stored*>(state + p.keys) + i64(head) * CHUNK * KEY_SIZE;
    Stored* updates =
        reinterpret_cast<Stored*>(state + p.updates) + i64(head) * CHUNK * VALUE_SIZE + first_column;
    float* decays = state + p.decays + i64(head) * CHUNK * (BY_CHANNEL ? KEY_SIZE : 1);
    float* matrix = state + p.matrix + i64(head) * KEY_SIZE * VALUE_SIZE + first_column + warp * COLUMNS;
    // Unsigned, so that the compiler keeps one address for all rows.
    const float* own_matrix = matrix + (u32(in_pair) * VALUE_SIZE + u32(in_row) * WIDE);
    const Warp w{m, matrix, own_matrix, columns - warp * COLUMNS, warp, lane, in_row, in_pair};

    if constexpr (AT_ONCE) {  // into the L2 cache, whatever the kernel before may still write
        const float* of_block = matrix - warp * COLUMNS;
        for (int d = threadIdx.x; d < KEY_SIZE; d += THREADS) prefetch_to_l2(of_block + d * VALUE_SIZE);
    }
    wait_for_kernel_before();
    let_kernel_behind_start();
    // Whatever is needed at once is asked for at once, and waited for only after that.
    const float rows = state[0];
    Wide<float> ring[AHEAD][4];
#pragma unroll
    for (int x = 0; x < AHEAD; ++x) w.read(ring[x], x * 16);
    const int before = min(max(int(rows), 0), CHUNK);
#if BY_CHANNEL
    constexpr int CHANNELS = (KEY_SIZE + THREADS - 1) / THREADS;  // of a thread
    float gammas[CHANNELS];
#pragma unroll
    for (int n = 0; n < CHANNELS; ++n) {
        const int d = n * THREADS + threadIdx.x;
        if (d < KEY_SIZE)
            gammas[n] = __fmul_rn(p.g[token * p.g_token + head * p.g_head + d], contract::LOG2E);
    }
#else
#ifdef DT
    float own_weight, g;
    p.steps.of(token, head, own_weight, g);
    const float gamma = __fmul_rn(g, contract::LOG2E);
#else
    const float gamma = p.g ? __fmul_rn(p.g[token * p.g_token + head * p.g_head], contract::LOG2E) : 0.0f;
#endif
#endif
    [[maybe_unused]] const float beta = DELTA ? p.beta[token * p.beta_token + head * p.beta_head] : 0.0f;
    constexpr int OWN = (KEY_SIZE + THREADS - 1) / THREADS;  // pairs of a thread, of the query and the key
    u32 pairs[OWN];
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
        const int x = n * THREADS + threadIdx.x, of_key = x >= KEY_SIZE / 2;
        if (x < KEY_SIZE)
            pairs[n] = reinterpret_cast<const u32*>(of_key ? k : q)[x - of_key * (KEY_SIZE / 2)];
    }
    const Stored value = threadIdx.x < columns ? v[threadIdx.x] : E::narrow(0.0f);
#if !BY_CHANNEL
    const float of_row = threadIdx.x < CHUNK ? decays[threadIdx.x] : 0.0f;  // garbage from `before` on
#endif
#if WEIGHTED
    float* weights = state + p.row_weights + i64(head) * CHUNK;
#ifdef DT
    const bool skips = p.steps.d;
    const auto skip_of = [&](int e) { return p.steps.skip(head, first_column + e); };
#else
    const float own_weight = p.weights[token * p.weight_token + head * p.weight_head];
    const bool skips = p.skip;
    const auto skip_of = [&](int e) { return p.skip[head * p.size + first_column + e]; };
#endif
    float skip[2 * WIDE] = {};  // of the thread's results
    if (AT_ONCE && skips && in_row == 0 && w.has(in_pair))
#pragma unroll
        for (int n = 0; n < 2 * WIDE; ++n) skip[n] = skip_of(warp * COLUMNS + in_pair * WIDE + n);
    const float row_weight = threadIdx.x < CHUNK ? weights[threadIdx.x] : 0.0f;
#endif

    // Keys, and updates of whole blocks: zeros where there are no rows.
#if BY_CHANNEL
    __syncwarp();  // the compiler moves nothing behind it that was asked for before
    copy<KEY_SIZE, DECAYS, KEY_SIZE>(m.decays, decays, before);
    copy<KEY_SIZE, KEYS, KEY_SIZE>(m.keys, keys, before);
    copy<TILE, LINE, VALUE_SIZE>(m.updates, updates, before, columns);
#else
#pragma unroll
    for (int n = 0; n < CHUNK * (KEY_SIZE / PER); n += THREADS) {
        const int x = n + threadIdx.x, j = x / (KEY_SIZE / PER), d = x % (KEY_SIZE / PER) * PER;
        if (j < before) cp_async_16(shared_address(m.keys + j * KEYS + d), keys + j * KEY_SIZE + d);
    }
    const int held = min(before / 16 * 16 + 16, CHUNK);
#pragma unroll
    for (int n = 0; n < CHUNK * (TILE / PER); n += THREADS) {
        const int x = n + threadIdx.x, j = x / (TILE / PER), e = x % (TILE / PER) * PER;
        const bool given = j < before && e < columns;
        if (j < held)
            cp_async_16(shared_address(m.updates + j * LINE + e), updates + (given ? j * VALUE_SIZE + e : 0),
                        given ? 16 : 0);
    }
#endif
    cp_async_commit();
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
        const int x = n * THREADS + threadIdx.x, of_key = x >= KEY_SIZE / 2;
        if (x < KEY_SIZE)
            reinterpret_cast<u32*>(m.own + of_key * KEYS)[x - of_key * (KEY_SIZE / 2)] = pairs[n];
    }
    if (threadIdx.x < TILE) m.values[threadIdx.x] = value;
#if !BY_CHANNEL
    if (threadIdx.x < CHUNK) m.decays[threadIdx.x] = of_row;
#endif
#if WEIGHTED
    if (threadIdx.x < CHUNK) m.weights[threadIdx.x] = row_weight;
#endif
    if constexpr (AT_ONCE || BY_CHANNEL) cp_async_wait<0>();
    __syncthreads();

    // Blocks of a sequence share its count of rows, and those of a head its row 0 if that was a full chunk's: the last
    // that has read them writes them. Each thread of this block has used the count, so it has it.
    constexpr int LAST = WARPS - 1;  // the warp that has least to do
    int* marks = reinterpret_cast<int*>(state + p.marks);
    [[maybe_unused]] int of_all = 0, of_head = 0;  // blocks that came before
    if (warp == LAST && lane == 0) of_all = atomicAdd(marks, 1);
    if (before == CHUNK) {
        cp_async_wait<0>();
        __syncthreads();
        if (warp == LAST && lane == 0) {
            __threadfence();
            of_head = atomicAdd(marks + 1 + head, 1);
        }
#if BY_CHANNEL
        for (int x = threadIdx.x; x < CHUNK * KEY_SIZE; x += THREADS) {
            const int j = x / KEY_SIZE, d = x % KEY_SIZE;
            const float last = m.decays[(CHUNK - 1) * DECAYS + d];
            Stored& key = m.keys[j * KEYS + d];
            key = E::narrow(__fmul_rn(E::widen(key), exp2_of(__fsub_rn(last, m.decays[j * DECAYS + d]))));
        }
        __syncthreads();
        w.close();
        __syncthreads();
#else
        w.close();
#endif
#pragma unroll
        for (int x = 0; x < AHEAD; ++x) w.read(ring[x], x * 16);
    }
    const int i = before % CHUNK, block = i / 16 * 16;
#if BY_CHANNEL
#pragma unroll
    for (int n = 0; n < CHANNELS; ++n) {
        const int d = n * THREADS + threadIdx.x;
        if (d >= KEY_SIZE) continue;
        // G of the token, and less that of its block.
        const float sum = __fadd_rn(i ? m.decays[(i - 1) * DECAYS + d] : 0.0f, gammas[n]);
        const float since_block = block ? __fsub_rn(sum, m.decays[(block - 1) * DECAYS + d]) : 0.0f;
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            const float y = E::widen(m.own[(PLAIN + x) * KEYS + d]);
            m.own[(SINCE_START + x) * KEYS + d] = E::narrow(__fmul_rn(y, exp2_of(sum)));
            m.own[(SINCE_BLOCK + x) * KEYS + d] = E::narrow(__fmul_rn(y, exp2_of(since_block)));
        }
        m.keys[i * KEYS + d] = m.own[(PLAIN + 1) * KEYS + d], m.decays[i * DECAYS + d] = sum;
    }
    __syncthreads();
#else
    const float decay = __fadd_rn(i ? m.decays[i - 1] : 0.0f, gamma);
#endif

    // Products of both with the matrix.
    const auto own = [&](Own which, int d, u32(&a)[4]) {
        a[0] = a[1] = a[2] = a[3] = 0;
        if (in_row < 1 + DELTA) {
            const u32* from = reinterpret_cast<const u32*>(m.own + (which + in_row) * KEYS + d + in_pair);
            a[0] = from[0], a[2] = from[4];
        }
    };
    float acc[WIDE][4] = {};
    const auto multiply = [&](int step, const u32(&a)[4]) {
        Wide<float>(&s)[4] = ring[step % AHEAD];
#pragma unroll
        for (int x = 0; x < WIDE; ++x) {
            const u32 b[2] = {E::pack(s[0].x[x], s[1].x[x]), E::pack(s[2].x[x], s[3].x[x])};
            mma_m16n8k16<TYPE == BF16>(acc[x], a, b);
        }
        if (step + AHEAD < STEPS) w.read(s, (step + AHEAD) * 16);
    };
    if constexpr (!AT_ONCE) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 a[4];
            own(SINCE_START, step * 16, a);
            multiply(step, a);
        }
        if constexpr (!BY_CHANNEL) {
            cp_async_wait<0>();
            __syncthreads();
        }
    }
    u32 earlier[CHUNK / 16 - 1][WIDE][2];  // blocks of updates; garbage where there are none
    if constexpr (AT_ONCE)
#pragma unroll
        for (int n = 0; n < CHUNK / 16 - 1; ++n) w.read(earlier[n], n * 16);

    // Scores, and weights of updates.
#if BY_CHANNEL
    if (warp >= 6) {
        // The query's chains, or the key's. Of each eight channels a lane has four products and decays, and the lane 16
        // further the others.
        const bool of = warp == 6;  // the key
        const int j = block + lane % 16, half = lane / 16 * 4;
        const Stored *x = m.own + (PLAIN + of) * KEYS + half, *key = m.keys + j * KEYS + half;
        const float *sum = m.decays + i * DECAYS + half, *before_it = m.decays + j * DECAYS + half;
        float acc = 0.0f;
#pragma unroll 4
        for (int d = 0; d < KEY_SIZE; d += 8) {
            const uint2 a = *reinterpret_cast<const uint2*>(x + d);
            const uint2 b = *reinterpret_cast<const uint2*>(key + d);
            const float4 to = *reinterpret_cast<const float4*>(sum + d);
            const float4 from = *reinterpret_cast<const float4*>(before_it + d);
            const float product[4] = {__fmul_rn(E::widen(u16(a.x)), E::widen(u16(b.x))),
                                      __fmul_rn(E::widen(u16(a.x >> 16)), E::widen(u16(b.x >> 16))),
                                      __fmul_rn(E::widen(u16(a.y)), E::widen(u16(b.y))),
                                      __fmul_rn(E::widen(u16(a.y >> 16)), E::widen(u16(b.y >> 16)))};
            const float by[4] = {exp2_of(__fsub_rn(to.x, from.x)), exp2_of(__fsub_rn(to.y, from.y)),
                                 exp2_of(__fsub_rn(to.z, from.z)), exp2_of(__fsub_rn(to.w, from.w))};
            float others[4], by_others[4];
#pragma unroll
            for (int y = 0; y < 4; ++y) {
                others[y] = __shfl_xor_sync(0xFFFFFFFF, product[y], 16);
                by_others[y] = __shfl_xor_sync(0xFFFFFFFF, by[y], 16);
            }
#pragma unroll
            for (int y = 0; y < 4; ++y) acc = __fmaf_rn(product[y], by[y], acc);
#pragma unroll
            for (int y = 0; y < 4; ++y) acc = __fmaf_rn(others[y], by_others[y], acc);
        }
        if (lane < 16) {  // rows behind this one: garbage
            if (of)
                m.weights[j] = j < i ? acc : 0.0f;
            else
                m.scores[j] = E::narrow(j <= i ? acc : 0.0f);
        }
    } else if (const int j = warp * 8; j < block) {
        const float* reference = m.decays + (block - 1) * DECAYS;
        float c[4] = {};
#pragma unroll 4
        for (int d = in_pair; d < KEY_SIZE; d += 16) {
            u32 a[4], b[2];
            own(SINCE_BLOCK, d - in_pair, a);
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                const int at = d + x * 8;
                const float2 sum = *reinterpret_cast<const float2*>(m.decays + (j + in_row) * DECAYS + at);
                const float2 from = *reinterpret_cast<const float2*>(reference + at);
                const u32 key = *reinterpret_cast<const u32*>(m.keys + (j + in_row) * KEYS + at);
                b[x] = E::pack(__fmul_rn(E::widen(u16(key)), exp2_of(__fsub_rn(from.x, sum.x))),
                               __fmul_rn(E::widen(u16(key >> 16)), exp2_of(__fsub_rn(from.y, sum.y))));
            }
            mma_m16n8k16<TYPE == BF16>(c, a, b);
        }
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            if (in_row == 0) m.scores[j + in_pair + y] = E::narrow(c[y]);
            if (in_row == 1) m.weights[j + in_pair + y] = c[y];
        }
    }
#else
    // Of all keys, so that chains run side by side: what is read where there are none goes nowhere.
    float chains[KEY_TILES][4] = {};
    const Stored* from[KEY_TILES];
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
        const int j = (n * WARPS + warp) * 8 + in_row;
        from[n] = (j == i ? m.own + KEYS : m.keys + j * KEYS) + in_pair;
    }
    constexpr int UNROLLED = AT_ONCE ? STEPS : 2;
#pragma unroll UNROLLED
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
        own(PLAIN, step * 16, a);
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
            const u32* pairs = reinterpret_cast<const u32*>(from[n] + step * 16);
            const u32 b[2] = {pairs[0], pairs[4]};
            mma_m16n8k16<TYPE == BF16>(chains[n], a, b);
        }
        if constexpr (AT_ONCE) multiply(step, a);
    }
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
        const int j = (n * WARPS + warp) * 8;
        const float (&c)[4] = chains[n];
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            const int of = j + in_pair + y;
            const float weight = of <= i ? exp2_of(__fsub_rn(decay, of == i ? decay : m.decays[of])) : 0.0f;
#if WEIGHTED
            const float score = __fmul_rn(__fmul_rn(c[y], weight), of == i ? own_weight : m.weights[of]);
#else
            const float score = __fmul_rn(c[y], weight);
#endif
            if (in_row == 0) m.scores[of] = E::narrow(of <= i ? score : 0.0f);
            if (!WEIGHTED && in_row == 1) m.weights[of] = of < i ? __fmul_rn(c[y], weight) : 0.0f;
        }
    }
#endif
    __syncthreads();

    // From what was read of the matrix, by the updates of earlier blocks.
#if BY_CHANNEL
    constexpr float since = 1.0f;  // the query and the key have it
#else
    const float since = exp2_of(decay);
#endif
#pragma unroll
    for (int x = 0; x < WIDE; ++x)
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            acc[x][y] = __fmul_rn(acc[x][y], since);
            if (in_row == 1)
                acc[x][y] =
                    __fsub_rn(E::widen(m.values[warp * COLUMNS + (in_pair + y) * WIDE + x]), acc[x][y]);
        }
#pragma unroll
    for (int n = 0; n < CHUNK / 16 - 1; ++n)
        if (n * 16 < block) {
            if constexpr (!AT_ONCE) w.read(earlier[n], n * 16);
            w.add(acc, earlier[n], n * 16, DELTA);
        }

    // A thread for each column has its own block's, and the update.
    if constexpr (DELTA) {
        if (in_row == 1) {
#pragma unroll
            for (int x = 0; x < WIDE; ++x)
#pragma unroll
                for (int y = 0; y < 2; ++y)
                    m.residuals[warp * COLUMNS + (in_pair + y) * WIDE + x] = acc[x][y];
        }
        __syncwarp();
    }
    if (lane < COLUMNS) {
        const int e = warp * COLUMNS + lane;
        Stored update = m.values[e];
        if constexpr (DELTA) {
            float z = m.residuals[e];
#pragma unroll
            for (int j = 0; j < 15; ++j)  // from i on there are zeros
                z = __fmaf_rn(-m.weights[block + j], E::widen(m.updates[(block + j) * LINE + e]), z);
            update = E::narrow(__fmul_rn(beta, z));
        }
        m.updates[i * LINE + e] = update;
        if (e < columns) updates[i * VALUE_SIZE + e] = update;
    }
    __syncwarp();
    u32 of_block[WIDE][2];
    w.read(of_block, block);
    w.add(acc, of_block, block, false);

    if (in_row == 0 && w.has(in_pair)) {
        const int e = warp * COLUMNS + in_pair * WIDE;
        const i64 at = (token * p.heads + head) * VALUE_SIZE + first_column + e;
        float y[2 * WIDE];
#pragma unroll
        for (int n = 0; n < 2 * WIDE; ++n) {
            y[n] = __fmul_rn(__fadd_rn(acc[n % WIDE][n / WIDE], 0.0f), p.scale);
#if WEIGHTED
            if (skips) y[n] = with_skip(y[n], AT_ONCE ? skip[n] : skip_of(e + n), m.values[e + n]);
#endif
            y[n] = contract::canonical(y[n]);
        }
#if WEIGHTED
        if (p.wide) {
            Wide<float>* out = reinterpret_cast<Wide<float>*>(reinterpret_cast<float*>(p.out) + at);
#pragma unroll
            for (int n = 0; n < 2 * WIDE; ++n) out[n / WIDE].x[n % WIDE] = y[n];
        } else
#endif
        {
            Wide<u32> results;
#pragma unroll
            for (int n = 0; n < WIDE; ++n) results.x[n] = E::pack(y[2 * n], y[2 * n + 1]);
            *reinterpret_cast<Wide<u32>*>(p.out + at) = results;
        }
    }

    if (warp == LAST) {
        const int of_last = __shfl_sync(0xFFFFFFFF, of_head, 0);
        if (before == CHUNK ? of_last == tiles - 1 : blockIdx.x == 0) {
            for (int d = lane * 2; d < KEY_SIZE; d += 64)
                *reinterpret_cast<u32*>(keys + i * KEY_SIZE + d) =
                    *reinterpret_cast<const u32*>(m.own + KEYS + d);
#if BY_CHANNEL
            for (int d = lane; d < KEY_SIZE; d += 32) decays[i * KEY_SIZE + d] = m.decays[i * DECAYS + d];
#else
            if (lane == 0) decays[i] = decay;
#endif
#if WEIGHTED
            if (lane == 0) weights[i] = own_weight;
#endif
            if (lane == 0 && before == CHUNK) marks[1 + head] = 0;
        }
        if (lane == 0 && of_all == tiles * int(gridDim.y) - 1) state[0] = float(i + 1), *marks = 0;
    }
}

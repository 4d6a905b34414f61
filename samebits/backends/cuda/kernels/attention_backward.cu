// Attention, backward, for everything that docs/contract.md, "Attention", allows but pages.
//
//   grad_keys      dK and dV: a block has 16 WARPS keys of a head of k, and goes over the queries that see
//                  them, of one head of the group after another
//   grad_queries   dQ and the mask's gradient: a block has a tile of rows as the forward has, and goes over
//                  their keys
//
// Scores and their gradients are computed in both passes, so neither waits for the other, and each sum has one
// owner. Warps have 16 rows each (of keys, or of queries), and share what comes in through a ring of cp.async
// stages of STEP lines: q and g, or k and v. D is what attention_dots.cu left. Where rows are long, PARTS warps have
// the same 16 rows: each has some columns of the result, and computes what it is multiplied by for some lines of a
// stage, for all of them.
//
// With a mask, attention_mask.cu has found the queries of the chains of dK and dV, and dQ takes rows in runs, as
// the forward does.
//
// Macros, and those of attention.cuh
//   PARTS        warps that share 16 rows: 1 or 2
//   STEP         lines of a stage: 16 or 32
//   STAGES       of the ring, 2 or more
//   MIN_BLOCKS   blocks that shall fit on one multiprocessor
//   GRADS        what is compiled: 1: dK; 2: dV; 3: both, where there are registers for that; 4: dQ
//   GRAD_MASK    1: the mask's gradient is wanted

#include "attention.cuh"

#if !defined(GRADS) || !defined(GRAD_MASK)
#error "GRADS and GRAD_MASK are needed: #if takes a missing macro for 0"
#endif

constexpr int ROW_WARPS = WARPS / PARTS, ROWS = 16 * ROW_WARPS;
constexpr bool EXCHANGES = STEP >= 16 * PARTS && PARTS > 1;  // else each part computes all of a stage
constexpr int OWN_STEP = EXCHANGES ? STEP / PARTS : STEP;    // lines of a stage that a warp computes
constexpr int COLUMNS = STEP / 8, OWN_COLUMNS = OWN_STEP / 8;
constexpr int HEAD_PART = HEAD / PARTS, VALUES_PART = VALUES / PARTS;  // columns of results that a warp has
static_assert(HEAD_PART % 16 == 0 && VALUES_PART % 16 == 0 && (PARTS == 1 || GRADS != 3));

using KeyTile = Tile<ROWS, HEAD>;  // of what a block keeps: k and v, or q and g
using ValueTile = Tile<ROWS, VALUES>;
using KeyStage = Tile<STEP, HEAD>;  // of what passes by: q and g, or k and v
using ValueStage = Tile<STEP, VALUES>;
constexpr int STAGE_BYTES = KeyStage::BYTES + ValueStage::BYTES;

struct Params {
    const Stored *q, *k, *v, *g;
    const float *lse2, *dots;
    Stored *dq, *dk, *dv;
    float* dmask;  // [batch, heads of q, queries, keys]
    Strides q_strides, k_strides, v_strides, g_strides, dq_strides, dk_strides, dv_strides;
    i64 lse_batch, lse_head;  // of `dots` too
    int tiles;                // of a sequence, if not packed
    int unused;
    Problem x;
#if MASK != NONE
    Rows rows;
    const int *order, *groups;  // [batch, heads of rows, queries + 1, 16] and [batch, heads of rows]
#endif
};

// Where a row of one of the tensors begins.
__device__ __forceinline__ i64 row_at(const Strides& s, int token, int head) {
    return token * s.token + head * s.head;
}

// The first key of a sequence, in k or v.
__device__ __forceinline__ const Stored* keys_of(const Stored* x, const Strides& strides, const Sequence& s,
                                                 int head) {
    return x + s.batch_of_k * strides.batch + row_at(strides, s.first_key, head);
}

__device__ __forceinline__ i64 lse_at(const Params& p, const Sequence& s, int query, int head) {
    return s.batch_of_q * p.lse_batch + head * p.lse_head + s.first_query + query;
}

// The probability of a pair, and the gradient of its score, from the products q k^T and g v^T.
struct Pair {
    float probability, grad;

    // `lse2` and `dot` of the query; `mask` the place of the mask's entry, `shown` whether it is known to show
    // the key; `dmask` the place of its gradient.
    __device__ __forceinline__ Pair(const Params& p, float product, float grad_product, float lse2, float dot,
                                    bool visible, i64 mask, bool shown, i64 dmask) {
        const float a = SOFTCAP ? scores::tanh(__fmul_rn(product, p.x.cap)) : product;
        float bias = 0.0f;
        bool counts = visible;
        if constexpr (FLOAT_MASK) {
            if (counts) bias = bias_at(p.x, mask);
            counts = counts && !(bias <= HIDES);
        } else if constexpr (MASKED) {
            counts = counts && (shown || shows(p.x, mask));
        }
        counts = counts && a != -INF && lse2 != -INF;
        const float shift = FLOAT_MASK ? __fsub_rn(bias, lse2) : -lse2;
        probability = counts ? scores::exp2(__fmaf_rn(a, p.x.c, shift)) : 0.0f;
        grad = counts ? __fmul_rn(probability, __fsub_rn(grad_product, dot)) : 0.0f;
        if (GRAD_MASK && visible) p.dmask[dmask] = contract::canonical(grad);
        if (SOFTCAP && counts) grad = __fmul_rn(grad, __fmaf_rn(-a, a, 1.0f));
    }
};

// From weights of a part's own lines to those of all lines of a stage. `row`: this thread's first one in the tile.
using Weights = float[COLUMNS][4];
struct Exchange {
    float weights[EXCHANGES ? ROWS : 1][STEP + 8];  // eight more: half a warp writes to all banks

    __device__ __forceinline__ void share(Weights& w, int row, int part) {
        if constexpr (EXCHANGES) {
            const int column = threadIdx.x % 4 * 2;
#pragma unroll
            for (int u = 0; u < OWN_COLUMNS; ++u)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *reinterpret_cast<float2*>(&weights[row + 8 * h][part * OWN_STEP + u * 8 + column]) =
                        make_float2(w[u][2 * h], w[u][2 * h + 1]);
            __syncthreads();
#pragma unroll
            for (int u = 0; u < COLUMNS; ++u)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float2 both =
                        *reinterpret_cast<const float2*>(&weights[row + 8 * h][u * 8 + column]);
                    w[u][2 * h] = both.x, w[u][2 * h + 1] = both.y;
                }
        }
    }
};

// Which 16 rows of a tile a warp has, and which of the PARTS it is.
__device__ __forceinline__ int row_warp() { return threadIdx.x / 32 % ROW_WARPS; }
__device__ __forceinline__ int part_of_warp() { return PARTS > 1 ? threadIdx.x / 32 / ROW_WARPS : 0; }

__device__ __forceinline__ void copy_float(float* to, const float* from) {
#if __CUDA_ARCH__ >= 800
    cp_async_4(shared_address(to), from);
#else
    *to = *from;
#endif
}

#if GRADS & 3
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
    grad_keys(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ float row_values[STAGES][2][STEP];  // lse2 and D of the queries of a stage
    __shared__ Exchange exchange;
    const Problem& x = p.x;
    const int warp = row_warp(), part = part_of_warp(), lane = threadIdx.x % 32;

    const int head = blockIdx.x % x.heads, index = blockIdx.x / x.heads;
    const Place place = x.cu_k ? place_in_packed(x.cu_k, x.batch, x.keys, 1, ROWS, index)
                               : Place{index % x.batch, index / x.batch};
    if (place.batch < 0) return;
    const Sequence sequence(x, place.batch);
    const int first_key = place.tile * ROWS;
    if (first_key >= sequence.keys) return;
    const int last_key = min(first_key + ROWS, sequence.keys) - 1;

#if MASK == NONE
    // Queries are taken by their positions: groups of 16 begin at multiples of 16 of those.
    int begin = sequence.offset, end = sequence.offset + sequence.queries;
    if (x.window_right >= 0) begin = max(begin, first_key - x.window_right);
    if (x.window_left >= 0) end = min(end, last_key + x.window_left + 1);
    begin &= ~15;
    const auto steps_of = [&](int member) { return max(0, (end - begin + STEP - 1) / STEP); };
#else
    __shared__ int found_queries[STAGES][STEP];  // of a stage, or -1
    const auto chain_of = [&](int member) {
        return sequence.batch * p.rows.heads + (p.rows.heads > 1 ? head * x.group + member : 0);
    };
    const auto steps_of = [&](int member) { return (p.groups[chain_of(member)] * 16 + STEP - 1) / STEP; };
#endif
    int all_steps = 0;
    for (int member = 0; member < x.group; ++member) all_steps += steps_of(member);

    const u32 k_tile = shared_address(memory), v_tile = k_tile + KeyTile::BYTES;
    Ring<STAGES, STAGE_BYTES> ring{v_tile + ValueTile::BYTES};

    const Stored* q =
        p.q + sequence.batch_of_q * p.q_strides.batch + sequence.first_query * p.q_strides.token;
    const Stored* g =
        p.g + sequence.batch_of_q * p.g_strides.batch + sequence.first_query * p.g_strides.token;
    // To the next member that has this step, or past the last one.
    const auto settle = [&](int& step, int& member, int& steps) {
        while (member < x.group && step >= steps) {
            step = 0;
            if (++member < x.group) steps = steps_of(member);
        }
    };
    int load_step = 0, load_member = 0, load_stage = 0, load_steps = steps_of(0);
    settle(load_step, load_member, load_steps);
    const auto load = [&] {
        if (load_member < x.group) {
            const int member = head * x.group + load_member;
            const u32 to = ring.to_fill();
            const Stored *q_head = q + member * p.q_strides.head, *g_head = g + member * p.g_strides.head;
#if MASK == NONE
            const int first_query = begin + load_step * STEP - sequence.offset;
            const auto query_at = [&](int line) { return first_query + line; };
            KeyStage::load(to, q_head, first_query, sequence.queries, p.q_strides, x.head);
            ValueStage::load(to + KeyStage::BYTES, g_head, first_query, sequence.queries, p.g_strides,
                             x.values);
#else
            const int* order =
                p.order + (i64(chain_of(load_member)) * (x.queries + 1) * 16 + load_step * STEP);
            const auto query_at = [&](int line) { return order[line]; };
            const i64 own = KeyStage::finds() ? query_at(KeyStage::own_line()) : -1;
            KeyStage::load_found(to, q_head, own < 0 ? -1 : own * p.q_strides.token, p.q_strides, x.head);
            ValueStage::load_found(to + KeyStage::BYTES, g_head, own < 0 ? -1 : own * p.g_strides.token,
                                   p.g_strides, x.values);
#endif
            for (int line = threadIdx.x; line < STEP; line += 32 * WARPS) {
                const int query = query_at(line);
#if MASK != NONE
                found_queries[load_stage][line] = query;
#endif
                if (query < 0 || query >= sequence.queries) continue;
                const i64 at = lse_at(p, sequence, query, member);
                copy_float(&row_values[load_stage][0][line], p.lse2 + at);
                copy_float(&row_values[load_stage][1][line], p.dots + at);
            }
            load_stage = load_stage == STAGES - 1 ? 0 : load_stage + 1;
            ++load_step;
            settle(load_step, load_member, load_steps);
        }
        cp_async_commit();  // empty ones too, so that their number tells which stage is whole
    };

    KeyTile::load(k_tile, keys_of(p.k, p.k_strides, sequence, head), first_key, sequence.keys, p.k_strides,
                  x.head);
    if (GRADS & 1)
        ValueTile::load(v_tile, keys_of(p.v, p.v_strides, sequence, head), first_key, sequence.keys,
                        p.v_strides, x.values);
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) load();

    const u32 own_k = k_tile + warp * 16 * KeyTile::PITCH, own_v = v_tile + warp * 16 * ValueTile::PITCH;
    const int first_line = EXCHANGES ? part * OWN_STEP : 0;
    float dk[HEAD_PART / 8][4], dv[VALUES_PART / 8][4];
    clear(dk);
    clear(dv);
    int step = 0, member = 0, stage = 0, steps = steps_of(0);
    settle(step, member, steps);
#pragma unroll 1
    for (int i = 0; i < all_steps; ++i) {
        const u32 q_stage = ring.filled(), g_stage = q_stage + KeyStage::BYTES;
        load();
        float products[COLUMNS][4], grad_products[COLUMNS][4];  // rows are keys
        clear(products);
        clear(grad_products);
        multiply<OWN_COLUMNS, HEAD>(products, own_k, q_stage + first_line * KeyStage::PITCH, x.head);
        if (GRADS & 1)
            multiply<OWN_COLUMNS, VALUES>(grad_products, own_v, g_stage + first_line * ValueStage::PITCH,
                                          x.values);

        const int query_head = head * x.group + member;
#if MASK == NONE
        const int first_query = begin + step * STEP - sequence.offset;
        // Whether all of these queries exist, and see all keys of the tile.
        const bool whole = first_query >= 0 && first_query + STEP <= sequence.queries &&
                           first_key >= sequence.first_seen(x, first_query + STEP - 1) &&
                           first_key + ROWS <= sequence.last_seen(x, first_query);
        const auto query_at = [&](int line) { return first_query + line; };
#else
        constexpr bool whole = false;
        const auto query_at = [&](int line) { return found_queries[stage][line]; };
#endif
#pragma unroll
        for (int u = 0; u < OWN_COLUMNS; ++u)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int key = first_key + warp * 16 + lane / 4 + e / 2 * 8;
                const int line = first_line + u * 8 + lane % 4 * 2 + e % 2, query = query_at(line);
                const bool visible =
                    whole || (query >= 0 && query < sequence.queries &&
                              key >= sequence.first_seen(x, query) && key < sequence.last_seen(x, query));
                const i64 mask =
                    MASK == NONE ? 0 : sequence.mask_row(x, query, query_head) + key * x.mask_key;
                const Pair pair(p, products[u][e], grad_products[u][e], row_values[stage][0][line],
                                row_values[stage][1][line], visible, mask, false, -1);
                products[u][e] = pair.probability;
                grad_products[u][e] = pair.grad;
            }
        exchange.share(GRADS & 2 ? products : grad_products, warp * 16 + lane / 4, part);
#pragma unroll
        for (int g = 0; g < STEP / 16; ++g) {
            if (GRADS & 2)
                multiply_weights<VALUES, VALUES_PART / 8>(
                    dv, products[2 * g], products[2 * g + 1],
                    g_stage + g * 16 * ValueStage::PITCH + part * VALUES_PART * int(sizeof(Stored)));
            if (GRADS & 1)
                multiply_weights<HEAD, HEAD_PART / 8>(
                    dk, grad_products[2 * g], grad_products[2 * g + 1],
                    q_stage + g * 16 * KeyStage::PITCH + part * HEAD_PART * int(sizeof(Stored)));
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        ++step;
        settle(step, member, steps);
    }
    cp_async_wait<0>();

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int key = first_key + warp * 16 + lane / 4 + 8 * h;
        if (key > last_key) continue;
        const int slot = sequence.first_key + key;
        if (GRADS & 1) {
            Stored* to = p.dk + sequence.batch_of_k * p.dk_strides.batch + row_at(p.dk_strides, slot, head);
#pragma unroll
            for (int j = 0; j < HEAD_PART / 8; ++j)
                store_two(to, part * HEAD_PART + j * 8 + lane % 4 * 2, x.head,
                          __fmul_rn(__fadd_rn(dk[j][2 * h], 0.0f), x.scale),
                          __fmul_rn(__fadd_rn(dk[j][2 * h + 1], 0.0f), x.scale));
        }
        if (GRADS & 2) {
            Stored* to = p.dv + sequence.batch_of_k * p.dv_strides.batch + row_at(p.dv_strides, slot, head);
#pragma unroll
            for (int j = 0; j < VALUES_PART / 8; ++j)
                store_two(to, part * VALUES_PART + j * 8 + lane % 4 * 2, x.values,
                          __fadd_rn(dv[j][2 * h], 0.0f), __fadd_rn(dv[j][2 * h + 1], 0.0f));
        }
    }
}
#endif

#if GRADS == 4
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
    grad_queries(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Exchange exchange;
    const Problem& x = p.x;
    const int warp = row_warp(), part = part_of_warp(), lane = threadIdx.x % 32;
    const int first_line = EXCHANGES ? part * OWN_STEP : 0;

    int offset = 0;  // of the run in the tile
    do {
        // With a mask: read again for each run, so that what follows from it takes no registers meanwhile.
        u32 block_index = blockIdx.x;
        if (MASKED) asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block_index));
        const int head = block_index % x.heads, index = block_index / x.heads;
        const Place place = x.cu_q ? place_in_packed(x.cu_q, x.batch, x.queries, x.group, ROWS, index)
                                   : Place{index % x.batch, p.tiles - 1 - index / x.batch};
        if (place.batch < 0) return;
        const Sequence sequence(x, place.batch);
        const int first_row = place.tile * ROWS, rows = sequence.queries * x.group;
        if (first_row >= rows) return;
        const int run = first_row + offset, tile_end = min(first_row + ROWS, rows);
#if MASK == NONE
        const int run_end = tile_end;
        const int begin = sequence.first_seen(x, first_row / x.group) & ~15;
        const int end = sequence.last_seen(x, (tile_end - 1) / x.group);
#else
        const int run_end = p.rows.run_end(x, sequence.batch, head, run, tile_end);
        const int last_query = (run_end - 1) / x.group, last_head = head * x.group + (run_end - 1) % x.group;
        const i64 last_row = p.rows.row(x, sequence.batch, last_head, last_query);
        const int keys = p.rows.count(last_row), first_seen = sequence.first_seen(x, run / x.group);
        const int segment = x.window_left < 0 ? 0 : p.rows.segment_of(last_row, keys, first_seen);
        const int begin = segment * SEGMENT_KEYS, end = min(keys, sequence.last_seen(x, last_query));
        ShownKeys& shown =
            *reinterpret_cast<ShownKeys*>(memory + KeyTile::BYTES + ValueTile::BYTES + STAGES * STAGE_BYTES);
        __syncthreads();  // all have read what the run before had in shared memory
        if (threadIdx.x < 32 && begin < end) {
            shown.start(sequence.mask_row(x, last_query, last_head), sequence.keys,
                        p.rows.begins[last_row * p.rows.segments + segment], begin);
            shown.find(x, begin + (STAGES + 1) * STEP);
        }
        __syncthreads();
#endif
        offset = run_end < tile_end ? run_end - first_row : 0;

        const u32 q_tile = shared_address(memory), g_tile = q_tile + KeyTile::BYTES;
        Ring<STAGES, STAGE_BYTES> ring{g_tile + ValueTile::BYTES};
        const Stored* k = keys_of(p.k, p.k_strides, sequence, head);
        const Stored* v = keys_of(p.v, p.v_strides, sequence, head);
        int load_key = begin;
        const auto load = [&] {
            if (load_key < end) {
                const u32 to = ring.to_fill();
#if MASK == NONE
                KeyStage::load(to, k, load_key, sequence.keys, p.k_strides, x.head);
                ValueStage::load(to + KeyStage::BYTES, v, load_key, sequence.keys, p.v_strides, x.values);
#else
                const int position = load_key + KeyStage::own_line();
                const i64 key = KeyStage::finds() && position < keys ? shown.at(position) : -1;
                KeyStage::load_found(to, k, key < 0 ? -1 : key * p.k_strides.token, p.k_strides, x.head);
                ValueStage::load_found(to + KeyStage::BYTES, v, key < 0 ? -1 : key * p.v_strides.token,
                                       p.v_strides, x.values);
#endif
                load_key += STEP;
            }
            cp_async_commit();
        };
        {
            const int row = first_row + KeyTile::own_line(), token = sequence.first_query + row / x.group;
            const int member = head * x.group + row % x.group;
            const bool exists = KeyTile::finds() && row < rows;
            KeyTile::load_found(q_tile, p.q + sequence.batch_of_q * p.q_strides.batch,
                                exists ? row_at(p.q_strides, token, member) : -1, p.q_strides, x.head);
            ValueTile::load_found(g_tile, p.g + sequence.batch_of_q * p.g_strides.batch,
                                  exists ? row_at(p.g_strides, token, member) : -1, p.g_strides, x.values);
        }
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; ++i) load();

        int first[2], last[2];  // keys that a row sees; none, if it is not of the run
#if MASK != NONE
        int count[2] = {};  // and how many the mask shows it
#endif
        float lse2[2] = {}, dots[2] = {};
        i64 mask[2] = {}, dmask[2] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + warp * 16 + lane / 4 + 8 * h, query = row / x.group;
            const int member = head * x.group + row % x.group;
            first[h] = sequence.first_seen(x, query);
            const bool exists = row >= run && row < run_end;
            last[h] = exists ? sequence.last_seen(x, query) : 0;
            if (!exists) continue;
#if MASK != NONE
            count[h] = p.rows.count(p.rows.row(x, sequence.batch, member, query));
#endif
            lse2[h] = p.lse2[lse_at(p, sequence, query, member)];
            dots[h] = p.dots[lse_at(p, sequence, query, member)];
            mask[h] = sequence.mask_row(x, query, member);
            dmask[h] = ((i64(sequence.batch) * x.heads * x.group + member) * x.queries + query) * x.keys +
                       sequence.first_key;
        }

        const u32 own_q = q_tile + warp * 16 * KeyTile::PITCH, own_g = g_tile + warp * 16 * ValueTile::PITCH;
        float dq[HEAD_PART / 8][4];
        clear(dq);
#pragma unroll 1
        for (int first_key = begin; first_key < end; first_key += STEP) {
#if MASK != NONE
            if (threadIdx.x < 32) shown.find(x, first_key + (STAGES + 2) * STEP);
#endif
            const u32 k_stage = ring.filled(), v_stage = k_stage + KeyStage::BYTES;
            load();
            float products[COLUMNS][4], grad_products[COLUMNS][4];
            clear(products);
            clear(grad_products);
            multiply<OWN_COLUMNS, HEAD>(products, own_q, k_stage + first_line * KeyStage::PITCH, x.head);
            multiply<OWN_COLUMNS, VALUES>(grad_products, own_g, v_stage + first_line * ValueStage::PITCH,
                                          x.values);
#pragma unroll
            for (int u = 0; u < OWN_COLUMNS; ++u)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int h = e / 2;
                    const int position = first_key + first_line + u * 8 + lane % 4 * 2 + e % 2;
#if MASK == NONE
                    const int key = position;
                    const bool visible = key >= first[h] && key < last[h];
#else
                    const int key = shown.at(position);
                    const bool visible = position < count[h] && key >= first[h] && key < last[h];
#endif
                    const Pair pair(p, products[u][e], grad_products[u][e], lse2[h], dots[h], visible,
                                    mask[h] + key * x.mask_key, true, dmask[h] + key);
                    grad_products[u][e] = pair.grad;
                }
            exchange.share(grad_products, warp * 16 + lane / 4, part);
#pragma unroll
            for (int g = 0; g < STEP / 16; ++g)
                multiply_weights<HEAD, HEAD_PART / 8>(
                    dq, grad_products[2 * g], grad_products[2 * g + 1],
                    k_stage + g * 16 * KeyStage::PITCH + part * HEAD_PART * int(sizeof(Stored)));
        }
        cp_async_wait<0>();

#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + warp * 16 + lane / 4 + 8 * h;
            if (row < run || row >= run_end) continue;
            Stored* to =
                p.dq + sequence.batch_of_q * p.dq_strides.batch +
                row_at(p.dq_strides, sequence.first_query + row / x.group, head * x.group + row % x.group);
#pragma unroll
            for (int j = 0; j < HEAD_PART / 8; ++j)
                store_two(to, part * HEAD_PART + j * 8 + lane % 4 * 2, x.head,
                          __fmul_rn(__fadd_rn(dq[j][2 * h], 0.0f), x.scale),
                          __fmul_rn(__fadd_rn(dq[j][2 * h + 1], 0.0f), x.scale));
        }
    } while (MASKED && offset > 0);
}
#endif

// Attention, forward, for everything that docs/contract.md, "Attention", allows: O = softmax(Q K^T) V.
//
// A block takes a tile of rows: the queries of one sequence times the heads that share a head of k and v, heads
// side by side. A warp has 16 rows of it, for itself or with others, where values are long or a block shall be
// done soon: each of these PARTS has some keys of every step, hands their probabilities to the others through
// shared memory, and has some columns of the values. All warps share keys and values, which come in through a
// ring of cp.async stages of KEY_STEP lines: those of a block's 128 keys, then its values.
//
// Prefill: a block goes over all segments of its rows. What they come to so far is kept in shared memory,
// each value by the thread that has it, and touched once a segment.
// Decode (SPLIT): few rows, and many keys to stream. Blocks share the segments of a tile, and write what each
// comes to. merge_segments, a second kernel, merges them in order. How many blocks share them changes no bit.
//
// With a mask a block takes the rows of its tile in runs (attention_mask.cuh), mostly one. Keys are then counted
// among those that the run's last row shows; a warp finds these ahead of their use.
//
// Macros, and those of attention.cuh
//   PARTS        warps that share 16 rows: 1, 2 or 4
//   KEY_STEP     keys of a stage: 16, 32 or 64, and no less than 16 for each part
//   STAGES       of the ring, 2 or more
//   MIN_BLOCKS   blocks that shall fit on one multiprocessor
//   SPLIT        1: segments go to scratch; 0: to `out`

#include "attention.cuh"

#ifndef SPLIT
#error "SPLIT is needed: #if takes a missing macro for 0"
#endif

constexpr int ROW_WARPS = WARPS / PARTS, ROWS = 16 * ROW_WARPS;
using QTile = Tile<ROWS, HEAD>;
using KTile = Tile<KEY_STEP, HEAD>;
using VTile = Tile<KEY_STEP, VALUES>;
constexpr int STAGE_BYTES = KTile::BYTES > VTile::BYTES ? KTile::BYTES : VTile::BYTES;
constexpr int STEPS = KEYS / KEY_STEP;
constexpr int PART = VALUES / PARTS, COLUMNS = PART / 8;  // a warp's columns of values, and how many eights
constexpr int OWN_STEP = KEY_STEP / PARTS;                // a warp's keys of a step
constexpr int OWN_KEYS = KEYS / PARTS;                    // and of a block
static_assert(PART % 16 == 0 && OWN_STEP % 16 == 0);

// The key in its block that is a warp's own key i of those of its part.
__device__ __forceinline__ constexpr int key_in_block(int part, int i) {
    return i / OWN_STEP * KEY_STEP + part * OWN_STEP + i % OWN_STEP;
}

// What the parts tell each other of a block. Eight floats of padding: half a warp writes to all banks.
struct Exchange {
    float maxima[PARTS][ROWS];
    float probabilities[ROWS][KEYS + 8];
};
// Under FMA one group of keys is a thousand instructions. They are not repeated.
constexpr int UNROLL = FMA ? 1 : STEPS, UNROLL_GROUPS = FMA ? 1 : KEY_STEP / 16;
constexpr int SCRATCH = VALUES + 2;      // floats of a row and segment: o, n and l
constexpr bool FINDS = PAGED || MASKED;  // whether keys lie wherever each is found

struct Params {
    const Stored *q, *k, *v;
    const float* sinks;  // of each head, or null
    Stored* out;
    float *lse, *lse2;  // lse may be null
    float* scratch;     // [rows, segments, SCRATCH]
    Strides q_strides, k_strides, v_strides;
    i64 out_batch, out_token, out_head, lse_batch, lse_head;
    int tiles;     // of a sequence, if not packed
    int splits;    // blocks that share a tile
    int segments;  // most that a sequence may have
    int unused;
    Problem x;
#if MASK != NONE
    Rows rows;
#endif
};

__device__ __forceinline__ i64 lse_at(const Params& p, const Sequence& s, int query, int head) {
    return s.batch_of_q * p.lse_batch + head * p.lse_head + s.first_query + query;
}

__device__ __forceinline__ Stored* out_at(const Params& p, const Sequence& s, int query, int head) {
    return p.out + s.batch_of_q * p.out_batch + (s.first_query + query) * p.out_token + head * p.out_head;
}

// What a thread has of the current segment of its two rows.
struct Segment {
    float o[COLUMNS][4];
    float n[2], l[2][2];  // l: partial sums 2 (lane % 4) and the next

    __device__ __forceinline__ void start() {
        clear(o);
#pragma unroll
        for (int h = 0; h < 2; ++h) n[h] = -INF, l[h][0] = l[h][1] = 0.0f;
    }

    // The scores of this part's keys of a block, which come first in `s`, to probabilities of all keys; o and l
    // are scaled to them. `row`: this thread's first one in the tile. `bias(u, e)`: what a float mask adds.
    template <typename Bias>
    __device__ __forceinline__ void probabilities(float (&s)[KEYS / 8][4], float c, Exchange& exchange,
                                                  int part, int row, const Bias& bias) {
        const int lane = threadIdx.x % 32;
        float m[2], shift[2], scale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            m[h] = -INF;
#pragma unroll
            for (int u = 0; u < OWN_KEYS / 8; ++u)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; ++e)
                    m[h] = fmaxf(m[h], FLOAT_MASK ? __fmaf_rn(s[u][e], c, bias(u, e)) : s[u][e]);
            m[h] = fmaxf(m[h], __shfl_xor_sync(0xFFFFFFFF, m[h], 1));
            m[h] = fmaxf(m[h], __shfl_xor_sync(0xFFFFFFFF, m[h], 2));
            if (PARTS > 1 && lane % 4 == 0) exchange.maxima[part][row + 8 * h] = m[h];
        }
        if (PARTS > 1) __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (PARTS > 1)
#pragma unroll
                for (int i = 0; i < PARTS; ++i) m[h] = fmaxf(m[h], exchange.maxima[i][row + 8 * h]);
            const float larger = fmaxf(n[h], ceilf(FLOAT_MASK ? m[h] : __fmul_rn(m[h], c)));
            shift[h] = contract::shift_of(larger);
            scale[h] = scores::exp2(__fsub_rn(n[h], shift[h]));
            n[h] = larger;
        }
#pragma unroll
        for (int u = 0; u < OWN_KEYS / 8; ++u)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; ++e)
                    s[u][e] = scores::exp2(
                        __fmaf_rn(s[u][e], c, FLOAT_MASK ? __fsub_rn(bias(u, e), shift[h]) : -shift[h]));
                if (PARTS > 1)
                    *reinterpret_cast<float2*>(
                        &exchange.probabilities[row + 8 * h][key_in_block(part, u * 8) + lane % 4 * 2]) =
                        make_float2(s[u][2 * h], s[u][2 * h + 1]);
            }
        if (PARTS > 1) {
            __syncthreads();
#pragma unroll
            for (int u = 0; u < KEYS / 8; ++u)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float2 both = *reinterpret_cast<const float2*>(
                        &exchange.probabilities[row + 8 * h][u * 8 + lane % 4 * 2]);
                    s[u][2 * h] = both.x, s[u][2 * h + 1] = both.y;
                }
        }
#pragma unroll
        for (int u = 0; u < KEYS / 8; ++u)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& sum = l[e / 2][e % 2];
                sum = u == 0 ? __fmaf_rn(sum, scale[e / 2], s[u][e]) : __fadd_rn(sum, s[u][e]);
            }
        if (__any_sync(0xFFFFFFFF, scale[0] != 1.0f || scale[1] != 1.0f))
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[j][e] = __fmul_rn(o[j][e], scale[e / 2]);
    }

    // All eight partial sums of a row.
    __device__ __forceinline__ float sum(int h) const {
        float x = __fadd_rn(l[h][0], l[h][1]);
        x = __fadd_rn(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
        return __fadd_rn(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
    attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Problem& x = p.x;
    const int warp = threadIdx.x / 32 % ROW_WARPS, lane = threadIdx.x % 32;
    const int part = threadIdx.x / 32 / ROW_WARPS, first_column = part * PART;
    wait_for_kernel_before();
    let_kernel_behind_start();

    int offset = 0;  // of the run in the tile
    do {
        // With a mask: read again for each run, so that what follows from it takes no registers meanwhile.
        u32 block_index = blockIdx.x;
        if (MASKED) asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block_index));

        // Tiles of the last queries come first: they may see the most keys.
        const u32 split = block_index % p.splits, rest = block_index / p.splits;
        const int head = rest % x.heads, index = rest / x.heads;
        const Place place = x.cu_q ? place_in_packed(x.cu_q, x.batch, x.queries, x.group, ROWS, index)
                                   : Place{index % x.batch, p.tiles - 1 - index / x.batch};
        if (place.batch < 0) return;
        const Sequence sequence(x, place.batch);
        const int first_row = place.tile * ROWS, rows = sequence.queries * x.group;
        if (first_row >= rows) return;
        const int run = first_row + offset, tile_end = min(first_row + ROWS, rows);

#if MASK == NONE
        const int run_end = tile_end;
        const int first_seen = sequence.first_seen(x, first_row / x.group);
        const int last_seen = sequence.last_seen(x, (tile_end - 1) / x.group);
        int block = first_seen / KEYS;
#else
        const int run_end = p.rows.run_end(x, sequence.batch, head, run, tile_end);
        const int last_query = (run_end - 1) / x.group, last_head = head * x.group + (run_end - 1) % x.group;
        const i64 last_row = p.rows.row(x, sequence.batch, last_head, last_query);
        const int keys = p.rows.count(last_row), first_seen = sequence.first_seen(x, run / x.group);
        // No position is above a key's number.
        const int last_seen = min(keys, sequence.last_seen(x, last_query));
        int block = x.window_left < 0 ? 0 : p.rows.segment_of(last_row, keys, first_seen) * BLOCKS;
#endif
        offset = run_end < tile_end ? run_end - first_row : 0;
        int end = max(block, (last_seen + KEYS - 1) / KEYS);
        if (SPLIT) {
            const int first = block / BLOCKS, count = (end + BLOCKS - 1) / BLOCKS - first;
            const int share = (count + p.splits - 1) / p.splits, from = first + int(split) * share;
            block = max(block, from * BLOCKS);
            end = min(end, (from + share) * BLOCKS);
            if (block >= end) continue;
        }
        const u32 q_tile = shared_address(memory);
        unsigned char* behind_ring = memory + QTile::BYTES + STAGES * STAGE_BYTES;
        Exchange& exchange = *reinterpret_cast<Exchange*>(behind_ring);
        unsigned char* behind_exchange = behind_ring + (PARTS > 1 ? sizeof(Exchange) : 0);
        ShownKeys& shown = *reinterpret_cast<ShownKeys*>(behind_exchange);
        float* merged_o =
            reinterpret_cast<float*>(behind_exchange + (MASKED ? sizeof(ShownKeys) : 0)) + threadIdx.x;

        const Stored* k = p.k + head * p.k_strides.head + sequence.batch_of_k * p.k_strides.batch +
                          (PAGED ? 0 : sequence.first_key * p.k_strides.token);
        const Stored* v = p.v + head * p.v_strides.head + sequence.batch_of_k * p.v_strides.batch +
                          (PAGED ? 0 : sequence.first_key * p.v_strides.token);
#if MASK != NONE
        __syncthreads();  // all have read what the run before had in shared memory
        if (threadIdx.x < 32 && block < end) {
            shown.start(sequence.mask_row(x, last_query, last_head), sequence.keys,
                        p.rows.begins[last_row * p.rows.segments + block / BLOCKS], block * KEYS);
            shown.find(x, (block + 2) * KEYS);
        }
        __syncthreads();
#endif

        Ring<STAGES, STAGE_BYTES> ring{q_tile + QTile::BYTES};
        int line = 0, page = 0;  // this lane's key of the next step, and its page, looked up one step ahead
        const auto first_key = [&](int block, int step) {
            return (block + step / (2 * STEPS)) * KEYS + step % STEPS * KEY_STEP;
        };
        const auto look_up = [&](int block, int step) {
            const int position = first_key(block, step) + KTile::own_line();
            if (!FINDS || !KTile::finds()) return;
            line = position;
#if MASK != NONE
            line = position < keys ? shown.at(position) : sequence.keys;
#endif
            if (PAGED && line < sequence.keys)
                page = x.pages[sequence.batch * x.pages_batch + (sequence.first_key + line) / x.page];
        };
        // Steps of a block: STEPS of keys, STEPS of values, then those of the next block.
        const auto load = [&](int block, int step) {
            const bool values = step / STEPS % 2;
            if (block + step / (2 * STEPS) < end) {
                const u32 to = ring.to_fill();
                const int key = first_key(block, step);
                if (FINDS) {
                    const Strides& strides = values ? p.v_strides : p.k_strides;
                    i64 place = line * strides.token;
                    if (PAGED)
                        place = min(max(page, 0), x.page_count - 1) * strides.batch +
                                (sequence.first_key + line) % x.page * strides.token;
                    if (!KTile::finds() || line >= sequence.keys) place = -1;
                    if (values)
                        VTile::load_found(to, v, place, strides, x.values);
                    else
                        KTile::load_found(to, k, place, strides, x.head);
                } else if (values) {
                    VTile::load(to, v, key, sequence.keys, p.v_strides, x.values);
                } else {
                    KTile::load(to, k, key, sequence.keys, p.k_strides, x.head);
                }
                look_up(block, step + 1);
            }
            cp_async_commit();  // empty ones too, so that their number tells which stage is whole
        };

        {
            const int row = first_row + QTile::own_line(), query = row / x.group, member = row % x.group;
            const i64 own = (sequence.first_query + query) * p.q_strides.token +
                            (head * x.group + member) * p.q_strides.head;
            QTile::load_found(q_tile, p.q + sequence.batch_of_q * p.q_strides.batch,
                              QTile::finds() && row < rows ? own : -1, p.q_strides, x.head);
        }
        look_up(block, 0);
#pragma unroll UNROLL
        for (int step = 0; step < STAGES - 1; ++step) load(block, step);

        // Rows past the end see what the last one sees, and are not stored.
        struct Row {
            int query, head;
            bool exists;
        };
        const auto row_of = [&](int h) {
            const int row = first_row + warp * 16 + lane / 4 + 8 * h, inside = min(row, rows - 1);
            return Row{inside / x.group, head * x.group + inside % x.group, row >= run && row < run_end};
        };
#if MASK == NONE
        int first[2], last[2];
#else
        int count[2], least = keys;  // of keys that a row shows; and that each row of the warp does
        i64 mask[2];
#endif
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Row row = row_of(h);
#if MASK == NONE
            first[h] = sequence.first_seen(x, row.query);
            last[h] = sequence.last_seen(x, row.query);
#else
            mask[h] = sequence.mask_row(x, row.query, row.head);
            count[h] = row.exists ? p.rows.count(p.rows.row(x, sequence.batch, row.head, row.query)) : 0;
            least = min(least, count[h]);
#endif
        }
#if MASK == NONE
        // Keys that all rows of the warp see.
        const int all_first = __shfl_sync(0xFFFFFFFF, first[1], 31),
                  all_last = __shfl_sync(0xFFFFFFFF, last[0], 0);
        constexpr bool idle = false;
#else
#pragma unroll
        for (int step = 1; step < 32; step *= 2) least = min(least, __shfl_xor_sync(0xFFFFFFFF, least, step));
        const bool windowed = x.window_left >= 0 || x.window_right >= 0;
        // Whether no row of the warp is of the run, so that it does nothing but bring keys.
        const bool idle =
            PARTS == 1 && (first_row + warp * 16 >= run_end || first_row + warp * 16 + 16 <= run);
#endif
        const u32 own_q = q_tile + warp * 16 * QTile::PITCH;
        Segment segment;
        Merged merged[2];
        bool any = false;  // segment has been merged
        segment.start();
#pragma unroll 1
        for (; block < end; ++block) {
#if MASK != NONE
            if (threadIdx.x < 32) shown.find(x, (block + 3) * KEYS);
#endif
            float s[KEYS / 8][4];
            clear(s);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const u32 tile = ring.filled();
                load(block, step + STAGES - 1);
                if (idle) continue;
                multiply<OWN_STEP / 8, HEAD>(s + step * (OWN_STEP / 8), own_q,
                                             tile + part * OWN_STEP * KTile::PITCH, x.head);
            }
            if (SOFTCAP)
#pragma unroll
                for (int u = 0; u < OWN_KEYS / 8; ++u)
#pragma unroll
                    for (int e = 0; e < 4; ++e) s[u][e] = scores::tanh(__fmul_rn(s[u][e], x.cap));
            // A float mask is read twice, as registers do not hold it beside scores.
            const auto visible = [&](int u, int e) {
                const int h = e / 2, key = block * KEYS + key_in_block(part, u * 8) + lane % 4 * 2 + e % 2;
#if MASK == NONE
                return key >= first[h] && key < last[h];
#else
                if (!windowed) return key < count[h];
                const int query = row_of(h).query, number = shown.at(key);
                return key < count[h] && number >= sequence.first_seen(x, query) &&
                       number < sequence.last_seen(x, query);
#endif
            };
            const auto bias_of = [&](int u, int e) {
#if MASK != NONE
                const int key = block * KEYS + key_in_block(part, u * 8) + lane % 4 * 2 + e % 2;
                if (FLOAT_MASK && key < count[e / 2])
                    return bias_at(x, mask[e / 2] + shown.at(key) * x.mask_key);
#endif
                return 0.0f;
            };
#if MASK == NONE
            const bool all_visible = block * KEYS >= all_first && block * KEYS + KEYS <= all_last;
#else
            const bool all_visible = !windowed && block * KEYS + KEYS <= least;
#endif
            if (!all_visible)
#pragma unroll
                for (int u = 0; u < OWN_KEYS / 8; ++u)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (!visible(u, e)) s[u][e] = -INF;
            if (!idle) segment.probabilities(s, x.c, exchange, part, warp * 16 + lane / 4, bias_of);
#pragma unroll UNROLL
            for (int step = STEPS; step < 2 * STEPS; ++step) {
                const u32 tile = ring.filled();
                load(block, step + STAGES - 1);
                if (idle) continue;
#pragma unroll UNROLL_GROUPS
                for (int g = 0; g < KEY_STEP / 16; ++g) {
                    multiply_weights<VALUES, COLUMNS>(
                        segment.o, s[0], s[1],
                        tile + g * 16 * VTile::PITCH + first_column * int(sizeof(Stored)));
#pragma unroll
                    for (int u = 0; u < KEYS / 8 - 2; ++u)
#pragma unroll
                        for (int e = 0; e < 4; ++e) s[u][e] = s[u + 2][e];
                }
            }
            if (block % BLOCKS < BLOCKS - 1 && block + 1 < end) continue;

            const float sums[2] = {segment.sum(0), segment.sum(1)};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (SPLIT) {
                    const Row row = row_of(h);
                    if (!row.exists) continue;
                    float* to =
                        p.scratch +
                        (sequence.row(x, row.query, row.head) * p.segments + block / BLOCKS) * SCRATCH;
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j)
                        *reinterpret_cast<float2*>(to + first_column + j * 8 + lane % 4 * 2) =
                            make_float2(segment.o[j][2 * h], segment.o[j][2 * h + 1]);
                    if (part == 0 && lane % 4 == 0)
                        *reinterpret_cast<float2*>(to + VALUES) = make_float2(segment.n[h], sums[h]);
                } else {
                    float scale, own_scale;
                    merged[h].add(segment.n[h], sums[h], scale, own_scale);
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                        for (int e = 2 * h; e < 2 * h + 2; ++e) {
                            float& o = merged_o[(j * 4 + e) * 32 * WARPS];
                            o = __fmaf_rn(any ? o : 0.0f, scale, __fmul_rn(segment.o[j][e], own_scale));
                        }
                }
            }
            any = true;
            segment.start();
        }
        cp_async_wait<0>();
        if (SPLIT) continue;

#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Row row = row_of(h);
            if (!row.exists) continue;
            const float scale = p.sinks ? merged[h].add_sink(p.sinks[row.head]) : 1.0f;
            const float inverse = merged[h].inverse();
            Stored* to = out_at(p, sequence, row.query, row.head);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                float value[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float o = any ? merged_o[(j * 4 + 2 * h + e) * 32 * WARPS] : 0.0f;
                    value[e] = merged[h].quotient(__fmul_rn(o, scale), inverse);
                }
                store_two(to, first_column + j * 8 + lane % 4 * 2, x.values, value[0], value[1]);
            }
            if (part == 0 && lane % 4 == 0)
                merged[h].store(p.lse, p.lse2, lse_at(p, sequence, row.query, row.head));
        }
    } while (MASKED && offset > 0);
}

#if SPLIT
// The results of a row from those of its segments. A block has a row. All threads bring a chunk of segments, a warp
// finds what each, and those before it, are scaled by, and threads that have a column merge it.
constexpr int CHUNK = VALUES > 64 ? 8192 / VALUES : 128;  // at most 36 KiB

extern "C" __global__ void __launch_bounds__(512, 1) merge_segments(const __grid_constant__ Params p) {
    __shared__ float2 chunk[CHUNK * SCRATCH / 2], scales[CHUNK];
    __shared__ float highest;
    const Problem& x = p.x;
    const int heads = x.heads * x.group, head = blockIdx.x % heads, token = blockIdx.x / heads;
    wait_for_kernel_before();
    let_kernel_behind_start();
    int b = token / x.queries, query = token % x.queries;
    if (x.cu_q) {
        int past = x.batch;  // the last sequence that begins at or before the token
        for (b = 0; b + 1 < past;) (x.cu_q[(b + past) / 2] <= token ? b : past) = (b + past) / 2;
        query = token - bound(x.cu_q, b, x.queries);
    }
    const Sequence sequence(x, b);
    if (query < 0 || query >= sequence.queries) return;
    const int first_seen = sequence.first_seen(x, query);
    int last_seen = sequence.last_seen(x, query), segment = first_seen / SEGMENT_KEYS;
#if MASK == NONE
    const bool any = last_seen > first_seen;
#else
    const i64 row = p.rows.row(x, b, head, query);
    last_seen = min(last_seen, p.rows.count(row));
    segment = p.rows.segment_of(row, p.rows.count(row), first_seen);
    const bool any = last_seen > segment * SEGMENT_KEYS;
#endif
    const int end = any ? (last_seen + SEGMENT_KEYS - 1) / SEGMENT_KEYS : segment;
    const auto* from = reinterpret_cast<const float2*>(p.scratch + i64(blockIdx.x) * p.segments * SCRATCH);
    const auto* sums = reinterpret_cast<const float*>(chunk);
    const int column = threadIdx.x;
    const bool merges = column < VALUES;

    Merged merged;
    float o = 0.0f;
    for (; segment < end; segment += CHUNK) {
        const int count = min(CHUNK, end - segment);
#pragma unroll 8
        for (int i = threadIdx.x; i < count * (SCRATCH / 2); i += blockDim.x)
            chunk[i] = from[segment * (SCRATCH / 2) + i];
        __syncthreads();
        if (threadIdx.x < 32)
            for (int first = 0; first < count; first += 32) {
                const int i = first + threadIdx.x;
                const float own = i < count ? sums[i * SCRATCH + VALUES] : -INF;
                float upto = own;
#pragma unroll
                for (int step = 1; step < 32; step *= 2) {
                    const float other = __shfl_up_sync(0xFFFFFFFF, upto, step);
                    if (threadIdx.x >= step) upto = fmaxf(upto, other);
                }
                Merged before = merged;
                const float others = __shfl_up_sync(0xFFFFFFFF, upto, 1);
                if (threadIdx.x > 0) before.n = fmaxf(before.n, others);
                float x, y;
                before.raise(own, x, y);
                if (i < count) scales[i] = make_float2(x, y);
                merged.n = __shfl_sync(0xFFFFFFFF, before.n, 31);
            }
        __syncthreads();
        if (merges)
#pragma unroll 8
            for (int i = 0; i < count; ++i) {
                const float* at = sums + i * SCRATCH;
                const auto [x, y] = scales[i];
                merged.l = __fmaf_rn(merged.l, x, __fmul_rn(at[VALUES + 1], y));
                o = __fmaf_rn(o, x, __fmul_rn(at[column], y));
            }
        __syncthreads();
    }
    if (threadIdx.x == 0) highest = merged.n;
    __syncthreads();
    if (!merges) return;
    merged.n = highest;
    if (p.sinks) o = __fmul_rn(o, merged.add_sink(p.sinks[head]));
    const float value = merged.quotient(o, merged.inverse());
    if (column < x.values)
        out_at(p, sequence, query, head)[column] = Type::narrow(FMA ? contract::canonical(value) : value);
    if (column == 0) merged.store(p.lse, p.lse2, lse_at(p, sequence, query, head));
}
#endif

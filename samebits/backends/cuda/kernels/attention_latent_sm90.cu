// Latent attention on Hopper, forward: heads of 576 and values of 512, which are the first columns of the keys. Bits are
// those of docs/contract.md, "Attention".
//
// A block of the grid stays, and takes tiles of 64 rows, one after another: heads that share a head of k, times queries.
// It goes over the keys that they may see, 128 at a time. Both are in shared memory but once: queries take 72 KiB, and a
// block of keys 144, which is read for scores, and again for values. So the next block's keys come in as this one's are
// left, by panels: 64 columns of all 128 keys.
//
// Decode (SPLIT): few rows, and many keys to stream. Tiles share the segments of their rows, and write what each comes
// to; merge_segments in attention.cu merges them in order.
//
// Warps of a block
//   2 warpgroups   consumers: each has every other panel of values; they take turns at the scores of a block
//   1 warpgroup    producer: one warp finds tiles and issues all TMA loads; its registers go to the consumers
//
// Barriers
//   q_full, q_empty   a ticket and its tile of queries have arrived; both consumers need them no more
//   full[panel]       64 columns of a block of keys have arrived
//   empty[panel]      the consumer that reads them last has read them
//   handed[w]         consumer w has written a block's weights, and its softmax's state, for the other
//   TOGETHER + w      a named one: all warps of consumer w
//
// Timeline of blocks that consumers 0 and 1 have the scores of, in this order. A panel is loaded again as soon as it is
// multiplied. Where a segment ends, its values are merged under the next scores; where a tile ends, they are stored panel
// by panel as they are multiplied.
//
//   consumer 0   |QK, as panels arrive; merge|max|exp2|P V 0|P V 2|P V 4|P V 6|merge|
//   consumer 1          |merge|                       |P V 1|P V 3|P V 5|P V 7|QK of the next block; merge|
//   loads        | ... 7|                             |8    |0, 1 |2, 3 |4, 5 | ...
//
// Weights go from one consumer to the other where the keys' columns past the values were, as nobody needs them again.
//
// What segments before come to lies in global memory, each value where its thread alone reads it: registers hold one
// segment's. It stays in L2.
//
// Macros
//   INPUT_F16   1: f16 operands; 0: bf16
//   SPLIT       1: segments go to scratch; 0: to `out`
//   PAGED       1: keys lie in pages, and `key_start` is null

#if !defined(INPUT_F16) || !defined(SPLIT) || !defined(PAGED)
#error "all macros are needed: #if takes a missing macro for 0"
#endif
#define HARDWARE_EXP2 1
#define HEAD 576
#define VALUES 512

#include "attention_forward_sm90.cuh"
#include "ptx_sm80.cuh"

constexpr int ROWS = 64, PANEL = 64, PANELS = HEAD / PANEL;
constexpr int OWN = VALUES / PANEL / 2;  // panels of values of a consumer
constexpr u32 CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr u32 PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr u32 TOGETHER = 1;  // named barriers, one for each consumer; 0 is __syncthreads

using QTile = Tile<false, false, ROWS, HEAD, 1>;
using KTile = Tile<false, false, KEYS, HEAD, 1>;
using VTile = Tile<true, false, VALUES, KEYS, 1>;  // the same memory
static_assert(VTile::column_bytes == KTile::column_bytes && VTile::line_bytes == KTile::line_bytes);

struct Ticket {
    Sequence sequence;
    int head;         // the first one's
    int first_query;  // in the sequence; negative: there are no more tiles
    int first, end;   // blocks of keys
};

struct Params {
    TensorMap q, k;
    Stored* out;
    const float* sinks;  // of each head, or null
    float *lse, *lse2;   // lse may be null
    float* scratch;      // SPLIT: [rows, segments, VALUES + 2]; else [blocks of the grid, ROWS * VALUES]
    i64 lse_batch, lse_head;
    int tiles;     // of queries, for each of `heads`
    int heads;     // groups of heads, of all sequences, or of all together if packed
    int segments;  // most that a sequence may have
    int shares;    // tiles that share the segments of a row, if SPLIT
    int members;   // heads in a tile, side by side
    int height;    // queries in a tile
    int shared;    // bits 0, 1: q, k have one matrix for all of the batch; 2, 3: for all heads
    int box;  // keys that one copy brings: all of a block's, or if PAGED 8, 16, 32, 64 or 128, of one page
    Problem x;

    __device__ __forceinline__ int query_of(int row) const { return row / members; }
    __device__ __forceinline__ int queries_of(const Ticket&) const { return height; }
    __device__ __forceinline__ Row row(const Ticket& ticket, int h) const {
        return {*this, ticket, int(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h)};
    }
};

// Of this tile, and of the one before or the next one.
__shared__ Ticket tickets[2];

struct SharedStorage {
    u32 q, keys, state, handed, full, empty, q_full, q_empty;

    __device__ explicit SharedStorage(unsigned char* raw) {
        q = (shared_address(raw) + 1023) & ~1023u;  // a whole period of the swizzle
        keys = q + QTile::bytes;
        state = keys + KTile::bytes;
        handed = state + 128 * 32;
        full = handed + 2 * 8;
        empty = full + PANELS * 8;
        q_full = empty + PANELS * 8;
        q_empty = q_full + 8;
    }
};

// The ticket of tile `index`; false if there is no such tile. All lanes of a warp do so together.
__device__ __forceinline__ bool find(const Params& p, int index, Ticket& ticket) {
    const Problem& x = p.x;
    const int all_heads = x.heads * x.group / p.members;
    const int matrix = index % p.heads;
    index /= p.heads;
    int share = 0;
    if (SPLIT) {
        share = index % p.shares;
        index /= p.shares;
    }
    const int tile = p.tiles - 1 - index;  // the last ones see the most keys
    Place place{matrix / all_heads, tile};
    ticket.head = (matrix - place.batch * all_heads) * p.members;
    if (x.cu_q) place = place_in_packed(x.cu_q, x.batch, x.queries, 1, p.height, tile);
    if (place.batch < 0) return false;
    const Sequence sequence(x, place.batch);
    const int first_query = place.tile * p.height;
    if (first_query >= sequence.queries) return false;
    const int end_query = min(first_query + p.height, sequence.queries);
    ticket.sequence = sequence;
    ticket.first_query = first_query;
    ticket.first = sequence.first_seen(x, first_query) / KEYS;
    ticket.end = (sequence.last_seen(x, end_query - 1) + KEYS - 1) / KEYS;
    if (SPLIT) {
        const int first = ticket.first / BLOCKS;
        const int segments = ((ticket.end + BLOCKS - 1) / BLOCKS - first + p.shares - 1) / p.shares;
        ticket.first = max(ticket.first, (first + share * segments) * BLOCKS);
        ticket.end = min(ticket.end, (first + (share + 1) * segments) * BLOCKS);
        if (ticket.first >= ticket.end) return false;
    }
    return true;
}

// f(ticket) for all tiles of this block of the grid. Every other round is reversed, so that none gets all the long ones.
template <typename F>
__device__ __forceinline__ void for_each_tile(const Params& p, F f) {
    const int count = p.tiles * p.heads * (SPLIT ? p.shares : 1);
    for (int round = 0; round * int(gridDim.x) < count; ++round) {
        const int slot = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        const int index = round * int(gridDim.x) + slot;
        Ticket ticket;
        if (index < count && find(p, index, ticket)) f(ticket);
    }
}

__device__ __forceinline__ void producer(const SharedStorage& shared, const Params& p) {
    const Problem& x = p.x;
    const int lane = threadIdx.x % 32, first_line = lane * p.box;  // of this lane's box in a panel
    u32 tile = 0, taken = 0;                                       // tiles and blocks before
    for_each_tile(p, [&](const Ticket& ticket) {
        const Sequence& s = ticket.sequence;
        const int head = one_for(p, 3) ? 0 : ticket.head / x.group, end = ticket.end;
        const int* const pages = x.pages + (PAGED ? s.batch * x.pages_batch : 0);
        const auto page_of = [&](int block) {
            const int key = block * KEYS + first_line;
            return PAGED && first_line < KEYS && block < end && key < s.keys ? pages[key / x.page] : 0;
        };
        int next = page_of(ticket.first);
        if (lane == 0) {
            mbarrier_wait(shared.q_empty, tile % 2 ^ 1);
            tickets[tile % 2] = ticket;
            const bool any = ticket.first < end;
            mbarrier_arrive_expect_tx(shared.q_full, any ? QTile::columns * p.height * p.members * 128 : 0);
#pragma unroll 1
            for (u32 column = 0; any && column < QTile::columns; ++column)
                tma_load(shared.q + column * QTile::column_bytes, p.q, shared.q_full, column * 64,
                         one_for(p, 2) ? 0 : ticket.head, s.first_query + ticket.first_query,
                         one_for(p, 0) ? 0 : int(s.batch_of_q));
        }
        ++tile;
        for (int block = ticket.first; block < end; ++block, ++taken) {
            const int page = min(max(next, 0), x.page_count - 1), key = block * KEYS + first_line;
            next = page_of(block + 1);
            const int lines = PAGED ? (min(KEYS, s.keys - block * KEYS) + p.box - 1) & -p.box : KEYS;
            const int line = PAGED ? key % x.page : s.first_key + key;
            const int batch = one_for(p, 1) ? 0 : PAGED ? page : int(s.batch_of_k);
#pragma unroll 1
            for (u32 i = 0; i < PANELS; ++i) {
                const u32 panel = i == 0 ? PANELS - 1 : i - 1;  // as they are left
                const u32 full = shared.full + panel * 8;
                if (lane == 0) {
                    mbarrier_wait(shared.empty + panel * 8, taken % 2 ^ 1);
                    mbarrier_arrive_expect_tx(full, lines * KTile::line_bytes);
                }
                __syncwarp();
                if (first_line < lines)
                    tma_load(shared.keys + panel * KTile::column_bytes + first_line * KTile::line_bytes, p.k,
                             full, panel * PANEL, line, head, batch);
            }
        }
    });
    if (lane == 0) {
        mbarrier_wait(shared.q_empty, tile % 2 ^ 1);
        tickets[tile % 2].first_query = -1;
        mbarrier_arrive(shared.q_full);
    }
}

__device__ __forceinline__ void load_shared_16(u32 (&x)[4], u32 from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}

using Scores = float[KEYS / 2];
using Weights = u32[KEYS / 16][4];
using Panel = float[PANEL / 2];  // of values
using Values = Panel[OWN];

// The softmax of the current segment.
struct Softmax : OnlineSoftmax {
    float shift[2];  // of scores

    // Raises n to the maxima of a block's scores.
    __device__ __forceinline__ void raise_to(const Scores& s, float c) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float m = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
            for (int u = 1; u < KEYS / 8; ++u) m = fmaxf(m, fmaxf(s[u * 4 + 2 * h], s[u * 4 + 2 * h + 1]));
            m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, 2));
            shift[h] = raise(h, __fmul_rn(m, c));
        }
    }

    // Turns 16 keys' scores to weights, and adds them.
    __device__ __forceinline__ void weigh(Scores& s, u32 (&weights)[4], int sixteen, float c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int h = i / 2 % 2;
            float &x = s[sixteen * 8 + i], &sum = l[h][i % 2];
            x = scores::exp2(__fmaf_rn(x, c, -shift[h]));
            sum = sixteen == 0 && i < 4 ? __fmaf_rn(sum, scale[h], x) : __fadd_rn(sum, x);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            weights[i] = Type::pack(s[sixteen * 8 + 2 * i], s[sixteen * 8 + 2 * i + 1]);
    }

    // Hands the state on to the same thread of the other consumer.
    __device__ __forceinline__ void store(u32 to) const {
        store_four(to, n[0], n[1], scale[0], scale[1]);
        store_four(to + 128 * 16, l[0][0], l[0][1], l[1][0], l[1][1]);
    }
    __device__ __forceinline__ void load(u32 from) {
        const float4 of_n = read_shared_4(from), of_l = read_shared_4(from + 128 * 16);
        n[0] = of_n.x, n[1] = of_n.y, scale[0] = of_n.z, scale[1] = of_n.w;
        l[0][0] = of_l.x, l[0][1] = of_l.y, l[1][0] = of_l.z, l[1][1] = of_l.w;
    }

  private:
    static __device__ __forceinline__ void store_four(u32 to, float a, float b, float c, float d) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d)
                     : "memory");
    }
};

constexpr int CHUNK = 16;                  // a thread's values that are merged together, of 32 columns
constexpr int CHUNKS = PANEL / 2 / CHUNK;  // of a panel
constexpr int AHEAD = 2;                   // chunks whose loads are under way

// What segments before the current one come to.
struct Total : MergedRows {
    using Held = float4[CHUNK / 4];

    // What this has of a chunk. There is no branch: ptxas would move a wait for products before it.
    __device__ __forceinline__ void load(const Params& p, Held& held, int chunk) const {
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i) {
            float4& x = held[i];
            x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            asm volatile(
                "{\n"
                ".reg .pred any;\n"
                "setp.ne.u32 any, %5, 0;\n"
                "@any ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                "}\n"
                : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
                : "l"(at(p, chunk, i)), "r"(u32(any))
                : "memory");
        }
    }

    // o = what all segments come to.
    __device__ __forceinline__ void merge(float* o, const Held& held) const {
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i) {
            float* const own = o + i * 4;
            own[0] = __fmaf_rn(held[i].x, scale[0], __fmul_rn(own[0], own_scale[0]));
            own[1] = __fmaf_rn(held[i].y, scale[0], __fmul_rn(own[1], own_scale[0]));
            own[2] = __fmaf_rn(held[i].z, scale[1], __fmul_rn(own[2], own_scale[1]));
            own[3] = __fmaf_rn(held[i].w, scale[1], __fmul_rn(own[3], own_scale[1]));
        }
    }

    __device__ __forceinline__ void keep(const Params& p, const float* o, int chunk) const {
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i)
            asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at(p, chunk, i)), "f"(o[i * 4]),
                         "f"(o[i * 4 + 1]), "f"(o[i * 4 + 2]), "f"(o[i * 4 + 3])
                         : "memory");
    }

  private:
    static __device__ __forceinline__ float4* at(const Params& p, int chunk, int i) {
        return reinterpret_cast<float4*>(p.scratch) + i64(blockIdx.x) * (ROWS * VALUES / 4) + threadIdx.x +
               (chunk * (CHUNK / 4) + i) * CONSUMERS;
    }
};

using Output = RowsOutput<Params, Ticket, PANEL, false>;

// A thread's two rows of a tile's results. What all chunks need is found once.
struct Results : Output {
    Merged rows[2];
    float scale[2], inverse[2];
    Stored* to[2];
    bool exists[2];

    __device__ __forceinline__ Results(const Params& p, const Ticket& ticket, const MergedRows& total,
                                       bool first)
        : Output{p, ticket} {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Row row = p.row(ticket, h);
            exists[h] = row.exists;
            rows[h] = total.rows[h];
            scale[h] = p.sinks ? rows[h].add_sink(p.sinks[row.exists ? row.head : 0]) : 1.0f;
            inverse[h] = rows[h].inverse();
            to[h] = out(row, 0) + lane() * 8;
            if (first && row.exists && lane() == 0) rows[h].store(p.lse, p.lse2, lse_at(row));
        }
        __syncwarp();
    }

    // 32 columns from `column` on.
    __device__ __forceinline__ void store(const float* o, int column) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[i] = Type::pack(rows[h].quotient(__fmul_rn(o[pair(i, h)], scale[h]), inverse[h]),
                                  rows[h].quotient(__fmul_rn(o[pair(i, h) + 1], scale[h]), inverse[h]));
            transpose(x);
            if (exists[h])
                asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to[h] + column), "r"(x[0]),
                             "r"(x[1]), "r"(x[2]), "r"(x[3])
                             : "memory");
        }
        __syncwarp();
    }
};

struct Consumer {
    const Params& p;
    const SharedStorage& shared;
    u32 warpgroup, thread;
    u32 taken = 0;  // blocks before

    // The panel of a block that is this consumer's panel `own` of values.
    __device__ __forceinline__ u32 panel(int own) const { return own * 2 + warpgroup; }
    __device__ __forceinline__ u32 values(int own) const {
        return shared.keys + VTile::step(panel(own) * PANEL, 0);
    }
    // Where a thread's weights of 16 keys lie.
    __device__ __forceinline__ u32 weights(int sixteen) const {
        return shared.keys + KTile::step(0, VALUES) + (sixteen * 128 + thread) * 16;
    }

    // Issues the scores of a block, as its panels arrive.
    __device__ __forceinline__ void multiply(Scores& s) const {
        const auto q = QTile::descriptor(shared.q), k = KTile::descriptor(shared.keys);
        wgmma_fence();
#pragma unroll
        for (u32 d = 0; d < HEAD; d += 16) {
            if (d % PANEL == 0) mbarrier_wait(shared.full + d / PANEL * 8, taken % 2);
            Wgmma<KEYS, 0, 0>::step(s, q.at(QTile::step(0, d)), k.at(KTile::step(0, d)), d > 0);
        }
        wgmma_commit();
    }

    // Issues o += P V for a panel; at a segment's `start` o = P V.
    __device__ __forceinline__ void multiply(Panel& o, int own, const Weights& w, bool start) const {
        const auto v = VTile::descriptor(values(own));
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i)
            WgmmaFragment<PANEL, 1>::step(o, w[i], v.at(VTile::step(0, i * 16)), i > 0 || !start);
        wgmma_commit();
    }

    // Hides scores that rows do not see.
    __device__ __forceinline__ void hide(Scores& s, const Ticket& ticket, int block) const {
        const int column = block * KEYS + threadIdx.x % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int query = p.row(ticket, h).query;
            const u32 visible = columns_below(ticket.sequence.last_seen(p.x, query) - column) &
                                ~columns_below(ticket.sequence.first_seen(p.x, query) - column);
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i)
                if (!(visible >> i & 1)) s[i / 2 * 4 + 2 * h + i % 2] = -INF;
        }
    }

    // Waits for all of the consumer's warps.
    __device__ __forceinline__ void together() const { named_barrier(TOGETHER + warpgroup, 128); }

    // Zeroes values of keys from `valid` on: what lies there may be another sequence's.
    __device__ __forceinline__ void clear(int valid) const {
#pragma unroll 1
        for (int own = 0; own < OWN; ++own)
#pragma unroll 1
            for (int i = thread; i < (KEYS - valid) * 8; i += 128)
                store_shared_16(values(own) + VTile::step(0, valid) + i * 16, {0, 0, 0, 0});
        fence_async_proxy();
        together();
    }

    // Before a block's products, whose softmax has its scale.
    __device__ __forceinline__ void prepare(Values& o, const Softmax& segment, bool start, int valid) const {
        if (!start && __any_sync(0xFFFFFFFF, segment.scale[0] != 1.0f || segment.scale[1] != 1.0f))
#pragma unroll
            for (int own = 0; own < OWN; ++own)
#pragma unroll
                for (int i = 0; i < PANEL / 2; ++i)
                    o[own][i] = __fmul_rn(o[own][i], segment.scale[i / 2 % 2]);
        if (valid < KEYS) clear(valid);
#pragma unroll
        for (int own = 0; own < OWN; ++own) pin(o[own]);
        wgmma_fence();
    }

    // Leaves a block's panels as they are multiplied; f(own) then has what it wants of the values. The wait is in each
    // branch, as ptxas would move it before the loads.
    template <int own = 0, typename F>
    __device__ __forceinline__ void leave(Values& o, F f) const {
        wgmma_wait<OWN - 1 - own>();
        pin(o[own]);
        warp_arrive(shared.empty + panel(own) * 8);
        f(own);
        if constexpr (own + 1 < OWN) leave<own + 1>(o, f);
    }

    // Merges a panel with the segments before, and hands it to f(chunk, x) by chunks. `held` has the next ones.
    template <typename F>
    __device__ __forceinline__ void merge(Values& o, int own, const Total& total, Total::Held (&held)[AHEAD],
                                          F f) const {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            const int chunk = own * CHUNKS + i;
            float* const x = o[own] + i * CHUNK;
            total.merge(x, held[chunk % AHEAD]);
            if (chunk + AHEAD < OWN * CHUNKS) total.load(p, held[chunk % AHEAD], chunk + AHEAD);
            f(chunk, x);
        }
    }

    // Merges a segment that more keys of the tile follow.
    __device__ __forceinline__ void keep(Values& o, Total& total) const {
        Total::Held held[AHEAD];
#pragma unroll
        for (int chunk = 0; chunk < AHEAD; ++chunk) total.load(p, held[chunk], chunk);
#pragma unroll
        for (int own = 0; own < OWN; ++own)
            merge(o, own, total, held, [&](int chunk, const float* x) { total.keep(p, x, chunk); });
        total.any = true;
    }

    // Stores the panels of a tile's last block as they are multiplied.
    __device__ __forceinline__ void store(const Ticket& ticket, Values& o, const Total& total) const {
        const Results results(p, ticket, total, warpgroup == 0);
        Total::Held held[AHEAD];
#pragma unroll
        for (int chunk = 0; chunk < AHEAD; ++chunk) total.load(p, held[chunk], chunk);
        leave(o, [&](int own) {
            merge(o, own, total, held, [&](int chunk, const float* x) {
                results.store(x, panel(own) * PANEL + chunk % CHUNKS * 2 * CHUNK);
            });
        });
    }

    // Goes over the keys of a tile.
    __device__ __forceinline__ void attend(const Ticket& ticket) {
        Values o;
        Total total;
        const Row upper = p.row(ticket, 0), lower = p.row(ticket, 1);
        const int first_seen = __shfl_sync(0xFFFFFFFF, ticket.sequence.first_seen(p.x, lower.query), 31);
        const int last_seen = __shfl_sync(0xFFFFFFFF, ticket.sequence.last_seen(p.x, upper.query), 0);
        const int end = ticket.end;
        const u32 state = shared.state + thread * 16;
        Softmax segment;
        bool start = true;  // o has nothing of the segment
#pragma unroll 1
        for (int block = ticket.first; block < end; ++block, ++taken) {
            const bool turn = (taken + warpgroup) % 2 == 0;
            const bool unfinished = !SPLIT && start && block > ticket.first;  // o is not merged yet
            if (start) segment.start();
            Weights w;
            if (turn) {
                Scores s;
                multiply(s);
                if (unfinished) keep(o, total);
                wgmma_wait<0>();
                pin(s);
                if (block + 1 == end) warp_arrive(shared.q_empty);
                if (block * KEYS < first_seen || block * KEYS + KEYS > last_seen) hide(s, ticket, block);
                segment.raise_to(s, p.x.c);
                together();  // all warps have read the keys where weights go
#pragma unroll
                for (int i = 0; i < KEYS / 16; ++i) {
                    segment.weigh(s, w[i], i, p.x.c);
                    store_shared_16(weights(i), w[i]);
                }
                segment.store(state);
                warp_arrive(shared.handed + warpgroup * 8);
            } else {
                if (unfinished) keep(o, total);
                if (block + 1 == end) warp_arrive(shared.q_empty);
                mbarrier_wait(shared.handed + (warpgroup ^ 1) * 8, taken / 2 % 2);
#pragma unroll
                for (int i = 0; i < KEYS / 16; ++i) load_shared_16(w[i], weights(i));
                segment.load(state);
                fence_async_proxy();  // weights were ordinary accesses
                warp_arrive(shared.empty + (PANELS - 1) * 8);
            }
            prepare(o, segment, start, ticket.sequence.keys - block * KEYS);
#pragma unroll
            for (int own = 0; own < OWN; ++own) multiply(o[own], own, w, start);
            start = block + 1 == end || (block + 1) % BLOCKS == 0;
            if (start) total.add(segment);
            if (SPLIT && start) {  // segments are merged elsewhere
                leave(o, [&](int own) { Output{p, ticket}.store_segment(block, o[own], total, panel(own)); });
                total = Total();
            } else if (block + 1 == end) {
                store(ticket, o, total);
            } else {
                leave(o, [](int) {});
            }
            pin(w);
        }
    }

    __device__ __forceinline__ void run() {
        for (u32 of_queries = 0;; of_queries ^= 1) {
            mbarrier_wait(shared.q_full, of_queries);
            const Ticket& ticket = tickets[of_queries];
            if (ticket.first_query < 0) break;
            if (ticket.first < ticket.end) {
                attend(ticket);
                continue;
            }
#pragma unroll 1
            for (int own = 0; own < OWN; ++own) Output{p, ticket}.store_nothing(panel(own));
            warp_arrive(shared.q_empty);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_latent_sm90(const __grid_constant__ Params p) {
    extern __shared__ unsigned char raw[];
    const SharedStorage shared(raw);
    if (threadIdx.x == CONSUMERS) {
        prefetch_tensor_map(p.q);
        prefetch_tensor_map(p.k);
        for (u32 panel = 0; panel < PANELS; ++panel) {
            mbarrier_init(shared.full + panel * 8, 1);
            mbarrier_init(shared.empty + panel * 8, 4 * WARP_ARRIVALS);
        }
        for (u32 consumer = 0; consumer < 2; ++consumer)
            mbarrier_init(shared.handed + consumer * 8, 4 * WARP_ARRIVALS);
        mbarrier_init(shared.q_full, 1);
        mbarrier_init(shared.q_empty, CONSUMERS / 32 * WARP_ARRIVALS);
        mbarrier_init_fence();
    }
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (PAGED && p.x.cu_q && blockIdx.x == 0 && threadIdx.x >= THREADS - 32) check_offsets(p.x);

    // Read from one lane: then the compiler knows it, and all addresses made of it, to be uniform in a warp.
    const u32 warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    if (warpgroup == CONSUMERS / 128) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x < CONSUMERS + 32) producer(shared, p);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer{p, shared, warpgroup, threadIdx.x % 128}.run();
    }
}

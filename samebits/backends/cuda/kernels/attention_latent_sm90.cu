// Latent attention on Hopper, forward: heads of 576 and values of 512, which are the first columns of the keys. Bits are
// those of docs/contract.md, "Attention".
//
// A block of the grid stays, and takes tiles of 64 rows, one after another: heads that share a head of k, times queries.
// It goes over the keys that they may see, 128 at a time. Both are in shared memory but once: queries take 72 KiB, and a
// stage of 64 keys as much, which is read for scores, and again for values.
//
// Decode (SPLIT): few rows, and many keys to stream. Tiles share the segments of their rows, and write what each comes
// to; merge_segments in attention.cu merges them in order.
//
// Warps of a block
//   2 warpgroups   consumers: each has the scores of one stage, and half of the columns of values
//   1 warpgroup    producer: one warp issues all TMA loads; its registers go to the consumers
//
// Barriers
//   q_full, q_empty   the queries of a tile have arrived; both consumers have multiplied them
//   full[stage]       64 keys have arrived
//   empty[stage]      both consumers have read them
//
// A block of 128 keys is both stages. The consumers meet twice in it: when they have the maxima of their scores, and
// when they have the probabilities. These lie where the keys' columns past the values were, as nobody needs them again.
// A row's sum of weights goes from one to the other: the first 64 keys come first in it.
//
// What segments before come to lies in global memory, each value where its thread alone reads it: registers hold one
// segment's. It stays in L2, and is read while scores are multiplied.
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

WGMMA_FRAGMENT(256, REGS_128, 128, 129, 130, 131, 132, 133, 134, ACC_64(0), ACC_64(64))

constexpr int OWN = VALUES / 2;  // a warpgroup's columns
constexpr int ROWS = 64, STAGE_KEYS = 64;
constexpr u32 CONSUMERS = 256, THREADS = CONSUMERS + 128, STAGES = 2;
constexpr u32 PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

using QTile = Tile<false, false, ROWS, HEAD, 1>;
using KTile = Tile<false, false, STAGE_KEYS, HEAD, 1>;
using VTile = Tile<true, false, VALUES, STAGE_KEYS, 1>;  // the same memory
static_assert(VTile::column_bytes == KTile::column_bytes && VTile::line_bytes == KTile::line_bytes);

struct Ticket {
    Sequence sequence;
    int head;         // the first one's
    int first_query;  // in the sequence
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
    int box;       // keys of a page that one copy brings, if PAGED: 8, 16, 32 or 64
    Problem x;

    __device__ __forceinline__ int query_of(int row) const { return row / members; }
    __device__ __forceinline__ int queries_of(const Ticket&) const { return height; }
    __device__ __forceinline__ Row row(const Ticket& ticket, int h) const {
        return {*this, ticket, int(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h)};
    }
};

struct SharedStorage {
    u32 q, ring, full, empty, q_full, q_empty;
    u32 sums, maxima;  // of each thread of a warpgroup, and of each row of both
    Ticket* tickets;   // of each warpgroup

    __device__ explicit SharedStorage(unsigned char* raw) {
        const u32 start = shared_address(raw),
                  behind = (start + 1023) & ~1023u;  // a whole period of the swizzle
        q = behind;
        ring = q + QTile::bytes;
        sums = ring + STAGES * KTile::bytes;
        maxima = sums + 128 * 16;
        full = maxima + 2 * ROWS * 4;
        empty = full + STAGES * 8;
        q_full = empty + STAGES * 8;
        q_empty = q_full + 8;
        tickets = reinterpret_cast<Ticket*>(raw + (q_empty + 8 - start));
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
    const int lane = threadIdx.x % 32;
    const int first_line = PAGED ? lane * p.box : lane * STAGE_KEYS;  // of this lane's box in a stage
    Ring<STAGES> ring;
    u32 parity = 1;
    for_each_tile(p, [&](const Ticket& ticket) {
        if (ticket.first >= ticket.end) return;
        const Sequence& s = ticket.sequence;
        const int head = one_for(p, 3) ? 0 : ticket.head / x.group, keys = s.keys, end = ticket.end * KEYS;
        const int* const pages = x.pages + (PAGED ? s.batch * x.pages_batch : 0);
        const auto page_of = [&](int key) { return PAGED && key < min(keys, end) ? pages[key / x.page] : 0; };
        int key = ticket.first * KEYS + first_line;
        int next = first_line < STAGE_KEYS ? page_of(key) : 0;
        if (lane == 0) {
            mbarrier_wait(shared.q_empty, parity);
            mbarrier_arrive_expect_tx(shared.q_full, QTile::columns * p.height * p.members * 128);
#pragma unroll 1
            for (u32 column = 0; column < QTile::columns; ++column)
                tma_load(shared.q + column * QTile::column_bytes, p.q, shared.q_full, column * 64,
                         one_for(p, 2) ? 0 : ticket.head, s.first_query + ticket.first_query,
                         one_for(p, 0) ? 0 : int(s.batch_of_q));
        }
        parity ^= 1;
        for (int stage_key = ticket.first * KEYS; stage_key < end;
             stage_key += STAGE_KEYS, key += STAGE_KEYS) {
            const int page = min(max(next, 0), x.page_count - 1);
            if (first_line < STAGE_KEYS) next = page_of(key + STAGE_KEYS);
            const u32 full = shared.full + ring.stage * 8;
            const u32 to = shared.ring + ring.stage * KTile::bytes + first_line * KTile::line_bytes;
            const int lines =
                PAGED ? (max(min(STAGE_KEYS, keys - stage_key), 0) + p.box - 1) & -p.box : STAGE_KEYS;
            if (lane == 0) {
                mbarrier_wait(shared.empty + ring.stage * 8, ring.parity ^ 1);
                mbarrier_arrive_expect_tx(full, lines * KTile::columns * KTile::line_bytes);
            }
            __syncwarp();
            if (first_line < lines) {
                const int line = PAGED ? key % x.page : s.first_key + key;
                const int batch = one_for(p, 1) ? 0 : PAGED ? page : int(s.batch_of_k);
#pragma unroll 1
                for (u32 column = 0; column < KTile::columns; ++column)
                    tma_load(to + column * KTile::column_bytes, p.k, full, column * 64, line, head, batch);
            }
            ring.step();
        }
    });
}

using Scores = float[STAGE_KEYS / 2];
using Weights = u32[STAGE_KEYS / 16][4];
using Values = float[OWN / 2];

// The softmax of the current segment.
struct Softmax : OnlineSoftmax {
    // Raises n to the maxima of a block's scores, and turns those of a stage to weights.
    __device__ __forceinline__ void weigh(Scores& s, const float (&maxima)[2], float c) {
        float shift[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) shift[h] = raise(h, __fmul_rn(maxima[h], c));
#pragma unroll
        for (int i = 0; i < STAGE_KEYS / 2; ++i) s[i] = scores::exp2(__fmaf_rn(s[i], c, -shift[i / 2 % 2]));
    }

    // Adds the weights of a stage.
    template <bool FIRST>
    __device__ __forceinline__ void add(const Scores& s) {
#pragma unroll
        for (int i = 0; i < STAGE_KEYS / 2; ++i) {
            const int h = i / 2 % 2;
            float& sum = l[h][i % 2];
            sum = FIRST && i / 4 == 0 ? __fmaf_rn(sum, scale[h], s[i]) : __fadd_rn(sum, s[i]);
        }
    }

    __device__ __forceinline__ void load_sums(u32 from) {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(l[0][0]), "=f"(l[0][1]), "=f"(l[1][0]), "=f"(l[1][1])
                     : "r"(from)
                     : "memory");
    }
    __device__ __forceinline__ void store_sums(u32 to) const {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(l[0][0]), "f"(l[0][1]),
                     "f"(l[1][0]), "f"(l[1][1])
                     : "memory");
    }
};

// What segments before the current one come to.
struct Total : MergedRows {
    float4* memory;  // this thread's

    __device__ __forceinline__ explicit Total(const Params& p)
        : memory(reinterpret_cast<float4*>(p.scratch) + i64(blockIdx.x) * (ROWS * VALUES / 4) + threadIdx.x) {
    }

    // o = what all segments come to, which is kept, too, if more follow.
    template <bool MORE>
    __device__ __forceinline__ void merge(Values& o) {
        constexpr int TOGETHER = 8;  // loads in flight
#pragma unroll
        for (int begin = 0; begin < OWN / 8; begin += TOGETHER) {
            float4 held[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) held[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (!SPLIT && any)
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) load(held[i], memory + (begin + i) * CONSUMERS);
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                float* const own = o + (begin + i) * 4;
                own[0] = __fmaf_rn(held[i].x, scale[0], __fmul_rn(own[0], own_scale[0]));
                own[1] = __fmaf_rn(held[i].y, scale[0], __fmul_rn(own[1], own_scale[0]));
                own[2] = __fmaf_rn(held[i].z, scale[1], __fmul_rn(own[2], own_scale[1]));
                own[3] = __fmaf_rn(held[i].w, scale[1], __fmul_rn(own[3], own_scale[1]));
                if (!SPLIT && MORE) store(memory + (begin + i) * CONSUMERS, own);
            }
        }
        any = true;
    }

  private:
    static __device__ __forceinline__ void load(float4& x, const float4* from) {
        asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                     : "l"(from)
                     : "memory");
    }
    static __device__ __forceinline__ void store(float4* to, const float* x) {
        asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                     "f"(x[3])
                     : "memory");
    }
};

using Output = RowsOutput<Params, Ticket, OWN, false>;  // a warpgroup's columns

__device__ __forceinline__ void load_shared_16(u32 (&x)[4], u32 from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}

struct Consumer {
    const Params& p;
    const SharedStorage& shared;
    u32 warpgroup, thread;
    u32 parity = 0;  // of the stages' barriers: a block has both of them

    __device__ __forceinline__ u32 keys_of(u32 stage) const { return shared.ring + stage * KTile::bytes; }

    __device__ __forceinline__ void meet() const { named_barrier(3, CONSUMERS); }
    __device__ __forceinline__ void await(u32 stage) const { mbarrier_wait(shared.full + stage * 8, parity); }

    // Issues the scores of a stage.
    __device__ __forceinline__ void multiply(Scores& s, u32 stage) const {
        wgmma_fence();
        ::multiply<QTile, KTile, HEAD>(s, shared.q, keys_of(stage));
        wgmma_commit();
    }

    // Issues o += P V of a stage; at a segment's `start` o = P V.
    __device__ __forceinline__ void multiply(Values& o, const Weights& weights, u32 stage, bool start) const {
        accumulate<VTile>(o, weights, keys_of(stage) + VTile::step(warpgroup * OWN, 0), start);
        wgmma_commit();
    }

    // Hides scores of a stage that rows do not see.
    __device__ __forceinline__ void hide(Scores& s, const Ticket& ticket, int first_key) const {
        const int column = first_key + threadIdx.x % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int query = p.row(ticket, h).query;
            const u32 visible = columns_below(ticket.sequence.last_seen(p.x, query) - column) &
                                ~columns_below(ticket.sequence.first_seen(p.x, query) - column);
#pragma unroll
            for (int i = 0; i < STAGE_KEYS / 4; ++i)
                if (!(visible >> i & 1)) s[i / 2 * 4 + 2 * h + i % 2] = -INF;
        }
    }

    // The maxima of a stage's scores become those of both stages'.
    __device__ __forceinline__ void share_maxima(const Scores& s, float (&m)[2]) const {
        const u32 own = shared.maxima + (thread / 32 * 16 + thread % 32 / 4) * 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            m[h] = -INF;
#pragma unroll
            for (int u = 0; u < STAGE_KEYS / 8; ++u)
                m[h] = fmaxf(m[h], fmaxf(s[u * 4 + 2 * h], s[u * 4 + 2 * h + 1]));
            m[h] = fmaxf(m[h], __shfl_xor_sync(0xFFFFFFFF, m[h], 1));
            m[h] = fmaxf(m[h], __shfl_xor_sync(0xFFFFFFFF, m[h], 2));
            if (thread % 4 == 0) store_shared(own + warpgroup * ROWS * 4 + h * 32, m[h]);
        }
        meet();
#pragma unroll
        for (int h = 0; h < 2; ++h)
            m[h] = fmaxf(m[h], load_shared(own + (warpgroup ^ 1) * ROWS * 4 + h * 32));
    }

    // Where this thread's weights of a stage lie.
    __device__ __forceinline__ u32 weights_of(u32 stage) const {
        return keys_of(stage) + KTile::step(0, VALUES) + thread * 16;
    }

    // Zeroes this warpgroup's columns of keys from `valid` on.
    __device__ __forceinline__ void clear(u32 stage, int valid) const {
        const int lines = STAGE_KEYS - max(valid, 0);
        const u32 from = keys_of(stage) + VTile::step(warpgroup * OWN, 0) + max(valid, 0) * VTile::line_bytes;
#pragma unroll 1
        for (int column = 0; column < OWN / 64; ++column)
#pragma unroll 1
            for (int i = thread; i < lines * 8; i += 128)
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                                 from + column * VTile::column_bytes + i * 16),
                             "r"(0)
                             : "memory");
    }

    // Goes over the keys; o and `total` are then those of all of them.
    __device__ __forceinline__ void attend(const Ticket& ticket, Values& o, Total& total) {
        const Row upper = p.row(ticket, 0), lower = p.row(ticket, 1);
        const int first_seen = __shfl_sync(0xFFFFFFFF, ticket.sequence.first_seen(p.x, lower.query), 31);
        const int last_seen = __shfl_sync(0xFFFFFFFF, ticket.sequence.last_seen(p.x, upper.query), 0);
        const int first = ticket.first, end = ticket.end;
        const u32 sums = shared.sums + thread * 16;
        Softmax segment;
        segment.start();
        bool start = true;  // o has nothing of the segment
#pragma unroll 1
        for (int block = first; block < end; ++block, parity ^= 1) {
            if (block % BLOCKS == 0 && block > first) {  // while keys arrive
                finish_segment(segment, total);
                total.template merge<true>(o);
                if (SPLIT) {
                    Output{p, ticket}.store_segment(block - 1, o, total, warpgroup);
                    total = Total(p);
                }
                segment.start();
                start = true;
            }
            Scores s;
            await(warpgroup);
            multiply(s, warpgroup);
            wgmma_wait<0>();
            pin(s);
            if (block + 1 == end) warp_arrive(shared.q_empty);
            const int first_key = block * KEYS + int(warpgroup) * STAGE_KEYS;
            if (first_key < first_seen || first_key + STAGE_KEYS > last_seen) hide(s, ticket, first_key);
            float maxima[2];
            share_maxima(s, maxima);
            segment.weigh(s, maxima, p.x.c);
            Weights own, others;
            pack(own, s);
#pragma unroll
            for (int i = 0; i < STAGE_KEYS / 16; ++i)
                store_shared_16(weights_of(warpgroup) + i * 2048, own[i]);
            if (warpgroup == 0) {
                if (!start) segment.load_sums(sums);
                segment.template add<true>(s);
                segment.store_sums(sums);
            }
            meet();
            if (warpgroup == 1) {
                segment.load_sums(sums);
                segment.template add<false>(s);
                segment.store_sums(sums);
            }
#pragma unroll
            for (int i = 0; i < STAGE_KEYS / 16; ++i)
                load_shared_16(others[i], weights_of(warpgroup ^ 1) + i * 2048);
            if (!start && __any_sync(0xFFFFFFFF, segment.scale[0] != 1.0f || segment.scale[1] != 1.0f))
#pragma unroll
                for (int i = 0; i < OWN / 2; ++i) o[i] = __fmul_rn(o[i], segment.scale[i / 2 % 2]);
#pragma unroll
            for (int i = 0; i < STAGE_KEYS / 4; ++i) {  // those of the first stage come first
                const u32 first_weight = warpgroup == 0 ? own[i / 4][i % 4] : others[i / 4][i % 4];
                others[i / 4][i % 4] = warpgroup == 0 ? others[i / 4][i % 4] : own[i / 4][i % 4];
                own[i / 4][i % 4] = first_weight;
            }
            await(warpgroup ^ 1);
            const int valid = ticket.sequence.keys - block * KEYS;
            if (valid < KEYS) {  // what lies behind may be another sequence's
                clear(0, valid);
                clear(1, valid - STAGE_KEYS);
                fence_async_proxy();
                named_barrier(1 + warpgroup, 128);
            }
            pin(o);
            pin(own);
            pin(others);
            wgmma_fence();
            multiply(o, own, 0, start);
            multiply(o, others, 1, false);
            fence_async_proxy();  // weights were ordinary accesses
            wgmma_wait<1>();
            warp_arrive(shared.empty);
            wgmma_wait<0>();
            pin(o);
            warp_arrive(shared.empty + 8);
            start = false;
        }
        finish_segment(segment, total);
        total.template merge<false>(o);
        if (SPLIT) Output{p, ticket}.store_segment(end - 1, o, total, warpgroup);
    }

    // Adds a segment's rows to the total.
    __device__ __forceinline__ void finish_segment(Softmax& segment, Total& total) const {
        meet();  // the second warpgroup has its last sums
        segment.load_sums(shared.sums + thread * 16);
        total.add(segment);
    }

    __device__ __forceinline__ void run() {
        u32 of_queries = 0;
        Ticket& ticket = shared.tickets[warpgroup];
        for_each_tile(p, [&](const Ticket& found) {
            named_barrier(1 + warpgroup, 128);  // all have read the one before
            if (thread == 0) ticket = found;
            named_barrier(1 + warpgroup, 128);
            if (ticket.first >= ticket.end) {
                Output{p, ticket}.store_nothing(warpgroup);
                return;
            }
            mbarrier_wait(shared.q_full, of_queries);
            of_queries ^= 1;
            Values o;
            Total total(p);
            attend(ticket, o, total);
            if (!SPLIT) Output{p, ticket}.store(o, total, warpgroup);
        });
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_latent_sm90(const __grid_constant__ Params p) {
    extern __shared__ unsigned char raw[];
    const SharedStorage shared(raw);
    if (threadIdx.x == CONSUMERS) {
        prefetch_tensor_map(p.q);
        prefetch_tensor_map(p.k);
        for (u32 stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared.full + stage * 8, 1);
            mbarrier_init(shared.empty + stage * 8, CONSUMERS / 32 * WARP_ARRIVALS);
        }
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

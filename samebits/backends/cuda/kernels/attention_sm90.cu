// Attention on Hopper, forward: O = softmax(Q K^T) V, as docs/contract.md, "Attention", has it, without windows
// under masks.
//
// A block takes a tile of queries, of one head or of all heads that share one of k and v, and goes over the
// keys that they may see, 128 at a time. Blocks of the grid stay, and take several tiles, one after another.
//
// Prefill: a tile goes over all segments of its rows.
// Decode (SPLIT): few rows, and many keys to stream. Tiles share the segments of their rows, and write what
// each comes to; merge_segments in attention.cu merges them in order.
//
// Warps of a block
//   WARPGROUPS warpgroups   consumers, 64 rows each; they share keys and values
//   1 warpgroup             producer: one warp finds tiles and issues all TMA loads; its registers go to the
//                           consumers
//
// Barriers
//   q_full, q_empty         a ticket and its tile of queries have arrived; all consumers have multiplied it
//   full[stage]             a tile of keys or of values has arrived
//   empty[stage]            all consumers have read it
//   ORDER + warpgroup       a named one: the warpgroup's turn to issue products
//
// Ring: K0 K1 V0 K2 V1 ... Kn Vn-1 Vn, as consumers read them, then those of the next tile.
//
// Timeline of a consumer. Its next scores and its last values are multiplied while it does the arithmetic of
// scores; and warpgroups issue in turn, so that one has the tensor cores while the other does arithmetic.
//
//   tensor cores  |QK 0|         |QK 1, PV 0|         |QK 2, PV 1|
//   arithmetic         |softmax 0|     |softmax 1     |     |softmax 2
//
// Pages (PAGED): a tile comes in boxes of lines that lie in one page, and those past the end of a sequence are
// not read. The producer's lanes look up the pages of the tile after next.
//
// Masks (MASK): a tile is taken in runs of rows (attention_mask.cuh), mostly one. Keys are counted among those that
// the run's last row shows. Where these have no gaps, tiles come by TMA, from any line on; else the producer lists
// them, and gathers their lines. A row's own count tells what it sees; only float masks are read again, and added:
// each warp of a consumer brings what its rows need by TMA as their scores are multiplied, or gathers it. Along
// the innermost dimension TMA reads from multiples of 16 bytes on; from elsewhere is an illegal instruction.
//
// The results of a segment are merged with those of the segments before it. These stay in registers, or in
// shared memory, each value by the thread that has it, where values are long.
//
// Macros
//   INPUT_F16       1: f16 operands; 0: bf16
//   HEAD, VALUES    sizes of a row of q and k, and of v, multiples of 16 up to 128; columns past the end are
//                   zeros
//   SOFTCAP         1: scores are capped
//   WARPGROUPS      consumer warpgroups: 1, 2 or 3
//   FEW             1: tiles have at most 8 rows, so that no thread has a second one
//   RESIDENT        blocks that shall be on a multiprocessor: 1, or 2 if FEW
//   STAGES          stages of the ring, 3 or more
//   SPLIT           1: segments go to scratch; 0: to `out`
//   PAGED           1: keys and values lie in pages, and `key_start` is null
//   MASK            NONE, BOOLEAN, F32, BF16 or F16; not NONE: there are no windows, pages and packed sequences

#if !defined(INPUT_F16) || !defined(SOFTCAP) || !defined(SPLIT) || !defined(FEW) || !defined(PAGED) || \
    !defined(MASK)
#error "all macros are needed: #if takes a missing macro for 0"
#endif
#define HARDWARE_EXP2 1

#include "attention_forward_sm90.cuh"
#include "attention_mask.cuh"
#include "ptx_sm80.cuh"

static_assert(HEAD % 16 == 0 && HEAD <= 128 && VALUES % 16 == 0 && VALUES <= 128 && STAGES >= 3);
static_assert(WARPGROUPS >= 1 && WARPGROUPS <= 3 &&
              (RESIDENT == 1 || (RESIDENT == 2 && FEW && WARPGROUPS == 1)));
constexpr u32 CONSUMERS = WARPGROUPS * 128, ROWS = WARPGROUPS * 64, THREADS = CONSUMERS + 128;
constexpr bool TIGHT = FLOAT_MASK && WARPGROUPS == 2;  // consumers need registers more than the producer does
constexpr u32 PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : MASKED && !TIGHT ? 72 : 56;
constexpr u32 CONSUMER_REGISTERS = RESIDENT == 2      ? 256 - PRODUCER_REGISTERS
                                   : WARPGROUPS == 3  ? 160
                                   : !MASKED || TIGHT ? 224
                                   : WARPGROUPS == 2  ? 216
                                                      : 240;
constexpr u32 BIAS_WARPS = !FLOAT_MASK ? 0 : FEW ? 1 : CONSUMERS / 32;  // with rows to which a mask adds
constexpr bool TOTAL_IN_REGISTERS = VALUES <= 64 && WARPGROUPS < 3 && !FLOAT_MASK;
constexpr u32 KEEPERS = FEW ? 32 : CONSUMERS;  // threads that have rows with queries
// Whether consumers give queries back before the arithmetic of their last scores, if registers allow.
constexpr bool LEAVES_EARLY = WARPGROUPS < 3;
constexpr u32 ORDER = 1, CLEARED = ORDER + WARPGROUPS;  // named barriers; 0 is __syncthreads

// If FEW, products read lines behind these: whatever lies there, as the rows are nobody's.
using QTile = Tile<false, false, FEW ? 8 : ROWS, HEAD, 1>;
using KTile = Tile<false, false, KEYS, HEAD, 1>;
using VTile = Tile<true, false, VALUES, KEYS, 1>;
constexpr u32 STAGE_BYTES = KTile::bytes > VTile::bytes ? KTile::bytes : VTile::bytes;

// What a float mask adds to a warp's rows in a block: columns of 128 bytes, 16 lines each, as TMA swizzles them.
struct BiasTile {
    using Value = Mask::Stored;
    static constexpr u32 WIDTH = 128 / sizeof(Value), COLUMNS = KEYS / WIDTH;
    static constexpr u32 COLUMN_BYTES = 16 * 128, BYTES = COLUMNS * COLUMN_BYTES;
    static __device__ __forceinline__ u32 at(u32 line, u32 key) {
        const u32 byte = key % WIDTH * sizeof(Value);
        return key / WIDTH * COLUMN_BYTES + line * 128 + (byte ^ line % 8 * 16);
    }
};

// What the producer tells consumers of a tile.
struct Ticket {
    Sequence sequence;
    int head;         // the first one's
    int first_query;  // in the sequence; negative: there are no more tiles
    int first, end;   // blocks of keys
#if MASK != NONE
    int rows, keys;  // queries of the run; keys that its last one shows
    i64 last_row;    // that one, in Rows
#endif
};

struct Params {
    TensorMap q, k, v;
#if MASK != NONE && MASK != BOOLEAN
    TensorMap mask;
#endif
    Stored* out;
    const float* sinks;  // of each head, or null
    float *lse, *lse2;   // lse may be null
    float* scratch;      // [rows, segments, VALUES + 2]
    int* next;           // the next tile, if blocks take what comes; null: each has its own
    i64 lse_batch, lse_head;
    int tiles;     // of queries, for each of `heads`
    int heads;     // or groups of heads, of all sequences, or of all together if packed
    int together;  // heads whose tiles are taken in turns, so that keys and values stay in L2
    int segments;  // most that a sequence may have
    int shares;    // tiles that share the segments of a row, if SPLIT
    int share;     // and how many segments each has; if PAGED the sequence's length says
    int members;   // heads in a tile, side by side: 1, or all that share a head of k and v
    int height;    // queries in a tile
    int shared;    // bits 0 to 5: q, k, v have one matrix for all of the batch; for all heads
    int box;       // lines of a page that one copy brings, if PAGED: 8, 16, 32, 64 or 128
    Problem x;
#if MASK != NONE
    Rows rows;
    const Stored *k_lines, *v_lines;  // k and v
    Strides k_strides, v_strides;
    int bias_lines;  // of a mask's box: those of all queries that a warp may have; 0: TMA does not read the mask
#endif

    __device__ __forceinline__ int query_of(int row) const { return members == 1 ? row : row / members; }
    __device__ __forceinline__ int queries_of(const Ticket& ticket) const {
#if MASK == NONE
        return height;
#else
        return ticket.rows;
#endif
    }
    __device__ __forceinline__ Row row(const Ticket& ticket, int h) const {
        return {*this, ticket, int(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h)};
    }
};

// Of the next tile, of this one, and of that which some consumers still store.
__shared__ Ticket tickets[3];

#if MASK != NONE
// Blocks are counted over all tiles that a block of the grid takes. Consumers need a block's keys while the producer
// lists those of the block after the next, and finds some of one more: with 3 stages. With 8 it is three ahead of that.
constexpr int LISTED = STAGES == 3 ? 4 : 8;
static_assert(STAGES <= 8);
__shared__ KeysInBlocks<LISTED> shown;
__shared__ int first_keys[LISTED];  // of a block whose keys have no gaps; -1: they are listed in `shown`
#endif

__device__ __forceinline__ u32 slot_after(u32 slot) { return slot == 2 ? 0 : slot + 1; }

struct SharedStorage {
    u32 full, empty, q_full, q_empty, bias_full, q, ring, bias, total;

    __device__ explicit SharedStorage(unsigned char* raw) {
        full = shared_address(raw);
        empty = full + STAGES * 8;
        q_full = empty + STAGES * 8;
        q_empty = q_full + 8;
        bias_full = q_empty + 8;
        q = (bias_full + BIAS_WARPS * 8 + 1023) & ~1023u;  // a whole period of the swizzle
        ring = q + QTile::bytes;
        bias = ring + STAGES * STAGE_BYTES;
        total = bias + BIAS_WARPS * BiasTile::BYTES;
    }
};

// Fills the ticket of tile `index`; false if there is no such tile. All lanes of a warp do so together. `offset`: of
// the run in the tile; it becomes that of the next one, or 0.
__device__ __forceinline__ bool find(const Params& p, int index, int& offset, Ticket& to) {
    const Problem& x = p.x;
    Ticket ticket;
    const int all_heads = x.heads * x.group / p.members;
    int matrix, tile, share = 0;
    if (SPLIT) {
        matrix = index % p.heads;
        index /= p.heads;
        share = index % p.shares;
        tile = index / p.shares;
    } else {
        // Of a pack of heads the last tiles come first: they see the most keys.
        const int per_pack = p.tiles * p.together, pack = index / per_pack;
        index -= pack * per_pack;
        const int side_by_side = min(p.together, p.heads - pack * p.together), late = index / side_by_side;
        matrix = pack * p.together + index - late * side_by_side;
        tile = p.tiles - 1 - late;
    }
    Place place{matrix / all_heads, tile};
    ticket.head = (matrix - place.batch * all_heads) * p.members;
    if (x.cu_q) place = place_in_packed(x.cu_q, x.batch, x.queries, 1, p.height, tile);
    if (place.batch < 0) return false;
    const Sequence sequence(x, place.batch);
    const int first_query = place.tile * p.height;
    if (first_query >= sequence.queries) return false;
    const int end_query = min(first_query + p.height, sequence.queries);
    ticket.sequence = sequence;
#if MASK == NONE
    ticket.first_query = first_query;
    ticket.first = sequence.first_seen(x, first_query) / KEYS;
    ticket.end = (sequence.last_seen(x, end_query - 1) + KEYS - 1) / KEYS;
#else
    const int run = first_query + offset;
    const int run_end = p.rows.query_run_end(x, place.batch, ticket.head, run, end_query);
    offset = run_end < end_query ? run_end - first_query : 0;
    ticket.first_query = run;
    ticket.rows = run_end - run;
    ticket.last_row = p.rows.row(x, place.batch, ticket.head, run_end - 1);
    ticket.keys = p.rows.count(ticket.last_row);
    ticket.first = 0;
    ticket.end = (ticket.keys + KEYS - 1) / KEYS;
#endif
    if (SPLIT) {
        int first = 0, segments = p.share;
        if (PAGED || MASKED) {  // tables are as wide as the longest sequence may become, and masks, too
            first = ticket.first / BLOCKS;
            segments = ((ticket.end + BLOCKS - 1) / BLOCKS - first + p.shares - 1) / p.shares;
        }
        ticket.first = max(ticket.first, (first + share * segments) * BLOCKS);
        ticket.end = min(ticket.end, (first + (share + 1) * segments) * BLOCKS);
        if (ticket.first >= ticket.end) return false;
    }
    if (threadIdx.x % 32 == 0) to = ticket;
    return true;
}

// The tile that a block takes in a round. Every other round is reversed, so that no block gets all the long
// ones.
__device__ __forceinline__ int tile_of(const Params& p, int round) {
    if (p.next) {
        int taken = 0;
        if (threadIdx.x % 32 == 0) taken = atomicAdd(p.next, 1);
        return __shfl_sync(0xFFFFFFFF, taken, 0);
    }
    const int slot = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return round * int(gridDim.x) + slot;
}

// Loads the queries of a ticket. One thread does so.
__device__ __forceinline__ void load_queries(const SharedStorage& shared, const Params& p,
                                             const Ticket& ticket) {
    mbarrier_arrive_expect_tx(shared.q_full, QTile::columns * p.height * p.members * 128);
#pragma unroll
    for (u32 column = 0; column < QTile::columns; ++column)
        tma_load(shared.q + column * QTile::column_bytes, p.q, shared.q_full, column * 64,
                 one_for(p, 3) ? 0 : ticket.head, ticket.sequence.first_query + ticket.first_query,
                 one_for(p, 0) ? 0 : int(ticket.sequence.batch_of_q));
}

// Loads the tile of a ticket: its queries, and keys and values as consumers read them. One thread does so. The first
// keys do not wait for the queries of the tile before to be read.
__device__ __forceinline__ void load(const SharedStorage& shared, const Params& p, const Ticket& ticket,
                                     Ring<STAGES>& ring, u32 parity) {
    const int head = ticket.head / p.x.group, batch = int(ticket.sequence.batch_of_k);
    const int end = ticket.sequence.first_key + ticket.end * KEYS;
    int k_line = ticket.sequence.first_key + ticket.first * KEYS, v_line = k_line;
    // K0, K1, V0, K2, V1, ...: keys keep ahead by a tile.
    for (bool queries = false;; ring.step()) {
        if (!queries && (k_line > v_line || v_line >= end)) {
            queries = true;
            mbarrier_wait(shared.q_empty, parity);
            load_queries(shared, p, ticket);
        }
        if (v_line >= end) break;
        const u32 full = shared.full + ring.stage * 8, to = shared.ring + ring.stage * STAGE_BYTES;
        mbarrier_wait(shared.empty + ring.stage * 8, ring.parity ^ 1);
        if (k_line - v_line < 2 * KEYS && k_line < end) {
            mbarrier_arrive_expect_tx(full, KTile::bytes);
            KTile::for_each_box(0, 0, 0, [&](u32 offset, int column, int, int) {
                tma_load(to + offset, p.k, full, column, k_line, one_for(p, 4) ? 0 : head,
                         one_for(p, 1) ? 0 : batch);
            });
            k_line += KEYS;
        } else {
            mbarrier_arrive_expect_tx(full, VTile::bytes);
            VTile::for_each_box(0, 0, 0, [&](u32 offset, int column, int, int) {
                tma_load(to + offset, p.v, full, column, v_line, one_for(p, 5) ? 0 : head,
                         one_for(p, 2) ? 0 : batch);
            });
            v_line += KEYS;
        }
    }
}

// The same from pages. All lanes of a warp do so together: each looks up and loads a box of every tile.
// Keys and values that consumers need not have the queries for come first: they arrive while the tile before
// is at work.
__device__ __forceinline__ void load_pages(const SharedStorage& shared, const Params& p, const Ticket& ticket,
                                           Ring<STAGES>& ring, u32 parity) {
    constexpr int BEFORE_QUERIES = STAGES > 4 ? STAGES - 3 : 1;  // tiles that wait for no keys of this ticket
    __syncwarp();                                                // the ticket is there
    const Problem& x = p.x;
    const int first_line = threadIdx.x % 32 * p.box;  // of this lane's box in a tile
    const int keys = ticket.sequence.keys, end = ticket.end, head = ticket.head / x.group;
    const int* const pages = x.pages + ticket.sequence.batch * x.pages_batch;
    const auto page_of = [&](int tile) {
        const int key = tile * KEYS + first_line;
        return first_line < KEYS && tile < end && key < keys ? pages[key / x.page] : 0;
    };
    int k_tile = ticket.first, v_tile = k_tile;
    const int steps = 2 * (end - k_tile), before_queries = max(min(BEFORE_QUERIES, steps - 1), 0);
    // Of the next tile of keys, and of two that there are; as read, so that nobody waits for it here.
    int next = page_of(k_tile), newest = 0, oldest = 0;
    for (int step = 0; step < steps || step == before_queries; ++step) {
        if (step == before_queries && threadIdx.x % 32 == 0) {
            mbarrier_wait(shared.q_empty, parity);
            load_queries(shared, p, ticket);
        }
        if (step >= steps) break;
        const bool of_keys = k_tile - v_tile < 2 && k_tile < end;
        const int tile = of_keys ? k_tile : v_tile;
        const int found = of_keys ? next : k_tile - v_tile < 2 ? newest : oldest;
        const int page = min(max(found, 0), x.page_count - 1);
        if (of_keys) {
            oldest = newest;
            newest = next;
            next = page_of(++k_tile);
        } else {
            ++v_tile;
        }
        const u32 full = shared.full + ring.stage * 8, to = shared.ring + ring.stage * STAGE_BYTES;
        const int line = (tile * KEYS + first_line) % x.page;
        const int lines = (min(KEYS, keys - tile * KEYS) + p.box - 1) & -p.box;
        if (threadIdx.x % 32 == 0) {
            mbarrier_wait(shared.empty + ring.stage * 8, ring.parity ^ 1);
            mbarrier_arrive_expect_tx(full, lines * (of_keys ? KTile::columns * KTile::line_bytes
                                                             : VTile::columns * VTile::line_bytes));
        }
        __syncwarp();
        if (first_line < lines && of_keys) {
            KTile::for_each_box(0, 0, 0, [&](u32 offset, int column, int, int) {
                tma_load(to + offset + first_line * KTile::line_bytes, p.k, full, column, line,
                         one_for(p, 4) ? 0 : head, one_for(p, 1) ? 0 : page);
            });
        } else if (first_line < lines) {
            VTile::for_each_box(0, 0, 0, [&](u32 offset, int column, int, int) {
                tma_load(to + offset + first_line * VTile::line_bytes, p.v, full, column, line,
                         one_for(p, 5) ? 0 : head, one_for(p, 2) ? 0 : page);
            });
        }
        ring.step();
    }
}

#if MASK != NONE
// Copies lines of a tile of keys or of values, `size` elements each: those at `position` on of the list, `count` of
// them; others are zeros. All lanes of a warp do so together.
template <typename Tile, int columns>
__device__ __forceinline__ void gather(u32 to, const Stored* from, i64 stride, int size, int position,
                                       int count) {
    constexpr int chunks = columns / 8, of_line = Tile::line_bytes / 16;
    const int lane = threadIdx.x % 32;
    const auto copy = [&](int line, int chunk) {
        const u32 at = chunk / of_line * Tile::column_bytes + line * Tile::line_bytes + chunk % of_line * 16;
        const bool exists = line < count && chunk * 8 < size;
        const i64 place = exists ? shown.at(position + line) * stride : 0;
        cp_async_16(to + (at ^ (at >> 7 & of_line - 1) << 4), from + chunk * 8 + place, exists ? 16 : 0);
    };
    if constexpr (32 % chunks == 0) {  // a lane has the same chunk of every line
#pragma unroll 8
        for (int i = 0; i < KEYS * chunks / 32; ++i) copy(i * (32 / chunks) + lane / chunks, lane % chunks);
    } else {
#pragma unroll 1
        for (int i = lane; i < KEYS * chunks; i += 32) copy(i / chunks, i % chunks);
    }
    cp_async_commit();
}

// A stage that was gathered, and is not whole yet. Its lines are ordinary writes, until they are fenced.
struct Gathered {
    u32 full = 0;  // its barrier; none: 0

    template <int pending>
    __device__ __forceinline__ void finish() {
        if (!full) return;
        cp_async_wait<pending>();
        fence_async_proxy();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
        full = 0;
    }
};

// The same of what a mask shows; `listed`: blocks of all tiles before. All lanes of a warp do so together.
__device__ __forceinline__ void load_shown(const SharedStorage& shared, const Params& p, const Ticket& ticket,
                                           Ring<STAGES>& ring, u32 parity, int& listed) {
    __syncwarp();  // the ticket is there
    const Problem& x = p.x;
    const Sequence& s = ticket.sequence;
    const bool first_lane = threadIdx.x % 32 == 0;
    if (first_lane) {
        mbarrier_wait(shared.q_empty, parity);
        load_queries(shared, p, ticket);
    }
    const int head = ticket.head / x.group, batch = int(s.batch_of_k), end = ticket.end, keys = ticket.keys;
    const int* const begins = p.rows.begins + ticket.last_row * p.rows.segments;
    int k_block = ticket.first, v_block = k_block;
    int begin = 0;       // the first key of the segment with the next block of keys
    bool whole = false;  // whether it has no gaps
    Gathered gathered;
    // K0, K1, V0, K2, V1, ...: keys keep ahead by a tile.
    for (; v_block < end; ring.step()) {
        const bool of_keys = k_block - v_block < 2 && k_block < end;
        const int block = of_keys ? k_block++ : v_block++;
        const int number = listed + block - ticket.first, count = min(KEYS, keys - block * KEYS);
        int first = first_keys[number % LISTED];
        if (of_keys) {
            if (block % BLOCKS == 0) {
                const int segment = block / BLOCKS, in_it = min(SEGMENT_KEYS, keys - segment * SEGMENT_KEYS);
                begin = begins[segment];
                const bool is_last = keys <= (segment + 1) * SEGMENT_KEYS;
                whole = begins[is_last ? p.rows.segments - 1 : segment + 1] - begin == in_it;
                if (!whole)
                    shown.start(s.mask_row(x, ticket.first_query + ticket.rows - 1, ticket.head), s.keys,
                                begin, number * KEYS);
            }
            first = whole ? begin + block % BLOCKS * KEYS : -1;
            __syncwarp();
            if (first_lane) first_keys[number % LISTED] = first;
            __syncwarp();
        }
        const u32 full = shared.full + ring.stage * 8, empty = shared.empty + ring.stage * 8;
        const u32 to = shared.ring + ring.stage * STAGE_BYTES;
        if (first >= 0) {
            gathered.finish<0>();
            if (first_lane) {
                mbarrier_wait(empty, ring.parity ^ 1);
                mbarrier_arrive_expect_tx(full, of_keys ? KTile::bytes : VTile::bytes);
                const int line = s.first_key + first;
                if (of_keys)
                    KTile::for_each_box(0, 0, 0, [&](u32 offset, int column, int, int) {
                        tma_load(to + offset, p.k, full, column, line, one_for(p, 4) ? 0 : head,
                                 one_for(p, 1) ? 0 : batch);
                    });
                else
                    VTile::for_each_box(0, 0, 0, [&](u32 offset, int column, int, int) {
                        tma_load(to + offset, p.v, full, column, line, one_for(p, 5) ? 0 : head,
                                 one_for(p, 2) ? 0 : batch);
                    });
            }
            __syncwarp();
            continue;
        }
        if (of_keys) shown.find(x, number * KEYS + count);
        if (!__all_sync(0xFFFFFFFF, mbarrier_test_wait(empty, ring.parity ^ 1))) {
            gathered.finish<0>();  // consumers may wait for it before they leave this stage
            mbarrier_wait(empty, ring.parity ^ 1);
        }
        const Strides& strides = of_keys ? p.k_strides : p.v_strides;
        const Stored* from = (of_keys ? p.k_lines : p.v_lines) + batch * strides.batch + head * strides.head +
                             s.first_key * strides.token;
        if (of_keys)
            gather<KTile, HEAD>(to, from, strides.token, x.head, number * KEYS, count);
        else
            gather<VTile, VALUES>(to, from, strides.token, x.values, number * KEYS, count);
        gathered.finish<1>();
        gathered.full = full;
    }
    gathered.finish<0>();
    listed += end - ticket.first;
}
#endif

__device__ __forceinline__ void producer(const SharedStorage& shared, const Params& p) {
    const int count = p.tiles * p.heads * (SPLIT ? p.shares : 1);
    Ring<STAGES> ring;
    u32 parity = 1, slot = 0;
    bool more = true;
    int offset = 0, index = 0, listed = 0;
    for (int round = 0; more;) {
        if (offset == 0) {
            index = tile_of(p, round);
            more = p.next ? index < count : round * int(gridDim.x) < count;
            ++round;
        }
        Ticket& ticket = tickets[slot];
        if (more && (index >= count || !find(p, index, offset, ticket))) continue;
        if (PAGED && more) {
            load_pages(shared, p, ticket, ring, parity);
        } else if (MASKED && more) {
#if MASK != NONE
            load_shown(shared, p, ticket, ring, parity, listed);
#endif
        } else if (threadIdx.x % 32 == 0) {
            if (more) {
                load(shared, p, ticket, ring, parity);
            } else {
                mbarrier_wait(shared.q_empty, parity);
                ticket.first_query = -1;
                mbarrier_arrive(shared.q_full);
            }
        }
        parity ^= 1;
        slot = slot_after(slot);
        __syncwarp();
    }
}

// The keys that all rows of a warp see.
struct Seen {
    int first, last;
#if MASK == NONE
    static constexpr bool adds = false;
    __device__ __forceinline__ Seen(const Params& p, const Ticket& ticket) {
        const Row upper = p.row(ticket, 0), lower = p.row(ticket, 1);
        first = __shfl_sync(0xFFFFFFFF, ticket.sequence.first_seen(p.x, lower.query), 31);
        last = __shfl_sync(0xFFFFFFFF, ticket.sequence.last_seen(p.x, upper.query), 0);
    }
#else
    int count[2];  // what each row of a thread sees
    bool adds;     // whether a float mask adds anything but zeros to scores of the warp's rows

    __device__ __forceinline__ Seen(const Params& p, const Ticket& ticket) {
        const Sequence& s = ticket.sequence;
        first = 0;
        bool any = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Row row = p.row(ticket, h);
            const i64 of_row = p.rows.row(p.x, s.batch, row.head, row.query);
            count[h] = p.rows.count(of_row);
            if (FLOAT_MASK) any = any || (row.exists && p.rows.adds(of_row));
        }
        last = __reduce_min_sync(0xFFFFFFFF, min(count[0], count[1]));
        adds = FLOAT_MASK && __any_sync(0xFFFFFFFF, any);
    }
#endif
};

#if MASK == NONE || MASK == BOOLEAN
struct Biases {
    __device__ __forceinline__ explicit Biases(const SharedStorage&) {}
    __device__ __forceinline__ void start(const Params&, const Ticket&, bool) {}
    __device__ __forceinline__ void fetch(const Params&, const Ticket&, int) {}
};
#else
// What a float mask adds to the scores of a warp's rows: a tile of a block, in shared memory. All lanes do so together.
// `number`: of the block, see LISTED.
struct Biases {
    const SharedStorage& shared;
    u32 parity = 0;
    u32 lines;  // bits 0 to 7: the query of the warp's first row, from the run's; then the lines of the tile that a lane
                // addresses for upper and for lower rows
    bool any;  // whether the rows need any

    __device__ __forceinline__ explicit Biases(const SharedStorage& shared_) : shared(shared_) {}

    __device__ __forceinline__ void start(const Params& p, const Ticket& ticket, bool any_) {
        any = any_;
        const int row = threadIdx.x / 32 * 16, last = ticket.rows - 1;
        const int first = min(row / p.members, last), lane = threadIdx.x % 32;
        lines = first;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int own = row + (sizeof(Mask::Stored) == 2 ? lane % 8 : lane / 4) + 8 * h;
            lines |= (min(own / p.members, last) - first) << (8 + h * 8);
        }
    }

    // Whether TMA brings them from the first key of a block on, which has no gaps unless `first` is negative.
    static __device__ __forceinline__ bool by_tma(const Params& p, const Ticket& ticket, int first) {
        constexpr int ALIGNED = 16 / sizeof(Mask::Stored);
        return first >= 0 && p.bias_lines > 0 && (ticket.sequence.first_key + first) % ALIGNED == 0;
    }

    // Begins to bring a block's, whose keys are there.
    __device__ __forceinline__ void fetch(const Params& p, const Ticket& ticket, int number) {
        if (!any) return;
        __syncwarp();  // all lanes have read those of the block before
        const int first = first_keys[number % LISTED];
        if (!by_tma(p, ticket, first) || threadIdx.x % 32 > 0) return;
        mbarrier_arrive_expect_tx(full(), p.bias_lines * BiasTile::COLUMNS * 128);
#pragma unroll
        for (u32 column = 0; column < BiasTile::COLUMNS; ++column)
            tma_load(tile() + column * BiasTile::COLUMN_BYTES, p.mask, full(),
                     ticket.sequence.first_key + first + column * BiasTile::WIDTH,
                     ticket.first_query + (lines & 0xFF), p.x.mask_head ? ticket.head : 0,
                     p.x.mask_batch ? ticket.sequence.batch : 0);
    }

    // Waits for them.
    __device__ __forceinline__ void wait(const Params& p, const Ticket& ticket, int block, int number) {
        const int first = first_keys[number % LISTED];
        if (by_tma(p, ticket, first)) {
            mbarrier_wait(full(), parity);
            parity ^= 1;
        } else {
            gather(p, ticket, first, block, number);
        }
    }

    // A thread's, of its row h.
    __device__ __forceinline__ void read(float (&b)[KEYS / 4], int h) const {
        const u32 line = lines >> (8 + h * 8) & 0xFF, lane = threadIdx.x % 32;
        if constexpr (sizeof(Mask::Stored) == 2) {
            const u32 from = tile() + line * 128 + (lane / 8 ^ line % 8) * 16;
#pragma unroll
            for (u32 u = 0; u < KEYS / 8; u += 4) {
                u32 words[4];
                ldmatrix_x4<false>(words, (from ^ u % 8 * 16) + u / 8 * BiasTile::COLUMN_BYTES);
#pragma unroll
                for (u32 i = 0; i < 8; ++i)
                    b[u * 2 + i] = __fmul_rn(Mask::widen(u16(words[i / 2] >> i % 2 * 16)), contract::LOG2E);
            }
        } else {
            const u32 from = tile() + line * 128 + (lane % 4 / 2 ^ line % 8) * 16 + lane % 2 * 8;
#pragma unroll
            for (u32 u = 0; u < KEYS / 8; ++u) {
                float x[2];
                asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                             : "=f"(x[0]), "=f"(x[1])
                             : "r"((from ^ u % 4 * 32) + u / 4 * BiasTile::COLUMN_BYTES)
                             : "memory");
#pragma unroll
                for (u32 e = 0; e < 2; ++e) b[u * 2 + e] = __fmul_rn(x[e], contract::LOG2E);
            }
        }
    }

  private:
    __device__ __forceinline__ u32 full() const { return shared.bias_full + threadIdx.x / 32 * 8; }
    __device__ __forceinline__ u32 tile() const { return shared.bias + threadIdx.x / 32 * BiasTile::BYTES; }
    static __device__ __forceinline__ void store(u32 to, u16 x) {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
    }
    static __device__ __forceinline__ void store(u32 to, float x) {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
    }

    // Where keys have gaps (`first_key` is negative), or TMA does not read the mask from there on.
    __device__ __forceinline__ void gather(const Params& p, const Ticket& ticket, int first_key, int block,
                                           int number) const {
        const auto* const mask = static_cast<const Mask::Stored*>(p.x.mask);
        const int lane = threadIdx.x % 32, first = lines & 0xFF;
        const int count = min(min(15 / p.members + 2, 16), ticket.rows - first);
#pragma unroll 1
        for (int i = 0; i < KEYS / 32; ++i) {
            const int column = i * 32 + lane, at = number * KEYS + column;
            const bool exists = block * KEYS + column < ticket.keys;
            const int key = first_key >= 0 ? first_key + column : exists ? shown.at(at) : 0;
            const Mask::Stored* const from =
                mask + ticket.sequence.mask_row(p.x, ticket.first_query + first, ticket.head) +
                key * p.x.mask_key;
#pragma unroll 4
            for (int line = 0; line < count; ++line)
                store(tile() + BiasTile::at(line, column),
                      exists ? from[line * p.x.mask_query] : Mask::Stored(0));
        }
        fence_async_proxy();  // before TMA writes there
        __syncwarp();
    }
};
#endif

// The softmax of the current segment.
struct Softmax : OnlineSoftmax {
    // Products of a block to probabilities. `number`: see LISTED.
    __device__ __forceinline__ void add(float (&s)[KEYS / 2], const Params& p, const Ticket& ticket,
                                        const Seen& by_all, int block, int number, Biases& biases) {
        const Problem& x = p.x;
        if (SOFTCAP)
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) s[i] = scores::tanh(__fmul_rn(s[i], x.cap));
        const bool whole = block * KEYS >= by_all.first && block * KEYS + KEYS <= by_all.last;
        if (!whole) {
            const int column = block * KEYS + threadIdx.x % 4 * 2;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#if MASK == NONE
                const int query = p.row(ticket, h).query;
                const u32 visible = columns_below(ticket.sequence.last_seen(x, query) - column) &
                                    ~columns_below(ticket.sequence.first_seen(x, query) - column);
#else
                const u32 visible = columns_below(by_all.count[h] - column);
#endif
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i)
                    if (!(visible >> i & 1)) s[i / 2 * 4 + 2 * h + i % 2] = -INF;
            }
        }
        scale[1] = 1.0f;
#if MASK != NONE && MASK != BOOLEAN
        if (biases.any) {
            biases.wait(p, ticket, block, number);
#pragma unroll
            for (int h = 0; h < (FEW ? 1 : 2); ++h) {
                float b[KEYS / 4], m = -INF;
                biases.read(b, h);
                if (!whole) clear_hidden(b, by_all.count[h] - block * KEYS);
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i)
                    m = fmaxf(m, __fmaf_rn(s[i / 2 * 4 + 2 * h + i % 2], x.c, b[i]));
                m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, 1));
                m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, 2));
                const float shift = raise(h, m);
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    float& own = s[i / 2 * 4 + 2 * h + i % 2];
                    own = scores::exp2(__fmaf_rn(own, x.c, __fsub_rn(b[i], shift)));
                    add_weight(i / 2, h, i % 2, own);
                }
            }
            if (FEW)
#pragma unroll
                for (int i = 0; i < KEYS / 2; ++i)
                    if (i / 2 % 2) s[i] = 0.0f;
            return;
        }
#endif
        float shift[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (FEW && h == 1) break;
            float m = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
            for (int u = 1; u < KEYS / 8; ++u) m = fmaxf(m, fmaxf(s[u * 4 + 2 * h], s[u * 4 + 2 * h + 1]));
            m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, 2));
            shift[h] = raise(h, __fmul_rn(m, x.c));
        }
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            const int h = i / 2 % 2;
            if (FEW && h == 1) {
                s[i] = 0.0f;
                continue;
            }
            s[i] = scores::exp2(__fmaf_rn(s[i], x.c, -shift[h]));
            add_weight(i / 4, h, i % 2, s[i]);
        }
    }

    // What a mask adds where a row sees nothing may be anything.
    static __device__ __forceinline__ void clear_hidden(float (&b)[KEYS / 4], int seen) {
        const u32 visible = columns_below(seen - int(threadIdx.x % 4 * 2));
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i)
            if (!(visible >> i & 1)) b[i] = 0.0f;
    }

    // Adds row h's weight e of the two in a thread's eight.
    __device__ __forceinline__ void add_weight(int eight, int h, int e, float weight) {
        float& sum = l[h][e];
        sum = eight == 0 ? __fmaf_rn(sum, scale[h], weight) : __fadd_rn(sum, weight);
    }
};

// What segments before the current one come to.
struct Total : MergedRows {
    u32 memory;  // this thread's first four values
    float held[TOTAL_IN_REGISTERS && !SPLIT ? VALUES / 2 : 1];

    __device__ __forceinline__ explicit Total(const SharedStorage& shared)
        : memory(shared.total + threadIdx.x * 16) {}

    // o = what all segments come to.
    __device__ __forceinline__ void merge(float (&o)[VALUES / 2]) const {
#pragma unroll
        for (int i = 0; i < VALUES / 2; i += 4) {
            float of_total[4] = {};
            if (any && !SPLIT) {
                if constexpr (TOTAL_IN_REGISTERS) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) of_total[e] = held[i + e];
                } else if (!FEW || threadIdx.x < KEEPERS) {
                    load(of_total, i);
                }
            }
#pragma unroll
            for (int e = 0; e < 4; ++e)
                o[i + e] = __fmaf_rn(of_total[e], scale[e / 2], __fmul_rn(o[i + e], own_scale[e / 2]));
        }
    }

    __device__ __forceinline__ void keep(const float (&o)[VALUES / 2]) {
#pragma unroll
        for (int i = 0; i < VALUES / 2; i += 4) {
            if constexpr (TOTAL_IN_REGISTERS) {
#pragma unroll
                for (int e = 0; e < 4; ++e) held[i + e] = o[i + e];
            } else if (!FEW || threadIdx.x < KEEPERS) {
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(memory + i * (KEEPERS * 4)),
                             "f"(o[i]), "f"(o[i + 1]), "f"(o[i + 2]), "f"(o[i + 3])
                             : "memory");
            }
        }
        any = true;
    }

  private:
    __device__ __forceinline__ void load(float (&x)[4], int i) const {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(memory + i * (KEEPERS * 4))
                     : "memory");
    }
};

using Output = RowsOutput<Params, Ticket, VALUES, true>;

struct Consumer {
    const Params& p;
    const SharedStorage& shared;
    u32 warpgroup, thread;
    Ring<STAGES> ring;
    Biases biases{shared};
    int listed = 0;  // blocks of all tickets before: see LISTED

    __device__ __forceinline__ u32 wait() const {
        mbarrier_wait(shared.full + ring.stage * 8, ring.parity);
        return shared.ring + ring.stage * STAGE_BYTES;
    }
    __device__ __forceinline__ void release(u32 stage) const {
        if (thread == 0) mbarrier_arrive(shared.empty + stage * 8);
    }
    __device__ __forceinline__ void take_turn() const {
        if (WARPGROUPS > 1) named_barrier(ORDER + warpgroup, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (WARPGROUPS > 1)
            named_barrier_arrive(ORDER + (warpgroup + 1 == WARPGROUPS ? 0 : warpgroup + 1), 256);
    }

    // Goes over the keys; o and `total` are then those of all of them.
    __device__ __forceinline__ void attend(const Ticket& ticket, float (&o)[VALUES / 2], Total& total) {
        const u32 q = shared.q + QTile::step(warpgroup * 64, 0);
        const int first = ticket.first, end = ticket.end;
        const Seen seen(p, ticket);
        float s[KEYS / 2];
        u32 probabilities[KEYS / 16][4];
        Softmax segment;
        segment.start();
        biases.start(p, ticket, seen.adds);

        const u32 first_keys = wait();
        biases.fetch(p, ticket, listed);
        wgmma_fence();
        multiply<QTile, KTile, HEAD>(s, q, first_keys);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        release(ring.stage);
        ring.step();
        if (LEAVES_EARLY && first + 1 == end) warp_arrive(shared.q_empty);
        segment.add(s, p, ticket, seen, first, listed, biases);
        pack(probabilities, s);

        bool start = true;  // o has nothing of the segment
#pragma unroll 1
        for (int block = first + 1; block < end; ++block) {
            const u32 k = wait(), k_stage = ring.stage;
            ring.step();
            biases.fetch(p, ticket, listed + block - first);
            take_turn();
            pin(o);
            pin(probabilities);
            wgmma_fence();
            multiply<QTile, KTile, HEAD>(s, q, k);
            wgmma_commit();
            const u32 v = wait(), v_stage = ring.stage;
            ring.step();
            accumulate<VTile>(o, probabilities, v, start);
            wgmma_commit();
            pass_turn();
            wgmma_wait<1>();
            pin(s);
            release(k_stage);
            if (LEAVES_EARLY && block + 1 == end) warp_arrive(shared.q_empty);
            start = block % BLOCKS == 0;
            if (start) {
                total.add(segment);
                segment.start();
            }
            segment.add(s, p, ticket, seen, block, listed + block - first, biases);
            pin(s);
            // The wait is in each branch, as ptxas would move it before the arithmetic above.
            if (start) {
                wgmma_wait<0>();
                pin(o);
                finish_segment(ticket, block - 1, o, total);
            } else if (__any_sync(0xFFFFFFFF, segment.scale[0] != 1.0f || segment.scale[1] != 1.0f)) {
                wgmma_wait<0>();
                pin(o);
#pragma unroll
                for (int i = 0; i < VALUES / 2; ++i) o[i] = __fmul_rn(o[i], segment.scale[i / 2 % 2]);
            } else {
                wgmma_wait<0>();
                pin(o);
            }
            pin(probabilities);
            release(v_stage);
            pack(probabilities, s);
        }
        if (!LEAVES_EARLY) warp_arrive(shared.q_empty);

        const u32 v = wait();
#if MASK == NONE
        const int keys = ticket.sequence.keys;
#else
        const int keys = ticket.keys;
#endif
        const int valid = keys - (end - 1) * KEYS;
        if (valid <
            KEYS) {  // what lies behind may be another sequence's: each warpgroup clears it for itself
            VTile::clear(v, valid, KEYS, thread, 128);
            fence_async_proxy();
            named_barrier(CLEARED + warpgroup, 128);
        }
        pin(o);
        pin(probabilities);
        wgmma_fence();
        accumulate<VTile>(o, probabilities, v, start);
        wgmma_commit();
        total.add(segment);
        wgmma_wait<0>();
        pin(o);
        release(ring.stage);
        ring.step();
        total.merge(o);
        if (SPLIT) Output{p, ticket}.store_segment(end - 1, o, total);
        listed += end - first;
    }

    // Merges the segment with a block, or writes it.
    __device__ __forceinline__ void finish_segment(const Ticket& ticket, int block, float (&o)[VALUES / 2],
                                                   Total& total) const {
        total.merge(o);
        if constexpr (SPLIT) {
            Output{p, ticket}.store_segment(block, o, total);
            total = Total(shared);
        } else {
            total.keep(o);
        }
    }

    __device__ __forceinline__ void run() {
        if (warpgroup == WARPGROUPS - 1) pass_turn();
        for (u32 parity = 0, slot = 0;; parity ^= 1, slot = slot_after(slot)) {
            mbarrier_wait(shared.q_full, parity);
            const Ticket& ticket = tickets[slot];
            if (ticket.first_query < 0) break;
            if (ticket.first >= ticket.end) {
                Output{p, ticket}.store_nothing();
                warp_arrive(shared.q_empty);
                continue;
            }
            float o[VALUES / 2];
            Total total(shared);
            attend(ticket, o, total);
            if (!SPLIT) Output{p, ticket}.store(o, total);
        }
        if (warpgroup == 0) take_turn();  // nobody leaves a barrier half full
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    attention_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char raw[];
    const SharedStorage shared(raw);
    if (threadIdx.x == CONSUMERS) {
        prefetch_tensor_map(p.q);
        prefetch_tensor_map(p.k);
        prefetch_tensor_map(p.v);
        for (u32 stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared.full + stage * 8, 1);
            mbarrier_init(shared.empty + stage * 8, WARPGROUPS);
        }
        mbarrier_init(shared.q_full, 1);
        for (u32 warp = 0; warp < BIAS_WARPS; ++warp) mbarrier_init(shared.bias_full + warp * 8, 1);
        mbarrier_init(shared.q_empty, WARPGROUPS * 4 * WARP_ARRIVALS);
        mbarrier_init_fence();
    }
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (PAGED && p.x.cu_q && blockIdx.x == 0 && threadIdx.x >= THREADS - 32) check_offsets(p.x);

    // Read from one lane: then the compiler knows it, and all addresses made of it, to be uniform in a warp.
    const u32 warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    if (warpgroup == WARPGROUPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x < CONSUMERS + 32) producer(shared, p);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer{p, shared, warpgroup, threadIdx.x % 128}.run();
    }
}

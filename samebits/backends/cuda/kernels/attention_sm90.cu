// Attention on Hopper, forward: O = softmax(Q K^T scale + mask) V, as docs/contract.md, "Attention", has it.
//
// Scores exist in registers alone. A block takes a tile of ROWS queries that share a head of K and V: those
// of one member of the group side by side, then those of the next. It goes over the keys twice, 128 at a
// time:
//   pass 1   scores, and from them the statistics of every block of keys: maximum and sum of exponentials
//   pass 2   scores again, with the row's statistics known; their probabilities, from registers, times V
//
// Warps of a block
//   WARPGROUPS warpgroups   consumers, 64 rows each; they share keys and values, and nothing else
//   1 warp                  producer: one thread issues all TMA loads; with two consumers it is a whole
//                           warpgroup, whose registers go to them
//
// Barriers, all mbarriers
//   q_full, q_empty         the tile of queries has arrived; all consumers have multiplied it
//   full[stage]             a tile of keys or of values has arrived
//   empty[stage]            all consumers have read it
//
// Ring: K0 K1 ... (pass 1), K0 V0 K1 V1 ... (pass 2), then those of the next tile. Its phases go on from tile
// to tile.
//
// Timeline of a consumer. What is multiplied next is issued before it turns to what it has: the arithmetic of
// scores takes several times as long as their products. In pass 2 a step has 64 keys.
//
//   pass 1   tensor cores  |QK 0|QK 1          |QK 2          |
//            arithmetic         |statistics 0  |statistics 1  |
//   pass 2   tensor cores  |QK 0, QK 1|   |PV 0, QK 2     |PV 1, QK 3     |
//            arithmetic               |softmax 0|softmax 1      |softmax 2
//
// With statistics in shared memory (HELD) every tile has a block of its own. With statistics in `scratch`
// there are at most as many blocks as multiprocessors, and each takes several tiles, one after another.
//
// Macros
//   INPUT_F16       1: f16 operands; 0: bf16
//   HEAD            size of a row of q and k, a multiple of 16 up to 128; columns past the end are zeros
//   VALUES          size of a row of v, likewise
//   MASK            NONE, F32 or BOOLEAN
//   WARPGROUPS      consumer warpgroups: 1 or 2
//   STAGES          stages of the ring, 3 or more
//   HELD            blocks of keys whose statistics fit into shared memory; 0: they are kept in `scratch`

#ifndef INPUT_F16
#error "INPUT_F16 is needed: #if takes a missing macro for 0"
#endif

#include "convert.cuh"
#include "logp.cuh"
#include "ring_sm90.cuh"
#include "tile_sm90.cuh"

constexpr int BOOLEAN = 4;

constexpr int KEYS = contract::VOCAB_BLOCK;  // of a tile, and of a block of keys in the contract
static_assert(HEAD % 16 == 0 && HEAD <= 128 && VALUES % 16 == 0 && VALUES <= 128 && STAGES >= 3);
static_assert(WARPGROUPS == 1 || WARPGROUPS == 2);
constexpr u32 CONSUMERS = WARPGROUPS * 128, ROWS = WARPGROUPS * 64;
constexpr u32 THREADS = CONSUMERS + (WARPGROUPS > 1 ? 128 : 32);

using QTile = Tile<false, false, ROWS, HEAD, 1>;
using KTile = Tile<false, false, KEYS, HEAD, 1>;
using VTile = Tile<true, false, VALUES, KEYS, 1>;
using Type = Element<INPUT_F16 ? F16 : BF16>;
constexpr u32 STAGE_BYTES = KTile::bytes > VTile::bytes ? KTile::bytes : VTile::bytes;

struct alignas(8) Statistics {
    float m, s;
};

struct Params {
    TensorMap q, k, v;
    void* out;            // [batch, heads, group, queries, values]
    const void* mask;     // [batch, heads, group, queries, keys]
    Statistics* scratch;  // ROWS for each block of keys, for each block of the grid
    i64 mask_batch, mask_head, mask_member, mask_query, mask_key;  // its strides
    int heads, group, queries, keys, values;
    int batch_heads;
    int shared;        // bits 0 to 5: q, k, v have one matrix for all of the batch; for all heads
    int tile_queries;  // in a tile of each of its members: 2 to this power
    int tiles, query_tiles, member_tiles;
    int together;  // heads of k whose tiles are taken in turns, so that keys and values stay in L2
    int causal;
    float scale;
};

// Where the rows of a tile begin, and how many blocks of keys they see.
struct TileCoord {
    int batch, head, member, query, blocks;

    // Heads are taken together in packs. Of a pack the tiles of the last queries come first: they see the
    // most keys.
    __device__ TileCoord(const Params& p, int index) {
        int per_head = p.query_tiles * p.member_tiles;
        int pack = index / (per_head * p.together);
        index -= pack * per_head * p.together;
        int side_by_side = min(p.together, p.batch_heads - pack * p.together) * p.member_tiles;
        int late = index / side_by_side;
        index -= late * side_by_side;
        int matrix = pack * p.together + index / p.member_tiles;
        batch = matrix / p.heads;
        head = matrix - batch * p.heads;
        member = index % p.member_tiles * (ROWS >> p.tile_queries);
        query = (p.query_tiles - 1 - late) << p.tile_queries;
        int seen = p.causal ? min(query + (1 << p.tile_queries), p.keys) : p.keys;
        blocks = (seen + KEYS - 1) / KEYS;
    }
};

// The tile that a block takes in a round, or -1. Every other round is reversed, so that no block gets all the
// long ones.
__device__ __forceinline__ int tile_of(const Params& p, int round) {
    int slot = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x, index = round * int(gridDim.x) + slot;
    return index < p.tiles ? index : -1;
}

struct SharedStorage {
    u32 q, ring, full, empty, q_full, q_empty;
    Statistics* held;

    __device__ explicit SharedStorage(unsigned char* raw) {
        u32 start = shared_address(raw);
        q = (start + 1023) & ~1023u;  // a whole period of the swizzle
        ring = q + QTile::bytes;
        u32 statistics = ring + STAGES * STAGE_BYTES;
        held = reinterpret_cast<Statistics*>(raw + (statistics - start));
        full = statistics + HELD * ROWS * sizeof(Statistics);
        empty = full + STAGES * 8;
        q_full = empty + STAGES * 8;
        q_empty = q_full + 8;
    }
};

__device__ __forceinline__ void producer(const SharedStorage& shared, const Params& p) {
    Ring<STAGES> ring;
    for (int round = 0, index; (index = tile_of(p, round)) >= 0; ++round) {
        TileCoord tile(p, index);
        auto batch = [&](int operand) { return p.shared >> operand & 1 ? 0 : tile.batch; };
        auto head = [&](int operand) { return p.shared >> operand & 8 ? 0 : tile.head; };
        mbarrier_wait(shared.q_empty, round % 2 ^ 1);
        mbarrier_arrive_expect_tx(shared.q_full, QTile::bytes);
#pragma unroll
        for (u32 column = 0; column < QTile::columns; ++column)
            tma_load(shared.q + column * QTile::column_bytes, p.q, shared.q_full, column * QTile::width,
                     tile.query, tile.member, head(0), batch(0));
        for (int pass = 0; pass < 2; ++pass) {
            for (int block = 0; block < tile.blocks; ++block) {
                u32 full = shared.full + ring.stage * 8, to = shared.ring + ring.stage * STAGE_BYTES;
                mbarrier_wait(shared.empty + ring.stage * 8, ring.parity ^ 1);
                mbarrier_arrive_expect_tx(full, KTile::bytes);
                KTile::for_each_box(0, 0, 0, [&](u32 offset, int x, int y, int) {
                    tma_load(to + offset, p.k, full, x, y + block * KEYS, head(1), batch(1));
                });
                ring.step();
                if (pass == 0) continue;
                full = shared.full + ring.stage * 8, to = shared.ring + ring.stage * STAGE_BYTES;
                mbarrier_wait(shared.empty + ring.stage * 8, ring.parity ^ 1);
                mbarrier_arrive_expect_tx(full, VTile::bytes);
                VTile::for_each_box(0, 0, 0, [&](u32 offset, int x, int y, int) {
                    tma_load(to + offset, p.v, full, x, y + block * KEYS, head(2), batch(2));
                });
                ring.step();
            }
        }
    }
}

// The two rows of a thread, 8 apart. Three other lanes have the rest of their scores.
struct Rows {
    int row, column;     // the first row in the tile, and key in a tile of keys
    int seen[2];         // keys, from the first on
    int seen_by_all;     // by every row of the warp
    bool any_inside[2];  // whether any row of the warp is one of the output's
    i64 mask[2];         // where a row of it begins

    __device__ Rows(const Params& p, const TileCoord& tile, u32 thread)
        : row(thread / 32 * 16 + thread % 32 / 4), column(thread % 4 * 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int r = row + i * 8, query = tile.query + (r & ((1 << p.tile_queries) - 1));
            int member = tile.member + (r >> p.tile_queries);
            bool inside = query < p.queries && member < p.group;
            seen[i] = p.causal ? min(query + 1, p.keys) : p.keys;
            if (MASK != NONE && !inside) seen[i] = 0;
            any_inside[i] = __any_sync(0xFFFFFFFF, inside);
            mask[i] = tile.batch * p.mask_batch + tile.head * p.mask_head + member * p.mask_member +
                      query * p.mask_query;
        }
        seen_by_all = __reduce_min_sync(0xFFFFFFFF, min(seen[0], seen[1]));
    }

    // Products to scores, the first of them that of key `first`, for this thread's rows from there on.
    template <int count>
    __device__ __forceinline__ void scores(float (&z)[count], const Params& p, int first) const {
#pragma unroll
        for (int i = 0; i < count; ++i) z[i] = __fmul_rn(z[i], p.scale);
        if (MASK == NONE && first - column + count * 2 <= seen_by_all) return;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            int half = i / 2 % 2, key = first + i / 4 * 8 + i % 2;
            bool visible = key < seen[half];
            if constexpr (MASK == BOOLEAN) {
                const auto* masks = static_cast<const unsigned char*>(p.mask);
                if (visible) visible = masks[mask[half] + key * p.mask_key] != 0;
            }
            if constexpr (MASK == F32) {
                const auto* masks = static_cast<const float*>(p.mask);
                if (visible) z[i] = __fadd_rn(z[i], masks[mask[half] + key * p.mask_key]);
            }
            if (!visible) z[i] = -INF;
        }
    }
};

// Keeps the compiler from moving work on these registers across a fence or a wait, which name none.
template <int count>
__device__ __forceinline__ void pin(float (&x)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

__device__ __forceinline__ void pin(u32 (&x)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}

template <int count>
__device__ __forceinline__ void clear(float (&acc)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) acc[i] = 0.0f;
    pin(acc);
}

// Issues acc += Q K^T, for the rows of this warpgroup and `keys` keys from `first` on.
template <int keys>
__device__ __forceinline__ void multiply(float (&acc)[keys / 2], u32 q, u32 k, u32 first) {
    auto q_tile = QTile::descriptor(q);
    auto k_tile = KTile::descriptor(k);
#pragma unroll
    for (u32 d = 0; d < HEAD; d += 16)
        Wgmma<keys, 0, 0>::step(acc, q_tile.at(QTile::step(0, d)), k_tile.at(KTile::step(first, d)));
}

// Issues acc += P V, for the probabilities of 64 keys.
__device__ __forceinline__ void multiply(float (&acc)[VALUES / 2], const u32 (&p)[4][4], u32 v, u32 first) {
    auto v_tile = VTile::descriptor(v);
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
        WgmmaFragment<VALUES, 1>::step(acc, p[i], v_tile.at(VTile::step(0, first + i * 16)));
}

// A row's divisor: quotients of numbers up to 1 by a sum of exponentials, rounded as IEEE 754 has it.
struct Divisor {
    // Of 2^-80, below which a remainder may be inexact. In f16 the quotients of such numbers are zeros
    // anyhow, but without the branch ptxas finds too few registers and serialises wgmma (C7511).
    static constexpr u32 TINY = INPUT_F16 ? 1 : 47 << 23;

    float divisor, inverse;

    __device__ __forceinline__ void set(float sum) {
        float about;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(about) : "f"(sum));
        divisor = sum;
        inverse = sum == 0.0f ? 0.0f : static_cast<float>(refined(about));  // all are masked: zeros
    }

    // For x = 0, and x >= 2^-81. The inverse is rounded to nearest, so one correction is enough: the
    // quotients near the midpoint of two numbers are few enough to try them all (tests/ops/test_rows.py).
    __device__ __forceinline__ float quotient(float x) const {
        float q = __fmul_rn(x, inverse);
        return __fmaf_rn(__fmaf_rn(-divisor, q, x), inverse, q);
    }

    // For all x. A quotient in f64 within an ulp, and exact if that is possible, is on the right side of
    // every midpoint.
    __device__ __forceinline__ float tiny_quotient(float x) const {
        double by = refined(inverse), q = __dmul_rn(x, by);
        return __double2float_rn(__fma_rn(__fma_rn(-double(divisor), q, double(x)), by, q));
    }

  private:
    __device__ __forceinline__ double refined(float about) const {
        double y = about;
        y = __fma_rn(y, __fma_rn(-double(divisor), y, 1.0), y);
        return __fma_rn(y, __fma_rn(-double(divisor), y, 1.0), y);
    }
};

// Probabilities of 64 keys as the tensor cores take them, 16 keys at a time.
__device__ __forceinline__ void probabilities(u32 (&to)[4][4], const float (&z)[32], const float (&shift)[2],
                                              const Divisor (&by)[2]) {
    u32 smallest = 0xFFFFFFFF;  // of the exponentials but zeros, as bits less 1
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        int half = i / 2 % 2;
        float e[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            e[j] = contract::exp(__fsub_rn(z[i + j], shift[half]));
            smallest = min(smallest, __float_as_uint(e[j]) - 1);
        }
        to[i / 8][i / 2 % 4] = Type::pack(by[half].quotient(e[0]), by[half].quotient(e[1]));
    }
    if (smallest >= Divisor::TINY) return;
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        int half = i / 2 % 2;
        float p[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
            p[j] = by[half].tiny_quotient(contract::exp(__fsub_rn(z[i + j], shift[half])));
        to[i / 8][i / 2 % 4] = Type::pack(p[0], p[1]);
    }
}

struct Consumer {
    const Params& p;
    const SharedStorage& shared;
    u32 thread, warpgroup;
    u32 q;                   // of this warpgroup's rows
    Statistics* statistics;  // of this thread's first row
    Ring<STAGES> ring;       // what is multiplied next

    __device__ __forceinline__ u32 wait() const {
        mbarrier_wait(shared.full + ring.stage * 8, ring.parity);
        return shared.ring + ring.stage * STAGE_BYTES;
    }
    __device__ __forceinline__ void release(u32 stage) const {
        if (thread == 0) mbarrier_arrive(shared.empty + stage * 8);
    }

    __device__ __forceinline__ void block_statistics(float (&z)[64], const Rows& rows, int block,
                                                     float (&largest)[2]) {
        rows.scores(z, p, block * KEYS + rows.column);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!rows.any_inside[i]) continue;
            float of_row[32];
#pragma unroll
            for (int j = 0; j < 32; ++j) of_row[j] = z[j / 2 * 4 + i * 2 + j % 2];
            auto found = contract::block_statistics<4, 2, false>(of_row);
            largest[i] = contract::maximum(largest[i], found.m);
            if (thread % 4 == 0) statistics[block * ROWS + i * 8] = {found.m, found.s};
        }
    }

    // Pass 1: the shift and the sum of exponentials of each row, over all keys.
    //
    // Here and in pass 2 the last keys are multiplied once or twice more than they need be, and the products
    // dropped: with a branch around it ptxas serialises wgmma (C7515). So the last stages are released after
    // the loop.
    __device__ __forceinline__ void row_statistics(const Rows& rows, int blocks, float (&shift)[2],
                                                   Divisor (&by)[2]) {
        float largest[2] = {-INF, -INF}, even[64], odd[64];
        u32 k = wait();
        auto start = [&](float (&next)[64]) {
            clear(next);
            wgmma_fence();
            multiply<KEYS>(next, q, k, 0);
            wgmma_commit();
        };
        auto step = [&](float (&now)[64], float (&next)[64], int block) {
            __syncwarp();  // lanes differ in what they read of a mask and keep of statistics
            wgmma_wait<0>();
            pin(now);
            if (block + 1 < blocks) {
                release(ring.stage);
                ring.step();
                k = wait();
            }
            start(next);
            if (block < blocks) block_statistics(now, rows, block, largest);
        };
        start(even);
        for (int block = 0; block < blocks; block += 2) {
            step(even, odd, block);
            step(odd, even, block + 1);
        }
        __syncwarp();
        wgmma_wait<0>();
        release(ring.stage);
        ring.step();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            shift[i] = contract::shift_of(largest[i]);
            float chains[contract::CHAINS / 4] = {};
            for (int first = rows.column; rows.any_inside[i] && first < blocks; first += contract::CHAINS) {
#pragma unroll
                for (int j = 0; j < contract::CHAINS / 4; ++j) {
                    int block = first + j / 2 * 8 + j % 2;
                    if (block < blocks) {
                        Statistics of = statistics[block * ROWS + i * 8];
                        chains[j] = __fmaf_rn(of.s, contract::exp(__fsub_rn(of.m, shift[i])), chains[j]);
                    }
                }
            }
            by[i].set(contract::sum_by_halves<4, 2>(chains));
        }
        __syncwarp();
    }

    // Pass 2: the chains of probabilities and values, over all keys. While the scores of 64 keys become
    // probabilities, the scores of the next 64 are multiplied, and the probabilities before with their
    // values.
    __device__ __forceinline__ void accumulate_values(const Rows& rows, int blocks, const float (&shift)[2],
                                                      const Divisor (&by)[2], float (&out)[VALUES / 2]) {
        float even[32], odd[32];
        u32 p_even[4][4], p_odd[4][4] = {};
        u32 k = wait(), k_stage = ring.stage, v = 0, v_stage = 0;
        ring.step();
        auto step = [&](float (&now)[32], u32(&p)[4][4], u32 half) {
            clear(now);
            pin(p);
            pin(out);
            wgmma_fence();
            multiply(out, p, v, half * 64);
            multiply<64>(now, q, k, half * 64);
            wgmma_commit();
        };
        clear(out);
        clear(even);
        clear(odd);
        wgmma_fence();
        multiply<64>(even, q, k, 0);
        multiply<64>(odd, q, k, 64);
        wgmma_commit();
        wgmma_wait<0>();
        pin(even);
        pin(odd);
        for (int block = 0; block < blocks; ++block) {
            rows.scores(even, p, block * KEYS + rows.column);
            probabilities(p_even, even, shift, by);
            __syncwarp();  // some have returned early
            wgmma_wait<0>();
            pin(odd);
            pin(p_odd);
            bool more = block + 1 < blocks;
            if (more) release(k_stage);
            if (block > 0) release(v_stage);
            v = wait();
            v_stage = ring.stage;
            ring.step();
            if (more) {
                k = wait();
                k_stage = ring.stage;
                ring.step();
            }
            step(even, p_even, 0);

            rows.scores(odd, p, block * KEYS + 64 + rows.column);
            probabilities(p_odd, odd, shift, by);
            __syncwarp();
            wgmma_wait<0>();
            pin(even);
            pin(p_even);
            step(odd, p_odd, 1);
        }
        wgmma_wait<0>();
        pin(p_odd);
        pin(out);
        if (thread == 0) mbarrier_arrive(shared.q_empty);
        release(k_stage);
        release(v_stage);
    }

    __device__ __forceinline__ void store(const Rows& rows, const TileCoord& tile,
                                          const float (&out)[VALUES / 2]) const {
        i64 matrix = i64(tile.batch) * p.heads + tile.head;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int row = rows.row + i * 8, query = tile.query + (row & ((1 << p.tile_queries) - 1));
            int member = tile.member + (row >> p.tile_queries);
            if (query >= p.queries || member >= p.group) continue;
            i64 at = ((matrix * p.group + member) * p.queries + query) * p.values + rows.column;
            auto* to = static_cast<Type::Stored*>(p.out) + at;
#pragma unroll
            for (int j = 0; j < VALUES / 8; ++j)
                if (j * 8 < p.values)
                    Type::store_pair(to + j * 8, out[j * 4 + i * 2], out[j * 4 + i * 2 + 1]);
        }
    }

    __device__ __forceinline__ void run() {
        for (int round = 0, index; (index = tile_of(p, round)) >= 0; ++round) {
            TileCoord tile(p, index);
            Rows rows(p, tile, warpgroup * 128 + thread);
            float shift[2], out[VALUES / 2];
            Divisor by[2];
            mbarrier_wait(shared.q_full, round % 2);
            row_statistics(rows, tile.blocks, shift, by);
            accumulate_values(rows, tile.blocks, shift, by, out);
            store(rows, tile, out);
            __syncwarp();  // rows outside of the output have left early, and the next tile's wgmma wants the
                           // warp whole
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_sm90(const __grid_constant__ Params p) {
    extern __shared__ unsigned char raw[];
    SharedStorage shared(raw);
    if (threadIdx.x == CONSUMERS) {
        prefetch_tensor_map(p.q);
        prefetch_tensor_map(p.k);
        prefetch_tensor_map(p.v);
        for (u32 stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared.full + stage * 8, 1);
            mbarrier_init(shared.empty + stage * 8, WARPGROUPS);
        }
        mbarrier_init(shared.q_full, 1);
        mbarrier_init(shared.q_empty, WARPGROUPS);
        mbarrier_init_fence();
    }
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    // Read from one lane, so that the compiler knows it, and all addresses made of it, to be uniform in a
    // warp.
    u32 warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    if (warpgroup == WARPGROUPS) {
        if constexpr (WARPGROUPS > 1) setmaxnreg_dec<40>();
        if (threadIdx.x == CONSUMERS) producer(shared, p);
        __syncwarp();
    } else {
        if constexpr (WARPGROUPS > 1) setmaxnreg_inc<232>();
        u32 thread = threadIdx.x % 128;
        Statistics* statistics =
            HELD > 0 ? shared.held : p.scratch + i64(blockIdx.x) * ROWS * ((p.keys + KEYS - 1) / KEYS);
        Consumer{p,
                 shared,
                 thread,
                 warpgroup,
                 shared.q + QTile::step(warpgroup * 64, 0),
                 statistics + warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4,
                 Ring<STAGES>()}
            .run();
    }
}

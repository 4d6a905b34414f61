// Attention on Hopper, forward: O = softmax(Q K^T) V, as docs/contract.md, "Attention", has it, without masks
// and pages.
//
// A block takes a tile of ROWS queries of one head, and goes over the keys that they may see, 128 at a time.
// Blocks of the grid stay, and take several tiles, one after another; the longest come first.
//
// Warps of a block
//   WARPGROUPS warpgroups   consumers, 64 rows each; they share keys and values
//   1 warpgroup             producer: one thread issues all TMA loads; its registers go to the consumers
//
// Barriers
//   q_full, q_empty         the tile of queries has arrived; all consumers have multiplied it
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
// The results of a segment are merged with those of the segments before it. These stay in registers, or in
// shared memory, each value by the thread that has it, where values are long.
//
// Macros
//   INPUT_F16       1: f16 operands; 0: bf16
//   HEAD, VALUES    sizes of a row of q and k, and of v, multiples of 16 up to 128; columns past the end are
//                   zeros
//   SOFTCAP         1: scores are capped
//   WARPGROUPS      consumer warpgroups: 1, 2 or 3
//   STAGES          stages of the ring, 3 or more

#if !defined(INPUT_F16) || !defined(SOFTCAP)
#error "all macros are needed: #if takes a missing macro for 0"
#endif
#define HARDWARE_EXP2 1

#include "attention_problem.cuh"
#include "attention_softmax.cuh"
#include "convert.cuh"
#include "ring_sm90.cuh"
#include "tile_sm90.cuh"

static_assert(HEAD % 16 == 0 && HEAD <= 128 && VALUES % 16 == 0 && VALUES <= 128 && STAGES >= 3);
static_assert(WARPGROUPS >= 1 && WARPGROUPS <= 3);
constexpr u32 CONSUMERS = WARPGROUPS * 128, ROWS = WARPGROUPS * 64, THREADS = CONSUMERS + 128;
constexpr u32 PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : 40;
constexpr u32 CONSUMER_REGISTERS = WARPGROUPS == 3 ? 160 : 232;
constexpr bool TOTAL_IN_REGISTERS = VALUES <= 64 && WARPGROUPS < 3;
constexpr u32 TOTAL_BYTES = TOTAL_IN_REGISTERS ? 0 : ROWS * VALUES * 4;
constexpr u32 ORDER = 1, CLEARED = ORDER + WARPGROUPS;  // named barriers; 0 is __syncthreads

using QTile = Tile<false, false, ROWS, HEAD, 1>;
using KTile = Tile<false, false, KEYS, HEAD, 1>;
using VTile = Tile<true, false, VALUES, KEYS, 1>;
using Type = Element<INPUT_F16 ? F16 : BF16>;
using Stored = Type::Stored;
constexpr u32 STAGE_BYTES = KTile::bytes > VTile::bytes ? KTile::bytes : VTile::bytes;

struct Params {
    TensorMap q, k, v;
    Stored* out;
    const float* sinks;  // of each head, or null
    float *lse, *lse2;   // lse may be null
    i64 lse_batch, lse_head;
    int tiles;     // of a head
    int heads;     // of all sequences, or of all together if packed
    int together;  // heads whose tiles are taken in turns, so that keys and values stay in L2
    int shared;    // bits 0 to 5: q, k, v have one matrix for all of the batch; for all heads
    Problem x;
};

// A tile of queries of one head, and the blocks of keys that they may see. All lanes of a warp make it
// together.
struct Work {
    int batch, head, first_query;
    int block = 0, end = 0;  // none: there is no such tile

    __device__ __forceinline__ Work(const Params& p, int index) {
        const Problem& x = p.x;
        // Of a pack of heads the last tiles come first: they see the most keys.
        const int per_pack = p.tiles * p.together, pack = index / per_pack;
        index -= pack * per_pack;
        const int side_by_side = min(p.together, p.heads - pack * p.together), late = index / side_by_side;
        const int matrix = pack * p.together + index - late * side_by_side, heads = x.heads * x.group;
        Place place{matrix / heads, p.tiles - 1 - late};
        if (x.cu_q) place = place_in_packed(x.cu_q, x.batch, x.queries, 1, ROWS, place.tile);
        batch = place.batch;
        head = matrix % heads;
        first_query = place.tile * int(ROWS);
    }
};

struct SharedStorage {
    u32 q, ring, total, full, empty, q_full, q_empty;

    __device__ explicit SharedStorage(unsigned char* raw) {
        q = (shared_address(raw) + 1023) & ~1023u;  // a whole period of the swizzle
        ring = q + QTile::bytes;
        total = ring + STAGES * STAGE_BYTES;
        full = total + TOTAL_BYTES;
        empty = full + STAGES * 8;
        q_full = empty + STAGES * 8;
        q_empty = q_full + 8;
    }
};

// Blocks of keys that some row of the tile may see.
struct Range {
    int first, end;

    __device__ __forceinline__ Range(const Problem& x, const Sequence& s, int first_query) {
        const int last_query = min(first_query + int(ROWS), s.queries) - 1;
        first = s.first_seen(x, first_query) / KEYS;
        end = (s.last_seen(x, last_query) + KEYS - 1) / KEYS;
    }
};

// The tile that a block takes in a round, or -1. Every other round is reversed, so that no block gets all the
// long ones.
__device__ __forceinline__ int tile_of(const Params& p, int round) {
    const int slot = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int index = round * int(gridDim.x) + slot;
    return index < p.tiles * p.heads ? index : -1;
}

// f(work, sequence, range, number) for each tile of this block in which a query sees a key, if `empty` is false; else for
// every tile. `number` counts those with keys.
template <typename F>
__device__ __forceinline__ void for_each_tile(const Params& p, F f) {
    const int last_round = (p.tiles * p.heads - 1) / int(gridDim.x);
    for (int round = 0; round <= last_round; ++round) {
        const int index = tile_of(p, round);
        if (index < 0) return;
        const Work work(p, index);
        if (work.batch < 0) continue;
        const Sequence sequence(p.x, work.batch);
        if (work.first_query >= sequence.queries) continue;
        f(work, sequence, Range(p.x, sequence, work.first_query));
    }
}

__device__ __forceinline__ void producer(const SharedStorage& shared, const Params& p) {
    Ring<STAGES> ring;
    const bool issues = threadIdx.x == CONSUMERS;
    u32 q_parity = 1;
    for_each_tile(p, [&](const Work& work, const Sequence& sequence, const Range& blocks) {
        if (blocks.first >= blocks.end) return;
        const auto one_for = [&](int bit) { return p.shared >> bit & 1; };
        const int kv_head = work.head / p.x.group;
        const auto load_keys = [&](int block) {
            const u32 full = shared.full + ring.stage * 8, to = shared.ring + ring.stage * STAGE_BYTES;
            mbarrier_wait(shared.empty + ring.stage * 8, ring.parity ^ 1);
            mbarrier_arrive_expect_tx(full, KTile::bytes);
            KTile::for_each_box(0, 0, 0, [&](u32 offset, int column, int line, int) {
                tma_load(to + offset, p.k, full, column, sequence.first_key + block * KEYS + line,
                         one_for(4) ? 0 : kv_head, one_for(1) ? 0 : int(sequence.batch_of_k));
            });
            ring.step();
        };
        const auto load_values = [&](int block) {
            const u32 full = shared.full + ring.stage * 8, to = shared.ring + ring.stage * STAGE_BYTES;
            mbarrier_wait(shared.empty + ring.stage * 8, ring.parity ^ 1);
            mbarrier_arrive_expect_tx(full, VTile::bytes);
            VTile::for_each_box(0, 0, 0, [&](u32 offset, int column, int line, int) {
                tma_load(to + offset, p.v, full, column, sequence.first_key + block * KEYS + line,
                         one_for(5) ? 0 : kv_head, one_for(2) ? 0 : int(sequence.batch_of_k));
            });
            ring.step();
        };
        if (issues) {
            mbarrier_wait(shared.q_empty, q_parity);
            mbarrier_arrive_expect_tx(shared.q_full, QTile::bytes);
            QTile::for_each_box(0, 0, 0, [&](u32 offset, int column, int line, int) {
                tma_load(shared.q + offset, p.q, shared.q_full, column,
                         sequence.first_query + work.first_query + line, one_for(3) ? 0 : work.head,
                         one_for(0) ? 0 : int(sequence.batch_of_q));
            });
            load_keys(blocks.first);
            for (int block = blocks.first + 1; block < blocks.end; ++block) {
                load_keys(block);
                load_values(block - 1);
            }
            load_values(blocks.end - 1);
        }
        q_parity ^= 1;
        __syncwarp();
    });
}

// Keeps the compiler from moving work on these registers across a fence or a wait, which name none.
template <int count>
__device__ __forceinline__ void pin(float (&x)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

__device__ __forceinline__ void pin(u32 (&x)[KEYS / 16][4]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}

// Issues s = Q K^T, for the rows of this warpgroup.
__device__ __forceinline__ void multiply(float (&s)[KEYS / 2], u32 q, u32 k) {
    const auto q_tile = QTile::descriptor(q);
    const auto k_tile = KTile::descriptor(k);
#pragma unroll
    for (u32 d = 0; d < HEAD; d += 16)
        Wgmma<KEYS, 0, 0>::step(s, q_tile.at(QTile::step(0, d)), k_tile.at(KTile::step(0, d)), d > 0);
}

// Issues o += P V; at a segment's `start` o = P V.
__device__ __forceinline__ void multiply(float (&o)[VALUES / 2], const u32 (&p)[KEYS / 16][4], u32 v,
                                         bool start) {
    const auto v_tile = VTile::descriptor(v);
#pragma unroll
    for (u32 i = 0; i < KEYS / 16; ++i)
        WgmmaFragment<VALUES, 1>::step(o, p[i], v_tile.at(VTile::step(0, i * 16)), i > 0 || !start);
}

// The two rows of a thread, 8 apart. Three other lanes have the rest of their scores.
struct Rows {
    int query[2];             // in the sequence
    bool exists[2];           // else it sees what the last one sees, and is not stored
    int first[2], last[2];    // the keys that it sees
    int all_first, all_last;  // that all rows of the warp see

    __device__ __forceinline__ Rows(const Problem& x, const Sequence& s, int first_row) {
        const int thread = threadIdx.x;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + thread / 32 * 16 + thread % 32 / 4 + 8 * h;
            query[h] = min(row, s.queries - 1);
            exists[h] = row < s.queries;
            first[h] = s.first_seen(x, query[h]);
            last[h] = s.last_seen(x, query[h]);
        }
        all_first = __shfl_sync(0xFFFFFFFF, first[1], 31);
        all_last = __shfl_sync(0xFFFFFFFF, last[0], 0);
    }
};

// The softmax of the current segment.
struct Softmax {
    float n[2], l[2][2];  // l: partial sums 2 (lane % 4) and the next
    float scale[2];       // of o, for the last block

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int h = 0; h < 2; ++h) n[h] = -INF, l[h][0] = l[h][1] = 0.0f;
    }

    // Products of a block to probabilities.
    __device__ __forceinline__ void add(float (&s)[KEYS / 2], const Problem& x, const Rows& rows, int block) {
        if (SOFTCAP)
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) s[i] = scores::tanh(__fmul_rn(s[i], x.cap));
        if (block * KEYS < rows.all_first || block * KEYS + KEYS > rows.all_last) {
            const int column = block * KEYS + threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) {
                const int h = i / 2 % 2, key = column + i / 4 * 8 + i % 2;
                if (key < rows.first[h] || key >= rows.last[h]) s[i] = -INF;
            }
        }
        float shift[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float m = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
            for (int u = 1; u < KEYS / 8; ++u) m = fmaxf(m, fmaxf(s[u * 4 + 2 * h], s[u * 4 + 2 * h + 1]));
            m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, 2));
            const float larger = fmaxf(n[h], ceilf(__fmul_rn(m, x.c)));
            shift[h] = contract::shift_of(larger);
            scale[h] = scores::exp2(__fsub_rn(n[h], shift[h]));
            n[h] = larger;
        }
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            const int h = i / 2 % 2;
            s[i] = scores::exp2(__fmaf_rn(s[i], x.c, -shift[h]));
            float& sum = l[h][i % 2];
            sum = i < 4 ? __fmaf_rn(sum, scale[h], s[i]) : __fadd_rn(sum, s[i]);
        }
    }

    // All eight partial sums of a row.
    __device__ __forceinline__ float sum(int h) const {
        float x = __fadd_rn(l[h][0], l[h][1]);
        x = __fadd_rn(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
        return __fadd_rn(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
    }
};

__device__ __forceinline__ void pack(u32 (&p)[KEYS / 16][4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) p[i / 4][i % 4] = Type::pack(s[2 * i], s[2 * i + 1]);
}

// What segments before the current one come to.
struct Total {
    u32 memory;  // this thread's first four values
    float held[TOTAL_IN_REGISTERS ? VALUES / 2 : 1];
    Merged rows[2];
    float scale[2], own_scale[2];  // of this, and of the segment that is added
    bool any = false;

    __device__ __forceinline__ explicit Total(const SharedStorage& shared)
        : memory(shared.total + threadIdx.x * 16) {}

    __device__ __forceinline__ void add(const Softmax& segment) {
#pragma unroll
        for (int h = 0; h < 2; ++h) rows[h].add(segment.n[h], segment.sum(h), scale[h], own_scale[h]);
    }

    // o = what all segments come to.
    __device__ __forceinline__ void merge(float (&o)[VALUES / 2]) const {
#pragma unroll
        for (int i = 0; i < VALUES / 2; i += 4) {
            float of_total[4] = {};
            if (any) {
                if constexpr (TOTAL_IN_REGISTERS) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) of_total[e] = held[i + e];
                } else {
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
            } else {
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(memory + i * (CONSUMERS * 4)),
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
                     : "r"(memory + i * (CONSUMERS * 4))
                     : "memory");
    }
};

// Each of four lanes has `w[i]`, a part of line i; then it has line `lane % 4`, by parts.
__device__ __forceinline__ void transpose(u32 (&w)[4]) {
    const u32 lane = threadIdx.x;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool high = lane & step;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (!(i & step)) {
                const u32 sent = high ? w[i] : w[i + step];
                const u32 got = __shfl_xor_sync(0xFFFFFFFF, sent, step);
                (high ? w[i] : w[i + step]) = got;
            }
    }
}

struct Consumer {
    const Params& p;
    const SharedStorage& shared;
    u32 warpgroup, thread;
    Ring<STAGES> ring;
    u32 q_parity = 0;

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

    // Goes over the keys; o and `total` are then those of all segments.
    __device__ __forceinline__ void accumulate(const Sequence& sequence, const Range& blocks,
                                               const Rows& rows, float (&o)[VALUES / 2], Total& total) {
        const u32 q = shared.q + QTile::step(warpgroup * 64, 0);
        float s[KEYS / 2];
        u32 probabilities[KEYS / 16][4];
        Softmax segment;
        segment.start();

        mbarrier_wait(shared.q_full, q_parity);
        q_parity ^= 1;
        const u32 first_keys = wait();
        wgmma_fence();
        multiply(s, q, first_keys);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        release(ring.stage);
        ring.step();
        segment.add(s, p.x, rows, blocks.first);
        pack(probabilities, s);

        bool start = true;  // o has nothing of the segment
#pragma unroll 1
        for (int block = blocks.first + 1; block < blocks.end; ++block) {
            const u32 k = wait(), k_stage = ring.stage;
            ring.step();
            take_turn();
            pin(o);
            pin(probabilities);
            wgmma_fence();
            multiply(s, q, k);
            wgmma_commit();
            const u32 v = wait(), v_stage = ring.stage;
            ring.step();
            multiply(o, probabilities, v, start);
            wgmma_commit();
            pass_turn();
            wgmma_wait<1>();
            pin(s);
            release(k_stage);
            start = block % BLOCKS == 0;
            if (start) {
                total.add(segment);
                segment.start();
            }
            segment.add(s, p.x, rows, block);
            pin(s);
            // The wait is in each branch, as ptxas would move it before the arithmetic above.
            if (start) {
                wgmma_wait<0>();
                pin(o);
                total.merge(o);
                total.keep(o);
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
        if (thread == 0) mbarrier_arrive(shared.q_empty);

        const u32 v = wait();
        const int valid = sequence.keys - (blocks.end - 1) * KEYS;
        if (valid <
            KEYS) {  // what lies behind may be another sequence's: each warpgroup clears it for itself
            VTile::clear(v, valid, thread, 128);
            fence_async_proxy();
            named_barrier(CLEARED + warpgroup, 128);
        }
        pin(o);
        pin(probabilities);
        wgmma_fence();
        multiply(o, probabilities, v, start);
        wgmma_commit();
        total.add(segment);
        wgmma_wait<0>();
        pin(o);
        release(ring.stage);
        ring.step();
        total.merge(o);
    }

    __device__ __forceinline__ void store(const Work& work, const Sequence& sequence, const Rows& rows,
                                          float (&o)[VALUES / 2], Total& total) const {
        const int heads = p.x.heads * p.x.group, lane = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            Merged& merged = total.rows[h];
            const float scale = p.sinks ? merged.add_sink(p.sinks[work.head]) : 1.0f;
            const float inverse = merged.inverse();
            const i64 token = sequence.batch_of_q * p.x.queries + sequence.first_query + rows.query[h];
            Stored* to = p.out + (token * heads + work.head) * p.x.values;
#pragma unroll
            for (int i = 0; i < VALUES / 2; i += 16) {
                u32 columns[4] = {};
#pragma unroll
                for (int u = 0; u < 4; ++u)
                    if (i + u * 4 < VALUES / 2) {
                        const float* at = o + i + u * 4 + 2 * h;
                        columns[u] = Type::pack(merged.quotient(__fmul_rn(at[0], scale), inverse),
                                                merged.quotient(__fmul_rn(at[1], scale), inverse));
                    }
                transpose(columns);
                const int column = i * 2 + lane * 8;
                if (rows.exists[h] && column < p.x.values)
                    *reinterpret_cast<uint4*>(to + column) =
                        make_uint4(columns[0], columns[1], columns[2], columns[3]);
            }
            if (rows.exists[h] && lane == 0)
                merged.store(p.lse, p.lse2,
                             sequence.batch_of_q * p.lse_batch + work.head * p.lse_head +
                                 sequence.first_query + rows.query[h]);
        }
    }

    __device__ __forceinline__ void run() {
        if (warpgroup == WARPGROUPS - 1) pass_turn();
        for_each_tile(p, [&](const Work& work, const Sequence& sequence, const Range& blocks) {
            const Rows rows(p.x, sequence, work.first_query);
            float o[VALUES / 2] = {};
            Total total(shared);
            if (blocks.first < blocks.end) accumulate(sequence, blocks, rows, o, total);
            store(work, sequence, rows, o, total);
            __syncwarp();
        });
        if (warpgroup == 0) take_turn();  // nobody leaves a barrier half full
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_sm90(const __grid_constant__ Params p) {
    extern __shared__ unsigned char raw[];
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
        mbarrier_init(shared.q_empty, WARPGROUPS);
        mbarrier_init_fence();
    }
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

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

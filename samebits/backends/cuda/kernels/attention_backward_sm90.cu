// Attention on Hopper, backward: dK and dV, or dQ, as docs/contract.md, "Attention", has them, without masks and
// pages. D is what attention_dots.cu left.
//
//   GRADS 1, 2, 3   dK, dV, or both: a block has a tile of keys of a head of k, and goes over the queries that
//                   see them, STEP at a time, of one head of the group after another
//   GRADS 4         dQ: a block has a tile of queries of a head, and goes over their keys, STEP at a time
//
// Scores and their gradients are computed in all, so none waits for another, and each sum is one chain with one
// owner. A warpgroup has 64 rows: of keys, or of queries. Probabilities and gradients of scores go from its
// accumulators to the fragments that it multiplies, and never leave registers. Those hold dK and dV of 128
// columns each, or one of the two.
//
// Warps of a block
//   WARPGROUPS warpgroups   consumers, 64 rows each; they share what passes by
//   1 warpgroup             producer: one thread issues TMA loads, and for dK and dV one warp loads the
//                           log-sum-exps and D of queries; its registers go to the consumers
//
// Barriers, all mbarriers
//   own                     the tiles that a block keeps have arrived
//   full[stage]             what passes by has arrived
//   empty[stage]            all consumers have read it
//
// Macros
//   INPUT_F16       1: f16 operands; 0: bf16
//   HEAD, VALUES    sizes of a row of q and k, and of v, 64, 128, 192 or 256; columns past the end are zeros
//   SOFTCAP         1: scores are capped
//   GRADS           1 to 4, see above
//   WARPGROUPS      consumer warpgroups: 1 to 3
//   STEP            queries, or keys, of a stage: 64 or 128
//   STAGES          of the ring, 2 or more

#if !defined(INPUT_F16) || !defined(SOFTCAP) || !defined(GRADS)
#error "all macros are needed: #if takes a missing macro for 0"
#endif
#define HARDWARE_EXP2 1

#include "attention_sm90.cuh"

// Long rows of results, which no other kernel has.
WGMMA_FRAGMENT(192, REGS_96, 96, 97, 98, 99, 100, 101, 102, ACC_64(0), ACC_32(64))
WGMMA_FRAGMENT(256, REGS_128, 128, 129, 130, 131, 132, 133, 134, ACC_64(0), ACC_64(64))

static_assert(HEAD % 64 == 0 && HEAD <= 256 && VALUES % 64 == 0 && VALUES <= 256);
static_assert(WARPGROUPS >= 1 && WARPGROUPS <= 3);
constexpr u32 CONSUMERS = WARPGROUPS * 128, ROWS = WARPGROUPS * 64, THREADS = CONSUMERS + 128;
constexpr u32 PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : 40;
constexpr u32 CONSUMER_REGISTERS = WARPGROUPS == 3 ? 160 : 232;
constexpr u32 CLEARED = 1;  // named barriers, one for each warpgroup; 0 is __syncthreads
constexpr bool OF_KEYS = GRADS < 4;
constexpr bool OF_HEADS = GRADS != 2, OF_VALUES = OF_KEYS && GRADS >= 2;  // whether it is dK or dQ, and dV
constexpr bool COMES_FIRST = GRADS & 1;  // of the kernels that are launched: it alone waits for D

// What a block keeps: k and v, or q and g; and what passes by, the other two. dV needs no v. A row that passes
// by is a row of n for scores and their gradients, and of k for what they are summed up to: the same bytes in
// memory.
using OwnHead = Tile<false, false, ROWS, HEAD, 1>;
using OwnValues = Tile<false, false, ROWS, VALUES, 1>;
using StepHead = Tile<false, false, STEP, HEAD, 1>;
using StepValues = Tile<false, false, STEP, VALUES, 1>;
using StepHeadAcross = Tile<true, false, HEAD, STEP, 1>;
using StepValuesAcross = Tile<true, false, VALUES, STEP, 1>;
static_assert(StepHead::bytes == StepHeadAcross::bytes && StepValues::bytes == StepValuesAcross::bytes);
constexpr u32 STAGE_BYTES = StepHead::bytes + StepValues::bytes;
constexpr u32 OWN_VALUES_BYTES = OF_HEADS ? OwnValues::bytes : 0;

struct Params {
    TensorMap q, k, v, g;
    const float *lse2, *dots;
    Stored *dq, *dk, *dv;
    i64 lse_batch, lse_head;  // of `dots` too
    int tiles;                // of a head
    int heads;                // of q or k, of all sequences, or of all together if packed
    int shared;               // bits 0 to 7: q, k, v, g have one matrix for all of the batch; for all heads
    int unused;
    Problem x;
};

struct SharedStorage {
    u32 head, values, ring, full, empty, own;
    float4* rows;  // for dK and dV: lse2 and D of two queries each, of every stage

    __device__ explicit SharedStorage(unsigned char* raw) {
        const u32 start = shared_address(raw);
        head = (start + 1023) & ~1023u;  // a whole period of the swizzle
        values = head + OwnHead::bytes;
        ring = values + OWN_VALUES_BYTES;
        const u32 behind = ring + STAGES * STAGE_BYTES;
        rows = reinterpret_cast<float4*>(raw + (behind - start));
        full = behind + (OF_KEYS ? STAGES * STEP * 8 : 0);
        empty = full + STAGES * 8;
        own = empty + STAGES * 8;
    }
};

// A log-sum-exp, or D. A kernel that has not waited for those before it reads from the L2 cache.
__device__ __forceinline__ float of_query(const float* at) { return COMES_FIRST ? *at : __ldcg(at); }

// A tile of a block, and the steps that it takes. All lanes of a warp make it together.
struct Work {
    Sequence sequence;
    int head, first;  // of k, or of q; the first key, or query, in the sequence
    int begin = 0,
        steps = 0;  // the first query or key that passes by, and steps for each head; none: no tile

    __device__ __forceinline__ Work(const Params& p) {
        const Problem& x = p.x;
        const int all_heads = OF_KEYS ? x.heads : x.heads * x.group;
        // Of keys the first see the most queries, of queries the last the most keys.
        const int matrix = blockIdx.x % p.heads, place_of = blockIdx.x / p.heads;
        Place place{matrix / all_heads, OF_KEYS ? place_of : p.tiles - 1 - place_of};
        head = matrix - place.batch * all_heads;
        const int* bounds = OF_KEYS ? x.cu_k : x.cu_q;
        if (bounds) place = place_in_packed(bounds, x.batch, OF_KEYS ? x.keys : x.queries, 1, ROWS, place_of);
        if (place.batch < 0) return;
        sequence = Sequence(x, place.batch);
        first = place.tile * int(ROWS);
        if (OF_KEYS) {
            if (first >= sequence.keys) return;
            // Queries are taken by their positions: groups of 16 begin at multiples of 16 of those.
            const int last = min(first + int(ROWS), sequence.keys) - 1;
            int from = sequence.offset, to = sequence.offset + sequence.queries;
            if (x.window_right >= 0) from = max(from, first - x.window_right);
            if (x.window_left >= 0) to = min(to, last + x.window_left + 1);
            from &= ~15;
            begin = from - sequence.offset;
            steps = max(1, (to - from + int(STEP) - 1) / int(STEP));
        } else {
            if (first >= sequence.queries) return;
            begin = sequence.first_seen(x, first) / 16 * 16;
            const int last = sequence.last_seen(x, min(first + int(ROWS), sequence.queries) - 1);
            steps = max(1, (last - begin + int(STEP) - 1) / int(STEP));
        }
    }

    __device__ __forceinline__ int members(const Params& p) const { return OF_KEYS ? p.x.group : 1; }
};

// Issues the loads of a tile of q, k, v or g, of `operand` 0 to 3.
template <typename Tile>
__device__ __forceinline__ void load(u32 to, const Params& p, int operand, u32 barrier, i64 batch, int head,
                                     int line) {
    const TensorMap& map = operand == 0 ? p.q : operand == 1 ? p.k : operand == 2 ? p.v : p.g;
    const int own_batch = p.shared >> operand & 1 ? 0 : int(batch);
    const int own_head = p.shared >> (operand + 4) & 1 ? 0 : head;
    Tile::for_each_box(0, 0, 0, [&](u32 offset, int column, int, int) {
        tma_load(to + offset, map, barrier, column, line, own_head, own_batch);
    });
}

__device__ __forceinline__ void producer(const SharedStorage& shared, const Params& p, const Work& work) {
    const Sequence& s = work.sequence;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, group = p.x.group;
    if (warp == 0 && lane == 0) {
        mbarrier_arrive_expect_tx(shared.own, OwnHead::bytes + OWN_VALUES_BYTES);
        const int line = work.first + (OF_KEYS ? s.first_key : s.first_query);
        const i64 batch = OF_KEYS ? s.batch_of_k : s.batch_of_q;
        load<OwnHead>(shared.head, p, OF_KEYS ? 1 : 0, shared.own, batch, work.head, line);
        if (OF_HEADS) load<OwnValues>(shared.values, p, OF_KEYS ? 2 : 3, shared.own, batch, work.head, line);
    }
    if (warp > (OF_KEYS ? 1 : 0)) return;
    Ring<STAGES> ring;
    for (int member = 0; member < work.members(p); ++member)
        for (int step = 0; step < work.steps; ++step, ring.step()) {
            const u32 full = shared.full + ring.stage * 8, to = shared.ring + ring.stage * STAGE_BYTES;
            const int row = work.begin + step * int(STEP);
            const int head = OF_KEYS ? work.head * group + member : work.head / group;
            if (warp == 0) {
                if (lane > 0) continue;
                mbarrier_wait(shared.empty + ring.stage * 8, ring.parity ^ 1);
                mbarrier_arrive_expect_tx(full, STAGE_BYTES);
                const int line = row + (OF_KEYS ? s.first_query : s.first_key);
                const i64 batch = OF_KEYS ? s.batch_of_q : s.batch_of_k;
                load<StepHead>(to, p, OF_KEYS ? 0 : 1, full, batch, head, line);
                load<StepValues>(to + StepHead::bytes, p, OF_KEYS ? 3 : 2, full, batch, head, line);
            } else {
                mbarrier_wait(shared.empty + ring.stage * 8, ring.parity ^ 1);
                for (int i = lane; i < int(STEP) / 2; i += 32) {
                    float4 two = {};
                    const i64 at = s.batch_of_q * p.lse_batch + head * p.lse_head + s.first_query;
                    const int query = row + 2 * i;
                    if (query >= 0 && query < s.queries)
                        two.x = of_query(p.lse2 + at + query), two.y = of_query(p.dots + at + query);
                    if (query >= -1 && query + 1 < s.queries)
                        two.z = of_query(p.lse2 + at + query + 1), two.w = of_query(p.dots + at + query + 1);
                    shared.rows[ring.stage * (STEP / 2) + i] = two;
                }
                warp_arrive(full);
            }
        }
}

// Zeroes lines of a tile outside of `from` to `to`: they may be another sequence's.
template <typename Tile>
__device__ __forceinline__ void clear(u32 tile, int from, int to, u32 thread) {
    for (u32 i = thread; i < Tile::columns * STEP * 8; i += 128) {
        const int line = i / 8 % STEP;
        if (line < from || line >= to)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + i * 16), "r"(0) : "memory");
    }
}

template <int count>
__device__ __forceinline__ void zero(float (&x)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = 0.0f;
}

// Stores a row h of `sum`, scaled or not.
template <int columns, bool scaled>
__device__ __forceinline__ void store_row(Stored* to, const float (&sum)[columns / 2], int h, float scale,
                                          int size, bool exists) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int u = 0; u < columns / 8; u += 4) {
        u32 packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                x[e] = __fadd_rn(sum[(u + i) * 4 + 2 * h + e], 0.0f);
                if (scaled) x[e] = __fmul_rn(x[e], scale);
            }
            packed[i] = Type::pack(x[0], x[1]);
        }
        transpose(packed);
        const int column = (u + lane) * 8;
        if (exists && column < size)
            *reinterpret_cast<uint4*>(to + column) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
}

// Of each warpgroup, in shared memory: no register holds them beside accumulators.
__shared__ int2 columns[WARPGROUPS];

struct Consumer {
    const Params& p;
    const SharedStorage& shared;
    const Work& work;
    u32 warpgroup, thread;

    __device__ __forceinline__ int row(int h) const {
        return work.first + int(warpgroup) * 64 + int(thread) / 32 * 16 + int(thread) % 32 / 4 + 8 * h;
    }

    // Bits of the columns of a step that row h sees, or is seen by.
    __device__ __forceinline__ u32 visible(int h, int first_of_step) const {
        const Problem& x = p.x;
        const Sequence& s = work.sequence;
        int from, to;
        if (OF_KEYS) {
            const int key = row(h);
            from = x.window_right < 0 ? 0 : max(0, key - x.window_right - s.offset);
            to = x.window_left < 0 ? s.queries : min(s.queries, key + x.window_left + 1 - s.offset);
            if (key >= s.keys) to = from;
        } else {
            const int query = min(row(h), s.queries - 1);
            from = s.first_seen(x, query), to = s.last_seen(x, query);
        }
        const int column = first_of_step + int(thread) % 4 * 2;
        return columns_below(to - column) & ~columns_below(from - column);
    }

    // Whether all pairs of a step are visible.
    __device__ __forceinline__ bool whole(int first_of_step) const {
        const Problem& x = p.x;
        const Sequence& s = work.sequence;
        const int end = first_of_step + int(STEP), rows_end = work.first + int(ROWS);
        if (OF_KEYS)
            return first_of_step >= 0 && end <= s.queries && work.first >= s.first_seen(x, end - 1) &&
                   rows_end <= s.last_seen(x, first_of_step);
        const int last = min(rows_end, s.queries) - 1;
        return first_of_step >= s.first_seen(x, last) && end <= s.last_seen(x, work.first);
    }

    // Finds the columns, first to last - 1, that any row of this warpgroup sees, or is seen by.
    __device__ __forceinline__ void find_columns() const {
        const Problem& x = p.x;
        const Sequence& s = work.sequence;
        const int row = work.first + int(warpgroup) * 64;
        int first, last;
        if (OF_KEYS) {
            first = x.window_right < 0 ? 0 : row - x.window_right - s.offset;
            last = x.window_left < 0 ? s.queries : row + 64 + x.window_left - s.offset;
            if (row >= s.keys) last = first;
        } else {
            first = s.first_seen(x, row), last = s.last_seen(x, min(row + 64, s.queries) - 1);
            if (row >= s.queries) last = first;
        }
        if (thread == 0) columns[warpgroup] = make_int2(first, last);
        named_barrier(CLEARED + warpgroup, 128);
    }

    // Whether a step has any of these columns.
    __device__ __forceinline__ bool has_columns(int first_of_step) const {
        int first, last;
        asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
                     : "=r"(first), "=r"(last)
                     : "r"(shared_address(columns + warpgroup))
                     : "memory");
        return first_of_step < last && first_of_step + int(STEP) > first;
    }

    // Products, and gradients of probabilities, to probabilities and gradients of scores. For dV alone these
    // are not there, and the compiler leaves them out.
    __device__ __forceinline__ void differentiate(float (&a)[STEP / 2], float (&grad)[STEP / 2], u32 stage,
                                                  int first_of_step, const float (&lse2)[2],
                                                  const float (&dots)[2]) const {
        const Problem& x = p.x;
        const bool all = whole(first_of_step);
        const u32 seen[2] = {all ? 0xFFFFFFFF : visible(0, first_of_step),
                             all ? 0xFFFFFFFF : visible(1, first_of_step)};
#pragma unroll
        for (int u = 0; u < STEP / 8; ++u) {
            float4 of_columns;
            if (OF_KEYS) of_columns = shared.rows[stage * (STEP / 2) + u * 4 + thread % 4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i / 2, e = i % 2;
                float &product = a[u * 4 + i], &of_grad = grad[u * 4 + i];
                const float shift = OF_KEYS ? (e ? of_columns.z : of_columns.x) : lse2[h];
                const float dot = OF_KEYS ? (e ? of_columns.w : of_columns.y) : dots[h];
                if (SOFTCAP) product = scores::tanh(__fmul_rn(product, x.cap));
                const bool counts = seen[h] >> (u * 2 + e) & 1 && product != -INF && shift != -INF;
                const float weight = scores::exp2(__fmaf_rn(product, x.c, -shift));
                float ds = __fmul_rn(weight, __fsub_rn(of_grad, dot));
                if (SOFTCAP) ds = __fmul_rn(ds, __fmaf_rn(-product, product, 1.0f));
                product = counts ? weight : 0.0f;
                if (OF_HEADS) of_grad = counts ? ds : 0.0f;
            }
        }
    }

    __device__ __forceinline__ void run() const {
        const Sequence& s = work.sequence;
        const u32 own_head = shared.head + OwnHead::step(warpgroup * 64, 0);
        const u32 own_values = shared.values + OwnValues::step(warpgroup * 64, 0);
        float sum[HEAD / 2], sum_of_values[VALUES / 2];
        if (OF_HEADS) zero(sum);
        if (OF_VALUES) zero(sum_of_values);
        float lse2[2] = {}, dots[2] = {};
        if (!OF_KEYS) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const i64 at = s.batch_of_q * p.lse_batch + work.head * p.lse_head + s.first_query +
                               min(row(h), s.queries - 1);
                lse2[h] = of_query(p.lse2 + at), dots[h] = of_query(p.dots + at);
            }
        }
        find_columns();
        mbarrier_wait(shared.own, 0);

        Ring<STAGES> ring;
        const int all_steps = work.steps * work.members(p);
        int step = 0;
#pragma unroll 1
        for (int i = 0; i < all_steps; ++i) {
            const int first_of_step = work.begin + step * int(STEP);
            step = step + 1 == work.steps ? 0 : step + 1;
            const u32 head_tile = shared.ring + ring.stage * STAGE_BYTES;
            const u32 values_tile = head_tile + StepHead::bytes;
            mbarrier_wait(shared.full + ring.stage * 8, ring.parity);
            if (!has_columns(first_of_step)) {  // it would add zeros
                warp_arrive(shared.empty + ring.stage * 8);
                ring.step();
                continue;
            }
            const int exist = (OF_KEYS ? s.queries : s.keys) - first_of_step;
            if (first_of_step < 0 || exist < int(STEP)) {  // each warpgroup does so for itself
                if (OF_HEADS) clear<StepHead>(head_tile, -first_of_step, exist, thread);
                if (OF_VALUES) clear<StepValues>(values_tile, -first_of_step, exist, thread);
                fence_async_proxy();
                named_barrier(CLEARED + warpgroup, 128);
            }

            float a[STEP / 2], grad[STEP / 2];
            wgmma_fence();
            multiply<OwnHead, StepHead, HEAD>(a, own_head, head_tile);
            if (OF_HEADS) multiply<OwnValues, StepValues, VALUES>(grad, own_values, values_tile);
            wgmma_commit();
            wgmma_wait<0>();
            pin(a);
            if (OF_HEADS) pin(grad);
            differentiate(a, grad, ring.stage, first_of_step, lse2, dots);
            u32 weights[STEP / 16][4], grads[STEP / 16][4];
            if (OF_VALUES) pack(weights, a);
            if (OF_HEADS) {
                pack(grads, grad);
                pin(sum);
            }
            if (OF_VALUES) {
                pin(weights);
                pin(sum_of_values);
            }
            if (OF_HEADS) pin(grads);
            wgmma_fence();
            if constexpr (OF_VALUES) accumulate<StepValuesAcross>(sum_of_values, weights, values_tile, false);
            if constexpr (OF_HEADS) accumulate<StepHeadAcross>(sum, grads, head_tile, false);
            wgmma_commit();
            wgmma_wait<0>();
            if (OF_HEADS) pin(sum);
            if (OF_VALUES) pin(sum_of_values);
            warp_arrive(shared.empty + ring.stage * 8);
            ring.step();
        }

        const Problem& x = p.x;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = row(h);
            if constexpr (OF_KEYS) {
                const i64 slot = (s.batch_of_k * x.keys + s.first_key + at) * x.heads + work.head;
                if constexpr (OF_HEADS)
                    store_row<HEAD, true>(p.dk + slot * x.head, sum, h, x.scale, x.head, at < s.keys);
                if constexpr (OF_VALUES)
                    store_row<VALUES, false>(p.dv + slot * x.values, sum_of_values, h, 1.0f, x.values,
                                             at < s.keys);
            } else {
                store_row<HEAD, true>(p.dq + s.row(x, at, work.head) * x.head, sum, h, x.scale, x.head,
                                      at < s.queries);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_sm90(const __grid_constant__ Params p) {
    extern __shared__ unsigned char raw[];
    const SharedStorage shared(raw);
    if (threadIdx.x == CONSUMERS) {
        prefetch_tensor_map(p.q);
        prefetch_tensor_map(p.k);
        prefetch_tensor_map(p.v);
        prefetch_tensor_map(p.g);
        for (u32 stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared.full + stage * 8, 1 + (OF_KEYS ? WARP_ARRIVALS : 0));
            mbarrier_init(shared.empty + stage * 8, WARPGROUPS * 4 * WARP_ARRIVALS);
        }
        mbarrier_init(shared.own, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    // Only the first kernel waits for D. The others need nothing of those between, and take the room that their
    // last blocks leave. One block of each waits for the end of the kernel before, for what comes behind.
    const bool waits = !COMES_FIRST && blockIdx.x == gridDim.x - 1;
    if (COMES_FIRST) griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const Work work(p);
    if (work.steps == 0) {
        if (waits) griddepcontrol_wait();
        return;
    }

    // Read from one lane: then the compiler knows it, and all addresses made of it, to be uniform in a warp.
    const u32 warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    if (warpgroup == WARPGROUPS) {
        if constexpr (WARPGROUPS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (waits && threadIdx.x >= THREADS - 32) griddepcontrol_wait();  // a warp without other work
        producer(shared, p, work);
    } else {
        if constexpr (WARPGROUPS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer{p, shared, work, warpgroup, threadIdx.x % 128}.run();
    }
}

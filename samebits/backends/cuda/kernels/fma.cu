// Product under FMA for every layout, stride, alignment and size, on sm_75 and newer: D = acc + A B + bias,
// of f32 and of 16-bit operands, which are widened.
//
// Every output element is one chain of IEEE fused multiply-adds over ascending k, in one thread. Nothing else
// is added to it, not even zeros: fma(0, 0, -0) is +0. So tiles reach past the last row and column, but never
// past k.
//
// A block takes one tile of the output; a thread has THREAD_M x THREAD_N of it in registers. Shared memory is
// a ring of STAGES stages, each a tile of a and of b in f32, filled STAGES - 1 ahead (by cp.async where no
// widening is needed): by HELPERS producer warps, or by all warps if there are none.
//
// Macros
//   TILE_K                     k of a stage
//   THREAD_M, THREAD_N         rows and columns of a thread
//   LANES_M                    rows of lanes in a warp, of 32 lanes in all
//   WARPS_M, WARPS_N           rows and columns of warps that multiply
//   HELPERS                    producer warps; 0: all warps copy
//   STAGES                     stages of the ring
//   STEP                       k whose operands are read from shared memory at a time
//   MIN_BLOCKS                 blocks that shall fit on one multiprocessor, from sm_90 on
//   A_KIND, B_KIND, OUT_KIND   types: 0 f32, 1 bf16, 2 f16 (enum Kind of epilogue.cuh)
//   A_COPY, B_COPY             how the operand is copied: enum Copy of tile_fma.cuh
//   SEQUENCES                  1: k has sequences; 0: one chain over all of k
//   GROUPED                    OF_ROWS, OF_TERMS: a grouped product (groups.cuh); absent: any other

#ifndef SEQUENCES
#error "SEQUENCES is needed: #if takes a missing macro for 0"
#endif

#include "epilogue.cuh"
#include "groups.cuh"
#include "tile_fma.cuh"
#include "tile_order.cuh"

using TileA = Tile<WARPS_M, LANES_M, THREAD_M, A_KIND, A_COPY>;
using TileB = Tile<WARPS_N, 32 / LANES_M, THREAD_N, B_KIND, B_COPY>;
constexpr int STAGE = TileA::SIZE + TileB::SIZE;  // floats
// Terms between two reads of b. It is read late where it takes many registers.
constexpr int PART = THREAD_N >= 8 ? 1 : STEP, PARTS = STEP / PART;
// Pairs of steps in a turn of the inner loop: some thousand instructions, which the instruction cache holds.
constexpr int PAIR = 2 * STEP * THREAD_M * THREAD_N, UNROLL = PAIR >= 1024 ? 1 : 1024 / PAIR;
static_assert(TILE_K % (2 * STEP) == 0);  // so that every stage begins with the first buffer of fragments

struct Params {
    Operand a, b;
    void* out;
    i64 out_batch, out_row, out_col;
    const float* acc;
    i64 acc_batch, acc_row, acc_col;
    const void* bias;
    i64 bias_stride;
    const void* spans;  // segments + 1 ascending bounds in k; null: `segments` segments of k each
    int m, n, k, segments, tiles_m, tiles_n;
    int closing_zero;  // a zero term ends every nonempty segment
    int out_together, bias_kind, spans_wide;
#ifdef GROUPED
    Groups groups;
    i64 bias_group;
#endif
};

// Up to TILE_K consecutive k of one segment.
struct Block {
    int segment, k, count;
    bool last;  // of its segment
};

#if SEQUENCES
// Gives the blocks of all segments in order; one of no terms follows the last.
class BlockIterator {
    int segment = 0, k = 0, end = 0;

    __device__ __forceinline__ static int bound(const Params& p, int i) {
        const i64 at =
            p.spans_wide ? static_cast<const i64*>(p.spans)[i] : static_cast<const int*>(p.spans)[i];
        return static_cast<int>(
            min(max(at, 0ll), static_cast<i64>(p.k)));  // wrong bounds may not read elsewhere
    }

    __device__ __forceinline__ void start(const Params& p) {
        if (segment == p.segments) return;
        k = p.spans ? bound(p, segment) : 0;
        end = p.spans ? bound(p, segment + 1) : p.k;
    }

  public:
    __device__ __forceinline__ explicit BlockIterator(const Params& p) { start(p); }

    __device__ __forceinline__ Block next(const Params& p) {
        while (k >= end && segment < p.segments) {
            ++segment;
            start(p);
        }
        const int left = max(end - k, 0);
        const Block b{p.spans ? 0 : segment, k, min(left, TILE_K), left <= TILE_K};
        k += TILE_K;
        return b;
    }
};
#else
class BlockIterator {
    int k = 0;

  public:
    __device__ __forceinline__ explicit BlockIterator(const Params&) {}

    __device__ __forceinline__ Block next(const Params& p) {
        const Block b{0, k, min(max(p.k - k, 0), TILE_K), p.k - k <= TILE_K};
        k += TILE_K;
        return b;
    }
};
#endif

// Older GPUs have no shared memory for many blocks, and their code wants some more registers.
constexpr int RESIDENT = __CUDA_ARCH__ < 900 ? 1 : MIN_BLOCKS;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    fma_product(const __grid_constant__ Params given) {
#ifdef GROUPED
    Params p = given;
#else
    const Params& p = given;
#endif
    extern __shared__ __align__(16) float memory[];
    __shared__ int counts[STAGES];  // terms of each block in the ring; negative if it is its segment's last
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const u32 tiles = static_cast<u32>(p.tiles_m) * p.tiles_n;
    u32 batch = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const u32 group = tile / (GROUP_M * p.tiles_n);
    const u32 height = min(p.tiles_m - group * GROUP_M, static_cast<u32>(GROUP_M));
    const u32 in_group = tile % (GROUP_M * p.tiles_n);
    int tile_m = (group * GROUP_M + in_group % height) * TileA::ROWS;
    const int tile_n = in_group / height * TileB::ROWS;
#ifdef GROUPED
    int end_row = p.m;  // rows from there on are computed, and not stored
    const auto end_m = [&] { return end_row; };
    if (blockIdx.x == 0) p.groups.check(THREADS);
#if GROUPED == OF_ROWS
    if (!take_rows<TileA::ROWS, TileB::ROWS, THREADS>(p, batch, tile_m, end_row, tile_n,
                                                      OUT_KIND == F32 ? 4 : 2))
        return;
#else
    int bounds[2];
    take_terms(p, batch, bounds);
#endif
#else
    const auto end_m = [&] { return p.m; };
#endif

    // Neighbours share a row of a, and lanes two apart a column of b: then 16 lanes read 16 bytes each at
    // once, not 8.
    const int lane_m = lane / 2 % LANES_M, lane_n = lane / (2 * LANES_M) * 2 + lane % 2;
    const int own_m = TileA::own(warp % WARPS_M, lane_m), own_n = TileB::own(warp / WARPS_M, lane_n);
    const bool copies = HELPERS == 0 || warp >= WARPS, multiplies = warp < WARPS;

    u32 ring = shared_address(memory);
    asm volatile("" : "+r"(ring));  // or the compiler would compute it again for every copy
    BlockIterator blocks(p);
    int write_at = 0;
    const auto load = [&] {
        const Block block = blocks.next(p);
        const u32 to = ring + write_at * STAGE * 4;
        if (block.count == TILE_K) {
            TileA::load<true>(to, p.a, batch, block.segment, tile_m, p.m, block.k, TILE_K);
            TileB::load<true>(to + TileA::SIZE * 4, p.b, batch, block.segment, tile_n, p.n, block.k, TILE_K);
        } else if (block.count > 0) {
            TileA::load<false>(to, p.a, batch, block.segment, tile_m, p.m, block.k, block.count);
            TileB::load<false>(to + TileA::SIZE * 4, p.b, batch, block.segment, tile_n, p.n, block.k,
                               block.count);
        }
        if (threadIdx.x == THREADS - COPIERS) counts[write_at] = block.last ? -block.count : block.count;
        write_at = write_at == STAGES - 1 ? 0 : write_at + 1;
        cp_async_commit();  // empty ones too, so that their number tells which stage is complete
    };

    float acc[THREAD_M][THREAD_N] = {};
    if (p.acc && multiplies) {
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j) {
                const int row = tile_m + own_m + TileA::row(i), col = tile_n + own_n + TileB::row(j);
                if (row < end_m() && col < p.n)
                    acc[i][j] = p.acc[batch * p.acc_batch + row * p.acc_row + col * p.acc_col];
            }
    }

    float a[2][STEP][THREAD_M], b[2][PART][THREAD_N];  // read ahead of their use
    int read_at = 0;
    const float* stage = memory;
    const auto read_a = [&](int to, int k) { TileA::read(a[to], stage, own_m, k); };
    const auto read_b = [&](int to, int k) { TileB::read(b[to], stage + TileA::SIZE, own_n, k); };
    const auto multiply = [&](const float (&ak)[THREAD_M], const float (&bk)[THREAD_N]) {
        // An operand stays for a sweep along the shorter side; sweeps turn round, so that the other one stays
        // then. Register banks bound the rate: of each fused multiply-add, the sum and one operand are read
        // anew.
        constexpr bool ROWS_LAST = THREAD_M <= THREAD_N;
        constexpr int SWEEPS = ROWS_LAST ? THREAD_N : THREAD_M, SWEEP = ROWS_LAST ? THREAD_M : THREAD_N;
#pragma unroll
        for (int s = 0; s < SWEEPS; ++s)
#pragma unroll
            for (int e = 0; e < SWEEP; ++e) {
                const int along = s % 2 ? SWEEP - 1 - e : e, i = ROWS_LAST ? along : s,
                          j = ROWS_LAST ? s : along;
                acc[i][j] = __fmaf_rn(ak[i], bk[j], acc[i][j]);
            }
    };
    const auto next_stage = [&] {  // it is whole, and all warps have read the stage before it
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        stage = memory + read_at * STAGE;
        if (!multiplies) return;
        read_a(0, 0);
        read_b(0, 0);
    };
    bool empty = true;

#pragma unroll 1
    for (int i = 0; i < STAGES - 1 && copies; ++i) load();
    next_stage();
    while (true) {
        const int signed_count = counts[read_at], count = abs(signed_count);
        if (count == 0) break;
        empty = false;
        if (copies) load();
        read_at = read_at == STAGES - 1 ? 0 : read_at + 1;
        if (!multiplies) {
            next_stage();
            continue;
        }
        if (count == TILE_K) {
#pragma unroll UNROLL
            for (int k = 0; k < TILE_K; k += 2 * STEP)
#pragma unroll
                for (int part = 0; part < 2 * PARTS; ++part) {
                    const int half = part / PARTS, next = k + (part + 1) * PART;
                    if (part == 2 * PARTS - 1 && next == TILE_K) {
                        next_stage();
                    } else {
                        if (part % PARTS == PARTS - 1) read_a(1 - half, next);
                        read_b((part + 1) % 2, next);
                    }
#pragma unroll
                    for (int e = 0; e < PART; ++e) multiply(a[half][part % PARTS * PART + e], b[part % 2][e]);
                }
        } else {
#pragma unroll 1
            for (int k = 0; k < count; ++k) {
                float ak[1][THREAD_M], bk[1][THREAD_N];
                TileA::read(ak, stage, own_m, k);
                TileB::read(bk, stage + TileA::SIZE, own_n, k);
                multiply(ak[0], bk[0]);
            }
            next_stage();
        }
        if (p.closing_zero && signed_count < 0)
#pragma unroll
            for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
                for (int j = 0; j < THREAD_N; ++j) acc[i][j] = __fmaf_rn(0.0f, 0.0f, acc[i][j]);
    }

    if (!multiplies) return;
#ifdef GROUPED
    const i64 bias_at = batch * p.bias_group;
#else
    constexpr i64 bias_at = 0;
#endif
    const int out_kind = empty && !p.bias && OUT_KIND == F32 ? F32_AS_IS : OUT_KIND;
    constexpr int TOGETHER = TileB::NEIGHBOURS;
#pragma unroll
    for (int j = 0; j < THREAD_N; j += TOGETHER) {
        const int col = tile_n + own_n + TileB::row(j), columns = min(p.n - col, TOGETHER);
        float bias[TOGETHER] = {};
        if (p.bias)
#pragma unroll
            for (int e = 0; e < TOGETHER; ++e)
                if (e < columns) bias[e] = widen(p.bias, bias_at + (col + e) * p.bias_stride, p.bias_kind);
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i) {
            const int row = tile_m + own_m + TileA::row(i);
            float value[4] = {};
#pragma unroll
            for (int e = 0; e < TOGETHER; ++e)
                value[e] = p.bias ? __fadd_rn(acc[i][j + e], bias[e]) : acc[i][j + e];
            const i64 index = batch * p.out_batch + row * p.out_row + col * p.out_col;
            if (row < end_m())
                store_four(p.out, index, p.out_col, value, columns, out_kind,
                           TOGETHER == 4 && p.out_together);
        }
    }
}

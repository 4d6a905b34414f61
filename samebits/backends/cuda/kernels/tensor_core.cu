// Tensor-core product for every layout, stride, alignment and size, on sm_80 and newer: D = acc + A B + bias.
//
// Every output element is one chain over ascending groups of 16 k with one f32 accumulator, in one thread.
// The tile, the stages and the order of tiles are free, and change no bit.
//
// A block takes one tile of the output; a warp has WARP_M x WARP_N of it in registers (mma.m16n8k16). Shared
// memory is a ring of STAGES stages, each a swizzled tile of a and of b, which all threads fill by cp.async
// STAGES - 1 ahead. After the last step it holds strips of accumulators, in which threads find four
// neighbours of a row to store.
//
// Macros
//   TILE_M, TILE_N, TILE_K    the block's tile, and k of a stage, a multiple of 32
//   WARPS_M, WARPS_N          how warps share the tile
//   STAGES                    stages of the ring
//   MIN_BLOCKS                blocks that shall fit on one multiprocessor
//   INPUT_BF16                1: bf16 operands; 0: f16
//   A_K_MAJOR, B_K_MAJOR      1: the operand's lines run along k; 0: along m (n)
//   A_VECTOR, B_VECTOR        1: 16 bytes along a line are contiguous and aligned; 0: elements are gathered
//                             one by one
//   GROUPED                   OF_ROWS, OF_TERMS: a grouped product (groups.cuh); absent: any other

#include "epilogue.cuh"
#include "groups.cuh"
#include "tile_order.cuh"
#include "tile_sm80.cuh"

constexpr int THREADS = WARPS_M * WARPS_N * 32;
constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
constexpr int GROUPS = TILE_K / 16;

using TileA = Tile<TILE_M, TILE_K, A_K_MAJOR, A_VECTOR, THREADS>;
using TileB = Tile<TILE_N, TILE_K, B_K_MAJOR, B_VECTOR, THREADS>;
constexpr int STAGE_BYTES = TileA::BYTES + TileB::BYTES;
constexpr int LAST_STAGE = (STAGES - 1) * STAGE_BYTES;
constexpr int STRIP = WARP_N + 8;  // floats in a row of the epilogue's strip, padded against bank conflicts
static_assert(WARPS_M * WARPS_N * 16 * STRIP * 4 <= STAGES * STAGE_BYTES);

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
    int out_kind, out_together, bias_kind, spans_wide;
#ifdef GROUPED
    Groups groups;
    i64 bias_group;
#endif
};

// Gives the groups of all segments in order.
struct GroupIterator {
    int segment = 0, k = 0, end = 0;

    __device__ __forceinline__ explicit GroupIterator(const Params& p) { start(p); }

    __device__ __forceinline__ void start(const Params& p) {
        if (segment == p.segments) return;
        k = p.spans ? bound(p, segment) : 0;
        end = p.spans ? bound(p, segment + 1) : p.k;
    }

    __device__ __forceinline__ static int bound(const Params& p, int i) {
        const i64 at =
            p.spans_wide ? static_cast<const i64*>(p.spans)[i] : static_cast<const int*>(p.spans)[i];
        return static_cast<int>(
            min(max(at, 0ll), static_cast<i64>(p.k)));  // wrong bounds may not read elsewhere
    }

    __device__ __forceinline__ static int groups_in(const Params& p, int i) {
        return (max(bound(p, i + 1) - bound(p, i), 0) + 15) / 16;
    }

    __device__ __forceinline__ Group next(const Params& p) {
        while (k >= end && segment < p.segments) {
            ++segment;
            start(p);
        }
        const Group g{p.spans ? 0 : segment, k, min(max(end - k, 0), 16)};
        k += 16;
        return g;
    }

    // Whether the next GROUPS groups are full ones of this segment; then skip() gives the first of them.
    __device__ __forceinline__ bool whole() const { return k + GROUPS * 16 <= end; }

    __device__ __forceinline__ Group skip(const Params& p) {
        const Group g{p.spans ? 0 : segment, k, 16};
        k += GROUPS * 16;
        return g;
    }
};

// Groups in all segments together. Every thread gets the sum.
__device__ __forceinline__ int total_groups(const Params& p, int* shared) {
    if (!p.spans) return (p.k + 15) / 16 * p.segments;
    int sum = 0;
    for (int i = threadIdx.x; i < p.segments; i += THREADS) sum += GroupIterator::groups_in(p, i);
    if (threadIdx.x == 0) *shared = 0;
    __syncthreads();
    atomicAdd(shared, sum);
    __syncthreads();
    sum = *shared;
    __syncthreads();
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    tensor_core(const __grid_constant__ Params given) {
#ifdef GROUPED
    Params p = given;
#else
    const Params& p = given;
#endif
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 stages = shared_address(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const u32 tiles = static_cast<u32>(p.tiles_m) * p.tiles_n;
    u32 batch = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const u32 group = tile / (GROUP_M * p.tiles_n);
    const u32 height = min(p.tiles_m - group * GROUP_M, static_cast<u32>(GROUP_M));
    const u32 in_group = tile % (GROUP_M * p.tiles_n);
    int tile_m = (group * GROUP_M + in_group % height) * TILE_M, tile_n = in_group / height * TILE_N;
#ifdef GROUPED
    int end_row = p.m;  // rows from there on are computed, and not stored
    const auto end_m = [&] { return end_row; };
    if (blockIdx.x == 0) p.groups.check(THREADS);
#if GROUPED == OF_ROWS
    if (!take_rows<TILE_M, TILE_N, THREADS>(p, batch, tile_m, end_row, tile_n, p.out_kind == F32 ? 4 : 2))
        return;
#else
    int bounds[2];
    take_terms(p, batch, bounds);
#endif
#else
    const auto end_m = [&] { return p.m; };
#endif
    const int warp_m = warp % WARPS_M * WARP_M, warp_n = warp / WARPS_M * WARP_N;

    const u16* a = p.a.data + batch * p.a.batch;
    const u16* b = p.b.data + batch * p.b.batch;
    const int steps = (total_groups(p, reinterpret_cast<int*>(memory)) + GROUPS - 1) / GROUPS;
    GroupIterator groups_of_k(p);
    u32 write_at = 0;

    const auto load = [&](int step) {
        if (step < steps) {
            const u32 to = stages + write_at;
            write_at = write_at == LAST_STAGE ? 0 : write_at + STAGE_BYTES;
            Group groups[GROUPS];
            if (A_VECTOR && B_VECTOR && groups_of_k.whole()) {
                groups[0] = groups_of_k.skip(p);
                TileA::load<true>(to, a, p.a, tile_m, p.m, groups);
                TileB::load<true>(to + TileA::BYTES, b, p.b, tile_n, p.n, groups);
            } else {
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) groups[g] = groups_of_k.next(p);
                TileA::load<false>(to, a, p.a, tile_m, p.m, groups);
                TileB::load<false>(to + TileA::BYTES, b, p.b, tile_n, p.n, groups);
            }
        }
        cp_async_commit();  // empty ones too, so that their number tells which stage is complete
    };

    // The warp's accumulators go between registers and global memory sixteen rows at a time, through shared
    // memory: there a thread has four neighbours of a row.
    float c[WARP_M / 16][WARP_N / 8][4] = {};
    float* strip = reinterpret_cast<float*>(memory) + warp * 16 * STRIP;
    float* fragment = strip + lane / 4 * STRIP + lane % 4 * 2;
    constexpr int LANES = WARP_N / 4;  // that share a row
    const int lane_row = lane / LANES, lane_col = lane % LANES * 4;
    const int row0 = tile_m + warp_m + lane_row, col = tile_n + warp_n + lane_col,
              columns = min(p.n - col, 4);

    if (p.acc) {
        const float* acc = p.acc + batch * p.acc_batch + col * p.acc_col;
#pragma unroll
        for (int i = 0; i < WARP_M / 16; ++i) {
#pragma unroll 1
            for (int r = 0; r < 16; r += 32 / LANES)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (row0 + i * 16 + r < end_m() && e < columns)
                        strip[(lane_row + r) * STRIP + lane_col + e] =
                            acc[(row0 + i * 16 + r) * p.acc_row + e * p.acc_col];
            __syncwarp();
#pragma unroll
            for (int j = 0; j < WARP_N / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) c[i][j][e] = fragment[e / 2 * 8 * STRIP + j * 8 + e % 2];
            __syncwarp();
        }
        __syncthreads();  // the stages take this memory
    }

#pragma unroll 1
    for (int step = 0; step < STAGES - 1; ++step) load(step);

    // Fragments are read one group ahead of their products, across stages too. Gathering leaves no registers
    // for that.
    constexpr int AHEAD = A_VECTOR && B_VECTOR;
    u32 fa[1 + AHEAD][WARP_M / 16][4], fb[1 + AHEAD][WARP_N / 16][4];
    const u32 lane_a = TileA::lane_offset<true>(warp_m),
              lane_b = TileA::BYTES + TileB::lane_offset<false>(warp_n);
    u32 read_at = 0;
    const auto read = [&](int g) {
        const u32 from = stages + read_at;
#pragma unroll
        for (int i = 0; i < WARP_M / 16; ++i)
            ldmatrix_x4<!A_K_MAJOR>(fa[g % (1 + AHEAD)][i], from + TileA::at(lane_a, i, g));
#pragma unroll
        for (int j = 0; j < WARP_N / 16; ++j)
            ldmatrix_x4<!B_K_MAJOR>(fb[g % (1 + AHEAD)][j], from + TileB::at(lane_b, j, g));
        if (g == GROUPS - 1) read_at = read_at == LAST_STAGE ? 0 : read_at + STAGE_BYTES;
    };
    const auto next_stage = [&] {  // it is whole, and all warps have read the stage before the one before it
        cp_async_wait<STAGES - 2>();
        __syncthreads();
    };
    static_assert(GROUPS % 2 == 0);  // so that every step begins with the first buffer
    next_stage();
    if (AHEAD) read(0);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            if (g + AHEAD == GROUPS) next_stage();
            if (g == 0 && !AHEAD) load(step + STAGES - 1);  // before fragments take registers
            read((g + AHEAD) % GROUPS);
            if (g == 0 && AHEAD) load(step + STAGES - 1);
#pragma unroll
            for (int i = 0; i < WARP_M / 16; ++i)
#pragma unroll
                for (int j = 0; j < WARP_N / 8; ++j)
                    mma_m16n8k16<INPUT_BF16>(c[i][j], fa[g % (1 + AHEAD)][i],
                                             fb[g % (1 + AHEAD)][j / 2] + j % 2 * 2);
        }
        if (!AHEAD) next_stage();
    }

    cp_async_wait<0>();
    __syncthreads();  // the strips take the stages' memory
#ifdef GROUPED
    const i64 bias_at = batch * p.bias_group;
#else
    constexpr i64 bias_at = 0;
#endif
    const int out_kind = steps == 0 && !p.bias && p.out_kind == F32 ? F32_AS_IS : p.out_kind;
    float bias[4] = {};
    if (p.bias)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (e < columns) bias[e] = widen(p.bias, bias_at + (col + e) * p.bias_stride, p.bias_kind);
#pragma unroll
    for (int i = 0; i < WARP_M / 16; ++i) {
#pragma unroll
        for (int j = 0; j < WARP_N / 8; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2*>(fragment + half * 8 * STRIP + j * 8) =
                    make_float2(c[i][j][half * 2], c[i][j][half * 2 + 1]);
        __syncwarp();
#pragma unroll 1
        for (int r = 0; r < 16; r += 32 / LANES) {
            const int row = row0 + i * 16 + r;
            if (row >= end_m()) break;
            const float4 x = *reinterpret_cast<const float4*>(strip + (lane_row + r) * STRIP + lane_col);
            float value[4] = {x.x, x.y, x.z, x.w};
            if (p.bias)
#pragma unroll
                for (int e = 0; e < 4; ++e) value[e] = __fadd_rn(value[e], bias[e]);
            const i64 index = batch * p.out_batch + row * p.out_row + col * p.out_col;
            store_four(p.out, index, p.out_col, value, columns, out_kind, p.out_together);
        }
        __syncwarp();
    }
}

// The product under FMA: every layout, stride, alignment and size, f32 and widened 16-bit operands, on sm_75 and newer.
//
// Every output element is one chain of IEEE fused multiply-adds over ascending k, in one thread. Nothing else is ever
// added to it, not even zeros: fma(0, 0, -0) is +0. So tiles reach past the last row and column, but never past k.

#include "epilogue.cuh"
#include "tile_fma.cuh"

constexpr int BAND = 8;  // rows of tiles walked together, so that their operands stay in L2

using TileA = Tile<WARPS_M, LANES_M, THREAD_M, A_KIND, A_COPY>;
using TileB = Tile<WARPS_N, 32 / LANES_M, THREAD_N, B_KIND, B_COPY>;
constexpr int STAGE = TileA::SIZE + TileB::SIZE;  // floats
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
    int closing, out_together, bias_kind, spans_wide;  // closing: a zero term ends every nonempty segment
};

// Up to TILE_K consecutive k of one segment.
struct Block {
    int segment, k, count;
    bool last;  // of its segment
};

#if SEGMENTED
// Walks the blocks of all segments in order; one of no terms follows the last.
class Walk {
    int segment = 0, k = 0, end = 0;

    __device__ __forceinline__ static int bound(const Params& p, int i)
    {
        const i64 at = p.spans_wide ? static_cast<const i64*>(p.spans)[i] : static_cast<const int*>(p.spans)[i];
        return static_cast<int>(min(max(at, 0ll), static_cast<i64>(p.k)));  // wrong bounds may not read elsewhere
    }

    __device__ __forceinline__ void start(const Params& p)
    {
        if (segment == p.segments) return;
        k = p.spans ? bound(p, segment) : 0;
        end = p.spans ? bound(p, segment + 1) : p.k;
    }

  public:
    __device__ __forceinline__ explicit Walk(const Params& p) { start(p); }

    __device__ __forceinline__ Block next(const Params& p)
    {
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
class Walk {
    int k = 0;

  public:
    __device__ __forceinline__ explicit Walk(const Params&) {}

    __device__ __forceinline__ Block next(const Params& p)
    {
        const Block b{0, k, min(max(p.k - k, 0), TILE_K), p.k - k <= TILE_K};
        k += TILE_K;
        return b;
    }
};
#endif

// Older GPUs have no shared memory for many blocks, and their code wants some more registers.
constexpr int RESIDENT = __CUDA_ARCH__ < 900 ? 1 : MIN_BLOCKS;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) matmul_fma(const __grid_constant__ Params p)
{
    extern __shared__ __align__(16) float memory[];
    __shared__ int counts[STAGES];  // terms of each block in the ring; negative if it is its segment's last
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const u32 tiles = static_cast<u32>(p.tiles_m) * p.tiles_n;
    const u32 batch = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const u32 band = tile / (BAND * p.tiles_n), band_rows = min(p.tiles_m - band * BAND, static_cast<u32>(BAND));
    const u32 in_band = tile % (BAND * p.tiles_n);
    const int tile_m = (band * BAND + in_band % band_rows) * TileA::ROWS, tile_n = in_band / band_rows * TileB::ROWS;

    const int lane_m = lane % LANES_M, lane_n = lane / LANES_M;
    const int own_m = TileA::own(warp % WARPS_M, lane_m), own_n = TileB::own(warp / WARPS_M, lane_n);
    const bool copies_only = HELPERS > 0 && warp >= WARPS;

    Walk walk(p);
    int write_at = 0;
    const auto load = [&] {
        const Block block = walk.next(p);
        float* to = memory + write_at * STAGE;
        if (block.count == TILE_K) {
            TileA::load<true>(to, p.a, batch, block.segment, tile_m, p.m, block.k, TILE_K);
            TileB::load<true>(to + TileA::SIZE, p.b, batch, block.segment, tile_n, p.n, block.k, TILE_K);
        } else if (block.count > 0) {
            TileA::load<false>(to, p.a, batch, block.segment, tile_m, p.m, block.k, block.count);
            TileB::load<false>(to + TileA::SIZE, p.b, batch, block.segment, tile_n, p.n, block.k, block.count);
        }
        if (threadIdx.x == 0) counts[write_at] = block.last ? -block.count : block.count;
        write_at = write_at == STAGES - 1 ? 0 : write_at + 1;
        commit_copies();  // empty ones too, so that their number tells which stage is complete
    };

    float acc[THREAD_M][THREAD_N] = {};
    if (p.acc && !copies_only) {
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j) {
                const int row = tile_m + own_m + TileA::row(i), col = tile_n + own_n + TileB::row(j);
                if (row < p.m && col < p.n)
                    acc[i][j] = p.acc[batch * p.acc_batch + row * p.acc_row + col * p.acc_col];
            }
    }

    float a[2][STEP][THREAD_M], b[2][STEP][THREAD_N];  // this thread's rows of STEP k, read ahead of their use
    int read_at = 0;
    const float* stage = memory;
    const auto read = [&](int k, int share) {
        TileA::template read<STEP>(a[k / STEP % 2], stage, own_m, k, share);
        TileB::template read<STEP>(b[k / STEP % 2], stage + TileA::SIZE, own_n, k, share);
    };
    const auto multiply = [&](const float (&ak)[THREAD_M], const float (&bk)[THREAD_N]) {
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
            for (int e = 0; e < THREAD_N; ++e) {
                const int j = i % 2 ? THREAD_N - 1 - e : e;  // two neighbours share an operand: fewer register reads
                acc[i][j] = __fmaf_rn(ak[i], bk[j], acc[i][j]);
            }
    };
    const auto next_stage = [&] {  // it is whole, and all warps have read the stage before it
        wait_copies<STAGES - 2>();
        __syncthreads();
        stage = memory + read_at * STAGE;
        if (copies_only) return;
#pragma unroll
        for (int share = 0; share < STEP; ++share) read(0, share);
    };
    bool empty = true;

#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) load();
    next_stage();
    while (true) {
        const int signed_count = counts[read_at], count = abs(signed_count);
        if (count == 0) break;
        empty = false;
        load();
        read_at = read_at == STAGES - 1 ? 0 : read_at + 1;
        if (copies_only) {
            next_stage();
            continue;
        }
        if (count == TILE_K) {
#pragma unroll
            for (int k = 0; k < TILE_K; ++k) {
                // Reads are spread over the arithmetic, which would wait for a crowd of them.
                const int next = k / STEP * STEP + STEP;
                if (next < TILE_K)
                    read(next, k % STEP);
                else if (k % STEP == 0)
                    next_stage();
                multiply(a[k / STEP % 2][k % STEP], b[k / STEP % 2][k % STEP]);
            }
        } else {
#pragma unroll 1
            for (int k = 0; k < count; ++k) {
                float ak[1][THREAD_M], bk[1][THREAD_N];
                TileA::template read<1>(ak, stage, own_m, k, 0);
                TileB::template read<1>(bk, stage + TileA::SIZE, own_n, k, 0);
                multiply(ak[0], bk[0]);
            }
            next_stage();
        }
        if (p.closing && signed_count < 0)
#pragma unroll
            for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
                for (int j = 0; j < THREAD_N; ++j) acc[i][j] = __fmaf_rn(0.0f, 0.0f, acc[i][j]);
    }

    if (copies_only) return;
    const int out_kind = empty && !p.bias && OUT_KIND == F32 ? F32_AS_IS : OUT_KIND;
    constexpr int TOGETHER = TileB::NEIGHBOURS;
#pragma unroll
    for (int j = 0; j < THREAD_N; j += TOGETHER) {
        const int col = tile_n + own_n + TileB::row(j), columns = min(p.n - col, TOGETHER);
        float bias[TOGETHER] = {};
        if (p.bias)
#pragma unroll
            for (int e = 0; e < TOGETHER; ++e)
                if (e < columns) bias[e] = widen(p.bias, (col + e) * p.bias_stride, p.bias_kind);
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i) {
            const int row = tile_m + own_m + TileA::row(i);
            float value[4] = {};
#pragma unroll
            for (int e = 0; e < TOGETHER; ++e)
                value[e] = p.bias ? __fadd_rn(acc[i][j + e], bias[e]) : acc[i][j + e];
            const i64 index = batch * p.out_batch + row * p.out_row + col * p.out_col;
            if (row < p.m) store_four(p.out, index, p.out_col, value, columns, out_kind, TOGETHER == 4 && p.out_together);
        }
    }
}

// The product under FMA on Hopper for few rows: f32 operands that TMA can read, and f32 out.
//
// Every output element is one chain of IEEE fused multiply-adds over ascending k, in one thread. Nothing else is ever
// added to it, not even zeros: fma(0, 0, -0) is +0. TMA fills what lies past the last row, column and k with zeros;
// tiles reach past the first two, and what is computed there is never stored, but never past k.
//
// What counts here is that no term of a chain waits: a thread has few sums, and reads quads (four k) ahead of their use,
// past the end of a stage too. Stages keep the order that operands have in memory. Of one that is contiguous
// along k a thread reads a quad at a time.

#include "product_fma_sm90.cuh"

constexpr int LINE_K = 32;  // k in a swizzled line
constexpr int STAGE_K = LINES * LINE_K, QUADS = LINE_K / 4;
constexpr int WARPS = WARPS_M * WARPS_N, THREADS = (WARPS + 1) * 32;  // the last warp has TMA copy
constexpr int AHEAD = DEPTH - 1;  // quads that are read ahead of their use
static_assert(QUADS % DEPTH == 0 && DEPTH >= 2);

// LINE_K of k for the rows that WARPS_ x LANES threads take, THREAD each. BY_K: contiguous along k in memory.
template <int WARPS_, int LANES, int THREAD, bool BY_K>
struct Tile {
    static constexpr int ROWS = WARPS_ * LANES * THREAD;
    static constexpr int PITCH = (ROWS + 3) / 4 * 4;  // unless BY_K; TMA copies sixteen bytes at least
    static constexpr u32 COPIED = (BY_K ? ROWS : PITCH) * LINE_K * 4;
    static constexpr u32 BYTES = (COPIED + 1023) / 1024 * 1024;  // the swizzle's period
    static_assert(ROWS <= 256 && (LANES & (LANES - 1)) == 0 && (THREAD & (THREAD - 1)) == 0);
    static_assert(BY_K || ROWS % 4 != 3);  // else a line might be a row short, see before()

    // The first row of a thread; its row i is i * LANES after that.
    __device__ static __forceinline__ int own(int warp, int lane) { return warp * LANES * THREAD + lane; }

    // Lines are copied from a multiple of four rows on: how many come before the tile's first.
    __device__ static __forceinline__ int before(int first) { return BY_K || ROWS % 4 == 0 ? 0 : first % 4; }

    // Where a thread finds its first row's quads, in bytes from the tile's beginning.
    struct From {
        u32 at[BY_K ? QUADS : 1];

        __device__ __forceinline__ From(u32 tile, int own)
        {
            if constexpr (BY_K)
#pragma unroll
                for (int quad = 0; quad < QUADS; ++quad) at[quad] = tile + own * 128 + (quad ^ own % 8) * 16;
            else
                at[0] = tile + own * 4;
        }

        __device__ __forceinline__ void step(u32 bytes)
        {
#pragma unroll
            for (u32& x : at) x += bytes;
        }
    };

    // A quad of a line so many bytes further on.
    __device__ static __forceinline__ void read(float (&f)[THREAD][4], const From& from, int quad, u32 line)
    {
#pragma unroll
        for (int i = 0; i < THREAD; ++i) {
            if constexpr (BY_K) {
                // own and i * LANES have no bit in common, so that the swizzle of their sum is that of both.
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(f[i][0]), "=f"(f[i][1]), "=f"(f[i][2]), "=f"(f[i][3])
                             : "r"(from.at[quad ^ i * LANES % 8] + line + i * LANES * 128));
            } else {
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    asm volatile("ld.shared.f32 %0, [%1];"
                                 : "=f"(f[i][k])
                                 : "r"(from.at[0] + line + ((quad * 4 + k) * PITCH + i * LANES) * 4));
            }
        }
    }

    __device__ static __forceinline__ float read_one(u32 tile, int own, int i, int k)
    {
        const int row = own + i * LANES;
        return load_shared(tile + (BY_K ? row * 128 + (k / 4 ^ row % 8) * 16 + k % 4 * 4 : (k * PITCH + row) * 4));
    }

    __device__ static __forceinline__ void copy(u32 to, const TensorMap& map, u32 barrier, int row, int k, int batch)
    {
        copy_in(to, map, barrier, BY_K ? k : row - before(row), BY_K ? row : k, 0, batch);
    }
};

using TileA = Tile<WARPS_M, LANES_M, THREAD_M, A_BY_K>;
using TileB = Tile<WARPS_N, 32 / LANES_M, THREAD_N, B_BY_K>;
constexpr u32 LINE = TileA::BYTES + TileB::BYTES, STAGE = LINES * LINE;
static_assert(STAGES >= 2 && SMEM >= STAGES * (STAGE + 16) + 1024);  // the next one is read before this is left

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) fma_few_sm90(const __grid_constant__ Params p)
{
    extern __shared__ unsigned char memory[];
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const u32 stages = (shared_address(memory) + 1023) & ~1023u, full = stages + STAGES * STAGE, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        prefetch_map(p.a);
        prefetch_map(p.b);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, WARPS * WARP_ARRIVALS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();

    const TileOf tile(p, blockIdx.x);
    const int batch = tile.batch, m = tile.m * TileA::ROWS, n = tile.n * TileB::ROWS;

    if (warp == WARPS) {
        if (lane != 0) return;
        const int batch_a = p.a_batch ? batch : 0, batch_b = p.b_batch ? batch : 0;
        u32 place = 0, parity = 1;
#pragma unroll 1
        for (int k = 0; k < p.k; k += STAGE_K) {
            const u32 barrier = full + place * 8, stage = stages + place * STAGE;
            const int lines = min(LINES, (p.k - k + LINE_K - 1) / LINE_K);
            barrier_wait(empty + place * 8, parity);
            barrier_expect(barrier, lines * (TileA::COPIED + TileB::COPIED));
#pragma unroll
            for (int i = 0; i < LINES; ++i) {
                if (i >= lines) break;
                TileB::copy(stage + i * LINE + TileA::BYTES, p.b, barrier, n, k + i * LINE_K, batch_b);
                TileA::copy(stage + i * LINE, p.a, barrier, m, k + i * LINE_K, batch_a);
            }
            if (++place == STAGES) place = 0, parity ^= 1;
        }
        return;
    }

    // Neighbours share a row of a, and lanes two apart a row of b: then 16 lanes read 16 bytes each at once, not 8.
    const int own_m = TileA::own(warp % WARPS_M, lane / 2 % LANES_M);
    const int own_n = TileB::own(warp / WARPS_M, lane / (2 * LANES_M) * 2 + lane % 2);
    const int row = m + own_m, col = n + own_n;
    constexpr int STEP_M = LANES_M, STEP_N = 32 / LANES_M;

    float acc[THREAD_M][THREAD_N] = {};
    if (p.acc) {
        const float* from = p.acc + batch * p.acc_batch + row * p.acc_row + col * p.acc_col;
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j)
                if (row + i * STEP_M < p.m && col + j * STEP_N < p.n)
                    acc[i][j] = from[i * STEP_M * p.acc_row + j * STEP_N * p.acc_col];
    }

    float a[DEPTH][THREAD_M][4], b[DEPTH][THREAD_N][4];
    const int at_m = own_m + TileA::before(m), at_n = own_n + TileB::before(n);
    typename TileA::From from_a(stages, at_m);
    typename TileB::From from_b(stages + TileA::BYTES, at_n);
    const auto read = [&](int to, int quad, u32 line) {
        TileA::read(a[to], from_a, quad, line);
        TileB::read(b[to], from_b, quad, line);
    };
    const auto multiply = [&](int quad) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j)
#pragma unroll
                for (int e = 0; e < THREAD_M; ++e) {
                    const int i = j % 2 ? THREAD_M - 1 - e : e;
                    acc[i][j] = __fmaf_rn(a[quad][i][k], b[quad][j][k], acc[i][j]);
                }
    };

    u32 place = 0, parity = 0;
    barrier_wait(full, 0);
    const int whole = p.k / STAGE_K;
    if (whole > 0)
#pragma unroll
        for (int quad = 0; quad < AHEAD; ++quad) read(quad, quad, 0);
#pragma unroll 1
    for (int i = 0; i < whole; ++i) {
        const u32 next = place == STAGES - 1 ? 0 : place + 1, next_parity = parity ^ (next == 0);
        const bool waits = (i + 1) * STAGE_K < p.k;
        bool ready = true;
#pragma unroll
        for (int quad = 0; quad < LINES * QUADS; ++quad) {
            constexpr int LAST = LINES * QUADS - AHEAD;  // from here on the next stage is read
            if (quad == LAST - 1 && waits) ready = barrier_test(full + next * 8, next_parity);
            if (quad == LAST) {
                if (!ready) barrier_wait(full + next * 8, next_parity);
                const u32 step = next == 0 ? -(STAGES - 1) * STAGE : STAGE;
                from_a.step(step);
                from_b.step(step);
            }
            // What is read of a stage that is not whole, or past the last one, is never used.
            const int reads = (quad + AHEAD) % (LINES * QUADS);
            read((quad + AHEAD) % DEPTH, reads % QUADS, reads / QUADS * LINE);
            multiply(quad % DEPTH);
        }
        warp_arrive(empty + place * 8);
        place = next, parity = next_parity;
    }
    // The last stage, if it is not whole; the loop has waited for it.
    const u32 stage = stages + place * STAGE;
#pragma unroll 1
    for (int k = 0; k < p.k - whole * STAGE_K; ++k) {
        const u32 line = stage + k / LINE_K * LINE;
        float ak[THREAD_M], bk[THREAD_N];
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i) ak[i] = TileA::read_one(line, at_m, i, k % LINE_K);
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) bk[j] = TileB::read_one(line + TileA::BYTES, at_n, j, k % LINE_K);
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j) acc[i][j] = __fmaf_rn(ak[i], bk[j], acc[i][j]);
    }
    if (p.closing_zero)
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j) acc[i][j] = __fmaf_rn(0.0f, 0.0f, acc[i][j]);

    // A fused multiply-add and a sum give the canonical NaN.
    float* to = p.out + batch * p.out_batch + row * p.out_row + col * p.out_col;
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
        if (col + j * STEP_N >= p.n) break;
        const float bias = p.bias ? bias_at(p, col + j * STEP_N) : 0.0f;
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i)
            if (row + i * STEP_M < p.m)
                to[i * STEP_M * p.out_row + j * STEP_N * p.out_col] = p.bias ? __fadd_rn(acc[i][j], bias) : acc[i][j];
    }
}

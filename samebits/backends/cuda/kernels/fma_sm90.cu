// The product under FMA on Hopper: f32 operands that TMA can read, and f32 out.
//
// Every output element is one chain of IEEE fused multiply-adds over ascending k, in one thread. Nothing else is ever
// added to it, not even zeros: fma(0, 0, -0) is +0. TMA fills what lies past the last row, column and k with zeros;
// tiles reach past the first two, and what is computed there is never stored, but never past k.
//
// In a stage of shared memory a line is one k and runs along the rows (m or n). Operands that lie so in memory are
// copied there by TMA; of one that is contiguous along k TMA brings raw tiles, which are turned. Threads would have to
// read such a tile four k at a time: then all that a sweep takes of one k lies in one register bank, that of half the
// sums too, and those multiply-adds take two cycles.
//
// FEEDERS: so many more warps fill the ring of stages in turns, and the others only multiply. Where they need all
// registers for that, there are none and they do both: one thread has TMA copy, and all turn what it brings, a block of
// k ahead.

#include "product_fma_sm90.cuh"

constexpr int TILE_K = 32;
constexpr int WARPS = WARPS_M * WARPS_N, THREADS = (WARPS + FEEDERS) * 32;
constexpr int AHEAD = DEPTH - 1;  // terms that are read ahead of their use
// A barrier can be waited for only one round ahead.
static_assert(FEEDERS ? RAW_STAGES % FEEDERS == 0 && FEEDERS <= STAGES : !(A_TURNED || B_TURNED) || RAW_STAGES >= STAGES - 1);
static_assert(AHEAD + 4 <= UNROLL && UNROLL % DEPTH == 0 && UNROLL % 4 == 0 && TILE_K % UNROLL == 0);

// TILE_K of k for the rows that WARPS_ x LANES threads take, THREAD each. TURNED: contiguous along k in memory.
template <int WARPS_, int LANES, int THREAD, bool TURNED_>
struct Tile {
    static constexpr bool TURNED = TURNED_;
    static constexpr int ROWS = WARPS_ * LANES * THREAD;
    static constexpr int NEIGHBOURS = THREAD % 4 == 0 ? 4 : THREAD;  // rows side by side in a thread
    static constexpr u32 RAW_BYTES = TURNED ? ROWS * TILE_K * 4 : 0;  // a row is one swizzled line of 128 bytes
    static_assert(ROWS % 16 == 0 && ROWS <= 256 && (THREAD % 4 == 0 || THREAD <= 2));

    // Bytes from the first line to that of k. Where lines are turned, each four lie eight banks further.
    __device__ static constexpr u32 line(int k) { return (k * ROWS + (TURNED ? k / 4 * 8 : 0)) * 4; }
    static constexpr u32 BYTES = (TILE_K * ROWS + (TURNED ? TILE_K * 2 : 0)) * 4;

    // The first row of a thread, and how far its row i is from that.
    __device__ static __forceinline__ int own(int warp, int lane) { return warp * LANES * THREAD + lane * NEIGHBOURS; }
    __device__ static constexpr int row(int i) { return i / NEIGHBOURS * LANES * NEIGHBOURS + i % NEIGHBOURS; }

    // The thread's rows at one k, whose line is so many bytes after `at`.
    __device__ static __forceinline__ void read(float (&f)[THREAD], u32 at, u32 line)
    {
#pragma unroll
        for (int i = 0; i < THREAD; i += NEIGHBOURS) {
            const u32 from = at + line + row(i) * 4;
            if constexpr (NEIGHBOURS == 4)
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(f[i]), "=f"(f[i + 1]), "=f"(f[i + 2]), "=f"(f[i + 3])
                             : "r"(from));
            else if constexpr (NEIGHBOURS == 2)
                asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(f[i]), "=f"(f[i + 1]) : "r"(from));
            else
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(f[i]) : "r"(from));
        }
    }

    // Raw rows to lines. A warp takes sixteen rows at a time: a lane has four of them, and four k. Of eight
    // neighbouring lanes four differ in k and two in rows: no two of them meet in a bank, reading or writing.
    __device__ static __forceinline__ void turn(u32 raw, u32 lines, int warp)
    {
        const int lane = threadIdx.x % 32, chunk = lane % 4 + lane / 8 % 2 * 4, quad = lane / 4 % 2 + lane / 16 * 2;
        const u32 from = raw + quad * 512 + (chunk ^ quad % 2 * 4) * 16;
        const u32 to = lines + line(4) * chunk + quad * 16;
#pragma unroll(FEEDERS ? 2 : 1)  // feeders have registers to spare
        for (int rows = warp * 16; rows < ROWS; rows += FEEDERS ? 16 : WARPS * 16) {
            float x[4][4];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(x[e][0]), "=f"(x[e][1]), "=f"(x[e][2]), "=f"(x[e][3])
                             : "r"((from ^ e * 16) + (rows + e) * 128)  // the swizzle: row % 8 is XORed to the chunk
                             : "memory");
#pragma unroll
            for (int k = 0; k < 4; ++k)
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + line(k) + rows * 4), "f"(x[0][k]),
                             "f"(x[1][k]), "f"(x[2][k]), "f"(x[3][k])
                             : "memory");
        }
    }

    // What TMA copies, by one thread: a raw tile, or lines.
    __device__ static __forceinline__ void copy(u32 to, const TensorMap& map, u32 barrier, int row, int k, int batch)
    {
        copy_in(to, map, barrier, TURNED ? k : row, TURNED ? row : k, 0, batch);
    }
};

using TileA = Tile<WARPS_M, LANES_M, THREAD_M, A_TURNED>;
using TileB = Tile<WARPS_N, 32 / LANES_M, THREAD_N, B_TURNED>;
constexpr u32 STAGE = TileA::BYTES + TileB::BYTES, RAW = TileA::RAW_BYTES + TileB::RAW_BYTES;
constexpr bool TURNS = A_TURNED || B_TURNED, COPIES = !A_TURNED || !B_TURNED;  // what is done for a stage
static_assert(SMEM >= RAW_STAGES * RAW + STAGES * STAGE + (2 * STAGES + RAW_STAGES) * 8 + 16 + 1024);

// Where block i is in a ring: at which place, and in which of its rounds.
template <int SIZE>
__device__ __forceinline__ u32 place_of(u32 block)
{
    return block % SIZE;
}

template <int SIZE>
__device__ __forceinline__ u32 parity_of(u32 block)
{
    return block / SIZE % 2;
}

struct Shared {
    u32 raw, stages, place, full, empty, raw_full;

    // The swizzle repeats every 1024 bytes, from address 0 on.
    __device__ explicit Shared(u32 start)
        : raw(start), stages(raw + RAW_STAGES * RAW), place(stages + STAGES * STAGE), full(place + 16),
          empty(full + STAGES * 8), raw_full(empty + STAGES * 8)
    {
    }
};

// Which part of the output is a block's, and within that a thread's. Computed anew where it is needed: it would take
// registers from the inner loop.
struct Place {
    int m, n, batch, own_m, own_n;

    __device__ __forceinline__ explicit Place(const Params& p)
    {
        u32 thread, block;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
        const TileOf tile(p, block);
        batch = tile.batch, m = tile.m * TileA::ROWS, n = tile.n * TileB::ROWS;
        // Neighbours share a row of a, and lanes two apart a row of b: then 16 lanes read 16 bytes each at once, not 8.
        const int warp = thread / 32, lane = thread % 32;
        own_m = TileA::own(warp % WARPS_M, lane / 2 % LANES_M);
        own_n = TileB::own(warp / WARPS_M, lane / (2 * LANES_M) * 2 + lane % 2);
    }
};

// Fills a stage with a block of k; by a feeding warp, or by all warps together.
struct Feeder {
    const Params& p;
    const Shared& shared;
    int warp;    // of those that fill it
    bool first;  // of its threads, which has TMA copy

    __device__ __forceinline__ int blocks() const { return (p.k + TILE_K - 1) / TILE_K; }

    // Where it copies from, noted in shared memory: m, n, and the matrices of a and b.
    __device__ __forceinline__ void note() const
    {
        const Place at(p);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared.place), "r"(at.m), "r"(at.n),
                     "r"(p.a_batch ? at.batch : 0), "r"(p.b_batch ? at.batch : 0)
                     : "memory");
    }

    template <bool RAW_TILES>
    __device__ __forceinline__ void copy(int block, u32 to_a, u32 to_b, u32 full) const
    {
        constexpr bool A = A_TURNED == RAW_TILES, B = B_TURNED == RAW_TILES;
        int m, n, batch_a, batch_b;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m), "=r"(n), "=r"(batch_a), "=r"(batch_b)
                     : "r"(shared.place));
        barrier_expect(full, (A ? TileA::ROWS * TILE_K * 4 : 0) + (B ? TileB::ROWS * TILE_K * 4 : 0));
        if (A) TileA::copy(to_a, p.a, full, m, block * TILE_K, batch_a);
        if (B) TileB::copy(to_b, p.b, full, n, block * TILE_K, batch_b);
    }

    // Refills the place of raw tiles from which block - RAW_STAGES has been turned.
    __device__ __forceinline__ void copy_raw(int block) const
    {
        if (!TURNS || !first || block >= blocks()) return;
        const u32 place = place_of<RAW_STAGES>(block), raw = shared.raw + place * RAW;
        copy<true>(block, raw, raw + TileA::RAW_BYTES, shared.raw_full + place * 8);
    }

    __device__ __forceinline__ void feed(int block) const
    {
        if (block >= blocks()) return;
        const u32 full = shared.full + place_of<STAGES>(block) * 8;
        const u32 stage = shared.stages + place_of<STAGES>(block) * STAGE;
        barrier_wait(shared.empty + place_of<STAGES>(block) * 8, parity_of<STAGES>(block) ^ 1);
        if (COPIES && first) copy<false>(block, stage, stage + TileA::BYTES, full);
        if constexpr (TURNS) {
            const u32 raw = shared.raw + place_of<RAW_STAGES>(block) * RAW;
            barrier_wait(shared.raw_full + place_of<RAW_STAGES>(block) * 8, parity_of<RAW_STAGES>(block));
            if (A_TURNED) TileA::turn(raw, stage, warp);
            if (B_TURNED) TileB::turn(raw + TileA::RAW_BYTES, stage + TileA::BYTES, warp);
            async_proxy_fence();  // what has been read of the raw tile, TMA may overwrite
            warp_arrive(full);
        }
    }
};

__device__ __forceinline__ void multiply_all(const Params& p, const Shared& shared, const Feeder& feeder)
{
    float acc[THREAD_M][THREAD_N] = {};
    if (p.acc) {
        const Place place(p);
        const int row = place.m + place.own_m, col = place.n + place.own_n;
        const float* from = p.acc + place.batch * p.acc_batch + row * p.acc_row + col * p.acc_col;
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j)
                if (row + TileA::row(i) < p.m && col + TileB::row(j) < p.n)
                    acc[i][j] = from[TileA::row(i) * p.acc_row + TileB::row(j) * p.acc_col];
    }

    float a[DEPTH][THREAD_M], b[DEPTH][THREAD_N];
    const auto multiply = [&](const float (&ak)[THREAD_M], const float (&bk)[THREAD_N]) {
        // An operand stays for a sweep along the rows, or a short side; sweeps turn round, so that the other one stays
        // then. Register banks bound the rate: of each fused multiply-add, the sum and one operand are read anew.
        constexpr bool ROWS = THREAD_M <= THREAD_N || THREAD_N >= 8;
        constexpr int SWEEPS = ROWS ? THREAD_N : THREAD_M, SWEEP = ROWS ? THREAD_M : THREAD_N;
#pragma unroll
        for (int s = 0; s < SWEEPS; ++s)
#pragma unroll
            for (int e = 0; e < SWEEP; ++e) {
                const int along = s % 2 ? SWEEP - 1 - e : e, i = ROWS ? along : s, j = ROWS ? s : along;
                acc[i][j] = __fmaf_rn(ak[i], bk[j], acc[i][j]);
            }
    };

    u32 at_a, at_b;  // what is read next
    {
        const Place place(p);
        at_a = shared.stages + place.own_m * 4, at_b = shared.stages + TileA::BYTES + place.own_n * 4;
    }
    if constexpr (FEEDERS == 0) {
        for (int i = 0; i < RAW_STAGES; ++i) feeder.copy_raw(i);
        for (int i = 0; i < STAGES - 1; ++i) feeder.feed(i);
    }
    barrier_wait(shared.full, 0);
    if constexpr (FEEDERS == 0) feeder.copy_raw(RAW_STAGES);
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) TileA::read(a[k], at_a, TileA::line(k)), TileB::read(b[k], at_b, TileB::line(k));

    // Turns of UNROLL terms, some to a stage. What is read ahead past the last stage is never used.
    constexpr int PER_STAGE = TILE_K / UNROLL;
#pragma unroll 1
    for (int turn = 0; turn < p.k / TILE_K * PER_STAGE; ++turn) {
        const int block = turn / PER_STAGE;
        const bool leaves = turn % PER_STAGE == PER_STAGE - 1;  // the stage
        const bool waits = leaves && (block + 1) * TILE_K < p.k;
        const u32 full = shared.full + place_of<STAGES>(block + 1) * 8, parity = parity_of<STAGES>(block + 1);
        bool ready = !waits;
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            // In the middle of a stage, so that all warps will have left the one before it.
            if (FEEDERS == 0 && k == (PER_STAGE == 1 ? UNROLL / 2 : 0) && turn % PER_STAGE == PER_STAGE / 2)
                feeder.feed(block + STAGES - 1);
            if (k == (FEEDERS ? 0 : UNROLL - AHEAD - 4) && waits) ready = barrier_test(full, parity);
            if (k == UNROLL - AHEAD) {
                if (!ready) barrier_wait(full, parity);
                if (FEEDERS == 0 && waits) feeder.copy_raw(block + 1 + RAW_STAGES);
                at_a += TileA::line(UNROLL), at_b += TileB::line(UNROLL);
                if (leaves) {
                    const u32 step = place_of<STAGES>(block) == STAGES - 1 ? -(STAGES - 1) * STAGE : STAGE;
                    at_a += step - TileA::BYTES, at_b += step - TileB::BYTES;
                }
            }
            const int to = (k + AHEAD) % DEPTH, line = (k + AHEAD) % UNROLL;
            TileA::read(a[to], at_a, TileA::line(line));
            TileB::read(b[to], at_b, TileB::line(line));
            multiply(a[k % DEPTH], b[k % DEPTH]);
        }
        if (leaves) warp_arrive(shared.empty + place_of<STAGES>(block) * 8);
    }
    // The last stage, if it is not whole; its first terms have been read.
#pragma unroll 1
    for (int k = 0; k < p.k % TILE_K; ++k) {
        TileA::read(a[0], at_a, k * TileA::ROWS * 4 + (A_TURNED ? k / 4 * 32 : 0));
        TileB::read(b[0], at_b, k * TileB::ROWS * 4 + (B_TURNED ? k / 4 * 32 : 0));
        multiply(a[0], b[0]);
    }
    if (p.closing_zero)
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j) acc[i][j] = __fmaf_rn(0.0f, 0.0f, acc[i][j]);

    // A fused multiply-add and a sum give the canonical NaN.
    constexpr int TOGETHER = TileB::NEIGHBOURS;
    const Place place(p);
    const int row = place.m + place.own_m, col = place.n + place.own_n;
    float* to = p.out + place.batch * p.out_batch + row * p.out_row + col * p.out_col;
#pragma unroll
    for (int j = 0; j < THREAD_N; j += TOGETHER) {
        const int columns = p.n - col - TileB::row(j);
        if (p.bias)
#pragma unroll
            for (int e = 0; e < TOGETHER; ++e) {
                const float bias = e < columns ? bias_at(p, col + TileB::row(j) + e) : 0.0f;
#pragma unroll
                for (int i = 0; i < THREAD_M; ++i) acc[i][j + e] = __fadd_rn(acc[i][j + e], bias);
            }
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i) {
            if (row + TileA::row(i) >= p.m) continue;
            float* place = to + TileA::row(i) * p.out_row + TileB::row(j) * p.out_col;
            if (TOGETHER == 4 && p.out_together && columns >= 4) {
                *reinterpret_cast<float4*>(place) =
                    make_float4(acc[i][j], acc[i][j + 1 % TOGETHER], acc[i][j + 2 % TOGETHER], acc[i][j + 3 % TOGETHER]);
                continue;
            }
#pragma unroll
            for (int e = 0; e < TOGETHER; ++e)
                if (e < columns) place[e * p.out_col] = acc[i][j + e];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) fma_sm90(const __grid_constant__ Params p)
{
    extern __shared__ unsigned char memory[];
    // Read from one lane, so that the compiler knows it to be uniform in a warp.
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    u32 start = (shared_address(memory) + 1023) & ~1023u;
    asm volatile("" : "+r"(start));  // or the compiler would compute it again wherever it is used
    const Shared shared(start);
    const Feeder feeder{p, shared, FEEDERS ? 0 : warp, FEEDERS ? threadIdx.x % 32 == 0 : threadIdx.x == 0};
    if (threadIdx.x == 0) {
        feeder.note();
        prefetch_map(p.a);
        prefetch_map(p.b);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.full + i * 8, (TURNS ? (FEEDERS ? 1 : WARPS) * WARP_ARRIVALS : 0) + COPIES);
            barrier_init(shared.empty + i * 8, WARPS * WARP_ARRIVALS);
        }
        for (int i = 0; i < RAW_STAGES; ++i) barrier_init(shared.raw_full + i * 8, 1);
        barrier_init_fence();
    }
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();

    if (warp >= WARPS) {
        const int begin = warp - WARPS;
        for (int block = begin; block < RAW_STAGES; block += FEEDERS) feeder.copy_raw(block);
#pragma unroll 1
        for (int block = begin; block < feeder.blocks(); block += FEEDERS) {
            feeder.feed(block);
            feeder.copy_raw(block + RAW_STAGES);
        }
    } else {
        multiply_all(p, shared, feeder);
    }
}

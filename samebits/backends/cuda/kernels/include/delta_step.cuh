// What the kernels for one token of each sequence share: delta_step.cu and delta_step_few*.cu.
#pragma once

#define TENSOR_CORE 1

#include "delta_forward.cuh"
#include "launch.cuh"

constexpr int SCORE_WARPS = 8;  // BY_CHANNEL: they have columns, too, where there are no other warps
constexpr int COLUMN_WARPS = !BY_CHANNEL ? 4 : WARPS == SCORE_WARPS ? SCORE_WARPS : WARPS - SCORE_WARPS;
constexpr int COLUMNS = TILE / COLUMN_WARPS, WIDE = COLUMNS / 8;  // of a warp; side by side of a thread
constexpr int STEPS = KEY_SIZE / 16, AHEAD = STEPS < 16 / WIDE ? STEPS : 16 / WIDE;
// Of a multiprocessor, by their registers and memory.
constexpr int BLOCKS = BY_CHANNEL                      ? (WARPS == 8 && KEY_SIZE <= 128 ? 2 : 1)
                       : KEY_SIZE > 128 && TILE == 128 ? 2
                       : TILE < 128                    ? 4
                                                       : 3;
constexpr int LINE = TILE + PAD, PER = 16 / SIZE;  // in elements
constexpr bool AT_ONCE = TILE == 32;
constexpr int KEY_TILES = CHUNK / (8 * WARPS);  // of a warp, of 8 keys

// The token's query and key; and both times decays, from the chunk's start on and from its last block's.
enum Own { PLAIN, SINCE_START = 2 * BY_CHANNEL, SINCE_BLOCK = 4 * BY_CHANNEL };

struct Memory {
    Stored keys[CHUNK * KEYS], updates[CHUNK * LINE], own[(BY_CHANNEL ? 6 : 2) * KEYS];
    Stored scores[CHUNK], values[TILE];
    float weights[CHUNK];  // of updates of the block's rows, in the update; or WEIGHTED, of the rows
    float decays[CHUNK * DECAYS], residuals[TILE];
};

template <class T>
struct alignas(WIDE * sizeof(T)) Wide {
    T x[WIDE];
};

// Copies rows j < `rows` of WIDTH elements, of `columns` that there are. The others of ROWS are zeros. So many threads do
// it, of which this is one.
template <int WIDTH, int LINE, int FROM, u32 ROWS = CHUNK, u32 COUNT = THREADS, class T>
__device__ __forceinline__ void copy(T* to, const T* from, u32 rows, u32 columns = WIDTH,
                                     u32 thread = threadIdx.x) {
    constexpr u32 PER = 16 / sizeof(T), EACH = WIDTH / PER, STEP = COUNT / EACH, BYTES = sizeof(T);
    if constexpr (COUNT % EACH == 0) {
        const u32 j = thread / EACH, e = thread % EACH * PER;
        const u32 at = shared_address(to) + (j * LINE + e) * BYTES, there = e < columns ? rows : 0;
        const T* row = from + (e < columns ? j * FROM + e : 0);
#pragma unroll
        for (u32 n = 0; n < ROWS; n += STEP)
            if (n + STEP <= ROWS || j + n < ROWS)
                cp_async_16(at + n * LINE * BYTES, row + n * FROM, j + n < there ? 16 : 0);
    } else {
#pragma unroll 4
        for (u32 x = thread; x < ROWS * EACH; x += COUNT) {
            const u32 j = x / EACH, e = x % EACH * PER;
            const bool given = j < rows && e < columns;
            cp_async_16(shared_address(to + j * LINE + e), given ? from + j * FROM + e : from,
                        given ? 16 : 0);
        }
    }
}

// Rows of a step's right operand that a thread has, from row `in_pair` on: 0, 1, 8 and 9.
__device__ __forceinline__ constexpr int row_of(int y) { return y % 2 + y / 2 * 8; }

struct Warp {
    Memory& m;
    float* matrix;     // of the head, from the warp's first column on
    const float* own;  // the thread's first element of it
    int columns, warp, lane, in_row, in_pair;

    // Whether there are the columns of one thread in eight.
    __device__ __forceinline__ bool has(int place) const {
        return VALUE_SIZE % TILE == 0 || place * WIDE < columns;
    }

    // What the thread has of 16 rows of the matrix.
    __device__ __forceinline__ void read(Wide<float> (&s)[4], int d) const {
#pragma unroll
        for (int y = 0; y < 4; ++y)
            s[y] = has(in_row) ? *reinterpret_cast<const Wide<float>*>(own + (d + row_of(y)) * VALUE_SIZE)
                               : Wide<float>{};
    }

    // And of 16 rows of updates.
    __device__ __forceinline__ void read(Wide<Stored> (&u)[4], int j) const {
        const Stored* from = m.updates + (j + in_pair) * LINE + warp * COLUMNS + in_row * WIDE;
#pragma unroll
        for (int y = 0; y < 4; ++y) u[y] = *reinterpret_cast<const Wide<Stored>*>(from + row_of(y) * LINE);
    }

    // A step's right operand: 16 rows of updates.
    __device__ __forceinline__ void read(u32 (&b)[WIDE][2], int j) const {
        Wide<Stored> u[4];
        read(u, j);
#pragma unroll
        for (int x = 0; x < WIDE; ++x)
            b[x][0] = u[0].x[x] | u32(u[1].x[x]) << 16, b[x][1] = u[2].x[x] | u32(u[3].x[x]) << 16;
    }

    // Carries chains on by it. The left operand's rows are `scores`, and with them -weights.
    __device__ __forceinline__ void add(float (&acc)[WIDE][4], const u32 (&b)[WIDE][2], int j,
                                        bool with_weights) const {
        u32 a[4] = {};
        if (in_row == 0) {
            const u32* from = reinterpret_cast<const u32*>(m.scores + j + in_pair);
            a[0] = from[0], a[2] = from[4];
        } else if (with_weights && in_row == 1) {
            const float* from = m.weights + j + in_pair;
            a[0] = E::pack(-from[0], -from[1]), a[2] = E::pack(-from[8], -from[9]);
        }
#pragma unroll
        for (int x = 0; x < WIDE; ++x) mma_m16n8k16<TYPE == BF16>(acc[x], a, b[x]);
    }

    // The matrix at the end of a full chunk, for the warp's columns. An empty chunk of updates follows.
    __device__ __forceinline__ void close() const {
#if BY_CHANNEL
        const float* last = m.decays + (CHUNK - 1) * DECAYS;
        const auto kept = [&](int d) { return exp2_of(last[d]); };
        const auto left = [&](int) { return 1.0f; };  // keys have it
#else
        const float last = m.decays[CHUNK - 1], over_chunk = exp2_of(last);
        const auto kept = [&](int) { return over_chunk; };
        const auto left = [&](int j) {
            const float decay = exp2_of(__fsub_rn(last, m.decays[j]));
#if WEIGHTED
            return __fmul_rn(decay, m.weights[j]);
#else
            return decay;
#endif
        };
#endif
        u32 b[CHUNK / 16][WIDE][2];
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k) {
            Wide<Stored> u[4];
            float by[4];
            read(u, k * 16);
#pragma unroll
            for (int y = 0; y < 4; ++y) by[y] = left(k * 16 + in_pair + row_of(y));
#pragma unroll
            for (int x = 0; x < WIDE; ++x)
#pragma unroll
                for (int y = 0; y < 2; ++y)
                    b[k][x][y] = E::pack(__fmul_rn(E::widen(u[2 * y].x[x]), by[2 * y]),
                                         __fmul_rn(E::widen(u[2 * y + 1].x[x]), by[2 * y + 1]));
        }
        const u32 key_rows = shared_address(m.keys + (lane / 16 * 8 + lane % 8) * KEYS + lane / 8 % 2 * 8);
#pragma unroll 1
        for (int d = 0; d < KEY_SIZE; d += 16) {
            float acc[WIDE][4];
            Wide<float>* at[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int place = in_pair + c % 2, row = d + in_row + c / 2 * 8;
                at[c] = reinterpret_cast<Wide<float>*>(matrix + row * VALUE_SIZE + place * WIDE);
                const Wide<float> s = has(place) ? *at[c] : Wide<float>{};
#pragma unroll
                for (int x = 0; x < WIDE; ++x) acc[x][c] = __fmul_rn(s.x[x], kept(row));
            }
#pragma unroll
            for (int k = 0; k < CHUNK / 16; ++k) {
                u32 a[4];
                ldmatrix_x4<true>(a, key_rows + (k * 16 * KEYS + d) * SIZE);
#pragma unroll
                for (int x = 0; x < WIDE; ++x) mma_m16n8k16<TYPE == BF16>(acc[x], a, b[k][x]);
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                Wide<float> s;
#pragma unroll
                for (int x = 0; x < WIDE; ++x) s.x[x] = acc[x][c];
                if (has(in_pair + c % 2)) *at[c] = s;
            }
        }
        __syncwarp();
        for (int x = lane; x < 16 * COLUMNS; x += 32)
            m.updates[x / COLUMNS * LINE + warp * COLUMNS + x % COLUMNS] = E::narrow(0.0f);
        __syncwarp();
    }
};

// Sums of a chunk's rows in registers: what the two forms of delta_rows_backward.cu with tensor cores and operands in
// shared memory have in common.
//
// Warps share the columns of keys. A matrix is read once, and rounded in registers.
#pragma once

#include "delta_backward.cuh"

constexpr int VALUES = VALUE_SIZE + PAD, COLUMNS = CHUNK + PAD;  // in elements
constexpr int LINE = KEY_SIZE + 4;                               // in floats

// For rows from `first` to `last` - 1 of x and y, a chain of FMA over x and y times `by` of the row. Eight lanes hold a
// row's next 32 elements, and hand the sum on. HEIGHT is a multiple of 16.
template <int HEIGHT, class B, class F>
__device__ __forceinline__ void chains(const float* x, const float* y, const B& by, int first, int last,
                                       int size, const F& store) {
    constexpr int SETS = (HEIGHT + 4 * WARPS - 1) / (4 * WARPS);
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 4 + lane / 8;
    float sums[SETS] = {};
    for (int e = lane % 8 * 4; e < (size + 31) / 32 * 32; e += 32) {
        float of_x[SETS][4] = {}, of_y[SETS][4] = {};
#pragma unroll
        for (int s = 0; s < SETS; ++s) {
            const int row = row0 + s * 4 * WARPS, at = row * size + e;
            if (row < first || row >= last || e >= size) continue;
            if (size % 4 == 0) {
                const uint4 a = *reinterpret_cast<const uint4*>(x + at);
                const uint4 b = *reinterpret_cast<const uint4*>(y + at);
                of_x[s][0] = __uint_as_float(a.x), of_x[s][1] = __uint_as_float(a.y);
                of_x[s][2] = __uint_as_float(a.z), of_x[s][3] = __uint_as_float(a.w);
                of_y[s][0] = __uint_as_float(b.x), of_y[s][1] = __uint_as_float(b.y);
                of_y[s][2] = __uint_as_float(b.z), of_y[s][3] = __uint_as_float(b.w);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (e + i < size) of_x[s][i] = x[at + i], of_y[s][i] = y[at + i];
            }
        }
#pragma unroll
        for (int hop = 0; hop < 8; ++hop)
#pragma unroll
            for (int s = 0; s < SETS; ++s) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (e + i < size)
                        sums[s] =
                            __fmaf_rn(of_x[s][i], __fmul_rn(of_y[s][i], by(row0 + s * 4 * WARPS)), sums[s]);
                sums[s] = __shfl_sync(0xFFFFFFFF, sums[s], lane / 8 * 8 + (lane + 7) % 8);
            }
    }
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
        const int row = row0 + s * 4 * WARPS;
        if (lane % 8 == 0 && row >= first && row < last) store(row, sums[s]);
    }
}

// A chain of FMA over x and y, from `sum`. Both are in shared memory.
__device__ __forceinline__ float chain(const Stored* x, const float* y, int size, float sum) {
    int d = 0;
#pragma unroll 4
    for (; d + 4 <= size; d += 4) {
        const uint2 a = *reinterpret_cast<const uint2*>(x + d);
        const uint4 b = *reinterpret_cast<const uint4*>(y + d);
        sum = __fmaf_rn(E::widen(u16(a.x)), __uint_as_float(b.x), sum);
        sum = __fmaf_rn(E::widen(u16(a.x >> 16)), __uint_as_float(b.y), sum);
        sum = __fmaf_rn(E::widen(u16(a.y)), __uint_as_float(b.z), sum);
        sum = __fmaf_rn(E::widen(u16(a.y >> 16)), __uint_as_float(b.w), sum);
    }
    for (; d < size; ++d) sum = __fmaf_rn(E::widen(x[d]), y[d], sum);
    return sum;
}

// Elements of a chunk's rows by a key's channels: a warp has GROUPS of 16 channels, in one of PARTS of the rows.
struct Sums {
    static constexpr int PARTS = KEY_SIZE > 64 ? 1 : KEY_SIZE > 32 ? 2 : 4, TALL = CHUNK / 16 / PARTS;
    static constexpr int STEP = WARPS / PARTS, GROUPS = (KEY_SIZE / 16 + STEP - 1) / STEP;
    float c[GROUPS][TALL][2][4] = {};

    static __device__ __forceinline__ int row(int t) { return (threadIdx.x / 32 % PARTS * TALL + t) * 16; }
    static __device__ __forceinline__ int channel(int g) {
        return (g * STEP + threadIdx.x / 32 / PARTS) * 16;
    }
    static __device__ __forceinline__ bool has(int g) {
        return KEY_SIZE / 16 % STEP == 0 || channel(g) < KEY_SIZE;
    }

    // Calls `f` with the row, the first channel and the sums of two neighbours, and those of `other` there.
    template <class F>
    __device__ __forceinline__ void each_with(Sums& other, const F& f) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int x = 0; has(g) && x < TALL * 4; ++x)
                f(row(x / 4) + lane / 4 + x % 2 * 8, channel(g) + x / 2 % 2 * 8 + lane % 4 * 2,
                  c[g][x / 4][x / 2 % 2] + x % 2 * 2, other.c[g][x / 4][x / 2 % 2] + x % 2 * 2);
    }
    template <class F>
    __device__ __forceinline__ void each(const F& f) {
        each_with(*this, [&](int i, int d, float* x, const float*) { f(i, d, x); });
    }

    __device__ __forceinline__ void put(float* rows) {
        each([&](int i, int d, const float* x) {
            *reinterpret_cast<float2*>(rows + i * LINE + d) = make_float2(x[0], x[1]);
        });
    }

    // Carries chains on over `count` rows of x: by rows of scores, or, TURNED, by their columns.
    template <bool TURNED>
    __device__ __forceinline__ void add(const Stored* scores, const Stored* x, int count) {
#pragma unroll 1
        for (int k = 0; k < count; k += 16) {
            u32 right[GROUPS][4], left[4];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
                if (has(g)) ldmatrix_x4<true>(right[g], by_rows(x + k * KEYS + channel(g), KEYS));
#pragma unroll
            for (int t = 0; t < TALL; ++t) {
                const Stored* from = scores + (TURNED ? k * COLUMNS + row(t) : row(t) * COLUMNS + k);
                ldmatrix_x4<TURNED>(left, TURNED ? by_columns(from, COLUMNS) : by_rows(from, COLUMNS));
#pragma unroll
                for (int x = 0; x < GROUPS * 2; ++x)
                    if (has(x / 2))
                        mma_m16n8k16<TYPE == BF16>(c[x / 2][t][x % 2], left, right[x / 2] + x % 2 * 2);
            }
        }
    }
};

// Products of COUNT arrays of rows, behind each other, with a matrix in global memory. It is read two steps ahead.
template <int COUNT>
__device__ __forceinline__ void read_matrix(const Params& p, const float* matrix, const Stored* of_rows,
                                            Sums (&sums)[COUNT]) {
    constexpr int STEPS = VALUE_SIZE / 16, GROUPS = Sums::GROUPS, AHEAD = COUNT == 1 ? 2 : 1;
    const int lane = threadIdx.x % 32;
    float2 ahead[AHEAD][GROUPS * 4];
    const auto fetch = [&](int step) {
#pragma unroll
        for (int x = 0; x < GROUPS * 4; ++x) {
            const int d = Sums::channel(x / 4) + x / 2 % 2 * 8 + lane / 4;
            const int e = step * 16 + x % 2 * 8 + lane % 4 * 2;
            const float* from = matrix + d * p.size + e;
            const bool exists = d < p.key_size && e < p.size;
            if (p.size % 2 == 0)
                ahead[step % AHEAD][x] =
                    exists ? *reinterpret_cast<const float2*>(from) : make_float2(0.0f, 0.0f);
            else
                ahead[step % AHEAD][x] =
                    make_float2(exists ? from[0] : 0.0f, exists && e + 1 < p.size ? from[1] : 0.0f);
        }
    };
    fetch(0);
    if constexpr (AHEAD == 2 && STEPS > 1) fetch(1);
#pragma unroll 2
    for (int step = 0; step < STEPS; ++step) {
        u32 right[GROUPS * 4], left[4];
#pragma unroll
        for (int x = 0; x < GROUPS * 4; ++x)
            right[x] = E::pack(ahead[step % AHEAD][x].x, ahead[step % AHEAD][x].y);
        if (step + AHEAD < STEPS) fetch(step + AHEAD);
#pragma unroll
        for (int x = 0; x < COUNT * Sums::TALL; ++x) {
            const int n = x % COUNT, t = x / COUNT;
            ldmatrix_x4<false>(left,
                               by_rows(of_rows + (n * CHUNK + Sums::row(t)) * VALUES + step * 16, VALUES));
#pragma unroll
            for (int y = 0; y < GROUPS * 2; ++y)
                if (Sums::has(y / 2))
                    mma_m16n8k16<TYPE == BF16>(sums[n].c[y / 2][t][y % 2], left, right + y * 2);
        }
    }
}

// Stores a chunk's rows, in sums over heads, in order, by one thread for each element.
__device__ __forceinline__ void store(const Params& p, const float* rows, const Span& span, int head,
                                      Stored* to, float* sums) {
    const bool begins = head % p.group == 0, ends = head % p.group == p.group - 1;
    const i64 row = i64(p.heads / p.group) * p.key_size;
    const i64 at = span.token * row + i64(head / p.group) * p.key_size;
#pragma unroll 2
    for (int x = threadIdx.x; x < CHUNK * KEY_SIZE / 2; x += THREADS) {
        const int i = x / (KEY_SIZE / 2), d = x % (KEY_SIZE / 2) * 2;
        if (i < span.before || i >= span.count || d >= p.key_size) continue;
        const i64 mine = at + i * row + d;
        const bool both = d + 1 < p.key_size;
        float2 sum = *reinterpret_cast<const float2*>(rows + i * LINE + d);
        if (!begins) {
            sum.x = __fadd_rn(sums[mine], sum.x);
            if (both) sum.y = __fadd_rn(sums[mine + 1], sum.y);
        }
        if (!ends) {
            sums[mine] = sum.x;
            if (both) sums[mine + 1] = sum.y;
            continue;
        }
        sum.x = contract::canonical(sum.x), sum.y = contract::canonical(sum.y);
        if (p.key_size % 2 == 0) {
            E::store_pair(to + mine, sum.x, sum.y);
        } else {
            to[mine] = E::narrow(sum.x);
            if (both) to[mine + 1] = E::narrow(sum.y);
        }
    }
}

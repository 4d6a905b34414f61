// Sums of a chunk's rows in registers: what the two forms of delta_rows_backward.cu with tensor cores and operands in
// shared memory have in common.
//
// Warps share the columns of keys. A matrix is read once, as right operands.
#pragma once

#include "delta_backward.cuh"

constexpr int VALUES = VALUE_SIZE + PAD, COLUMNS = CHUNK + PAD;  // in elements
constexpr int LINE = KEY_SIZE + 4;                               // in floats

// A chain of FMA over x and y, from `sum`. Both are in shared memory.
__device__ __forceinline__ float chain(const Stored* x, const float* y, int size, float sum) {
    int d = 0;
#pragma unroll 4
    for (; d + 8 <= size; d += 8) {
        const uint4 a = *reinterpret_cast<const uint4*>(x + d);
        const float4 b[2] = {*reinterpret_cast<const float4*>(y + d),
                             *reinterpret_cast<const float4*>(y + d + 4)};
        sum = __fmaf_rn(E::widen(u16(a.x)), b[0].x, sum);
        sum = __fmaf_rn(E::widen(u16(a.x >> 16)), b[0].y, sum);
        sum = __fmaf_rn(E::widen(u16(a.y)), b[0].z, sum);
        sum = __fmaf_rn(E::widen(u16(a.y >> 16)), b[0].w, sum);
        sum = __fmaf_rn(E::widen(u16(a.z)), b[1].x, sum);
        sum = __fmaf_rn(E::widen(u16(a.z >> 16)), b[1].y, sum);
        sum = __fmaf_rn(E::widen(u16(a.w)), b[1].z, sum);
        sum = __fmaf_rn(E::widen(u16(a.w >> 16)), b[1].w, sum);
    }
    for (; d < size; ++d) sum = __fmaf_rn(E::widen(x[d]), y[d], sum);
    return sum;
}

// The sum of `count` floats in shared memory, in order.
__device__ __forceinline__ float sum_of(const float* x, int count) {
    float sum = x[0];
#pragma unroll 8
    for (int i = 0; i < count; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(x + i);
        if (i) sum = __fadd_rn(sum, four.x);
        if (i + 1 < count) sum = __fadd_rn(sum, four.y);
        if (i + 2 < count) sum = __fadd_rn(sum, four.z);
        if (i + 3 < count) sum = __fadd_rn(sum, four.w);
    }
    return sum;
}

// Sums from the last of a chunk's `count` rows on, which comes before `sum`: each takes the place of its row.
__device__ __forceinline__ void running_sums(float* rows, int count, float sum) {
    float sums[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(rows + i);
        sums[i] = four.x, sums[i + 1] = four.y, sums[i + 2] = four.z, sums[i + 3] = four.w;
    }
#pragma unroll
    for (int i = CHUNK - 1; i >= 0; --i) {
        if (i < count) sum = i == count - 1 ? __fadd_rn(sums[i], sum) : __fadd_rn(sum, sums[i]);
        sums[i] = sum;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4)
        *reinterpret_cast<float4*>(rows + i) = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
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

// A matrix that delta_chains_backward.cu has rounded, as right operands: some steps are on their way.
struct Rights {
    static constexpr int STEPS = VALUE_SIZE / 16, ROOM = 8 / Sums::GROUPS,
                         AHEAD = ROOM < STEPS ? ROOM : STEPS;
    const uint4* from;
    uint4 ahead[AHEAD][Sums::GROUPS];

    // 0: the matrix at the chunk's start, 1: the gradient of that at its end
    __device__ __forceinline__ Rights(const Record& record, int which)
        : from(record.rights + (which * (KEY_SIZE / 16) * STEPS) * 32 + threadIdx.x % 32) {
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) fetch(step);
    }
    __device__ __forceinline__ void fetch(int step) {
#pragma unroll
        for (int g = 0; g < Sums::GROUPS; ++g)
            if (Sums::has(g)) ahead[step % AHEAD][g] = from[(Sums::channel(g) / 16 * STEPS + step) * 32];
    }

    // Products of COUNT arrays of rows, behind each other, with the matrix.
    template <int COUNT>
    __device__ __forceinline__ void multiply(const Stored* of_rows, Sums (&sums)[COUNT]) {
#pragma unroll AHEAD
        for (int step = 0; step < STEPS; ++step) {
            u32 right[Sums::GROUPS][4], left[4];
#pragma unroll
            for (int g = 0; g < Sums::GROUPS; ++g) {
                const uint4& x = ahead[step % AHEAD][g];
                right[g][0] = x.x, right[g][1] = x.y, right[g][2] = x.z, right[g][3] = x.w;
            }
            if (step + AHEAD < STEPS) fetch(step + AHEAD);
#pragma unroll
            for (int x = 0; x < COUNT * Sums::TALL; ++x) {
                const int n = x % COUNT, t = x / COUNT;
                ldmatrix_x4<false>(
                    left, by_rows(of_rows + (n * CHUNK + Sums::row(t)) * VALUES + step * 16, VALUES));
#pragma unroll
                for (int y = 0; y < Sums::GROUPS * 2; ++y)
                    if (Sums::has(y / 2))
                        mma_m16n8k16<TYPE == BF16>(sums[n].c[y / 2][t][y % 2], left,
                                                   right[y / 2] + y % 2 * 2);
            }
        }
    }
};

// Stores a chunk's rows, in sums over heads, in order, by one thread for each element.
__device__ __forceinline__ void store(const Params& p, const float* rows, const Span& span, int head,
                                      Stored* to, float* sums) {
    const bool begins = head % p.group == 0, ends = head % p.group == p.group - 1;
    const i64 row = i64(p.heads / p.group) * p.key_size;
    const i64 at = span.token * row + i64(head / p.group) * p.key_size;
    if (begins && ends && p.key_size % 8 == 0) {
        constexpr int EACH = KEY_SIZE / 8;  // pieces of a row
#pragma unroll 1
        for (int x = threadIdx.x; x < CHUNK * EACH; x += THREADS) {
            const int i = x / EACH, d = x % EACH * 8;
            if (i < span.before || i >= span.count || d >= p.key_size) continue;
            u32 pairs[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float2 both = *reinterpret_cast<const float2*>(rows + i * LINE + d + n * 2);
                pairs[n] = E::pack(contract::canonical(both.x), contract::canonical(both.y));
            }
            *reinterpret_cast<uint4*>(to + at + i * row + d) =
                make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        return;
    }
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

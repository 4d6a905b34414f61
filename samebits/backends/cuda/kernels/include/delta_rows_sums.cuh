// Sums of a chunk's rows in registers: what the two forms of delta_rows_backward.cu with tensor cores and operands in
// shared memory have in common.
//
// Warps share the columns of keys. A matrix is read once, and rounded in registers.
#pragma once

#include "delta_backward.cuh"

constexpr int VALUES = VALUE_SIZE + PAD, COLUMNS = CHUNK + PAD;  // in elements
constexpr int LINE = KEY_SIZE + 4;                               // in floats

// For a lane's row of x and y, those from `first` to `last` - 1 of 32, a chain of FMA over x and y times `by`. A warp reads
// PIECE elements of each row some steps ahead, two lanes for a row, and hands them over in shared memory.
constexpr int PIECE = 8, PIECE_LINE = PIECE + 4, OF_CHAINS = 2 * 32 * PIECE_LINE;  // the last two in floats

template <bool BY_FOUR>
__device__ __forceinline__ float chain_of_row(const float* x, const float* y, float by, int first, int last,
                                              int size, float* memory) {
    constexpr int STEPS = 2;  // ahead
    const int lane = threadIdx.x % 32, at = lane % 2 * 4;
    uint4 ahead[STEPS][4];
    const auto fetch = [&](uint4(&to)[4], int e) {
        e += at;
#pragma unroll
        for (int n = 0; n < 4; ++n) {  // rows from 0 and 16 on, of x and then of y
            const int row = n % 2 * 16 + lane / 2;
            const float* from = (n < 2 ? x : y) + row * size + e;
            const bool exists = row >= first && row < last;
            to[n] = make_uint4(0, 0, 0, 0);
            if (BY_FOUR) {
                if (exists && e < size) to[n] = *reinterpret_cast<const uint4*>(from);
                continue;
            }
            const u32* bits = reinterpret_cast<const u32*>(from);
            if (exists && e < size) to[n].x = bits[0];
            if (exists && e + 1 < size) to[n].y = bits[1];
            if (exists && e + 2 < size) to[n].z = bits[2];
            if (exists && e + 3 < size) to[n].w = bits[3];
        }
    };
#pragma unroll
    for (int s = 0; s < STEPS; ++s) fetch(ahead[s], s * PIECE);
    float sum = 0.0f;
    const float* mine = memory + lane * PIECE_LINE;
#pragma unroll 1
    for (int e = 0; e < size; e += STEPS * PIECE) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int left = size - e - s * PIECE;
            if (left <= 0) break;
#pragma unroll
            for (int n = 0; n < 4; ++n)
                *reinterpret_cast<uint4*>(memory + (n * 16 + lane / 2) * PIECE_LINE + at) = ahead[s][n];
            __syncwarp();
            fetch(ahead[s], e + (STEPS + s) * PIECE);
#pragma unroll
            for (int i = 0; i < PIECE; i += 4) {
                const float4 a = *reinterpret_cast<const float4*>(mine + i);
                const float4 b = *reinterpret_cast<const float4*>(mine + 32 * PIECE_LINE + i);
                if (i < left) sum = __fmaf_rn(a.x, __fmul_rn(b.x, by), sum);
                if (i + 1 < left) sum = __fmaf_rn(a.y, __fmul_rn(b.y, by), sum);
                if (i + 2 < left) sum = __fmaf_rn(a.z, __fmul_rn(b.z, by), sum);
                if (i + 3 < left) sum = __fmaf_rn(a.w, __fmul_rn(b.w, by), sum);
            }
            __syncwarp();
        }
    }
    return sum;
}

// Of betas or weights; and, in `kept`, of the last row's decay or decays, what the next matrix has of this one, whose
// decay is `kept_of`(channel). Warps take 32 rows after 32; `memory` holds two arrays of scores.
template <class K>
__device__ __forceinline__ void chains(const Params& p, const Record& record, const Span& span, int head,
                                       Stored* memory, float* kept, const K& kept_of) {
    constexpr int OF_KEYS = (KEY_SIZE + 31) / 32, PARTS = OF_KEYS + CHUNK / 32;
    constexpr int ROOM = 2 * CHUNK * COLUMNS * SIZE / (4 * OF_CHAINS), USED = ROOM < WARPS ? ROOM : WARPS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int part = warp; warp < USED && part < PARTS; part += USED) {
        const bool of_keys = part < OF_KEYS;
        const int row = (of_keys ? part : part - OF_KEYS) * 32;
        const int first = of_keys ? 0 : span.before, last = of_keys ? p.key_size : span.count;
        if (row >= last || !(of_keys ? p.dg != nullptr : DELTA || WEIGHTED)) continue;
        const float* x = (of_keys ? record.matrix : record.of_updates) + row * p.size;
        const float* y = (of_keys ? record.of_matrix : record.z) + row * p.size;
        const int mine = row + lane;
        const float by = of_keys ? kept_of(min(mine, p.key_size - 1)) : 1.0f;
        float* own = reinterpret_cast<float*>(memory) + warp * OF_CHAINS;
        const float sum = p.size % 4 ? chain_of_row<false>(x, y, by, first - row, last - row, p.size, own)
                                     : chain_of_row<true>(x, y, by, first - row, last - row, p.size, own);
        if (mine < first || mine >= last) continue;
        if (of_keys)
            kept[mine] = sum;
        else
            (WEIGHTED ? p.dweights : p.dbeta)[(span.token + mine) * p.heads + head] =
                contract::canonical(sum);
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

// Products of COUNT arrays of rows, behind each other, with a matrix in global memory, which is read some steps ahead.
// WHOLE: it fills all steps.
template <bool WHOLE, int COUNT>
__device__ __forceinline__ void multiply(const Params& p, const float* matrix, const Stored* of_rows,
                                         Sums (&sums)[COUNT]) {
    constexpr int STEPS = VALUE_SIZE / 16, GROUPS = Sums::GROUPS, WANTED = WHOLE ? 2 : 1;
    constexpr int AHEAD = WANTED < STEPS ? WANTED : STEPS;
    const int lane = threadIdx.x % 32, first = lane % 4 * 2;
    uint2 ahead[AHEAD][GROUPS * 4];
    const auto fetch = [&](int step) {
#pragma unroll
        for (int x = 0; x < GROUPS * 4; ++x) {
            const int d = Sums::channel(x / 4) + x / 2 % 2 * 8 + lane / 4, e = step * 16 + x % 2 * 8 + first;
            const u32* from = reinterpret_cast<const u32*>(matrix) + d * p.size + e;
            uint2& to = ahead[step % AHEAD][x];
            if (WHOLE) {
                if (Sums::has(x / 4)) to = *reinterpret_cast<const uint2*>(from);
            } else {
                to.x = d < p.key_size && e < p.size ? from[0] : 0;
                to.y = d < p.key_size && e + 1 < p.size ? from[1] : 0;
            }
        }
    };
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) fetch(step);
#pragma unroll AHEAD
    for (int step = 0; step < STEPS; ++step) {
        u32 right[GROUPS * 4], left[4];
#pragma unroll
        for (int x = 0; x < GROUPS * 4; ++x) {
            const uint2 both = ahead[step % AHEAD][x];
            right[x] = E::pack(__uint_as_float(both.x), __uint_as_float(both.y));
        }
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

template <int COUNT>
__device__ __forceinline__ void read_matrix(const Params& p, const float* matrix, const Stored* of_rows,
                                            Sums (&sums)[COUNT]) {
    if (p.key_size == KEY_SIZE && p.size == VALUE_SIZE)
        multiply<true>(p, matrix, of_rows, sums);
    else
        multiply<false>(p, matrix, of_rows, sums);
}

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

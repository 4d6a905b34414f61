// Sums of a chunk's rows in registers: what linear_rows_backward.cu and the two forms of delta_rows_backward.cu with tensor
// cores and operands in shared memory have in common.
//
// Warps share the columns of keys. A matrix is read once, as right operands.
#pragma once

constexpr int VALUES = VALUE_SIZE + PAD, COLUMNS = CHUNK + PAD;  // in elements
constexpr int LINE = KEY_SIZE + 4;                               // in floats

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
    static constexpr int PARTS = KEY_SIZE > 8 * WARPS   ? 1
                                 : KEY_SIZE > 4 * WARPS ? 2
                                                        : 4,
                         TALL = CHUNK / 16 / PARTS;
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

// A rounded matrix in memory, as right operands, or, TURNED, as left ones of its transpose: some steps are on their way.
template <bool TURNED>
struct Rights {
    static constexpr int STEPS = VALUE_SIZE / 16, ROOM = 8 / Sums::GROUPS,
                         AHEAD = ROOM < STEPS ? ROOM : STEPS;
    const uint4* from;
    const int size;  // of rows
    uint4 ahead[AHEAD][Sums::GROUPS];

    __device__ __forceinline__ Rights(const uint4* matrix, int size)
        : from(matrix + threadIdx.x % 32), size(size) {
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) fetch(step);
    }
    __device__ __forceinline__ void fetch(int step) {
#pragma unroll
        for (int g = 0; g < Sums::GROUPS; ++g) {
            const int keys = Sums::channel(g) / 16,
                      place = TURNED ? step * (KEY_SIZE / 16) + keys : keys * STEPS + step;
            if (Sums::has(g)) ahead[step % AHEAD][g] = from[place * 32];
        }
    }

    // Products of COUNT arrays of rows, behind each other, with the matrix.
    template <int COUNT>
    __device__ __forceinline__ void multiply(const Stored* of_rows, Sums (&sums)[COUNT]) {
#pragma unroll AHEAD
        for (int step = 0; step < STEPS; ++step) {
            u32 right[Sums::GROUPS][4], left[4];
#pragma unroll
            for (int g = 0; g < Sums::GROUPS; ++g) {
                uint4 x = ahead[step % AHEAD][g];
                if constexpr (TURNED) {
                    const u32 left[4] = {x.x, x.y, x.z, x.w};
                    x = turned(left, size - step * 16);
                }
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

// Stores rows `first` to `count` - 1 of a head, from `at` + `first` * `line` on: rounded, or, as others share its keys, in
// `sums`.
__device__ __forceinline__ void store_rows(const float* rows, int first, int count, int key_size, i64 at,
                                           i64 line, Stored* to, float* sums) {
    constexpr int EACH = KEY_SIZE / 4;  // pieces of a row
#pragma unroll 4
    for (int x = threadIdx.x; x < CHUNK * EACH; x += THREADS) {
        const int i = x / EACH, d = x % EACH * 4;
        if (i < first || i >= count || d >= key_size) continue;
        const float4 four = *reinterpret_cast<const float4*>(rows + i * LINE + d);
        const i64 mine = at + i * line + d;
        if (key_size % 4) {
            const float each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                if (d + n >= key_size) continue;
                if (sums)
                    sums[mine + n] = each[n];
                else
                    to[mine + n] = E::narrow(contract::canonical(each[n]));
            }
        } else if (sums) {
            *reinterpret_cast<float4*>(sums + mine) = four;
        } else {
            *reinterpret_cast<uint2*>(to + mine) =
                make_uint2(E::pack(contract::canonical(four.x), contract::canonical(four.y)),
                           E::pack(contract::canonical(four.z), contract::canonical(four.w)));
        }
    }
}

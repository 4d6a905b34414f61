// A warp's part of the matrix that goes from chunk to chunk: linear_states.cu, delta_chunks.cu, delta_states.cu.
#pragma once

#include "linear.cuh"

// A left operand of 16 columns of values by 16 rows, each row times `by` of it, rounded.
__device__ __forceinline__ void scale_pairs(u32 (&pairs)[4], const float* by) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float* own = by + i / 2 * 8 + threadIdx.x % 4 * 2;
        pairs[i] = E::pack(__fmul_rn(E::widen(u16(pairs[i])), own[0]),
                           __fmul_rn(E::widen(u16(pairs[i] >> 16)), own[1]));
    }
}

// 16 columns of values by 16 * WIDE channels of keys, in a warp's registers: as a tensor-core step of 16 rows, columns
// of values, leaves its sums, and takes its left operand.
template <int WIDE>
struct Part {
    float c[WIDE][2][4];
    int first_key, first_column;

    // Calls `f` with each element's channel and column.
    template <class F>
    __device__ __forceinline__ void each(const F& f) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int x = 0; x < WIDE * 2; ++x)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                f(first_key + x * 8 + lane % 4 * 2 + i % 2, first_column + lane / 4 + i / 2 * 8,
                  c[x / 2][x % 2][i]);
    }

    __device__ __forceinline__ void read(const Params& p, const float* from) {
        each([&](int d, int e, float& s) {
            s = from && d < p.key_size && e < p.size ? from[i64(d) * p.size + e] : 0.0f;
        });
    }

    __device__ __forceinline__ void write(const Params& p, float* to, bool canonical) {
        each([&](int d, int e, float& s) {
            if (d < p.key_size && e < p.size)
                to[i64(d) * p.size + e] = canonical ? contract::canonical(s) : s;
        });
    }

    // Rounded: 16 channels as a left operand.
    __device__ __forceinline__ void rounded(int x, u32 (&left)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) left[i] = E::pack(c[x][i / 2][i % 2 * 2], c[x][i / 2][i % 2 * 2 + 1]);
    }

    // All, to a matrix of such operands.
    __device__ __forceinline__ void write_rounded(const Params& p, uint4* matrix) const {
        if (first_column >= p.size) return;
        uint4* to = matrix + first_column / 16 * (KEY_SIZE / 16) * 32;
#pragma unroll
        for (int x = 0; x < WIDE; ++x) {
            u32 both[4];
            rounded(x, both);
            const int step = first_key / 16 + x;
            if (KEY_SIZE % (16 * WIDE) == 0 || step < KEY_SIZE / 16)
                to[step * 32 + threadIdx.x % 32] = make_uint4(both[0], both[1], both[2], both[3]);
        }
    }

    // All, as floats, [columns of values, KEY_SIZE].
    __device__ __forceinline__ void write_turned(const Params& p, float* matrix) const {
        if (first_column < p.size)
            put(matrix + i64(first_column) * KEY_SIZE + first_key, KEY_SIZE, KEY_SIZE - first_key);
    }

    // Floats of each column behind each other, `line` from the next column's, of the first `channels`.
    __device__ __forceinline__ void put(float* to, int line, int channels) const {
        const int d = threadIdx.x % 4 * 2;
        to += threadIdx.x % 32 / 4 * line + d;
#pragma unroll
        for (int x = 0; x < WIDE * 4; ++x) {
            const float* both = c[x / 4][x / 2 % 2] + x % 2 * 2;
            if (WIDE == 1 || x / 2 * 8 + d < channels)
                *reinterpret_cast<float2*>(to + x % 2 * 8 * line + x / 2 * 8) = make_float2(both[0], both[1]);
        }
    }

    // Carries the chains on over `count` rows: of keys, and of values times `by` of the row, rounded.
    template <int LINE, int VALUES>
    __device__ __forceinline__ void add(const Stored* keys, const Stored* values, const float* by,
                                        int count) {
        add<LINE>(keys, count, [&](u32(&left)[4], int j) {
            ldmatrix_x4<true>(left, by_columns(values + j * VALUES, VALUES));
            scale_pairs(left, by + j);
        });
    }
    // The same of left operands: `f` finds that of 16 rows.
    template <int LINE, class F>
    __device__ __forceinline__ void add(const Stored* keys, int count, const F& f) {
#pragma unroll
        for (int j = 0; j < CHUNK; j += 16) {
            if (j >= count) break;
            u32 left[4];
            f(left, j);
#pragma unroll
            for (int x = 0; x < WIDE; ++x) {
                u32 right[4];
                ldmatrix_x4<true>(right, by_rows(keys + j * LINE + x * 16, LINE));
                mma_m16n8k16<TYPE == BF16>(c[x][0], left, right);
                mma_m16n8k16<TYPE == BF16>(c[x][1], left, right + 2);
            }
        }
    }
    __device__ __forceinline__ void scale(float by) {
        each([&](int, int, float& s) { s = __fmul_rn(s, by); });
    }
};

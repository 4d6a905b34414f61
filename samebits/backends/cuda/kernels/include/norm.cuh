// What kernels of norms share: a weight beside the rows, and the gradients of rows.
//
// Macros, beside those of row_matrix.cuh
//   IN, OUT, PARAM   types of rows, results and weights: F32, BF16 or F16
#pragma once

#include "row_matrix.cuh"

using In = Element<IN>;
using Out = Element<OUT>;
using Param = Element<PARAM>;

constexpr int IN_WORDS = WORDS<In>;

// A norm's weight or bias, which all rows read. Null stands for a value that changes nothing. It stays in registers
// if a kernel has room for it, of which the other one takes as much.
template <int vectors>
struct Vector {
    static constexpr int FREE = (STAGES == 0 || BLOCKS > 3 ? 8 : BLOCKS > 2 ? 16 : 32) / vectors;
    static constexpr bool KEPT = PASSES > 0 && PASSES* WORDS<Param> <= FREE;

    Entries<Param, 65> entries;  // so many words are not held
    u32 kept[KEPT ? KEPT_PASSES : 1][WORDS<Param>];

    __device__ Vector(const Param::Stored* at, const Row& row, float otherwise)
        : entries(at, 0, row, otherwise) {
        entries.begin(0);
        if constexpr (KEPT) row.each_pass([&](int pass) { read(pass, kept[pass]); });
    }

    __device__ __forceinline__ void read(int pass, u32 (&to)[WORDS<Param>]) const {
        if (entries.matrix) {
            entries.load(pass, to);
        } else {
#pragma unroll
            for (int w = 0; w < WORDS<Param>; ++w) to[w] = word_of<Param>(entries.beyond);
        }
    }

    __device__ __forceinline__ void operator()(int pass, float (&x)[OWN]) const {
        if constexpr (KEPT) {
            widen_words<Param>(kept[pass], x);
        } else {
            u32 words[WORDS<Param>];
            read(pass, words);
            widen_words<Param>(words, x);
        }
    }
};

struct NormGradParams {
    const Out::Stored* grad;
    const In::Stored* x;
    const Param::Stored* weight;
    const float *means, *scales;
    Out::Stored* out;
    i64 grad_row, x_row, rows, n;
    i64 first, step;  // the first token, and 1 or -1: in which order rows are taken
};

constexpr int GRAD_AND_X = WORDS<Out> + IN_WORDS;

template <bool CENTRED>
__device__ __forceinline__ void norm_backward_rows(const NormGradParams& p, Row& row) {
    Matrix<Out, GRAD_AND_X> grads(p.grad + p.first * p.grad_row, p.step * p.grad_row, row);
    Matrix<In, GRAD_AND_X> entries(p.x + p.first * p.x_row, p.step * p.x_row, row, 0.0f, 1);
    const Vector<1> weight(p.weight, row, 1.0f);
    const auto body = [&] {
        const i64 token = p.first + p.step * row.row;
        const float scale = p.scales[token], mean = CENTRED ? p.means[token] : 0.0f;
        const auto weighted = [&](int pass, float (&g)[OWN]) {
            float w[OWN];
            grads(pass, g);
            weight(pass, w);
#pragma unroll
            for (int i = 0; i < OWN; ++i) g[i] = __fmul_rn(g[i], w[i]);
        };
        const auto normalised = [&](int pass, float (&y)[OWN]) {
            entries(pass, y);
#pragma unroll
            for (int i = 0; i < OWN; ++i) y[i] = __fmul_rn(CENTRED ? __fsub_rn(y[i], mean) : y[i], scale);
        };
        float sums[2] = {};  // chains of h * y, and of h
        row.each_pass([&](int pass) {
            float h[OWN], y[OWN];
            weighted(pass, h);
            normalised(pass, y);
#pragma unroll
            for (int i = 0; i < OWN; ++i) y[i] = __fmul_rn(h[i], y[i]);
            row.mask(pass, y);
            const float along = row.block_sum(y), plain = CENTRED ? row.block_sum(h) : 0.0f;
            if (row.keeps(pass)) {
                sums[0] = __fadd_rn(sums[0], along);
                sums[1] = __fadd_rn(sums[1], plain);
            }
        });
        const float along = row.over_length(row.sum_of_chains(sums[0]));
        const float average = CENTRED ? row.over_length(row.sum_of_chains(sums[1])) : 0.0f;
        store_row<Out>(row, p.out + token * p.n, [&](int pass, float (&x)[OWN]) {
            float g[OWN];
            weighted(pass, g);
            normalised(pass, x);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                if (CENTRED) g[i] = __fsub_rn(g[i], average);
                x[i] = __fmul_rn(scale, __fmaf_rn(-x[i], along, g[i]));
            }
        });
    };
    each_row(row, p.rows, body, grads, entries);
}

// Softmax of rows and its logarithm: docs/contract.md, "Row reductions".
//
// Most rows are near: no entry is far below the row's maximum R. Their exponentials need no clamps (exp_near), and
// their results in 16 bits no second exponential. e^(z - R) / S is about e^(z - m) e^(m - R) / S, of which the first
// factor was computed for the sum, beside the maximum m of its block. Where both ends of an interval that contains
// the specified f32 value round to the same 16 bits, these are the result. The few others are computed as specified.
// Rows that are not near, such as masked ones, are computed so as a whole, and rows that are read again, too.
#pragma once

#include "row_matrix.cuh"
#include "words.cuh"

struct SoftmaxParams {
    const void* x;
    void* out;
    i64 x_row, rows, n;
};

constexpr float NEAR = 48.0f;  // e^-48 / n is far above what is small for Divisor, and above every subnormal

// The maximum of a block, of which these are this thread's entries. NaN if one is.
template <class In>
__device__ __forceinline__ float maximum_of_block(const u32 (&words)[WORDS<In>]) {
    u32 high = words[0];
#pragma unroll
    for (int w = 1; w < WORDS<In>; ++w) high = InWords<IN>::larger(high, words[w]);
    return contract::maximum_of_lanes<GROUP>(InWords<IN>::largest(high));
}

// Extremes of this thread's entries, and of their blocks.
template <class In>
struct Extremes {
    float m[KEPT_PASSES];               // maxima of blocks
    float largest = -INF, least = INF;  // of the blocks, and of the entries

    template <class Logits>
    __device__ __forceinline__ void find(const Row& row, const Logits& logits) {
        u32 low = word_of<In>(INF);
        row.each_pass([&](int pass) {
            u32 words[WORDS<In>];
            logits.words(pass, words);
            m[pass] = maximum_of_block<In>(words);
            largest = contract::maximum(largest, m[pass]);
            if (row.whole(pass)) {
#pragma unroll
                for (int w = 0; w < WORDS<In>; ++w) low = InWords<IN>::smaller(low, words[w]);
            } else {
                float z[OWN];
                widen_words<In>(words, z);
#pragma unroll
                for (int i = 0; i < OWN; ++i)
                    if (row.inside(pass, i)) least = contract::minimum(least, z[i]);
            }
        });
        least = contract::minimum(least, InWords<IN>::least(low));
    }
};

// A row without entries far below its maximum.
template <class In, class Out, class Logits>
struct NearRow {
    static constexpr bool NARROW = sizeof(typename Out::Stored) == 2;

    const Row& row;
    const Logits& logits;
    const Extremes<In>& found;
    const float shift;
    float e[NARROW ? KEPT_PASSES : 1][OWN], weights[KEPT_PASSES];  // e^(z - m) and e^(m - R)

    // This thread's chain.
    template <bool KEEP>
    __device__ __forceinline__ float chain() {
        float chain = 0.0f;
        row.each_pass([&](int pass) {
            float z[OWN];
            logits(pass, z);
            const float m = found.m[pass];
#pragma unroll
            for (int i = 0; i < OWN; ++i) z[i] = contract::exp_near(__fsub_rn(z[i], m));
            row.mask(pass, z);
            if constexpr (KEEP)
#pragma unroll
                for (int i = 0; i < OWN; ++i) e[pass][i] = z[i];
            const float block = row.block_sum(z);
            weights[pass] = contract::exp(__fsub_rn(m, shift));  // +0 for a block beyond the row
            if (row.keeps(pass)) chain = __fmaf_rn(block, weights[pass], chain);
        });
        return chain;
    }

    __device__ __forceinline__ void store_wide(typename Out::Stored* out, const Divisor& over_total) {
        store_row<Out>(row, out, [&](int pass, float (&y)[OWN]) {
            logits(pass, y);
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                y[i] = over_total.of_large(contract::exp_near(__fsub_rn(y[i], shift)));
        });
    }

    // The interval: with u = 2^-24 and D = R - z, an exponential has an error of at most 1.8 u, the subtractions
    // before them D u in the contract and D u here, and each of the six other roundings one of u. Together these
    // are less than (2 D + 13) u.
    __device__ __forceinline__ void store_narrow(const typename In::Stored* x, typename Out::Stored* out,
                                                 const Divisor& over_total) {
        const float margin = __fmul_rn(__fadd_rn(__fsub_rn(shift, found.least), 8.0f), 0x1p-23f);
        const float below = __fmul_rn(over_total.reciprocal, __fsub_rn(1.0f, margin));
        const float above = __fmul_rn(over_total.reciprocal, __fadd_rn(1.0f, margin));
        row.each_pass([&](int pass) {
            const float low = __fmul_rn(weights[pass], below), high = __fmul_rn(weights[pass], above);
            u32 words[OWN / 2], others[OWN / 2], differ = 0;
#pragma unroll
            for (int i = 0; i < OWN / 2; ++i) {
                const float first = e[pass][2 * i], second = e[pass][2 * i + 1];
                words[i] = Out::pack(__fmul_rn(first, low), __fmul_rn(second, low));
                others[i] = Out::pack(__fmul_rn(first, high), __fmul_rn(second, high));
                differ |= words[i] ^ others[i];
            }
            if (differ != 0) {
                u32 open = 0;
#pragma unroll
                for (int i = 0; i < OWN / 2; ++i) open |= words[i] != others[i] ? 1u << i : 0u;
#pragma unroll 1
                for (; open != 0; open &= open - 1) {
                    const int pair = __ffs(open) - 1;
                    const typename In::Stored* at = x + row.first + row.behind(pass, 2 * pair);
                    float y[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        // Beyond a row that is not aligned e is +0, and so are both ends.
                        const float z = row.inside(pass, 2 * pair + i) ? In::widen(at[i]) : -INF;
                        y[i] = over_total.of_large(contract::exp(__fsub_rn(z, shift)));
                    }
                    const u32 right = Out::pack(y[0], y[1]);
#pragma unroll
                    for (int i = 0; i < OWN / 2; ++i) words[i] = i == pair ? right : words[i];
                }
            }
            store_pass<Out>(row, pass, out, words);
        });
    }
};

// As specified, for any entries: this thread's chain.
template <class In, bool UNROLLED, class Logits>
__device__ __forceinline__ float chain_of_any(const Row& row, const Logits& logits, float shift) {
    float chain = 0.0f;
    row.each_pass<UNROLLED>([&](int pass) {
        u32 words[WORDS<In>];
        float z[OWN];
        logits.words(pass, words);
        widen_words<In>(words, z);
        const float m = maximum_of_block<In>(words), beside = contract::shift_of(m);
#pragma unroll
        for (int i = 0; i < OWN; ++i) z[i] = contract::exp(__fsub_rn(z[i], beside));
        const float block = row.block_sum(z);
        if (row.keeps(pass)) chain = __fmaf_rn(block, contract::exp(__fsub_rn(m, shift)), chain);
    });
    return chain;
}

template <class Out, bool LOGARITHM, bool UNROLLED, class Logits>
__device__ __forceinline__ void store_any(const Row& row, const Logits& logits, typename Out::Stored* out,
                                          float shift, float log_sum, const Divisor& over_total) {
    store_row<Out, UNROLLED>(row, out, [&](int pass, float (&y)[OWN]) {
        logits(pass, y);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            y[i] = __fsub_rn(y[i], shift);
            y[i] = LOGARITHM ? __fsub_rn(y[i], log_sum) : contract::exp(y[i]);
        }
        if (!LOGARITHM) over_total.divide(y);
    });
}

template <class In, class Out, bool LOGARITHM>
__device__ __forceinline__ void softmax_of_rows(const SoftmaxParams& p) {
    using X = const typename In::Stored;
    __shared__ Told told[ROWS];
    Row row(told, p.n);
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (row.row >= p.rows) return;
    X* matrix = static_cast<X*>(p.x);
    Matrix<In, WORDS<In>> logits(matrix, p.x_row, row, -INF);
    const auto body = [&] {
        X* x = matrix + row.row * p.x_row;
        const auto out = static_cast<typename Out::Stored*>(p.out) + row.row * p.n;
        Entries<In, 65> again(matrix, p.x_row, row, -INF);  // so many words are not held
        again.begin(0);
        if constexpr (PASSES == 0) {
            float largest = -INF;
            row.each_pass([&](int pass) {
                u32 words[WORDS<In>];
                again.words(pass, words);
                largest = contract::maximum(largest, maximum_of_block<In>(words));
            });
            const float shift = contract::shift_of(row.maximum_of_warps(largest));
            const float total = row.sum_of_chains(chain_of_any<In, false>(row, again, shift));
            const float log_sum = LOGARITHM ? contract::log(total) : 0.0f;
            store_any<Out, LOGARITHM, false>(row, again, out, shift, log_sum, Divisor(total));
        } else {
            constexpr bool NARROW = !LOGARITHM && sizeof(typename Out::Stored) == 2;
            Extremes<In> found;
            found.find(row, logits);
            const float shift = contract::shift_of(row.maximum_of_warps(found.largest));
            const bool near = __all_sync(ALL, __fsub_rn(shift, found.least) <= NEAR);
            NearRow<In, Out, decltype(logits)> softmax{row, logits, found, shift};
            float chain;
            if (near)
                chain = softmax.template chain<NARROW>();
            else
                chain = chain_of_any<In, false>(row, again, shift);
            const float total = row.sum_of_chains(chain), log_sum = LOGARITHM ? contract::log(total) : 0.0f;
            const Divisor over_total(total);
            if constexpr (LOGARITHM)
                store_any<Out, true, true>(row, logits, out, shift, log_sum, over_total);
            else if (!near)
                store_any<Out, false, false>(row, again, out, shift, log_sum, over_total);
            else if constexpr (NARROW)
                softmax.store_narrow(x, out, over_total);
            else
                softmax.store_wide(out, over_total);
        }
    };
    each_row(row, p.rows, body, logits);
}

// RMS norm of the sum of two matrices, with the roundings of eager models: docs/contract.md, "Fused layers".
//
// Macros
//   IN, OUT, PARAM           types of rows and their sum, of results and of the weight: F32, BF16 or F16
//   WARPS, PASSES, VECTOR    how threads share rows: row.cuh
//   STAGES, BLOCKS           how they read them: row_matrix.cuh; STAGES is 0
//   LANES                    how many lanes share a row: row_lanes.cuh

#include "row_lanes.cuh"

struct Params {
    const In::Stored *x, *residual;  // no residual: null
    const Param::Stored* weight;     // null: there is none
    Out::Stored* out;
    In::Stored* sum;  // of x and residual
    Steps x_row, residual_row, out_row, sum_row;
    i64 rows, inner, n;
    float eps, offset;  // offset: added to the weight
    int once;           // 0: the normalised row is rounded, too, before the product with the weight
};

// The bits of a row that the kernel reduces, as it was rounded. They stay in registers if they fit in 64 words;
// else they are computed again for each use.
template <bool ADDS>
struct Sums {
    static constexpr bool HELD = PASSES > 0 && PASSES* IN_WORDS <= 64;

    Entries<In, 65> x, residual;  // so many words are not held
    u32 held[HELD ? KEPT_PASSES : 1][IN_WORDS];

    __device__ __forceinline__ Sums(const In::Stored* x, const In::Stored* residual, const Row& row)
        : x(x, 0, row), residual(residual, 0, row) {
        this->x.begin(0);
        this->residual.begin(0);
        if constexpr (HELD) row.each_pass([&](int pass) { compute(pass, held[pass]); });
    }

    __device__ __forceinline__ void compute(int pass, u32 (&to)[IN_WORDS]) const {
        x.load(pass, to);
        if constexpr (ADDS) {
            float a[OWN], b[OWN];
            widen_words<In>(to, a);
            residual(pass, b);
#pragma unroll
            for (int i = 0; i < OWN; ++i) a[i] = __fadd_rn(a[i], b[i]);
            narrow_words<In>(a, to);
        }
    }

    __device__ __forceinline__ void words(int pass, u32 (&to)[IN_WORDS]) const {
        if constexpr (HELD) {
#pragma unroll
            for (int w = 0; w < IN_WORDS; ++w) to[w] = held[pass][w];
        } else {
            compute(pass, to);
        }
    }
};

// Each thread writes what it, or its warp, has read before: results may take the place of operands.
template <bool ADDS>
__device__ __forceinline__ void norm_row(const Params& p, Row& row, bool stores) {
    const Spot spot(row, p.rows, p.inner);
    const Vector<1> weight(p.weight, row, 1.0f);
    const Sums<ADDS> sums(spot.in(p.x, p.x_row), ADDS ? spot.in(p.residual, p.residual_row) : nullptr, row);
    const float squares = sum_of_row(row, [&](int pass, float (&s)[OWN]) {
        u32 words[IN_WORDS];
        sums.words(pass, words);
        widen_words<In>(words, s);
#pragma unroll
        for (int i = 0; i < OWN; ++i) s[i] = __fmul_rn(s[i], s[i]);
    });
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(row.over_length(squares), p.eps)));
    if (!stores) return;
    Out::Stored* const out = spot.in(p.out, p.out_row);
    In::Stored* const sum = ADDS ? spot.in(p.sum, p.sum_row) : nullptr;
    row.each_pass([&](int pass) {
        u32 words[IN_WORDS], results[WORDS<Out>];
        sums.words(pass, words);
        float y[OWN], w[OWN];
        weight(pass, w);
        widen_words<In>(words, y);
        if (ADDS) store_pass<In>(row, pass, sum, words);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            y[i] = __fmul_rn(y[i], scale);
            if (!p.once) y[i] = In::widen(In::narrow(y[i]));
            if (p.weight) y[i] = __fmul_rn(y[i], p.offset == 0.0f ? w[i] : __fadd_rn(p.offset, w[i]));
        }
        narrow_words<Out>(y, results);
        store_pass<Out>(row, pass, out, results);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) add_rms_norm(const __grid_constant__ Params p) {
    __shared__ Told told[ROWS];
    Row row(told, p.n);
    const bool stores = find_row(row, p.rows);
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (LANES == 0 && row.row >= p.rows) return;
    if (p.residual)
        norm_row<true>(p, row, stores);
    else
        norm_row<false>(p, row, stores);
}

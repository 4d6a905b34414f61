// Rows over their 2-norms, and the gradients: docs/contract.md, "Recurrent layers".
//
// Macros
//   IN, OUT                  type of rows, results and gradients: F32, BF16 or F16; PARAM is the same
//   WARPS, PASSES, VECTOR    how threads share rows: row.cuh
//   STAGES, BLOCKS           how they read them: row_matrix.cuh; STAGES is 0
//   LANES                    how many lanes share a row: row_lanes.cuh

#include "row_lanes.cuh"

struct Params {
    const In::Stored *x, *grad;  // grad: of the result; for l2norm null
    Out::Stored* out;            // contiguous
    Steps x_row, grad_row;
    i64 rows, inner, n;
    float eps;
};

template <bool GRADIENT>
__device__ __forceinline__ void norm_row(const Params& p, Row& row, bool stores) {
    constexpr int HELD = (GRADIENT ? 2 : 1) * IN_WORDS;
    const Spot spot(row, p.rows, p.inner);
    Entries<In, HELD> entries(spot.in(p.x, p.x_row), 0, row), grads(spot.in(p.grad, p.grad_row), 0, row);
    entries.begin(0);
    if (GRADIENT) grads.begin(0);
    const float squares = sum_of_row(row, [&](int pass, float (&x)[OWN]) {
        entries(pass, x);
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = __fmul_rn(x[i], x[i]);
    });
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(squares, p.eps)));
    float along = 0.0f;
    if constexpr (GRADIENT)
        along = sum_of_row(row, [&](int pass, float (&g)[OWN]) {
            float x[OWN];
            entries(pass, x);
            grads(pass, g);
#pragma unroll
            for (int i = 0; i < OWN; ++i) g[i] = __fmul_rn(g[i], __fmul_rn(x[i], scale));
        });
    if (!stores) return;
    row.each_pass([&](int pass) {
        float y[OWN], g[OWN];
        u32 words[WORDS<Out>];
        entries(pass, y);
        if (GRADIENT) grads(pass, g);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            y[i] = __fmul_rn(y[i], scale);
            if (GRADIENT) y[i] = __fmul_rn(scale, __fsub_rn(g[i], __fmul_rn(y[i], along)));
        }
        narrow_words<Out>(y, words);
        store_pass<Out>(row, pass, p.out + row.row * p.n, words);
    });
}

template <bool GRADIENT>
__device__ __forceinline__ void norm_rows(const Params& p) {
    __shared__ Told told[ROWS];
    Row row(told, p.n);
    const bool stores = find_row(row, p.rows);
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (LANES > 0 || row.row < p.rows) norm_row<GRADIENT>(p, row, stores);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) l2norm(const __grid_constant__ Params p) {
    norm_rows<false>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    l2norm_backward(const __grid_constant__ Params p) {
    norm_rows<true>(p);
}

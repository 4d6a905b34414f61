// Rows over their 2-norms, and the gradients: docs/contract.md, "Delta rules".
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

template <int count>
__device__ __forceinline__ float inverse_norm(const Entries<In, count>& entries, Row& row, float eps) {
    const float squares = sum_of_row(row, [&](int pass, float (&x)[OWN]) {
        entries(pass, x);
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = __fmul_rn(x[i], x[i]);
    });
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(squares, eps)));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) l2norm(const __grid_constant__ Params p) {
    __shared__ Told told[ROWS];
    Row row(told, p.n);
    const bool stores = find_row(row, p.rows);
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (LANES == 0 && row.row >= p.rows) return;
    const Spot spot(row, p.rows, p.inner);
    Entries<In, IN_WORDS> entries(spot.in(p.x, p.x_row), 0, row);
    entries.begin(0);
    const float scale = inverse_norm(entries, row, p.eps);
    if (!stores) return;
    row.each_pass([&](int pass) {
        float x[OWN];
        u32 words[WORDS<Out>];
        entries(pass, x);
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = __fmul_rn(x[i], scale);
        narrow_words<Out>(x, words);
        store_pass<Out>(row, pass, p.out + row.row * p.n, words);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    l2norm_backward(const __grid_constant__ Params p) {
    __shared__ Told told[ROWS];
    Row row(told, p.n);
    const bool stores = find_row(row, p.rows);
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (LANES == 0 && row.row >= p.rows) return;
    const Spot spot(row, p.rows, p.inner);
    Entries<In, 2 * IN_WORDS> entries(spot.in(p.x, p.x_row), 0, row);
    Entries<In, 2 * IN_WORDS> grads(spot.in(p.grad, p.grad_row), 0, row);
    entries.begin(0);
    grads.begin(0);
    const float scale = inverse_norm(entries, row, p.eps);
    const float along = sum_of_row(row, [&](int pass, float (&g)[OWN]) {
        float x[OWN];
        entries(pass, x);
        grads(pass, g);
#pragma unroll
        for (int i = 0; i < OWN; ++i) g[i] = __fmul_rn(g[i], __fmul_rn(x[i], scale));
    });
    if (!stores) return;
    row.each_pass([&](int pass) {
        float x[OWN], g[OWN];
        u32 words[WORDS<Out>];
        entries(pass, x);
        grads(pass, g);
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            g[i] = __fmul_rn(scale, __fsub_rn(g[i], __fmul_rn(__fmul_rn(x[i], scale), along)));
        narrow_words<Out>(g, words);
        store_pass<Out>(row, pass, p.out + row.row * p.n, words);
    });
}

// Gradients of an RMS norm, with the roundings of eager models: docs/contract.md, "Fused layers".
//
// Macros
//   IN, OUT, PARAM           types of rows and their gradients, of the result's gradients, and of the weight: F32,
//                            BF16 or F16
//   WARPS, PASSES, VECTOR    how threads share rows: row.cuh
//   STAGES, BLOCKS           how they read them: row_matrix.cuh; STAGES is 0

#include "norm.cuh"

struct Params {
    const In::Stored* x;          // the sum with the residual
    const Out::Stored* grad;      // of the result
    const In::Stored* grad_sum;   // of the sum; null: there is none
    const Param::Stored* weight;  // null: there is none
    In::Stored* out;
    void* terms;  // of the weight's gradient, in f32 or the type of `grad`; null: none are asked for
    i64 x_row, grad_row, grad_sum_row, rows, n;
    float eps, offset, share;  // offset: added to the weight; share: 1 / n
    int once;                  // 0: the normalised row is rounded, too, before the product with the weight
};

constexpr int ALL_WORDS = IN_WORDS + WORDS<Out>;

__device__ __forceinline__ float rounded(float x) { return In::widen(In::narrow(x)); }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    add_rms_norm_backward(const __grid_constant__ Params p) {
    __shared__ Told told[ROWS];
    Row row(told, p.n);
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (row.row >= p.rows) return;
    Entries<In, ALL_WORDS> entries(p.x, p.x_row, row);
    Entries<Out, ALL_WORDS> grads(p.grad, p.grad_row, row);
    Entries<In, 65> more(p.grad_sum ? p.grad_sum : p.x, p.grad_sum_row, row);  // so many words are not held
    const Vector<1> weight(p.weight, row, 1.0f);
    entries.begin(0);
    grads.begin(0);
    more.begin(0);

    const float squares = row.sum([&](int pass, float (&x)[OWN]) {
        entries(pass, x);
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = __fmul_rn(x[i], x[i]);
    });
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(row.over_length(squares), p.eps)));
    // The gradient of y, the normalised row.
    const auto of_y = [&](int pass, float (&g)[OWN]) {
        grads(pass, g);
        if (!p.weight) return;
        float w[OWN];
        weight(pass, w);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            g[i] = __fmul_rn(g[i], p.offset == 0.0f ? w[i] : __fadd_rn(p.offset, w[i]));
            if (!p.once) g[i] = rounded(g[i]);
        }
    };
    const float along = row.sum([&](int pass, float (&g)[OWN]) {
        float x[OWN];
        of_y(pass, g);
        entries(pass, x);
#pragma unroll
        for (int i = 0; i < OWN; ++i) g[i] = __fmul_rn(g[i], x[i]);
    });
    const float cube = __fmul_rn(__fmul_rn(scale, scale), scale);
    const float of_squares = __fmul_rn(__fmul_rn(__fmul_rn(-0.5f, along), cube), p.share);

    row.each_pass([&](int pass) {
        float x[OWN], g[OWN];
        u32 words[IN_WORDS];
        entries(pass, x);
        if (p.terms) {
            grads(pass, g);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const float y = __fmul_rn(x[i], scale);
                g[i] = __fmul_rn(g[i], p.once ? y : rounded(y));
            }
            if (p.once) {
                u32 terms[OWN];
                narrow_words<Element<F32>>(g, terms);
                store_pass<Element<F32>>(row, pass, static_cast<float*>(p.terms) + row.row * p.n, terms);
            } else {
                u32 terms[WORDS<Out>];
                narrow_words<Out>(g, terms);
                store_pass<Out>(row, pass, static_cast<Out::Stored*>(p.terms) + row.row * p.n, terms);
            }
        }
        of_y(pass, g);
        float sum[OWN];
        more(pass, sum);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const float first = __fmul_rn(g[i], scale), second = __fmul_rn(of_squares, __fmul_rn(2.0f, x[i]));
            if (!p.grad_sum)
                g[i] = __fadd_rn(first, second);
            else if (IN == F32)  // autograd adds all three where rows were not widened
                g[i] = __fadd_rn(__fadd_rn(sum[i], first), second);
            else
                g[i] = __fadd_rn(sum[i], rounded(__fadd_rn(first, second)));
        }
        narrow_words<In>(g, words);
        store_pass<In>(row, pass, p.out + row.row * p.n, words);
    });
}

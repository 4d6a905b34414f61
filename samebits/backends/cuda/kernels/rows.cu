// Reductions of rows, and what follows from them: sums, softmax, norms and their gradients. Everything is in
// f32 and in the order of docs/contract.md, "Row reductions".
//
// Macros
//   IN, OUT, PARAM           types of rows, results and weights: F32, BF16 or F16
//   WARPS, PASSES, VECTOR    how threads share rows: row.cuh
//   STAGES, BLOCKS           how they read them: row_matrix.cuh

#include "norm.cuh"
#include "softmax.cuh"

#define ROW_KERNEL extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)

enum { SUM, MEAN, NORM };  // what becomes of x: the last is the square root of the sum of squares

struct SumParams {
    const In::Stored* x;
    Out::Stored* out;
    i64 x_row, rows, n;
    int what;
};

__device__ __forceinline__ void square(float (&x)[OWN]) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] = __fmul_rn(x[i], x[i]);
}

__device__ __forceinline__ Out::Stored result_of(float sum, int what, i64 n) {
    if (what == MEAN) sum = __fdiv_rn(sum, static_cast<float>(n));
    if (what == NORM) sum = __fsqrt_rn(sum);
    return Out::narrow(contract::canonical(sum));
}

ROW_KERNEL row_sum(const __grid_constant__ SumParams p) {
    __shared__ Told told[ROWS];
    Row row(told, p.n);
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (row.row >= p.rows) return;
    Matrix<In, IN_WORDS> x(p.x, p.x_row, row);
    each_row(
        row, p.rows,
        [&] {
            const float sum = row.sum([&](int pass, float (&terms)[OWN]) {
                x(pass, terms);
                if (p.what == NORM) square(terms);
            });
            if (row.leads()) p.out[row.row] = result_of(sum, p.what, p.n);
        },
        x);
}

ROW_KERNEL softmax(const __grid_constant__ SoftmaxParams p) { softmax_of_rows<In, Out, false>(p); }

ROW_KERNEL log_softmax(const __grid_constant__ SoftmaxParams p) { softmax_of_rows<In, Out, true>(p); }

struct SoftmaxGradParams {
    const In::Stored* grad;
    const Param::Stored* y;  // the result
    Out::Stored* out;
    i64 rows, n;
};

constexpr int GRAD_AND_RESULT = IN_WORDS + WORDS<Param>;

ROW_KERNEL softmax_backward(const __grid_constant__ SoftmaxGradParams p) {
    __shared__ Told told[ROWS];
    Row row(told, p.n);
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (row.row >= p.rows) return;
    Matrix<In, GRAD_AND_RESULT> grads(p.grad, p.n, row);
    Matrix<Param, GRAD_AND_RESULT> probabilities(p.y, p.n, row, 0.0f, 1);
    const auto body = [&] {
        const float total = row.sum([&](int pass, float (&x)[OWN]) {
            float probability[OWN];
            grads(pass, x);
            probabilities(pass, probability);
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                x[i] = probability[i] == 0.0f ? 0.0f : __fmul_rn(probability[i], x[i]);
        });
        store_row<Out>(row, p.out + row.row * p.n, [&](int pass, float (&x)[OWN]) {
            float probability[OWN];
            grads(pass, x);
            probabilities(pass, probability);
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                x[i] = probability[i] == 0.0f ? 0.0f : __fmul_rn(probability[i], __fsub_rn(x[i], total));
        });
    };
    each_row(row, p.rows, body, grads, probabilities);
}

ROW_KERNEL log_softmax_backward(const __grid_constant__ SoftmaxGradParams p) {
    __shared__ Told told[ROWS];
    Row row(told, p.n);
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (row.row >= p.rows) return;
    Matrix<In, GRAD_AND_RESULT> grads(p.grad, p.n, row);
    Matrix<Param, GRAD_AND_RESULT> logarithms(p.y, p.n, row, 0.0f, 1);
    const auto body = [&] {
        const float total = row.sum(grads);
        store_row<Out>(row, p.out + row.row * p.n, [&](int pass, float (&x)[OWN]) {
            float y[OWN];
            grads(pass, x);
            logarithms(pass, y);
#pragma unroll
            for (int i = 0; i < OWN; ++i) x[i] = __fmaf_rn(-contract::exp(y[i]), total, x[i]);
        });
    };
    each_row(row, p.rows, body, grads, logarithms);
}

struct NormParams {
    const In::Stored* x;
    const Param::Stored *weight, *bias;  // either may be null
    Out::Stored* out;
    float *means, *scales;  // an RMS norm has no means
    i64 x_row, rows, n;
    float eps;
};

template <bool CENTRED, bool BIASED>
__device__ __forceinline__ void norm_rows(const NormParams& p, Row& row) {
    Matrix<In, IN_WORDS> entries(p.x, p.x_row, row);
    const Vector<1 + BIASED> weight(p.weight, row, 1.0f), bias(BIASED ? p.bias : nullptr, row, -0.0f);
    const auto body = [&] {
        const float mean = CENTRED ? row.over_length(row.sum(entries)) : 0.0f;
        const auto centred = [&](int pass, float (&x)[OWN]) {
            entries(pass, x);
            if (CENTRED)
#pragma unroll
                for (int i = 0; i < OWN; ++i) x[i] = __fsub_rn(x[i], mean);
        };
        const float squares = row.sum([&](int pass, float (&x)[OWN]) {
            centred(pass, x);
            if (CENTRED) row.mask(pass, x);
            square(x);
        });
        const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(row.over_length(squares), p.eps)));
        store_row<Out>(row, p.out + row.row * p.n, [&](int pass, float (&y)[OWN]) {
            float w[OWN], b[OWN];
            weight(pass, w);
            if (BIASED) bias(pass, b);
            centred(pass, y);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                y[i] = __fmul_rn(y[i], scale);
                y[i] = BIASED ? __fmaf_rn(y[i], w[i], b[i]) : __fmul_rn(y[i], w[i]);
            }
        });
        if (row.leads()) {
            if (CENTRED) p.means[row.row] = contract::canonical(mean);
            p.scales[row.row] = contract::canonical(scale);
        }
    };
    each_row(row, p.rows, body, entries);
}

ROW_KERNEL rms_norm(const __grid_constant__ NormParams p) {
    __shared__ Told told[ROWS];
    Row row(told, p.n);
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (row.row >= p.rows) return;
    if (p.bias)
        norm_rows<false, true>(p, row);
    else
        norm_rows<false, false>(p, row);
}

ROW_KERNEL layer_norm(const __grid_constant__ NormParams p) {
    __shared__ Told told[ROWS];
    Row row(told, p.n);
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (row.row < p.rows) norm_rows<true, true>(p, row);
}

ROW_KERNEL norm_backward(const __grid_constant__ NormGradParams p) {
    __shared__ Told told[ROWS];
    Row row(told, p.n);
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (row.row >= p.rows) return;
    if (p.means)
        norm_backward_rows<true>(p, row);
    else
        norm_backward_rows<false>(p, row);
}

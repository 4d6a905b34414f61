// Gradients of an RMS norm and rotary positions of queries and keys: docs/contract.md, "Fused layers". Macros: those of
// norm_rotary.cuh.

#include "norm_rotary.cuh"

struct Params {
    const In::Stored *grad[2], *x[2];  // of queries and keys: of the results, and what was normalised
    const Param::Stored* weight[2];    // null: there is none
    In::Stored* to[2];
    void* terms
        [2];  // of the weights' gradients, in f32 if `once`, else in the type of rows; null: none are asked for
    HeadSteps grad_step[2];
    Heads of;
    float share;  // 1 / n
};

extern "C" __global__ void __launch_bounds__(THREADS) norm_rotary_backward(const __grid_constant__ Params p) {
    __shared__ Told told[ROWS];
    Row row(told, p.of.n);
    const Head head(p.of, row);
    wait_for_kernel_before();
    let_kernel_behind_start();
    const int which = head.which;
    const In::Stored* from = head.at(p.x[which], p.of.x_step[which]);
    const In::Stored* grads = head.at(p.grad[which], p.grad_step[which]);
    const Param::Stored* weight = p.weight[which];
    const Turn turn(p.of, head);

    // Gradients g of what the norm gave, and from there of y, the normalised row.
    float x[RUNS][RUN], g[RUNS][RUN], of_y[RUNS][RUN], terms[RUNS][RUN];
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
#pragma unroll
        for (int j = 0; j < RUN; ++j) x[i][j] = g[i][j] = of_y[i][j] = 0.0f;
        const int entry = row.first + row.behind(0, i * RUN);
        if (row.inside(0, i * RUN)) {
            load_values<In>(from + entry, x[i]);
            load_values<In>(grads + entry, g[i]);
            if (turn.turns(entry)) {
                float with[RUN];
                if constexpr (LAYOUT == HALVES) load_values<In>(grads + turn.other(entry), with);
                turn(entry, g[i], with);
            } else if (ADDS_ZERO) {
#pragma unroll
                for (int j = 0; j < RUN; ++j) g[i][j] = __fadd_rn(g[i][j], 0.0f);
            }
            float w[RUN];
            if (weight) load_weight(p.of, weight, entry, w);
#pragma unroll
            for (int j = 0; j < RUN; ++j) {
                g[i][j] = rounded_to<In>(g[i][j]);
                of_y[i][j] = weight ? __fmul_rn(g[i][j], w[j]) : g[i][j];
                if (!p.of.once) of_y[i][j] = rounded_to<In>(of_y[i][j]);
            }
        }
#pragma unroll
        for (int j = 0; j < RUN; ++j) terms[i][j] = __fmul_rn(x[i][j], x[i][j]);
    }
    const float scale = inverse_root(p.of, row, sum_of_head(row, terms));
#pragma unroll
    for (int i = 0; i < RUNS; ++i)
#pragma unroll
        for (int j = 0; j < RUN; ++j) terms[i][j] = __fmul_rn(of_y[i][j], x[i][j]);
    const float along = sum_of_head(row, terms);
    if (!head.there) return;
    const float cube = __fmul_rn(__fmul_rn(scale, scale), scale);
    const float of_squares = __fmul_rn(__fmul_rn(__fmul_rn(-0.5f, along), cube), p.share);

    In::Stored* to = head.at(p.to[which], p.of.to_step[which]);
    const i64 first = (head.place * p.of.heads[which] + head.head) * p.of.n;  // of the row's terms
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        const int entry = row.first + row.behind(0, i * RUN);
        if (!row.inside(0, i * RUN)) continue;
        if (p.terms[which]) {
#pragma unroll
            for (int j = 0; j < RUN; ++j) {
                const float y = __fmul_rn(x[i][j], scale);
                g[i][j] = __fmul_rn(g[i][j], p.of.once ? y : rounded_to<In>(y));
            }
            if (p.of.once)
                store_values<Element<F32>>(static_cast<float*>(p.terms[which]) + first + entry, g[i]);
            else
                store_values<In>(static_cast<In::Stored*>(p.terms[which]) + first + entry, g[i]);
        }
#pragma unroll
        for (int j = 0; j < RUN; ++j)
            x[i][j] =
                __fadd_rn(__fmul_rn(of_y[i][j], scale), __fmul_rn(of_squares, __fmul_rn(2.0f, x[i][j])));
        store_values<In>(to + entry, x[i]);
    }
}

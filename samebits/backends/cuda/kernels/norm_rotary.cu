// RMS norm and rotary positions of queries and keys: docs/contract.md, "Fused layers". Macros: those of norm_rotary.cuh;
// GRADIENTS is NONE.

#include "norm_rotary.cuh"

struct Params {
    const In::Stored* x[2];          // queries and keys
    const Param::Stored* weight[2];  // null: there is none
    In::Stored* to[2];
    Heads of;
};

// All of a head is read before any of it is written: results may take the place of operands.
extern "C" __global__ void __launch_bounds__(THREADS) norm_rotary(const __grid_constant__ Params p) {
    __shared__ Told told[ROWS];
    Row row(told, p.of.n);
    const Head head(p.of, row);
    wait_for_kernel_before();
    let_kernel_behind_start();
    const In::Stored* from = head.at(p.x[head.which], p.of.x_step[head.which]);
    const Param::Stored* weight = p.weight[head.which];
    float x[RUNS][RUN], squares[RUNS][RUN];
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
#pragma unroll
        for (int j = 0; j < RUN; ++j) x[i][j] = 0.0f;
        if (row.inside(0, i * RUN)) load_values<In>(from + row.first + row.behind(0, i * RUN), x[i]);
#pragma unroll
        for (int j = 0; j < RUN; ++j) squares[i][j] = __fmul_rn(x[i][j], x[i][j]);
    }
    const float scale = inverse_root(p.of, row, sum_of_head(row, squares));
    const auto normalise = [&](int entry, float (&y)[RUN]) {
        float w[RUN];
        if (weight) load_weight(p.of, weight, entry, w);
#pragma unroll
        for (int j = 0; j < RUN; ++j) {
            y[j] = __fmul_rn(y[j], scale);
            if (!p.of.once) y[j] = rounded_to<In>(y[j]);
            y[j] = rounded_to<In>(weight ? __fmul_rn(y[j], w[j]) : y[j]);
        }
    };
    const Turn turn(p.of, head);
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        const int entry = row.first + row.behind(0, i * RUN);
        if (!row.inside(0, i * RUN)) continue;
        normalise(entry, x[i]);
        if (!turn.turns(entry)) continue;
        float with[RUN];
        if constexpr (LAYOUT == HALVES) {
            load_values<In>(from + turn.other(entry), with);
            normalise(turn.other(entry), with);
        }
        turn(entry, x[i], with);
    }
    __syncwarp();
    In::Stored* to = head.at(p.to[head.which], p.of.to_step[head.which]);
#pragma unroll
    for (int i = 0; i < RUNS; ++i)
        if (head.there && row.inside(0, i * RUN))
            store_values<In>(to + row.first + row.behind(0, i * RUN), x[i]);
}

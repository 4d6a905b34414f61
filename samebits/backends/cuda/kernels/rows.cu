// Reductions of rows, and what follows from them: sums, softmax, norms and their gradients. Everything is in
// f32 and in the order of docs/contract.md, "Row reductions".
//
// A block of 256 threads takes ROWS rows; WARPS warps share one. Block b of 128 entries is the part of warp b
// % WARPS, and lane l of the warp that has the blocks of chain l keeps that chain. Where warps share a row,
// shared memory carries its chains and maxima from warp to warp.
//
// Macros
//   IN, OUT, PARAM   types of rows, results and weights: F32, BF16 or F16
//   WARPS            warps that share a row: 1, 2, 4 or 8

#include "convert.cuh"
#include "functions.cuh"

using contract::VOCAB_BLOCK;

constexpr int THREADS = 256;
constexpr int ROW_THREADS = 32 * WARPS;
constexpr int ROWS = THREADS / ROW_THREADS;  // of a block

using In = Element<IN>;
using Out = Element<OUT>;
using Param = Element<PARAM>;

constexpr int LANE =
    VOCAB_BLOCK / 32;  // entries of a block that a lane has: 32 apart, so that halves meet in it

// What kernels have in shared memory: a value of every chain of every row.
constexpr int SHARED_FLOATS = ROWS * contract::CHAINS;

// The threads that share a row. Those without a row leave: whole warps, or where warps share a row, the whole
// block. Block b of a row is the part of warp b % WARPS, and chain l is kept by lane l of the warp that has
// its blocks.
struct Row {
    i64 row;
    int warp, lane, thread;
    float* shared;  // CHAINS values of this row

    __device__ Row(float* memory)
        : row(i64(blockIdx.x) * ROWS + threadIdx.x / ROW_THREADS), warp(threadIdx.x / 32 % WARPS),
          lane(threadIdx.x % 32), thread(threadIdx.x % ROW_THREADS),
          shared(memory + threadIdx.x / ROW_THREADS * contract::CHAINS) {
        static_assert(contract::CHAINS == 32 && 32 % WARPS == 0);
    }

    // Every lane gets what lane l of the warp that keeps chain l has.
    __device__ float gather(float chain) {
        if (WARPS == 1) return chain;
        if (lane % WARPS == warp) shared[lane] = chain;
        __syncthreads();
        const float all = shared[lane];
        __syncthreads();
        return all;
    }

    // The sum of term(0), ..., term(n - 1); every thread gets it.
    template <class Term>
    __device__ float sum(i64 n, Term term) {
        float chain = 0.0f;
        for (i64 b = warp; b * VOCAB_BLOCK < n; b += WARPS) {
            float x[LANE];
#pragma unroll
            for (int i = 0; i < LANE; ++i) {
                const i64 v = b * VOCAB_BLOCK + lane + 32 * i;
                x[i] = v < n ? term(v) : 0.0f;
            }
            const float block = contract::sum_by_halves<32, 1>(x);
            if (lane == int(b % 32)) chain = __fadd_rn(chain, block);
        }
        return contract::sum_of_lanes(gather(chain));
    }

    // R and S of logits: the shift of their maximum, and the sum of their exponentials.
    template <class Logit>
    __device__ void softmax(i64 n, Logit logit, float& shift, float& total) {
        float largest = -INF;
        for (i64 v = thread; v < n; v += ROW_THREADS) largest = contract::maximum(largest, logit(v));
        largest = contract::maximum_of_lanes(largest);
        if (WARPS > 1) {
            if (lane == 0) shared[warp] = largest;
            __syncthreads();
            largest = contract::maximum_of_lanes(shared[lane % WARPS]);
            __syncthreads();
        }
        shift = contract::shift_of(largest);

        float chain = 0.0f;
        for (i64 b = warp; b * VOCAB_BLOCK < n; b += WARPS) {
            float z[LANE];
#pragma unroll
            for (int i = 0; i < LANE; ++i) {
                const i64 v = b * VOCAB_BLOCK + lane + 32 * i;
                z[i] = v < n ? logit(v) : -INF;
            }
            float m = z[0];
#pragma unroll
            for (int i = 1; i < LANE; ++i) m = contract::maximum(m, z[i]);
            m = contract::maximum_of_lanes(m);
            const float own = contract::shift_of(m);
#pragma unroll
            for (int i = 0; i < LANE; ++i) z[i] = contract::exp(__fsub_rn(z[i], own));
            const float s = contract::sum_by_halves<32, 1>(z);
            if (lane == int(b % 32)) chain = __fmaf_rn(s, contract::exp(__fsub_rn(m, shift)), chain);
        }
        total = contract::sum_of_lanes(gather(chain));
    }

    template <class Value>
    __device__ void store(Out::Stored* out, i64 n, Value value) {
        for (i64 v = thread; v < n; v += ROW_THREADS) out[v] = Out::narrow(contract::canonical(value(v)));
    }
};

struct SumParams {
    const In::Stored* x;
    Out::Stored* out;
    i64 x_row, rows, n;
    int mean;
};

extern "C" __global__ void __launch_bounds__(THREADS) row_sum(const __grid_constant__ SumParams p) {
    __shared__ float memory[SHARED_FLOATS];
    Row row(memory);
    if (row.row >= p.rows) return;
    const In::Stored* x = p.x + row.row * p.x_row;
    float sum = row.sum(p.n, [&](i64 v) { return In::widen(x[v]); });
    if (p.mean) sum = __fdiv_rn(sum, static_cast<float>(p.n));
    if (row.thread == 0) p.out[row.row] = Out::narrow(contract::canonical(sum));
}

struct SoftmaxParams {
    const In::Stored* x;
    Out::Stored* out;
    i64 x_row, rows, n;
};

extern "C" __global__ void __launch_bounds__(THREADS) softmax(const __grid_constant__ SoftmaxParams p) {
    __shared__ float memory[SHARED_FLOATS];
    Row row(memory);
    if (row.row >= p.rows) return;
    const In::Stored* x = p.x + row.row * p.x_row;
    const auto logit = [&](i64 v) { return In::widen(x[v]); };
    float shift, total;
    row.softmax(p.n, logit, shift, total);
    row.store(p.out + row.row * p.n, p.n,
              [&](i64 v) { return __fdiv_rn(contract::exp(__fsub_rn(logit(v), shift)), total); });
}

extern "C" __global__ void __launch_bounds__(THREADS) log_softmax(const __grid_constant__ SoftmaxParams p) {
    __shared__ float memory[SHARED_FLOATS];
    Row row(memory);
    if (row.row >= p.rows) return;
    const In::Stored* x = p.x + row.row * p.x_row;
    const auto logit = [&](i64 v) { return In::widen(x[v]); };
    float shift, total;
    row.softmax(p.n, logit, shift, total);
    const float log_sum = contract::log(total);
    row.store(p.out + row.row * p.n, p.n,
              [&](i64 v) { return __fsub_rn(__fsub_rn(logit(v), shift), log_sum); });
}

struct SoftmaxGradParams {
    const In::Stored* grad;
    const Param::Stored* y;  // the result
    Out::Stored* out;
    i64 rows, n;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_backward(const __grid_constant__ SoftmaxGradParams p) {
    __shared__ float memory[SHARED_FLOATS];
    Row row(memory);
    if (row.row >= p.rows) return;
    const In::Stored* grad = p.grad + row.row * p.n;
    const Param::Stored* y = p.y + row.row * p.n;
    const float total = row.sum(p.n, [&](i64 v) {
        const float probability = Param::widen(y[v]);
        return probability == 0.0f ? 0.0f : __fmul_rn(probability, In::widen(grad[v]));
    });
    row.store(p.out + row.row * p.n, p.n, [&](i64 v) {
        const float probability = Param::widen(y[v]);
        if (probability == 0.0f) return 0.0f;
        return __fmul_rn(probability, __fsub_rn(In::widen(grad[v]), total));
    });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    log_softmax_backward(const __grid_constant__ SoftmaxGradParams p) {
    __shared__ float memory[SHARED_FLOATS];
    Row row(memory);
    if (row.row >= p.rows) return;
    const In::Stored* grad = p.grad + row.row * p.n;
    const Param::Stored* y = p.y + row.row * p.n;
    const float total = row.sum(p.n, [&](i64 v) { return In::widen(grad[v]); });
    row.store(p.out + row.row * p.n, p.n, [&](i64 v) {
        return __fmaf_rn(-contract::exp(Param::widen(y[v])), total, In::widen(grad[v]));
    });
}

struct NormParams {
    const In::Stored* x;
    const Param::Stored *weight, *bias;  // either may be null
    Out::Stored* out;
    float *means, *scales;  // means is null for an RMS norm
    i64 x_row, rows, n;
    float eps;
};

extern "C" __global__ void __launch_bounds__(THREADS) norm_forward(const __grid_constant__ NormParams p) {
    __shared__ float memory[SHARED_FLOATS];
    Row row(memory);
    if (row.row >= p.rows) return;
    const In::Stored* x = p.x + row.row * p.x_row;
    const float count = static_cast<float>(p.n);
    float mean = 0.0f;
    if (p.means) mean = __fdiv_rn(row.sum(p.n, [&](i64 v) { return In::widen(x[v]); }), count);
    const auto centred = [&](i64 v) {
        const float wide = In::widen(x[v]);
        return p.means ? __fsub_rn(wide, mean) : wide;
    };
    const float squares = row.sum(p.n, [&](i64 v) { return __fmul_rn(centred(v), centred(v)); });
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, count), p.eps)));
    row.store(p.out + row.row * p.n, p.n, [&](i64 v) {
        const float y = __fmul_rn(centred(v), scale);
        if (p.weight && p.bias) return __fmaf_rn(y, Param::widen(p.weight[v]), Param::widen(p.bias[v]));
        if (p.weight) return __fmul_rn(y, Param::widen(p.weight[v]));
        return p.bias ? __fadd_rn(y, Param::widen(p.bias[v])) : y;
    });
    if (row.thread == 0) {
        if (p.means) p.means[row.row] = mean;
        p.scales[row.row] = scale;
    }
}

struct NormGradParams {
    const Out::Stored* grad;
    const In::Stored* x;
    const Param::Stored* weight;
    const float *means, *scales;
    Out::Stored* out;
    i64 grad_row, x_row, rows, n;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_backward(const __grid_constant__ NormGradParams p) {
    __shared__ float memory[SHARED_FLOATS];
    Row row(memory);
    if (row.row >= p.rows) return;
    const In::Stored* x = p.x + row.row * p.x_row;
    const Out::Stored* grad = p.grad + row.row * p.grad_row;
    const float count = static_cast<float>(p.n), scale = p.scales[row.row];
    const float mean = p.means ? p.means[row.row] : 0.0f;
    const auto weighted = [&](i64 v) {
        const float wide = Out::widen(grad[v]);
        return p.weight ? __fmul_rn(wide, Param::widen(p.weight[v])) : wide;
    };
    const auto normalised = [&](i64 v) {
        const float wide = In::widen(x[v]);
        return __fmul_rn(p.means ? __fsub_rn(wide, mean) : wide, scale);
    };
    const float along =
        __fdiv_rn(row.sum(p.n, [&](i64 v) { return __fmul_rn(weighted(v), normalised(v)); }), count);
    float average = 0.0f;
    if (p.means) average = __fdiv_rn(row.sum(p.n, weighted), count);
    row.store(p.out + row.row * p.n, p.n, [&](i64 v) {
        const float g = p.means ? __fsub_rn(weighted(v), average) : weighted(v);
        return __fmul_rn(scale, __fmaf_rn(-normalised(v), along, g));
    });
}

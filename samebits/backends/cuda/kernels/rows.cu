// Reductions of rows, and what follows from them: sums, softmax, norms and their gradients. Everything is in
// f32 and in the order of docs/contract.md, "Row reductions". A row that fits in registers is read once.
//
// Macros
//   IN, OUT, PARAM           types of rows, results and weights: F32, BF16 or F16
//   WARPS, PASSES, VECTOR    how threads share rows: row.cuh

#include "row.cuh"

using In = Element<IN>;
using Out = Element<OUT>;
using Param = Element<PARAM>;

constexpr int SHARED_FLOATS = ROWS * contract::CHAINS;
constexpr int IN_WORDS = WORDS<In>;
constexpr int HELD_WORDS = PASSES * IN_WORDS;
constexpr bool NARROW = OUT != F32 && PARAM != F32;
constexpr bool FEW_REGISTERS = VECTOR > 1 && HELD_WORDS > 0 && HELD_WORDS <= 16 && (NARROW || PASSES == 1);
constexpr int BLOCKS = FEW_REGISTERS ? 3 : 1;  // of a multiprocessor; with more, registers would spill

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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) row_sum(const __grid_constant__ SumParams p) {
    __shared__ float memory[SHARED_FLOATS];
    const Row row(memory, p.n);
    if (row.row >= p.rows) return;
    const Entries<In, IN_WORDS> x(p.x + row.row * p.x_row, row);
    const float sum = row.sum([&](int pass, float (&terms)[OWN]) {
        x(pass, terms);
        if (p.what == NORM) square(terms);
    });
    if (row.leads()) p.out[row.row] = result_of(sum, p.what, p.n);
}

// Few long rows: first the sums of all blocks, a pass of a row for each block of threads, then a warp's chains.
struct BlockSumsParams {
    const In::Stored* x;
    float* sums;  // [rows, blocks]
    i64 x_row, n, blocks;
    int what;
};

extern "C" __global__ void __launch_bounds__(THREADS) block_sums(const __grid_constant__ BlockSumsParams p) {
    const Row row(nullptr, p.n);
    const Entries<In, 65> x(p.x + blockIdx.y * p.x_row, row);  // so many words are not held
    float terms[OWN];
    x(blockIdx.x, terms);
    if (p.what == NORM) square(terms);
    const float sum = row.block_sum(terms);
    const i64 block = i64(blockIdx.x) * (4 * WARPS) + row.warp * 4 + row.lane / GROUP;
    if (row.lane % GROUP == 0 && block < p.blocks) p.sums[blockIdx.y * p.blocks + block] = sum;
}

struct ChainsParams {
    const float* sums;
    Out::Stored* out;
    i64 n, blocks;
    int what;
};

// A lane for each chain.
extern "C" __global__ void __launch_bounds__(32) chains(const __grid_constant__ ChainsParams p) {
    constexpr int AHEAD = 32;
    const float* sums = p.sums + blockIdx.x * p.blocks;
    float chain = 0.0f;
    i64 block = threadIdx.x;
    for (; block + (AHEAD - 1) * 32 < p.blocks; block += AHEAD * 32) {
        float terms[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) terms[i] = sums[block + i * 32];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) chain = __fadd_rn(chain, terms[i]);
    }
    for (; block < p.blocks; block += 32) chain = __fadd_rn(chain, sums[block]);
    const float sum = contract::sum_of_lanes(chain);
    if (threadIdx.x == 0) p.out[blockIdx.x] = result_of(sum, p.what, p.n);
}

struct SoftmaxParams {
    const In::Stored* x;
    Out::Stored* out;
    i64 x_row, rows, n;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax(const __grid_constant__ SoftmaxParams p) {
    __shared__ float memory[SHARED_FLOATS];
    const Row row(memory, p.n);
    if (row.row >= p.rows) return;
    const Entries<In, IN_WORDS> logits(p.x + row.row * p.x_row, row, -INF);
    float shift, total;
    row.softmax(logits, shift, total);
    const Divisor over_total(total);
    store_row<Out>(row, p.out + row.row * p.n, [&](int pass, float (&y)[OWN]) {
        logits(pass, y);
#pragma unroll
        for (int i = 0; i < OWN; ++i) y[i] = contract::exp(__fsub_rn(y[i], shift));
        over_total.divide(y);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    log_softmax(const __grid_constant__ SoftmaxParams p) {
    __shared__ float memory[SHARED_FLOATS];
    const Row row(memory, p.n);
    if (row.row >= p.rows) return;
    const Entries<In, IN_WORDS> logits(p.x + row.row * p.x_row, row, -INF);
    float shift, total;
    row.softmax(logits, shift, total);
    const float log_sum = contract::log(total);
    store_row<Out>(row, p.out + row.row * p.n, [&](int pass, float (&y)[OWN]) {
        logits(pass, y);
#pragma unroll
        for (int i = 0; i < OWN; ++i) y[i] = __fsub_rn(__fsub_rn(y[i], shift), log_sum);
    });
}

struct SoftmaxGradParams {
    const In::Stored* grad;
    const Param::Stored* y;  // the result
    Out::Stored* out;
    i64 rows, n;
};

constexpr int GRAD_AND_RESULT = IN_WORDS + WORDS<Param>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_backward(const __grid_constant__ SoftmaxGradParams p) {
    __shared__ float memory[SHARED_FLOATS];
    const Row row(memory, p.n);
    if (row.row >= p.rows) return;
    const Entries<In, GRAD_AND_RESULT> grads(p.grad + row.row * p.n, row);
    const Entries<Param, GRAD_AND_RESULT> probabilities(p.y + row.row * p.n, row);
    const float total = row.sum([&](int pass, float (&x)[OWN]) {
        float probability[OWN];
        grads(pass, x);
        probabilities(pass, probability);
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = probability[i] == 0.0f ? 0.0f : __fmul_rn(probability[i], x[i]);
    });
    store_row<Out>(row, p.out + row.row * p.n, [&](int pass, float (&x)[OWN]) {
        float probability[OWN];
        grads(pass, x);
        probabilities(pass, probability);
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            x[i] = probability[i] == 0.0f ? 0.0f : __fmul_rn(probability[i], __fsub_rn(x[i], total));
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    log_softmax_backward(const __grid_constant__ SoftmaxGradParams p) {
    __shared__ float memory[SHARED_FLOATS];
    const Row row(memory, p.n);
    if (row.row >= p.rows) return;
    const Entries<In, GRAD_AND_RESULT> grads(p.grad + row.row * p.n, row);
    const Entries<Param, GRAD_AND_RESULT> logarithms(p.y + row.row * p.n, row);
    const float total = row.sum(grads);
    store_row<Out>(row, p.out + row.row * p.n, [&](int pass, float (&x)[OWN]) {
        float y[OWN];
        grads(pass, x);
        logarithms(pass, y);
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = __fmaf_rn(-contract::exp(y[i]), total, x[i]);
    });
}

// A norm's weight or bias, which all rows read. Null stands for values that change nothing.
struct Vector {
    Entries<Param, 65> entries;  // so many words are not held
    float otherwise;

    __device__ Vector(const Param::Stored* at, const Row& row, float otherwise)
        : entries(at, row), otherwise(otherwise) {}

    __device__ __forceinline__ void operator()(int pass, float (&x)[OWN]) const {
        if (entries.at)
            entries(pass, x);
        else
#pragma unroll
            for (int i = 0; i < OWN; ++i) x[i] = otherwise;
    }
};

struct NormParams {
    const In::Stored* x;
    const Param::Stored *weight, *bias;  // either may be null
    Out::Stored* out;
    float *means, *scales;  // means is null for an RMS norm
    i64 x_row, rows, n;
    float eps;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_forward(const __grid_constant__ NormParams p) {
    __shared__ float memory[SHARED_FLOATS];
    const Row row(memory, p.n);
    if (row.row >= p.rows) return;
    const Entries<In, IN_WORDS> entries(p.x + row.row * p.x_row, row);
    const Vector weight(p.weight, row, 1.0f), bias(p.bias, row, -0.0f);
    const float count = static_cast<float>(p.n);
    float mean = 0.0f;
    if (p.means) mean = __fdiv_rn(row.sum(entries), count);
    const auto centred = [&](int pass, float (&x)[OWN]) {
        entries(pass, x);
        if (p.means) {
#pragma unroll
            for (int i = 0; i < OWN; ++i) x[i] = __fsub_rn(x[i], mean);
            row.mask(pass, x);
        }
    };
    const float squares = row.sum([&](int pass, float (&x)[OWN]) {
        centred(pass, x);
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = __fmul_rn(x[i], x[i]);
    });
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, count), p.eps)));
    store_row<Out>(row, p.out + row.row * p.n, [&](int pass, float (&y)[OWN]) {
        float w[OWN], b[OWN];
        weight(pass, w);
        bias(pass, b);
        centred(pass, y);
#pragma unroll
        for (int i = 0; i < OWN; ++i) y[i] = __fmaf_rn(__fmul_rn(y[i], scale), w[i], b[i]);
    });
    if (row.leads()) {
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

constexpr int GRAD_AND_X = WORDS<Out> + IN_WORDS;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_backward(const __grid_constant__ NormGradParams p) {
    __shared__ float memory[SHARED_FLOATS];
    const Row row(memory, p.n);
    if (row.row >= p.rows) return;
    const Entries<Out, GRAD_AND_X> grads(p.grad + row.row * p.grad_row, row);
    const Entries<In, GRAD_AND_X> entries(p.x + row.row * p.x_row, row);
    const Vector weight(p.weight, row, 1.0f);
    const float count = static_cast<float>(p.n), scale = p.scales[row.row];
    const float mean = p.means ? p.means[row.row] : 0.0f;
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
        for (int i = 0; i < OWN; ++i) y[i] = __fmul_rn(p.means ? __fsub_rn(y[i], mean) : y[i], scale);
    };
    const float along = __fdiv_rn(row.sum([&](int pass, float (&x)[OWN]) {
        float g[OWN];
        weighted(pass, g);
        normalised(pass, x);
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = __fmul_rn(g[i], x[i]);
        row.mask(pass, x);
    }),
                                  count);
    float average = 0.0f;
    if (p.means) average = __fdiv_rn(row.sum(weighted), count);
    store_row<Out>(row, p.out + row.row * p.n, [&](int pass, float (&x)[OWN]) {
        float g[OWN];
        weighted(pass, g);
        normalised(pass, x);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if (p.means) g[i] = __fsub_rn(g[i], average);
            x[i] = __fmul_rn(scale, __fmaf_rn(-x[i], along, g[i]));
        }
    });
}

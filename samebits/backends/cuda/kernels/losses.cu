// The steps of cross-entropy beside its log-softmax: a loss for each row, the mean, and the way back.
//
// Macros
//   VALUE   type of the log-probabilities, losses and gradients: F32, BF16 or F16

#include "convert.cuh"

using Value = Element<VALUE>;

extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line,
                                        const char* function, size_t char_size);

// Targets, and where their values lie: that of row i at i * row + target * column.
struct Targets {
    const i64* at;
    i64 count, vocabulary, ignore_index, row, column;

    __device__ __forceinline__ bool ignores(i64 i) const { return at[i] == ignore_index; }
    __device__ __forceinline__ i64 place(i64 i) const { return i * row + at[i] * column; }
};

struct PickParams {
    const Value::Stored* logs;
    Value::Stored* losses;
    Targets targets;
};

extern "C" __global__ void __launch_bounds__(256) pick(const __grid_constant__ PickParams p) {
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i >= p.targets.count) return;
    float loss = 0;
    if (!p.targets.ignores(i)) {
        const i64 target = p.targets.at[i];
        if (target < 0 || target >= p.targets.vocabulary)
            __assertfail("cross_entropy: a target is out of range", "samebits", 0, "", 1);
        loss = -Value::widen(p.logs[p.targets.place(i)]);
    }
    p.losses[i] = Value::narrow(loss);
}

// The quotient as PyTorch has it: the count is rounded to the type of the value first.
__device__ __forceinline__ float share(float value, i64 count) {
    const float divisor = Value::widen(Value::narrow(static_cast<float>(count)));
    return Value::widen(Value::narrow(__fdiv_rn(value, divisor)));
}

struct MeanParams {
    const Value::Stored* total;
    Value::Stored* mean;
    i64* count;  // of the targets that are not ignored
    Targets targets;
};

// One block.
extern "C" __global__ void __launch_bounds__(256) mean_of_losses(const __grid_constant__ MeanParams p) {
    __shared__ i64 counts[8];
    i64 count = 0;
    for (i64 i = threadIdx.x; i < p.targets.count; i += 256) count += !p.targets.ignores(i);
#pragma unroll
    for (int other = 16; other > 0; other /= 2) count += __shfl_xor_sync(~0u, count, other);
    if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = count;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < 8; ++warp) count += counts[warp];
    *p.count = count;
    *p.mean = Value::narrow(share(Value::widen(*p.total), count));
}

struct SpreadParams {
    const Value::Stored* grad;
    const i64* count;  // null: gradients are not divided
    Value::Stored* out;
    i64 grad_row;
    Targets targets;
};

// Gradients of the log-probabilities. With columns, `out` was zero.
extern "C" __global__ void __launch_bounds__(256) spread(const __grid_constant__ SpreadParams p) {
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i >= p.targets.count) return;
    float grad = 0;
    if (!p.targets.ignores(i)) {
        grad = Value::widen(p.grad[i * p.grad_row]);
        if (p.count != nullptr) grad = share(grad, *p.count);
    } else if (p.targets.column != 0) {
        return;
    }
    p.out[p.targets.place(i)] = Value::narrow(-grad);
}

// The gradient of rows' 2-norms: x times grad / norm, in f32 with one rounding; +0 times x where the norm is 0.
//
// Macros
//   VALUE   type of x, its norms and all gradients: F32, BF16 or F16

#include "convert.cuh"
#include "functions.cuh"

using Value = Element<VALUE>;

struct Params {
    const Value::Stored *grad, *x, *norms;
    Value::Stored* out;
    i64 grad_row, x_row, norm_row, count, n;  // elements in all, and in a row
};

extern "C" __global__ void __launch_bounds__(256) vector_norm_backward(const __grid_constant__ Params p) {
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i >= p.count) return;
    const i64 row = i / p.n;
    const float norm = Value::widen(p.norms[row * p.norm_row]);
    const float grad = Value::widen(p.grad[row * p.grad_row]);
    const float factor = norm == 0 ? 0 : __fdiv_rn(grad, norm);
    const float x = Value::widen(p.x[row * p.x_row + i % p.n]);
    p.out[i] = Value::narrow(contract::canonical(__fmul_rn(x, factor)));
}

// 1 / sqrt(x), in f32 with two roundings, and one to the dtype.
//
// Macros
//   VALUE   type of x and of the result: F32, BF16 or F16

#include "convert.cuh"
#include "functions.cuh"

using Value = Element<VALUE>;

struct Params {
    const Value::Stored* x;
    Value::Stored* out;
    i64 count;
};

extern "C" __global__ void __launch_bounds__(256) reciprocal_root(const __grid_constant__ Params p) {
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i < p.count)
        p.out[i] = Value::narrow(contract::canonical(__fdiv_rn(1.0f, __fsqrt_rn(Value::widen(p.x[i])))));
}

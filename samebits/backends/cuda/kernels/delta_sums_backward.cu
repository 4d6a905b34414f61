// Gradients of queries and keys that heads share: sums of those of each head, one head after the other.
//
// docs/contract.md, "Recurrent layers", has the order. A thread has EACH neighbours of one of both: four, or one.
//
// Macros: TYPE and WARPS are those of delta.cu, EACH.

#include "convert.cuh"
#include "functions.cuh"

constexpr int THREADS = WARPS * 32;
using E = Element<TYPE>;

struct Params {
    const float* rows;  // [2, tokens, heads, key size]
    E::Stored *dq, *dk;
    int key_size, group;
    i64 count;  // of each
};

extern "C" __global__ void __launch_bounds__(THREADS) delta_sums_backward(const __grid_constant__ Params p) {
    const i64 at = (blockIdx.x * i64(THREADS) + threadIdx.x) * EACH;
    if (at >= p.count) return;
    const i64 row = at / p.key_size;  // of a token and a head of keys
    const float* from = p.rows + (blockIdx.y * p.count + row * p.key_size) * p.group + at % p.key_size;
    float sums[EACH];
#pragma unroll 8
    for (int n = 0; n < p.group; ++n, from += p.key_size) {
        float mine[EACH];
        if constexpr (EACH == 4) {
            const float4 four = *reinterpret_cast<const float4*>(from);
            mine[0] = four.x, mine[1] = four.y, mine[2] = four.z, mine[3] = four.w;
        } else {
            mine[0] = *from;
        }
#pragma unroll
        for (int x = 0; x < EACH; ++x) sums[x] = n ? __fadd_rn(sums[x], mine[x]) : mine[x];
    }
    E::Stored* to = (blockIdx.y ? p.dk : p.dq) + at;
#pragma unroll
    for (int x = 0; x < EACH; ++x) sums[x] = contract::canonical(sums[x]);
#pragma unroll
    for (int x = 0; x + 1 < EACH; x += 2) E::store_pair(to + x, sums[x], sums[x + 1]);
    if constexpr (EACH == 1) *to = E::narrow(sums[0]);
}

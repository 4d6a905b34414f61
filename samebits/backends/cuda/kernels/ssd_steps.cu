// What a call of Mamba 2 needs of its steps: include/ssd_steps.cuh. A thread for each step, and one for each column of
// a head's values, whose D it widens.

#include "ssd_steps.cuh"

struct Params {
    Steps given;
    float *steps, *decays;  // [tokens, heads]: bounded, and times A
    float* skip;            // [heads, size]
    i64 count;              // of steps
    int heads, size;
};

extern "C" __global__ void __launch_bounds__(256) ssd_steps(const __grid_constant__ Params p) {
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i < p.count) {
        p.given.of(i / p.heads, i % p.heads, p.steps[i], p.decays[i]);
    } else if (const i64 x = i - p.count; p.given.d && x < i64(p.heads) * p.size) {
        p.skip[x] = p.given.skip(x / p.size, x % p.size);
    }
}

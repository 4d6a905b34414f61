// Stops the GPU with an assertion, as torch._assert_async does, unless offsets rise from 0 to `tokens` and
// never decrease. One launch of one block, where PyTorch's operators would take nine.
//
// Macros
//   BOUND   integer type of the offsets: int or long long

#include "types.cuh"

using BoundType = BOUND;

extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line,
                                        const char* function, size_t char_size);

struct Offsets {
    const BoundType* at;
    i64 stride, tokens;
    int sequences;
};

extern "C" __global__ void __launch_bounds__(256) assert_spans(const Offsets p) {
    bool good = p.at[0] == 0 && p.at[p.sequences * p.stride] == p.tokens;
    for (int i = threadIdx.x; i < p.sequences; i += 256) {
        good = good && p.at[i * p.stride] <= p.at[(i + 1) * p.stride];
    }
    if (!good)
        __assertfail("cu_seqlens rises from 0 to the number of tokens and never decreases", "samebits", 0, "",
                     1);
}

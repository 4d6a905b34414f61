// dz of a part of the vocabulary, on Hopper: the epilogue of the product that gives its logits once more.
// docs/contract.md, "Log-probabilities". A is the hidden states, B the weights.
//
// -D: what pipeline_sm90.cuh (the main loop) and accumulators_sm90.cuh ask for; OUTPUT, BF16 or F16; ENTROPY.
#include "accumulators_sm90.cuh"
#include "logp.cuh"

struct Problem {
    TensorMap a, b, out_map;
    const void* bias;
    const i64* target;
    const float *shift, *log_sum, *entropy, *grad, *grad_entropy;
    i64 first, vocabulary, ignore_index;
    int m, n, k;
    int group;
    float scale;

    static constexpr int batch = 1, a_batch = 0, b_batch = 0, sequences = 0;
    static constexpr const void* bounds = nullptr;
};

struct GradLogits {
    static constexpr u32 bytes = 2 * PANEL_BYTES;
    static constexpr bool again_m = true, again_n = true;

    u32 buffer = 0;

    static __device__ void prepare(const Problem& p) { prefetch_map(p.out_map); }

    __device__ __forceinline__ void start(Accumulators& acc, const Problem&, const Place&, u32) { clear(acc); }

    __device__ __forceinline__ void finish(Accumulators& acc, u32 panels, const Problem& p, const Place& place,
                                           u32 warpgroup, u32 thread) {
        // A panel at a time: what has left needs no registers, which are scarce.
        Fragment fragment(place, thread);
        copy_panels<OUTPUT>(acc, panels, p, place, warpgroup, thread, buffer, [&](u32 band, u32 begin) {
            if constexpr (BIAS != NONE) {
                if (band == 0) add_bias<BIAS, PANEL>(acc, p, place, thread, begin);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int token = min(fragment.row + int(band) * 64 + half * 8, p.m - 1);  // what lies below is not written
                const contract::RowGradient<ENTROPY> gradient(p, token);
                int target = gradient.counts ? int(gradient.target - p.first) - fragment.column - int(begin) : -1;
#pragma unroll
                for (int j = 0; j < PANEL / 4; ++j) {
                    float& d = acc[band][begin / 2 + j / 2 * 4 + half * 2 + j % 2];
                    d = gradient.at(__fmul_rn(d, p.scale), j / 2 * 8 + j % 2 == target);
                }
            }
        });
    }

    // Shared memory must outlive what still reads it.
    __device__ void end(u32 thread) {
        if (thread == 0) copy_out_wait_read<0>();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) grad_logits_sm90(const __grid_constant__ Problem p) {
    pipeline<GradLogits>(p);
}

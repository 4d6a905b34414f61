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
    static constexpr bool recompute_m = true, recompute_n = true;

    u32 buffer = 0;

    static __device__ void prepare(const Problem& p) { prefetch_map(p.out_map); }

    __device__ __forceinline__ void start(Accumulators& acc, const Problem&, const Place&, u32) { clear(acc); }

    __device__ __forceinline__ void finish(Accumulators& acc, u32 panels, const Problem& p, const Place& place,
                                           u32 warpgroup, u32 thread) {
        Fragment fragment(place, thread);
#pragma unroll
        for (u32 band = 0; band < BANDS; ++band) {
            auto row = [&](int half) {
                int token = min(fragment.row + int(band) * 64 + half * 8, p.m - 1);  // what lies below is not written
                return contract::RowGradient<ENTROPY>(p, token);
            };
            auto column_of = [&](const contract::RowGradient<ENTROPY>& of) {
                return of.counts ? int(of.target - p.first) - fragment.column : -1;
            };
            const contract::RowGradient<ENTROPY> gradients[2] = {row(0), row(1)};
            const int targets[2] = {column_of(gradients[0]), column_of(gradients[1])};
#pragma unroll
            for (u32 column = 0; column < BLOCK_N; column += 16) {
                __syncwarp();  // no more elements at a time: registers are scarce
                float* d = &acc[band][column / 2];
                if constexpr (BIAS != NONE) add_bias<BIAS>(d, p, place, thread, column);
#pragma unroll
                for (u32 i = 0; i < 8; ++i) {
                    u32 half = i / 2 % 2, at = column + i / 4 * 8 + i % 2;
                    d[i] = gradients[half].at(__fmul_rn(d[i], p.scale), int(at) == targets[half]);
                }
            }
            copy_band<OUTPUT>(acc, band, panels, p, place, warpgroup, thread, buffer);
        }
    }

    // Shared memory must outlive what still reads it.
    __device__ void end(u32 thread) {
        if (thread == 0) copy_out_wait_read<0>();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) grad_logits_sm90(const __grid_constant__ Problem p) {
    pipeline<GradLogits>(p);
}

// Parameters of the kernels of the forward: delta.cu, and delta_step*.cu for one token of each sequence.
#pragma once

#include "delta.cuh"
#ifdef DT
#include "ssd_steps.cuh"
#endif

struct Params {
    const Stored *q, *k, *v;
    const float *g, *beta, *weights, *skip, *initial;
    float *state, *closed;
    Stored* out;  // float, if `wide`
    const int* spans;
    unsigned char* records;
    i64 q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head,
        weight_token, weight_head;
    i64 words;                                              // of a sequence's state
    int matrix, keys, updates, decays, row_weights, marks;  // where they are in it
    int key_size, size, heads, group, tokens, wide;
    float scale;
    const Prepared* prepared;  // BY_CHANNEL
#ifdef DT
    Steps steps;  // in place of g, weights and skip
#endif
};

#if WEIGHTED
// A result, from where the scale left it, with D times the value of its row and column.
__device__ __forceinline__ float with_skip(float y, float skip, Stored value) {
    return __fadd_rn(y, __fmul_rn(skip, E::widen(value)));
}
#endif

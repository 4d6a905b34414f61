// Parameters of the kernels of the forward: delta.cu, and delta_step.cu for one token of each sequence.
#pragma once

#include "delta.cuh"

struct Params {
    const Stored *q, *k, *v;
    const float *g, *beta, *initial;
    float *state, *closed;
    Stored* out;
    const int* spans;
    unsigned char* records;
    i64 q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head;
    i64 words;                                 // of a sequence's state
    int matrix, keys, updates, decays, marks;  // where they are in it
    int key_size, size, heads, group, tokens;
    float scale;
};

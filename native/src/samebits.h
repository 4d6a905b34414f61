/* libsamebits: matrix products, attention and log-probabilities whose bits do not depend on the batch, on NVIDIA GPUs.

   The library needs the CUDA driver alone, which it loads when the first context is created. Its kernels come from
   an archive, made by `samebits export`. Results have the bits that docs/contract.md of samebits specifies: bf16 and
   f16 follow TENSOR_CORE, the chain of the GPU's tensor cores; f32 follows FMA, a chain of IEEE fused multiply-adds.

   Every call takes addresses on the GPU and a stream. It allocates nothing there, does not wait, and can be captured
   in a graph. It may come from any thread, and many threads may share a context. Errors are found before anything is
   launched: a call returns its status, and sb_last_error() has a sentence about it. */

#ifndef SAMEBITS_H
#define SAMEBITS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SB_ABI_VERSION 5

#if defined(__GNUC__)
#define SB_API __attribute__((visibility("default")))
#else
#define SB_API
#endif

typedef struct CUstream_st* CUstream; /* as in cuda.h; NULL is the default stream */

typedef struct sb_archive sb_archive;
typedef struct sb_context sb_context;

typedef enum sb_status {
    SB_OK = 0,
    SB_INVALID = 1,     /* an argument is NULL, out of range or misaligned, or does not fit the others */
    SB_UNSUPPORTED = 2, /* the archive has no kernel for this call, or none for this GPU */
    SB_ARCHIVE = 3,     /* the archive cannot be read, is damaged, or has another version */
    SB_DRIVER = 4,      /* the CUDA driver is missing or too old, or returned an error */
    SB_MEMORY = 5       /* the host has no memory left */
} sb_status;

typedef enum sb_dtype { SB_F32 = 0, SB_BF16 = 1, SB_F16 = 2 } sb_dtype;

/* A matrix in the GPU's memory, or a batch of them. `row` is the distance from a row to the next, `column` from a
   column to the next, `batch` from a matrix to the next: in elements, not negative. A batch's distance may be 0 for
   a and b: then all products share that matrix. */
typedef struct sb_matrix {
    void* data;
    int64_t row, column, batch;
} sb_matrix;

/* Row-major: element (i, j) at data[i * pitch + j]. */
static inline sb_matrix sb_rows(void* data, int64_t pitch) {
    sb_matrix x = {data, pitch, 1, 0};
    return x;
}

/* The transpose of a row-major matrix: element (i, j) at data[j * pitch + i]. */
static inline sb_matrix sb_transposed(void* data, int64_t pitch) {
    sb_matrix x = {data, 1, pitch, 0};
    return x;
}

/* out[m, n] = a[m, k] b[k, n] + bias[n], one chain over ascending k for each element of out.

   The layouts that BLAS calls NN, NT and TN are those of a and b: sb_rows or sb_transposed. Fastest are a and b with
   addresses that are multiples of 16 bytes, and pitches that are multiples of 8 elements (f32: 4). */
typedef struct sb_product {
    sb_dtype dtype;         /* of a, b and bias */
    sb_dtype out_dtype;     /* dtype, or SB_F32 */
    int64_t m, n, k, batch; /* batch: matrices; 1 for a single product */
    sb_matrix a, b, out;    /* out's elements must not overlap each other, nor a and b */
    const void* bias;       /* n contiguous elements, or NULL */
    int accumulate;         /* 1: chains start from the values in out, which is f32; 0: from +0 */
} sb_product;

/* Packed sequences along k, as in the gradient of a weight: each sequence starts a new group of the chain. */
typedef struct sb_sequences {
    const void*
        offsets;   /* on the GPU: count + 1 ascending offsets, from 0 to k; NULL: one sequence, of all k */
    int64_t count; /* sequences, 1 or more; 1 without offsets */
    int wide;      /* offsets are int64_t; 0: int32_t */
} sb_sequences;

/* Groups of rows, such as the tokens of experts: each has a matrix b of its own, b.batch elements apart. */
typedef struct sb_groups {
    const int32_t* ends; /* on the GPU: the row after each group, never descending, from 0 to m; the first
                            group begins at row 0 */
    int64_t count;       /* groups, 1 or more */
    int64_t bias;        /* distance from a group's bias to the next group's, in elements */
} sb_groups;

/* Log-probabilities of targets: softmax((hidden weight^T + bias) / temperature). */
typedef struct sb_logp {
    sb_dtype dtype; /* of hidden, weight and bias */
    int64_t tokens, features, vocabulary;
    const void* hidden; /* [tokens, features], its rows `hidden_row` elements apart */
    int64_t hidden_row;
    const void* weight; /* [vocabulary, features] */
    int64_t weight_row;
    const void* bias;      /* [vocabulary], or NULL */
    const int64_t* target; /* [tokens]; one that is neither ignored nor within [0, vocabulary) gives NaN */
    int64_t ignore_index;  /* tokens with this target give 0; usually -100 */
    double temperature;    /* within [2^-126, 2^126] */
    float* logp;           /* [tokens] */
    float* entropy;        /* [tokens] too: the entropy of each distribution; or NULL */
} sb_logp;

/* Vectors of tokens and heads: element i of (b, t, h) at data[b * batch + t * token + h * head + i]. Distances are in
   elements, and not negative. Packed ones have no batch. One of 0 lets all share. */
typedef struct sb_vectors {
    void* data;
    int64_t batch, token, head;
} sb_vectors;

/* How many keys to the left and to the right of its own position a query sees; -1: all. */
typedef struct sb_window {
    int64_t left, right;
} sb_window;

static inline sb_window sb_all_keys(void) {
    sb_window x = {-1, -1};
    return x;
}

/* No key after its own position. */
static inline sb_window sb_causal(void) {
    sb_window x = {-1, 0};
    return x;
}

/* Softmax attention: out = softmax(q k^T scale) v, with the conventions of samebits.attention. With a window other than
   sb_all_keys() the last query of a sequence has the position of its last key.

   Offsets, starts, lengths and pages are on the GPU and int32. They are not checked; nothing is read out of place. */
typedef struct sb_attention_call {
    sb_dtype dtype;       /* of q, k, v and out */
    int64_t batch;        /* sequences */
    int64_t queries;      /* tokens of each in q; packed: of all together */
    int64_t keys;         /* slots of each in k and v; packed: of all together */
    int64_t heads;        /* of q: a multiple of kv_heads */
    int64_t kv_heads;     /* each serves heads / kv_heads consecutive ones of q */
    int64_t head, values; /* sizes of vectors: of q and k; of v and out. 1 to 256 */
    sb_vectors q, k, v;   /* with pages, k's and v's batch is the distance from a page to the next */
    void* out;            /* contiguous [batch, queries, heads, values], packed [queries, heads, values]; at a
                             multiple of 16. A query that sees no key gives zeros, and so does a packed token of
                             no sequence */
    float* lse;           /* the log-sum-exps of scores, contiguous [batch, heads, queries] or packed
                             [heads, queries]; or NULL */
    float scale;          /* of scores: usually 1 / sqrt(head) */
    float softcap;        /* scores become softcap tanh(score / softcap); 0: they do not */
    sb_window window;     /* sb_all_keys(), sb_causal(), or one of your own */
    const float* sinks;   /* [heads]: logits that take part in the softmax without a value; or NULL */
    const int32_t* cu_seqlens_q; /* [batch + 1]: offsets of packed sequences in q; or NULL */
    const int32_t* cu_seqlens_k; /* the same in k and v; needed with cu_seqlens_q, unless there are pages */
    const int32_t* key_start;    /* [batch]: the first slot of each sequence's keys; NULL: 0 */
    const int32_t* key_length;   /* [batch]: the slot after each sequence's last key; NULL: all slots */
    const int32_t* block_table;  /* [batch, keys / page]: pages in order; or NULL. Needs key_length */
    int64_t block_table_row;     /* from a row of it to the next */
    int64_t page, pages;         /* slots of a page, and pages that there are, if there is a block_table */
} sb_attention_call;

/* SB_ABI_VERSION of the library, for comparison with that of the header. */
SB_API uint32_t sb_abi_version(void);

/* A sentence about the last call in this thread that did not return SB_OK. */
SB_API const char* sb_last_error(void);

/* Read and check an archive. It needs no GPU. Contexts keep what they need of it, so it may be closed before them. */
SB_API sb_status sb_archive_open(const char* path, sb_archive** archive);
SB_API void sb_archive_close(sb_archive* archive);

/* The version of samebits that wrote the archive. NULL for no archive. */
SB_API const char* sb_archive_version(const sb_archive* archive);

/* 16 hex digits that name the bits of products of this dtype. Equal digests mean equal bits. NULL for no archive, for a
   number that is no dtype, and for a dtype that the archive has no kernels for. */
SB_API const char* sb_contract_digest(const sb_archive* archive, sb_dtype dtype);

/* Load an archive's kernels on a device, into its primary context. The device is the driver's ordinal. */
SB_API sb_status sb_context_create(const sb_archive* archive, int device, sb_context** context);
/* No launch of the context may be pending, and no graph of it may run again. */
SB_API void sb_context_destroy(sb_context* context);

/* One product; batch is 1. */
SB_API sb_status sb_gemm(const sb_context* context, const sb_product* product, CUstream stream);
/* A batch of products. */
SB_API sb_status sb_bmm(const sb_context* context, const sb_product* product, CUstream stream);
/* One product whose terms belong to sequences: out[m, n] = sum over sequences s, and k in s, of a[m, k] b[k, n]. */
SB_API sb_status sb_gemm_ragged(const sb_context* context, const sb_product* product,
                                const sb_sequences* sequences, CUstream stream);

/* A product for each group of rows: out[t, n] = a[t, k] b[g][k, n] + bias[g][n] for the rows t of group g, and +0 for
   rows after the last group. batch is 1, accumulate 0. A row has the bits that sb_gemm gives it with its group's matrix.

   With b transposed by its strides this is the gradient of a, too. That of b, a sum over each group's rows, is not in
   the library. Wrong ends stop the kernel with an error of the device; nothing is read out of place. */
SB_API sb_status sb_gemm_grouped(const sb_context* context, const sb_product* product,
                                 const sb_groups* groups, CUstream stream);

/* Bytes of scratch that sb_linear_logp wants for these sizes, distances and dtypes, whether `entropy` is NULL, and these
   addresses of hidden and weight: less if both are multiples of 16. With NULL, enough for any. What is there is not read.
   Products need no scratch. */
SB_API sb_status sb_workspace_size(const sb_context* context, const sb_logp* logp, size_t* bytes);
/* `workspace`: scratch on the GPU, its address a multiple of 256, for this call alone until it has run. */
SB_API sb_status sb_linear_logp(const sb_context* context, const sb_logp* logp, void* workspace,
                                size_t workspace_bytes, CUstream stream);

/* Bytes of scratch that sb_attention wants for these sizes; addresses are not looked at, except whether they are NULL. */
SB_API sb_status sb_attention_workspace_size(const sb_context* context, const sb_attention_call* call,
                                             size_t* bytes);
/* `workspace` as in sb_linear_logp. Masks, heads above 256, and gradients are not in the library. */
SB_API sb_status sb_attention(const sb_context* context, const sb_attention_call* call, void* workspace,
                              size_t workspace_bytes, CUstream stream);

#ifdef __cplusplus
}
#endif

#endif

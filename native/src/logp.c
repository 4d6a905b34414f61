/* Log-probabilities: statistics of the logits, a block of the vocabulary at a time, and what becomes of them. The host
   side of samebits/backends/cuda/kernels/statistics_sm90.cu and logp.cu. */

#include <inttypes.h>

#include "internal.h"

enum {
    VOCAB_BLOCK = 128,
    THREADS = 256,
    WARPS = THREADS / 32,
    FEW_ROWS = 1024,
    FEW_BLOCKS = 64,
    ALIGNMENT = 256
};

static const int64_t MOST_STATISTICS = INT64_C(3) << 27; /* logits whose statistics exist at a time */
static const int64_t MOST_LOGITS = 1 << 23;              /* logits that exist at a time, if any do */

/* Scratch, as distances from its beginning, and how the call is cut. */
typedef struct {
    bool fused; /* no logits are stored */
    int64_t tokens, blocks,
        width; /* at a time: tokens, and entries of the vocabulary; blocks of the vocabulary */
    int64_t m, s, u, target_logit, shift, log_sum, logits, bytes;
} layout;

static int64_t take(int64_t* end, int64_t floats) {
    const int64_t at = *end;
    *end = round_up(at + floats * 4, ALIGNMENT);
    return at;
}

/* Whether the copy engine can read the rows. */
static bool readable(const void* at, int64_t rows, int64_t row) {
    return at != NULL && multiple(at, 16) && (rows == 1 || (row > 0 && row % 8 == 0));
}

static const table* fused_table(const sb_context* context, const sb_logp* p) {
    return p->dtype == SB_F32 || p->features == 0 ? NULL : find_table(context->archive, STATISTICS_SM90, 0);
}

/* An operand without an address may be anywhere: the layout without Hopper's kernel is the larger one. */
static layout arrange(const sb_context* context, const sb_logp* p) {
    layout x = {0};
    const int64_t parts = ceil_div(p->tokens * p->vocabulary, MOST_STATISTICS);
    x.tokens = p->tokens ? ceil_div(p->tokens, parts) : 0;
    if (x.tokens >= 128) x.tokens = round_up(x.tokens, 128);
    if (x.tokens > p->tokens) x.tokens = p->tokens;
    x.blocks = ceil_div(p->vocabulary, VOCAB_BLOCK);
    x.fused = fused_table(context, p) != NULL && readable(p->hidden, p->tokens, p->hidden_row) &&
              readable(p->weight, p->vocabulary, p->weight_row);
    x.m = take(&x.bytes, x.tokens * x.blocks);
    x.s = take(&x.bytes, x.tokens * x.blocks);
    x.u = take(&x.bytes, p->entropy ? x.tokens * x.blocks : 0);
    x.target_logit = take(&x.bytes, x.tokens);
    x.shift = take(&x.bytes, x.tokens);
    x.log_sum = take(&x.bytes, x.tokens);
    x.logits = x.bytes;
    if (!x.fused) {
        int64_t at_once = MOST_LOGITS / (x.tokens ? x.tokens : 1) / VOCAB_BLOCK;
        if (at_once < 1) at_once = 1;
        x.width = ceil_div(x.blocks, ceil_div(x.blocks, at_once)) * VOCAB_BLOCK;
        if (x.width > p->vocabulary) x.width = p->vocabulary;
        take(&x.bytes, x.tokens * x.width);
    }
    return x;
}

static sb_status check_sizes(const sb_context* context, const sb_logp* p) {
    if (context == NULL) return fail(SB_INVALID, "context: expected a handle, got NULL");
    if (p == NULL) return fail(SB_INVALID, "logp: expected a description, got NULL");
    if (p->dtype < SB_F32 || p->dtype > SB_F16)
        return fail(SB_INVALID, "dtype: expected SB_F32, SB_BF16 or SB_F16, got %d", (int)p->dtype);
    sb_status status;
    if ((status = check_size("tokens", p->tokens)) || (status = check_size("features", p->features)) ||
        (status = check_size("vocabulary", p->vocabulary)))
        return status;
    if (p->vocabulary == 0) return fail(SB_INVALID, "vocabulary: expected 1 or more, got 0");
    return SB_OK;
}

static sb_status check_address(const char* name, const void* at, uintptr_t of, bool needed) {
    if (needed && at == NULL) return fail(SB_INVALID, "%s: expected an address, got NULL", name);
    if (!multiple(at, of))
        return fail(SB_INVALID, "%s: expected an address that is a multiple of %d, got %p", name, (int)of,
                    at);
    return SB_OK;
}

static sb_status check(const sb_context* context, const sb_logp* p) {
    sb_status status = check_sizes(context, p);
    if (status != SB_OK) return status;
    if (!(p->temperature >= 0x1p-126 && p->temperature <= 0x1p126))
        return fail(SB_INVALID, "temperature: expected a number in [2^-126, 2^126], got %g", p->temperature);
    const sb_matrix hidden = {(void*)p->hidden, p->hidden_row, 1, 0},
                    weight = {(void*)p->weight, p->weight_row, 1, 0};
    if ((status = check_matrix("hidden", &hidden, p->dtype, p->tokens, p->features, 1)) ||
        (status = check_matrix("weight", &weight, p->dtype, p->vocabulary, p->features, 1)) ||
        (status = check_address("bias", p->bias, (uintptr_t)itemsize(p->dtype), false)) ||
        (status = check_address("target", p->target, 8, p->tokens > 0)) ||
        (status = check_address("logp", p->logp, 4, p->tokens > 0)) ||
        (status = check_address("entropy", p->entropy, 4, false)))
        return status;
    return SB_OK;
}

sb_status sb_workspace_size(const sb_context* context, const sb_logp* p, size_t* bytes) {
    if (bytes == NULL) return fail(SB_INVALID, "bytes: expected where to put the size, got NULL");
    *bytes = 0;
    const sb_status status = check_sizes(context, p);
    if (status == SB_OK) *bytes = (size_t)arrange(context, p).bytes;
    return status;
}

/* ---- Launches. The structs are those of the kernels. ---- */

typedef struct {
    unsigned char tall[128], wide[128];
    const void *bias, *target;
    char *m, *s, *u, *target_logit;
    int32_t rows, columns, features, group, blocks;
    float scale;
} fused_params;

typedef struct {
    char* logits;
    int64_t logits_row;
    const void* target;
    char *m, *s, *u, *target_logit;
    int64_t first, width;
    int32_t blocks;
    float scale;
} block_params;

typedef struct {
    char *m, *s, *u, *target_logit;
    const void* target;
    void *logp, *entropy;
    char *shift, *log_sum;
    int64_t vocabulary, ignore_index;
    int32_t rows, blocks;
} combine_params;

_Static_assert(sizeof(fused_params) == STATISTICS_PARAMS && sizeof(block_params) == BLOCK_STATISTICS_PARAMS &&
                   sizeof(combine_params) == COMBINE_PARAMS,
               "");

/* Some of a call's tokens. */
typedef struct {
    const sb_logp* p;
    int64_t first, tokens;
    char* scratch;
    const layout* at;
    float scale;
    CUstream stream;
} part;

static const char* rows_from(const void* x, int64_t row, int64_t stride, sb_dtype dtype) {
    return (const char*)x + row * stride * itemsize(dtype);
}

static sb_status missing(const sb_context* context, const sb_logp* p) {
    const sb_archive* archive = context->archive;
    if (archive->major < 8)
        return fail(SB_UNSUPPORTED, "log-probabilities: expected sm_80 or newer, the archive is for %s",
                    archive->arch);
    return no_kernel(context, "log-probabilities", p->dtype, "--op linear_logp");
}

static sb_status fused(const sb_context* context, const part* x) {
    const sb_logp* p = x->p;
    const table* t = fused_table(context, p);
    const schedule* s = choose(context->archive, t, x->tokens, p->vocabulary, p->features);
    if (s == NULL) s = &context->archive->schedules[t->plain];
    const bool folded = p->features % 64 == 0 && s->tile_k > 64, swap = s->swap;
    const uint32_t variant = (uint32_t)p->dtype | (uint32_t)(p->bias != NULL) << 2 |
                             (uint32_t)(p->entropy != NULL) << 3 | (uint32_t)folded << 4;
    const int64_t cubin = find_variant(context->archive, s->kernel, variant);
    if (cubin < 0) return missing(context, p);
    const operand hidden = {
        rows_from(p->hidden, x->first, p->hidden_row, p->dtype), x->tokens, p->features, p->hidden_row, 1, 0};
    const operand weight = {p->weight, p->vocabulary, p->features, p->weight_row, 1, 0};
    const operand *tall = swap ? &weight : &hidden, *wide = swap ? &hidden : &weight;
    const map_recipe maps[2] = {
        operand_map(p->dtype, tall, 1, false, s->tile_m, s->tile_k, s->cluster, folded, s->promotion),
        operand_map(p->dtype, wide, 1, false, s->tile_n, s->tile_k, 1, folded, s->promotion)};
    _Alignas(128) union {
        fused_params of;
        char room[sizeof(fused_params) + 128];
    } params = {0};
    fused_params* to = &params.of;
    sb_status status = encode(to->tall, tall->at, &maps[0]);
    if (status == SB_OK) status = encode(to->wide, wide->at, &maps[1]);
    if (status != SB_OK) return status;
    to->bias = p->bias;
    to->target = p->target + x->first;
    to->m = x->scratch + x->at->m;
    to->s = x->scratch + x->at->s;
    to->u = p->entropy ? x->scratch + x->at->u : NULL;
    to->target_logit = x->scratch + x->at->target_logit;
    to->rows = (int32_t)tall->rows;
    to->columns = (int32_t)wide->rows;
    to->features = (int32_t)p->features;
    to->group = s->group;
    to->blocks = (int32_t)x->at->blocks;
    to->scale = x->scale;
    return launch(context, cubin, blocks_sm90(context, s, tall->rows, wide->rows, 1), &params, x->stream);
}

static int64_t logp_kernel(const sb_context* context, uint32_t which, const sb_logp* p) {
    const table* t = find_table(context->archive, LOGP, 0);
    if (t == NULL) return -1;
    const int32_t kernel = context->archive->schedules[t->plain].kernel;
    return find_variant(context->archive, kernel, which | (uint32_t)(p->entropy != NULL) << 2);
}

static sb_status in_pieces(const sb_context* context, const part* x) {
    const sb_logp* p = x->p;
    const int64_t cubin = logp_kernel(context, BLOCK_STATISTICS, p);
    if (cubin < 0) return missing(context, p);
    char* logits = x->scratch + x->at->logits;
    for (int64_t first = 0; first < p->vocabulary; first += x->at->width) {
        const int64_t rest = p->vocabulary - first, width = rest < x->at->width ? rest : x->at->width;
        const sb_product product = {
            .dtype = p->dtype,
            .out_dtype = SB_F32,
            .m = x->tokens,
            .n = width,
            .k = p->features,
            .batch = 1,
            .a = sb_rows((void*)rows_from(p->hidden, x->first, p->hidden_row, p->dtype), p->hidden_row),
            .b = sb_transposed((void*)rows_from(p->weight, first, p->weight_row, p->dtype), p->weight_row),
            .out = sb_rows(logits, width),
            .bias = p->bias ? rows_from(p->bias, first, 1, p->dtype) : NULL,
        };
        sb_status status = run_product(context, &product, NULL, x->stream);
        if (status != SB_OK) return status == SB_UNSUPPORTED ? missing(context, p) : status;
        const int64_t block = first / VOCAB_BLOCK * 4;
        union {
            block_params of;
            char room[sizeof(block_params) + 128];
        } params = {.of = {
                        .logits = logits,
                        .logits_row = width,
                        .target = p->target + x->first,
                        .m = x->scratch + x->at->m + block,
                        .s = x->scratch + x->at->s + block,
                        .u = p->entropy ? x->scratch + x->at->u + block : NULL,
                        .target_logit = x->scratch + x->at->target_logit,
                        .first = first,
                        .width = width,
                        .blocks = (int32_t)x->at->blocks,
                        .scale = x->scale,
                    }};
        const int64_t grid = x->tokens * ceil_div(width, WARPS * VOCAB_BLOCK);
        status = launch(context, cubin, grid, &params, x->stream);
        if (status != SB_OK) return status;
    }
    return SB_OK;
}

static sb_status combine(const sb_context* context, const part* x) {
    const sb_logp* p = x->p;
    const bool few =
        x->tokens <= FEW_ROWS && x->at->blocks > FEW_BLOCKS; /* then the latency of a row decides */
    const int64_t cubin = logp_kernel(context, few ? COMBINE_FEW : COMBINE, p);
    if (cubin < 0) return missing(context, p);
    union {
        combine_params of;
        char room[sizeof(combine_params) + 128];
    } params = {.of = {
                    .m = x->scratch + x->at->m,
                    .s = x->scratch + x->at->s,
                    .u = p->entropy ? x->scratch + x->at->u : NULL,
                    .target_logit = x->scratch + x->at->target_logit,
                    .target = p->target + x->first,
                    .logp = p->logp + x->first,
                    .entropy = p->entropy ? p->entropy + x->first : NULL,
                    .shift = x->scratch + x->at->shift,
                    .log_sum = x->scratch + x->at->log_sum,
                    .vocabulary = p->vocabulary,
                    .ignore_index = p->ignore_index,
                    .rows = (int32_t)x->tokens,
                    .blocks = (int32_t)x->at->blocks,
                }};
    return launch(context, cubin, few ? x->tokens : ceil_div(x->tokens, WARPS), &params, x->stream);
}

sb_status sb_linear_logp(const sb_context* context, const sb_logp* p, void* workspace, size_t workspace_bytes,
                         CUstream stream) {
    sb_status status = check(context, p);
    if (status != SB_OK || p->tokens == 0) return status;
    const layout at = arrange(context, p);
    if ((status = check_address("workspace", workspace, ALIGNMENT, true))) return status;
    if (workspace_bytes < (size_t)at.bytes)
        return fail(SB_INVALID, "workspace: expected %" PRId64 " bytes%s, got %zu", at.bytes,
                    at.fused ? "" : " for operands that the copy engine cannot read", workspace_bytes);
    bool pushed;
    if ((status = enter(context, &pushed))) return status;
    for (int64_t first = 0; first < p->tokens && status == SB_OK; first += at.tokens) {
        const int64_t rest = p->tokens - first;
        const part x = {p,         first, rest < at.tokens ? rest : at.tokens,
                        workspace, &at,   (float)(1 / p->temperature),
                        stream};
        status = at.fused ? fused(context, &x) : in_pieces(context, &x);
        if (status == SB_OK) status = combine(context, &x);
    }
    leave(pushed);
    return status;
}

/* Attention, forward: the host side of samebits/backends/cuda/kernels/attention_sm90.cu and attention.cu. Tables say
   which schedule a call has, and how many blocks share the keys of a tile. */

#include <inttypes.h>
#include <stdio.h>

#include "internal.h"

enum {
    SEGMENT = 512, /* keys of a segment */
    KEYS = 128,    /* of a block of them */
    ALIGNMENT = 256,
    LARGEST_HEAD = 256,
    LARGEST_HEAD_SM90 = 128,
    MOST_MEMBERS = 64, /* heads that a tile may have side by side */
    FEW_QUERIES = 128, /* with which it has them */
    L2 = 24 << 20,     /* bytes of keys and values that are used side by side */
    LONG = 8192        /* queries whose tiles under a window are taken as they come */
};

static const int64_t MOST_SCRATCH = 512 << 20; /* bytes that segments may take */
static const uint32_t MINUS_INFINITY = 0xFF800000;

/* ---- The structs of the kernels ---- */

typedef struct {
    const void *cu_q, *cu_k, *key_start, *key_length, *pages;
    int64_t pages_batch;
    const void* mask;
    int64_t mask_strides[4];
    int32_t batch, heads, group, queries, keys, head, values, page, page_count, left, right, align;
    float c, cap, scale;
    int32_t unused;
} problem;

typedef struct {
    unsigned char q[128], k[128], v[128];
    void* out;
    const void* sinks;
    void *lse, *lse2, *scratch, *next;
    int64_t lse_batch, lse_head;
    int32_t tiles, heads, together, segments, shares, share, members, height, shared, unused;
    problem x;
} hopper_params;

typedef struct {
    const void *q, *k, *v, *sinks;
    void *out, *lse, *lse2, *scratch;
    int64_t q_strides[4], k_strides[4], v_strides[4], out_strides[3], lse_batch, lse_head;
    int32_t tiles, splits, segments, unused;
    problem x;
} universal_attention_params;

_Static_assert(sizeof(hopper_params) == ATTENTION_SM90_PARAMS &&
                   sizeof(universal_attention_params) == ATTENTION_PARAMS,
               "");

/* ---- A call ---- */

typedef struct {
    const char* at;
    int64_t sizes[4];   /* batch (or pages), tokens, heads, and the size of a vector */
    int64_t strides[3]; /* of the first three; a packed one has a batch of 1 */
} tensor;

typedef struct {
    const sb_attention_call* p;
    tensor q, k, v;
    int64_t group, segments, rows; /* rows: queries times heads, of all sequences */
    int64_t queries;               /* of a sequence, on average if packed */
    char* workspace;
    CUstream stream;
} attention;

static tensor tensor_of(const sb_vectors* x, int64_t batch, int64_t tokens, int64_t heads, int64_t size,
                        bool packed) {
    const tensor found = {
        x->data, {packed ? 1 : batch, tokens, heads, size}, {packed ? 0 : x->batch, x->token, x->head}};
    return found;
}

static attention describe(const sb_attention_call* p) {
    const int64_t of_k = p->block_table ? p->pages : p->batch, slots = p->block_table ? p->page : p->keys;
    const bool packed = p->cu_seqlens_q != NULL, packed_k = p->cu_seqlens_k != NULL;
    attention x = {.p = p, .group = p->heads / p->kv_heads, .segments = ceil_div(p->keys, SEGMENT)};
    x.q = tensor_of(&p->q, p->batch, p->queries, p->heads, p->head, packed);
    x.k = tensor_of(&p->k, of_k, slots, p->kv_heads, p->head, packed_k);
    x.v = tensor_of(&p->v, of_k, slots, p->kv_heads, p->values, packed_k);
    x.rows = x.q.sizes[0] * p->queries * p->heads;
    x.queries = packed && p->batch > 0 ? ceil_div(p->queries, p->batch) : p->queries;
    return x;
}

static void fill_problem(const attention* call, problem* x) {
    const sb_attention_call* p = call->p;
    const int64_t span = p->keys + p->queries; /* no window is wider */
    const bool windowed = p->window.left != -1 || p->window.right != -1;
    *x = (problem){
        .cu_q = p->cu_seqlens_q,
        .cu_k = p->cu_seqlens_k,
        .key_start = p->key_start,
        .key_length = p->key_length,
        .pages = p->block_table,
        .pages_batch = p->block_table ? p->block_table_row : 0,
        .batch = (int32_t)p->batch,
        .heads = (int32_t)p->kv_heads,
        .group = (int32_t)call->group,
        .queries = (int32_t)p->queries,
        .keys = (int32_t)p->keys,
        .head = (int32_t)p->head,
        .values = (int32_t)p->values,
        .page = p->block_table ? (int32_t)p->page : 1,
        .page_count = p->block_table ? (int32_t)p->pages : 1,
        .left = p->window.left < span ? (int32_t)p->window.left : -1,
        .right = p->window.right < span ? (int32_t)p->window.right : -1,
        .align = windowed                                                   ? 2
                 : p->key_start && !p->block_table && p->queries == p->keys ? 1
                                                                            : 0,
        .c = (p->softcap > 0 ? p->softcap : p->scale) * 0x1.715476p+0f, /* log2 e */
        .cap = p->softcap > 0 ? p->scale / p->softcap : 0,
        .scale = p->scale,
    };
}

/* Scratch: a counter of tiles, the log-sum-exps to base 2, and segments. */
static int64_t of_statistics(const attention* x) { return round_up(x->rows * 4, ALIGNMENT); }
static char* counter_of(const attention* x) { return x->workspace; }
static char* statistics_of(const attention* x) { return x->workspace + ALIGNMENT; }
static char* segments_of(const attention* x) { return x->workspace + ALIGNMENT + of_statistics(x); }

static int64_t of_segments(const attention* x, int64_t values) {
    const int64_t row = x->segments * (values + 2) * 4, most = INT64_MAX / 4;
    return row > 0 && x->rows > most / row ? most : x->rows * row;
}

static int64_t room_for(const attention* x, int64_t scratch) {
    return ALIGNMENT + of_statistics(x) + scratch;
}

/* What a kernel would do; its cubin is below 0 if there is none for the call. */
typedef struct {
    const schedule* s;
    int64_t cubin, merge;           /* merge: the kernel that merges segments, if there is scratch */
    int64_t scratch;                /* bytes of segments; 0: a tile has all of its own */
    int64_t blocks, tiles, shares;  /* shares: blocks that share the segments of a tile */
    int64_t heads, height, members; /* of Hopper's tiles: sets of heads in all, queries, and heads of a set */
} plan;

/* The bits of a variant's number after the dtype. Universal kernels' are VECTOR to PAGED, Hopper's SOFTCAP and SPLIT;
   then come both sizes. */
enum { VECTOR = 2, SOFTCAP = 3, PAGED = 4, SPLIT = 4, SIZES = 5, VALUES_OF_MERGE = 2 };
/* The bits of a table's key: of universal kernels' after the sizes, and of Hopper's. */
enum { F32 = 10, LONG_VALUES = 0, WINDOWED = 1 };

static uint32_t sizes_of(const sb_attention_call* p) {
    return (uint32_t)ceil_div(p->head, 16) | (uint32_t)ceil_div(p->values, 16) << 5;
}

/* The kernel that merges segments of so many values. */
static int64_t find_merge(const sb_archive* archive, sb_dtype dtype, int64_t values) {
    const table* t = find_table(archive, ATTENTION_MERGE, 0);
    if (t == NULL) return -1;
    return find_variant(archive, archive->schedules[t->plain].kernel,
                        (uint32_t)dtype | (uint32_t)(values / 16) << VALUES_OF_MERGE);
}

/* ---- The universal kernels ---- */

/* Whether rows consist of aligned chunks of 16 bytes. */
static bool in_chunks(const tensor* x, int size, bool with_address) {
    if ((with_address && !multiple(x->at, 16)) || x->sizes[3] * size % 16) return false;
    for (int i = 0; i < 3; i++)
        if (x->sizes[i] > 1 && x->strides[i] * size % 16) return false;
    return true;
}

static plan plan_universal(const sb_context* context, const attention* x, bool with_addresses) {
    const sb_archive* archive = context->archive;
    const sb_attention_call* p = x->p;
    const int size = itemsize(p->dtype);
    plan found = {.cubin = -1};
    const table* t = find_table(archive, ATTENTION, sizes_of(p) | (uint32_t)(p->dtype == SB_F32) << F32);
    if (t == NULL) return found;
    const bool vector = in_chunks(&x->q, size, with_addresses) && in_chunks(&x->k, size, with_addresses) &&
                        in_chunks(&x->v, size, with_addresses);
    const uint32_t variant = (uint32_t)p->dtype | (uint32_t)vector << VECTOR |
                             (uint32_t)(p->softcap > 0) << SOFTCAP |
                             (uint32_t)(p->block_table != NULL) << PAGED | sizes_of(p) << SIZES;
    const schedule* chosen = choose(archive, t, x->queries * x->group, p->batch * p->kv_heads, p->keys);
    for (int turn = 0; turn < 2 && found.cubin < 0; turn++) {
        const schedule* s = turn == 0 ? chosen : &archive->schedules[t->plain];
        if (s == NULL) continue;
        const int64_t scratch = s->swap ? of_segments(x, s->tile_n) : 0;
        if (turn == 0 && scratch > MOST_SCRATCH) continue;
        found.s = s;
        found.scratch = scratch;
        found.merge = scratch ? find_merge(archive, p->dtype, s->tile_n) : 0;
        found.cubin = found.merge < 0 ? -1 : find_variant(archive, s->kernel, variant);
        found.shares = s->group < x->segments ? s->group : x->segments > 1 ? x->segments : 1;
        found.tiles = ceil_div(p->queries * x->group, s->tile_m);
        const int64_t all = p->cu_seqlens_q ? found.tiles + p->batch : found.tiles * p->batch;
        found.blocks = all * p->kv_heads * found.shares;
    }
    return found;
}

static void fill_tensors(const attention* x, universal_attention_params* to) {
    const sb_attention_call* p = x->p;
    const bool packed = p->cu_seqlens_q != NULL;
    const tensor* tensors[] = {&x->q, &x->k, &x->v};
    int64_t* strides[] = {to->q_strides, to->k_strides, to->v_strides};
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 3; j++) strides[i][j] = tensors[i]->strides[j];
        strides[i][3] = 1;
    }
    to->q = x->q.at;
    to->k = x->k.at;
    to->v = x->v.at;
    to->sinks = p->sinks;
    to->out = p->out;
    to->lse = p->lse;
    to->lse2 = statistics_of(x);
    to->scratch = segments_of(x);
    to->out_strides[0] = packed ? 0 : p->queries * p->heads * p->values;
    to->out_strides[1] = p->heads * p->values;
    to->out_strides[2] = p->values;
    to->lse_batch = packed ? 0 : p->heads * p->queries;
    to->lse_head = p->queries;
    to->segments = (int32_t)x->segments;
    fill_problem(x, &to->x);
}

static sb_status run_universal(const sb_context* context, const attention* x, const plan* of) {
    const sb_attention_call* p = x->p;
    union {
        universal_attention_params of;
        char room[sizeof(universal_attention_params) + 128];
    } params = {0};
    fill_tensors(x, &params.of);
    if (of->scratch == 0) params.of.scratch = NULL;
    params.of.tiles = p->cu_seqlens_q ? 0 : (int32_t)of->tiles;
    params.of.splits = (int32_t)of->shares;
    const sb_status status = launch(context, of->cubin, of->blocks, &params, x->stream);
    return status || !of->scratch ? status : launch(context, of->merge, x->rows, &params, x->stream);
}

/* ---- Hopper ---- */

/* Whether the copy engine can read the tensor. One matrix may serve all heads, or all of the batch, but rows do not
   overlap. */
static bool copyable(const tensor* x, bool with_address) {
    if (with_address && !multiple(x->at, 16)) return false;
    for (int i = 0; i < 3; i++)
        if (x->sizes[i] > 1 && x->strides[i] % 8) return false;
    return x->sizes[1] <= 1 || x->strides[1] >= x->sizes[3];
}

static plan plan_hopper(const sb_context* context, const attention* x, bool with_addresses) {
    const sb_archive* archive = context->archive;
    const sb_attention_call* p = x->p;
    plan found = {.cubin = -1};
    if (p->dtype == SB_F32 || p->block_table != NULL || p->head > LARGEST_HEAD_SM90 ||
        p->values > LARGEST_HEAD_SM90 || p->head % 8 || p->values % 8 || p->keys == 0 ||
        !copyable(&x->q, with_addresses) || !copyable(&x->k, with_addresses) ||
        !copyable(&x->v, with_addresses))
        return found;
    const bool windowed = p->window.left != -1 || p->window.right != -1;
    const uint32_t key = (uint32_t)(p->values > 64) << LONG_VALUES | (uint32_t)windowed << WINDOWED;
    const table* t = find_table(archive, ATTENTION_SM90, key);
    if (t == NULL) return found;
    const bool grouped =
        x->group > 1 && x->queries < FEW_QUERIES && x->group <= MOST_MEMBERS && x->q.strides[2] != 0;
    const int64_t members = grouped ? x->group : 1, sets = p->heads / members;
    const int64_t values = round_up(p->values, 16), scratch = of_segments(x, values);
    const schedule* s = choose(archive, t, x->queries * members, p->batch * sets, p->keys);
    if (s == NULL || s->tile_n < members) return found;
    const bool split = s->group > 1 && x->segments > 1 && scratch <= MOST_SCRATCH;
    found.s = s;
    found.members = members;
    found.height = s->tile_n / members;
    found.tiles = ceil_div(p->queries, found.height) + (p->cu_seqlens_q ? p->batch : 0);
    found.heads = x->q.sizes[0] * sets;
    const int64_t wanted = !split ? 1 : s->group < x->segments ? s->group : x->segments;
    found.shares = ceil_div(x->segments, ceil_div(x->segments, wanted));
    found.scratch = split ? scratch : 0;
    found.blocks = found.tiles * found.heads * found.shares;
    found.merge = split ? find_merge(archive, p->dtype, values) : 0;
    const uint32_t variant = (uint32_t)p->dtype | (uint32_t)(p->softcap > 0) << SOFTCAP |
                             (uint32_t)split << SPLIT | sizes_of(p) << SIZES;
    found.cubin = found.merge < 0 ? -1 : find_variant(archive, s->kernel, variant);
    return found;
}

/* A stride in bytes, of a dimension that one matrix may serve. */
static uint64_t step(const tensor* x, int dimension) {
    const int64_t stride = x->sizes[dimension] > 1 ? x->strides[dimension] : 0;
    return stride ? (uint64_t)stride * 2 : 16;
}

static uint64_t count(const tensor* x, int dimension) {
    return x->sizes[dimension] > 1 && x->strides[dimension] ? (uint64_t)x->sizes[dimension] : 1;
}

/* Tiles of queries: all members of a token side by side. */
static map_recipe query_map(sb_dtype dtype, const tensor* x, int64_t height, int64_t members) {
    const map_recipe map = {
        .dtype = dtype,
        .rank = 4,
        .shape = {(uint64_t)x->sizes[3], count(x, 2), (uint64_t)x->sizes[1], count(x, 0)},
        .strides = {step(x, 2), step(x, 1), step(x, 0)},
        .box = {64, (uint32_t)members, (uint32_t)height, 1},
        .swizzle = 128,
        .promotion = 256,
    };
    return map;
}

static map_recipe key_map(sb_dtype dtype, const tensor* x, int width, int promotion) {
    const map_recipe map = {
        .dtype = dtype,
        .rank = 4,
        .shape = {(uint64_t)x->sizes[3], (uint64_t)x->sizes[1], count(x, 2), count(x, 0)},
        .strides = {step(x, 1), step(x, 2), step(x, 0)},
        .box = {(uint32_t)width, KEYS, 1, 1},
        .swizzle = width * 2,
        .promotion = promotion,
    };
    return map;
}

/* Which operands have one matrix for all of the batch, then which have one for all heads. */
static int32_t shared_matrices(const attention* x) {
    const tensor* tensors[] = {&x->q, &x->k, &x->v};
    int32_t bits = 0;
    for (int i = 0; i < 3; i++)
        bits |= (int32_t)(count(tensors[i], 0) == 1) << i | (int32_t)(count(tensors[i], 2) == 1) << (i + 3);
    return bits;
}

static sb_status run_hopper(const sb_context* context, const attention* x, const plan* of) {
    const sb_attention_call* p = x->p;
    const int64_t values = round_up(p->values, 16);
    _Alignas(128) union {
        hopper_params of;
        char room[sizeof(hopper_params) + 128];
    } params = {0};
    hopper_params* to = &params.of;
    const map_recipe maps[] = {query_map(p->dtype, &x->q, of->height, of->members),
                               key_map(p->dtype, &x->k, 64, of->s->promotion),
                               key_map(p->dtype, &x->v, values % 64 ? 32 : 64, of->s->promotion)};
    sb_status status = encode(to->q, x->q.at, &maps[0]);
    if (status == SB_OK) status = encode(to->k, x->k.at, &maps[1]);
    if (status == SB_OK) status = encode(to->v, x->v.at, &maps[2]);
    const bool windowed = p->window.left != -1 || p->window.right != -1;
    const bool uneven = p->cu_seqlens_q || p->key_start || p->key_length || (windowed && p->queries >= LONG);
    const bool dynamic = !of->scratch && uneven;
    if (status == SB_OK && dynamic)
        status = check_driver(driver.cuMemsetD32Async(counter_of(x), 0, 1, x->stream), "cuMemsetD32Async");
    if (status != SB_OK) return status;
    const int64_t of_head = 2 * p->keys * (p->head + p->values);
    const int64_t beside = (L2 / of_head > 1 ? L2 / of_head : 1) * (x->group / of->members);
    to->out = p->out;
    to->sinks = p->sinks;
    to->lse = p->lse;
    to->lse2 = statistics_of(x);
    to->scratch = of->scratch ? segments_of(x) : NULL;
    to->next = dynamic ? counter_of(x) : NULL;
    to->lse_batch = p->cu_seqlens_q ? 0 : p->heads * p->queries;
    to->lse_head = p->queries;
    to->tiles = (int32_t)of->tiles;
    to->heads = (int32_t)of->heads;
    to->together = (int32_t)(beside < of->heads ? beside : of->heads);
    to->segments = (int32_t)x->segments;
    to->shares = (int32_t)of->shares;
    to->share = (int32_t)ceil_div(x->segments, of->shares);
    to->members = (int32_t)of->members;
    to->height = (int32_t)of->height;
    to->shared = shared_matrices(x);
    fill_problem(x, &to->x);
    const int64_t most = (int64_t)context->multiprocessors * of->s->blocks;
    status = launch(context, of->cubin, of->blocks < most ? of->blocks : most, &params, x->stream);
    if (status != SB_OK || !of->scratch) return status;
    union {
        universal_attention_params of;
        char room[sizeof(universal_attention_params) + 128];
    } merged = {0};
    fill_tensors(x, &merged.of);
    return launch(context, of->merge, x->rows, &merged, x->stream);
}

/* ---- Checks ---- */

static sb_status check_vectors(const char* name, const sb_vectors* x, const tensor* of, sb_dtype dtype) {
    static const char* const names[] = {"batch", "token", "head"};
    return check_array(name, x->data, dtype, names, of->sizes, of->strides, of->sizes[3]);
}

static sb_status check_sizes(const sb_attention_call* p) {
    if (p->dtype < SB_F32 || p->dtype > SB_F16)
        return fail(SB_INVALID, "dtype: expected SB_F32, SB_BF16 or SB_F16, got %d", (int)p->dtype);
    sb_status status;
    if ((status = check_size("batch", p->batch)) || (status = check_size("queries", p->queries)) ||
        (status = check_size("keys", p->keys)) || (status = check_size("heads", p->heads)))
        return status;
    if (p->kv_heads < 1 || p->kv_heads > LARGEST || p->heads < 1 || p->heads % p->kv_heads)
        return fail(SB_INVALID, "heads: expected a multiple of kv_heads, got %" PRId64 " and %" PRId64,
                    p->heads, p->kv_heads);
    if (p->head < 1 || p->head > LARGEST_HEAD || p->values < 1 || p->values > LARGEST_HEAD)
        return fail(SB_INVALID, "head, values: expected 1 to %d, got %" PRId64 " and %" PRId64, LARGEST_HEAD,
                    p->head, p->values);
    const int64_t of_q = p->cu_seqlens_q || p->batch == 0 ? 1 : p->batch;
    if (p->queries > LARGEST / of_q / p->heads || p->batch > LARGEST / p->heads ||
        p->keys + p->queries > LARGEST)
        return fail(SB_INVALID,
                    "batch, queries, keys, heads: expected at most %d rows, got %" PRId64 ", %" PRId64
                    ", %" PRId64 ", %" PRId64,
                    LARGEST, p->batch, p->queries, p->keys, p->heads);
    if (p->cu_seqlens_k && (!p->cu_seqlens_q || p->block_table || p->key_start || p->key_length))
        return fail(SB_INVALID,
                    "cu_seqlens_k: expected cu_seqlens_q with it, and no block_table, key_start or "
                    "key_length");
    if (p->cu_seqlens_q && !p->cu_seqlens_k && !p->block_table)
        return fail(SB_INVALID, "cu_seqlens_q: expected cu_seqlens_k or block_table with it");
    if (p->block_table == NULL) return SB_OK;
    if (p->key_length == NULL)
        return fail(SB_INVALID, "key_length: expected lengths with block_table, got NULL");
    if ((status = check_size("block_table_row", p->block_table_row))) return status;
    if (p->pages < 1 || p->pages > LARGEST)
        return fail(SB_INVALID, "pages: expected 1 to %d, got %" PRId64, LARGEST, p->pages);
    if (p->page < 1 || p->page > LARGEST || p->keys % p->page)
        return fail(SB_INVALID, "page: expected slots of which keys is a multiple, got %" PRId64, p->page);
    return SB_OK;
}

static sb_status check_address(const char* name, const void* at, int of) {
    if (multiple(at, (uintptr_t)of)) return SB_OK;
    return fail(SB_INVALID, "%s: expected an address that is a multiple of %d, got %p", name, of, at);
}

static sb_status check(const attention* x) {
    const sb_attention_call* p = x->p;
    sb_status status;
    if (p->window.left < -1 || p->window.right < -1)
        return fail(SB_INVALID, "window: expected -1 or more to both sides, got %" PRId64 " and %" PRId64,
                    p->window.left, p->window.right);
    if (!(p->scale > 0 && p->scale < 1e38f))
        return fail(SB_INVALID, "scale: expected a number in (0, 1e38), got %g", (double)p->scale);
    if (!(p->softcap >= 0 && p->softcap < 1e38f))
        return fail(SB_INVALID, "softcap: expected a number in [0, 1e38), got %g", (double)p->softcap);
    if ((status = check_vectors("q", &p->q, &x->q, p->dtype)) ||
        (status = check_vectors("k", &p->k, &x->k, p->dtype)) ||
        (status = check_vectors("v", &p->v, &x->v, p->dtype)) ||
        (status = check_address("out", p->out, 16)) || (status = check_address("lse", p->lse, 4)) ||
        (status = check_address("sinks", p->sinks, 4)) ||
        (status = check_address("cu_seqlens_q", p->cu_seqlens_q, 4)) ||
        (status = check_address("cu_seqlens_k", p->cu_seqlens_k, 4)) ||
        (status = check_address("key_start", p->key_start, 4)) ||
        (status = check_address("key_length", p->key_length, 4)) ||
        (status = check_address("block_table", p->block_table, 4)))
        return status;
    if (x->rows > 0 && p->out == NULL) return fail(SB_INVALID, "out: expected an address, got NULL");
    return SB_OK;
}

/* ---- The functions ---- */

sb_status sb_attention_workspace_size(const sb_context* context, const sb_attention_call* p, size_t* bytes) {
    if (bytes == NULL) return fail(SB_INVALID, "bytes: expected where to put the size, got NULL");
    *bytes = 0;
    if (context == NULL) return fail(SB_INVALID, "context: expected a handle, got NULL");
    if (p == NULL) return fail(SB_INVALID, "call: expected a description, got NULL");
    const sb_status status = check_sizes(p);
    if (status != SB_OK) return status;
    const attention x = describe(p);
    /* Any kernel may be needed: addresses decide. */
    const int64_t hopper = plan_hopper(context, &x, false).scratch;
    const int64_t aligned = plan_universal(context, &x, false).scratch;
    const int64_t most = hopper > aligned ? hopper : aligned;
    *bytes = (size_t)room_for(&x, most);
    return SB_OK;
}

/* Rows of no sequence. */
static sb_status clear(const attention* x) {
    const sb_attention_call* p = x->p;
    const size_t bytes = (size_t)(x->rows * p->values * itemsize(p->dtype));
    sb_status status = check_driver(driver.cuMemsetD8Async(p->out, 0, bytes, x->stream), "cuMemsetD8Async");
    if (status == SB_OK && p->lse)
        status = check_driver(driver.cuMemsetD32Async(p->lse, MINUS_INFINITY, (size_t)x->rows, x->stream),
                              "cuMemsetD32Async");
    return status;
}

static sb_status missing(const sb_context* context, const sb_attention_call* p) {
    char what[80], options[80];
    snprintf(what, sizeof what, "attention with heads of %" PRId64 " and %" PRId64, p->head, p->values);
    snprintf(options, sizeof options, "--op attention --head %" PRId64 "x%" PRId64, p->head, p->values);
    return no_kernel(context, what, p->dtype, options);
}

/* Clear what no sequence may have, and launch `kernels`, unless there are no sequences at all. */
static sb_status run(const sb_context* context, const attention* x, const plan* of,
                     sb_status (*kernels)(const sb_context*, const attention*, const plan*)) {
    bool pushed;
    sb_status status = enter(context, &pushed);
    if (status != SB_OK) return status;
    if (x->p->cu_seqlens_q) status = clear(x);
    if (status == SB_OK && kernels) status = kernels(context, x, of);
    leave(pushed);
    return status;
}

sb_status sb_attention(const sb_context* context, const sb_attention_call* p, void* workspace,
                       size_t workspace_bytes, CUstream stream) {
    if (context == NULL) return fail(SB_INVALID, "context: expected a handle, got NULL");
    if (p == NULL) return fail(SB_INVALID, "call: expected a description, got NULL");
    sb_status status = check_sizes(p);
    if (status != SB_OK) return status;
    attention x = describe(p);
    x.stream = stream;
    if ((status = check(&x)) || x.rows == 0) return status;
    if (p->batch == 0) return run(context, &x, NULL, NULL);
    if (workspace == NULL || !multiple(workspace, ALIGNMENT))
        return fail(SB_INVALID, "workspace: expected an address that is a multiple of %d, got %p", ALIGNMENT,
                    workspace);
    x.workspace = workspace;
    plan of = plan_hopper(context, &x, true);
    const bool hopper = of.cubin >= 0;
    if (!hopper) of = plan_universal(context, &x, true);
    if (of.cubin < 0) return missing(context, p);
    if (of.blocks > LARGEST)
        return fail(SB_INVALID, "batch, queries, heads: expected at most %d tiles, got %" PRId64, LARGEST,
                    of.blocks);
    const int64_t wanted = room_for(&x, of.scratch);
    if ((uint64_t)wanted > workspace_bytes)
        return fail(SB_INVALID, "workspace: expected %" PRId64 " bytes, got %zu", wanted, workspace_bytes);
    return run(context, &x, &of, hopper ? run_hopper : run_universal);
}

/* Products of groups of rows: the host side of samebits/backends/cuda/kernels/grouped_sm90.cu, and of the form with
   GROUPED of tensor_core.cu and fma.cu. No host code knows how long groups are: a grid has blocks for every way to cut
   the rows, and schedules are chosen as if all groups had as many. */

#include <inttypes.h>

#include "internal.h"

enum { MOST_GROUPS = 1024, LONGEST_BIAS_LOG2 = 36 }; /* on Hopper, whose kernel has a table of them */

/* Where the ranges of groups end that tables are for, but for the last. */
static const int64_t group_ranges[] = {8, 32, 128};

static uint32_t range_of(int64_t groups) {
    uint32_t i = 0;
    while (i < sizeof group_ranges / sizeof *group_ranges && group_ranges[i] < groups) i++;
    return i;
}

/* Groups that can have rows, and the rows that each has if all have as many. */
static int64_t parts_of(const call* c) { return c->groups->count < c->p->m ? c->groups->count : c->p->m; }

static int64_t share_of(const call* c) { return ceil_div(c->p->m, parts_of(c)); }

/* The most tiles of so many rows that the groups, and the rows after them, can have. */
static int64_t most_tiles(const call* c, int64_t tile) {
    const int64_t rows = c->p->m, parts = c->groups->count + 1 < rows ? c->groups->count + 1 : rows;
    return (rows + (tile - 1) * parts) / tile;
}

static grouped_params groups_of(const call* c) {
    const grouped_params found = {
        .ends = c->groups->ends,
        .count = (int32_t)c->groups->count,
        .rows = (int32_t)c->p->m,
        .bias = c->p->bias ? c->groups->bias : 0,
    };
    return found;
}

/* ---- Hopper ---- */

/* The bits of a variant's number. REDUCED: there is no room for the whole ring beside the table of groups. */
enum { B_MN = 0, DTYPE = 1, OUT_F32 = 3, BIAS = 4, ALIGNED = 5, FOLDED = 6, REDUCED = 7 };
enum { GROUPS = 1 }; /* of a table's key, after the layout of b */

static sb_status grouped_sm90(const sb_context* context, const call* c, bool* done) {
    const sb_archive* archive = context->archive;
    const sb_product* p = c->p;
    const int64_t groups = c->groups->count;
    const int b_major = k_major(&c->b);
    if (k_major(&c->a) != 1 || b_major < 0 || p->k == 0 || groups > MOST_GROUPS || p->out.column != 1 ||
        !multiple(p->a.data, 16) || !multiple(p->b.data, 16) || c->b.batch_stride % 8)
        return SB_OK;
    const uint32_t b_mn = !b_major;
    const table* t = find_table(archive, GROUPED_SM90, b_mn << B_MN | range_of(parts_of(c)) << GROUPS);
    if (t == NULL) return SB_OK;
    const uint32_t variant = b_mn << B_MN | (uint32_t)p->dtype << DTYPE |
                             (uint32_t)(p->out_dtype == SB_F32) << OUT_F32 |
                             (uint32_t)(p->bias != NULL) << BIAS | (uint32_t)aligned_output(p) << ALIGNED;
    const schedule* s = choose(archive, t, share_of(c), p->n, p->k);
    int64_t cubin = -1;
    bool folded = false;
    for (int turn = 0; turn < 2 && cubin < 0; turn++) {
        if (turn == 1) s = &archive->schedules[t->plain];
        if (s == NULL) continue;
        folded = p->k % 64 == 0 && s->tile_k > 64;
        cubin =
            find_variant(archive, s->kernel,
                         variant | (uint32_t)folded << FOLDED | (uint32_t)(groups > s->groups) << REDUCED);
    }
    if (cubin < 0) return SB_OK;
    const int64_t tiles = most_tiles(c, s->swap ? s->tile_n : s->tile_m) *
                          ceil_div(p->n, s->swap ? s->tile_m : (int64_t)s->tile_n * s->cluster);
    if (tiles > LARGEST) return too_many(p);
    _Alignas(128) union {
        struct {
            tensor_core_params product;
            grouped_params groups;
        } of;
        char room[TENSOR_CORE_SM90_PARAMS + GROUPED_PARAMS + 128];
    } params;
    const sb_status status = fill_tensor_core(c, s, folded, &params.of.product);
    if (status != SB_OK) return status;
    params.of.groups = groups_of(c);
    *done = true;
    return launch(context, cubin, blocks_of_tiles(context, s, tiles), &params, c->stream);
}

/* ---- The universal kernels ---- */

static sb_status grouped_universal(const sb_context* context, const call* c) {
    const sb_product* p = c->p;
    const bool fma = p->dtype == SB_F32;
    const sb_archive* archive = context->archive;
    const table* t = find_table(archive, fma ? GROUPED_FMA : GROUPED_TENSOR_CORE, range_of(parts_of(c)));
    _Alignas(64) union {
        struct {
            universal_params product;
            grouped_params groups;
        } of;
        char room[UNIVERSAL_PARAMS + GROUPED_PARAMS + 128];
    } params = {0};
    universal_params* x = &params.of.product;
    const int chunk = fma ? 4 : 8;
    unsigned of_a = layout_of(&c->a, chunk, false, x->a_strides);
    if (of_a == ALONG_ROWS) of_a = GATHER_ROWS; /* groups start at any row */
    const uint32_t variant =
        of_a | layout_of(&c->b, chunk, false, x->b_strides) << 3 | (uint32_t)p->dtype << 6;
    const schedule* s = t == NULL ? NULL : choose(archive, t, share_of(c), p->n, p->k);
    int64_t cubin = s == NULL ? -1 : find_variant(archive, s->kernel, variant);
    if (cubin < 0 && t != NULL) {
        s = &archive->schedules[t->plain];
        cubin = find_variant(archive, s->kernel, variant);
    }
    if (cubin < 0) return no_kernel(context, "grouped products", p->dtype, "--op grouped_mm");
    const int64_t tiles_m = most_tiles(c, s->tile_m), blocks = tiles_m * ceil_div(p->n, s->tile_n);
    if (blocks > LARGEST) return too_many(p);
    fill_universal(c, s, tiles_m, x);
    params.of.groups = groups_of(c);
    return launch(context, cubin, blocks, &params, c->stream);
}

/* ---- The function ---- */

static sb_status check(const sb_product* p, const sb_groups* g) {
    if (g->count < 1 || g->count > LARGEST)
        return fail(SB_INVALID, "groups.count: expected 1 to %d, got %" PRId64, LARGEST, g->count);
    if (p->batch != 1) return fail(SB_INVALID, "batch: expected 1, got %" PRId64, p->batch);
    if (p->accumulate != 0) return fail(SB_INVALID, "accumulate: expected 0, got %d", p->accumulate);
    const sb_status status = check_product(p, g->count);
    if (status != SB_OK) return status;
    if (g->ends == NULL || !multiple(g->ends, 4))
        return fail(SB_INVALID, "groups.ends: expected an address that is a multiple of 4, got %p",
                    (const void*)g->ends);
    if (g->bias < 0 || g->bias > INT64_C(1) << LONGEST_BIAS_LOG2)
        return fail(SB_INVALID, "groups.bias: expected a distance from 0 to 2^36 elements, got %" PRId64,
                    g->bias);
    return SB_OK;
}

sb_status sb_gemm_grouped(const sb_context* context, const sb_product* p, const sb_groups* groups,
                          CUstream stream) {
    if (context == NULL) return fail(SB_INVALID, "context: expected a handle, got NULL");
    if (p == NULL) return fail(SB_INVALID, "product: expected a description, got NULL");
    if (groups == NULL) return fail(SB_INVALID, "groups: expected a description, got NULL");
    sb_status status = check(p, groups);
    if (status != SB_OK || p->m == 0 || p->n == 0) return status;
    const call c = {
        .p = p,
        .a = {p->a.data, p->m, p->k, p->a.row, p->a.column, 0},
        .b = {p->b.data, p->n, p->k, p->b.column, p->b.row, groups->count > 1 ? p->b.batch : 0},
        .sequences = 1,
        .groups = groups,
        .stream = stream,
    };
    bool pushed, done = false;
    if ((status = enter(context, &pushed))) return status;
    if (p->dtype != SB_F32) status = grouped_sm90(context, &c, &done);
    if (status == SB_OK && !done) status = grouped_universal(context, &c);
    leave(pushed);
    return status;
}

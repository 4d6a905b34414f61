/* Products on Hopper: the host side of samebits/backends/cuda/kernels/{tensor_core,fma,fma_few}_sm90.cu. */

#include <inttypes.h>

#include "internal.h"

/* ---- 16 bits ---- */

int k_major(const operand* x) {
    if ((x->k_stride == 1 || x->k == 1) && (x->rows == 1 || (x->row_stride > 0 && x->row_stride % 8 == 0)))
        return 1;
    if ((x->row_stride == 1 || x->rows == 1) && (x->k == 1 || (x->k_stride > 0 && x->k_stride % 8 == 0)))
        return 0;
    return -1;
}

map_recipe operand_map(sb_dtype dtype, const operand* x, int64_t batch, bool mn, int block, int depth,
                       int sharers, bool folded, int promotion) {
    const int64_t inner = mn ? x->rows : x->k, outer = mn ? x->k : x->rows;
    int64_t stride = mn ? x->k_stride : x->row_stride;
    if (outer <= 1) stride = round_up(inner, 8);
    if (x->batch_stride == 0) batch = 1;
    const int64_t batch_stride = x->batch_stride ? x->batch_stride : round_up(stride * outer, 8);
    const int columns = depth / 64;
    map_recipe map = {.dtype = dtype, .rank = 4, .swizzle = 128, .promotion = promotion};
    if (folded && !mn && columns % sharers == 0) {
        map.shape[0] = 64, map.shape[1] = (uint64_t)outer, map.shape[2] = (uint64_t)inner / 64;
        map.strides[1] = 128;
        map.box[0] = 64, map.box[1] = (uint32_t)block, map.box[2] = (uint32_t)(columns / sharers);
    } else {
        const uint32_t width = mn && block % 64 ? 32 : 64;
        map.shape[0] = (uint64_t)inner, map.shape[1] = (uint64_t)outer, map.shape[2] = 1;
        map.strides[1] = (uint64_t)batch_stride * 2;
        map.box[0] = width, map.box[1] = (uint32_t)((mn ? depth : block) / sharers), map.box[2] = 1;
        map.swizzle = (int32_t)width * 2;
    }
    map.shape[3] = (uint64_t)batch;
    map.strides[0] = (uint64_t)stride * 2;
    map.strides[2] = (uint64_t)batch_stride * 2;
    map.box[3] = 1;
    return map;
}

int64_t blocks_of_tiles(const sb_context* context, const schedule* s, int64_t tiles) {
    /* Clusters of four leave some multiprocessors idle. */
    const int64_t usable = s->cluster <= 2 ? context->multiprocessors : context->multiprocessors * 10 / 11;
    const int64_t resident = usable * s->blocks / s->cluster;
    return (tiles < resident ? tiles : resident) * s->cluster;
}

int64_t blocks_sm90(const sb_context* context, const schedule* s, int64_t rows, int64_t columns,
                    int64_t batch) {
    const int64_t across = ceil_div(columns, (int64_t)s->tile_n * s->cluster);
    return blocks_of_tiles(context, s, ceil_div(rows, s->tile_m) * across * batch);
}

/* The bits of a variant's number. */
enum {
    A_MN = 0,
    B_MN = 1,
    DTYPE = 2,
    OUT_F32 = 4,
    BIAS = 5,
    ACCUMULATE = 6,
    ALIGNED = 7,
    FOLDED = 8,
    RAGGED = 9
};
/* The bits of a table's key after the layouts: 0 for a 16-bit output, 1 for f32, 2 for f32 that is read, too. */
enum { OUTPUT = 2, BATCHED = 4 };

/* Distances in the output. Those that no element is at may be anything: they become what a dense one has. */
static int64_t row_stride(const sb_product* p) { return p->m == 1 ? round_up(p->n, 8) : p->out.row; }

static int64_t matrix_stride(const sb_product* p) {
    return p->batch > 1 ? p->out.batch : round_up(row_stride(p) * p->m, 8);
}

bool aligned_output(const sb_product* p) {
    const int unit = p->out_dtype == SB_F32 ? 4 : 8; /* elements of 16 bytes */
    return multiple(p->out.data, 16) && p->n % unit == 0 && row_stride(p) % unit == 0 &&
           matrix_stride(p) % unit == 0;
}

sb_status fill_tensor_core(const call* c, const schedule* s, bool folded, tensor_core_params* x) {
    const sb_product* p = c->p;
    const bool a_mn = !k_major(&c->a), b_mn = !k_major(&c->b), swap = s->swap;
    const operand *tall = swap ? &c->b : &c->a, *wide = swap ? &c->a : &c->b;
    const int64_t matrices = matrices_of(c);
    const map_recipe maps[2] = {operand_map(p->dtype, tall, matrices, swap ? b_mn : a_mn, s->tile_m,
                                            s->tile_k, s->cluster, folded, s->promotion),
                                operand_map(p->dtype, wide, matrices, swap ? a_mn : b_mn, s->tile_n,
                                            s->tile_k, 1, folded, s->promotion)};
    sb_status status = encode(x->tall, tall->at, &maps[0]);
    if (status == SB_OK) status = encode(x->wide, wide->at, &maps[1]);
    if (status == SB_OK && p->out_dtype != SB_F32 && s->panel && aligned_output(p)) {
        const map_recipe out = {
            .dtype = p->out_dtype,
            .rank = 3,
            .shape = {(uint64_t)p->n, (uint64_t)p->m, (uint64_t)p->batch},
            .strides = {(uint64_t)row_stride(p) * 2, (uint64_t)matrix_stride(p) * 2},
            .box = {swap ? 64 : (uint32_t)s->panel, swap ? (uint32_t)s->panel : 64, 1},
            .swizzle = swap ? 128 : s->panel * 2,
            .promotion = 256,
        };
        status = encode(x->out_map, p->out.data, &out);
    } else {
        for (size_t i = 0; i < sizeof x->out_map; i++) x->out_map[i] = 0;
    }
    x->out = p->out.data;
    x->bias = p->bias;
    x->offsets = c->offsets;
    x->row_stride = row_stride(p);
    x->batch_stride = matrix_stride(p);
    x->rows = (int32_t)(swap ? p->n : p->m);
    x->columns = (int32_t)(swap ? p->m : p->n);
    x->k = (int32_t)p->k;
    x->batch = (int32_t)p->batch;
    x->tall_batched = tall->batch_stride != 0;
    x->wide_batched = wide->batch_stride != 0;
    x->sequences = c->offsets == NULL ? 0 : (int32_t)c->sequences;
    x->group = s->group;
    return status;
}

static const table* table_of(const sb_archive* archive, uint32_t layouts, uint32_t output, uint32_t batched) {
    const table* t = NULL;
    for (int with_batch = (int)batched; t == NULL && with_batch >= 0; with_batch--)
        for (int of = (int)output; t == NULL && of >= (output > 0); of--)
            t = find_table(archive, TENSOR_CORE_SM90,
                           layouts | (uint32_t)of << OUTPUT | (uint32_t)with_batch << BATCHED);
    return t;
}

sb_status tensor_core_sm90(const sb_context* context, const call* c, bool* done) {
    const sb_archive* archive = context->archive;
    const sb_product* p = c->p;
    const int a_major = k_major(&c->a), b_major = k_major(&c->b);
    if (a_major < 0 || b_major < 0 || p->k == 0 || p->out.column != 1 || !multiple(p->a.data, 16) ||
        !multiple(p->b.data, 16) || c->a.batch_stride % 8 || c->b.batch_stride % 8 ||
        (c->offsets != NULL && (a_major || b_major)))
        return SB_OK;
    const bool a_mn = !a_major, b_mn = !b_major, f32 = p->out_dtype == SB_F32;
    const uint32_t layouts = (uint32_t)a_mn << A_MN | (uint32_t)b_mn << B_MN;
    const table* t = table_of(archive, layouts, !f32 ? 0 : p->accumulate ? 2 : 1, p->batch > 1);
    if (t == NULL) return SB_OK;

    const bool aligned = aligned_output(p);
    const uint32_t variant = layouts | (uint32_t)p->dtype << DTYPE | (uint32_t)f32 << OUT_F32 |
                             (uint32_t)(p->bias != NULL) << BIAS | (uint32_t)p->accumulate << ACCUMULATE |
                             (uint32_t)aligned << ALIGNED |
                             (c->offsets == NULL ? 0u
                              : c->wide          ? 2u
                                                 : 1u)
                                 << RAGGED;
    const schedule* s = choose(archive, t, p->m, p->n, p->k);
    int64_t cubin = -1;
    bool folded = false;
    for (int turn = 0; turn < 2 && cubin < 0; turn++) {
        if (turn == 1) s = &archive->schedules[t->plain];
        if (s == NULL) continue;
        folded = p->k % 64 == 0 && s->tile_k > 64;
        cubin = find_variant(archive, s->kernel, variant | (uint32_t)folded << FOLDED);
    }
    if (cubin < 0) return SB_OK;

    const int64_t rows = s->swap ? p->n : p->m, columns = s->swap ? p->m : p->n;
    const int64_t across = ceil_div(columns, (int64_t)s->tile_n * s->cluster);
    if (ceil_div(rows, s->tile_m) * across > LARGEST / p->batch) return too_many(p);
    _Alignas(128) union {
        tensor_core_params of;
        char room[sizeof(tensor_core_params) + 128];
    } params;
    const sb_status status = fill_tensor_core(c, s, folded, &params.of);
    if (status != SB_OK) return status;
    *done = true;
    return launch(context, cubin, blocks_sm90(context, s, rows, columns, p->batch), &params, c->stream);
}

/* ---- f32 ---- */

static bool lines(int64_t inner, int64_t step, int64_t outer, int64_t stride) {
    return (step == 1 || inner == 1) &&
           (outer == 1 || (stride % 4 == 0 && inner <= stride && stride < INT64_C(1) << 37));
}

/* 1: contiguous along k; 0: along its rows, which need no transpose; -1: TMA cannot read it. */
static int turned(const operand* x) {
    if (!multiple(x->at, 16) || x->batch_stride % 4) return -1;
    if (lines(x->rows, x->row_stride, x->k, x->k_stride)) return 0;
    return lines(x->k, x->k_stride, x->rows, x->row_stride) ? 1 : -1;
}

enum { FMA_TILE_K = 32 };

static map_recipe fma_map(const operand* x, int64_t batch, bool by_k, int tile) {
    const int64_t inner = by_k ? x->k : x->rows, outer = by_k ? x->rows : x->k;
    const int64_t stride = outer <= 1 ? round_up(inner, 4) : by_k ? x->row_stride : x->k_stride;
    const int64_t batch_stride = x->batch_stride ? x->batch_stride : stride * outer;
    const map_recipe map = {
        .dtype = SB_F32,
        .rank = 4,
        .shape = {(uint64_t)inner, (uint64_t)outer, 1, x->batch_stride ? (uint64_t)batch : 1},
        .strides = {(uint64_t)stride * 4, (uint64_t)batch_stride * 4, (uint64_t)batch_stride * 4},
        .box = {by_k ? FMA_TILE_K : (uint32_t)round_up(tile, 4), by_k ? (uint32_t)tile : FMA_TILE_K, 1, 1},
        .swizzle = by_k ? 128 : 0,
        .promotion = 256,
    };
    return map;
}

typedef struct {
    unsigned char a[128], b[128];
    void* out;
    int64_t out_strides[3];
    void* start;
    int64_t start_strides[3];
    const void* bias;
    int64_t bias_stride;
    int32_t m, n, k, tiles_m, tiles_n, a_batched, b_batched, in_sequences, vectors, bias_type;
} fma_params;

_Static_assert(sizeof(fma_params) == FMA_SM90_PARAMS, "");

sb_status fma_sm90(const sb_context* context, const call* c, bool* done) {
    const sb_archive* archive = context->archive;
    const sb_product* p = c->p;
    if (c->offsets != NULL || p->k == 0) return SB_OK;
    const int a_by_k = turned(&c->a), b_by_k = turned(&c->b);
    if (a_by_k < 0 || b_by_k < 0) return SB_OK;
    const uint32_t variant = (uint32_t)a_by_k | (uint32_t)b_by_k << 1;
    const table* t = find_table(archive, FMA_SM90, variant | (uint32_t)(p->batch > 1) << 2);
    const schedule* s = t == NULL ? NULL : choose(archive, t, p->m, p->n, p->k);
    const int64_t cubin = s == NULL ? -1 : find_variant(archive, s->kernel, variant);
    if (cubin < 0) return SB_OK;
    const int64_t tiles_m = ceil_div(p->m, s->tile_m), tiles_n = ceil_div(p->n, s->tile_n);
    if (tiles_m * tiles_n > LARGEST / p->batch) return too_many(p);
    const map_recipe a = fma_map(&c->a, p->batch, a_by_k, s->tile_m),
                     b = fma_map(&c->b, p->batch, b_by_k, s->tile_n);
    _Alignas(128) union {
        fma_params of;
        char room[sizeof(fma_params) + 128];
    } params = {0};
    fma_params* x = &params.of;
    sb_status status = encode(x->a, c->a.at, &a);
    if (status == SB_OK) status = encode(x->b, c->b.at, &b);
    if (status != SB_OK) return status;
    x->out = p->out.data;
    out_strides(p, x->out_strides);
    if (p->accumulate) {
        x->start = p->out.data;
        out_strides(p, x->start_strides);
    }
    x->bias = p->bias;
    x->bias_stride = p->bias != NULL;
    x->m = (int32_t)p->m;
    x->n = (int32_t)p->n;
    x->k = (int32_t)p->k;
    x->tiles_m = (int32_t)tiles_m;
    x->tiles_n = (int32_t)tiles_n;
    x->a_batched = c->a.batch_stride != 0;
    x->b_batched = c->b.batch_stride != 0;
    x->in_sequences = c->in_sequences;
    x->vectors = writes_vectors(p);
    x->bias_type = p->bias == NULL ? 0 : epilogue_type(p->dtype);
    *done = true;
    return launch(context, cubin, tiles_m * tiles_n * p->batch, &params, c->stream);
}

/* Products: the checks of arguments, the order in which kernels are tried, and the universal kernels. The host side of
   samebits/backends/cuda/kernels/tensor_core.cu and fma.cu; sm90.c has the others. */

#include <inttypes.h>

#include "internal.h"

/* ---- Checks ---- */

enum { LONGEST_STRIDE_LOG2 = 36, MOST_ELEMENTS_LOG2 = 46 };

sb_status check_array(const char* name, const void* data, sb_dtype dtype, const char* const of[3],
                      const int64_t sizes[3], const int64_t strides[3], int64_t run) {
    int64_t last = run;
    for (int i = 0; i < 3; i++) {
        if (sizes[i] <= 1) continue;
        if (strides[i] < 0 || strides[i] > INT64_C(1) << LONGEST_STRIDE_LOG2)
            return fail(SB_INVALID, "%s.%s: expected a distance from 0 to 2^36 elements, got %" PRId64, name,
                        of[i], strides[i]);
        const int64_t most = (INT64_C(1) << MOST_ELEMENTS_LOG2) - last;
        if (strides[i] > 0 && sizes[i] - 1 > most / strides[i])
            return fail(SB_INVALID, "%s: expected an array within 2^46 elements, got %s distance %" PRId64,
                        name, of[i], strides[i]);
        last += (sizes[i] - 1) * strides[i];
    }
    if (sizes[0] == 0 || sizes[1] == 0 || sizes[2] == 0 || run == 0) return SB_OK;
    if (data == NULL) return fail(SB_INVALID, "%s.data: expected an address, got NULL", name);
    if (!multiple(data, (uintptr_t)itemsize(dtype)))
        return fail(SB_INVALID, "%s.data: expected an address that is a multiple of %d, got %p", name,
                    itemsize(dtype), data);
    return SB_OK;
}

sb_status check_matrix(const char* name, const sb_matrix* x, sb_dtype dtype, int64_t rows, int64_t columns,
                       int64_t batch) {
    static const char* const of[3] = {"batch", "row", "column"};
    return check_array(name, x->data, dtype, of, (const int64_t[3]){batch, rows, columns},
                       (const int64_t[3]){x->batch, x->row, x->column}, 1);
}

/* Whether no two elements of the output are one. */
static bool distinct(const sb_product* p) {
    int64_t sizes[3] = {p->batch, p->m, p->n}, strides[3] = {p->out.batch, p->out.row, p->out.column};
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++)
            if (strides[j] < strides[j + 1]) {
                int64_t t = strides[j];
                strides[j] = strides[j + 1], strides[j + 1] = t;
                t = sizes[j], sizes[j] = sizes[j + 1], sizes[j + 1] = t;
            }
    int64_t reach = 0; /* the last element, seen from the first, of the dimensions with smaller strides */
    for (int i = 2; i >= 0; i--) {
        if (sizes[i] <= 1) continue;
        if (strides[i] <= reach) return false;
        reach += (sizes[i] - 1) * strides[i];
    }
    return true;
}

sb_status check_size(const char* name, int64_t size) {
    if (size >= 0 && size <= LARGEST) return SB_OK;
    return fail(SB_INVALID, "%s: expected a size from 0 to %d, got %" PRId64, name, LARGEST, size);
}

sb_status check_product(const sb_product* p, int64_t matrices) {
    sb_status status;
    if (p->dtype < SB_F32 || p->dtype > SB_F16)
        return fail(SB_INVALID, "dtype: expected SB_F32, SB_BF16 or SB_F16, got %d", (int)p->dtype);
    if (p->out_dtype != p->dtype && p->out_dtype != SB_F32)
        return fail(SB_INVALID, "out_dtype: expected dtype or SB_F32, got %d", (int)p->out_dtype);
    if ((status = check_size("m", p->m)) || (status = check_size("n", p->n)) ||
        (status = check_size("k", p->k)) || (status = check_size("batch", p->batch)))
        return status;
    if (p->accumulate != 0 && p->accumulate != 1)
        return fail(SB_INVALID, "accumulate: expected 0 or 1, got %d", p->accumulate);
    if (p->accumulate && p->out_dtype != SB_F32)
        return fail(SB_INVALID, "accumulate: expected an out_dtype of SB_F32, got %d", (int)p->out_dtype);
    if ((status = check_matrix("a", &p->a, p->dtype, p->m, p->k, p->batch)) ||
        (status = check_matrix("b", &p->b, p->dtype, p->k, p->n, matrices)) ||
        (status = check_matrix("out", &p->out, p->out_dtype, p->m, p->n, p->batch)))
        return status;
    if (p->m > 0 && p->n > 0 && p->batch > 0 && !distinct(p))
        return fail(SB_INVALID,
                    "out: expected elements that do not overlap, got distances %" PRId64 ", %" PRId64
                    ", %" PRId64,
                    p->out.batch, p->out.row, p->out.column);
    if (!multiple(p->bias, (uintptr_t)itemsize(p->dtype)))
        return fail(SB_INVALID, "bias: expected an address that is a multiple of %d, got %p",
                    itemsize(p->dtype), p->bias);
    return SB_OK;
}

static sb_status check_sequences(const sb_sequences* s) {
    if (s->wide != 0 && s->wide != 1)
        return fail(SB_INVALID, "sequences.wide: expected 0 or 1, got %d", s->wide);
    if (s->count < 1 || s->count > LARGEST || (s->offsets == NULL && s->count != 1))
        return fail(SB_INVALID, "sequences.count: expected 1 or more, and 1 without offsets, got %" PRId64,
                    s->count);
    if (!multiple(s->offsets, s->wide ? 8 : 4))
        return fail(SB_INVALID, "sequences.offsets: expected an address that is a multiple of %d, got %p",
                    s->wide ? 8 : 4, s->offsets);
    return SB_OK;
}

sb_status too_many(const sb_product* p) {
    return fail(SB_INVALID,
                "m, n, batch: expected at most %d tiles, got %" PRId64 " x %" PRId64 " x %" PRId64, LARGEST,
                p->m, p->n, p->batch);
}

/* ---- What several kernels take ---- */

void out_strides(const sb_product* p, int64_t strides[3]) {
    strides[0] = p->batch == 1 ? 0 : p->out.batch;
    strides[1] = p->m == 1 ? 0 : p->out.row;
    strides[2] = p->n == 1 || p->out.column == 0 ? 1 : p->out.column;
}

bool writes_vectors(const sb_product* p) {
    int64_t strides[3];
    out_strides(p, strides);
    return strides[2] == 1 && multiple(p->out.data, 4 * (uintptr_t)itemsize(p->out_dtype)) &&
           strides[0] % 4 == 0 && strides[1] % 4 == 0;
}

/* ---- The universal kernels ---- */

unsigned layout_of(const operand* x, int chunk, bool ragged, int64_t strides[4]) {
    const bool one_row = x->rows <= 1, one_k = x->k <= 1;
    strides[0] = x->batch_stride;
    strides[1] = 0;
    strides[2] = one_row ? 0 : x->row_stride;
    strides[3] = one_k ? 0 : x->k_stride;
    const bool aligned = multiple(x->at, 16) && x->batch_stride % chunk == 0;
    /* Chunks are not used along a dimension with fewer elements: they could reach past an allocation. Sequences start
       at any k. */
    if (aligned && !ragged && (x->k_stride == 1 || one_k) && (x->row_stride % chunk == 0 || one_row) &&
        x->k >= chunk)
        return ALONG_K;
    if (aligned && (x->row_stride == 1 || one_row) && (x->k_stride % chunk == 0 || one_k) && x->rows >= chunk)
        return ALONG_ROWS;
    if (x->k_stride > x->row_stride) return GATHER_ROWS;
    return strides[3] == 1 ? GATHER_UNIT_K : GATHER_K;
}

void fill_universal(const call* c, const schedule* s, int64_t tiles_m, universal_params* x) {
    const sb_product* p = c->p;
    x->a = c->a.at;
    x->b = c->b.at;
    x->out = p->out.data;
    out_strides(p, x->out_strides);
    if (p->accumulate) {
        x->start = p->out.data;
        out_strides(p, x->start_strides);
    }
    x->bias = p->bias;
    x->bias_stride = p->bias != NULL;
    x->offsets = c->offsets;
    x->m = (int32_t)p->m;
    x->n = (int32_t)p->n;
    x->k = (int32_t)p->k;
    x->sequences = (int32_t)c->sequences;
    x->tiles_m = (int32_t)tiles_m;
    x->tiles_n = (int32_t)ceil_div(p->n, s->tile_n);
    x->last = p->dtype == SB_F32 ? c->in_sequences : (int32_t)p->out_dtype;
    x->vectors = writes_vectors(p);
    x->bias_type = p->bias == NULL ? 0 : (int32_t)p->dtype;
    x->wide = c->offsets != NULL && c->wide;
}

sb_status no_kernel(const sb_context* context, const char* what, sb_dtype dtype, const char* options) {
    static const char* const names[] = {"f32", "bf16", "f16"};
    const sb_archive* archive = context->archive;
    if (archive->major < 8 && dtype != SB_F32)
        return fail(SB_UNSUPPORTED, "%s of %s: expected sm_80 or newer, the archive is for %s", what,
                    names[dtype], archive->arch);
    return fail(SB_UNSUPPORTED, "the archive has no %s of %s: samebits export --dtype %s %s", what,
                names[dtype], names[dtype], options);
}

static sb_status no_products(const sb_context* context, const call* c) {
    return c->in_sequences ? no_kernel(context, "products over sequences", c->p->dtype, "--op ragged")
                           : no_kernel(context, "products", c->p->dtype, "--op gemm");
}

static sb_status universal(const sb_context* context, const call* c) {
    const sb_product* p = c->p;
    const bool fma = p->dtype == SB_F32, ragged = c->offsets != NULL;
    const sb_archive* archive = context->archive;
    const table* t = find_table(archive, fma ? FMA : TENSOR_CORE, p->batch > 1);
    if (t == NULL) return no_products(context, c);
    _Alignas(64) union {
        universal_params of;
        char room[sizeof(universal_params) + 128];
    } params = {0};
    const int chunk = fma ? 4 : 8;
    uint32_t variant = layout_of(&c->a, chunk, ragged, params.of.a_strides);
    variant |= layout_of(&c->b, chunk, ragged, params.of.b_strides) << 3;
    variant |= (uint32_t)p->dtype << 6;
    if (fma) variant |= (uint32_t)ragged << 8;
    const schedule* s = choose(archive, t, p->m, p->n, p->k);
    int64_t cubin = s == NULL ? -1 : find_variant(archive, s->kernel, variant);
    if (cubin < 0) {
        s = &archive->schedules[t->plain];
        cubin = find_variant(archive, s->kernel, variant);
    }
    if (cubin < 0) return no_products(context, c);
    const int64_t tiles_m = ceil_div(p->m, s->tile_m), tiles_n = ceil_div(p->n, s->tile_n);
    const int64_t steps = ragged ? p->k / 16 + c->sequences : ceil_div(p->k, 16);
    if (tiles_m * tiles_n > LARGEST / p->batch || steps > LARGEST) return too_many(p);
    fill_universal(c, s, tiles_m, &params.of);
    return launch(context, cubin, tiles_m * tiles_n * p->batch, &params, c->stream);
}

/* ---- The functions ---- */

sb_status run_product(const sb_context* context, const sb_product* p, const sb_sequences* s,
                      CUstream stream) {
    if (p->m == 0 || p->n == 0 || p->batch == 0) return SB_OK;
    const bool batched = p->batch > 1;
    const call c = {
        .p = p,
        .a = {p->a.data, p->m, p->k, p->a.row, p->a.column, batched ? p->a.batch : 0},
        .b = {p->b.data, p->n, p->k, p->b.column, p->b.row, batched ? p->b.batch : 0},
        .in_sequences = s != NULL,
        .offsets = s == NULL ? NULL : s->offsets,
        .sequences = s == NULL ? 1 : s->count,
        .wide = s == NULL ? 0 : s->wide,
        .stream = stream,
    };
    bool pushed, done = false;
    sb_status status = enter(context, &pushed);
    if (status != SB_OK) return status;
    status = p->dtype == SB_F32 ? fma_sm90(context, &c, &done) : tensor_core_sm90(context, &c, &done);
    if (status == SB_OK && !done) status = universal(context, &c);
    leave(pushed);
    return status;
}

static sb_status checked(const sb_context* context, const sb_product* p, const sb_sequences* s,
                         CUstream stream) {
    if (context == NULL) return fail(SB_INVALID, "context: expected a handle, got NULL");
    if (p == NULL) return fail(SB_INVALID, "product: expected a description, got NULL");
    sb_status status = check_product(p, p->batch);
    if (status == SB_OK && s != NULL) status = check_sequences(s);
    return status ? status : run_product(context, p, s, stream);
}

sb_status sb_bmm(const sb_context* context, const sb_product* product, CUstream stream) {
    return checked(context, product, NULL, stream);
}

static sb_status check_single(const sb_product* p) {
    if (p == NULL || p->batch == 1) return SB_OK;
    return fail(SB_INVALID, "batch: expected 1, got %" PRId64, p->batch);
}

sb_status sb_gemm(const sb_context* context, const sb_product* product, CUstream stream) {
    const sb_status status = check_single(product);
    return status ? status : checked(context, product, NULL, stream);
}

sb_status sb_gemm_ragged(const sb_context* context, const sb_product* product, const sb_sequences* sequences,
                         CUstream stream) {
    if (sequences == NULL) return fail(SB_INVALID, "sequences: expected a description, got NULL");
    const sb_status status = check_single(product);
    return status ? status : checked(context, product, sequences, stream);
}

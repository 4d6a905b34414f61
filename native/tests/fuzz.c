/* Bad arguments, and damaged archives: each gives a status, and none launches anything.

   fuzz ARCHIVE SCRATCH COUNT: an archive without machine code, and a file to write so many damaged ones to. The library is
   linked with the driver of tests, so that sanitizers see both. */

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "samebits.h"

enum { BAD_ARGUMENTS = 1000 };

int driver_launches(void);
void driver_reset(void);

static _Thread_local uint64_t state = 1;

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % below;
}

static int64_t any(const int64_t* values, uint32_t count) { return values[draw(count)]; }
#define ANY(...) any((const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / 8)

static void* address(int64_t at) { return (void*)(uintptr_t)at; }

/* One that no element is at. */
static int64_t any_distance(void) { return ANY(0, 1, 3, 8, 4096, -1, INT64_MIN, INT64_MAX); }

static sb_product good_product(void) {
    const int64_t m = ANY(1, 7, 64, 300, 4096), n = ANY(2, 64, 768, 1001), k = ANY(2, 64, 100, 4096);
    const sb_dtype dtype = (sb_dtype)draw(3);
    sb_product p = {
        .dtype = dtype, .out_dtype = draw(2) ? SB_F32 : dtype, .m = m, .n = n, .k = k, .batch = 1};
    p.a = draw(2) ? sb_rows(address(1 << 20), k) : sb_transposed(address(1 << 20), m);
    p.b = draw(2) ? sb_rows(address(2 << 20), n) : sb_transposed(address(2 << 20), k);
    p.out = sb_rows(address(3 << 20), n);
    p.bias = draw(2) ? address(4 << 20) : NULL;
    p.accumulate = p.out_dtype == SB_F32 && draw(2);
    p.a.batch = any_distance(), p.b.batch = any_distance(), p.out.batch = any_distance();
    if (m == 1) p.a.row = any_distance(), p.out.row = any_distance();
    return p;
}

static const int64_t bad_sizes[] = {-1, INT64_MIN, INT64_MAX, 2147483647, (int64_t)1 << 40};

/* Spoil one of the arguments. */
static void spoil_product(sb_product* p, uint32_t which) {
    sb_matrix* x = (sb_matrix*[]){&p->a, &p->b, &p->out}[draw(3)];
    const int64_t bad = any(bad_sizes, 5);
    switch (which) {
        case 0:
            p->dtype = (sb_dtype)ANY(-1, 3, 99);
            break;
        case 1:
            p->out_dtype = (sb_dtype)(p->dtype == SB_F32 ? ANY(1, 2, -1, 3) : p->dtype == SB_BF16 ? 2 : 1);
            break;
        case 2:
            p->m = bad;
            break;
        case 3:
            p->n = bad;
            break;
        case 4:
            p->k = bad;
            break;
        case 5:
            p->batch = bad;
            break;
        case 6:
            x->data = NULL;
            break;
        case 7:
            x->data = (char*)x->data + 1;
            break;
        case 8:
            x->row = ANY(-1, INT64_MIN, ((int64_t)1 << 36) + 1, INT64_MAX), p->m = p->m < 2 ? 2 : p->m;
            break;
        case 9:
            x->column = ANY(-1, INT64_MIN, ((int64_t)1 << 36) + 1, INT64_MAX);
            break;
        case 10:
            p->out.column = 0;
            break;
        case 11:
            p->out.row = ANY(0, 1), p->m = 9;
            break;
        case 12:
            p->accumulate = (int)ANY(-1, 2, 1 << 30);
            break;
        case 13:
            p->out_dtype = p->dtype = SB_BF16, p->accumulate = 1;
            break;
        case 14:
            p->bias = address(4097);
            break;
        default:
            p->a.row = p->a.column = (int64_t)1 << 36, p->m = p->k = 2147481600;
            break;
    }
}

static sb_status bad_product(const sb_context* context) {
    sb_product p = good_product();
    sb_sequences s = {address(5 << 20), 3, (int)draw(2)};
    const uint32_t which = draw(24);
    if (which < 16) {
        spoil_product(&p, which);
        return which % 3 == 0   ? sb_gemm(context, &p, NULL)
               : which % 3 == 1 ? sb_bmm(context, &p, NULL)
                                : sb_gemm_ragged(context, &p, &s, NULL);
    }
    switch (which) {
        case 16:
            return sb_gemm(NULL, &p, NULL);
        case 17:
            return sb_bmm(context, NULL, NULL);
        case 18:
            return sb_gemm_ragged(context, &p, NULL, NULL);
        case 19:
            p.batch = ANY(0, 2, 5);
            return sb_gemm(context, &p, NULL);
        case 20:
            s.count = ANY(0, -1, INT64_MAX, INT64_MIN);
            break;
        case 21:
            s.offsets = address((5 << 20) + ANY(1, 2, 3));
            break;
        case 22:
            s.wide = (int)ANY(-1, 2);
            break;
        default:
            s.offsets = NULL, s.count = ANY(0, 2, 3);
            break;
    }
    return sb_gemm_ragged(context, &p, &s, NULL);
}

static sb_product good_grouped(sb_groups* groups) {
    sb_product p = good_product();
    p.accumulate = 0;
    p.b.batch = p.k * p.n;
    *groups = (sb_groups){address(5 << 20), ANY(1, 2, 8, 100, 2000), p.n};
    if (groups->count == 1) p.b.batch = any_distance();
    return p;
}

static sb_status bad_grouped(const sb_context* context) {
    sb_groups g;
    sb_product p = good_grouped(&g);
    const uint32_t which = draw(24);
    if (which < 16) {
        spoil_product(&p, which);
        return sb_gemm_grouped(context, &p, &g, NULL);
    }
    switch (which) {
        case 16:
            return sb_gemm_grouped(NULL, &p, &g, NULL);
        case 17:
            return sb_gemm_grouped(context, NULL, &g, NULL);
        case 18:
            return sb_gemm_grouped(context, &p, NULL, NULL);
        case 19:
            g.count = ANY(0, -1, INT64_MIN, INT64_MAX, 2147483647);
            break;
        case 20:
            g.ends = draw(2) ? NULL : address((5 << 20) + ANY(1, 2, 3));
            break;
        case 21:
            g.bias = ANY(-1, INT64_MIN, INT64_MAX);
            break;
        case 22:
            p.batch = ANY(0, 2, 100);
            break;
        default:
            p.b.batch = ANY(-1, INT64_MIN, INT64_MAX), g.count = 9;
            break;
    }
    return sb_gemm_grouped(context, &p, &g, NULL);
}

static sb_logp good_logp(void) {
    sb_logp p = {.dtype = (sb_dtype)draw(3), .tokens = ANY(1, 9, 300), .features = ANY(8, 64, 100)};
    p.vocabulary = ANY(1, 129, 5000);
    p.hidden = address(1 << 20), p.hidden_row = p.features;
    p.weight = address(2 << 20), p.weight_row = p.features;
    p.bias = draw(2) ? address(3 << 20) : NULL;
    p.target = address(4 << 20);
    p.ignore_index = -100, p.temperature = 1;
    p.logp = address(5 << 20);
    p.entropy = draw(2) ? address(6 << 20) : NULL;
    if (p.tokens == 1) p.hidden_row = any_distance();
    if (p.vocabulary == 1) p.weight_row = any_distance();
    return p;
}

static sb_status bad_logp(const sb_context* context) {
    sb_logp p = good_logp();
    size_t bytes = (size_t)1 << 40;
    void* scratch = address(1 << 24);
    const int64_t bad = any(bad_sizes, 5);
    switch (draw(20)) {
        case 0:
            p.dtype = (sb_dtype)ANY(-1, 3);
            break;
        case 1:
            p.tokens = bad;
            break;
        case 2:
            p.features = bad;
            break;
        case 3:
            p.vocabulary = bad;
            break;
        case 4:
            p.vocabulary = 0;
            break;
        case 5:
            p.hidden = NULL;
            break;
        case 6:
            p.weight = NULL;
            break;
        case 7:
            p.hidden = address(4097);
            break;
        case 8:
            p.weight_row = ANY(-8, INT64_MIN, INT64_MAX), p.vocabulary = 9;
            break;
        case 9:
            p.hidden_row = ANY(-8, INT64_MIN, INT64_MAX), p.tokens = 9;
            break;
        case 10:
            p.bias = address(4097);
            break;
        case 11:
            p.target = draw(2) ? NULL : address(4100);
            break;
        case 12:
            p.logp = draw(2) ? NULL : address(4098);
            break;
        case 13:
            p.entropy = address(4098);
            break;
        case 14:
            p.temperature = (double[]){0, -1, NAN, INFINITY, 0x1p127, 0x1p-127}[draw(6)];
            break;
        case 15:
            scratch = draw(2) ? NULL : address(4096 + 128);
            break;
        case 16:
            bytes = (size_t)draw(64);
            break;
        case 17:
            return sb_linear_logp(NULL, &p, scratch, bytes, NULL);
        case 18:
            return sb_linear_logp(context, NULL, scratch, bytes, NULL);
        default:
            return sb_workspace_size(draw(2) ? context : NULL, &p, NULL);
    }
    return sb_linear_logp(context, &p, scratch, bytes, NULL);
}

static sb_attention_call good_attention(void) {
    const sb_dtype dtype = (sb_dtype)draw(3);
    const int64_t kv_heads = ANY(1, 2, 8), size = ANY(64, 128), batch = ANY(1, 3, 40),
                  keys = ANY(64, 512, 4096);
    sb_attention_call p = {.dtype = dtype, .batch = batch, .queries = ANY(1, 7, 300), .keys = keys};
    p.heads = kv_heads * ANY(1, 4, 7), p.kv_heads = kv_heads, p.head = p.values = size;
    p.q = (sb_vectors){address(1 << 20), p.queries * p.heads * size, p.heads * size, size};
    p.k = (sb_vectors){address(2 << 20), keys * kv_heads * size, kv_heads * size, size};
    p.v = (sb_vectors){address(3 << 20), keys * kv_heads * size, kv_heads * size, size};
    p.out = address(4 << 20), p.lse = draw(2) ? address(5 << 20) : NULL;
    p.scale = 0.125f, p.softcap = draw(2) ? 50 : 0;
    p.window = draw(2) ? sb_causal() : sb_all_keys();
    p.sinks = draw(2) ? address(6 << 20) : NULL;
    switch (draw(4)) {
        case 0:
            p.cu_seqlens_q = p.cu_seqlens_k = address(7 << 20);
            break;
        case 1:
            p.key_length = address(7 << 20), p.key_start = draw(2) ? address(8 << 20) : NULL;
            break;
        case 2:
            p.key_length = p.block_table = address(7 << 20);
            p.page = 64, p.pages = 9, p.block_table_row = keys / 64;
            break;
        default:
            break;
    }
    sb_vectors* tensors[] = {&p.q, &p.k, &p.v};
    for (int i = 0; i < 3; i++) {
        if (p.batch == 1 && !(i > 0 && p.block_table)) tensors[i]->batch = any_distance();
        if (i == 0 && p.queries == 1) p.q.token = any_distance();
        if ((i == 0 ? p.heads : p.kv_heads) == 1) tensors[i]->head = any_distance();
    }
    return p;
}

static sb_status bad_attention(const sb_context* context) {
    sb_attention_call p = good_attention();
    sb_vectors* x = (sb_vectors*[]){&p.q, &p.k, &p.v}[draw(3)];
    size_t bytes = (size_t)1 << 40;
    void* scratch = address(1 << 24);
    const int64_t bad = any(bad_sizes, 5);
    switch (draw(26)) {
        case 0:
            p.dtype = (sb_dtype)ANY(-1, 3, 99);
            break;
        case 1:
            p.batch = bad;
            break;
        case 2:
            p.queries = bad;
            break;
        case 3:
            p.keys = bad;
            break;
        case 4:
            p.heads = ANY(-1, 0, INT64_MIN, INT64_MAX), p.kv_heads = 2;
            break;
        case 5:
            p.kv_heads = ANY(-1, 0, INT64_MIN, INT64_MAX);
            break;
        case 6:
            p.head = ANY(-1, 0, 257, INT64_MAX);
            break;
        case 7:
            p.values = ANY(-1, 0, 257, INT64_MIN);
            break;
        case 8:
            x->data = draw(2) ? NULL : (char*)x->data + 1;
            break;
        case 9:
            x->head = ANY(-1, INT64_MIN, INT64_MAX), p.kv_heads = 2, p.heads = 4;
            break;
        case 10:
            p.q.token = ANY(-1, INT64_MIN, INT64_MAX), p.queries = 9;
            break;
        case 11:
            p.out = draw(2) ? NULL : address((4 << 20) + 8);
            break;
        case 12:
            p.lse = address((5 << 20) + 2);
            break;
        case 13:
            p.scale = (float[]){0, -1, NAN, INFINITY, 2e38f}[draw(5)];
            break;
        case 14:
            p.softcap = (float[]){-1, NAN, INFINITY, 2e38f}[draw(4)];
            break;
        case 15:
            p.window.left = ANY(-2, INT64_MIN);
            break;
        case 16:
            p.window.right = ANY(-2, INT64_MIN);
            break;
        case 17:
            p.sinks = address(4097);
            break;
        case 18:
            p.cu_seqlens_q = address(7 << 20), p.cu_seqlens_k = p.block_table = NULL;
            break;
        case 19:
            p.cu_seqlens_k = address(7 << 20), p.cu_seqlens_q = NULL;
            break;
        case 20:
            p.block_table = address(7 << 20), p.key_length = NULL;
            break;
        case 21:
            p.cu_seqlens_q = p.cu_seqlens_k = NULL;
            p.block_table = p.key_length = address(7 << 20), p.pages = 9;
            if (draw(2))
                p.pages = ANY(0, -1, INT64_MIN, INT64_MAX), p.page = 1;
            else
                p.page = ANY(0, -1, 63, INT64_MIN, INT64_MAX);
            break;
        case 22:
            scratch = draw(2) ? NULL : address(4096 + 128);
            break;
        case 23:
            bytes = (size_t)draw(256);
            break;
        case 24:
            return sb_attention(draw(2) ? NULL : context, draw(2) ? NULL : &p, draw(2) ? NULL : address(1), 0,
                                NULL);
        default:
            return sb_attention_workspace_size(draw(2) ? context : NULL, &p, NULL);
    }
    return sb_attention(context, &p, scratch, bytes, NULL);
}

static sb_status bad_handle(const sb_archive* archive, const char* path) {
    sb_archive* a;
    sb_context* c;
    switch (draw(7)) {
        case 0:
            return sb_archive_open(NULL, &a);
        case 1:
            return sb_archive_open(path, NULL);
        case 2:
            return sb_archive_open("/nowhere/at/all", &a);
        case 3:
            return sb_archive_open("/", &a);
        case 4:
            return sb_context_create(NULL, 0, &c);
        case 5:
            return sb_context_create(archive, 0, NULL);
        default:
            return sb_context_create(archive, (int)ANY(-1, 1, 99, INT32_MIN), &c);
    }
}

/* Calls that are right. Whether the archive has a kernel for them is its own matter. */
static int some_calls(const sb_context* context) {
    int refused = 0;
    for (int i = 0; i < 20; i++) {
        const sb_product p = good_product();
        const sb_sequences s = {address(5 << 20), 3, 0};
        const sb_logp l = good_logp();
        const sb_attention_call attention = good_attention();
        size_t wanted = 0;
        refused += sb_attention_workspace_size(context, &attention, &wanted) != SB_OK;
        refused += sb_attention(context, &attention, address(1 << 24), wanted, NULL) != SB_OK;
        sb_groups g;
        const sb_product of_groups = good_grouped(&g);
        refused += sb_gemm_grouped(context, &of_groups, &g, NULL) != SB_OK;
        refused += sb_gemm(context, &p, NULL) != SB_OK;
        refused += sb_gemm_ragged(context, &p, &s, NULL) != SB_OK;
        refused += sb_linear_logp(context, &l, address(1 << 24), (size_t)1 << 40, NULL) != SB_OK;
    }
    return refused;
}

static void* calls_of_a_thread(void* context) {
    intptr_t refused = 0;
    for (int i = 0; i < 50; i++) refused += some_calls(context);
    return (void*)refused;
}

/* Threads that share a context. */
static int refused_in_threads(sb_context* context) {
    pthread_t threads[4];
    void* refused;
    int all = 0;
    for (int i = 0; i < 4; i++)
        if (pthread_create(&threads[i], NULL, calls_of_a_thread, context)) exit(2);
    for (int i = 0; i < 4; i++) {
        if (pthread_join(threads[i], &refused)) exit(2);
        all += (int)(intptr_t)refused;
    }
    return all;
}

static uint32_t crc32(const unsigned char* bytes, size_t count) {
    uint32_t crc = 0xFFFFFFFF;
    for (size_t i = 0; i < count; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0xEDB88320 : crc >> 1;
    }
    return ~crc;
}

/* Open the archive with changed bytes; with a right checksum the tables have to be caught, or be harmless. */
static int damaged(const unsigned char* bytes, size_t size, const char* scratch, int i) {
    unsigned char* copy = malloc(size);
    memcpy(copy, bytes, size);
    size_t kept = size;
    const int with_checksum = i % 4 != 0;
    for (uint32_t j = 0, changes = 1 + draw(4); j < changes; j++) {
        /* The header, where an accident does most, or anywhere. */
        const size_t at =
            with_checksum ? 24 + (draw(3) ? draw(248) : draw((uint32_t)size - 24)) : draw((uint32_t)size);
        copy[at] ^= (unsigned char)(1u << draw(8));
    }
    if (!with_checksum && draw(3) == 0) kept = draw((uint32_t)size);
    if (with_checksum) {
        const uint32_t crc = crc32(copy + 24, size - 24);
        memcpy(copy + 12, &crc, 4);
    }
    FILE* file = fopen(scratch, "wb");
    if (file == NULL || fwrite(copy, 1, kept, file) != kept) exit(2);
    fclose(file);
    const int same = kept == size && memcmp(copy, bytes, size) == 0;
    free(copy);
    sb_archive* archive;
    sb_status status = sb_archive_open(scratch, &archive);
    if (status != SB_OK) return status == SB_ARCHIVE && *sb_last_error() != 0 ? 1 : -1;
    sb_context* context;
    if (sb_context_create(archive, 0, &context) == SB_OK) some_calls(context);
    sb_context_destroy(context);
    sb_archive_close(archive);
    return same || with_checksum ? 0 : -1;
}

int main(int count, char** arguments) {
    if (count != 4) return 2;
    const int damages = atoi(arguments[3]);
    sb_archive* archive;
    sb_context* context;
    if (sb_archive_open(arguments[1], &archive) || sb_context_create(archive, 0, &context)) {
        fprintf(stderr, "%s\n", sb_last_error());
        return 2;
    }
    if (some_calls(context) + refused_in_threads(context) != 0) {
        fprintf(stderr, "a good call was refused: %s\n", sb_last_error());
        return 1;
    }
    driver_reset();
    int statuses = 0;
    for (int i = 0; i < BAD_ARGUMENTS; i++) {
        const uint32_t kind = draw(13);
        const sb_status status = kind == 0  ? bad_handle(archive, arguments[1])
                                 : kind < 4 ? bad_logp(context)
                                 : kind < 6 ? bad_grouped(context)
                                 : kind < 9 ? bad_attention(context)
                                            : bad_product(context);
        statuses += status != SB_OK && strlen(sb_last_error()) > 10 && driver_launches() == 0;
    }
    sb_archive_close(archive); /* the context keeps it */
    if (some_calls(context) != 0) return 1;
    sb_context_destroy(context);

    FILE* file = fopen(arguments[1], "rb");
    static unsigned char bytes[1 << 22];
    const size_t size = file ? fread(bytes, 1, sizeof bytes, file) : 0;
    if (file) fclose(file);
    if (size < 1024 || size == sizeof bytes) return 2;
    int caught = 0, missed = 0;
    for (int i = 0; i < damages; i++) {
        const int found = damaged(bytes, size, arguments[2], i);
        caught += found == 1, missed += found < 0;
    }
    printf("%d statuses of %d bad arguments; %d of %d damaged archives refused, %d wrongly taken\n", statuses,
           BAD_ARGUMENTS, caught, damages, missed);
    return statuses == BAD_ARGUMENTS && missed == 0 && caught > damages / 4 ? 0 : 1;
}

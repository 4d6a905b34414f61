/* Every function on a GPU, against known answers: cc -std=c11 native/tests/smoke.c -Inative/src -L. -lsamebits -ldl -o smoke
   smoke ARCHIVE [DEVICE] prints a line for each case, and exits with 0 if all bits are right.

   The answers are hashes of results, recorded by the CPU reference: native/tests/answers.py writes smoke_answers.h. */

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "samebits.h"
#include "smoke_answers.h"

/* ---- The driver's memory and graphs ---- */

static void* library;

static void* symbol(const char* name) {
    void* found = dlsym(library, name);
    if (found == NULL) exit((fprintf(stderr, "the driver has no %s\n", name), 2));
    return found;
}

#define CALL(name, types, ...)                                                     \
    do {                                                                           \
        int(*f) types;                                                             \
        void* found = symbol(#name);                                               \
        memcpy(&f, &found, sizeof f);                                              \
        const int code = f(__VA_ARGS__);                                           \
        if (code) exit((fprintf(stderr, #name ": driver's error %d\n", code), 2)); \
    } while (0)

static void* on_gpu(const void* from, size_t bytes) {
    unsigned long long at = 0;
    CALL(cuMemAlloc_v2, (unsigned long long*, size_t), &at, bytes);
    if (from != NULL) CALL(cuMemcpyHtoD_v2, (unsigned long long, const void*, size_t), at, from, bytes);
    return (void*)(uintptr_t)at;
}

static CUstream stream;

static uint64_t hash_of(void* at, size_t bytes) {
    unsigned char* copy = malloc(bytes);
    CALL(cuStreamSynchronize, (CUstream), stream);
    CALL(cuMemcpyDtoH_v2, (void*, unsigned long long, size_t), copy, (uintptr_t)at, bytes);
    uint64_t hash = 0xCBF29CE484222325;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ copy[i]) * 0x100000001B3;
    free(copy);
    return hash;
}

/* ---- Operands: numbers of seven bits with exponents of nine ---- */

static uint32_t bits_of(uint32_t i, uint32_t seed) {
    uint32_t x = i * 2654435761u + seed * 40503u;
    x = (x ^ x >> 15) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    x ^= x >> 16;
    const int value = (int)(x >> 16) % 255 - 127;
    const float scaled = (float)value / 64 * (float)(1 << (x >> 8 & 0xFF) % 9) / 16;
    uint32_t bits;
    memcpy(&bits, &scaled, 4);
    return bits;
}

static void* made(sb_dtype dtype, size_t count, uint32_t seed) {
    uint32_t* wide = malloc(count * 4 + 4);
    uint16_t* narrow = (uint16_t*)wide;
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = bits_of((uint32_t)i, seed);
        if (dtype == SB_F32)
            wide[i] = bits;
        else if (dtype == SB_BF16)
            narrow[i] = (uint16_t)(bits >> 16);
        else
            narrow[i] =
                (uint16_t)(bits << 1 == 0 ? 0
                                          : (bits >> 16 & 0x8000) | ((bits >> 13 & 0x3FFFF) - (112u << 10)));
    }
    void* at = on_gpu(wide, count * (dtype == SB_F32 ? 4 : 2));
    free(wide);
    return at;
}

/* ---- Cases ---- */

static const uint64_t* answers;
static int wrong;

static void expect(sb_status status, int which, void* at, size_t bytes) {
    static const char* const names[] = {ANSWER_NAMES};
    if (status != SB_OK) {
        printf("%-28s status %d: %s\n", names[which], (int)status, sb_last_error());
        wrong++;
        return;
    }
    const uint64_t hash = hash_of(at, bytes);
    printf("%-28s %016llx %s\n", names[which], (unsigned long long)hash,
           hash == answers[which] ? "ok" : "has other bits than recorded");
    wrong += hash != answers[which];
}

static sb_product product(sb_dtype dtype, sb_dtype out, int64_t m, int64_t n, int64_t k, int64_t batch) {
    sb_product p = {.dtype = dtype, .out_dtype = out, .m = m, .n = n, .k = k, .batch = batch};
    p.a = sb_rows(made(dtype, (size_t)(m * k * batch), 1), k);
    p.b = sb_rows(made(dtype, (size_t)(k * n * batch), 2), n);
    p.out = sb_rows(made(out, (size_t)(m * n * batch), 3), n);
    p.a.batch = m * k;
    p.b.batch = k * n;
    p.out.batch = m * n;
    return p;
}

static sb_vectors vectors(int64_t tokens, int64_t heads, int64_t size, uint32_t seed) {
    const sb_vectors x = {made(SB_BF16, (size_t)(2 * tokens * heads * size), seed), tokens * heads * size,
                          heads * size, size};
    return x;
}

static void attended(const sb_context* context, sb_attention_call* p, int which) {
    const int64_t rows = (p->cu_seqlens_q ? 1 : p->batch) * p->queries * p->heads;
    size_t bytes;
    p->out = on_gpu(NULL, (size_t)(rows * p->values * 2));
    sb_status status = sb_attention_workspace_size(context, p, &bytes);
    if (status == SB_OK) status = sb_attention(context, p, on_gpu(NULL, bytes), bytes, stream);
    expect(status, which, p->out, (size_t)(rows * p->values * 2));
}

static void attend(const sb_context* context) {
    sb_attention_call p = {
        .dtype = SB_BF16, .batch = 2, .queries = 70, .keys = 70, .heads = 4, .kv_heads = 2};
    p.head = p.values = 64;
    p.q = vectors(70, 4, 64, 1), p.k = vectors(70, 2, 64, 2), p.v = vectors(70, 2, 64, 3);
    p.scale = 0x1p-10f, p.window = sb_causal();
    attended(context, &p, 9);

    const int32_t lengths[] = {1100, 530}; /* a decoding step with a cache, which begins a segment */
    p.queries = 1, p.keys = 1200, p.window = sb_all_keys();
    p.q = vectors(1, 4, 64, 1), p.k = vectors(1200, 2, 64, 2), p.v = vectors(1200, 2, 64, 3);
    p.key_length = on_gpu(lengths, sizeof lengths);
    attended(context, &p, 10);

    const int32_t offsets[] = {0, 33, 100}; /* and forty tokens of no sequence */
    p.queries = p.keys = 140, p.window = sb_causal(), p.key_length = NULL, p.softcap = 20;
    p.q = vectors(70, 4, 64, 1), p.k = vectors(70, 2, 64, 2), p.v = vectors(70, 2, 64, 3);
    p.cu_seqlens_q = p.cu_seqlens_k = on_gpu(offsets, sizeof offsets);
    attended(context, &p, 11);
}

static void run(const sb_context* context) {
    sb_product p = product(SB_BF16, SB_BF16, 70, 96, 128, 1); /* NT, with a bias */
    p.b = sb_transposed(p.b.data, 128);
    p.bias = made(SB_BF16, 96, 4);
    expect(sb_gemm(context, &p, stream), 0, p.out.data, 70 * 96 * 2);

    void *graph = NULL, *replay = NULL;
    CALL(cuMemsetD8_v2, (unsigned long long, unsigned char, size_t), (uintptr_t)p.out.data, 0xFF,
         70 * 96 * 2);
    CALL(cuStreamBeginCapture_v2, (CUstream, int), stream, 1);
    const sb_status captured = sb_gemm(context, &p, stream);
    CALL(cuStreamEndCapture, (CUstream, void**), stream, &graph);
    CALL(cuGraphInstantiateWithFlags, (void**, void*, unsigned long long), &replay, graph, 0);
    CALL(cuGraphLaunch, (void*, CUstream), replay, stream);
    expect(captured, 1, p.out.data, 70 * 96 * 2);

    p = product(SB_F16, SB_F32, 64, 48, 200, 1); /* NN, into what is there */
    p.accumulate = 1;
    expect(sb_gemm(context, &p, stream), 2, p.out.data, 64 * 48 * 4);

    p = product(SB_BF16, SB_BF16, 33, 17, 45, 1); /* TN; the copy engine cannot read it */
    p.a = sb_transposed(p.a.data, 33);
    expect(sb_gemm(context, &p, stream), 3, p.out.data, 33 * 17 * 2);

    p = product(SB_F32, SB_F32, 50, 60, 100, 1); /* NT */
    p.b = sb_transposed(p.b.data, 100);
    expect(sb_gemm(context, &p, stream), 4, p.out.data, 50 * 60 * 4);

    p = product(SB_BF16, SB_BF16, 50, 40, 72, 3);
    expect(sb_bmm(context, &p, stream), 5, p.out.data, 3 * 50 * 40 * 2);

    const int32_t offsets[] = {0, 37, 100, 128};
    const sb_sequences sequences = {on_gpu(offsets, sizeof offsets), 3, 0};
    p = product(SB_BF16, SB_F32, 64, 40, 128, 1); /* TN */
    p.a = sb_transposed(p.a.data, 64);
    p.accumulate = 1;
    expect(sb_gemm_ragged(context, &p, &sequences, stream), 6, p.out.data, 64 * 40 * 4);

    const int32_t ends[] = {5, 5, 33}; /* and five rows of no group */
    const sb_groups groups = {on_gpu(ends, sizeof ends), 3, 72};
    p = product(SB_BF16, SB_BF16, 38, 72, 128, 1); /* NT, of experts with biases */
    p.b = sb_transposed(made(SB_BF16, 3 * 72 * 128, 2), 128);
    p.b.batch = 72 * 128;
    p.bias = made(SB_BF16, 3 * 72, 4);
    expect(sb_gemm_grouped(context, &p, &groups, stream), 7, p.out.data, 38 * 72 * 2);

    p = product(SB_F32, SB_F32, 38, 50, 60, 1); /* NN, of groups */
    p.b = sb_rows(made(SB_F32, 3 * 60 * 50, 2), 50);
    p.b.batch = 60 * 50;
    expect(sb_gemm_grouped(context, &p, &groups, stream), 8, p.out.data, 38 * 50 * 4);

    attend(context);

    const int64_t target[] = {0, 299, 7, -100, 128, 127, 300, 1, 2};
    sb_logp l = {.dtype = SB_BF16, .tokens = 9, .features = 64, .vocabulary = 300, .ignore_index = -100};
    l.hidden = made(SB_BF16, 9 * 64, 5), l.hidden_row = 64;
    l.weight = made(SB_BF16, 300 * 64, 6), l.weight_row = 64;
    l.bias = made(SB_BF16, 300, 7);
    l.target = on_gpu(target, sizeof target);
    l.temperature = 50;
    l.logp = on_gpu(NULL, 2 * 9 * 4);
    l.entropy = l.logp + 9;
    size_t bytes;
    sb_status status = sb_workspace_size(context, &l, &bytes);
    if (status == SB_OK) status = sb_linear_logp(context, &l, on_gpu(NULL, bytes), bytes, stream);
    expect(status, 12, l.logp, 2 * 9 * 4);
}

int main(int count, char** arguments) {
    if (count < 2) return fprintf(stderr, "smoke ARCHIVE [DEVICE]\n"), 2;
    sb_archive* archive;
    sb_context* context;
    const int device = count > 2 ? atoi(arguments[2]) : 0;
    if (sb_archive_open(arguments[1], &archive) || sb_context_create(archive, device, &context))
        return fprintf(stderr, "%s\n", sb_last_error()), 2;
    static const char* const families[] = {ANSWER_DIGESTS};
    const char* digest = sb_contract_digest(archive, SB_BF16);
    for (int i = 0; i < 2; i++)
        if (digest != NULL && strcmp(digest, families[i]) == 0) answers = recorded[i];
    if (answers == NULL) return fprintf(stderr, "no answers are recorded for this contract\n"), 2;

    library = dlopen("libcuda.so.1", RTLD_NOW);
    void* primary;
    CALL(cuDevicePrimaryCtxRetain, (void**, int), &primary, device);
    CALL(cuCtxSetCurrent, (void*), primary);
    CALL(cuStreamCreate, (CUstream*, unsigned), &stream, 0); /* in order with copies on the default stream */
    run(context);
    sb_context_destroy(context);
    sb_archive_close(archive);
    return wrong > 0;
}

/* Contexts: an archive's kernels on a device. And what every launch needs: tensor maps, and the launch itself. */

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* Numbers of the driver's. */
enum {
    MULTIPROCESSORS = 16,
    CAPABILITY_MAJOR = 75,
    CAPABILITY_MINOR = 76,
    MOST_SMEM = 97,
    DYNAMIC_SMEM = 8,
    NON_PORTABLE_CLUSTER = 14,
    CLUSTER_DIMENSION = 4,
    PROGRAMMATIC_SERIALIZATION = 6
};

sb_status enter(const sb_context* context, bool* pushed) {
    void* now = NULL;
    *pushed = false;
    if (driver.cuCtxGetCurrent(&now) == 0 && now == context->current) return SB_OK;
    sb_status status = check_driver(driver.cuCtxPushCurrent_v2(context->current), "cuCtxPushCurrent");
    *pushed = status == SB_OK;
    return status;
}

void leave(bool pushed) {
    void* popped;
    if (pushed) driver.cuCtxPopCurrent_v2(&popped);
}

/* Load a kernel; `code` is its machine code. */
static sb_status load_kernel(sb_context* x, uint32_t i, const unsigned char* code) {
    const cubin* c = &x->archive->cubins[i];
    if ((int64_t)c->smem > x->max_smem)
        return fail(SB_UNSUPPORTED, "%s needs %" PRIu32 " bytes of shared memory, this GPU has %d", c->entry,
                    c->smem, x->max_smem);
    sb_status status = check_driver(driver.cuModuleLoadData(&x->modules[i], code), c->entry);
    if (status == SB_OK)
        status =
            check_driver(driver.cuModuleGetFunction(&x->functions[i], x->modules[i], c->entry), c->entry);
    if (status == SB_OK && c->smem > 0)
        status = check_driver(driver.cuFuncSetAttribute(x->functions[i], DYNAMIC_SMEM, (int)c->smem),
                              "cuFuncSetAttribute");
    if (status == SB_OK && c->cluster > 8)
        status = check_driver(driver.cuFuncSetAttribute(x->functions[i], NON_PORTABLE_CLUSTER, 1),
                              "cuFuncSetAttribute");
    size_t offset = 0, size = 0;
    if (status == SB_OK)
        status =
            check_driver(driver.cuFuncGetParamInfo(x->functions[i], 0, &offset, &size), "cuFuncGetParamInfo");
    if (status == SB_OK && (size < c->params || size >= (size_t)c->params + 128))
        status = fail(SB_ARCHIVE, "%s takes parameters of %zu bytes, the archive says %" PRIu32, c->entry,
                      size, c->params);
    return status;
}

static sb_status load_kernels(sb_context* x) {
    const sb_archive* archive = x->archive;
    size_t largest = 1;
    for (uint32_t i = 0; i < archive->cubin_count; i++)
        if (archive->cubins[i].unpacked > largest) largest = archive->cubins[i].unpacked;
    inflate_room* room = malloc(sizeof *room);
    unsigned char* code = malloc(largest);
    sb_status status = room && code ? SB_OK : fail(SB_MEMORY, "no memory to unpack kernels");
    for (uint32_t i = 0; i < archive->cubin_count && status == SB_OK; i++) {
        const cubin* c = &archive->cubins[i];
        status = sb_inflate(archive->bytes + c->at, (size_t)c->size, code, c->unpacked, room)
                     ? load_kernel(x, i, code)
                     : fail(SB_ARCHIVE, "the archive's machine code of %s is damaged", c->entry);
    }
    free(room);
    free(code);
    return status;
}

static sb_status prepare(sb_context* x) {
    const sb_archive* archive = x->archive;
    int major = 0, minor = 0, handle = 0;
    sb_status status = check_driver(driver.cuDeviceGet(&handle, x->device), "device: cuDeviceGet");
    if (status != SB_OK) return status;
    const struct {
        int* to;
        int attribute;
    } asked[] = {{&major, CAPABILITY_MAJOR},
                 {&minor, CAPABILITY_MINOR},
                 {&x->multiprocessors, MULTIPROCESSORS},
                 {&x->max_smem, MOST_SMEM}};
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        status = check_driver(driver.cuDeviceGetAttribute(asked[i].to, asked[i].attribute, handle),
                              "cuDeviceGetAttribute");
        if (status != SB_OK) return status;
    }
    if (major != archive->major || minor != archive->minor)
        return fail(SB_UNSUPPORTED,
                    "device %d is sm_%d%d, the archive is for %s: samebits export --arch sm_%d%d%s",
                    x->device, major, minor, archive->arch, major, minor, major >= 9 ? "a" : "");
    if (x->multiprocessors < 1) return fail(SB_DRIVER, "device %d has no multiprocessors", x->device);
    status = check_driver(driver.cuDevicePrimaryCtxRetain(&x->current, handle), "cuDevicePrimaryCtxRetain");
    if (status != SB_OK) {
        x->current = NULL;
        return status;
    }
    bool pushed;
    status = enter(x, &pushed);
    if (status == SB_OK) status = load_kernels(x);
    leave(pushed);
    return status;
}

sb_status sb_context_create(const sb_archive* archive, int device, sb_context** context) {
    if (context == NULL) return fail(SB_INVALID, "context: expected where to put the handle, got NULL");
    *context = NULL;
    if (archive == NULL) return fail(SB_INVALID, "archive: expected a handle, got NULL");
    if (device < 0) return fail(SB_INVALID, "device: expected 0 or more, got %d", device);
    sb_status status = load_driver();
    if (status != SB_OK) return status;
    sb_context* x = calloc(1, sizeof *x);
    if (x == NULL) return fail(SB_MEMORY, "no memory for a context");
    keep(archive);
    x->archive = (sb_archive*)archive;
    x->device = device;
    x->modules = calloc((size_t)archive->cubin_count + 1, sizeof *x->modules);
    x->functions = calloc((size_t)archive->cubin_count + 1, sizeof *x->functions);
    status = x->modules && x->functions ? prepare(x) : fail(SB_MEMORY, "no memory for a context");
    if (status != SB_OK) {
        sb_context_destroy(x);
        return status;
    }
    *context = x;
    return SB_OK;
}

void sb_context_destroy(sb_context* context) {
    if (context == NULL) return;
    bool pushed;
    if (context->current != NULL && enter(context, &pushed) == SB_OK) {
        for (uint32_t i = 0; i < context->archive->cubin_count; i++)
            if (context->modules[i] != NULL) driver.cuModuleUnload(context->modules[i]);
        leave(pushed);
    }
    int handle;
    if (context->current != NULL && driver.cuDeviceGet(&handle, context->device) == 0)
        driver.cuDevicePrimaryCtxRelease_v2(handle);
    free(context->modules);
    free(context->functions);
    sb_archive_close(context->archive);
    free(context);
}

sb_status launch(const sb_context* context, int64_t index, int64_t grid, void* params, CUstream stream) {
    const cubin* c = &context->archive->cubins[index];
    launch_attribute attributes[2];
    launch_config config = {{(unsigned)grid, 1, 1}, {c->block, 1, 1}, c->smem, stream, attributes, 0};
    if (c->cluster > 1)
        attributes[config.count++] = (launch_attribute){.id = CLUSTER_DIMENSION, .value = {c->cluster, 1, 1}};
    if (c->programmatic)
        attributes[config.count++] = (launch_attribute){.id = PROGRAMMATIC_SERIALIZATION, .value = {1}};
    void* pointers[1] = {params};
    const int code = driver.cuLaunchKernelEx(&config, context->functions[index], pointers, NULL);
    return code ? check_driver(code, c->entry) : SB_OK;
}

/* Maps that this thread has made, by what they were made of except the address: to change that takes less time. */
typedef struct {
    map_recipe recipe;
    const void* address;
    _Alignas(64) unsigned char map[128];
} made;

enum { MOST_MADE = 64 };

static _Thread_local made mades[MOST_MADE];

static sb_status make(void* map, const void* address, const map_recipe* x) {
    static const uint32_t one[4] = {1, 1, 1, 1};
    static const int dtypes[] = {7, 9, 6}; /* float32, bfloat16, float16 */
    const int swizzle = x->swizzle == 128 ? 3 : x->swizzle == 64 ? 2 : x->swizzle == 32 ? 1 : 0;
    const int promotion = x->promotion == 256 ? 3 : x->promotion == 128 ? 2 : x->promotion == 64 ? 1 : 0;
    return check_driver(
        driver.cuTensorMapEncodeTiled(map, dtypes[x->dtype], (uint32_t)x->rank, (void*)address, x->shape,
                                      x->strides, x->box, one, 0, swizzle, promotion, 0),
        "cuTensorMapEncodeTiled");
}

sb_status encode(void* map, const void* address, const map_recipe* recipe) {
    uint64_t hash = 0, words[sizeof *recipe / 8];
    memcpy(words, recipe, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) hash = (hash ^ words[i]) * 0x9E3779B97F4A7C15;
    made* found = &mades[hash >> 58];
    if (found->recipe.rank == 0 || memcmp(&found->recipe, recipe, sizeof *recipe) != 0) {
        found->recipe.rank = 0;
        sb_status status = make(found->map, address, recipe);
        if (status != SB_OK) return status;
        found->recipe = *recipe;
        found->address = address;
    } else if (found->address != address) {
        const int code = driver.cuTensorMapReplaceAddress(found->map, (void*)address);
        if (code) return check_driver(code, "cuTensorMapReplaceAddress");
        found->address = address;
    }
    memcpy(map, found->map, sizeof found->map);
    return SB_OK;
}

/* A CUDA driver that computes nothing: it notes what is launched. Kernels are 16 bytes: "fakecode", a number and the
   bytes of parameters. A tensor map is what it was made of, in the layout of tests/support/fake_gpu.py. */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MOST = 512, ROOM = 2048 };

typedef struct {
    int id;
    char pad[4];
    unsigned value[16];
} attribute;

typedef struct {
    unsigned grid[3], block[3], smem;
    void* stream;
    const attribute* attributes;
    unsigned count;
} config;

typedef struct {
    uint32_t kernel, size;
    uint32_t grid[3], block[3], smem, cluster, programmatic, spare;
    uint64_t stream;
    unsigned char params[ROOM];
} noted;

typedef struct {
    uint32_t kernel, size;
} function;

static noted log_[MOST];
static int launches, most = MOST;
static function functions[1 << 16]; /* tests leave engines open */
static int made;

int driver_failure, driver_smem = 232448, driver_major = 9, driver_minor = 0, driver_multiprocessors = 132,
                    driver_retained, driver_modules;
_Atomic uint64_t driver_cleared; /* bytes */

static pthread_mutex_t noting = PTHREAD_MUTEX_INITIALIZER;

int driver_launches(void) { return launches; }
const noted* driver_launch(int i) { return &log_[i % MOST]; }
void driver_reset(void) { launches = 0; }

int cuInit(unsigned flags) { return (int)flags; }

int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? 0 : 101;
}

int cuDeviceGetAttribute(int* to, int which, int device) {
    *to = which == 16   ? driver_multiprocessors
          : which == 75 ? driver_major
          : which == 76 ? driver_minor
                        : driver_smem;
    return device;
}

static int context;
static _Thread_local void* current;

int cuDevicePrimaryCtxRetain(void** to, int device) {
    *to = &context;
    driver_retained++;
    return device;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    driver_retained--;
    return device;
}

int cuCtxGetCurrent(void** to) {
    *to = current;
    return 0;
}

int cuCtxPushCurrent_v2(void* x) {
    current = x;
    return 0;
}

int cuCtxPopCurrent_v2(void** to) {
    *to = current;
    current = NULL;
    return 0;
}

int cuModuleLoadData(void** module, const void* image) {
    if (memcmp(image, "fakecode", 8) != 0 || made == sizeof functions / sizeof *functions) return 200;
    memcpy(&functions[made], (const char*)image + 8, 8);
    *module = &functions[made++];
    driver_modules++;
    return 0;
}

int cuModuleUnload(void* module) {
    driver_modules--;
    if (driver_modules == 0) made = 0;
    return module == NULL;
}

int cuModuleGetFunction(void** to, void* module, const char* name) {
    *to = module;
    return *name == 0;
}

int cuFuncGetParamInfo(void* of, size_t index, size_t* offset, size_t* size) {
    *offset = 0;
    *size = ((const function*)of)->size;
    return index != 0;
}

int cuFuncSetAttribute(void* of, int which, int value) {
    return of == NULL || (which == 8 && value > driver_smem);
}

int cuLaunchKernelEx(const config* c, void* of, void** params, void** extra) {
    const function* f = of;
    if (driver_failure) return driver_failure;
    if (current != &context || extra != NULL) return 201;
    pthread_mutex_lock(&noting);
    noted* to = &log_[launches++ % most];
    memset(to, 0, sizeof *to);
    to->kernel = f->kernel;
    to->size = f->size;
    memcpy(to->grid, c->grid, sizeof to->grid);
    memcpy(to->block, c->block, sizeof to->block);
    to->smem = c->smem;
    to->stream = (uintptr_t)c->stream;
    to->cluster = 1;
    for (unsigned i = 0; i < c->count; i++) {
        if (c->attributes[i].id == 4) to->cluster = c->attributes[i].value[0];
        if (c->attributes[i].id == 6) to->programmatic = c->attributes[i].value[0];
    }
    memcpy(to->params, params[0], f->size);
    pthread_mutex_unlock(&noting);
    return 0;
}

int cuTensorMapEncodeTiled(void* to, int dtype, uint32_t rank, void* address, const uint64_t* shape,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                           int interleave, int swizzle, int promotion, int fill) {
    struct {
        uint64_t address;
        uint32_t what, rank;
        uint64_t shape[5], strides[4];
        uint32_t box[5], steps[5];
    } map;
    memset(&map, 0, sizeof map);
    if (rank < 1 || rank > 5 || interleave || fill || (uintptr_t)address % 16 || current != &context)
        return 1;
    map.address = (uintptr_t)address;
    map.what = (uint32_t)(dtype | swizzle << 8 | promotion << 16);
    map.rank = rank;
    memcpy(map.shape, shape, rank * sizeof *shape);
    memcpy(map.strides, strides, (rank - 1) * sizeof *strides);
    memcpy(map.box, box, rank * sizeof *box);
    memcpy(map.steps, steps, rank * sizeof *steps);
    memcpy(to, &map, 128);
    return 0;
}

int cuTensorMapReplaceAddress(void* map, void* address) {
    const uint64_t at = (uintptr_t)address;
    memcpy(map, &at, sizeof at);
    return 0;
}

int cuMemsetD8Async(void* at, unsigned char value, size_t count, void* stream) {
    (void)stream;
    if (value == 0) driver_cleared += count;
    return at == NULL || current != &context;
}

int cuMemsetD32Async(void* at, unsigned value, size_t count, void* stream) {
    (void)value, (void)count, (void)stream;
    return (uintptr_t)at % 4 != 0 || current != &context;
}

int cuGetErrorName(int code, const char** name) {
    *name = code ? "FAKE_ERROR" : "FAKE_SUCCESS";
    return 0;
}

int cuGetErrorString(int code, const char** text) {
    *text = code ? "a fake error" : "none";
    return 0;
}

/* The CUDA driver, loaded at run time, and the sentence about the last error. */

#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

static _Thread_local char sentence[512];

sb_status fail(sb_status status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    return status;
}

const char* sb_last_error(void) { return sentence; }

uint32_t sb_abi_version(void) { return SB_ABI_VERSION; }

struct driver driver;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static sb_status loaded;
static char why[256];

static void load(void) {
    loaded = SB_DRIVER;
    void* library = dlopen(SB_LIBCUDA, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char* reason = dlerror();
        snprintf(why, sizeof why, "the CUDA driver does not load: %s", reason ? reason : SB_LIBCUDA);
        return;
    }
    static const char* const names[] = {
#define DRIVER_NAME(name, arguments) #name,
        DRIVER_FUNCTIONS(DRIVER_NAME)};
    _Static_assert(sizeof driver == sizeof names, "the driver's struct has a pointer for each name");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void* found = dlsym(library, names[i]);
        if (found == NULL) {
            snprintf(why, sizeof why, "the CUDA driver has no %s: it is older than CUDA 12.4", names[i]);
            return;
        }
        memcpy((char*)&driver + i * sizeof found, &found, sizeof found);
    }
    int code = driver.cuInit(0);
    if (code) {
        const char* name = "unknown";
        driver.cuGetErrorName(code, &name);
        snprintf(why, sizeof why, "the CUDA driver does not start: %s (%d)", name, code);
        return;
    }
    loaded = SB_OK;
}

sb_status load_driver(void) {
    pthread_once(&once, load);
    return loaded ? fail(loaded, "%s", why) : SB_OK;
}

sb_status check_driver(int code, const char* what) {
    if (code == 0) return SB_OK;
    const char *name = "unknown", *text = "";
    driver.cuGetErrorName(code, &name);
    driver.cuGetErrorString(code, &text);
    return fail(SB_DRIVER, "%s: %s (%d): %s", what, name ? name : "unknown", code, text ? text : "");
}

/* What the files of libsamebits share: the driver, the archive in memory, contexts, and launches. */

#ifndef SAMEBITS_INTERNAL_H
#define SAMEBITS_INTERNAL_H

#include <stdbool.h>

#include "samebits.h"

/* Nothing here is seen outside, whatever the compiler was told: other libraries have functions of such names. */
#if defined(__GNUC__)
#pragma GCC visibility push(hidden)
#endif

#ifndef SB_LIBCUDA
#define SB_LIBCUDA "libcuda.so.1"
#endif

enum {
    LARGEST = 2147481600 /* 2^31 - 2048: kernels count in 32 bits, and round up to all tiles in flight */
};

/* ---- Errors ---- */

__attribute__((format(printf, 2, 3))) sb_status fail(sb_status status, const char* format, ...);

/* ---- The driver (driver.c) ---- */

typedef struct {
    int id;
    char pad[4];
    unsigned value[16];
} launch_attribute; /* CUlaunchAttribute */

typedef struct {
    unsigned grid[3], block[3], smem;
    CUstream stream;
    launch_attribute* attributes;
    unsigned count;
} launch_config; /* CUlaunchConfig */

/* cuda.h is not needed. Devices are ints; contexts, modules and functions are pointers. */
/* clang-format off */
#define DRIVER_FUNCTIONS(of)                                                                                    \
    of(cuInit, (unsigned))                                                                                      \
    of(cuDeviceGet, (int*, int))                                                                                \
    of(cuDeviceGetAttribute, (int*, int, int))                                                                  \
    of(cuDevicePrimaryCtxRetain, (void**, int))                                                                 \
    of(cuDevicePrimaryCtxRelease_v2, (int))                                                                     \
    of(cuCtxGetCurrent, (void**))                                                                               \
    of(cuCtxPushCurrent_v2, (void*))                                                                            \
    of(cuCtxPopCurrent_v2, (void**))                                                                            \
    of(cuModuleLoadData, (void**, const void*))                                                                 \
    of(cuModuleUnload, (void*))                                                                                 \
    of(cuModuleGetFunction, (void**, void*, const char*))                                                       \
    of(cuFuncGetParamInfo, (void*, size_t, size_t*, size_t*))                                                   \
    of(cuFuncSetAttribute, (void*, int, int))                                                                   \
    of(cuLaunchKernelEx, (const launch_config*, void*, void**, void**))                                         \
    of(cuTensorMapEncodeTiled, (void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, \
                                const uint32_t*, int, int, int, int))                                           \
    of(cuTensorMapReplaceAddress, (void*, void*))                                                               \
    of(cuMemsetD8Async, (void*, unsigned char, size_t, CUstream))                                               \
    of(cuMemsetD32Async, (void*, unsigned, size_t, CUstream))                                                   \
    of(cuGetErrorName, (int, const char**))                                                                     \
    of(cuGetErrorString, (int, const char**))
/* clang-format on */

#define DRIVER_POINTER(name, arguments) int(*name) arguments;
extern struct driver {
    DRIVER_FUNCTIONS(DRIVER_POINTER)
} driver;

sb_status load_driver(void);
sb_status check_driver(int code, const char* what);

/* ---- The archive (archive.c). samebits/tools/export/archive.py writes the same structs. ---- */

typedef enum {
    TENSOR_CORE,
    FMA,
    TENSOR_CORE_SM90,
    FMA_SM90,
    STATISTICS_SM90,
    LOGP,
    GROUPED_TENSOR_CORE,
    GROUPED_FMA,
    GROUPED_SM90,
    ATTENTION_SM90,
    ATTENTION,
    ATTENTION_MERGE,
    FAMILIES
} family;

typedef struct {
    int32_t family, kernel; /* kernel: the number that its variants have; never descending */
    int32_t tile_m, tile_n, tile_k;
    int32_t cluster, group, blocks;
    int32_t panel;     /* columns of the kernel's tile that leave at once, in 16 bits; 0: none do */
    int32_t swap;      /* compute the transpose */
    int32_t promotion; /* of loads into L2, in bytes */
    int32_t groups;    /* the most whose table leaves room for the whole ring */
} schedule;

typedef struct {
    uint32_t kernel, variant; /* in ascending order */
    uint32_t cubin, spare;
} variant;

typedef struct {
    uint64_t at, size; /* of the packed machine code */
    uint32_t block, smem, cluster, programmatic, params, unpacked;
    char entry[24];
} cubin;

enum { NONE = 0xFFFF }; /* a cell without a schedule: another kernel is faster */

/* The choice of schedules by sizes: a cell for each range of m, n and k. */
typedef struct {
    uint32_t family, key; /* in ascending order */
    uint32_t plain;       /* the schedule that takes what the chosen one cannot */
    uint32_t counts[3];   /* ranges of m, n and k */
    uint32_t bounds;      /* where the last m, n and k of each range begin: after those of the table before */
    uint32_t cells;       /* and its cells */
} table;

/* Bytes of the kernels' parameters. */
enum {
    UNIVERSAL_PARAMS = 208,
    TENSOR_CORE_SM90_PARAMS = 456,
    FMA_SM90_PARAMS = 376,
    GROUPED_PARAMS = 32, /* more than those of other products */
    ATTENTION_SM90_PARAMS = 640,
    ATTENTION_PARAMS = 368,
    STATISTICS_PARAMS = 328,
    BLOCK_STATISTICS_PARAMS = 80,
    COMBINE_PARAMS = 96
};

/* The variants of the kernels of logp.cu, in their lowest bits. */
enum { BLOCK_STATISTICS, COMBINE, COMBINE_FEW };

struct sb_archive {
    int references;
    unsigned char* bytes;
    size_t size;
    const char *arch, *version, *digests[3];
    int major, minor;
    uint32_t schedule_count, variant_count, cubin_count, table_count;
    const schedule* schedules;
    const variant* variants;
    const cubin* cubins;
    const table* tables;
    const int32_t* bounds;
    const uint16_t* cells;
};

void keep(const sb_archive* archive);

/* Tables that sb_inflate() works with. */
typedef struct {
    uint16_t literals[1 << 15], distances[1 << 15];
} inflate_room;

/* Unpack machine code (inflate.c): whether it is of this size. */
bool sb_inflate(const unsigned char* from, size_t size, unsigned char* to, size_t to_size,
                inflate_room* room);

const table* find_table(const sb_archive* archive, family f, uint32_t key);
/* The schedule of a table for these sizes, or NULL. */
const schedule* choose(const sb_archive* archive, const table* t, int64_t m, int64_t n, int64_t k);
/* The cubin's index of a kernel's variant, or -1. */
int64_t find_variant(const sb_archive* archive, int32_t kernel, uint32_t variant);

/* ---- Contexts and launches (context.c) ---- */

struct sb_context {
    sb_archive* archive;
    int device, multiprocessors, max_smem;
    void* current; /* the driver's context */
    void **modules, **functions;
};

/* Launch a cubin's function on `grid` blocks in x. `params` has room for 128 bytes more than the struct has: where
   the kernel's struct is aligned to 128 bytes, so is its size. */
sb_status launch(const sb_context* context, int64_t cubin, int64_t grid, void* params, CUstream stream);

/* A tensor map, as cuTensorMapEncodeTiled takes it. */
typedef struct {
    int32_t dtype, rank;
    uint64_t shape[4], strides[3]; /* strides in bytes, of all dimensions but the innermost */
    uint32_t box[4];
    int32_t swizzle, promotion; /* in bytes */
} map_recipe;

sb_status encode(void* map, const void* address, const map_recipe* recipe);

/* Make the context current for this call; `pushed` says whether leave() has to undo it. */
sb_status enter(const sb_context* context, bool* pushed);
void leave(bool pushed);

/* ---- Products (products.c, grouped.c, sm90.c) ---- */

typedef struct {
    const void* at;
    int64_t rows, k;                            /* rows: m of a, n of b */
    int64_t row_stride, k_stride, batch_stride; /* batch_stride: 0 if all share one matrix */
} operand;

typedef struct {
    const sb_product* p;
    operand a, b;
    bool in_sequences; /* the terms belong to sequences */
    const void* offsets;
    int64_t sequences;
    int wide;
    const sb_groups* groups; /* of grouped products, or NULL */
    CUstream stream;
} call;

/* struct Params of the universal kernels. */
typedef struct {
    const void* a;
    int64_t a_strides[4];
    const void* b;
    int64_t b_strides[4];
    void* out;
    int64_t out_strides[3];
    void* start;
    int64_t start_strides[3];
    const void* bias;
    int64_t bias_stride;
    const void* offsets;
    int32_t m, n, k, sequences, tiles_m, tiles_n, last, vectors, bias_type, wide;
} universal_params;

/* struct Params of tensor_core_sm90.cu. */
typedef struct {
    unsigned char tall[128], wide[128], out_map[128];
    void* out;
    const void *bias, *offsets;
    int64_t row_stride, batch_stride;
    int32_t rows, columns, k, batch, tall_batched, wide_batched, sequences, group;
} tensor_core_params;

/* What follows in those of grouped products: struct Groups, and the distance between biases. */
typedef struct {
    const void *ends, *sequences;
    int32_t count, rows;
    int64_t bias;
} grouped_params;

_Static_assert(sizeof(universal_params) == UNIVERSAL_PARAMS &&
                   sizeof(tensor_core_params) == TENSOR_CORE_SM90_PARAMS &&
                   sizeof(grouped_params) == GROUPED_PARAMS,
               "");

sb_status run_product(const sb_context* context, const sb_product* product, const sb_sequences* sequences,
                      CUstream stream);

/* The matrices of an operand that has a batch_stride. */
static inline int64_t matrices_of(const call* c) { return c->groups ? c->groups->count : c->p->batch; }

static inline int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }
static inline int64_t round_up(int64_t x, int64_t step) { return ceil_div(x, step) * step; }
static inline int itemsize(sb_dtype dtype) { return dtype == SB_F32 ? 4 : 2; }
static inline bool multiple(const void* at, uintptr_t of) { return (uintptr_t)at % of == 0; }

/* The types of convert.cuh, where 0 is none. */
static inline int epilogue_type(sb_dtype dtype) { return (int)dtype + 1; }

sb_status check_size(const char* name, int64_t size);
/* Whether an array of runs of `run` elements lies within 2^46, with strides that no kernel's arithmetic leaves. */
sb_status check_array(const char* name, const void* data, sb_dtype dtype, const char* const of[3],
                      const int64_t sizes[3], const int64_t strides[3], int64_t run);
sb_status check_matrix(const char* name, const sb_matrix* x, sb_dtype dtype, int64_t rows, int64_t columns,
                       int64_t batch);

/* Check all of a product; b has so many matrices. */
sb_status check_product(const sb_product* p, int64_t matrices);
sb_status too_many(const sb_product* p);
/* The archive has nothing for a call: `options` of samebits export, with the dtype's, that it needs. */
sb_status no_kernel(const sb_context* context, const char* what, sb_dtype dtype, const char* options);

void out_strides(const sb_product* p, int64_t strides[3]);
bool writes_vectors(const sb_product* p);

/* How an operand's tiles are loaded, as universal kernels' variants have it. */
enum { ALONG_K, ALONG_ROWS, GATHER_UNIT_K, GATHER_K, GATHER_ROWS };

/* The way to load an operand, and its strides. `ragged`: sequences start at any k. */
unsigned layout_of(const operand* x, int chunk, bool ragged, int64_t strides[4]);
/* All but the strides of a and b, and `last`. */
void fill_universal(const call* c, const schedule* s, int64_t tiles_m, universal_params* x);

/* Launch a Hopper kernel if it takes the call. `done` says whether it did. */
sb_status tensor_core_sm90(const sb_context* context, const call* c, bool* done);
sb_status fma_sm90(const sb_context* context, const call* c, bool* done);

/* The tensor map of one operand of 16 bits; `mn`: contiguous along its rows, not along k. */
map_recipe operand_map(sb_dtype dtype, const operand* x, int64_t batch, bool mn, int block, int depth,
                       int sharers, bool folded, int promotion);
/* 1: TMA can read it, contiguous along k; 0: along its rows; -1: TMA cannot. */
int k_major(const operand* x);
/* Blocks that run at once, or as many as there are tiles (of all that are in a cluster together). */
int64_t blocks_of_tiles(const sb_context* context, const schedule* s, int64_t tiles);
int64_t blocks_sm90(const sb_context* context, const schedule* s, int64_t rows, int64_t columns,
                    int64_t batch);
/* Whether rows of the output consist of whole units of 16 bytes. */
bool aligned_output(const sb_product* p);
/* All but the sequences. */
sb_status fill_tensor_core(const call* c, const schedule* s, bool folded, tensor_core_params* x);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif

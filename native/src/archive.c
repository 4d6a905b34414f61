/* Archives: kernels and tables in one file. Whatever the file has, no index in memory leaves its array. */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

typedef struct {
    uint64_t at, count;
} section;

/* The beginning of the file. All numbers are little-endian; sections begin at multiples of 16 bytes. */
typedef struct {
    char magic[8];
    uint32_t abi, checksum;                     /* CRC-32 of all that follows `size` */
    uint64_t size;                              /* of the file */
    int32_t major, minor;                       /* the compute capability that the kernels are for */
    char arch[16], version[40], digests[3][24]; /* a digest for each dtype; empty: no kernels */
    section schedules, variants, cubins, tables, bounds, cells, code;
} header;

_Static_assert(sizeof(header) == 272 && sizeof(schedule) == 48 && sizeof(variant) == 16 &&
                   sizeof(cubin) == 64 && sizeof(table) == 32,
               "samebits/tools/export/archive.py has these sizes");

enum { CHECKED_FROM = 24, MOST_BYTES = 1 << 30, MOST_UNPACKED = 1 << 24 };

static uint32_t crc32(const unsigned char* bytes, size_t count) {
    uint32_t lines[256], crc = 0xFFFFFFFF;
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t x = i;
        for (int bit = 0; bit < 8; bit++) x = x & 1 ? x >> 1 ^ 0xEDB88320 : x >> 1;
        lines[i] = x;
    }
    for (size_t i = 0; i < count; i++) crc = crc >> 8 ^ lines[(crc ^ bytes[i]) & 0xFF];
    return ~crc;
}

static bool big_endian(void) {
    const uint16_t one = 1;
    return *(const unsigned char*)&one == 0;
}

/* The section's array, or NULL if it is not within the file. */
static const void* array(const sb_archive* x, section of, size_t item) {
    if (of.at % 16 || of.at > x->size || of.count > UINT32_MAX || of.count * item > x->size - of.at)
        return NULL;
    return x->bytes + of.at;
}

static bool text_ends(const char* text, size_t size) { return memchr(text, 0, size) != NULL; }

/* The bytes of parameters that this library gives to a kernel. */
static uint32_t params_of(int32_t f, uint32_t variant) {
    static const uint32_t sizes[FAMILIES] = {
        [TENSOR_CORE] = UNIVERSAL_PARAMS,
        [FMA] = UNIVERSAL_PARAMS,
        [TENSOR_CORE_SM90] = TENSOR_CORE_SM90_PARAMS,
        [FMA_SM90] = FMA_SM90_PARAMS,
        [STATISTICS_SM90] = STATISTICS_PARAMS,
        [LOGP] = COMBINE_PARAMS,
        [GROUPED_TENSOR_CORE] = UNIVERSAL_PARAMS + GROUPED_PARAMS,
        [GROUPED_FMA] = UNIVERSAL_PARAMS + GROUPED_PARAMS,
        [GROUPED_SM90] = TENSOR_CORE_SM90_PARAMS + GROUPED_PARAMS,
        [ATTENTION_SM90] = ATTENTION_SM90_PARAMS,
        [ATTENTION] = ATTENTION_PARAMS,
        [ATTENTION_MERGE] = ATTENTION_PARAMS,
    };
    return f == LOGP && variant % 4 == BLOCK_STATISTICS ? BLOCK_STATISTICS_PARAMS : sizes[f];
}

/* The first of a kernel's variants, or of the next one's. */
static uint32_t first_variant(const sb_archive* x, int32_t kernel) {
    uint32_t low = 0, high = x->variant_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (x->variants[middle].kernel < (uint32_t)kernel)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Whether all variants of a schedule's kernel take the parameters that it gives them. */
static bool kernel_fits(const sb_archive* x, const schedule* s) {
    for (uint32_t i = first_variant(x, s->kernel); i < x->variant_count; i++) {
        const variant* v = &x->variants[i];
        if (v->kernel != (uint32_t)s->kernel) break;
        const cubin* c = &x->cubins[v->cubin];
        if (c->params != params_of(s->family, v->variant) || c->cluster != (uint32_t)s->cluster) return false;
    }
    return true;
}

/* Whether all indices are within their arrays, and all keys in order. The time is linear in the file's size: each array is
   read once. */
static bool consistent(const sb_archive* x, const header* h, uint64_t bounds, uint64_t cells) {
    if (!text_ends(h->arch, sizeof h->arch) || !text_ends(h->version, sizeof h->version)) return false;
    for (int i = 0; i < 3; i++)
        if (!text_ends(h->digests[i], sizeof h->digests[i])) return false;
    for (uint32_t i = 0; i < x->schedule_count; i++) {
        const schedule* s = &x->schedules[i];
        const int32_t positive[] = {s->tile_m, s->tile_n, s->tile_k, s->cluster, s->group, s->blocks};
        if (s->family < 0 || s->family >= FAMILIES) return false;
        for (size_t j = 0; j < sizeof positive / sizeof *positive; j++)
            if (positive[j] < 1 || positive[j] > 1 << 20) return false;
        if (s->panel < 0 || s->panel > 256 || s->cluster > 16) return false;
    }
    for (uint32_t i = 0; i < x->variant_count; i++) {
        const variant* v = &x->variants[i];
        if (v->cubin >= x->cubin_count) return false;
        if (i > 0 && (v->kernel < v[-1].kernel || (v->kernel == v[-1].kernel && v->variant <= v[-1].variant)))
            return false;
    }
    for (uint32_t i = 0; i < x->cubin_count; i++) {
        const cubin* c = &x->cubins[i];
        if (!text_ends(c->entry, sizeof c->entry) || c->at % 16 || c->at > x->size ||
            c->size > x->size - c->at || c->unpacked < 16 || c->unpacked > MOST_UNPACKED)
            return false;
        if (c->block < 1 || c->block > 1024 || c->smem > 1 << 20 || c->cluster < 1 || c->cluster > 16 ||
            c->params > 4096)
            return false;
    }
    for (uint32_t i = 0; i < x->schedule_count; i++) {
        const schedule *s = &x->schedules[i], *last = i > 0 ? s - 1 : NULL;
        if (last && (uint32_t)s->kernel < (uint32_t)last->kernel) return false;
        const bool same = last && s->kernel == last->kernel; /* then its variants were looked at */
        if (same ? s->family != last->family || s->cluster != last->cluster : !kernel_fits(x, s))
            return false;
    }
    uint64_t edges_before = 0, cells_before = 0;
    for (uint32_t i = 0; i < x->table_count; i++) {
        const table* t = &x->tables[i];
        if (i > 0 && (t->family < t[-1].family || (t->family == t[-1].family && t->key <= t[-1].key)))
            return false;
        uint64_t edges = 0, all = 1;
        for (int j = 0; j < 3; j++) {
            if (t->counts[j] < 1 || t->counts[j] > 4096) return false;
            edges += t->counts[j];
            all *= t->counts[j];
        }
        if (t->family >= FAMILIES || t->bounds != edges_before || edges > bounds - edges_before ||
            t->cells != cells_before || all > cells - cells_before || t->plain >= x->schedule_count)
            return false;
        edges_before += edges;
        cells_before += all;
        if (x->schedules[t->plain].family != (int32_t)t->family) return false;
        for (uint64_t j = 0; j < all; j++) {
            const uint16_t cell = x->cells[t->cells + j];
            if (cell == NONE) continue;
            if (cell >= x->schedule_count || x->schedules[cell].family != (int32_t)t->family) return false;
        }
    }
    return true;
}

static sb_status read_file(const char* path, sb_archive* x) {
    FILE* file = fopen(path, "rb");
    if (file == NULL) return fail(SB_ARCHIVE, "%s: it cannot be opened", path);
    long size = -1;
    if (fseek(file, 0, SEEK_END) == 0) size = ftell(file);
    sb_status status = SB_OK;
    if (size < 0 || size > MOST_BYTES || fseek(file, 0, SEEK_SET) != 0) /* a folder has any size */
        status = fail(SB_ARCHIVE, "%s: it cannot be read", path);
    else if ((x->bytes = aligned_alloc(64, ((size_t)size / 64 + 1) * 64)) == NULL)
        status = fail(SB_MEMORY, "%s: no memory for its %ld bytes", path, size);
    else if (fread(x->bytes, 1, x->size = (size_t)size, file) != (size_t)size)
        status = fail(SB_ARCHIVE, "%s: it cannot be read", path);
    fclose(file);
    return status;
}

static sb_status check(const char* path, sb_archive* x) {
    if (big_endian()) return fail(SB_UNSUPPORTED, "archives are little-endian, this machine is not");
    const header* h = (const header*)x->bytes;
    if (x->size < sizeof *h || memcmp(h->magic, "samebits", 8) != 0)
        return fail(SB_ARCHIVE, "%s: it is not an archive of samebits export", path);
    if (h->abi != SB_ABI_VERSION)
        return fail(SB_ARCHIVE, "%s: it has ABI version %" PRIu32 ", this library %d: export it again", path,
                    h->abi, SB_ABI_VERSION);
    if (h->size != x->size)
        return fail(SB_ARCHIVE, "%s: it is damaged: expected %" PRIu64 " bytes, got %zu", path, h->size,
                    x->size);
    const uint32_t crc = crc32(x->bytes + CHECKED_FROM, x->size - CHECKED_FROM);
    if (crc != h->checksum)
        return fail(SB_ARCHIVE, "%s: it is damaged: expected the checksum %08" PRIx32 ", got %08" PRIx32,
                    path, h->checksum, crc);
    x->schedules = array(x, h->schedules, sizeof(schedule));
    x->variants = array(x, h->variants, sizeof(variant));
    x->cubins = array(x, h->cubins, sizeof(cubin));
    x->tables = array(x, h->tables, sizeof(table));
    x->bounds = array(x, h->bounds, sizeof(int32_t));
    x->cells = array(x, h->cells, sizeof(uint16_t));
    x->schedule_count = (uint32_t)h->schedules.count;
    x->variant_count = (uint32_t)h->variants.count;
    x->cubin_count = (uint32_t)h->cubins.count;
    x->table_count = (uint32_t)h->tables.count;
    if (!x->schedules || !x->variants || !x->cubins || !x->tables || !x->bounds || !x->cells ||
        !consistent(x, h, h->bounds.count, h->cells.count))
        return fail(SB_ARCHIVE, "%s: its tables contradict each other", path);
    x->arch = h->arch;
    x->version = h->version;
    for (int i = 0; i < 3; i++) x->digests[i] = h->digests[i];
    x->major = h->major;
    x->minor = h->minor;
    return SB_OK;
}

void keep(const sb_archive* archive) {
    __atomic_add_fetch(&((sb_archive*)archive)->references, 1, __ATOMIC_RELAXED);
}

void sb_archive_close(sb_archive* archive) {
    if (archive == NULL || __atomic_sub_fetch(&archive->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    free(archive->bytes);
    free(archive);
}

sb_status sb_archive_open(const char* path, sb_archive** archive) {
    if (archive == NULL) return fail(SB_INVALID, "archive: expected where to put the handle, got NULL");
    *archive = NULL;
    if (path == NULL) return fail(SB_INVALID, "path: expected the archive's path, got NULL");
    sb_archive* x = calloc(1, sizeof *x);
    if (x == NULL) return fail(SB_MEMORY, "no memory for an archive");
    x->references = 1;
    sb_status status = read_file(path, x);
    if (status == SB_OK) status = check(path, x);
    if (status != SB_OK) {
        sb_archive_close(x);
        return status;
    }
    *archive = x;
    return SB_OK;
}

const char* sb_contract_digest(const sb_archive* archive, sb_dtype dtype) {
    if (archive == NULL || dtype < SB_F32 || dtype > SB_F16) return NULL;
    const char* digest = archive->digests[dtype];
    return *digest ? digest : NULL;
}

const char* sb_archive_version(const sb_archive* archive) { return archive ? archive->version : NULL; }

const table* find_table(const sb_archive* x, family f, uint32_t key) {
    for (uint32_t low = 0, high = x->table_count; low < high;) {
        const uint32_t middle = low + (high - low) / 2;
        const table* t = &x->tables[middle];
        if (t->family == (uint32_t)f && t->key == key) return t;
        if (t->family < (uint32_t)f || (t->family == (uint32_t)f && t->key < key))
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

/* The first range whose end reaches `size`, or the last range. */
static uint32_t range(const int32_t* ends, uint32_t count, int64_t size) {
    uint32_t low = 0, high = count - 1;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (ends[middle] < size)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

const schedule* choose(const sb_archive* x, const table* t, int64_t m, int64_t n, int64_t k) {
    const int32_t* ends = x->bounds + t->bounds;
    uint32_t at = range(ends, t->counts[0], m);
    at = at * t->counts[1] + range(ends += t->counts[0], t->counts[1], n);
    at = at * t->counts[2] + range(ends + t->counts[1], t->counts[2], k);
    const uint16_t cell = x->cells[t->cells + at];
    return cell == NONE ? NULL : &x->schedules[cell];
}

int64_t find_variant(const sb_archive* x, int32_t kernel, uint32_t of) {
    const uint64_t wanted = (uint64_t)(uint32_t)kernel << 32 | of;
    for (uint32_t low = 0, high = x->variant_count; low < high;) {
        const uint32_t middle = low + (high - low) / 2;
        const variant* v = &x->variants[middle];
        const uint64_t found = (uint64_t)v->kernel << 32 | v->variant;
        if (found == wanted) return v->cubin;
        if (found < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    return -1;
}

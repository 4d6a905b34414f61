/* DEFLATE, as RFC 1951 has it: the machine code of an archive. Whatever the bytes are, nothing is read or written
   outside of both arrays. */

#include <string.h>

#include "internal.h"

enum { LITERALS = 288, DISTANCES = 32, CODE_LENGTHS = 19, END = 256, LONGEST_CODE = 15 };

typedef struct {
    const unsigned char *at, *end;
    uint64_t bits; /* the next ones, lowest first */
    int count;     /* of them; negative if more were taken than there are */
} source;

/* 32 bits or more; zeros after the last. */
static uint32_t peek(source* x) {
    while (x->count < 32 && x->at < x->end) {
        x->bits |= (uint64_t)*x->at++ << x->count;
        x->count += 8;
    }
    return (uint32_t)x->bits;
}

static void drop(source* x, int count) {
    x->bits >>= count;
    x->count -= count;
}

static uint32_t take(source* x, int count) {
    const uint32_t found = peek(x) & ((UINT32_C(1) << count) - 1);
    drop(x, count);
    return found;
}

/* A code as a table by the next bits: the symbol, and in its lowest four bits how many bits it has; 0 for none. */
typedef struct {
    int bits; /* of its longest symbol */
    uint16_t* symbols;
} code;

static bool build(code* x, const uint8_t* lengths, int count) {
    uint32_t of_length[LONGEST_CODE + 1] = {0}, next[LONGEST_CODE + 1], first = 0;
    for (int i = 0; i < count; i++) of_length[lengths[i]]++;
    of_length[0] = 0, x->bits = 1;
    for (int n = 1; n <= LONGEST_CODE; n++) {
        first = (first + of_length[n - 1]) << 1;
        next[n] = first;
        if (of_length[n] > 0) x->bits = n;
        if (first + of_length[n] > UINT32_C(1) << n) return false;
    }
    memset(x->symbols, 0, sizeof *x->symbols << x->bits);
    for (int i = 0; i < count; i++) {
        const int n = lengths[i];
        if (n == 0) continue;
        uint32_t turned = 0; /* codes are stored from their highest bit on */
        for (uint32_t bits = next[n]++, j = 0; j < (uint32_t)n; j++, bits >>= 1)
            turned = turned << 1 | (bits & 1);
        for (uint32_t at = turned; at < UINT32_C(1) << x->bits; at += UINT32_C(1) << n)
            x->symbols[at] = (uint16_t)(i << 4 | n);
    }
    return true;
}

/* The next symbol, or -1. */
static int decode(source* x, const code* of) {
    const uint16_t found = of->symbols[peek(x) & ((UINT32_C(1) << of->bits) - 1)];
    drop(x, found & 15);
    return found == 0 || x->count < 0 ? -1 : found >> 4;
}

static bool fixed_codes(code* literals, code* distances) {
    uint8_t lengths[LITERALS];
    for (int i = 0; i < LITERALS; i++) lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
    if (!build(literals, lengths, LITERALS)) return false;
    memset(lengths, 5, DISTANCES);
    return build(distances, lengths, DISTANCES);
}

static bool read_codes(source* x, code* literals, code* distances) {
    static const uint8_t order[CODE_LENGTHS] = {16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
                                                11, 4,  12, 3, 13, 2, 14, 1, 15};
    uint8_t lengths[LITERALS + DISTANCES] = {0};
    const int of_literals = (int)take(x, 5) + 257, of_distances = (int)take(x, 5) + 1;
    const int all = of_literals + of_distances;
    for (int i = 0, count = (int)take(x, 4) + 4; i < count; i++) lengths[order[i]] = (uint8_t)take(x, 3);
    if (of_literals > LITERALS || !build(literals, lengths, CODE_LENGTHS)) return false;
    memset(lengths, 0, CODE_LENGTHS);
    for (int i = 0; i < all;) {
        const int symbol = decode(x, literals);
        if (symbol < 0 || (symbol == 16 && i == 0)) return false;
        const int times = symbol < 16    ? 1
                          : symbol == 16 ? 3 + (int)take(x, 2)
                          : symbol == 17 ? 3 + (int)take(x, 3)
                                         : 11 + (int)take(x, 7);
        const uint8_t length = symbol < 16 ? (uint8_t)symbol : symbol == 16 ? lengths[i - 1] : 0;
        if (times > all - i) return false;
        memset(lengths + i, length, (size_t)times);
        i += times;
    }
    return build(literals, lengths, of_literals) && build(distances, lengths + of_literals, of_distances);
}

static bool stored_block(source* x, unsigned char** to, const unsigned char* end) {
    drop(x, x->count & 7);
    const uint32_t size = take(x, 16);
    if (take(x, 16) != (size ^ 0xFFFF) || x->count < 0 || (size_t)(end - *to) < size) return false;
    for (uint32_t i = 0; i < size; i++) *(*to)++ = (unsigned char)take(x, 8);
    return x->count >= 0;
}

static bool coded_block(source* x, const code* literals, const code* distances, const unsigned char* start,
                        unsigned char** to, const unsigned char* end) {
    unsigned char* out = *to;
    for (;;) {
        const int symbol = decode(x, literals);
        if (symbol < 0 || symbol > 285) return false;
        if (symbol == END) break;
        if (symbol < END) {
            if (out == end) return false;
            *out++ = (unsigned char)symbol;
            continue;
        }
        const int s = symbol - 257, more = s < 8 || s == 28 ? 0 : (s - 4) >> 2;
        const size_t base = s < 8 ? (size_t)s + 3 : s == 28 ? 258 : ((4 + ((size_t)s & 3)) << more) + 3;
        const size_t length = base + take(x, more);
        const int d = decode(x, distances), far = d < 4 ? 0 : (d - 2) >> 1;
        if (d < 0 || d > 29) return false;
        const size_t back = (d < 4 ? (size_t)d + 1 : ((2 + ((size_t)d & 1)) << far) + 1) + take(x, far);
        if (x->count < 0 || back > (size_t)(out - start) || length > (size_t)(end - out)) return false;
        for (size_t i = 0; i < length; i++, out++) *out = *(out - back); /* they may overlap */
    }
    *to = out;
    return true;
}

bool sb_inflate(const unsigned char* from, size_t size, unsigned char* to, size_t to_size,
                inflate_room* room) {
    source x = {from, from + size, 0, 0};
    code literals = {0, room->literals}, distances = {0, room->distances};
    unsigned char *at = to, *const end = to + to_size;
    for (bool last = false; !last;) {
        last = take(&x, 1);
        const uint32_t kind = take(&x, 2);
        bool good = false;
        if (kind == 0)
            good = stored_block(&x, &at, end);
        else if (kind < 3 &&
                 (kind == 1 ? fixed_codes(&literals, &distances) : read_codes(&x, &literals, &distances)))
            good = coded_block(&x, &literals, &distances, to, &at, end);
        if (!good) return false;
    }
    return at == end;
}

// What kernels of delta rules share: products of a block's threads, and what is kept of chunks for gradients.
#pragma once

#include "convert.cuh"
#include "functions.cuh"
#include "ptx_sm80.cuh"

constexpr int CHUNK = 64, THREADS = WARPS * 32;
using E = Element<TYPE>;
using Stored = E::Stored;
constexpr int SIZE = sizeof(Stored), PAD = 16 / SIZE;
// Of a row in shared memory: elements of its key or query, and floats of its decays.
constexpr int KEYS = KEY_SIZE + PAD, DECAYS = BY_CHANNEL ? KEY_SIZE + 4 : 1;

__device__ __forceinline__ float exp2_of(float x) {
#if HARDWARE_EXP2
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return contract::exp2(x);
#endif
}

// What passes over a sequence's chunks leave of one of them, for one head. All arrays are dense.
struct Record {
    float *decays, *z, *of_updates;  // [CHUNK], unless BY_CHANNEL; [CHUNK, size]; the gradient of updates
#if WEIGHTED
    float* weights;  // [CHUNK]; z has the updates
#endif
    Stored *keys, *updates, *of_z;  // [CHUNK, key size], [CHUNK, size], and the gradient of z
    float *matrix, *of_matrix;      // [key size, size] at the chunk's start, and the gradient at its end
    float* kept;                    // [key size], of decays: what the next matrix has of this one
    uint4* rights;  // both matrices, rounded, as right operands: [2, steps of keys, steps of values, 32]

    __device__ __forceinline__ Record(unsigned char* records, i64 index, int key_size, int size) {
        const i64 values = i64(CHUNK) * size, entries = i64(key_size) * size;
        const int of_rows = BY_CHANNEL ? 0 : (1 + WEIGHTED) * CHUNK;
        const i64 floats = of_rows + 2 * values, stored = CHUNK * key_size + 2 * values;
        const i64 padded = i64((key_size + 15) / 16) * ((size + 15) / 16);
        const i64 of_chains = 4 * ((key_size + 3) / 4 * 4) + (SIZE == 2 ? 2 * 512 * padded : 0);
        const i64 bytes = (4 * (floats + 2 * entries) + SIZE * stored + 15) / 16 * 16 + of_chains;
        decays = reinterpret_cast<float*>(records + index * bytes);
        z = decays + of_rows, of_updates = z + values;
#if WEIGHTED
        weights = decays + CHUNK;
#endif
        keys = reinterpret_cast<Stored*>(of_updates + values);
        updates = keys + CHUNK * key_size, of_z = updates + values;
        matrix = reinterpret_cast<float*>(of_z + values), of_matrix = matrix + entries;
        rights = reinterpret_cast<uint4*>(records + (index + 1) * bytes) - (SIZE == 2 ? 64 * padded : 0);
        kept = reinterpret_cast<float*>(rights) - (key_size + 3) / 4 * 4;
    }
};

#if TENSOR_CORE
// A left operand of 16 columns of values by 16 channels, of which the first `columns` are there, as a right operand that is
// multiplied along the columns.
__device__ __forceinline__ uint4 turned(const u32 (&left)[4], int columns) {
    const int column = threadIdx.x % 32 / 4;
    const bool has = column < columns, has_other = column + 8 < columns;
    return make_uint4(transposed(has ? left[0] : 0), transposed(has_other ? left[1] : 0),
                      transposed(has ? left[2] : 0), transposed(has_other ? left[3] : 0));
}
#endif

// What delta_prepare.cu finds of a chunk, for one head. Rows that are not there are zeros, but for their decays. With
// SYSTEMS and without KEEP, decays are there for the last chunk of a sequence that has a state.
struct Prepared {
    float decays[CHUNK][KEY_SIZE], kept[KEY_SIZE];  // the running sums, and decays over the whole chunk
#if !SYSTEMS || KEEP
    float weights[CHUNK][CHUNK];  // scores of keys, [row, key]
    Stored scores[CHUNK][CHUNK];  // of queries
#endif
    // Queries and keys times decays since the chunk's start, and keys times those left to its end.
    Stored queries[CHUNK][KEY_SIZE], keys[CHUNK][KEY_SIZE], written[CHUNK][KEY_SIZE];
};

// Copies `count` rows of WIDTH elements behind each other.
template <int LINE, int WIDTH, class T>
__device__ __forceinline__ void copy_prepared(T* to, const T* from, int count) {
    constexpr int PER = 16 / sizeof(T), CHUNKS = WIDTH / PER;
    for (int i = threadIdx.x; i < count * CHUNKS; i += THREADS)
        cp_async_16(shared_address(to + i / CHUNKS * LINE + i % CHUNKS * PER), from + i * PER);
}

// The tokens of a sequence. Without spans all have as many.
struct Tokens {
    int begin, end;
    __device__ __forceinline__ Tokens(const int* spans, int sequence, int sequences, int tokens) {
        const int each = tokens / sequences;
        begin = spans ? min(max(spans[2 * sequence], 0), tokens) : sequence * each;
        end = spans ? min(max(spans[2 * sequence + 1], begin), tokens) : begin + each;
    }
};

// The chunks of a sequence. The first is the one that its state had opened, even if it was full.
struct Chunks {
    int begin, before, rows;  // the first token; rows that the state had; all rows

    template <class Params>
    __device__ __forceinline__ Chunks(const Params& p, int sequence, int before) : before(before) {
        const Tokens mine(p.spans, sequence, p.sequences, p.tokens);
        begin = mine.begin, rows = before + mine.end - mine.begin;
    }
    __device__ __forceinline__ int number() const { return (rows + CHUNK - 1) / CHUNK; }
    __device__ __forceinline__ int count(int chunk) const { return min(rows - chunk * CHUNK, CHUNK); }
    // The first row of a chunk that is a token of this call.
    __device__ __forceinline__ int first(int chunk) const { return chunk ? 0 : before; }
    // The token of row 0, if that were one.
    __device__ __forceinline__ i64 token(int chunk) const { return i64(begin) - before + i64(chunk) * CHUNK; }
};

// The place of a sequence's first chunk among those of all: no two sequences share one.
__device__ __forceinline__ int first_chunk(int begin, int sequence) { return begin / CHUNK + 2 * sequence; }

// The sequence of a chunk: the last one whose first chunk is not behind that place.
template <class Params>
__device__ __forceinline__ int sequence_of(const Params& p, int place) {
    const auto begin_of = [&](int n) { return Tokens(p.spans, n, p.sequences, p.tokens).begin; };
    int sequence = 0;
    for (int beyond = p.sequences; beyond - sequence > 1;) {
        const int middle = (sequence + beyond) / 2;
        (first_chunk(begin_of(middle), middle) <= place ? sequence : beyond) = middle;
    }
    return sequence;
}

// A lane's address for ldmatrix, of 16 x 16 elements: by rows a step's left operand, or, transposed, its right one; by
// columns the other way around.
__device__ __forceinline__ u32 by_rows(const Stored* from, int line) {
    const int lane = threadIdx.x % 32;
    return shared_address(from + lane % 16 * line + lane / 16 * 8);
}
__device__ __forceinline__ u32 by_columns(const Stored* from, int line) {
    const int lane = threadIdx.x % 32;
    return shared_address(from + (lane / 16 * 8 + lane % 8) * line + lane / 8 % 2 * 8);
}

#if TENSOR_CORE
// A chain of FMA over x and y, from `sum`. Both lie in shared memory, at multiples of 16 bytes.
__device__ __forceinline__ float chain(const Stored* x, const float* y, int size, float sum) {
    int d = 0;
#pragma unroll 4
    for (; d + 8 <= size; d += 8) {
        const uint4 a = *reinterpret_cast<const uint4*>(x + d);
        const float4 b[2] = {*reinterpret_cast<const float4*>(y + d),
                             *reinterpret_cast<const float4*>(y + d + 4)};
        sum = __fmaf_rn(E::widen(u16(a.x)), b[0].x, sum);
        sum = __fmaf_rn(E::widen(u16(a.x >> 16)), b[0].y, sum);
        sum = __fmaf_rn(E::widen(u16(a.y)), b[0].z, sum);
        sum = __fmaf_rn(E::widen(u16(a.y >> 16)), b[0].w, sum);
        sum = __fmaf_rn(E::widen(u16(a.z)), b[1].x, sum);
        sum = __fmaf_rn(E::widen(u16(a.z >> 16)), b[1].y, sum);
        sum = __fmaf_rn(E::widen(u16(a.w)), b[1].z, sum);
        sum = __fmaf_rn(E::widen(u16(a.w >> 16)), b[1].w, sum);
    }
    for (; d < size; ++d) sum = __fmaf_rn(E::widen(x[d]), y[d], sum);
    return sum;
}

// Rounded to the operands' type.
__device__ __forceinline__ float rounded(float x) {
    if constexpr (TYPE == BF16)
        return __uint_as_float(E::pack(0.0f, x));
    else
        return E::widen(E::narrow(x));
}
#endif

// Two neighbours along k of an operand, rounded and packed.
template <class T>
__device__ __forceinline__ u32 pair_of(const T& operand, int row, int k) {
#if TENSOR_CORE
    if constexpr (T::PAIRS)
        return operand.pair(row, k);
    else
        return E::pack(operand(row, k), operand(row, k + 1));
#else
    return 0;
#endif
}

// Elements of a product that one thread has. Operands are called as (row or column, k).
#if TENSOR_CORE
template <int WIDE>
struct Tile {
    float c[WIDE][4];
    int row, column;  // of the warp's first element

    template <class F>
    __device__ __forceinline__ void each(const F& f) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int x = 0; x < WIDE; ++x)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                f(row + lane / 4 + i / 2 * 8, column + x * 8 + lane % 4 * 2 + i % 2, c[x][i]);
    }

    // The same, with the element of another tile at its place.
    template <class F>
    __device__ __forceinline__ void each_with(const Tile& other, const F& f) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int x = 0; x < WIDE; ++x)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                f(row + lane / 4 + i / 2 * 8, column + x * 8 + lane % 4 * 2 + i % 2, c[x][i], other.c[x][i]);
    }

    // Carries chains on, from k = `first`, a multiple of 16, up to `last`. Operands are zeros from there on.
    template <class A, class B>
    __device__ __forceinline__ void add(int first, int last, const A& a, const B& b) {
        const int lane = threadIdx.x % 32, in_row = lane / 4, in_pair = lane % 4 * 2;
        for (int k = first + in_pair; k < last + in_pair; k += 16) {
            const u32 rows[4] = {pair_of(a, row + in_row, k), pair_of(a, row + in_row + 8, k),
                                 pair_of(a, row + in_row, k + 8), pair_of(a, row + in_row + 8, k + 8)};
#pragma unroll
            for (int x = 0; x < WIDE; ++x) {
                const int n = column + x * 8 + in_row;
                const u32 columns[2] = {pair_of(b, n, k), pair_of(b, n, k + 8)};
                mma_m16n8k16<TYPE == BF16>(c[x], rows, columns);
            }
        }
    }
};

// Of products of so many columns. (NVRTC takes no generic lambdas.)
template <int WIDTH>
using TileOf = Tile<WIDTH % 32 == 0 ? 4 : 2>;

// Calls `f` with each tile of this warp, of a product of HEIGHT x WIDTH elements.
template <int HEIGHT, int WIDTH, class F>
__device__ __forceinline__ void for_tiles(const F& f) {
    constexpr int WIDE = sizeof(TileOf<WIDTH>::c) / 16, TILES = WIDTH / (8 * WIDE);
    for (int i = threadIdx.x / 32; i < HEIGHT / 16 * TILES; i += WARPS) {
        TileOf<WIDTH> tile;
        tile.row = i / TILES * 16, tile.column = i % TILES * 8 * WIDE;
        f(tile);
    }
}
#else
struct Tile {
    float c;
    int row, column;

    template <class F>
    __device__ __forceinline__ void each(const F& f) {
        f(row, column, c);
    }
    template <class F>
    __device__ __forceinline__ void each_with(const Tile& other, const F& f) {
        f(row, column, c, other.c);
    }

    template <class A, class B>
    __device__ __forceinline__ void add(int first, int last, const A& a, const B& b) {
        for (int k = first; k < last; ++k)
            c = __fmaf_rn(E::widen(E::narrow(a(row, k))), E::widen(E::narrow(b(column, k))), c);
    }
};

template <int WIDTH>
using TileOf = Tile;

template <int HEIGHT, int WIDTH, class F>
__device__ __forceinline__ void for_tiles(const F& f) {
    for (int i = threadIdx.x; i < HEIGHT * WIDTH; i += THREADS) {
        Tile tile;
        tile.row = i / WIDTH, tile.column = i % WIDTH;
        f(tile);
    }
}
#endif

// Operands, with PAIRS if they lie there rounded: rows of `line` elements, or with the roles of row and k exchanged; of
// floats, which get rounded.
struct Rows {
    static constexpr bool PAIRS = true;
    const Stored* from;
    int line;
    __device__ __forceinline__ float operator()(int row, int k) const {
        return E::widen(from[row * line + k]);
    }
    __device__ __forceinline__ u32 pair(int row, int k) const {
        return *reinterpret_cast<const u32*>(from + row * line + k);
    }
};

struct Columns {
    static constexpr bool PAIRS = true;
    const Stored* from;
    int line;
    __device__ __forceinline__ float operator()(int row, int k) const {
        return E::widen(from[k * line + row]);
    }
    __device__ __forceinline__ u32 pair(int row, int k) const {
        return u32(from[k * line + row]) | u32(from[(k + 1) * line + row]) << 16;
    }
};

struct Floats {
    static constexpr bool PAIRS = false;
    const float* from;
    int line;
    __device__ __forceinline__ float operator()(int row, int k) const { return from[row * line + k]; }
};

template <class T>
struct Turned {
    static constexpr bool PAIRS = false;
    T of;
    __device__ __forceinline__ float operator()(int row, int k) const { return of(k, row); }
};

#if BY_CHANNEL
// Keys or queries times decays of each channel: from a row of decays, or else to one; zeros from `count` on.
struct Decayed {
    static constexpr bool PAIRS = false;
    const Stored* from;
    const float *decays, *reference;  // none: from the chunk's start
    int count;
    bool until;
    float by;

    __device__ __forceinline__ float factor(int row, int k) const {
        const float mine = decays[row * DECAYS + k], other = reference ? reference[k] : 0.0f;
        return __fmul_rn(exp2_of(until ? __fsub_rn(other, mine) : __fsub_rn(mine, other)), by);
    }
    __device__ __forceinline__ float operator()(int row, int k) const {
        return row < count ? __fmul_rn(E::widen(from[row * KEYS + k]), factor(row, k)) : 0.0f;
    }
};
#endif

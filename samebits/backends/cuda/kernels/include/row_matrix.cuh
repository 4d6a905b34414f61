// Matrices of which a kernel reads rows, in one of two ways.
//
// STAGES = 0   A block takes ROWS rows. Threads hold their entries in registers, or read them again for each use.
// STAGES > 0   Blocks stay, and go on with other rows. Each thread copies its own entries of the next rows into
//              shared memory while it computes one. It waits for its own copies alone: no thread reads what another
//              one copied.
//
// Macros, beside those of row.cuh
//   STAGES   rows in shared memory, of each matrix and for each ROWS; 0: none
//   BLOCKS   of a multiprocessor, at least
//   FETCHED  1: the row that follows when these blocks have ended is asked for, into the L2 cache; 0: none is
#pragma once

#include "ptx_sm80.cuh"
#include "row.cuh"

// Asks for a row of `n` values, from the 16 bytes in which it begins up to those in which it ends.
template <class Stored>
__device__ __forceinline__ void fetch_row(const Stored* at, Place n) {
#if __CUDA_ARCH__ >= 900
    const u64 begin = reinterpret_cast<u64>(at) & ~15ull, end = reinterpret_cast<u64>(at + n) & ~15ull;
    if (begin < end)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(u32(end - begin))
                     : "memory");
#endif
}

// This thread's entries of a row, as they are stored. They stay in registers if those of all matrices fit in 64:
// `count` is the number of words of a pass over all.
template <class E, int count>
struct Entries {
    static constexpr bool HELD = PASSES > 0 && PASSES* count <= 64;

    const typename E::Stored* matrix;
    const typename E::Stored* at;
    i64 step;
    const Row& row;
    float beyond;  // the value beyond the row
    u32 held[HELD ? KEPT_PASSES : 1][WORDS<E>];

    // The `index`-th matrix of a kernel, with rows `step` apart.
    __device__ Entries(const typename E::Stored* matrix, i64 step, const Row& row, float beyond = 0.0f,
                       int = 0)
        : matrix(matrix), at(matrix), step(step), row(row), beyond(beyond) {}

    __device__ __forceinline__ void begin(int) {
        at = matrix + row.row * step + row.first;
        if constexpr (HELD && SHIFTED<E> && PASSES * count <= 32) {
            Shifted<E, KEPT_PASSES> runs;
            runs.load(row, at, 0);
            runs.words(row, at, 0, beyond, held);
        } else if constexpr (HELD) {
            row.each_pass([&](int pass) { load(pass, held[pass]); });
        }
    }

    __device__ void fetch(i64, int) {}

    // The entries that lie `skipped` behind those of the first pass.
    __device__ __forceinline__ void load_at(Place skipped, u32 (&to)[WORDS<E>]) const {
        if constexpr (SHIFTED<E>) {
            Shifted<E, 1> runs;
            runs.load(row, at, skipped);
            runs.words(row, at, skipped, beyond, &to);
        } else {
#pragma unroll
            for (int i = 0; i < OWN; i += RUN) {
                const Place behind = skipped + row.behind(0, i);
                load_run<E>(at + behind, WHOLE ? Place(RUN) : row.n - row.first - behind, beyond,
                            to + i / RUN * RUN_WORDS<E>);
            }
        }
    }

    __device__ __forceinline__ void load(int pass, u32 (&to)[WORDS<E>]) const {
        load_at(row.behind(pass, 0), to);
    }

    // The entries of a pass, as they are stored; `beyond` where there are none.
    __device__ __forceinline__ void words(int pass, u32 (&to)[WORDS<E>]) const {
        if constexpr (HELD) {
#pragma unroll
            for (int w = 0; w < WORDS<E>; ++w) to[w] = held[pass][w];
        } else {
            load(pass, to);
        }
    }

    // The same, widened.
    __device__ __forceinline__ void operator()(int pass, float (&x)[OWN]) const {
        u32 from[WORDS<E>];
        words(pass, from);
        widen_words<E>(from, x);
    }
};

// Asks for the row that a block takes which starts when this one ends.
template <class... Matrices>
__device__ __forceinline__ void fetch_later(const Row& row, i64 rows, const Matrices&... matrices) {
#if __CUDA_ARCH__ >= 900
    if constexpr (FETCHED) {
        u32 multiprocessors;
        asm("mov.u32 %0, %%nsmid;" : "=r"(multiprocessors));
        const i64 later = row.row + i64(multiprocessors) * (BLOCKS * ROWS);
        if (row.leads() && later < rows) (fetch_row(matrices.matrix + later * matrices.step, row.n), ...);
    }
#endif
}

#if STAGES == 0

template <class E, int count>
using Matrix = Entries<E, count>;

// Calls body() for each row that these threads take: one.
template <class Body, class... Matrices>
__device__ __forceinline__ void each_row(Row& row, i64 rows, Body body, Matrices&... matrices) {
    fetch_later(row, rows, matrices...);
    (matrices.begin(0), ...);
    body();
}

#else

constexpr int STAGE = KEPT_PASSES * OWN / RUN * THREADS;  // runs of a block's rows

static_assert(PASSES > 0 && ALIGNED);

template <class E>
struct Ring {
    const typename E::Stored* matrix;
    i64 step;
    const Row& row;
    uint4 *ring, *here;  // this thread's first runs, of the ring and of the row that is read

    __device__ Ring(const typename E::Stored* matrix, i64 step, const Row& row, float beyond = 0.0f,
                    int index = 0)
        : matrix(matrix), step(step), row(row) {
        extern __shared__ uint4 memory[];
        ring = here = memory + index * (STAGES * STAGE) + threadIdx.x;
        const u32 word = word_of<E>(beyond);
        row.each_pass([&](int pass) {
#pragma unroll
            for (int i = 0; i < OWN; i += RUN)
                for (int stage = 0; stage < STAGES && !row.inside(pass, i); ++stage)
                    run(ring, stage, pass, i) = make_uint4(word, word, word, word);
        });
    }

    static __device__ __forceinline__ uint4& run(uint4* from, int stage, int pass, int i) {
        return from[stage * STAGE + (pass * (OWN / RUN) + i / RUN) * THREADS];
    }

    __device__ __forceinline__ void fetch(i64 which, int stage) {
        const typename E::Stored* from = matrix + which * step + row.first;
        row.each_pass([&](int pass) {
#pragma unroll
            for (int i = 0; i < OWN; i += RUN) {
                if (!row.inside(pass, i)) continue;
                uint4& to = run(ring, stage, pass, i);
#if __CUDA_ARCH__ >= 800
                cp_async_16(shared_address(&to), from + row.behind(pass, i));
#else
                to = *reinterpret_cast<const uint4*>(from + row.behind(pass, i));
#endif
            }
        });
    }

    __device__ __forceinline__ void begin(int stage) { here = ring + stage * STAGE; }

    __device__ __forceinline__ void words(int pass, u32 (&to)[WORDS<E>]) const {
#pragma unroll
        for (int i = 0; i < OWN; i += RUN) {
            const uint4 v = run(here, 0, pass, i);
            u32* at = to + i / RUN * 4;
            at[0] = v.x, at[1] = v.y, at[2] = v.z, at[3] = v.w;
        }
    }

    __device__ __forceinline__ void operator()(int pass, float (&x)[OWN]) const {
        u32 from[WORDS<E>];
        words(pass, from);
        widen_words<E>(from, x);
    }
};

// The ring has room for runs of 16 bytes.
template <class E, int count, bool RING = RUN_WORDS<E> == 4>
struct Reading {
    using Type = Ring<E>;
};
template <class E, int count>
struct Reading<E, count, false> {
    using Type = Entries<E, count>;
};
template <class E, int count>
using Matrix = typename Reading<E, count>::Type;

// Calls body() for each row that these threads take: every (grid * ROWS)-th.
template <class Body, class... Matrices>
__device__ __forceinline__ void each_row(Row& row, i64 rows, Body body, Matrices&... matrices) {
    const i64 step = i64(gridDim.x) * ROWS;
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        if (row.row + stage * step < rows) (matrices.fetch(row.row + stage * step, stage), ...);
        cp_async_commit();  // empty ones too, so that their number tells which row is whole
    }
    for (int stage = 0; row.row < rows; row.row += step) {
        cp_async_wait<STAGES - 1>();
        (matrices.begin(stage), ...);
        body();
        const i64 next = row.row + STAGES * step;
        if (next < rows) (matrices.fetch(next, stage), ...);
        cp_async_commit();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}

#endif

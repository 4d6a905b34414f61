// Rows of a matrix as the threads of a block see them, for kernels that reduce rows: docs/contract.md, "Row
// reductions".
//
// A block of 256 threads takes ROWS rows at a time; WARPS warps share one. In a pass they take 4 * WARPS blocks of
// 128 entries, 16 entries a thread. Eight lanes, a group, get a block's sum, and one of them keeps its chain. Where
// warps share a row, shared memory carries its chains and maxima from warp to warp.
//
// A thread has runs of RUN entries, 8 * RUN apart. Halves of a block meet first in a thread, then in lanes that
// exchange what the other keeps.
//
// Macros
//   IN       type of rows: F32, BF16 or F16
//   WARPS    warps that share a row: 1, 2, 4 or 8
//   PASSES   passes that a row takes, 1, 2 or 4; 0: any number, and rows are read again for each use
//   VECTOR   entries of one access to memory: RUN, or 1 for rows that are not aligned
//   WHOLE    1: rows have as many entries as threads have in all passes, and nothing lies beyond them
#pragma once

#include "convert.cuh"
#include "functions.cuh"
#include "launch.cuh"

constexpr int THREADS = 256;
constexpr int ROW_THREADS = 32 * WARPS;
constexpr int ROWS = THREADS / ROW_THREADS;  // of a block, at a time

constexpr bool ALIGNED = VECTOR > 1;
constexpr int RUN = 16 / int(sizeof(Element<IN>::Stored));
constexpr int OWN = 16;                  // entries of a thread in a pass
constexpr int PASS = OWN * ROW_THREADS;  // entries of a row in a pass
constexpr int WARP_PASS = OWN * 32;      // those of a warp
constexpr int LENGTH = PASS * PASSES;    // of a row that is whole: a power of two
constexpr int GROUP = 8;                 // lanes
constexpr int TURNS = 8 / WARPS;         // passes until chains repeat
constexpr int KEPT_PASSES = PASSES > 0 ? PASSES : 1;
constexpr u32 ALL = 0xFFFFFFFF;

static_assert(contract::VOCAB_BLOCK == GROUP * OWN && contract::CHAINS == 32 && 8 % WARPS == 0);
static_assert(VECTOR == RUN || VECTOR == 1);
static_assert(!WHOLE || (ALIGNED && PASSES > 0));

// Adds values of lanes `distance` apart, of which each lane goes on with a half: that of its bit.
template <int count>
__device__ __forceinline__ void exchange_halves(float* x, int lane, int distance) {
    const bool upper = lane & distance;
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
        const float sent = upper ? x[i] : x[count / 2 + i];
        const float kept = upper ? x[count / 2 + i] : x[i];
        x[i] = __fadd_rn(kept, __shfl_xor_sync(ALL, sent, distance));
    }
}

__device__ __forceinline__ float add_across(float x, int distance) {
    return __fadd_rn(x, __shfl_xor_sync(ALL, x, distance));
}

// Numbers of entries in a row.
template <bool LONG>
struct PlaceIn {
    using Type = i64;
};
template <>
struct PlaceIn<false> {
    using Type = int;
};
using Place = PlaceIn<PASSES == 0>::Type;

// What warps that share a row tell each other, by turns in one half and the other: who writes the first half again
// has met the others in the second, and so they have read the first.
struct alignas(16) Told {
    float of[2][contract::CHAINS];
};

struct Row {
    i64 row;
    Place n, first;  // the entries, and where the first one of this thread lies
    int warp, lane;
    Told& told;
    int half = 0;

    __device__ Row(Told (&told)[ROWS], i64 n) : Row(told, n, warp_of_block()) {}

    __device__ Row(Told (&told)[ROWS], i64 n, int of_block)
        : row(i64(blockIdx.x) * ROWS + of_block / WARPS), n(Place(n)), warp(of_block % WARPS),
          lane(threadIdx.x % 32), told(told[of_block / WARPS]) {
        first = warp * WARP_PASS + lane / GROUP * contract::VOCAB_BLOCK + lane % GROUP * RUN;
    }

    // The compiler sees that it is one for all lanes.
    static __device__ int warp_of_block() { return __shfl_sync(ALL, int(threadIdx.x / 32), 0); }

    __device__ bool leads() const { return warp == 0 && lane == 0; }

    // How far behind this thread's first entry its entry i of a pass lies. Both are known when compiling.
    static __device__ constexpr Place behind(int pass, int i) {
        return Place(pass) * PASS + i / RUN * (GROUP * RUN) + i % RUN;
    }

    // How many entries of the row lie from there on. Of rows that are aligned a run lies inside or outside as a whole.
    __device__ Place left(int pass, int i) const { return WHOLE ? Place(RUN) : n - first - behind(pass, i); }

    __device__ bool inside(int pass, int i) const { return left(pass, ALIGNED ? i / RUN * RUN : i) > 0; }

    // Whether any, and all, of this warp's entries of a pass lie inside.
    __device__ bool any(int pass) const {
        return WHOLE ? pass < PASSES : Place(pass) * PASS + warp * WARP_PASS < n;
    }
    __device__ bool whole(int pass) const {
        return WHOLE || Place(pass) * PASS + (warp + 1) * WARP_PASS <= n;
    }

    template <bool UNROLLED = (PASSES > 0), class Each>
    __device__ __forceinline__ void each_pass(Each each) const {
        if constexpr (UNROLLED) {
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass)
                if (any(pass)) each(pass);
        } else {
#pragma unroll 1
            for (int pass = 0; any(pass); ++pass) each(pass);
        }
    }

    __device__ void wait_for_row() const {
        asm volatile("bar.sync %0, %1;" ::"r"(int(threadIdx.x / ROW_THREADS) + 1), "n"(ROW_THREADS)
                     : "memory");
    }

    __device__ float* next_half() {
        half ^= 1;
        return told.of[half];
    }

    // The sum of the block of this thread's group, by halves. Overwrites x.
    __device__ __forceinline__ float block_sum(float (&x)[OWN]) const {
        contract::add_halves<OWN / 2, RUN>(x);
        exchange_halves<RUN>(x, lane, 4);
        exchange_halves<RUN / 2>(x, lane, 2);
        if constexpr (RUN == 8) {
            exchange_halves<2>(x, lane, 1);
            return add_across(add_across(add_across(x[0], 4), 2), 1);
        }
        return add_across(add_across(add_across(x[0], 1), 4), 2);
    }

    // Whether this lane keeps the chain of its group's block in this pass.
    __device__ bool keeps(int pass) const { return lane % GROUP == pass % TURNS; }

    // The sum of all chains; every thread gets it.
    __device__ __forceinline__ float sum_of_chains(float chain) {
        if constexpr (WARPS == 1) {
            // Chain 4 * (lane % 8) + lane / 8 is this lane's.
#pragma unroll
            for (int distance : {4, 2, 1, 16, 8}) chain = add_across(chain, distance);
            return chain;
        }
        float* chains = next_half();
        const int turn = lane % GROUP;
        if (turn < TURNS) chains[turn * (4 * WARPS) + warp * 4 + lane / GROUP] = chain;
        wait_for_row();
        return contract::sum_of_lanes(chains[lane]);
    }

    // The quotient by the number of entries.
    __device__ __forceinline__ float over_length(float sum) const {
        if constexpr (WHOLE)
            return __fmul_rn(sum, 1.0f / LENGTH);
        else
            return __fdiv_rn(sum, static_cast<float>(n));
    }

    // Makes zeros of what lies beyond the row.
    __device__ __forceinline__ void mask(int pass, float (&x)[OWN]) const {
        if (whole(pass)) return;
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = inside(pass, i) ? x[i] : 0.0f;
    }

    // The sum of terms(pass, x), which fills x with those of this thread's entries, and with zeros beyond them.
    template <class Terms>
    __device__ __forceinline__ float sum(Terms terms) {
        float chain = 0.0f;
        each_pass([&](int pass) {
            float x[OWN];
            terms(pass, x);
            const float block = block_sum(x);
            if (keeps(pass)) chain = __fadd_rn(chain, block);
        });
        return sum_of_chains(chain);
    }

    __device__ __forceinline__ float maximum_of_warps(float x) {
        x = contract::maximum_of_lanes(x);
        if constexpr (WARPS > 1) {
            float* maxima = next_half();
            if (lane == 0) maxima[warp] = x;
            wait_for_row();
            x = contract::maximum_of_lanes<WARPS>(maxima[lane % WARPS]);
        }
        return x;
    }
};

// 32-bit words of OWN entries, and of a run.
template <class E>
constexpr int WORDS = OWN * int(sizeof(typename E::Stored)) / 4;
template <class E>
constexpr int RUN_WORDS = RUN * int(sizeof(typename E::Stored)) / 4;

template <int words>
__device__ __forceinline__ void load_words(const void* from, u32* to) {
    if constexpr (words % 4 == 0) {
#pragma unroll
        for (int w = 0; w < words; w += 4) {
            const uint4 v = *(static_cast<const uint4*>(from) + w / 4);
            to[w] = v.x, to[w + 1] = v.y, to[w + 2] = v.z, to[w + 3] = v.w;
        }
    } else {
        static_assert(words == 2);
        const uint2 v = *static_cast<const uint2*>(from);
        to[0] = v.x, to[1] = v.y;
    }
}

template <int words>
__device__ __forceinline__ void store_words(void* to, const u32* from) {
    if constexpr (words % 4 == 0) {
#pragma unroll
        for (int w = 0; w < words; w += 4)
            *(static_cast<uint4*>(to) + w / 4) = make_uint4(from[w], from[w + 1], from[w + 2], from[w + 3]);
    } else {
        static_assert(words == 2);
        *static_cast<uint2*>(to) = make_uint2(from[0], from[1]);
    }
}

// A word of one value.
template <class E>
__device__ __forceinline__ u32 word_of(float x) {
    if constexpr (sizeof(typename E::Stored) == 4)
        return __float_as_uint(x);
    else
        return E::pack(x, x);
}

template <class E>
__device__ __forceinline__ void widen_words(const u32* from, float (&x)[OWN]) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if constexpr (sizeof(typename E::Stored) == 4)
            x[i] = __uint_as_float(from[i]);
        else
            x[i] = E::widen(u16(i % 2 ? from[i / 2] >> 16 : from[i / 2]));
    }
}

// NaN becomes canonical.
template <class E>
__device__ __forceinline__ void narrow_words(const float (&x)[OWN], u32 (&to)[WORDS<E>]) {
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if constexpr (sizeof(typename E::Stored) == 4)
            to[i] = __float_as_uint(contract::canonical(x[i]));
        else if (i % 2 == 0)
            to[i / 2] = E::pack(x[i], x[i + 1]);
}

// A run, of which `left` entries lie inside of the row; `beyond` for the others. Nothing is read behind the row.
template <class E>
__device__ __forceinline__ void load_run(const typename E::Stored* at, Place left, float beyond, u32* to) {
    constexpr int COUNT = RUN_WORDS<E>;
    const u32 word = word_of<E>(beyond);
    if constexpr (ALIGNED) {
#pragma unroll
        for (int w = 0; w < COUNT; ++w) to[w] = word;
        if (left > 0) load_words<COUNT>(at, to);
    } else if constexpr (COUNT == RUN) {
#pragma unroll
        for (int i = 0; i < RUN; ++i) to[i] = i < left ? __float_as_uint(at[i]) : word;
    } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            const u32 x = i < left ? at[i] : word & 0xFFFF;
            to[i / 2] = i % 2 ? to[i / 2] | x << 16 : x;
        }
    }
}

// Whether values are read by aligned runs, two for each of a lane's runs, and shifted.
template <class E>
constexpr bool SHIFTED = !ALIGNED && sizeof(typename E::Stored) == 2;

// This thread's runs of some passes, of values of 16 bits that are not aligned. (What lies before a row up to the
// beginning of an aligned run is in the same memory: memory is aligned.)
template <class E, int passes>
struct Shifted {
    using Stored = const typename E::Stored;
    static constexpr int COUNT = RUN_WORDS<E>, RUNS = OWN / RUN;

    u32 runs[passes][RUNS][2 * COUNT];

    // By how many entries the runs of a row lie behind aligned ones: one number for all of its threads.
    static __device__ __forceinline__ int by(Stored* at) { return reinterpret_cast<u64>(at) / 2 % RUN; }

    // Where run i of a pass begins, behind the thread's first entry.
    static __device__ __forceinline__ Place place(const Row& row, Place behind, int pass, int i) {
        return behind + row.behind(pass, i * RUN);
    }

    // Whether both aligned runs of one that begins there lie before the row's end.
    static __device__ __forceinline__ bool whole(const Row& row, Place place, int skipped) {
        return row.n - row.first - place >= (skipped ? 2 * RUN - skipped : RUN);
    }

    // No branch here: all loads are on their way before the first one is waited for.
    __device__ __forceinline__ void load(const Row& row, Stored* at, Place behind) {
        const int skipped = by(at);
#pragma unroll
        for (int pass = 0; pass < passes; ++pass)
#pragma unroll
            for (int i = 0; i < RUNS; ++i) {
                u32(&run)[2 * COUNT] = runs[pass][i];
                const Place begin = place(row, behind, pass, i);
                const bool inside = whole(row, begin, skipped);
#pragma unroll
                for (int w = 0; w < 2 * COUNT; ++w) run[w] = 0;
                if (inside) load_words<COUNT>(at + begin - skipped, run);
                if (inside && skipped) load_words<COUNT>(at + begin - skipped + RUN, run + COUNT);
            }
    }

    template <int skipped>
    __device__ __forceinline__ void shift(u32 (*to)[WORDS<E>]) const {
#pragma unroll
        for (int pass = 0; pass < passes; ++pass)
#pragma unroll
            for (int i = 0; i < RUNS; ++i)
#pragma unroll
                for (int w = 0; w < COUNT; ++w) {
                    const u32* from = runs[pass][i] + w + skipped / 2;
                    to[pass][i * COUNT + w] = skipped % 2 ? __funnelshift_r(from[0], from[1], 16) : from[0];
                }
    }

    __device__ __forceinline__ void words(const Row& row, Stored* at, Place behind, float beyond,
                                          u32 (*to)[WORDS<E>]) const {
        const int skipped = by(at);
        switch (skipped) {
            case 0:
                shift<0>(to);
                break;
            case 1:
                shift<1>(to);
                break;
            case 2:
                shift<2>(to);
                break;
            case 3:
                shift<3>(to);
                break;
            case 4:
                shift<4>(to);
                break;
            case 5:
                shift<5>(to);
                break;
            case 6:
                shift<6>(to);
                break;
            default:
                shift<7>(to);
        }
#pragma unroll
        for (int pass = 0; pass < passes; ++pass)
#pragma unroll
            for (int i = 0; i < RUNS; ++i) {
                const Place begin = place(row, behind, pass, i);
                if (!whole(row, begin, skipped))
                    load_run<E>(at + begin, row.n - row.first - begin, beyond, to[pass] + i * COUNT);
            }
    }
};

// Stores this thread's entries of a pass. Where rows are not aligned, a warp's entries change places in shared
// memory, so that lanes store side by side.
template <class E>
__device__ __forceinline__ void store_pass(const Row& row, int pass, typename E::Stored* out,
                                           const u32 (&words)[WORDS<E>]) {
    constexpr int COUNT = RUN_WORDS<E>;
    if constexpr (ALIGNED) {
#pragma unroll
        for (int i = 0; i < OWN; i += RUN)
            if (row.inside(pass, i))
                store_words<COUNT>(out + row.first + row.behind(pass, i), words + i / RUN * COUNT);
    } else {
        __shared__ alignas(16) typename E::Stored places[THREADS / 32][WARP_PASS];
        auto& of_warp = places[threadIdx.x / 32];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < OWN; i += RUN)
            store_words<COUNT>(of_warp + (row.first + row.behind(0, i)) % WARP_PASS, words + i / RUN * COUNT);
        __syncwarp();
        const Place begin = Place(pass) * PASS + row.warp * WARP_PASS + row.lane;
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (begin + 32 * i < row.n) out[begin + 32 * i] = of_warp[32 * i + row.lane];
    }
}

// Stores values(pass, x) of this thread's entries.
template <class E, bool UNROLLED = (PASSES > 0), class Values>
__device__ __forceinline__ void store_row(const Row& row, typename E::Stored* out, Values values) {
    row.each_pass<UNROLLED>([&](int pass) {
        float x[OWN];
        values(pass, x);
        u32 words[WORDS<E>];
        narrow_words<E>(x, words);
        store_pass<E>(row, pass, out, words);
    });
}

// Quotients by one divisor: those of IEEE 754, in three steps instead of a division's ten.
struct Divisor {
    float divisor, reciprocal;

    __device__ explicit Divisor(float divisor) : divisor(divisor), reciprocal(__frcp_rn(divisor)) {}

    // For a divisor of at least 1 or NaN, and x from 2^-80 to 1, +0 or NaN. P. Markstein's theorem (IBM Journal of
    // Research and Development 34, 1990) has it that the correction of a quotient by the reciprocal, itself
    // rounded right, is right where the remainder is exact, hence not for the smallest x.
    __device__ __forceinline__ float of_large(float x) const {
        const float quotient = __fmul_rn(x, reciprocal);
        return __fmaf_rn(__fmaf_rn(-quotient, divisor, x), reciprocal, quotient);
    }

    // For smaller x too.
    __device__ __forceinline__ void divide(float (&x)[OWN]) const {
        float quotient[OWN];
        bool small = false;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            small = small || (x[i] < 0x1p-80f && x[i] > 0.0f);
            quotient[i] = of_large(x[i]);
        }
        if (small) {
#pragma unroll
            for (int i = 0; i < OWN; ++i) x[i] = __fdiv_rn(x[i], divisor);
        } else {
#pragma unroll
            for (int i = 0; i < OWN; ++i) x[i] = quotient[i];
        }
    }
};

// Rows of a matrix as the threads of a block see them, for kernels that reduce rows: docs/contract.md, "Row
// reductions".
//
// A block of 256 threads takes ROWS rows; WARPS warps share one. In a pass they take 4 * WARPS blocks of 128
// entries, 16 entries a thread. Eight lanes, a group, get a block's sum, and one of them keeps its chain. Where
// warps share a row, shared memory carries its chains and maxima from warp to warp.
//
// Which entries a thread has:
//   VECTOR > 1   a block is its group's: a thread has runs of VECTOR entries, 8 * VECTOR apart. Halves of a
//                block meet first in a thread, then in lanes that exchange what the other keeps.
//   VECTOR = 1   all lanes have entries of all four blocks, 32 apart: for rows that are not aligned.
//
// Macros
//   IN       type of rows: F32, BF16 or F16
//   WARPS    warps that share a row: 1, 2, 4 or 8
//   PASSES   passes that a row takes, 1, 2 or 4; 0: any number, and rows are read again for each use
//   VECTOR   entries of one access to memory: 16 bytes' worth of IN, or 1
#pragma once

#include "convert.cuh"
#include "functions.cuh"

constexpr int THREADS = 256;
constexpr int ROW_THREADS = 32 * WARPS;
constexpr int ROWS = THREADS / ROW_THREADS;  // of a block

constexpr int OWN = 16;                  // entries of a thread in a pass
constexpr int PASS = OWN * ROW_THREADS;  // entries of a row in a pass
constexpr int GROUP = 8;                 // lanes
constexpr int TURNS = 8 / WARPS;         // passes until chains repeat
constexpr int PER_LANE = contract::VOCAB_BLOCK / 32;
constexpr int MAXIMA = VECTOR > 1 ? 1 : 4;  // blocks of a pass that a thread has entries of

static_assert(contract::VOCAB_BLOCK == GROUP * OWN && contract::CHAINS == 32 && 8 % WARPS == 0);

// Adds values of lanes `distance` apart, of which each lane goes on with a half: that of its bit.
template <int count>
__device__ __forceinline__ void exchange_halves(float* x, int lane, int distance) {
    const bool upper = lane & distance;
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
        const float sent = upper ? x[i] : x[count / 2 + i];
        const float kept = upper ? x[count / 2 + i] : x[i];
        x[i] = __fadd_rn(kept, __shfl_xor_sync(0xFFFFFFFF, sent, distance));
    }
}

__device__ __forceinline__ float add_across(float x, int distance) {
    return __fadd_rn(x, __shfl_xor_sync(0xFFFFFFFF, x, distance));
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

struct Row {
    i64 row;
    Place n;
    int warp, lane;
    float* shared;  // CHAINS values of this row

    __device__ Row(float* memory, i64 n)
        : row(i64(blockIdx.x) * ROWS + threadIdx.x / ROW_THREADS), n(Place(n)),
          warp(threadIdx.x / 32 % WARPS), lane(threadIdx.x % 32),
          shared(memory + threadIdx.x / ROW_THREADS * contract::CHAINS) {}

    __device__ bool leads() const { return threadIdx.x % ROW_THREADS == 0; }

    // Where in the row entry i of this thread lies, in a pass. `i` is known when compiling.
    __device__ Place place(int pass, int i) const {
        const Place first = Place(pass) * PASS + warp * (4 * contract::VOCAB_BLOCK);
        if (VECTOR > 1)
            return first + lane / GROUP * contract::VOCAB_BLOCK + lane % GROUP * VECTOR +
                   i / VECTOR * (GROUP * VECTOR) + i % VECTOR;
        return first + i / PER_LANE * contract::VOCAB_BLOCK + i % PER_LANE * 32 + lane;
    }

    // The first entry of an access lies inside or outside with the whole access.
    __device__ bool inside(int pass, int i) const { return place(pass, i / VECTOR * VECTOR) < n; }

    template <class Each>
    __device__ __forceinline__ void each_pass(Each each) const {
        if constexpr (PASSES > 0) {
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass)
                if (pass * PASS < n) each(pass);
        } else {
#pragma unroll 1
            for (int pass = 0; Place(pass) * PASS < n; ++pass) each(pass);
        }
    }

    __device__ void wait_for_row() const {
        asm volatile("bar.sync %0, %1;" ::"r"(int(threadIdx.x / ROW_THREADS) + 1), "n"(ROW_THREADS)
                     : "memory");
    }

    // The sum of the block of this thread's group, by halves. Overwrites x.
    __device__ __forceinline__ float block_sum(float (&x)[OWN]) const {
        if constexpr (VECTOR > 1) {
            contract::add_halves<OWN / 2, VECTOR>(x);
            exchange_halves<VECTOR>(x, lane, 4);
            exchange_halves<VECTOR / 2>(x, lane, 2);
            if constexpr (VECTOR == 8) {
                exchange_halves<2>(x, lane, 1);
                return add_across(add_across(add_across(x[0], 4), 2), 1);
            }
            return add_across(add_across(add_across(x[0], 1), 4), 2);
        } else {
            float of[4];
#pragma unroll
            for (int b = 0; b < 4; ++b)
                of[b] = __fadd_rn(__fadd_rn(x[4 * b], x[4 * b + 2]), __fadd_rn(x[4 * b + 1], x[4 * b + 3]));
            exchange_halves<4>(of, lane,
                               16);  // these are blocks: a lane goes on with two of them, then with one
            exchange_halves<2>(of, lane, 8);
            return add_across(add_across(add_across(of[0], 4), 2), 1);
        }
    }

    // Whether this lane keeps the chain of its group's block in this pass.
    __device__ bool keeps(int pass) const { return lane % GROUP == pass % TURNS; }

    // The sum of all chains; every thread gets it.
    __device__ float sum_of_chains(float chain) const {
        if constexpr (WARPS == 1) {
            // Chain 4 * (lane % 8) + lane / 8 is this lane's.
#pragma unroll
            for (int distance : {4, 2, 1, 16, 8}) chain = add_across(chain, distance);
            return chain;
        }
        const int turn = lane % GROUP;
        if (turn < TURNS) shared[turn * (4 * WARPS) + warp * 4 + lane / GROUP] = chain;
        wait_for_row();
        const float all = shared[lane];
        wait_for_row();
        return contract::sum_of_lanes(all);
    }

    // Makes zeros of what lies beyond the row.
    __device__ __forceinline__ void mask(int pass, float (&x)[OWN]) const {
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = inside(pass, i) ? x[i] : 0.0f;
    }

    // The sum of terms(pass, x), which fills x with those of this thread's entries, and with zeros beyond them.
    template <class Terms>
    __device__ __forceinline__ float sum(Terms terms) const {
        float chain = 0.0f;
        each_pass([&](int pass) {
            float x[OWN];
            terms(pass, x);
            const float block = block_sum(x);
            if (keeps(pass)) chain = __fadd_rn(chain, block);
        });
        return sum_of_chains(chain);
    }

    __device__ float maximum_of_warps(float x) const {
        x = contract::maximum_of_lanes(x);
        if (WARPS == 1) return x;
        if (lane == 0) shared[warp] = x;
        wait_for_row();
        x = contract::maximum_of_lanes(shared[lane % WARPS]);
        wait_for_row();
        return x;
    }

    // The maximum of this thread's group.
    __device__ float of_group(const float (&m)[MAXIMA]) const {
        if constexpr (MAXIMA == 4) {
            const float low = lane & 8 ? m[1] : m[0], high = lane & 8 ? m[3] : m[2];
            return lane & 16 ? high : low;
        }
        return m[0];
    }

    // The maxima of this pass's blocks of which this thread has entries.
    __device__ __forceinline__ void maxima(const float (&z)[OWN], float (&m)[MAXIMA]) const {
#pragma unroll
        for (int b = 0; b < MAXIMA; ++b) {
            m[b] = z[b * (OWN / MAXIMA)];
#pragma unroll
            for (int i = 1; i < OWN / MAXIMA; ++i) m[b] = contract::maximum(m[b], z[b * (OWN / MAXIMA) + i]);
            m[b] = VECTOR > 1 ? contract::maximum_of_lanes<GROUP>(m[b]) : contract::maximum_of_lanes(m[b]);
        }
    }

    // R and S of logits: the shift of their maximum, and the sum of their exponentials. `logits(pass, z)` gives
    // -inf beyond the row.
    template <class Logits>
    __device__ __forceinline__ void softmax(Logits logits, float& shift, float& total) const {
        float largest = -INF, kept[PASSES > 0 ? PASSES : 1][MAXIMA];
        each_pass([&](int pass) {
            float z[OWN];
            auto& m = kept[PASSES > 0 ? pass : 0];
            logits(pass, z);
            maxima(z, m);
#pragma unroll
            for (int b = 0; b < MAXIMA; ++b) largest = contract::maximum(largest, m[b]);
        });
        shift = contract::shift_of(maximum_of_warps(largest));
        float chain = 0.0f;
        each_pass([&](int pass) {
            float z[OWN];
            auto& m = kept[PASSES > 0 ? pass : 0];
            logits(pass, z);
            if (PASSES == 0) maxima(z, m);
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                z[i] = contract::exp(__fsub_rn(z[i], contract::shift_of(m[i / (OWN / MAXIMA)])));
            const float block = block_sum(z);
            const float own = of_group(m);
            if (keeps(pass)) chain = __fmaf_rn(block, contract::exp(__fsub_rn(own, shift)), chain);
        });
        total = sum_of_chains(chain);
    }
};

// 32-bit words of OWN entries.
template <class E>
constexpr int WORDS = OWN * int(sizeof(typename E::Stored)) / 4;

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

// One of the matrices that are read: this thread's entries of its row, as they are stored. They stay in
// registers if those of all matrices fit in 64: `count` is the number of words of a pass over all.
template <class E, int count>
struct Entries {
    static constexpr bool HELD = PASSES > 0 && PASSES* count <= 64;
    static constexpr bool WIDE = sizeof(typename E::Stored) == 4;

    const typename E::Stored* at;
    const Row& row;
    float beyond;  // the value beyond the row
    u32 words[HELD ? PASSES : 1][WORDS<E>];

    __device__ Entries(const typename E::Stored* at, const Row& row, float beyond = 0.0f)
        : at(at), row(row), beyond(beyond) {
        if constexpr (HELD) row.each_pass([&](int pass) { load(pass, words[pass]); });
    }

    __device__ __forceinline__ void load(int pass, u32 (&to)[WORDS<E>]) const {
        if constexpr (VECTOR > 1) {
            constexpr int BYTES = VECTOR * int(sizeof(typename E::Stored));
#pragma unroll
            for (int i = 0; i < OWN; i += VECTOR) {
#pragma unroll
                for (int w = 0; w < BYTES / 4; ++w) to[i / VECTOR * (BYTES / 4) + w] = word_of<E>(beyond);
                if (row.inside(pass, i))
                    load_words<BYTES / 4>(at + row.place(pass, i), to + i / VECTOR * (BYTES / 4));
            }
        } else if constexpr (WIDE) {
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                to[i] = row.inside(pass, i) ? __float_as_uint(at[row.place(pass, i)]) : word_of<E>(beyond);
        } else {
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const u32 x = row.inside(pass, i) ? at[row.place(pass, i)] : word_of<E>(beyond) & 0xFFFF;
                to[i / 2] = i % 2 ? to[i / 2] | x << 16 : x;
            }
        }
    }

    // The entries of a pass, widened; `beyond` where there are none.
    __device__ __forceinline__ void operator()(int pass, float (&x)[OWN]) const {
        u32 again[WORDS<E>];
        if constexpr (!HELD) load(pass, again);
        const u32* from = HELD ? words[pass] : again;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if constexpr (WIDE)
                x[i] = __uint_as_float(from[i]);
            else
                x[i] = E::widen(u16(i % 2 ? from[i / 2] >> 16 : from[i / 2]));
        }
    }
};

// Stores values(pass, x) of this thread's entries.
template <class E, class Values>
__device__ __forceinline__ void store_row(const Row& row, typename E::Stored* out, Values values) {
    row.each_pass([&](int pass) {
        float x[OWN];
        values(pass, x);
        if constexpr (VECTOR > 1) {
            constexpr int BYTES = VECTOR * int(sizeof(typename E::Stored));
#pragma unroll
            for (int i = 0; i < OWN; i += VECTOR) {
                u32 words[BYTES / 4];
#pragma unroll
                for (int j = 0; j < VECTOR; ++j)
                    if constexpr (sizeof(typename E::Stored) == 4)
                        words[j] = __float_as_uint(contract::canonical(x[i + j]));
                    else if (j % 2 == 0)
                        words[j / 2] = E::pack(x[i + j], x[i + j + 1]);  // NaN becomes canonical
                if (row.inside(pass, i)) store_words<BYTES / 4>(out + row.place(pass, i), words);
            }
        } else {
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                if (row.inside(pass, i)) out[row.place(pass, i)] = E::narrow(contract::canonical(x[i]));
        }
    });
}

// Quotients by one divisor: those of IEEE 754, in three steps instead of a division's ten.
struct Divisor {
    float divisor, reciprocal;

    __device__ explicit Divisor(float divisor) : divisor(divisor), reciprocal(__frcp_rn(divisor)) {}

    // For a divisor of at least 1 or NaN, and x from +0 to 1 or NaN. P. Markstein's theorem (IBM Journal of
    // Research and Development 34, 1990) has it that the correction of a quotient by the reciprocal, itself
    // rounded right, is right where the remainder is exact, hence not for the smallest x.
    __device__ __forceinline__ void divide(float (&x)[OWN]) const {
        float quotient[OWN];
        bool small = false;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            small = small || (x[i] < 0x1p-80f && x[i] > 0.0f);
            quotient[i] = __fmul_rn(x[i], reciprocal);
            quotient[i] = __fmaf_rn(__fmaf_rn(-quotient[i], divisor, x[i]), reciprocal, quotient[i]);
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if (small)
                x[i] = __fdiv_rn(x[i], divisor);
            else
                x[i] = quotient[i];
        }
    }
};

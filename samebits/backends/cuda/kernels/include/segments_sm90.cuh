// Sums of segments: what each segment of k gives, added by the contract's tree. Uses the macros SEGMENTS, HELD
// and SHARED.
//
// A warpgroup takes a tile's segments in order. At most one sum of every level waits for its right neighbour:
//
//   segment   0      1      2      3      4      5      6      7
//   level 0   wait   add    wait   add    wait   add    wait   add
//   level 1          wait          add           wait          add
//   level 2                        wait                        add
//
// The HELD lowest levels, which change most often, wait in registers: the accumulators of 2^HELD segments, a
// group, are different ones, so nothing is copied there. The next SHARED levels, 0 or 1, wait in shared memory,
// and the others in memory, that is, in L2. There each thread reads what it wrote itself, so nothing is
// synchronised.
//
// JOINED: the tensor cores go on from segment to segment. Each is added while they multiply the next one. Only
// at the end of a group do all accumulators hold a sum: then they wait for one addition, which frees some.
//
//   tensor cores   |segment 0|segment 1|segment 2|segment 3|   |segment 4|
//   warpgroup                           0 + 1               2+3 01+23, to memory
#pragma once

#include "ptx_sm90.cuh"

#ifndef SEGMENTS
#define SEGMENTS 1
#define HELD 0
#define SHARED 0
#endif

// Of a thread's accumulators, TILES times FLOATS.
template <int TILES, int FLOATS, bool JOINED>
class SegmentSums {
  public:
    // Where sums wait.
    struct Place {
        void* shared;   // memory of the warpgroup
        float* memory;  // where that of all warpgroups in L2 begins; host code counts it
        u32 warpgroup, thread;
        bool some;  // whether there is some k: there is, but the compiler does not know
    };

  private:
    using Sum = float[TILES][FLOATS];
    static constexpr int FOURS = TILES * FLOATS / 4;

    static constexpr int GROUP = 1 << HELD;
    static constexpr int ABOVE = HELD + SHARED;  // the lowest level that waits in L2

    // Which accumulators segment `i` of a group has: 0 1 2 1 3 1 2 1. A sum waits where its first segment was, so
    // at an odd segment's end only 1 is free again, and later those of what it completes. Every other group has 0
    // and 1 the other way round, and so begins with the ones that the group before has left.
    static __device__ constexpr int set_of(int i, int turn) {
        int set = 0;
        if (i > 0) {
            for (set = 1; !(i & 1); i >>= 1) ++set;
        }
        return HELD > 0 && set < 2 ? set ^ turn : set;
    }

    // The compiler's first half may move this neither before `right` is complete, nor behind what overwrites it.
    static __device__ __forceinline__ void add(Sum& left, Sum& right) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < FLOATS; ++i) {
                asm volatile("" : "+f"(right[tile][i])::"memory");
                left[tile][i] = __fadd_rn(left[tile][i], right[tile][i]);
                asm volatile("" : "+f"(left[tile][i])::"memory");
            }
        }
    }

    // Adds what segment I of a group completes, of levels FROM to TO - 1, to its left neighbours.
    template <int I, int TURN, int FROM, int TO>
    static __device__ __forceinline__ void add_levels(Sum (&sets)[HELD + 1]) {
        if constexpr (FROM < TO && (I >> FROM & 1)) {
            constexpr int FIRST = I + 1 - (1 << FROM);
            add(sets[set_of(FIRST - (1 << FROM), TURN)], sets[set_of(FIRST, TURN)]);
            add_levels<I, TURN, FROM + 1, TO>(sets);
        }
    }

    // What a first step overwrites without having read it. Else ptxas took such accumulators for ones in use
    // from the kernel's start on, and spilled. Once a tile is enough.
    static __device__ __forceinline__ void clear(Sum& sum) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < FLOATS; ++i) sum[tile][i] = 0;
        }
    }

    static __device__ __forceinline__ void add_waiting(const float4* from, Sum& sum, bool in_shared) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < FLOATS; i += 4) {
                const float4* at = from + (tile * FLOATS + i) / 4 * 128;
                const float4 left = in_shared ? *at : __ldcg(at);
                float* right = &sum[tile][i];
                right[0] = __fadd_rn(left.x, right[0]);
                right[1] = __fadd_rn(left.y, right[1]);
                right[2] = __fadd_rn(left.z, right[2]);
                right[3] = __fadd_rn(left.w, right[3]);
            }
        }
    }

    static __device__ __forceinline__ void let_wait(const Sum& sum, float4* to, bool in_shared) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < FLOATS; i += 4) {
                const float* x = &sum[tile][i];
                const float4 four = make_float4(x[0], x[1], x[2], x[3]);
                float4* at = to + (tile * FLOATS + i) / 4 * 128;
                if (in_shared)
                    *at = four;
                else
                    __stcg(at, four);
            }
        }
    }

    // What is left to add when a group from `segment` on is complete. It frees accumulators.
    template <int TURN>
    static __device__ __forceinline__ void finish(Sum (&sets)[HELD + 1], u32 segment, const Place& place) {
        add_levels<GROUP - 1, TURN, 1, HELD>(sets);
        Sum& sum = sets[set_of(0, TURN)];
        u32 lane = place.thread;
        asm volatile("" : "+r"(lane));  // or addresses stay in registers from one segment to the next
        u32 waiting = segment >> HELD;  // bit by bit: whether a sum of that level waits
        if constexpr (SHARED && GROUP < SEGMENTS) {
            float4* shared = static_cast<float4*>(place.shared) + lane;
            if (!(waiting & 1)) return let_wait(sum, shared, true);
            add_waiting(shared, sum, true);
            waiting >>= 1;
        }
        if constexpr (1 << ABOVE < SEGMENTS) {
            i64 start = i64(place.warpgroup) * (levels_in_memory() * FOURS * 128) + lane;
            float4* memory = reinterpret_cast<float4*>(place.memory) + start;
#pragma unroll 1  // or ptxas loads all levels at once, and spills
            for (; waiting & 1; waiting >>= 1, memory += FOURS * 128) add_waiting(memory, sum, false);
            if (segment + GROUP < SEGMENTS) let_wait(sum, memory, false);
        }
    }

    static __device__ constexpr int levels_in_memory() {
        int levels = 0;
        while (1 << levels < SEGMENTS) ++levels;
        return levels - ABOVE;
    }

    // Segments I and later of a group from `segment` on, each of which is complete before the next one begins.
    template <int I, typename Begin, typename GoOn>
    static __device__ __forceinline__ void one_by_one(Sum (&sets)[HELD + 1], u32 segment, Begin& begin,
                                                      GoOn& go_on) {
        if constexpr (I < GROUP) {
            Sum& sum = sets[set_of(I, 0)];
            begin(sum, segment + I, false);
            go_on(sum);
            add_levels<I, 0, 0, I + 1 < GROUP ? HELD : 1>(sets);
            one_by_one<I + 1>(sets, segment, begin, go_on);
        }
    }

    // The same, without a break, and what is left of the group before. What is left of this one is the next one's.
    template <int TURN, int I, typename Begin, typename GoOn>
    static __device__ __forceinline__ void joined(Sum (&sets)[HELD + 1], u32 segment, const Place& place,
                                                  Begin& begin, GoOn& go_on) {
        if constexpr (I < GROUP) {
            Sum& sum = sets[set_of(I, TURN)];
            begin(sum, segment + I, I > 0);
            if constexpr (I > 0)
                add_levels<I - 1, TURN, 0, HELD>(sets);
            else if (segment > 0)
                finish<TURN ^ 1>(sets, segment - GROUP, place);
            go_on(sum);
            joined<TURN, I + 1>(sets, segment, place, begin, go_on);
        }
    }

  public:
    static constexpr u32 shared_bytes = SHARED * FOURS * 128 * sizeof(float4);  // of a warpgroup

    // Multiplies all segments, and returns their sum, in one of the `sets`. `begin(sum, segment, joined)`
    // multiplies the first stage of one, and the one before is complete then; `joined`: whether it need not have
    // been. `go_on(sum)` multiplies the others, and completes them unless JOINED. `complete()` waits for the last.
    template <typename Begin, typename GoOn, typename Complete>
    static __device__ __forceinline__ Sum& all(Sum (&sets)[HELD + 1], const Place& place, Begin begin,
                                               GoOn go_on, Complete complete) {
#pragma unroll
        for (Sum& sum : sets) clear(sum);
        if constexpr (!JOINED) {
            for (u32 segment = 0; segment < SEGMENTS; segment += GROUP) {
                one_by_one<0>(sets, segment, begin, go_on);
                finish<0>(sets, segment, place);
            }
            return sets[set_of(0, 0)];
        } else {
            constexpr int LAST = GROUP < SEGMENTS;
            for (u32 segment = 0; segment < SEGMENTS; segment += (LAST + 1) * GROUP) {
                joined<0, 0>(sets, segment, place, begin, go_on);
                complete();
                add_levels<GROUP - 1, 0, 0, 1>(sets);
                if constexpr (LAST == 1) {
                    joined<1, 0>(sets, segment + GROUP, place, begin, go_on);
                    complete();
                    add_levels<GROUP - 1, 1, 0, 1>(sets);
                }
            }
            // Behind a branch: else ptxas takes all loads before work of the epilogue, and spills.
            if (place.some) finish<LAST>(sets, SEGMENTS - GROUP, place);
            return sets[set_of(0, LAST)];
        }
    }
};

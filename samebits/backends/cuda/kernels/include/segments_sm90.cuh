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
// The HELD lowest levels, which change most often, wait in registers: the accumulators of 2^HELD segments are
// different ones, so nothing is copied there. The next SHARED levels, 0 or 1, wait in shared memory, and the
// others in memory, that is, in L2. There each thread reads what it wrote itself, so nothing is synchronised.
#pragma once

#include "ptx_sm90.cuh"

#ifndef SEGMENTS
#define SEGMENTS 1
#define HELD 0
#define SHARED 0
#endif

// Of a thread's accumulators, TILES times FLOATS.
template <int TILES, int FLOATS>
class SegmentSums {
    using Sum = float (&)[TILES][FLOATS];
    static constexpr int FOURS = TILES * FLOATS / 4;

    static constexpr int ABOVE = HELD + SHARED;  // the lowest level that waits in L2

    // `sum` becomes the sum of 2^LEVEL segments from `segment` on. `multiply(sum, segment)` gives that of one.
    // `held`: for the sums that wait, of all levels below.
    template <int LEVEL, typename Multiply>
    static __device__ __forceinline__ void subtree(Sum sum, u32 segment, float (*held)[TILES][FLOATS],
                                                   Multiply& multiply) {
        if constexpr (LEVEL == 0) {
            multiply(sum, segment);
        } else {
            Sum left = held[LEVEL - 1];
            subtree<LEVEL - 1>(left, segment, held, multiply);
            subtree<LEVEL - 1>(sum, segment + (1 << (LEVEL - 1)), held, multiply);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                for (int i = 0; i < FLOATS; ++i) sum[tile][i] = __fadd_rn(left[tile][i], sum[tile][i]);
            }
        }
    }

    // What a first step overwrites without having read it. Else ptxas took such accumulators for ones in use
    // from the kernel's start on, and spilled. Once a tile is enough.
    static __device__ __forceinline__ void clear(Sum sum) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < FLOATS; ++i) sum[tile][i] = 0;
        }
    }

    template <int LEVEL>
    static __device__ __forceinline__ void add_from(Sum sum, u32 segment, float4* shared, float4* memory) {
        if constexpr (1 << LEVEL < SEGMENTS) {
            if (segment >> LEVEL & 1) {
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                    for (int i = 0; i < FLOATS; i += 4) {
                        float* d = &sum[tile][i];
                        float4 left = LEVEL < ABOVE ? shared[place(LEVEL, HELD, tile, i)]
                                                    : __ldcg(memory + place(LEVEL, ABOVE, tile, i));
                        d[0] = __fadd_rn(left.x, d[0]);
                        d[1] = __fadd_rn(left.y, d[1]);
                        d[2] = __fadd_rn(left.z, d[2]);
                        d[3] = __fadd_rn(left.w, d[3]);
                    }
                }
                add_from<LEVEL + 1>(sum, segment, shared, memory);
            } else {
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                    for (int i = 0; i < FLOATS; i += 4) {
                        const float* d = &sum[tile][i];
                        float4 right = make_float4(d[0], d[1], d[2], d[3]);
                        if constexpr (LEVEL < ABOVE)
                            shared[place(LEVEL, HELD, tile, i)] = right;
                        else
                            __stcg(memory + place(LEVEL, ABOVE, tile, i), right);
                    }
                }
            }
        }
    }

    static __device__ constexpr int place(int level, int first, int tile, int i) {
        return ((level - first) * FOURS + (tile * FLOATS + i) / 4) * 128;
    }

    static __device__ constexpr int levels_in_memory() {
        int levels = 0;
        while (1 << levels < SEGMENTS) ++levels;
        return levels - ABOVE;
    }

  public:
    static constexpr u32 shared_bytes = SHARED * FOURS * 128 * sizeof(float4);  // of a warpgroup

    // `sum` becomes that of all segments. `multiply(sum, segment)` makes it that of one. `shared`: memory of
    // the warpgroup. `of_all`: where that of all warpgroups in L2 begins; host code counts it.
    template <typename Multiply>
    static __device__ __forceinline__ void all(Sum sum, void* shared, float* of_all, u32 warpgroup,
                                               u32 thread, Multiply multiply) {
        float held[HELD + 1][TILES][FLOATS];  // the last is not used: there are no arrays of none
#pragma unroll
        for (int level = 0; level < HELD; ++level) clear(held[level]);
        clear(sum);
        for (u32 segment = 0; segment < SEGMENTS; segment += 1 << HELD) {
            subtree<HELD>(sum, segment, held, multiply);
            u32 lane = thread;
            asm volatile("" : "+r"(lane));  // or the address stays in registers from one segment to the next
            i64 start = i64(warpgroup) * (levels_in_memory() * FOURS * 128) + lane;
            add_from<HELD>(sum, segment, static_cast<float4*>(shared) + lane,
                           reinterpret_cast<float4*>(of_all) + start);
        }
    }
};

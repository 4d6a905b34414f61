// Warpgroup matrix instructions: D[64, N] += A[64, 16] B[16, N], with B in shared memory, and A there or in
// registers. Uses the macro INPUT_F16.
#pragma once

#include "ptx_sm90.cuh"

#if INPUT_F16
#define INPUT "f16"
#else
#define INPUT "bf16"
#endif

// A tile in shared memory as `wgmma` sees it, in the swizzle that TMA wrote: lines of 128 or 64
// bytes, eight to a block. `leading` is the distance between columns of blocks and counts only where the
// contiguous dimension is not k. An offset into the tile only adds to the low word, so one descriptor serves
// a whole stage.
template <u32 line_bytes>
struct Descriptor {
    u32 low;

    // The address within the block: in a cluster its upper bits name the block.
    __device__ Descriptor(u32 address, u32 leading) : low(leading >> 4 << 16 | (address >> 4 & 0x3FFF)) {}

    __device__ __forceinline__ u64 at(u32 offset) const {
        constexpr u64 swizzle = line_bytes == 128 ? 1 : 2, block_bytes = 8 * line_bytes;
        return swizzle << 62 | block_bytes >> 4 << 32 | (low + (offset >> 4));
    }
};

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

#define REGS_4 "%0,%1,%2,%3"
#define REGS_8 REGS_4 ",%4,%5,%6,%7"
#define REGS_12 REGS_8 ",%8,%9,%10,%11"
#define REGS_16 REGS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define REGS_20 REGS_16 ",%16,%17,%18,%19"
#define REGS_24 REGS_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define REGS_28 REGS_24 ",%24,%25,%26,%27"
#define REGS_32 REGS_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define REGS_36 REGS_32 ",%32,%33,%34,%35"
#define REGS_40 REGS_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define REGS_44 REGS_40 ",%40,%41,%42,%43"
#define REGS_48 REGS_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define REGS_52 REGS_48 ",%48,%49,%50,%51"
#define REGS_56 REGS_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define REGS_60 REGS_56 ",%56,%57,%58,%59"
#define REGS_64 REGS_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define REGS_68 REGS_64 ",%64,%65,%66,%67"
#define REGS_72 REGS_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define REGS_76 REGS_72 ",%72,%73,%74,%75"
#define REGS_80 REGS_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define REGS_84 REGS_80 ",%80,%81,%82,%83"
#define REGS_88 REGS_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define REGS_92 REGS_88 ",%88,%89,%90,%91"
#define REGS_96 REGS_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define REGS_100 REGS_96 ",%96,%97,%98,%99"
#define REGS_104 REGS_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define REGS_108 REGS_104 ",%104,%105,%106,%107"
#define REGS_112 REGS_104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define REGS_116 REGS_112 ",%112,%113,%114,%115"
#define REGS_120 REGS_112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define REGS_124 REGS_120 ",%120,%121,%122,%123"
#define REGS_128 REGS_120 ",%120,%121,%122,%123,%124,%125,%126,%127"

#define ACC_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC_8(i) ACC_4(i), ACC_4(i + 4)
#define ACC_16(i) ACC_8(i), ACC_8(i + 8)
#define ACC_32(i) ACC_16(i), ACC_16(i + 16)
#define ACC_64(i) ACC_32(i), ACC_32(i + 32)

template <int n, int a_mn, int b_mn>
struct Wgmma;

// One k16 step of a 64-row chain; without `accumulate` the first of it, from +0. a_mn, b_mn: whether that operand is contiguous along m or n rather than k.
// The five numbers are the operands' places in the instruction, after the n / 2 accumulators.
#define WGMMA(n, regs, a, b, on, ta, tb, ...)                                                        \
    template <int a_mn, int b_mn>                                                                    \
    struct Wgmma<n, a_mn, b_mn> {                                                                    \
        static __device__ __forceinline__ void step(float (&d)[n / 2], u64 a_tile, u64 b_tile,       \
                                                    u32 accumulate = 1) {                            \
            asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #on                  \
                         ", 0;\n"                                                                    \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." INPUT "." INPUT " {" regs \
                         "}, %" #a ", %" #b ", accumulate, 1, 1, %" #ta ", %" #tb ";\n}\n"           \
                         : __VA_ARGS__                                                               \
                         : "l"(a_tile), "l"(b_tile), "r"(accumulate), "n"(a_mn), "n"(b_mn));         \
        }                                                                                            \
    };

WGMMA(8, REGS_4, 4, 5, 6, 7, 8, ACC_4(0))
WGMMA(16, REGS_8, 8, 9, 10, 11, 12, ACC_8(0))
WGMMA(24, REGS_12, 12, 13, 14, 15, 16, ACC_8(0), ACC_4(8))
WGMMA(32, REGS_16, 16, 17, 18, 19, 20, ACC_16(0))
WGMMA(40, REGS_20, 20, 21, 22, 23, 24, ACC_16(0), ACC_4(16))
WGMMA(48, REGS_24, 24, 25, 26, 27, 28, ACC_16(0), ACC_8(16))
WGMMA(56, REGS_28, 28, 29, 30, 31, 32, ACC_16(0), ACC_8(16), ACC_4(24))
WGMMA(64, REGS_32, 32, 33, 34, 35, 36, ACC_32(0))
WGMMA(72, REGS_36, 36, 37, 38, 39, 40, ACC_32(0), ACC_4(32))
WGMMA(80, REGS_40, 40, 41, 42, 43, 44, ACC_32(0), ACC_8(32))
WGMMA(88, REGS_44, 44, 45, 46, 47, 48, ACC_32(0), ACC_8(32), ACC_4(40))
WGMMA(96, REGS_48, 48, 49, 50, 51, 52, ACC_32(0), ACC_16(32))
WGMMA(104, REGS_52, 52, 53, 54, 55, 56, ACC_32(0), ACC_16(32), ACC_4(48))
WGMMA(112, REGS_56, 56, 57, 58, 59, 60, ACC_32(0), ACC_16(32), ACC_8(48))
WGMMA(120, REGS_60, 60, 61, 62, 63, 64, ACC_32(0), ACC_16(32), ACC_8(48), ACC_4(56))
WGMMA(128, REGS_64, 64, 65, 66, 67, 68, ACC_64(0))
WGMMA(136, REGS_68, 68, 69, 70, 71, 72, ACC_64(0), ACC_4(64))
WGMMA(144, REGS_72, 72, 73, 74, 75, 76, ACC_64(0), ACC_8(64))
WGMMA(152, REGS_76, 76, 77, 78, 79, 80, ACC_64(0), ACC_8(64), ACC_4(72))
WGMMA(160, REGS_80, 80, 81, 82, 83, 84, ACC_64(0), ACC_16(64))
WGMMA(168, REGS_84, 84, 85, 86, 87, 88, ACC_64(0), ACC_16(64), ACC_4(80))
WGMMA(176, REGS_88, 88, 89, 90, 91, 92, ACC_64(0), ACC_16(64), ACC_8(80))
WGMMA(184, REGS_92, 92, 93, 94, 95, 96, ACC_64(0), ACC_16(64), ACC_8(80), ACC_4(88))
WGMMA(192, REGS_96, 96, 97, 98, 99, 100, ACC_64(0), ACC_32(64))
WGMMA(200, REGS_100, 100, 101, 102, 103, 104, ACC_64(0), ACC_32(64), ACC_4(96))
WGMMA(208, REGS_104, 104, 105, 106, 107, 108, ACC_64(0), ACC_32(64), ACC_8(96))
WGMMA(216, REGS_108, 108, 109, 110, 111, 112, ACC_64(0), ACC_32(64), ACC_8(96), ACC_4(104))
WGMMA(224, REGS_112, 112, 113, 114, 115, 116, ACC_64(0), ACC_32(64), ACC_16(96))
WGMMA(232, REGS_116, 116, 117, 118, 119, 120, ACC_64(0), ACC_32(64), ACC_16(96), ACC_4(112))
WGMMA(240, REGS_120, 120, 121, 122, 123, 124, ACC_64(0), ACC_32(64), ACC_16(96), ACC_8(112))
WGMMA(248, REGS_124, 124, 125, 126, 127, 128, ACC_64(0), ACC_32(64), ACC_16(96), ACC_8(112), ACC_4(120))
WGMMA(256, REGS_128, 128, 129, 130, 131, 132, ACC_64(0), ACC_64(64))

template <int n, int b_mn>
struct WgmmaFragment;

// The same with A in registers, elements where accumulators of its columns would have them: for rows r and r
// + 8, where r = lane / 4, columns 2 (lane % 4) and the next of rows r, r + 8, then 8 columns on those of
// rows r, r + 8.
#define WGMMA_FRAGMENT(n, regs, a0, a1, a2, a3, b, on, tb, ...)                                         \
    template <int b_mn>                                                                                 \
    struct WgmmaFragment<n, b_mn> {                                                                     \
        static __device__ __forceinline__ void step(float (&d)[n / 2], const u32 (&a)[4], u64 b_tile,   \
                                                    u32 accumulate = 1) {                               \
            asm volatile(                                                                               \
                "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #on                              \
                ", 0;\n"                                                                                \
                "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." INPUT "." INPUT " {" regs "}, {%" #a0 \
                ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", accumulate, 1, 1, %" #tb ";\n}\n"            \
                : __VA_ARGS__                                                                           \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "r"(accumulate), "n"(b_mn)); \
        }                                                                                               \
    };

WGMMA_FRAGMENT(16, REGS_8, 8, 9, 10, 11, 12, 13, 14, ACC_8(0))
WGMMA_FRAGMENT(32, REGS_16, 16, 17, 18, 19, 20, 21, 22, ACC_16(0))
WGMMA_FRAGMENT(48, REGS_24, 24, 25, 26, 27, 28, 29, 30, ACC_16(0), ACC_8(16))
WGMMA_FRAGMENT(64, REGS_32, 32, 33, 34, 35, 36, 37, 38, ACC_32(0))
WGMMA_FRAGMENT(80, REGS_40, 40, 41, 42, 43, 44, 45, 46, ACC_32(0), ACC_8(32))
WGMMA_FRAGMENT(96, REGS_48, 48, 49, 50, 51, 52, 53, 54, ACC_32(0), ACC_16(32))
WGMMA_FRAGMENT(112, REGS_56, 56, 57, 58, 59, 60, 61, 62, ACC_32(0), ACC_16(32), ACC_8(48))
WGMMA_FRAGMENT(128, REGS_64, 64, 65, 66, 67, 68, 69, 70, ACC_64(0))

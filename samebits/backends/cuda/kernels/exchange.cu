// Sums over ranks: every rank's f32 partial sums, added by the contract's tree, with bias and one rounding.
//
// Ranks read and write each other's memory. Nothing but bytes crosses: the tree is the same on every rank, and
// does not depend on how they were moved. Two ways, one launch each:
//
//   at_once      few elements. Each rank writes all of its sums into all others' inboxes. A word of an inbox
//                that nothing has come to is EMPTY, a NaN that no sum is sent as. So each word says by itself
//                that it has arrived, in whatever order they do. Who has read it makes it EMPTY again.
//
//   rank 0       |write all to 1|read what came from 1, add, round, store|
//   rank 1       |write all to 0|read what came from 0, add, round, store|
//
//   by_parts     many. Elements are cut into a part for each rank, which adds it and hands the rounded sums on.
//
//   rank 0       |part 1 to 1|meet|add, round part 0, also to 1|meet|read rounded part 1|
//   rank 1       |part 0 to 0|meet|add, round part 1, also to 0|meet|read rounded part 0|
//
//                Blocks of the same index have the same elements of every part, so only they meet: each sets a
//                flag of all others, to the call's number. What the kernel before wrote into others' memory,
//                as a product may in place of the first step, is seen after the first meeting, too.
//
// The call's number is in memory, so that graphs can be replayed: the last block to end counts it up.
//
// Why nothing is overwritten too early
//   slots, results   A rank that has met all others for the second time knows that they have read their slots.
//                    It ends after that, and writes into them in later kernels only. It writes results after
//                    the first meeting, when all have ended the call before.
//   inboxes          are two, in turns. A rank in its next call but one has heard, in the call between, from
//                    ranks that had ended this one, and so had made all words EMPTY.
//
// A rank that does not answer in time ends the kernel with an assertion.
//
// Macros
//   RANKS    ranks, a power of two
//   BLOCKS   the most blocks of a launch; flags are there for so many

#include "epilogue.cuh"
#include "launch.cuh"

constexpr int THREADS = 256;
constexpr int QUADS = 2;           // of four elements, that a thread of by_parts reads before it writes any
constexpr u32 EMPTY = 0xFFFFFFFF;  // a NaN
constexpr u32 NAN_SENT = 0x7FFFFFFF;

struct AtOnce {
    const float* x;
    void* out;
    const void* bias;
    uint4* inboxes[RANKS];  // every rank's: two, of RANKS times `capacity` elements
    u32* state;             // the number of the call before, and how many blocks have ended
    i64 count, n, capacity;
    i64 timeout;  // nanoseconds
    int rank, out_kind, bias_kind;
};

struct Parts {
    const float* x;    // all parts; null: others' have theirs already
    const float* own;  // this rank's own part of them
    void* out;         // all parts; null: the results of others are not wanted
    void* own_out;
    const void* bias;
    float* slots[RANKS];   // every rank's: for what each has of its part
    void* results[RANKS];  // every rank's: for all parts, rounded
    u32* flags[RANKS];     // every rank's
    u32* state;
    i64 count, part, stride, slot;  // elements: in all, of a part, from one to the next in x, among slots
    i64 n, timeout;
    int rank, out_kind, bias_kind;
};

struct Four {
    float at[4];
};

extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line,
                                        const char* function, size_t char_size);

// Waits for others, but not for ever.
struct Patience {
    i64 timeout;
    u64 until = 0;
    u32 tries = 0;

    __device__ explicit Patience(i64 timeout) : timeout(timeout) {}

    __device__ __forceinline__ void spend() {
        if (++tries % 1024) return;
        u64 now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (until == 0)
            until = now + timeout;
        else if (now > until)
            __assertfail("a rank did not answer within the timeout of the process group", "samebits", 0, "",
                         1);
    }
};

// Never 0, which memory starts from; odd and even in turns.
__device__ __forceinline__ u32 number_of_call(const u32* state) {
    const u32 call = *static_cast<const volatile u32*>(state) + 1;
    return call ? call : 2;
}

__device__ __forceinline__ void count_up(u32* state, u32 call) {
    __syncthreads();
    if (threadIdx.x) return;
    if (atomicAdd(state + 1, 1) == gridDim.x - 1) {
        state[1] = 0;
        state[0] = call;
    }
}

// Four neighbours of `count` elements; zeros past their end.
__device__ __forceinline__ Four load_four(const float* from, i64 i, i64 count) {
    if (i + 4 <= count) {
        const float4 all = __ldcg(reinterpret_cast<const float4*>(from + i));
        return {{all.x, all.y, all.z, all.w}};
    }
    Four found;
#pragma unroll
    for (int j = 0; j < 4; ++j) found.at[j] = i + j < count ? __ldcg(from + i + j) : 0;
    return found;
}

template <int FIRST = 0, int NUMBER = RANKS>
__device__ __forceinline__ Four tree(const Four (&of)[RANKS]) {
    if constexpr (NUMBER == 1) {
        return of[FIRST];
    } else {
        const Four left = tree<FIRST, NUMBER / 2>(of);
        const Four right = tree<FIRST + NUMBER / 2, NUMBER / 2>(of);
        Four sum;
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.at[j] = __fadd_rn(left.at[j], right.at[j]);
        return sum;
    }
}

// Element i lies in column i % n.
__device__ __forceinline__ void add_bias(Four& sum, const void* bias, i64 i, i64 count, i64 n, int kind) {
    if (!bias) return;
    i64 column = i % n;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (i + j < count) sum.at[j] = __fadd_rn(sum.at[j], widen(bias, column, kind));
        if (++column == n) column = 0;
    }
}

__device__ __forceinline__ u32 as_sent(float x) {
    const u32 bits = __float_as_uint(x);
    return bits == EMPTY ? NAN_SENT : bits;
}

__device__ __forceinline__ void send(uint4* to, const Four& x) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(as_sent(x.at[0])),
                 "r"(as_sent(x.at[1])), "r"(as_sent(x.at[2])), "r"(as_sent(x.at[3]))
                 : "memory");
}

__device__ __forceinline__ Four receive(uint4* from, i64 timeout) {
    Patience patience(timeout);
    while (true) {
        u32 a, b, c, d;  // these need not be written at once
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                     : "l"(from)
                     : "memory");
        if (a != EMPTY && b != EMPTY && c != EMPTY && d != EMPTY) {
            *from = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
            return {{__uint_as_float(a), __uint_as_float(b), __uint_as_float(c), __uint_as_float(d)}};
        }
        patience.spend();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) at_once(const __grid_constant__ AtOnce p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const u32 call = number_of_call(p.state);
    const i64 step = i64(gridDim.x) * THREADS, quads = (p.count + 3) / 4, inbox = p.capacity / 4;
    const i64 start = i64(blockIdx.x) * THREADS + threadIdx.x, turn = call % 2 * RANKS * inbox;
    for (i64 quad = start; quad < quads; quad += step) {
        const Four mine = load_four(p.x, 4 * quad, p.count);
#pragma unroll
        for (int other = 1; other < RANKS; ++other)
            send(p.inboxes[(p.rank + other) % RANKS] + turn + p.rank * inbox + quad, mine);
    }
    for (i64 quad = start; quad < quads; quad += step) {
        Four of[RANKS];
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            of[r] = r == p.rank ? load_four(p.x, 4 * quad, p.count)
                                : receive(p.inboxes[p.rank] + turn + r * inbox + quad, p.timeout);
        Four sum = tree(of);
        add_bias(sum, p.bias, 4 * quad, p.count, p.n, p.bias_kind);
        store_four(p.out, 4 * quad, 1, sum.at, int(min(p.count - 4 * quad, i64(4))), p.out_kind, true);
    }
    count_up(p.state, call);
}

// Past it, a block sees what blocks of its index on other ranks wrote before it.
__device__ __forceinline__ void meet(const Parts& p, int time, u32 call) {
    __syncthreads();
    const int other = threadIdx.x;
    if (other < RANKS && other != p.rank) {
        const i64 at = (time * BLOCKS + blockIdx.x) * RANKS;
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p.flags[other] + at + p.rank), "r"(call)
                     : "memory");
        Patience patience(p.timeout);
        while (true) {
            u32 found;
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                         : "=r"(found)
                         : "l"(p.flags[p.rank] + at + other)
                         : "memory");
            if (found == call) break;
            patience.spend();
        }
    }
    __syncthreads();
}

__device__ __forceinline__ i64 length_of(const Parts& p, int rank) {
    return max(min(p.count - rank * p.part, p.part), i64(0));
}

// f(quads of this thread, how many elements the part has): for QUADS at a time, the same in every part.
template <typename F>
__device__ __forceinline__ void for_each(i64 length, F f) {
    constexpr i64 at_once = THREADS * QUADS;
    for (i64 start = blockIdx.x * at_once + threadIdx.x; 4 * start < length; start += gridDim.x * at_once) {
        i64 places[QUADS];
#pragma unroll
        for (int i = 0; i < QUADS; ++i) places[i] = 4 * (start + i * THREADS);
        f(places);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) by_parts(const __grid_constant__ Parts p) {
    wait_for_kernel_before();
    const u32 call = number_of_call(p.state);
    if (p.x) {
#pragma unroll 1
        for (int i = 1; i < RANKS; ++i) {
            const int other = (p.rank + i) % RANKS;
            const i64 length = length_of(p, other);
            const float* from = p.x + other * p.stride;
            float* to = p.slots[other] + p.rank * p.slot;
            for_each(length, [&](const i64(&places)[QUADS]) {
                Four found[QUADS];
#pragma unroll
                for (int q = 0; q < QUADS; ++q) found[q] = load_four(from, places[q], length);
#pragma unroll
                for (int q = 0; q < QUADS; ++q)
                    if (places[q] < length)
                        *reinterpret_cast<float4*>(to + places[q]) =
                            make_float4(found[q].at[0], found[q].at[1], found[q].at[2], found[q].at[3]);
            });
        }
    }
    meet(p, 0, call);
    const i64 length = length_of(p, p.rank);
    for_each(length, [&](const i64(&places)[QUADS]) {
        Four sums[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            Four of[RANKS];
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                const float* from = r == p.rank ? p.own : p.slots[p.rank] + r * p.slot;
                of[r] = load_four(from, places[q], length);
            }
            sums[q] = tree(of);
        }
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const i64 left = length - places[q];
            if (left <= 0) continue;
            add_bias(sums[q], p.bias, p.rank * p.part + places[q], p.count, p.n, p.bias_kind);
            const int columns = int(min(left, i64(4)));
            if (p.out) {
#pragma unroll
                for (int i = 1; i < RANKS; ++i)
                    store_four(p.results[(p.rank + i) % RANKS], p.rank * p.slot + places[q], 1, sums[q].at, 4,
                               p.out_kind, true);
            }
            store_four(p.own_out, places[q], 1, sums[q].at, columns, p.out_kind, true);
        }
    });
    meet(p, 1, call);
    let_kernel_behind_start();  // not before: its blocks would keep multiprocessors from those that others wait for
    if (p.out) {
#pragma unroll 1
        for (int i = 1; i < RANKS; ++i) {
            const int other = (p.rank + i) % RANKS;
            const i64 length = length_of(p, other), from = other * p.slot, to = other * p.part;
            for_each(length, [&](const i64(&places)[QUADS]) {
                u64 found[QUADS][2];
                const bool wide = p.out_kind == F32;
#pragma unroll
                for (int q = 0; q < QUADS; ++q) {
                    if (places[q] >= length) continue;
                    const auto* at = reinterpret_cast<const u64*>(
                        static_cast<const char*>(p.results[p.rank]) + (from + places[q]) * (wide ? 4 : 2));
                    found[q][0] = __ldcg(at);
                    if (wide) found[q][1] = __ldcg(at + 1);
                }
#pragma unroll
                for (int q = 0; q < QUADS; ++q) {
                    if (places[q] >= length) continue;
                    const i64 at = to + places[q];
                    const int columns = int(min(length - places[q], i64(4)));
                    if (columns == 4) {
                        auto* all = reinterpret_cast<u64*>(static_cast<char*>(p.out) + at * (wide ? 4 : 2));
                        all[0] = found[q][0];
                        if (wide) all[1] = found[q][1];
                        continue;
                    }
#pragma unroll
                    for (int j = 0; j < 3; ++j) {
                        if (j >= columns) break;
                        if (wide)
                            static_cast<u32*>(p.out)[at + j] = u32(found[q][j / 2] >> j % 2 * 32);
                        else
                            static_cast<u16*>(p.out)[at + j] = u16(found[q][0] >> j * 16);
                    }
                }
            });
        }
    }
    count_up(p.state, call);
}

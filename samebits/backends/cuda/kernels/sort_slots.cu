// Slots of a layer of experts, sorted by their experts: a stable sort by counting.
//
// sort_slots: few slots, in one block. A warp takes chunks of 32 slots, and counts those of each expert in a chunk. A
// thread has two experts, in halves of a word, and adds up over chunks. Then experts are added up, and each slot has
// its place.
//
// count_slots, place_slots: any number. A block has `span` slots that follow each other. The first kernel counts those
// of each expert in each block, and the second one adds up the blocks before its own and the experts before each. Its
// warps then have spans of their own: each counts, they are added up in order, and each slot has its place.

#include "launch.cuh"
#include "types.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int HELD = 4;                    // chunks of a warp in sort_slots: 2,048 slots in all
constexpr int ROOM = 9 << 10;              // words: chunks by pairs of experts, or warps by experts
constexpr int MOST_EXPERTS = 2 * THREADS;  // with those beyond count
constexpr int BLOCKS = 128;                // at most
constexpr int READ = 4;                    // chunks of a warp on their way
constexpr u32 ALL = 0xFFFFFFFF;

struct Params {
    const i64* experts;            // of slots: those below 0 count as 0, those beyond count as count
    i64 *sorted, *order, *places;  // experts; the slots that they are of; where each slot is there
    int *ends, *sequences;         // of each expert; of each slot, or null
    int* counts;                   // [experts and one beyond, BLOCKS]
    i64 slots, count, each;        // slots; experts; slots of a sequence
    i64 span, warps;               // slots of a block, in a multiple of 32 for each of so many warps
};

__device__ __forceinline__ int expert_of(const Params& p, i64 slot) {
    return int(max(i64(0), min(p.experts[slot], p.count)));
}

__device__ __forceinline__ void place_slot(const Params& p, i64 slot, int expert, i64 place) {
    p.sorted[place] = expert;
    p.order[place] = slot;
    p.places[slot] = place;
    if (p.sequences) p.sequences[place] = int(u32(slot) / u32(p.each));
}

// The sum of x over this thread and those before it.
__device__ __forceinline__ int sum_until(int x, int* of_warps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(ALL, x, distance);
        if (lane >= distance) x += other;
    }
    if (lane == 31) of_warps[warp] = x;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) x += w < warp ? of_warps[w] : 0;
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_slots(const __grid_constant__ Params p) {
    __shared__ u32 counts[ROOM];
    __shared__ int starts[MOST_EXPERTS];
    __shared__ int of_warps[WARPS];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int slots = int(p.slots), count = int(p.count), words = count / 2 + 1, chunks = (slots + 31) / 32;
    for (int i = thread; i < chunks * words; i += THREADS) counts[i] = 0;
    wait_for_kernel_before();
    let_kernel_behind_start();
    __syncthreads();
    int expert[HELD], before[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int chunk = i * WARPS + warp, slot = chunk * 32 + lane;
        if (chunk >= chunks) break;
        expert[i] = slot < slots ? expert_of(p, slot) : -1;
        const u32 same = __match_any_sync(ALL, expert[i]);
        before[i] = __popc(same & ((1u << lane) - 1));
        if (before[i] == 0 && slot < slots)
            atomicAdd(&counts[chunk * words + expert[i] / 2], u32(__popc(same)) << expert[i] % 2 * 16);
    }
    __syncthreads();
    u32 both = 0;
    if (thread < words) {
#pragma unroll 8
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const u32 here = counts[chunk * words + thread];
            counts[chunk * words + thread] = both;
            both += here;
        }
    }
    const int first = int(both & 0xFFFF), second = int(both >> 16);
    const int until = sum_until(first + second, of_warps);  // slots of the experts up to this thread's
    const int e = 2 * thread;
    starts[e] = until - second - first, starts[e + 1] = until - second;
    if (e < count) p.ends[e] = until - second;
    if (e + 1 < count) p.ends[e + 1] = until;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int chunk = i * WARPS + warp, slot = chunk * 32 + lane;
        if (slot >= slots) break;
        const u32 earlier = counts[chunk * words + expert[i] / 2] >> expert[i] % 2 * 16 & 0xFFFF;
        place_slot(p, slot, expert[i], starts[expert[i]] + int(earlier) + before[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) count_slots(const __grid_constant__ Params p) {
    __shared__ int counts[MOST_EXPERTS];
    const int thread = threadIdx.x, experts = int(p.count) + 1;
    for (int e = thread; e < experts; e += THREADS) counts[e] = 0;
    wait_for_kernel_before();
    let_kernel_behind_start();
    __syncthreads();
    const i64 first = blockIdx.x * p.span, until = min(first + p.span, p.slots);
#pragma unroll 4
    for (i64 slot = first + thread; slot < until; slot += THREADS) atomicAdd(&counts[expert_of(p, slot)], 1);
    __syncthreads();
    for (int e = thread; e < experts; e += THREADS) p.counts[e * BLOCKS + blockIdx.x] = counts[e];
}

// Calls for each chunk of a warp with slot, expert or -1, and lanes with the same expert.
template <class Call>
__device__ __forceinline__ void for_chunks(const Params& p, i64 first, i64 until, const Call& call) {
    const int lane = threadIdx.x % 32;
    for (i64 chunk = first; chunk < until; chunk += 32 * READ) {
        int expert[READ];
#pragma unroll
        for (int i = 0; i < READ; ++i) {
            const i64 slot = chunk + i * 32 + lane;
            expert[i] = slot < until ? expert_of(p, slot) : -1;
        }
#pragma unroll
        for (int i = 0; i < READ; ++i) {
            if (chunk + i * 32 >= until) break;
            call(chunk + i * 32 + lane, expert[i], __match_any_sync(ALL, expert[i]));
            __syncwarp();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) place_slots(const __grid_constant__ Params p) {
    __shared__ int at[ROOM];  // warps by experts: how many slots, then where the next one goes
    __shared__ int all[MOST_EXPERTS], before[MOST_EXPERTS];
    __shared__ int of_warps[WARPS];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int experts = int(p.count) + 1, warps = int(p.warps), block = blockIdx.x, blocks = gridDim.x;
    for (int i = thread; i < warps * experts; i += THREADS) at[i] = 0;
    for (int e = thread; e < MOST_EXPERTS; e += THREADS) all[e] = 0;
    __syncthreads();
    wait_for_kernel_before();
    let_kernel_behind_start();

    // A warp adds up the blocks of an expert, a lane some of them.
#pragma unroll 4
    for (int e = warp; e < experts; e += WARPS) {
        int sum = 0, sum_before = 0;
#pragma unroll
        for (int i = 0; i < BLOCKS / 32; ++i) {
            const int other = i * 32 + lane, found = other < blocks ? p.counts[e * BLOCKS + other] : 0;
            sum += found, sum_before += other < block ? found : 0;
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(ALL, sum, distance);
            sum_before += __shfl_xor_sync(ALL, sum_before, distance);
        }
        if (lane == 0) all[e] = sum, before[e] = sum_before;
    }

    const i64 span = p.span / warps, first = block * p.span + warp * span;
    const i64 until = warp < warps ? min(first + span, p.slots) : first;
    int* const mine = at + warp * experts;
    for_chunks(p, first, until, [&](i64, int expert, u32 same) {
        if (expert >= 0 && (same & ((1u << lane) - 1)) == 0) mine[expert] += __popc(same);
    });
    __syncthreads();

    const int e = 2 * thread, slots_of_second = all[e + 1];
    const int end = sum_until(all[e] + slots_of_second, of_warps);
    if (block == 0) {
        if (e < p.count) p.ends[e] = end - slots_of_second;
        if (e + 1 < p.count) p.ends[e + 1] = end;
    }
    int starts[2] = {end - slots_of_second - all[e], end - slots_of_second};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (e + i >= experts) break;
        int next = starts[i] + before[e + i];
#pragma unroll 4
        for (int w = 0; w < warps; ++w) {
            const int here = at[w * experts + e + i];
            at[w * experts + e + i] = next;
            next += here;
        }
    }
    __syncthreads();

    for_chunks(p, first, until, [&](i64 slot, int expert, u32 same) {
        const int earlier = __popc(same & ((1u << lane) - 1));
        const int next = expert < 0 ? 0 : mine[expert];
        __syncwarp();
        if (expert < 0) return;
        if (earlier == 0) mine[expert] = next + __popc(same);
        place_slot(p, slot, expert, next + earlier);
    });
}

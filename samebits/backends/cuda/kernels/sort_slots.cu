// Few slots of a layer of experts, sorted by their experts in one block: a stable sort by counting.
//
// A warp takes chunks of 32 slots, and counts those of each expert in a chunk. A thread has two experts, in halves of
// a word, and adds up over chunks. Then experts are added up, and each slot has its place.

#include "launch.cuh"
#include "types.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int HELD = 4;        // chunks of a warp: 2,048 slots in all
constexpr int ROOM = 9 << 10;  // words: chunks by pairs of experts
constexpr u32 ALL = 0xFFFFFFFF;

struct Params {
    const i64* experts;            // of slots: those below 0 count as 0, those beyond count as count
    i64 *sorted, *order, *places;  // experts; the slots that they are of; where each slot is there
    int *ends, *sequences;         // of each expert; of each slot, or null
    i64 slots, count, each;        // slots; experts; slots of a sequence
};

extern "C" __global__ void __launch_bounds__(THREADS) sort_slots(const __grid_constant__ Params p) {
    __shared__ u32 counts[ROOM];
    __shared__ int starts[2 * THREADS];
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
        expert[i] = slot < slots ? int(max(i64(0), min(p.experts[slot], p.count))) : -1;
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
    int until = first + second;  // slots of the experts up to this thread's
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(ALL, until, distance);
        if (lane >= distance) until += other;
    }
    if (lane == 31) of_warps[warp] = until;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) until += w < warp ? of_warps[w] : 0;
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
        const int place = starts[expert[i]] + int(earlier) + before[i];
        p.sorted[place] = expert[i];
        p.order[place] = slot;
        p.places[slot] = place;
        if (p.sequences) p.sequences[place] = int(slot / p.each);
    }
}

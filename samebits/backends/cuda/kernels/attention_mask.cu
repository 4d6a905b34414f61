// What attention's kernels need to know of a mask before they start.
//
//   find_rows      of each row, the keys that it shows, and whether those of the row before are the first of them
//   place_queries  the chain over queries of each head, for dK and dV
//
// Rows come in the order that they have in tiles: queries times the heads that lie side by side there.
//
// Macros are those of attention_mask.cuh.

#include "attention_mask.cuh"

struct Params {
    int2* found;          // of Rows
    int* begins;          // of Rows
    int *order, *groups;  // [batch, heads, queries + 1, 16] queries, or -1; [batch, heads] how many groups
    int heads, segments;  // of Rows
    int own_keys;         // whether queries have keys of their own
    int side_by_side;     // heads whose rows take turns in tiles: those of a head of k, or 1
    Problem x;
};

// Of a row besides the keys that it shows: how many come before its query's own; or that it does not show that.
enum Own { OTHERS = -1, NOTHING = -2 };

// What 32 keys of a row show, those from `first` on, a bit for each; and whether it adds anything but zeros to one.
__device__ __forceinline__ u32 shown_by_lane(const Problem& x, i64 row, int first, int keys, bool& adds) {
    constexpr int size = FLOAT_MASK ? sizeof(Mask::Stored) : 1;
    const auto* from = static_cast<const unsigned char*>(x.mask) + (row + first) * size;
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 2 * size; ++i) {
        const uint4 chunk = first + (i + 1) * (16 / size) <= keys ? reinterpret_cast<const uint4*>(from)[i]
                                                                  : make_uint4(0, 0, 0, 0);
        const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = (i * 4 + j) * (4 / size);
            if constexpr (!FLOAT_MASK) {
                const u32 set = (((words[j] & 0x7F7F7F7F) + 0x7F7F7F7F) | words[j]) >> 7 & 0x01010101;
                bits |= set * 0x10204080 >> 28 << at;  // a bit of each byte, side by side
            } else if constexpr (size == 2) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const float b = Mask::widen(u16(words[j] >> k * 16));
                    bits |= u32(shows(b)) << (at + k);
                    adds = adds || (shows(b) && b != 0.0f);
                }
            } else {
                const float b = __uint_as_float(words[j]);
                bits |= u32(shows(b)) << at;
                adds = adds || (shows(b) && b != 0.0f);
            }
        }
    }
    return first >= keys ? 0 : keys - first < 32 ? bits & ((1u << (keys - first)) - 1) : bits;
}

// The same of 1,024 keys, 32 in each lane. All lanes do so together.
__device__ __forceinline__ u32 shown_by_warp(const Problem& x, i64 row, bool wide, int first, int keys,
                                             bool& adds) {
    const int lane = threadIdx.x % 32;
    if (wide) return shown_by_lane(x, row, first + lane * 32, keys, adds);
    u32 own = 0;
#pragma unroll 8
    for (int i = 0; i < 32; ++i) {
        const int key = first + i * 32 + lane;
        const i64 at = row + key * x.mask_key;
        const bool one = key < keys && shows(x, at);
        if (FLOAT_MASK) adds = adds || (one && bias_at(x, at) != 0.0f);
        const u32 bits = __ballot_sync(0xFFFFFFFF, one);
        if (lane == i) own = bits;
    }
    return own;
}

extern "C" __global__ void __launch_bounds__(256) find_rows(const __grid_constant__ Params p) {
    const Problem& x = p.x;
    const int lane = threadIdx.x % 32;
    const i64 row = i64(blockIdx.x) * 8 + threadIdx.x / 32;
    if (row >= i64(x.batch) * p.heads * x.queries) return;
    const int query = row % x.queries, head = row / x.queries % p.heads;
    const Sequence sequence(x, row / x.queries / p.heads);

    const bool same_query = p.heads > 1 && head % p.side_by_side > 0;
    const int query_before = same_query ? query : query - 1;
    const int head_before = same_query ? head - 1 : p.heads > 1 ? head + p.side_by_side - 1 : head;
    const bool compares = query_before >= 0;
    const i64 at = sequence.mask_row(x, query, head);
    const i64 at_before = compares ? sequence.mask_row(x, query_before, head_before) : at;
    constexpr int size = FLOAT_MASK ? sizeof(Mask::Stored) : 1;
    // Rows of whole, aligned, contiguous 16 bytes.
    const i64 begins_at = i64(reinterpret_cast<unsigned long long>(x.mask));
    const bool wide = x.mask_key == 1 && (begins_at + at * size) % 16 == 0 &&
                      (begins_at + at_before * size) % 16 == 0 && sequence.keys * size % 16 == 0;

    const int own = query + sequence.offset;
    int count = 0, before_own = OTHERS;
    int new_one = sequence.keys,
        last_before = -1;                   // the first key that only this row shows; the other's last
    int last = -1;                          // that this row shows
    bool less = false;                      // whether the other shows a key that this one does not
    bool adds = false, other_adds = false;  // whether a float mask adds anything but zeros
    for (int start = 0; start < sequence.keys; start += 1024) {
        const u32 bits = shown_by_warp(x, at, wide, start, sequence.keys, adds);
        const u32 before = shown_by_warp(x, at_before, wide, start, sequence.keys, other_adds);
        const int first = start + lane * 32;  // of this lane's keys
        less = less || (before & ~bits);
        if (bits & ~before) new_one = min(new_one, first + __ffs(bits & ~before) - 1);
        if (before) last_before = first + 31 - __clz(before);
        if (bits) last = first + 31 - __clz(bits);
        int through = __popc(bits);
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int below = __shfl_up_sync(0xFFFFFFFF, through, step);
            if (lane >= step) through += below;
        }
        const int position = count + through - __popc(bits);  // of this lane's first key
        if (own >= first && own < first + 32 && bits >> (own - first) & 1)
            before_own = position + __popc(bits & ((1u << (own - first)) - 1));
        const int segment = (position + SEGMENT_KEYS - 1) / SEGMENT_KEYS;  // the next to begin
        if (segment * SEGMENT_KEYS < count + through) {
            u32 rest = bits;
            for (int i = position; i < segment * SEGMENT_KEYS; ++i) rest &= rest - 1;
            p.begins[row * p.segments + segment] = first + __ffs(rest) - 1;
        }
        count += __shfl_sync(0xFFFFFFFF, through, 31);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        new_one = min(new_one, __shfl_xor_sync(0xFFFFFFFF, new_one, step));
        last_before = max(last_before, __shfl_xor_sync(0xFFFFFFFF, last_before, step));
        last = max(last, __shfl_xor_sync(0xFFFFFFFF, last, step));
        before_own = max(before_own, __shfl_xor_sync(0xFFFFFFFF, before_own, step));
    }
    less = __ballot_sync(0xFFFFFFFF, less);
    adds = __ballot_sync(0xFFFFFFFF, adds);
    const bool goes_on = compares && !less && new_one > last_before;
    if (count == 0) before_own = NOTHING;
    if (lane > 0) return;
    p.found[row] = make_int2(goes_on ? count : ~count, before_own);
    p.begins[row * p.segments + p.segments - 2] = adds;
    p.begins[row * p.segments + p.segments - 1] = last + 1;
}

extern "C" __global__ void __launch_bounds__(32) place_queries(const __grid_constant__ Params p) {
    const Problem& x = p.x;
    const int lane = threadIdx.x;
    const u32 upto = 0xFFFFFFFF >> (31 - lane);
    const int2* found = p.found + i64(blockIdx.x) * x.queries;
    int* order = p.order + i64(blockIdx.x) * (x.queries + 1) * 16;
    const int offset = Sequence(x, blockIdx.x / p.heads).offset;

    // The last query that shows its own key, or that has none before the first one.
    int last_main = -1;
    for (int first = 0; first < x.queries; first += 32) {
        const int query = first + lane;
        const bool is_main = query < x.queries && (query + offset < 0 || found[query].y >= 0);
        const u32 all = __ballot_sync(0xFFFFFFFF, is_main);
        if (all) last_main = first + 31 - __clz(all);
    }
    if (last_main < 0) last_main = x.queries;

    int groups = 0, others = 0;
    int place = 0;  // of the next one, once there is a group
    for (int first = 0; first < x.queries; first += 32) {
        const int query = first + lane, own = query + offset;
        const int before = query < x.queries ? found[query].y : NOTHING;
        const bool exists = query < x.queries;
        const bool behind = query > last_main && before == OTHERS;
        const bool counts = exists && (!p.own_keys || own < 0 || before >= 0 || behind);
        const u32 all = __ballot_sync(0xFFFFFFFF, counts);
        if (all && groups == 0) {
            const int source = __ffs(all) - 1, start = !p.own_keys || own < 0 ? own : before;
            place = __shfl_sync(0xFFFFFFFF, start, source);
        }
        const bool restarts = counts && p.own_keys && own >= 0 && before == 0;
        const u32 starts = __ballot_sync(0xFFFFFFFF, restarts);
        const u32 last = starts & upto;
        const u32 since = last ? upto & ~((1u << (31 - __clz(last))) - 1) : upto;
        const int own_place = (last ? 0 : place) + __popc(all & since) - 1;
        const bool is_first = groups == 0 && all && lane == __ffs(all) - 1;
        const bool opens = counts && (restarts || is_first || own_place % 16 == 0);
        const u32 opened = __ballot_sync(0xFFFFFFFF, opens);
        if (counts) order[(groups + __popc(opened & upto) - 1) * 16 + (own_place & 15)] = query;
        groups += __popc(opened);
        place = __shfl_sync(0xFFFFFFFF, own_place, 31) + 1;
        others += __popc(__ballot_sync(0xFFFFFFFF, exists && !counts && before == OTHERS));
    }
    int placed = 0;
    for (int first = 0; first < x.queries && placed < others; first += 32) {
        const int query = first + lane;
        const bool one =
            query < last_main && query < x.queries && query + offset >= 0 && found[query].y == OTHERS;
        const u32 all = __ballot_sync(0xFFFFFFFF, one);
        const int own_place = placed + __popc(all & upto) - 1;
        if (one) order[groups * 16 + own_place] = query;
        placed += __popc(all);
    }
    if (lane == 0) p.groups[blockIdx.x] = groups + (others + 15) / 16;
}

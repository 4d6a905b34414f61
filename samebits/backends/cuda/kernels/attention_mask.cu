// What attention's kernels need to know of a mask before they start.
//
//   find_rows      of each row, the keys that it shows, and whether those of the row before are the first of them
//   place_queries  the chain over queries of each head, for dK and dV
//
// Rows come in the order that they have in tiles: queries times the heads that share a head of k.
//
// Macros are those of attention_mask.cuh.

#include "attention_mask.cuh"

struct Params {
    int2* found;           // of Rows
    int* begins;           // of Rows
    int *order, *groups;   // [batch, heads, queries + 1, 16] queries, or -1; [batch, heads] how many groups
    int heads, segments;   // of Rows
    int own_keys, unused;  // whether queries have keys of their own
    Problem x;
};

// Of a row besides the keys that it shows: how many come before its query's own; or that it does not show that.
enum Own { OTHERS = -1, NOTHING = -2 };

extern "C" __global__ void __launch_bounds__(256) find_rows(const __grid_constant__ Params p) {
    const Problem& x = p.x;
    const int lane = threadIdx.x % 32;
    const i64 row = i64(blockIdx.x) * 8 + threadIdx.x / 32;
    if (row >= i64(x.batch) * p.heads * x.queries) return;
    const int query = row % x.queries, head = row / x.queries % p.heads;
    const Sequence sequence(x, row / x.queries / p.heads);

    const bool same_query = p.heads > 1 && head % x.group > 0;
    const int query_before = same_query ? query : query - 1;
    const int head_before = same_query ? head - 1 : p.heads > 1 ? head + x.group - 1 : head;
    const bool compares = query_before >= 0;
    const i64 at = sequence.mask_row(x, query, head);
    const i64 at_before = compares ? sequence.mask_row(x, query_before, head_before) : at;

    const int own = query + sequence.offset;
    int count = 0, before_own = OTHERS;
    int new_one = sequence.keys,
        last_before = -1;  // the first key that only this row shows; the other's last
    bool less = false;     // whether the other shows a key that this one does not
    constexpr int STEPS = 8;
    for (int start = 0; start < sequence.keys; start += 32 * STEPS) {
        bool shown[STEPS], shown_before[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const int key = start + i * 32 + lane;
            shown[i] = key < sequence.keys && shows(x, at + key * x.mask_key);
            shown_before[i] = key < sequence.keys && shows(x, at_before + key * x.mask_key);
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const int first = start + i * 32;
            const u32 bits = __ballot_sync(0xFFFFFFFF, shown[i]);
            const u32 before = __ballot_sync(0xFFFFFFFF, shown_before[i]);
            less = less || (before & ~bits);
            if ((bits & ~before) && new_one == sequence.keys) new_one = first + __ffs(bits & ~before) - 1;
            if (before) last_before = first + 31 - __clz(before);
            if (own >= first && own < first + 32 && bits >> (own - first) & 1)
                before_own = count + __popc(bits & ((1u << (own - first)) - 1));
            const int segment = (count + SEGMENT_KEYS - 1) / SEGMENT_KEYS;  // the next to begin
            const int of_word = segment * SEGMENT_KEYS - count;  // how many bits come before its first
            if (shown[i] && __popc(bits & ((1u << lane) - 1)) == of_word)
                p.begins[row * p.segments + segment] = first + lane;
            count += __popc(bits);
        }
    }
    const bool goes_on = compares && !less && new_one > last_before;
    if (count == 0) before_own = NOTHING;
    if (lane == 0) p.found[row] = make_int2(goes_on ? count : ~count, before_own);
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

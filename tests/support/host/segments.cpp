// Sums of segments by include/segments_sm90.cuh, whose tensor cores are copies that land late: as soon as the
// header may use them, and no sooner. CASES includes it under each set of macros, and has `run_cases`.
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cuda.h"

using u32 = unsigned;
using i64 = long long;
inline float4 __ldcg(const float4* at) { return *at; }
inline void __stcg(float4* at, float4 x) { *at = x; }

constexpr int TILES = 2, FLOATS = 8;
using Sum = float[TILES][FLOATS];

// Whether `all` adds what segments give in the order of the tree, and asks for each once, in order. The same thread
// of the other of two warpgroups takes a whole tile at any time, unless this is that one.
template <typename Sums, bool JOINED, int SEGMENTS, int SETS>
bool right(u32 warpgroup, bool inner = false, int interrupted = 0) {
    static unsigned char shared[2][Sums::shared_bytes + 16];
    static float4 memory[2 * 8 * TILES * FLOATS / 4 * 128];  // of up to 8 levels
    Sum given[SEGMENTS], sets[SETS];
    for (Sum& sum : given)
        for (auto& row : sum)
            for (float& x : row) x = std::ldexp(float(rand() % 2001 - 1000), rand() % 40 - 20);
    Sum* of = nullptr;  // what the tensor cores write
    int segment = -1, gone_on = 0;
    bool pending = false, fine = true;
    auto land = [&] {
        std::memcpy(*of, given[segment], sizeof(Sum));
        pending = false;
    };
    auto begin = [&](Sum& sum, u32 next, bool joined) {
        fine &= joined == pending && int(next) == segment + 1 && !(joined && of == &sum);
        if (joined) land();
        of = &sum;
        segment = next;
        for (auto& row : sum)
            for (float& x : row) x = NAN;
        pending = true;
    };
    auto go_on = [&](Sum& sum) {
        fine &= of == &sum && pending;
        ++gone_on;
        if (!inner && interrupted == segment + 1)
            fine &= right<Sums, JOINED, SEGMENTS, SETS>(1 - warpgroup, true);
        if (!JOINED) land();
    };
    auto complete = [&] {
        fine &= pending;
        land();
    };
    Sum& found =
        Sums::all(sets, {shared[warpgroup], &memory[0].x, warpgroup, 127, true}, begin, go_on, complete);
    fine &= !pending && segment == SEGMENTS - 1 && gone_on == SEGMENTS;
    for (int half = 1; half < SEGMENTS; half *= 2)
        for (int i = 0; i < SEGMENTS; i += 2 * half)
            for (int j = 0; j < TILES * FLOATS; ++j) (&given[i][0][0])[j] += (&given[i + half][0][0])[j];
    fine &= std::memcmp(found, given[0], sizeof(Sum)) == 0;
    if (!inner && interrupted < SEGMENTS)
        fine &= right<Sums, JOINED, SEGMENTS, SETS>(warpgroup, false, interrupted + 1);
    return fine;
}

#include CASES

int main() { return run_cases(); }

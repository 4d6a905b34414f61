// include/ptx_sm80.cuh on a CPU: tensor-core steps as the contract has them for AMPERE, and copies that wait.
#pragma once

#include <cassert>

#include "convert.cuh"

inline int exponent_of(float x, int lowest) {
    return max(int(__float_as_uint(x) >> 23 & 0xFF) - 127, lowest);
}

inline double power_of_two(int e) { return with_bits_of<double>((e + 1023ll) << 52); }

// docs/contract.md, "TENSOR_CORE", with F = 24 and Z = -132.
inline float fused(float acc, const float* a, const float* b, int lowest) {
    constexpr int F = 24, Z = -132;
    double terms[9] = {acc};
    int exponents[9] = {acc == 0 ? Z : exponent_of(acc, -126)};
    double plain = acc;
    for (int i = 0; i < 8; ++i) {
        terms[i + 1] = double(a[i]) * double(b[i]);
        plain += terms[i + 1];
        const bool zero = a[i] == 0 || b[i] == 0;
        exponents[i + 1] = zero ? Z : exponent_of(a[i], lowest) + exponent_of(b[i], lowest);
    }
    if (!__builtin_isfinite(plain)) return from_arithmetic(float(plain));
    int top = Z;
    for (const int e : exponents) top = max(top, e);
    long long sum = 0;
    const double scale = power_of_two(F - top);
    for (const double t : terms) sum += static_cast<long long>(t * scale);  // exact, then towards zero
    if (sum == 0) return 0;
    const double exact = double(sum) * power_of_two(top - F);
    float y = float(exact);
    if (__builtin_fabs(double(y)) > __builtin_fabs(exact) && __builtin_fabs(exact) < power_of_two(128))
        y = __uint_as_float(__float_as_uint(y) - 1);  // the next one towards zero
    return y == 0 ? 0.0f : y;
}

// What each thread tells the lanes of its warp, once they all have: there is room for two rounds.
template <int WORDS>
struct Posted {
    inline static u32 words[2][1024][WORDS];
    inline static int turn[1024];

    static const u32 (*tell(const u32* mine)) [WORDS] {
        const int half = turn[threadIdx.x] ^= 1;
        std::memcpy(words[half][threadIdx.x], mine, sizeof(words[0][0]));
        const auto* all = words[half] + threadIdx.x / 32 * 32;
        __syncwarp();
        return all;
    }
};

template <bool IS_BF16>
inline void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], const u32* b) {
    using E = Element<IS_BF16 ? BF16 : F16>;
    const u32 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    const int lane = threadIdx.x % 32;
    const auto* of = Posted<6>::tell(mine);
    float rows[2][16], columns[2][16];
    const auto widen = [](u32 both, float* to) {
        to[0] = E::widen(u16(both)), to[1] = E::widen(u16(both >> 16));
    };
    for (int from = 0; from < 4; ++from) {
        for (int i = 0; i < 4; ++i) widen(of[lane / 4 * 4 + from][i], rows[i % 2] + i / 2 * 8 + from * 2);
        for (int i = 0; i < 4; ++i)
            widen(of[(lane % 4 * 2 + i % 2) * 4 + from][4 + i / 2], columns[i % 2] + i / 2 * 8 + from * 2);
    }
    for (int i = 0; i < 4; ++i) {
        const float *x = rows[i / 2], *y = columns[i % 2];
        const int lowest = IS_BF16 ? -126 : -14;
        c[i] = fused(fused(c[i], x, y, lowest), x + 8, y + 8, lowest);
    }
}

template <bool TRANSPOSE>
inline void ldmatrix_x4(u32 (&r)[4], u32 address) {
    const int lane = threadIdx.x % 32;
    const auto* of = Posted<1>::tell(&address);
    for (int i = 0; i < 4; ++i) {
        const auto at = [&](int row, int column) {
            return u32(*reinterpret_cast<u16*>(bytes + of[i * 8 + row][0] + column * 2));
        };
        const int row = lane / 4, column = lane % 4 * 2;
        r[i] = TRANSPOSE ? at(column, row) | at(column + 1, row) << 16
                         : at(row, column) | at(row, column + 1) << 16;
    }
}

inline u32 transposed(u32 x) {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    const auto* of = Posted<1>::tell(&x);
    const auto at = [&](int i, int j) { return of[i * 4 + j / 2][0] >> j % 2 * 16 & 0xFFFF; };
    return at(column, row) | at(column + 1, row) << 16;
}

inline float read_shared(u32 from) { return *reinterpret_cast<float*>(bytes + from); }
inline float2 read_shared_2(u32 from) { return *reinterpret_cast<float2*>(bytes + from); }
inline float4 read_shared_4(u32 from) { return *reinterpret_cast<float4*>(bytes + from); }
inline void store_shared_16(u32 to, const u32 (&v)[4]) { std::memcpy(bytes + to, v, 16); }

struct Copy {
    unsigned char* to;
    const void* from;
    int given, size;
    unsigned group;
};
// A thread's copies that wait, in a ring, and how many groups of them it has closed.
struct Copies {
    static constexpr unsigned MOST = 512;
    Copy of[MOST];
    unsigned first, end, groups;

    void add(u32 to, const void* from, int given, int size) {
        assert(end - first < MOST);
        of[end++ % MOST] = {bytes + to, from, given, size, groups};
    }
};
inline Copies copies[1024];

inline void cp_async_16(u32 to, const void* from, int given) { copies[threadIdx.x].add(to, from, given, 16); }
inline void cp_async_16(u32 to, const void* from) { cp_async_16(to, from, 16); }
inline void cp_async_4(u32 to, const void* from) { copies[threadIdx.x].add(to, from, 4, 4); }
inline void cp_async_commit() { ++copies[threadIdx.x].groups; }
template <int PENDING>
inline void cp_async_wait() {
    Copies& mine = copies[threadIdx.x];
    for (; mine.first != mine.end; ++mine.first) {
        const Copy& c = mine.of[mine.first % mine.MOST];
        if (mine.groups - c.group <= PENDING) return;
        std::memcpy(c.to, c.from, c.given);
        std::memset(c.to + c.given, 0, c.size - c.given);
    }
}

// Rows of a table, copied to where their numbers ask for them: the forward of an embedding.
//
// Macros
//   NUMBER   type of the numbers: i64 or int
//   UNIT     type that rows are copied in, of 1, 2, 4 or 16 bytes

#include "types.cuh"

extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line,
                                        const char* function, size_t char_size);

constexpr int EACH = 4;  // units that a thread copies at most

struct Params {
    const UNIT* table;
    const NUMBER* numbers;
    UNIT* out;
    i64 count, parts;       // numbers; warps for each
    i64 rows, units, step;  // of the table; of a row; from row to row of the table
};

// A warp copies a part of a row: up to 32 * EACH units.
extern "C" __global__ void __launch_bounds__(256) gather(const __grid_constant__ Params p) {
    const i64 warp = i64(blockIdx.x) * 8 + threadIdx.x / 32, i = warp / p.parts;
    if (i >= p.count) return;
    const i64 row = p.numbers[i], first = warp % p.parts * (32 * EACH) + threadIdx.x % 32;
    if (row < 0 || row >= p.rows) __assertfail("embedding: an id is out of range", "samebits", 0, "", 1);
    const UNIT* from = p.table + row * p.step;
    UNIT* to = p.out + i * p.units;
    UNIT held[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j)
        if (first + 32 * j < p.units) held[j] = from[first + 32 * j];
#pragma unroll
    for (int j = 0; j < EACH; ++j)
        if (first + 32 * j < p.units) to[first + 32 * j] = held[j];
}

// Sums of segments: partial sums of a product, added by the contract's tree, with bias and one rounding.
//
// An element's SEGMENTS partial sums lie `segment_stride` apart. Neighbours are added first, then neighbours
// among those sums, and so on. A thread has four neighbours of one row. `out` may be the first partial sums
// themselves: a thread reads all of its elements before it writes them.
//
// Macros
//   SEGMENTS   partial sums of an element, a power of two

#include "epilogue.cuh"

struct Params {
    const float* partials;
    i64 segment_stride, partial_row;
    void* out;
    i64 out_batch, out_row, out_col;
    const void* bias;
    i64 bias_stride, bias_group;
    const int* offs;   // ends of groups of rows, each with a bias; null: one bias for all rows
    i64 count;         // threads with elements
    int m, n, groups;  // rows and columns of a matrix
    int in_together, out_together, out_kind, bias_kind;
};

struct Four {
    float at[4];
};

template <int segments>
__device__ __forceinline__ Four sum(const float* from, i64 stride, int columns, bool together) {
    Four found;
    if constexpr (segments == 1) {
        if (together) {
            const float4 all = *reinterpret_cast<const float4*>(from);
            found = {{all.x, all.y, all.z, all.w}};
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) found.at[i] = i < columns ? from[i] : 0;
        }
    } else {
        const Four left = sum<segments / 2>(from, stride, columns, together);
        const Four right = sum<segments / 2>(from + segments / 2 * stride, stride, columns, together);
#pragma unroll
        for (int i = 0; i < 4; ++i) found.at[i] = __fadd_rn(left.at[i], right.at[i]);
    }
    return found;
}

// The group of a row, or `groups`.
__device__ __forceinline__ int group_of(const Params& p, i64 row) {
    int low = 0, high = p.groups;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (p.offs[middle] > row)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(256) tree(const __grid_constant__ Params p) {
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i >= p.count) return;
    const int quads = (p.n + 3) / 4;
    const i64 row = i / quads;
    const int column = int(i - row * quads) * 4, columns = min(4, p.n - column);
    Four found =
        sum<SEGMENTS>(p.partials + row * p.partial_row + column, p.segment_stride, columns, p.in_together);
    const int group = p.bias && p.offs ? group_of(p, row) : 0;
    if (p.bias && (!p.offs || group < p.groups)) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (j < columns)
                found.at[j] = __fadd_rn(
                    found.at[j],
                    widen(p.bias, group * p.bias_group + (column + j) * p.bias_stride, p.bias_kind));
    }
    const i64 batch = row / p.m;
    store_four(p.out, batch * p.out_batch + (row - batch * p.m) * p.out_row + column * p.out_col, p.out_col,
               found.at, columns, p.out_kind, p.out_together);
}

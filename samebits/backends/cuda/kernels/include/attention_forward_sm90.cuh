// What attention's forward kernels on Hopper share: a thread's two rows, their online softmax, the merge of their
// segments, and what is stored. Bits are those of docs/contract.md, "Attention".
//
// `Params` have these members: out, sinks, lse, lse2, scratch, lse_batch, lse_head, segments, members, shared and x, as
// in attention_sm90.cu; query_of(row), the query of a tile's row; queries_of(ticket), how many the tile has; and
// row(ticket, h), a thread's Row. A `Ticket` has sequence, head and first_query. Machine code depends on details: a
// member `part` of RowsOutput, not an argument, gives other registers.
//
// Macros
//   VALUES   columns of o
#pragma once

#include "attention_sm90.cuh"

// Whether an operand has one matrix for all of the batch, or of its pages, or for all heads: see `shared`.
template <typename Params>
__device__ __forceinline__ bool one_for(const Params& p, int bit) {
    return p.shared >> bit & 1;
}

// One of the two rows of a thread, 8 apart. Rows that do not exist see what the last one sees, and are not stored.
struct Row {
    int query, head;  // in the sequence; of q
    bool exists;

    // Row `row` of a tile.
    template <typename Params, typename Ticket>
    __device__ __forceinline__ Row(const Params& p, const Ticket& ticket, int row) {
        const int down = p.query_of(row), last_query = ticket.sequence.queries - 1;
        head = ticket.head + row - down * p.members;
        const int rows = p.queries_of(ticket);
        query = min(ticket.first_query + min(down, rows - 1), last_query);
        exists = down < rows && ticket.first_query + down <= last_query;
    }
};

// The online softmax of a segment.
struct OnlineSoftmax {
    float n[2], l[2][2];  // l: partial sums 2 (lane % 4) and the next
    float scale[2];       // of o, for the last block

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int h = 0; h < 2; ++h) n[h] = -INF, l[h][0] = l[h][1] = 0.0f;
    }

    // Raises n of row h to the maximum of its scores in a block. Returns what they are shifted by.
    __device__ __forceinline__ float raise(int h, float maximum) {
        const float larger = fmaxf(n[h], ceilf(maximum)), shift = contract::shift_of(larger);
        scale[h] = scores::exp2(__fsub_rn(n[h], shift));
        n[h] = larger;
        return shift;
    }

    // All eight partial sums of a row.
    __device__ __forceinline__ float sum(int h) const {
        float x = __fadd_rn(l[h][0], l[h][1]);
        x = __fadd_rn(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
        return __fadd_rn(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
    }
};

// What segments before the current one come to, but for their values.
struct MergedRows {
    Merged rows[2];
    float scale[2], own_scale[2];  // of this, and of the segment that is added
    bool any = false;

    __device__ __forceinline__ void add(const OnlineSoftmax& segment) {
#pragma unroll
        for (int h = 0; h < 2; ++h) rows[h].add(segment.n[h], segment.sum(h), scale[h], own_scale[h]);
    }
};

// Stores the rows of tiles: `COLUMNS` of each, of part `part` of VALUES. PADDED: those from x.values on are not stored;
// else VALUES is the real size.
template <typename Params, typename Ticket, int COLUMNS, bool PADDED>
struct RowsOutput {
    const Params& p;
    const Ticket& ticket;

    // What all keys come to, o = `total`'s.
    __device__ __forceinline__ void store(const float (&o)[COLUMNS / 2], MergedRows& total) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) store_row(p.row(ticket, h), h, o, total.rows[h]);
        __syncwarp();
    }

    // What the segment with a block comes to.
    __device__ __forceinline__ void store_segment(int block, const float (&o)[COLUMNS / 2],
                                                  const MergedRows& total, u32 part = 0) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Row row = p.row(ticket, h);
            if (!row.exists) continue;
            float* to = p.scratch + (row_at(row) * p.segments + block / BLOCKS) * (VALUES + 2);
#pragma unroll
            for (int u = 0; u < COLUMNS / 8; ++u)
                *reinterpret_cast<float2*>(to + part * COLUMNS + u * 8 + lane() * 2) =
                    make_float2(o[pair(u, h)], o[pair(u, h) + 1]);
            if (part == 0 && lane() == 0)
                *reinterpret_cast<float2*>(to + VALUES) = make_float2(total.rows[h].n, total.rows[h].l);
        }
        __syncwarp();
    }

    // Where nobody sees a key.
    __device__ __forceinline__ void store_nothing(u32 part = 0) const {
#pragma unroll 1
        for (int h = 0; h < 2; ++h) {
            const Row row = p.row(ticket, h);
            if (!row.exists) continue;
#pragma unroll 1
            for (int column = lane() * 8; column < (PADDED ? p.x.values : COLUMNS); column += 32)
                *reinterpret_cast<uint4*>(out(row, part) + column) = make_uint4(0, 0, 0, 0);
            Merged merged;
            if (p.sinks) merged.add_sink(p.sinks[row.head]);
            if (part == 0 && lane() == 0) merged.store(p.lse, p.lse2, lse_at(row));
        }
        __syncwarp();
    }

  protected:
    static __device__ __forceinline__ int lane() { return threadIdx.x % 4; }

    // Where o has the first of row h's two columns of eight.
    static __device__ __forceinline__ constexpr int pair(int eight, int h) { return eight * 4 + 2 * h; }

    __device__ __forceinline__ i64 row_at(const Row& row) const {
        return ticket.sequence.row(p.x, row.query, row.head);
    }
    __device__ __forceinline__ Stored* out(const Row& row, u32 part) const {
        return p.out + row_at(row) * (PADDED ? p.x.values : VALUES) + part * COLUMNS;
    }
    __device__ __forceinline__ i64 lse_at(const Row& row) const {
        const int token = ticket.sequence.first_query + row.query;
        return ticket.sequence.batch_of_q * p.lse_batch + row.head * p.lse_head + token;
    }

    __device__ __forceinline__ void store_row(const Row& row, int h, const float (&o)[COLUMNS / 2],
                                              Merged& merged) const {
        const float scale = p.sinks ? merged.add_sink(p.sinks[row.exists ? row.head : 0]) : 1.0f;
        const float inverse = merged.inverse();
        Stored* const to = out(row, 0);
#pragma unroll
        for (int u = 0; u < COLUMNS / 8; u += 4) {
            u32 columns[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (u + i < COLUMNS / 8) {
                    const float* at = o + pair(u + i, h);
                    columns[i] = Type::pack(merged.quotient(__fmul_rn(at[0], scale), inverse),
                                            merged.quotient(__fmul_rn(at[1], scale), inverse));
                }
            transpose(columns);
            const int column = (u + lane()) * 8;
            if (row.exists && (!PADDED || column < p.x.values))
                *reinterpret_cast<uint4*>(to + column) =
                    make_uint4(columns[0], columns[1], columns[2], columns[3]);
        }
        if (row.exists && lane() == 0) merged.store(p.lse, p.lse2, lse_at(row));
    }
};

// Stops the GPU unless the offsets of packed queries rise from 0 to their number and never decrease. A warp without
// other work does so, in place of a kernel before each call.
__device__ __forceinline__ void check_offsets(const Problem& x) {
    bool good = x.cu_q[0] == 0 && x.cu_q[x.batch] == x.queries;
    for (int i = threadIdx.x % 32; i < x.batch; i += 32) good = good && x.cu_q[i] <= x.cu_q[i + 1];
    if (!good) asm volatile("trap;");  // a call would serialise wgmma (C7510)
}

"""The chains of ``docs/contract.md`` in Triton.

``matmul`` takes every layout, size and sequence under both contracts, on every GPU that Triton supports.
``matmul_tiles`` computes products without sequences, whose operands a GPU's copy engine can fetch as tiles.
It is one loop over tensor descriptors. An element's tile, and the number of k in a step of the loop, change
no bit: ``tl.dot`` adds groups of 16 ascending k, in order, to the given accumulator.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile. Tiles that run side by side share rows and columns, which L2 then serves."""
    in_group = GROUP * tiles_n
    first = tile // in_group * GROUP
    rows = min(tiles_m - first, GROUP)
    return first + tile % in_group % rows, tile % in_group // rows


@triton.jit
def finish(acc, dtype: tl.constexpr):
    """One rounding to nearest even. NaN becomes the canonical one."""
    if dtype == tl.float32:
        nan = tl.full(acc.shape, 0x7FFFFFFF, tl.int32)
    else:
        nan = tl.full(acc.shape, 0x7FFF, tl.int16)
    return tl.where(acc != acc, nan.to(dtype, bitcast=True), acc.to(dtype))


@triton.jit
def _pairs(x):
    """``x[:, 0] + x[:, 1]``, ``x[:, 2] + x[:, 3]`` and so on."""
    left, right = tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)).split()
    return left + right


@triton.jit
def tree(
    partials, bias, out, count, m, n, segment_stride, out_batch, out_row, out_col, bias_stride,
    SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Partial sums ``partials[SEGMENTS, count]`` of ``out[batch, m, n]``, added by the contract's tree."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    some = i < count
    places = i[:, None] + tl.arange(0, SEGMENTS)[None, :] * segment_stride
    x = tl.load(partials + places, mask=some[:, None], other=0)
    if SEGMENTS >= 64:
        x = _pairs(x)
    if SEGMENTS >= 32:
        x = _pairs(x)
    if SEGMENTS >= 16:
        x = _pairs(x)
    if SEGMENTS >= 8:
        x = _pairs(x)
    if SEGMENTS >= 4:
        x = _pairs(x)
    acc = tl.reshape(_pairs(x), (BLOCK,))
    row, column = i // n, i % n
    if bias is not None:
        acc += tl.load(bias + column * bias_stride, mask=some, other=0).to(tl.float32)
    to = out + row // m * out_batch + row % m * out_row + column * out_col
    tl.store(to, finish(acc, out.dtype.element_ty), mask=some)


@triton.jit
def _mma_chain(acc, a, b, start, stop, a_k, b_k, row, column, BLOCK_K: tl.constexpr):
    """Continue the chains ``acc`` over ``start <= k < stop``, with the last group padded with zeros."""
    for k0 in range(start, stop, BLOCK_K):
        ks = k0 + tl.arange(0, BLOCK_K)
        some = ks < stop
        x = tl.load(a + ks[None, :].to(tl.int64) * a_k, mask=row & some[None, :], other=0)
        y = tl.load(b + ks[:, None].to(tl.int64) * b_k, mask=some[:, None] & column, other=0)
        acc = tl.dot(x, y, acc)
    return acc


@triton.jit
def _fma(acc, x, y):
    x, y = tl.broadcast(x, y)
    return tl.fma(x, y, acc)


@triton.jit
def _quarters(x):
    """``x[..., 0]`` to ``x[..., 3]``."""
    even, odd = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], x.shape[3], 2, 2)).split()
    x0, x2 = even.split()
    x1, x3 = odd.split()
    return x0, x1, x2, x3


@triton.jit
def _fma_chain(acc, a, b, start, stop, a_k, b_k, row, column, STAGES: tl.constexpr):
    """Continue the chains ``acc`` over ``start <= k < stop``, with one fused multiply-add for each k.

    The loop takes four k at a time, with several loads in flight. The remaining k are taken one by one, not
    padded: terms of zero could turn -0 into +0.
    """
    whole = start + (stop - start) // 4 * 4
    for k0 in tl.range(start, whole, 4, num_stages=STAGES):
        ks = (k0 + tl.arange(0, 4)).to(tl.int64)
        x = tl.load(tl.expand_dims(a, 4) + ks * a_k, mask=tl.expand_dims(row, 4), other=0).to(tl.float32)
        y = tl.load(tl.expand_dims(b, 4) + ks * b_k, mask=tl.expand_dims(column, 4), other=0).to(tl.float32)
        x0, x1, x2, x3 = _quarters(x)
        y0, y1, y2, y3 = _quarters(y)
        acc = _fma(acc, x0, y0)
        acc = _fma(acc, x1, y1)
        acc = _fma(acc, x2, y2)
        acc = _fma(acc, x3, y3)
    for k0 in range(whole, stop):
        at = tl.cast(k0, tl.int64)
        x = tl.load(a + at * a_k, mask=row, other=0).to(tl.float32)
        y = tl.load(b + at * b_k, mask=column, other=0).to(tl.float32)
        acc = _fma(acc, x, y)
    return acc


@triton.jit
def _eights(x):
    """``x``, a multiple of 8, in a form that shows this to the compiler, which then makes wide loads."""
    return x // 8 * 8


@triton.jit
def _load(tensor, row, column, PARTS: tl.constexpr):
    """A tile of a tensor, loaded in `PARTS` parts of the descriptor's size."""
    tile = tensor.load([row, column])
    if PARTS == 2:
        parts = tl.join(tile, tensor.load([row, column + tile.shape[1]]))
        tile = tl.reshape(tl.permute(parts, (0, 2, 1)), (tile.shape[0], 2 * tile.shape[1]))
    return tile


@triton.jit
def halves(tile):
    """The left and the right half of a tile's columns."""
    return tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)).split()


@triton.jit
def store(tensor, row, column, tile, PARTS: tl.constexpr):
    if PARTS == 1:
        tensor.store([row, column], tile)
    else:
        left, right = halves(tile)
        tensor.store([row, column], left)
        tensor.store([row, column + left.shape[1]], right)


@triton.jit
def _spread(SIZE: tl.constexpr):
    """0 to SIZE - 1 in rows of 16.

    Triton distributes the last dimensions of a tensor over threads first. With this shape of a tile's rows
    and columns, a thread has a rectangle of the tile, and needs few operands for each element. Otherwise it
    would have a column.
    """
    return tl.arange(0, SIZE // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]


# Kernels are not specialized to sizes and strides, so that no batch size gets another kernel.
_SIZES = ["m", "n", "k", "sequences", "a_batch", "a_sequence", "a_row", "a_k"]
_SIZES += ["b_batch", "b_sequence", "b_k", "b_column", "out_batch", "out_row", "out_column", "bias_stride"]


@triton.jit(do_not_specialize=_SIZES)
def matmul(
    a,
    b,
    acc,  # float32, the values that chains start from, with the strides of out; may be out
    bias,
    cu_seqlens,  # offsets of packed sequences in k, or None: then `a_sequence` steps from one to the next
    out,
    m,
    n,
    k,
    sequences,
    a_batch,
    a_sequence,
    a_row,
    a_k,
    b_batch,
    b_sequence,
    b_k,
    b_column,
    out_batch,
    out_row,
    out_column,
    bias_stride,
    FMA: tl.constexpr,
    CLOSING_ZERO: tl.constexpr,
    A_ALONG: tl.constexpr,  # 16-byte pieces of memory lie along "k", along the "row", or along neither ("")
    B_ALONG: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    if A_ALONG == "k":
        a_k, a_row, k = 1, _eights(a_row), _eights(k)
    if A_ALONG == "row":
        a_row, a_k, m = 1, _eights(a_k), _eights(m)
    if B_ALONG == "k":
        b_k, b_column, k = 1, _eights(b_column), _eights(k)
    if B_ALONG == "row":
        b_column, b_k, n = 1, _eights(b_k), _eights(n)
    if A_ALONG != "":
        a_batch, a_sequence = _eights(a_batch), _eights(a_sequence)
    if B_ALONG != "":
        b_batch, b_sequence = _eights(b_batch), _eights(b_sequence)

    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles = tiles_m * tiles_n
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tile_m, tile_n = place(tl.program_id(0) % tiles, tiles_m, tiles_n, GROUP)
    if FMA:
        rows = tile_m * BLOCK_M + _spread(BLOCK_M)[:, None, :, None]
        columns = tile_n * BLOCK_N + _spread(BLOCK_N)[None, :, None, :]
    else:
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    a += batch * a_batch + rows.to(tl.int64) * a_row
    b += batch * b_batch + columns.to(tl.int64) * b_column
    at = batch * out_batch + rows.to(tl.int64) * out_row + columns.to(tl.int64) * out_column
    inside = (rows < m) & (columns < n)

    chain = tl.zeros(inside.shape, tl.float32) if acc is None else tl.load(acc + at, mask=inside, other=0)
    for s in range(sequences):
        start, stop = 0, k
        if cu_seqlens is not None:
            # Wrong offsets must not read elsewhere.
            start = tl.minimum(tl.maximum(tl.load(cu_seqlens + s), 0), k).to(tl.int32)
            stop = tl.maximum(tl.minimum(tl.load(cu_seqlens + s + 1), k).to(tl.int32), start)
        x, y = a + tl.cast(s, tl.int64) * a_sequence, b + tl.cast(s, tl.int64) * b_sequence
        if FMA:
            chain = _fma_chain(chain, x, y, start, stop, a_k, b_k, rows < m, columns < n, STAGES)
            if CLOSING_ZERO:  # fma(+0, +0, chain) turns -0 into +0
                chain = tl.where((chain == 0) & (start < stop), 0.0, chain)
        else:
            chain = _mma_chain(chain, x, y, start, stop, a_k, b_k, rows < m, columns < n, BLOCK_K)
    if bias is not None:
        chain += tl.load(bias + columns.to(tl.int64) * bias_stride, mask=columns < n, other=0).to(tl.float32)
    tl.store(out + at, finish(chain, out.dtype.element_ty), mask=inside)


@triton.jit
def chain_of_tiles(
    acc,
    a,  # descriptors: a[m, k] or, if not A_K_MAJOR, a[k, m]; b[n, k] or b[k, n]
    b,
    m0,
    n0,
    k,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    SWAP: tl.constexpr,  # compute the transposed tile: columns take the instruction's 64-row side
    BLOCK_K: tl.constexpr,
):
    """Continue the chains ``acc`` over all k of a tile. The copy engine pads the last group with zeros."""
    acc = acc.T if SWAP else acc
    for k0 in range(0, k, BLOCK_K):
        x = a.load([m0, k0]) if A_K_MAJOR else a.load([k0, m0]).T
        y = b.load([n0, k0]).T if B_K_MAJOR else b.load([k0, n0])
        acc = tl.dot(y.T, x.T, acc) if SWAP else tl.dot(x, y, acc)
    return acc.T if SWAP else acc


@triton.jit(do_not_specialize=["m", "n", "k"])
def matmul_tiles(
    a,  # descriptors, as for chain_of_tiles
    b,
    bias,
    out,  # a descriptor: out[m, n]
    m,
    n,
    k,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SWAP: tl.constexpr,
    FLATTEN: tl.constexpr,
    PARTS: tl.constexpr,  # 1 or 2, in which a tile of out goes through shared memory
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = _load(out, m0, n0, PARTS) if ACCUMULATE else tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = chain_of_tiles(acc, a, b, m0, n0, k, A_K_MAJOR, B_K_MAJOR, SWAP, BLOCK_K)
        columns = n0 + tl.arange(0, BLOCK_N)
        if bias is not None:
            acc += tl.load(bias + columns, mask=columns < n, other=0).to(tl.float32)[None, :]
        store(out, m0, n0, finish(acc, out.dtype), PARTS)

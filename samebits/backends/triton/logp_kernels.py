"""Log-probabilities as in ``docs/contract.md``, in Triton: exp, log, statistics of blocks, gradients.

``tl.sum`` chooses its own order, so it is only used for two numbers: a sum of two has no order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samebits import functions
from samebits.backends.triton.kernels import chain_of_tiles, finish, halves, place, store

_LOG2E, _LN2, _LN2_LOW = (tl.constexpr(functions.CONSTANTS[name]) for name in ("LOG2E", "LN2", "LN2_LOW"))
_E0, _E1, _E2, _E3, _E4, _E5, _E6 = (tl.constexpr(functions.CONSTANTS[f"E{i}"]) for i in range(7))
_L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8, _L9 = (
    tl.constexpr(functions.CONSTANTS[f"L{i}"]) for i in range(1, 10)
)
_INF = tl.constexpr(float("inf"))
_TO_INTEGER = tl.constexpr(1.5 * 2**23 + 127)
_SQRT_HALF = tl.constexpr(0x3F3504F3)
_BLOCK = tl.constexpr(functions.VOCAB_BLOCK)
_CHAINS = tl.constexpr(functions.CHAINS)
_UNROLL = tl.constexpr(8)
_BLOCK_HALVES = tl.constexpr(functions.VOCAB_BLOCK.bit_length() - 1)
_CHAIN_HALVES = tl.constexpr(functions.CHAINS.bit_length() - 1)


@triton.jit
def exp(x):
    """e**x for x <= 0 or NaN. +0 below -87.7."""
    x = tl.maximum(x, -88.0, propagate_nan=tl.PropagateNan.ALL)
    t = tl.fma(x, _LOG2E, _TO_INTEGER)
    n = t - _TO_INTEGER
    f = tl.fma(n, -_LN2, x)
    f = tl.fma(n, -_LN2_LOW, f)
    q = tl.fma(f, _E6, _E5)
    q = tl.fma(q, f, _E4)
    q = tl.fma(q, f, _E3)
    q = tl.fma(q, f, _E2)
    q = tl.fma(q, f, _E1)
    q = tl.fma(q, f, _E0)
    return q * (t.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def log(x):
    """The natural logarithm of a normal x > 0, of +0 and of NaN."""
    i = x.to(tl.int32, bitcast=True) - _SQRT_HALF
    k = (i >> 23).to(tl.float32)
    f = ((i & 0x7FFFFF) + _SQRT_HALF).to(tl.float32, bitcast=True) - 1.0
    q = tl.fma(f, _L9, _L8)
    q = tl.fma(q, f, _L7)
    q = tl.fma(q, f, _L6)
    q = tl.fma(q, f, _L5)
    q = tl.fma(q, f, _L4)
    q = tl.fma(q, f, _L3)
    q = tl.fma(q, f, _L2)
    q = tl.fma(q, f, _L1)
    y = tl.fma(k, _LN2, tl.fma(k, _LN2_LOW, tl.fma(q, f * f, f)))
    return tl.where(x > 0, y, tl.where(x == 0, -_INF, x))


@triton.jit
def _sum_by_halves(x, HALVES: tl.constexpr):
    """The sum of every row of ``x[rows, 2**HALVES]``."""
    for _ in tl.static_range(HALVES):
        x = tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 1)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def _shift(maximum):
    """The value that is subtracted from logits with this maximum."""
    return tl.where(maximum == -_INF, 0.0, maximum)


@triton.jit
def _store_statistics(z, m, s, u, at, inside):
    """Store m, s and u (unless None) of a block ``z[rows, 128]``, at ``at[rows]`` where `inside`."""
    maximum = tl.max(z, 1)  # it ignores NaN, which reaches all results through s
    d = z - _shift(maximum)[:, None]
    e = exp(d)
    tl.store(m + at, maximum, mask=inside)
    tl.store(s + at, _sum_by_halves(e, _BLOCK_HALVES), mask=inside)
    if u is not None:
        tl.store(u + at, _sum_by_halves(tl.where(e == 0, 0.0, d * e), _BLOCK_HALVES), mask=inside)


@triton.jit
def _grad(z, is_target, counts, shift, log_sum, g, h, entropy):
    """dz of logits. `h` may be None."""
    y = z - shift - log_sum
    p = exp(y)
    k = g if h is None else tl.fma(h, tl.where(p == 0, 0.0, y + entropy), g)
    # k * -1, because Triton computes -k as 0 - k, whose zero is +0.
    return tl.where(counts, tl.fma(k * -1.0, p, tl.where(is_target, g, 0.0)), 0.0)


@triton.jit(do_not_specialize=["logits_row", "first", "width", "blocks"])
def block_statistics(
    logits,  # [tokens, width], of the vocabulary's entries from `first` on
    target,
    m,  # [tokens, blocks], as s and u; u may be None
    s,
    u,
    target_logit,
    logits_row,
    first,
    width,
    blocks,
    scale,
    BLOCKS: tl.constexpr,  # of a row, in a program
):
    groups = tl.cdiv(width, BLOCKS * _BLOCK)
    row, block = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups * BLOCKS
    block += tl.arange(0, BLOCKS)
    v = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    z = tl.load(logits + row * logits_row + v, mask=v < width, other=-_INF).to(tl.float32) * scale
    is_target = (v == tl.load(target + row) - first) & (v < width)
    tl.store(target_logit + tl.broadcast_to(row, z.shape), z, mask=is_target)
    at = row * blocks + first // _BLOCK + block
    _store_statistics(z, m, s, u, at, block * _BLOCK < width)


@triton.jit(do_not_specialize=["vocabulary", "ignore_index", "tokens", "blocks"])
def combine(
    m,  # [tokens, blocks], as s and u; u may be None
    s,
    u,
    target_logit,
    target,
    logp,
    entropy,
    shift,
    log_sum,
    vocabulary,
    ignore_index,
    tokens,
    blocks,
    ROWS: tl.constexpr,  # in a program
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < tokens
    chains = tl.arange(0, _CHAINS)[None, :]
    starts = rows.to(tl.int64)[:, None] * blocks

    # Many loads are in flight at once, because with few tokens their latency takes the time.
    wide = tl.arange(0, _UNROLL * _CHAINS)[None, :]
    largest = tl.full([ROWS, _UNROLL * _CHAINS], -_INF, tl.float32)
    for first in range(0, blocks, _UNROLL * _CHAINS):
        some = inside[:, None] & (first + wide < blocks)
        largest = tl.maximum(largest, tl.load(m + starts + first + wide, mask=some, other=-_INF))
    r = _shift(tl.max(largest, 1))

    s_chain, u_chain = tl.zeros([ROWS, _CHAINS], tl.float32), tl.zeros([ROWS, _CHAINS], tl.float32)
    for first in tl.range(0, blocks, _CHAINS, loop_unroll_factor=_UNROLL):
        at, some = starts + first + chains, inside[:, None] & (first + chains < blocks)
        a = tl.load(m + at, mask=some, other=-_INF) - r[:, None]
        w, s_b = exp(a), tl.load(s + at, mask=some, other=0)
        s_chain = tl.where(some, tl.fma(s_b, w, s_chain), s_chain)
        if u is not None:
            u_b = tl.fma(a, s_b, tl.load(u + at, mask=some, other=0))
            u_chain = tl.where(w == 0, u_chain, tl.fma(u_b, w, u_chain))
    total = _sum_by_halves(s_chain, _CHAIN_HALVES)
    log_s = log(total)
    tl.store(shift + rows, finish(r, tl.float32), mask=inside)
    tl.store(log_sum + rows, finish(log_s, tl.float32), mask=inside)

    t = tl.load(target + rows, mask=inside, other=0)
    unknown, ignored = (t < 0) | (t >= vocabulary), t == ignore_index
    selected = tl.where(unknown, float("nan"), tl.load(target_logit + rows, mask=inside, other=0) - r - log_s)
    tl.store(logp + rows, tl.where(ignored, 0.0, finish(selected, tl.float32)), mask=inside)
    if u is not None:
        mean = log_s - tl.div_rn(_sum_by_halves(u_chain, _CHAIN_HALVES), total)
        mean = finish(tl.where(unknown, float("nan"), mean), tl.float32)
        tl.store(entropy + rows, tl.where(ignored, 0.0, mean), mask=inside)


@triton.jit(do_not_specialize=["logits_row", "out_row", "first", "width", "vocabulary", "ignore_index"])
def grad_logits(
    logits,  # [tokens, width], of the vocabulary's entries from `first` on
    target,
    shift,
    log_sum,
    entropy,
    grad,
    grad_entropy,  # may be None
    out,  # [tokens, width]
    logits_row,
    out_row,
    first,
    width,
    vocabulary,
    ignore_index,
    scale,
    COLUMNS: tl.constexpr,  # of a row, in a program
):
    groups = tl.cdiv(width, COLUMNS)
    row, v = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups * COLUMNS
    v += tl.arange(0, COLUMNS)
    z = tl.load(logits + row * logits_row + v, mask=v < width, other=0).to(tl.float32) * scale
    t = tl.load(target + row)
    counts = (t >= 0) & (t < vocabulary) & (t != ignore_index)
    g = tl.load(grad + row) * scale
    h = None if grad_entropy is None else tl.load(grad_entropy + row) * scale
    mean = None if grad_entropy is None else tl.load(entropy + row)
    dz = _grad(z, v == t - first, counts, tl.load(shift + row), tl.load(log_sum + row), g, h, mean)
    tl.store(out + row * out_row + v, finish(dz, out.dtype.element_ty), mask=v < width)


@triton.jit
def _logits(acc, bias, columns, vocabulary):
    """The logits, unscaled, of the vocabulary's entries `columns`, from the products `acc`."""
    if bias is not None:
        acc += tl.load(bias + columns, mask=columns < vocabulary, other=0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _store_block(
    acc, bias, n0, rows, t, tokens, vocabulary, m, s, u, target_logit, keep, keep_row, kept, blocks, scale
):
    """Store the statistics of ``acc[rows, 128]``, a block's products, and the logits of targets in it."""
    columns = n0 + tl.arange(0, _BLOCK)
    z = _logits(acc, bias, columns, vocabulary)
    if keep is not None:
        some = (rows < tokens)[:, None] & (columns < kept)[None, :]
        tl.store(keep + rows.to(tl.int64)[:, None] * keep_row + columns[None, :], z, mask=some)
    z = z * scale
    z = tl.where((columns < vocabulary)[None, :], z, -_INF)
    # A masked store of `z` would rearrange the whole tile first.
    selected = tl.max(tl.where(columns[None, :] == t[:, None], z, -_INF), 1)
    tl.store(target_logit + rows, selected, mask=(t >= n0) & (t < n0 + _BLOCK))
    block = tl.full(rows.shape, n0 // _BLOCK, tl.int32)
    inside = (rows < tokens) & (block < blocks)
    _store_statistics(z, m, s, u, rows.to(tl.int64) * blocks + block, inside)


@triton.jit(do_not_specialize=["keep_row", "kept", "tokens", "vocabulary", "features", "blocks"])
def statistics_tiles(
    hidden,  # descriptors: hidden[tokens, features], weight[vocabulary, features]
    weight,
    bias,
    target,
    m,  # [tokens, blocks], as s and u; u may be None
    s,
    u,
    target_logit,
    keep,  # [tokens, kept], or None
    keep_row,
    kept,
    tokens,
    vocabulary,
    features,
    blocks,
    scale,
    SWAP: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # 128 or 256
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """:func:`kernels.matmul_tiles` and :func:`block_statistics` in one kernel. Only kept logits leave it."""
    tiles_m, tiles_n = tl.cdiv(tokens, BLOCK_M), tl.cdiv(vocabulary, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = chain_of_tiles(acc, hidden, weight, m0, n0, features, True, True, SWAP, BLOCK_K)
        rows = m0 + tl.arange(0, BLOCK_M)
        t = tl.load(target + rows, mask=rows < tokens, other=-1)
        t = tl.where((t < 0) | (t >= vocabulary), -1, t).to(tl.int32)
        if BLOCK_N == _BLOCK:
            _store_block(
                *(acc, bias, n0, rows, t, tokens, vocabulary, m, s, u),
                *(target_logit, keep, keep_row, kept, blocks, scale),
            )
        else:
            left, right = halves(acc)
            _store_block(
                *(left, bias, n0, rows, t, tokens, vocabulary, m, s, u),
                *(target_logit, keep, keep_row, kept, blocks, scale),
            )
            n0 += _BLOCK
            _store_block(
                *(right, bias, n0, rows, t, tokens, vocabulary, m, s, u),
                *(target_logit, keep, keep_row, kept, blocks, scale),
            )


@triton.jit(do_not_specialize=["first", "vocabulary", "ignore_index", "tokens", "width", "features"])
def grad_logits_tiles(
    hidden,  # descriptors: hidden[tokens, features]; weight[width, features], of entries from `first` on
    weight,
    bias,
    target,
    shift,
    log_sum,
    entropy,
    grad,
    grad_entropy,  # may be None
    out,  # a descriptor: out[tokens, width]
    first,
    vocabulary,
    ignore_index,
    tokens,
    width,
    features,
    scale,
    SWAP: tl.constexpr,
    FLATTEN: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """:func:`kernels.matmul_tiles` and :func:`grad_logits` in one kernel."""
    tiles_m, tiles_n = tl.cdiv(tokens, BLOCK_M), tl.cdiv(width, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = chain_of_tiles(acc, hidden, weight, m0, n0, features, True, True, SWAP, BLOCK_K)
        rows, columns = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
        inside = rows < tokens
        t = tl.load(target + rows, mask=inside, other=-1)
        counts = (t >= 0) & (t < vocabulary) & (t != ignore_index)
        t = tl.where(counts, t - first, -1).to(tl.int32)
        r = tl.load(shift + rows, mask=inside, other=0)[:, None]
        log_s = tl.load(log_sum + rows, mask=inside, other=0)[:, None]
        g = (tl.load(grad + rows, mask=inside, other=0) * scale)[:, None]
        h, mean = None, None
        if grad_entropy is not None:
            h = (tl.load(grad_entropy + rows, mask=inside, other=0) * scale)[:, None]
            mean = tl.load(entropy + rows, mask=inside, other=0)[:, None]
        z = _logits(acc, bias, columns, width) * scale
        dz = _grad(z, columns[None, :] == t[:, None], counts[:, None], r, log_s, g, h, mean)
        store(out, m0, n0, finish(dz, out.dtype), PARTS)

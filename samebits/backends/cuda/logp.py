"""Log-probabilities on CUDA tensors from given logits: ``kernels/logp.cu``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from samebits.backends import Later
from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.operands import TYPES, address, with_rows
from samebits.backends.token_logps import Rows, Statistics
from samebits.functions import VOCAB_BLOCK

_THREADS = 256
_WARPS = _THREADS // 32
_GRADS_A_THREAD = 8
_FEW_ROWS, _FEW_BLOCKS = 1024, 64

# The parameter structs of logp.cu.
_PARAMS = {
    "block_statistics": "PqPPPPPqqif",
    "combine": "PPPPPPPPPqqii",
    "combine_few": "PPPPPPPPPqqii",
    "combine_ids": "PPPPPqqqiii",
    "grad_logits": "PqPPPPPPPqqqqqf",
    "first_unknown": "PPqqq",
}


def kernel_spec(
    entry: str,
    logits: torch.dtype = torch.float32,
    grads: torch.dtype = torch.float32,
    *,
    entropy: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``logp.cu`` with this name."""
    constants = ("LOGITS", TYPES[logits]), ("GRADS", TYPES[grads]), ("ENTROPY", int(entropy))
    return compiler.KernelSpec("logp.cu", entry, _PARAMS[entry], constants, block=_THREADS)


_kernel = runtime.loader(kernel_spec)


_ANSWERS = 32, 64  # calls of first_unknown in a thread, which waits for each, and blocks of one call


class _Answers(threading.local):
    """Pinned memory for answers that a GPU writes to the CPU."""

    room: Tensor | None = None
    turn = 0

    def place(self) -> tuple[Tensor, int]:
        """The memory, and the index of this call in it."""
        if self.room is None:
            self.room = torch.empty(_ANSWERS, dtype=torch.int64, device="cpu", pin_memory=True)
        self.turn = (self.turn + 1) % _ANSWERS[0]
        return self.room, self.turn


_answers = _Answers()


def first_unknown(target: Tensor, vocabulary: int, ignore_index: int) -> Callable[[], int]:
    """:func:`samebits.backends.token_logps.first_unknown`, in one launch."""
    target, count = target.contiguous(), target.numel()
    device, (room, turn) = target.get_device(), _answers.place()
    blocks = min(_ANSWERS[1], -(-count // (4 * _THREADS)))
    to = room.data_ptr() + 8 * _ANSWERS[1] * turn
    kernel = _kernel(device, "first_unknown")
    kernel.launch((blocks, 1, 1), target.data_ptr(), to, count, vocabulary, ignore_index)
    answered = torch.cuda.current_stream(device).record_event()

    def wait() -> int:
        answered.synchronize()
        return int(room[turn, :blocks].min())

    return wait


def add_statistics(to: Statistics, logits: Tensor, first: int, rows: Rows) -> None:
    """Fill in the part of `to` that depends on ``logits[tokens, n]``, the vocabulary's entries from `first`.

    Args:
        logits: float32, bfloat16 or float16.
        first: a multiple of 128. So is n, unless the logits end with the vocabulary.
    """
    logits = with_rows(logits)
    tokens, width = logits.shape
    block, blocks = first // VOCAB_BLOCK, to.m.shape[1]
    kernel = _kernel(logits.get_device(), "block_statistics", logits.dtype, entropy=rows.with_entropy)
    kernel.launch(
        (tokens * -(-width // (_WARPS * VOCAB_BLOCK)), 1, 1),
        *(logits.data_ptr(), logits.stride(0), rows.target.data_ptr()),
        *(t.data_ptr() + 4 * block for t in (to.m, to.s)),
        to.u.data_ptr() + 4 * block if rows.with_entropy else 0,
        *(to.target_logit.data_ptr(), first, width, blocks, rows.scale),
    )


def combine(statistics: Statistics, rows: Rows) -> None:
    """Fill in the results of `rows`."""
    tokens, blocks = statistics.m.shape
    few = tokens <= _FEW_ROWS and blocks > _FEW_BLOCKS  # then the latency of a row decides
    entry, grid = ("combine_few", tokens) if few else ("combine", -(-tokens // _WARPS))
    kernel = _kernel(rows.target.get_device(), entry, entropy=rows.with_entropy)
    kernel.launch(
        (grid, 1, 1),
        *(t.data_ptr() for t in statistics),
        *(t.data_ptr() for t in (rows.target, rows.logp, rows.entropy, rows.shift, rows.log_sum)),
        *(rows.vocabulary, rows.ignore_index, tokens, blocks),
    )


def of_ids(logits: Tensor, ids: Tensor) -> Tensor:
    """The log-probabilities of ``ids[rows, n]`` under ``logits[rows, V]``, in two launches."""
    logits, ids = with_rows(logits), with_rows(ids)
    (rows, vocabulary), device = logits.shape, logits.get_device()
    blocks = -(-vocabulary // VOCAB_BLOCK)
    m, s = (runtime.empty((rows, blocks), torch.float32, device) for _ in range(2))
    out = runtime.empty(ids.shape, torch.float32, device)
    _kernel(device, "block_statistics", logits.dtype).launch(
        (rows * -(-blocks // _WARPS), 1, 1),
        *(logits.data_ptr(), logits.stride(0), 0, m.data_ptr(), s.data_ptr(), 0, 0),
        *(0, vocabulary, blocks, 1.0),
    )
    _kernel(device, "combine_ids", logits.dtype).launch(
        (rows, 1, 1),
        *(m.data_ptr(), s.data_ptr(), logits.data_ptr(), ids.data_ptr(), out.data_ptr()),
        *(logits.stride(0), ids.stride(0), vocabulary),
        *(ids.shape[1], blocks, int(ids.dtype == torch.int64)),
    )
    return out


def grad_logits(
    out: Tensor, logits: Tensor, first: int, rows: Rows, grad: Tensor, grad_entropy: Tensor | None
) -> None:
    """Write dz of logits as in :func:`add_statistics` into `out`, from the gradients of the results.

    The rows of `out` need not be contiguous.
    """
    grad_logits_later(out, with_rows(logits), first, rows, grad, grad_entropy)()


def grad_logits_later(
    out: Tensor, logits: Tensor, first: int, rows: Rows, grad: Tensor, grad_entropy: Tensor | None
) -> Later:
    """:func:`grad_logits`, later: of contiguous rows, in tensors that must live until then."""
    if logits.numel() == 0:
        return int
    tokens, width = logits.shape
    entropy = grad_entropy is not None
    kernel = _kernel(logits.get_device(), "grad_logits", logits.dtype, out.dtype, entropy=entropy)
    return partial(
        kernel.launch,
        (tokens * -(-width // (_THREADS * _GRADS_A_THREAD)), 1, 1),
        *(logits.data_ptr(), logits.stride(0), rows.target.data_ptr()),
        *(t.data_ptr() for t in (rows.shift, rows.log_sum, rows.entropy, grad)),
        *(address(grad_entropy), out.data_ptr(), out.stride(0)),
        *(first, width, rows.vocabulary, rows.ignore_index, rows.scale),
    )

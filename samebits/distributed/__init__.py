"""The same bits on any number of GPUs, on top of ``torch.distributed``."""

from samebits.distributed.data import GradientGroups, OrderedReduceScatter, ordered_hook
from samebits.distributed.exchange import ordered_all_reduce, ordered_reduce_scatter
from samebits.distributed.linear import column_parallel_linear, row_parallel_linear
from samebits.distributed.styles import ColwiseParallel, RowwiseParallel, SequenceParallel, tp_plan
from samebits.distributed.vocabulary import vocab_parallel_embedding, vocab_parallel_linear_logp

__all__ = [
    "ColwiseParallel",
    "GradientGroups",
    "OrderedReduceScatter",
    "RowwiseParallel",
    "SequenceParallel",
    "column_parallel_linear",
    "ordered_all_reduce",
    "ordered_hook",
    "ordered_reduce_scatter",
    "row_parallel_linear",
    "tp_plan",
    "vocab_parallel_embedding",
    "vocab_parallel_linear_logp",
]

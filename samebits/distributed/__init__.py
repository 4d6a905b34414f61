"""The same bits on any number of GPUs, on top of ``torch.distributed``."""

from samebits.distributed.data import GradientGroups, OrderedReduceScatter, ordered_hook
from samebits.distributed.exchange import ordered_all_reduce, ordered_reduce_scatter

__all__ = [
    "GradientGroups",
    "OrderedReduceScatter",
    "ordered_all_reduce",
    "ordered_hook",
    "ordered_reduce_scatter",
]

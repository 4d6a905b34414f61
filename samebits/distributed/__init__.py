"""The same bits on any number of GPUs, on top of ``torch.distributed``."""

from samebits.distributed.exchange import ordered_all_reduce, ordered_reduce_scatter

__all__ = ["ordered_all_reduce", "ordered_reduce_scatter"]

"""``libsamebits`` in Python: :class:`Engine` runs its kernels, and ``samebits export`` writes them.

Importing this package loads neither PyTorch nor samebits. :mod:`samebits_native.export` needs both.
"""

from samebits_native.engine import Array, Engine, EngineError

__all__ = ["Array", "Engine", "EngineError"]

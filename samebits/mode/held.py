"""Settings of PyTorch's that have another value while a mode is on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.backends import mha

__all__ = ["AUTOGRAD_CACHE", "FAST_PATH", "Held"]


class Held:
    """A setting that is off while anybody holds it, in any thread, and then what it was before."""

    def __init__(self, get: Callable[[], bool], put: Callable[[bool], None]) -> None:
        self._get, self._put = get, put
        self._lock = threading.Lock()
        self._holders = 0
        self._before = True

    def hold(self) -> None:
        with self._lock:
            if not self._holders:
                self._before = self._get()
                self._put(False)
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._put(self._before)


def _autograd_cache() -> bool:
    from torch._functorch import config  # not with `import torch`

    return config.enable_autograd_cache


def _set_autograd_cache(on: bool) -> None:
    from torch._functorch import config

    config.enable_autograd_cache = on


FAST_PATH = Held(mha.get_fastpath_enabled, mha.set_fastpath_enabled)
"""Transformer layers of PyTorch take a path of their own, with kernels of its own."""
AUTOGRAD_CACHE = Held(_autograd_cache, _set_autograd_cache)
"""``torch.compile`` keeps graphs on the disk by the functions called, which a context does not change."""

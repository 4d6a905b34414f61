"""Turns the hooks on and off, in a process of SGLang's."""

from __future__ import annotations

from samebits.engines.hooks import Hooks
from samebits.engines.plugin import Plugin
from samebits.engines.refusals import RefusedError
from samebits.sglang.proven import TESTED

__all__ = ["device", "enable", "plugin", "version"]

plugin = Plugin("samebits.sglang", "SAMEBITS_SGLANG")


def version() -> str:
    """Of SGLang, without a build's suffix."""
    import sglang

    return str(sglang.__version__).partition("+")[0]


def device() -> str:
    """The kind that SGLang runs on."""
    from sglang.srt.utils import is_cpu, is_cuda

    return "cuda" if is_cuda() else "cpu" if is_cpu() else "another device"


def enable() -> None:
    """See :func:`samebits.sglang.enable`."""
    if plugin.hooks is not None:
        return
    if not plugin.allows_any_version() and (version(), device()) not in TESTED:
        raise RefusedError(
            f"SGLang {version()} on {device()}",
            f"samebits was tested with {', '.join(f'{v} on {on}' for v, on in TESTED)}",
            f"install one of these, or set {plugin.any_version}=1, and prove it on your model: samebits"
            " parity MODEL --engine sglang",
        )
    plugin.enable(_install, f"SGLang {version()}")


def _install(hooks: Hooks) -> None:
    from samebits.sglang import attention, experts, layers, loading, sampling

    for part in (layers, experts, attention, sampling, loading):
        part.install(hooks)

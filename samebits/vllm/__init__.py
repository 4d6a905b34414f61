"""Rollouts in vLLM with a trainer's bits: ``LLM(model, **samebits.vllm.options())``.

vLLM loads this package as a plug-in in each of its processes. It does nothing until it is asked, by
:func:`options` or by ``SAMEBITS_VLLM=1``. Then a token's log-prob has the bits that the ``transformers``
model of the same weights gives it under :class:`samebits.batch_invariant`. ``docs/vllm.md`` has more.
"""

from __future__ import annotations

import os
from typing import Any

from samebits.contract import TENSOR_CORE
from samebits.engines.refusals import RefusedError, check_entry_point

__all__ = ["disable", "enable", "is_enabled", "options", "register"]


def options(*, any_version: bool = False, segments: int = 1) -> dict[str, Any]:
    """Arguments for ``vllm.LLM`` or ``vllm.AsyncEngineArgs`` that turn samebits on.

    ::

        llm = LLM(model, **samebits.vllm.options())

    What else must be set (attention backend, compilation, CUDA graphs, ...) is set while vLLM creates the
    engine's configuration. What contradicts it is refused there. ``vllm serve`` takes ``SAMEBITS_VLLM=1`` in
    its environment instead.

    Args:
        any_version: also run with versions of vLLM that samebits was not tested with.
        segments: into how many chains products are cut, as by :meth:`samebits.Contract.segmented`. The
            trainer's model must have the same: ``samebits.convert(model,
            contract=samebits.TENSOR_CORE.segmented(8))``. Up to so many GPUs have the same bits, and several
            need it: ``tensor_parallel_size`` has to divide it.

    Raises:
        ValueError: `segments` is no power of two from 1 to 64.
        RefusedError: ``VLLM_PLUGINS`` is set, and does not name samebits, or samebits is not installed: vLLM
            would load no hook.
    """
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "samebits" not in plugins.split(","):
        raise RefusedError(f"VLLM_PLUGINS={plugins}", "vLLM loads no other plug-ins", "name samebits in it")
    check_entry_point("vllm.general_plugins", "vLLM")
    TENSOR_CORE.segmented(segments)  # checks it
    return {"additional_config": {"samebits": {"any_version": any_version, "segments": segments}}}


def register() -> None:
    """The entry point of ``vllm.general_plugins``, which vLLM calls in each of its processes."""
    from samebits.vllm.configuration import register

    register()


def enable(*, any_version: bool = False) -> None:
    """Install the hooks in this process, and in those that it starts.

    Engines call it themselves. All engines that are made from now on are under samebits. Loading a model
    turns :func:`samebits.enable_batch_invariant_mode` on in its process.

    Raises:
        RefusedError: this version of vLLM was not tested.
        MovedError: a hook does not fit this version.
    """
    from samebits.vllm.plugin import enable

    enable(any_version=any_version)


def disable() -> None:
    """Undo :func:`enable` in this process: every hook, and the mode if an engine turned it on.

    Engines that exist must not be used.
    """
    from samebits.vllm.plugin import plugin

    plugin.disable()


def is_enabled() -> bool:
    """Whether the hooks are installed in this process."""
    from samebits.vllm.plugin import plugin

    return plugin.hooks is not None

"""Turns the hooks on and off, in a process of vLLM's."""

from __future__ import annotations

import os
from functools import partial

from samebits.engines.hooks import Hooks
from samebits.engines.refusals import RefusedError
from samebits.vllm.proven import TESTED

__all__ = ["disable", "enable", "is_enabled", "new_hooks", "wanted"]

ASKED, ANY_VERSION = "SAMEBITS_VLLM", "SAMEBITS_VLLM_ANY_VERSION"
"""Environment variables. Processes that vLLM starts inherit them."""


class _State:
    """Of this process.

    Attributes:
        hooks: while samebits is on.
    """

    hooks: Hooks | None = None


_state = _State()


def wanted() -> dict[str, bool] | None:
    """Arguments of :func:`enable`, if the environment asks for it."""
    asked, any_version = (os.environ.get(name, "0") not in ("", "0") for name in (ASKED, ANY_VERSION))
    return {"any_version": any_version} if asked else None


def _version() -> str:
    """Of vLLM, without a build's suffix."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def new_hooks() -> Hooks:
    """None replaced yet."""
    return Hooks(f"samebits.vllm: vLLM {_version()}")


def enable(*, any_version: bool = False) -> None:
    """See :func:`samebits.vllm.enable`."""
    if _state.hooks is not None:
        return
    from vllm.platforms import current_platform

    found, device = _version(), current_platform.device_type
    if not any_version and device not in TESTED.get(found, ()):
        raise RefusedError(
            f"vLLM {found} on {device}",
            f"samebits was tested with {', '.join(f'{v} on {on}' for v, (on, *_) in TESTED.items())}",
            "install one of these, or allow it: samebits.vllm.options(any_version=True), or"
            f" {ANY_VERSION}=1, and prove it on your model: samebits parity MODEL --engine vllm",
        )
    from samebits.vllm import attention, experts, fp8, layers, loading, lora, sampling, unfused

    hooks = new_hooks()
    try:
        for part in (layers, experts, fp8, lora, attention, sampling, unfused, loading):
            part.install(hooks)
    except BaseException:
        hooks.undo()
        raise
    environment = {
        ASKED: "1",
        ANY_VERSION: "1" if any_version else "0",
        # Its absorbed form sums otherwise than transformers. Who sets it to 0 is refused by covered.py.
        "VLLM_MLA_DISABLE": os.environ.get("VLLM_MLA_DISABLE", "1"),
    }
    for name, value in environment.items():
        hooks.on_undo(partial(_restore, name, os.environ.get(name)))
        os.environ[name] = value
    _state.hooks = hooks


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def disable() -> None:
    """See :func:`samebits.vllm.disable`."""
    if _state.hooks is not None:
        _state.hooks.undo()
        _state.hooks = None


def is_enabled() -> bool:
    """See :func:`samebits.vllm.is_enabled`."""
    return _state.hooks is not None

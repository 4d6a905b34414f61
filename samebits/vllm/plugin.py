"""Turns the hooks on and off, in a process of vLLM's."""

from __future__ import annotations

import os

from samebits.engines.hooks import Hooks
from samebits.engines.plugin import Plugin
from samebits.engines.refusals import RefusedError
from samebits.vllm.proven import TESTED

__all__ = ["enable", "plugin", "version"]

plugin = Plugin("samebits.vllm", "SAMEBITS_VLLM")


def version() -> str:
    """Of vLLM, without a build's suffix."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def enable(*, any_version: bool = False) -> None:
    """See :func:`samebits.vllm.enable`."""
    if plugin.hooks is not None:
        return
    from vllm.platforms import current_platform

    found, device = version(), current_platform.device_type
    if not any_version and device not in TESTED.get(found, ()):
        raise RefusedError(
            f"vLLM {found} on {device}",
            f"samebits was tested with {', '.join(f'{v} on {on}' for v, (on, *_) in TESTED.items())}",
            "install one of these, or allow it: samebits.vllm.options(any_version=True), or"
            f" {plugin.any_version}=1, and prove it on your model: samebits parity MODEL --engine vllm",
        )
    environment = {
        plugin.any_version: "1" if any_version else "0",
        # Its absorbed form sums otherwise than transformers, unless samebits.latent.absorb was called there.
        "VLLM_MLA_DISABLE": os.environ.get("VLLM_MLA_DISABLE", "1"),
    }
    plugin.enable(_install, f"vLLM {found}", environment)


def _install(hooks: Hooks) -> None:
    from samebits.vllm import (
        attention,
        experts,
        fp8,
        layers,
        loading,
        lora,
        mla,
        parallel,
        recurrent,
        sampling,
        unfused,
    )

    parts = layers, experts, recurrent, fp8, lora, parallel, attention, mla, sampling, unfused, loading
    for part in parts:
        part.install(hooks)

"""Rollouts in SGLang with a trainer's bits: ``sglang.Engine(model_path=..., **samebits.sglang.options())``.

SGLang loads this package as a plug-in in each of its processes. It does nothing until it is asked, by
:func:`options` or by ``SAMEBITS_SGLANG=1``. Then a token's log-prob has the bits that the ``transformers``
model of the same weights gives it under :class:`samebits.batch_invariant`. ``docs/sglang.md`` has more.
"""

from __future__ import annotations

import os
from typing import Any

from samebits.engines.refusals import RefusedError, check_entry_point

__all__ = ["disable", "enable", "is_enabled", "options", "register"]


def options() -> dict[str, Any]:
    """Arguments for ``sglang.Engine`` or ``ServerArgs`` that turn samebits on.

    ::

        llm = sglang.Engine(model_path=model, **samebits.sglang.options())

    What else must be set (attention backend, pages, CUDA graphs, ...) is set while SGLang resolves its
    arguments. What contradicts it is refused there. A server takes ``--rl-on-policy-target samebits``, or
    ``SAMEBITS_SGLANG=1`` in its environment.

    Raises:
        RefusedError: ``SGLANG_PLUGINS`` is set, and does not name samebits, or samebits is not installed:
            SGLang would load no hook.
    """
    plugins = os.environ.get("SGLANG_PLUGINS")
    if plugins and "samebits" not in [name.strip() for name in plugins.split(",")]:
        raise RefusedError(
            f"SGLANG_PLUGINS={plugins}", "SGLang loads no other plug-ins", "name samebits in it"
        )
    check_entry_point("sglang.srt.plugins", "SGLang")
    return {"rl_on_policy_target": "samebits"}


def register() -> None:
    """The entry point of ``sglang.srt.plugins``, which SGLang calls in each of its processes."""
    from samebits.sglang.configuration import register

    register()


def enable() -> None:
    """Install the hooks in this process, and in those that it starts.

    Engines call it themselves. All engines that are made from now on are under samebits. Loading a model
    turns :func:`samebits.enable_batch_invariant_mode` on in its process.

    Raises:
        RefusedError: this version of SGLang was not tested on this kind of device.
        MovedError: a hook does not fit this version.
    """
    from samebits.sglang.plugin import enable

    enable()


def disable() -> None:
    """Undo :func:`enable` in this process: every hook, and the mode if an engine turned it on.

    Engines that exist must not be used.
    """
    from samebits.sglang.plugin import plugin

    plugin.disable()


def is_enabled() -> bool:
    """Whether the hooks are installed in this process."""
    from samebits.sglang.plugin import plugin

    return plugin.hooks is not None

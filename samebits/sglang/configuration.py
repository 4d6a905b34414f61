"""Reads whether an engine is to have samebits' bits, and sets what it needs for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samebits.engines.hooks import Hooks
from samebits.engines.refusals import RefusedError
from samebits.sglang.plugin import enable, plugin, version

__all__ = ["register"]

TARGET = "samebits"
PAGE = 16
"""Slots of a page. The kernels take any number; a prefix is shared in whole pages."""

_watching: list[Hooks] = []


def register() -> None:
    """See :func:`samebits.sglang.register`. Engines that do not ask for samebits get SGLang as it is.

    SGLang logs what a plug-in raises, and serves without it. So an error here ends the process.
    """
    try:
        _watch()
        if plugin.wanted():
            enable()
    except Exception as error:
        if not plugin.wanted():
            raise
        raise SystemExit(f"{type(error).__name__}: {error}") from error


def _watch() -> None:
    if _watching:
        return
    from sglang.srt import server_args

    hooks = Hooks(f"samebits.sglang: SGLang {version()}")
    own = server_args.ServerArgs.__post_init__
    hooks.replace(server_args.ServerArgs, "__post_init__", _post_init(own), "self")
    hooks.expect(server_args, "RL_ON_POLICY_TARGET_CHOICES")
    server_args.add_rl_on_policy_target_choices([TARGET])
    hooks.on_undo(lambda: server_args.RL_ON_POLICY_TARGET_CHOICES.remove(TARGET))
    _watching.append(hooks)


def _post_init(own: Callable[..., None]) -> Callable[..., None]:
    def post_init(self: Any) -> None:
        if self.rl_on_policy_target == TARGET:
            enable()
            # For SGLang a target has float32 norms, and bfloat16 elsewhere: the bits of another trainer.
            self.rl_on_policy_target = None
        if plugin.hooks is None:
            own(self)
            return
        from samebits.sglang.covered import check_arguments

        check_arguments(self)
        _set_arguments(self)
        own(self)
        check_arguments(self)

    post_init.__wrapped__ = own  # type: ignore[attr-defined]
    return post_init


def _set_arguments(args: Any) -> None:
    """Set what is open, and refuse what contradicts."""
    from samebits.sglang.attention import NAME

    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        asked = getattr(args, name)
        if asked not in (None, NAME):
            raise RefusedError(f"{name}={asked!r}", "its sums have another order", "do not set it")
    args.attention_backend = NAME
    if args.page_size is None:
        args.page_size = PAGE
    if args.moe_runner_backend == "auto":
        args.moe_runner_backend = "triton"  # which leaves weights of experts as they are
    args.disable_shared_experts_fusion = True  # they are layers of their own
    args.disable_hybrid_swa_memory = True  # layers with a window keep all keys, in pages of one cache
    asked = args.cuda_graph_backend_prefill
    if asked not in (None, "disabled"):
        raise RefusedError(
            f"cuda_graph_backend_prefill={asked!r}", "only decoding is covered in graphs", "do not set it"
        )
    args.disable_prefill_cuda_graph = True

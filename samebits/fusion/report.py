"""What :func:`samebits.fuse` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from samebits.fusion.probe import name_of

__all__ = ["Fused", "Fusion", "Left", "Swap"]

Swap = tuple[nn.Module, type[nn.Module], type[nn.Module]]
"""A module, its own class, and the fused one."""


@dataclass(frozen=True)
class Fused:
    """What is fused in modules of one class.

    Attributes:
        kind: the class.
        what: ``"RMS norm"``, ``"gated RMS norm"``, ``"residual sum and RMS norm"``, ``"gated activation"``,
            ``"rotary positions"``, ``"RMS norms of heads and rotary positions"``, ``"loss from logits"``, or
            ``"loss from hidden states"``.
        names: the modules' names.
        dtypes: those in which it is proven to have the bits of the modules' own code.
    """

    kind: str
    what: str
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Left:
    """What was recognised in modules of one class, and left as it is.

    Attributes:
        kind: the class.
        what: as in :class:`Fused`.
        names: the modules' names.
        reason: why it was left, and what to do if something can be done.
    """

    kind: str
    what: str
    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Fusion:
    """The result of :func:`fuse`. Its ``str`` is a summary.

    Attributes:
        fused: what is fused.
        left: what was recognised and left as it is.
        device: the kind of device on which this was proven. Elsewhere the modules run their own code.
    """

    fused: tuple[Fused, ...]
    left: tuple[Left, ...]
    device: str
    _undo: list[Swap] = field(default_factory=list, repr=False, compare=False)

    def undo(self) -> None:
        """Give all modules their own classes again.

        Raises:
            RuntimeError: a module's class was changed since, as by ``fully_shard``. Nothing is undone then.
        """
        changed = {
            type(m).__name__
            for m, _, fused in {id(s[0]): s for s in self._undo}.values()
            if type(m) is not fused
        }
        if changed:
            raise RuntimeError(
                f"samebits.Fusion.undo: expected modules of the classes that samebits.fuse gave them, got"
                f" {', '.join(sorted(changed))}: undo what was done since first"
            )
        while self._undo:
            module, own, _ = self._undo.pop()
            module.__class__ = own

    def __str__(self) -> str:
        lines = [f"proven on {self.device}:"] if self.fused else ["nothing was fused"]
        for f in self.fused:
            lines.append(f"  {f.what}: {len(f.names)} {f.kind} ({', '.join(map(name_of, f.dtypes))})")
        if self.left:
            lines.append("left as they are:")
        lines += [f"  {u.what}: {len(u.names)} {u.kind}: {u.reason}" for u in self.left]
        return "\n".join(lines)

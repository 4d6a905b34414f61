"""What may change the bits of a result, as frozen data.

A :class:`Contract` names every rule that decides an output bit, and nothing else: it never sees the number
of rows, the batch, the memory layout, or how large or busy a GPU is. Whatever is free to look at those (tile
sizes, pipeline depth, instruction) is a backend's schedule, which may never change a bit.
``docs/contract.md`` spells the same rules out for a reader who wants to re-implement them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import local
from typing import Literal, cast

import torch

__all__ = ["AMPERE", "FMA", "HOPPER", "TENSOR_CORE", "Contract", "MmaModel", "use_mma_model"]

GROUP = 16
"""Terms in one step of a tensor-core chain; a sequence of tokens always starts a new group of these."""


@dataclass(frozen=True, slots=True)
class MmaModel:
    """The fused dot-product-add of one family of tensor cores.

    One fused sum takes ``group`` products and the f32 accumulator. Every term is truncated toward zero to a
    multiple of ``2**(emax - fraction_bits)``, where ``emax`` is the largest exponent of all terms, the
    truncated terms are added exactly, and the sum is rounded toward zero to f32.

    Attributes:
        name: what the family is called.
        group: products in one fused sum. A group of 16 consecutive k takes ``16 // group`` sums in turn.
        fraction_bits: fraction bits kept below ``emax``.
        zero_exponent: the exponent that a term equal to zero takes part with in ``emax``.

    Source: Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004), and vectors
    recorded for this project on an H200.
    """

    name: str
    group: int
    fraction_bits: int
    zero_exponent: int
    key: str = field(init=False, repr=False, compare=False)
    """All the data above as one string, the form in which it passes through ``torch.library``."""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isidentifier()):
            raise ValueError(f"samebits.MmaModel: name: expected an identifier, got {self.name!r}")
        if type(self.group) is not int or self.group not in (4, 8, 16):
            raise ValueError(f"samebits.MmaModel: group: expected 4, 8 or 16, got {self.group!r}")
        # The upper bound keeps a sum of 17 terms, each below 2**(fraction_bits + 2), exact in float64.
        if type(self.fraction_bits) is not int or not 23 <= self.fraction_bits <= 46:
            raise ValueError(
                f"samebits.MmaModel: fraction_bits: expected an int in [23, 46], got {self.fraction_bits!r}"
            )
        if type(self.zero_exponent) is not int or not -252 <= self.zero_exponent <= -126:
            raise ValueError(
                "samebits.MmaModel: zero_exponent: expected an int in [-252, -126],"
                f" got {self.zero_exponent!r}"
            )
        key = f"{self.name}:{self.group}:{self.fraction_bits}:{self.zero_exponent}"
        object.__setattr__(self, "key", key)


AMPERE = MmaModel("AMPERE", group=8, fraction_bits=24, zero_exponent=-132)
"""Tensor cores of sm_80, sm_86 and sm_89 (A100, A2, L40S, Ada)."""

HOPPER = MmaModel("HOPPER", group=16, fraction_bits=25, zero_exponent=-133)
"""Tensor cores of sm_90, sm_100, sm_103 and sm_120 (H100, H200, B200)."""


FAMILIES: dict[tuple[int, int], MmaModel] = {
    (8, 0): AMPERE,
    (8, 6): AMPERE,
    (8, 9): AMPERE,
    (9, 0): HOPPER,
    (10, 0): HOPPER,
    (10, 3): HOPPER,
    (12, 0): HOPPER,
}
"""The tensor cores of NVIDIA's GPUs, by compute capability."""


@dataclass(frozen=True, slots=True)
class Contract:
    """Everything that may change an output bit of a product.

    Every output element is one chain over ascending k with one f32 accumulator, which starts from +0 or from
    the f32 value carried in. K is never split. Then bias, if any, is added in f32 with one rounding to
    nearest even, and the result is rounded to nearest even once to the output dtype. Every NaN result is the
    canonical one: 0x7FFFFFFF in f32, 0x7FFF in bf16 and f16.

    Attributes:
        name: what the contract is called.
        step: how one step joins its terms to the accumulator. ``"mma"``: 16 products at a time, as the tensor
            core sums them (see :class:`MmaModel`). ``"fma"``: one IEEE 754 f32 fused multiply-add per k,
            rounding to nearest even, subnormals kept.
        mma: for ``"mma"``, the tensor-core family whose bits these are. ``None`` leaves it to the device: a
            GPU follows its own family, CPU tensors follow :func:`use_mma_model`.
    """

    name: str
    step: Literal["mma", "fma"]
    mma: MmaModel | None = None
    key: str = field(init=False, repr=False, compare=False)
    """All the data above as one string; :func:`contract_from_key` reads it back."""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isidentifier()):
            raise ValueError(f"samebits.Contract: name: expected an identifier, got {self.name!r}")
        if self.step not in ("mma", "fma"):
            raise ValueError(f'samebits.Contract: step: expected "mma" or "fma", got {self.step!r}')
        if self.mma is not None and not isinstance(self.mma, MmaModel):
            raise TypeError(
                f"samebits.Contract: mma: expected an MmaModel or None, got {type(self.mma).__name__}"
            )
        if self.step == "fma" and self.mma is not None:
            raise ValueError(f'samebits.Contract: mma: step "fma" takes no MmaModel, got {self.mma.name}')
        key = f"{self.name}:{self.step}" if self.mma is None else f"{self.name}:{self.step}:{self.mma.key}"
        object.__setattr__(self, "key", key)

    @property
    def input_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that the operands may have."""
        half = (torch.bfloat16, torch.float16)
        return half if self.step == "mma" else (torch.float32, *half)

    def on(self, mma: MmaModel) -> Contract:
        """This contract, bound to the tensor-core family ``mma``."""
        if not isinstance(mma, MmaModel):
            raise TypeError(f"samebits.Contract.on: mma: expected an MmaModel, got {type(mma).__name__}")
        return dataclasses.replace(self, mma=mma)

    def digest(self) -> str:
        """A SHA-256 over everything that may change an output bit, names excluded: 16 hex digits.

        Contracts of one digest give the same bits, except that ``mma=None`` leaves a choice to the device: to
        name bits, take the digest of ``TENSOR_CORE.on(...)``. Stable over processes, machines and Python
        versions.
        """
        mma = self.mma and [self.mma.group, self.mma.fraction_bits, self.mma.zero_exponent]
        text = json.dumps([_REVISION, self.step, mma])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        if self.mma is None:
            return self.name
        m = self.mma
        data = f"group {m.group}, {m.fraction_bits} fraction bits, zero exponent {m.zero_exponent}"
        return f"{self.name}[{m.name}: {data}]"


# Raised when docs/contract.md changes in a way that the fields above do not show.
_REVISION = 1


@functools.lru_cache(maxsize=64)
def contract_from_key(key: str) -> Contract:
    """The contract whose :attr:`Contract.key` is ``key``."""
    name, step, *model = key.split(":")
    mma = MmaModel(model[0], *map(int, model[1:])) if model else None
    return Contract(name, cast(Literal["mma", "fma"], step), mma)


TENSOR_CORE = Contract("TENSOR_CORE", step="mma")
"""The tensor core's own chain: the default for bf16 and f16."""

FMA = Contract("FMA", step="fma")
"""A chain of IEEE fused multiply-adds: the default for f32. The same bits on any IEEE machine."""


class _CpuFamily(local):
    # An attribute of a thread-local object, because torch.compile reads and guards that (no ContextVar).
    def __init__(self) -> None:
        self.mma = HOPPER


_cpu_family = _CpuFamily()


def resolve(contract: Contract | None, dtype: torch.dtype, device_type: str) -> str:
    """The key of the contract that an operation on ``dtype`` tensors of ``device_type`` follows."""
    if contract is None:
        contract = FMA if dtype == torch.float32 else TENSOR_CORE
    if contract.step == "mma" and contract.mma is None and device_type == "cpu":
        return f"{contract.key}:{_cpu_family.mma.key}"
    return contract.key


def use_mma_model(model: MmaModel) -> AbstractContextManager[None]:
    """Choose the tensor-core family whose bits CPU tensors get under ``TENSOR_CORE``, for this thread.

    The choice is read when an operation runs forward; its backward follows the same family. Activation
    checkpointing runs the forward again inside the backward, so enter the context around that too, or pass
    ``contract=samebits.TENSOR_CORE.on(samebits.AMPERE)`` instead. Do not ``await`` inside: the choice
    belongs to the thread. GPU tensors always follow the GPU they are on.

    Args:
        model: ``samebits.HOPPER`` (the default outside this context), ``samebits.AMPERE``, or a model of
            your own.

    Raises:
        TypeError: ``model`` is none.
    """
    if not isinstance(model, MmaModel):
        raise TypeError(f"samebits.use_mma_model: model: expected an MmaModel, got {type(model).__name__}")
    return _on_cpu(model)


@contextmanager
def _on_cpu(model: MmaModel) -> Iterator[None]:
    before = _cpu_family.mma
    _cpu_family.mma = model
    try:
        yield
    finally:
        _cpu_family.mma = before

"""Contracts: the rules that decide the bits of a result, as frozen data.

A :class:`Contract` names every rule that decides an output bit, and nothing else. It never depends on the
number of rows, the batch, the memory layout, or the size and load of a GPU. A backend's schedule may depend
on those (tile sizes, pipeline depth, instruction), and may never change a bit. ``docs/contract.md`` has the
same rules for a reader who wants to re-implement them.
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
from typing import Any, Literal, cast

import torch

from samebits.contexts import Context
from samebits.functions import CONSTANTS, EX2_SM90

__all__ = [
    "AMPERE",
    "FMA",
    "FP8",
    "HOPPER",
    "HOPPER_FP8",
    "TENSOR_CORE",
    "Contract",
    "Exp2Model",
    "MmaModel",
    "use_mma_model",
]

GROUP = 16
"""Terms in one step of a tensor-core chain. A sequence of tokens always starts a new group."""

SCALE_BLOCK = 128
"""Terms of a product in FP8 that one scale of each operand multiplies."""


@dataclass(frozen=True, slots=True)
class Exp2Model:
    """The function ``2**x`` of float32 that attention takes.

    Attributes:
        name: the model's name.
        data: its constants. ``docs/contract.md``, "exp2", says what they do.
    """

    name: str
    data: tuple[Any, ...] = field(repr=False)


POLYNOMIAL = Exp2Model("POLYNOMIAL", tuple(CONSTANTS[f"P{i}"].hex() for i in range(1, 7)))
"""Seven fused multiply-adds: for ``FMA``, and for families whose instruction has not been recorded."""

INTERPOLATION = Exp2Model("INTERPOLATION", EX2_SM90)
"""The instruction ``ex2.approx.ftz.f32`` of sm_90, in closed form."""

_EXP2_MODELS = {model.name: model for model in (POLYNOMIAL, INTERPOLATION)}


@dataclass(frozen=True, slots=True)
class MmaModel:
    """The fused dot-product-add of one family of tensor cores.

    One fused sum takes ``group`` products and the f32 accumulator. Every term is truncated toward zero to a
    multiple of ``2**(emax - fraction_bits)``, where ``emax`` is the largest exponent of all terms. The
    truncated terms are added exactly, and the sum is rounded toward zero to ``significant_bits``, as an f32.

    Attributes:
        name: the family's name.
        group: products in one fused sum. A group of 16 consecutive k takes ``16 // group`` sums in turn.
            32 is for operands of 8 bits.
        fraction_bits: fraction bits kept below ``emax``.
        zero_exponent: the exponent of a term equal to zero, for ``emax``.
        exp2: ``2**x`` in the family's attention.
        significant_bits: bits of the significand that a sum is rounded to: 24, all of f32, for operands of 16
            bits.

    Source: Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004), and vectors
    recorded for this project on an H200.
    """

    name: str
    group: int
    fraction_bits: int
    zero_exponent: int
    exp2: Exp2Model = POLYNOMIAL
    significant_bits: int = 24
    key: str = field(init=False, repr=False, compare=False)
    """All the data above as one string, because ``torch.library`` takes strings."""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isidentifier()):
            raise ValueError(f"samebits.MmaModel: name: expected an identifier, got {self.name!r}")
        if type(self.group) is not int or self.group not in (4, 8, 16, 32):
            raise ValueError(f"samebits.MmaModel: group: expected 4, 8, 16 or 32, got {self.group!r}")
        bits = self.significant_bits
        if type(bits) is not int or not 2 <= bits <= 24:
            raise ValueError(f"samebits.MmaModel: significant_bits: expected an int in [2, 24], got {bits!r}")
        # The upper bound keeps a sum of 33 terms, each below 2**(fraction_bits + 2), exact in float64.
        if type(self.fraction_bits) is not int or not bits - 1 <= self.fraction_bits <= 45:
            raise ValueError(
                f"samebits.MmaModel: fraction_bits: expected an int in [{bits - 1}, 45],"
                f" got {self.fraction_bits!r}"
            )
        if type(self.zero_exponent) is not int or not -252 <= self.zero_exponent <= -126:
            raise ValueError(
                "samebits.MmaModel: zero_exponent: expected an int in [-252, -126],"
                f" got {self.zero_exponent!r}"
            )
        if self.exp2 not in _EXP2_MODELS.values():
            raise ValueError(
                f"samebits.MmaModel: exp2: expected one of {', '.join(_EXP2_MODELS)}, got {self.exp2!r}"
            )
        key = f"{self.name}:{self.group}:{self.fraction_bits}:{self.zero_exponent}:{self.exp2.name}:{bits}"
        object.__setattr__(self, "key", key)


AMPERE = MmaModel("AMPERE", group=8, fraction_bits=24, zero_exponent=-132)
"""Tensor cores of sm_80, sm_86 and sm_89 (A100, A2, L40S, Ada)."""

HOPPER = MmaModel("HOPPER", group=16, fraction_bits=25, zero_exponent=-133, exp2=INTERPOLATION)
"""Tensor cores of sm_90, sm_100, sm_103 and sm_120 (H100, H200, B200)."""

HOPPER_FP8 = MmaModel("HOPPER_FP8", group=32, fraction_bits=13, zero_exponent=-133, significant_bits=14)
"""``wgmma`` on e4m3 and e5m2 on sm_90 (H100, H200). ``mma.sync`` computes these otherwise there."""


MOST_SEGMENTS = 64


@dataclass(frozen=True, slots=True)
class Contract:
    """Everything that may change an output bit of a product.

    Every output element is one chain over ascending k with one f32 accumulator. The accumulator starts from
    +0, or from a given f32 value. K is never split, except at the fixed places that :meth:`segmented` names.
    Then the bias, if any, is added in f32 with one rounding to nearest even. The result is rounded once, to
    nearest even, to the output dtype. Every NaN result is the canonical one: 0x7FFFFFFF in f32, 0x7FFF in
    bf16 and f16.

    Attributes:
        name: the contract's name.
        step: how one step adds its terms to the accumulator. ``"mma"``: 16 products at a time, as the tensor
            core sums them (see :class:`MmaModel`). ``"fma"``: one IEEE 754 f32 fused multiply-add per k,
            rounding to nearest even, subnormals kept. ``"scaled"``: blocks of 128 products of 8-bit operands.
            Each block is a chain of its own from +0, 32 products at a time. The accumulator takes its result
            times the product of both scales, by one fused multiply-add.
        mma: for ``"mma"``, the tensor-core family that gives these bits. ``None`` leaves it to the device: a
            GPU follows its own family, CPU tensors follow :func:`use_mma_model`. ``"scaled"`` needs one.
        segments: into how many chains a plain sum is cut, see :meth:`segmented`. 1: it is one chain.
    """

    name: str
    step: Literal["mma", "fma", "scaled"]
    mma: MmaModel | None = None
    segments: int = 1
    key: str = field(init=False, repr=False, compare=False)
    """All the data above as one string; :func:`contract_from_key` reads it back."""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isidentifier()):
            raise ValueError(f"samebits.Contract: name: expected an identifier, got {self.name!r}")
        if self.step not in ("mma", "fma", "scaled"):
            raise ValueError(f'samebits.Contract: step: expected "mma", "fma" or "scaled", got {self.step!r}')
        if self.mma is not None and not isinstance(self.mma, MmaModel):
            raise TypeError(
                f"samebits.Contract: mma: expected an MmaModel or None, got {type(self.mma).__name__}"
            )
        if self.step == "fma" and self.mma is not None:
            raise ValueError(f'samebits.Contract: mma: step "fma" takes no MmaModel, got {self.mma.name}')
        if self.step == "scaled" and (self.mma is None or self.segments != 1):
            raise ValueError('samebits.Contract: step "scaled" takes an MmaModel, and no segments')
        if self.mma is not None and (self.mma.group == 32) != (self.step == "scaled"):
            raise ValueError(
                'samebits.Contract: mma: expected a group of 32 for step "scaled", a smaller one for "mma",'
                f" got {self.mma.name} of {self.mma.group}"
            )
        s = self.segments
        if type(s) is not int or not 1 <= s <= MOST_SEGMENTS or s & (s - 1):
            raise ValueError(
                f"samebits.Contract: segments: expected a power of two from 1 to {MOST_SEGMENTS}, got {s!r}"
            )
        step = self.step if s == 1 else f"{self.step}/{s}"
        key = f"{self.name}:{step}" if self.mma is None else f"{self.name}:{step}:{self.mma.key}"
        object.__setattr__(self, "key", key)

    @property
    def input_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that the operands may have."""
        if self.step == "scaled":
            return torch.float8_e4m3fn, torch.float8_e5m2
        half = (torch.bfloat16, torch.float16)
        return half if self.step == "mma" else (torch.float32, *half)

    @property
    def exp2(self) -> Exp2Model | None:
        """``2**x`` in attention; None leaves it to the device, as ``mma`` does, or there is none."""
        if self.step == "fma":
            return POLYNOMIAL
        return None if self.mma is None or self.step == "scaled" else self.mma.exp2

    def on(self, mma: MmaModel) -> Contract:
        """This contract, bound to the tensor-core family ``mma``."""
        if not isinstance(mma, MmaModel):
            raise TypeError(f"samebits.Contract.on: mma: expected an MmaModel, got {type(mma).__name__}")
        return dataclasses.replace(self, mma=mma)

    def segmented(self, segments: int) -> Contract:
        """This contract with plain sums cut into `segments` chains, which a fixed binary tree adds.

        The K terms of a sum are cut into S = `segments` equal, consecutive parts. Each part is a chain of its
        own, from +0 over ascending k, as if it were the whole sum:

        ``p[s] = chain over k of a[m, k] * b[k, n]``, ``s * K / S <= k < (s + 1) * K / S``

        The S float32 results are added in float32, each sum rounded once, to nearest even. For S = 8:

        ``((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]))``

        Then bias and rounding follow, as without segments.

        Why: tensor parallelism gives every GPU a part of the terms. With 1, 2, 4, … or S GPUs each one owns a
        whole subtree, so the same sums are added in the same order, and all sizes give the same bits.

        What is cut is what tensor parallelism splits: outputs of ``matmul``, ``bmm``, ``linear`` and
        ``grouped_mm`` over k, and gradients of their activations over output columns; the gradient of
        ``hidden`` in ``linear_logp`` over the vocabulary. What is not: sums over tokens (gradients of weights
        and biases, ``addmm_``), the logits in ``linear_logp``, and attention.

        Args:
            segments: a power of two up to 64. 1 is the contract without segments.

        Raises:
            ValueError: `segments` is not one of these. Operations raise it where a sum's number of terms is
                not a multiple of `segments`.
        """
        return dataclasses.replace(self, segments=segments)

    def digest(self) -> str:
        """16 hex digits of a SHA-256 over everything that may change an output bit. Names are excluded.

        Contracts with the same digest give the same bits. With ``mma=None`` the device still has a choice, so
        take the digest of ``TENSOR_CORE.on(...)`` to identify bits. The digest is the same in all processes,
        on all machines and in all Python versions.
        """
        mma = self.mma and [self.mma.group, self.mma.fraction_bits, self.mma.zero_exponent]
        if mma and self.mma and self.mma.significant_bits != 24:
            mma.append(self.mma.significant_bits)
        data = [_REVISION, self.step, mma, self.exp2 and self.exp2.data]
        text = json.dumps(data if self.segments == 1 else [*data, self.segments])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        name = self.name if self.segments == 1 else f"{self.name}.segmented({self.segments})"
        if self.mma is None:
            return name
        m = self.mma
        data = f"group {m.group}, {m.fraction_bits} fraction bits, zero exponent {m.zero_exponent}"
        data += f", exp2 {m.exp2.name}" if self.step == "mma" else f", {m.significant_bits} significant bits"
        return f"{name}[{m.name}: {data}]"


# Incremented when docs/contract.md changes in a way that the fields above do not show.
_REVISION = 4


@functools.lru_cache(maxsize=64)
def contract_from_key(key: str) -> Contract:
    """The contract whose :attr:`Contract.key` is ``key``."""
    name, step, *model = key.split(":")
    mma = None
    if model:
        family, group, fraction_bits, zero_exponent, exp2, bits = model
        numbers = int(group), int(fraction_bits), int(zero_exponent)
        mma = MmaModel(family, *numbers, _EXP2_MODELS[exp2], int(bits))
    step, _, segments = step.partition("/")
    return Contract(name, cast(Literal["mma", "fma", "scaled"], step), mma, int(segments or 1))


@functools.lru_cache(maxsize=64)
def segmented_key(key: str, segments: int) -> str:
    """The key of the contract of `key` with this number of segments."""
    return contract_from_key(key).segmented(segments).key


TENSOR_CORE = Contract("TENSOR_CORE", step="mma")
"""The tensor core's chain: the default for bf16 and f16."""

FMA = Contract("FMA", step="fma")
"""A chain of IEEE fused multiply-adds: the default for f32. It has the same bits on any IEEE machine."""

FP8 = Contract("FP8", step="scaled", mma=HOPPER_FP8)
"""Products of e4m3 and e5m2 with scales, as :func:`samebits.scaled_mm` computes them."""


class _CpuFamily(local):
    # A thread-local object, not a ContextVar, because torch.compile reads and guards its attributes.
    def __init__(self) -> None:
        self.mma = HOPPER


_cpu_family = _CpuFamily()


def resolve(contract: Contract | None, dtype: torch.dtype, device_type: str) -> str:
    """The key of the contract that applies to an operation on ``dtype`` tensors of ``device_type``."""
    if contract is None:
        contract = FMA if dtype == torch.float32 else TENSOR_CORE
    if contract.step == "mma" and contract.mma is None and device_type == "cpu":
        return f"{contract.key}:{_cpu_family.mma.key}"
    return contract.key


class use_mma_model(Context[None]):  # noqa: N801
    """Choose the tensor-core family whose bits CPU tensors get under ``TENSOR_CORE``, for this thread.

    An operation reads the choice in its forward. Its backward follows the same family. Activation
    checkpointing runs the forward again inside the backward, so enter the context around the backward too, or
    pass ``contract=samebits.TENSOR_CORE.on(samebits.AMPERE)`` instead. Do not ``await`` inside, because the
    choice belongs to the thread. GPU tensors always follow the GPU they are on. The context can be kept and
    entered again, and is a decorator.

    Args:
        model: ``samebits.HOPPER`` (the default outside this context), ``samebits.AMPERE``, or a model of
            your own.

    Raises:
        TypeError: ``model`` is not an :class:`MmaModel`.
        ValueError: ``model`` is for operands of 8 bits.
    """

    def __init__(self, model: MmaModel) -> None:
        if not isinstance(model, MmaModel):
            raise TypeError(
                f"samebits.use_mma_model: model: expected an MmaModel, got {type(model).__name__}"
            )
        if model.group == 32:
            raise ValueError(
                f"samebits.use_mma_model: model: expected one for operands of 16 bits, got {model.name}"
            )
        self._model = model

    def _open(self) -> AbstractContextManager[None]:
        return _on_cpu(self._model)


@contextmanager
def _on_cpu(model: MmaModel) -> Iterator[None]:
    before = _cpu_family.mma
    _cpu_family.mma = model
    try:
        yield
    finally:
        _cpu_family.mma = before

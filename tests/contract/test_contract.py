"""Contracts as values, and that the numbers in code, kernels and docs/contract.md are the same."""

from __future__ import annotations

import dataclasses
import pickle
import re

import numpy as np
import pytest
import torch

import samebits
from benchmarks.tables import constants
from samebits import AMPERE, FMA, FP8, HOPPER, TENSOR_CORE, Contract, MmaModel, functions
from samebits.contract import HOPPER_FP8, contract_from_key, resolve
from tests.support import ROOT, naive, naive_attention, naive_fp8
from tests.support.threads import in_threads

DOCUMENT = (ROOT / "docs" / "contract.md").read_text()
CONTRACTS = [TENSOR_CORE, TENSOR_CORE.on(HOPPER), TENSOR_CORE.on(AMPERE), FMA, FP8]
CONTRACTS += [TENSOR_CORE.on(HOPPER).segmented(8), FMA.segmented(8), FMA.segmented(2)]


@pytest.mark.parametrize("model", [AMPERE, HOPPER], ids=lambda m: m.name)
def test_models_are_those_of_the_document(model: MmaModel) -> None:
    row = re.search(rf"\| `{model.name}` \| (\d+) \| (\d+) \| −(\d+) \|", DOCUMENT)
    assert row is not None
    group, fraction_bits, zero = map(int, row.groups())
    assert (model.group, model.fraction_bits, model.zero_exponent) == (group, fraction_bits, -zero)
    assert naive.MODELS[model.name] == (group, fraction_bits, -zero)


def test_the_model_of_fp8_is_that_of_the_document() -> None:
    row = re.search(r"\| `HOPPER_FP8` \| (\d+) \| (\d+) \| −(\d+) \| (\d+) \|", DOCUMENT)
    assert row is not None
    group, fraction_bits, zero, bits = map(int, row.groups())
    m = HOPPER_FP8
    assert (m.group, m.fraction_bits, m.zero_exponent, m.significant_bits) == (
        group,
        fraction_bits,
        -zero,
        bits,
    )
    assert (group, fraction_bits, -zero, bits) == naive_fp8.MODEL


# Digests are written into results, so they may not change unless bits do (then: CHANGELOG, Numerics).
@pytest.mark.parametrize(
    ("contract", "digest"),
    [
        (TENSOR_CORE, "d1018e3c46aaafde"),
        (TENSOR_CORE.on(HOPPER), "90be31343eee710b"),
        (TENSOR_CORE.on(AMPERE), "e09135fbfc01e864"),
        (FMA, "0656f6d1bf4b9922"),
        (FMA.segmented(1), "0656f6d1bf4b9922"),
        (FMA.segmented(8), "fae600884bc988b3"),
        (FP8, "ba71e73cc6dd3e95"),
    ],
    ids=str,
)
def test_digest_is_stable(contract: Contract, digest: str) -> None:
    assert contract.digest() == digest


def test_digest_ignores_names_and_nothing_else() -> None:
    assert Contract("MINE", "mma").digest() == TENSOR_CORE.digest()
    renamed = dataclasses.replace(HOPPER, name="H")
    assert TENSOR_CORE.on(renamed).digest() == TENSOR_CORE.on(HOPPER).digest()
    others = [
        dataclasses.replace(HOPPER, group=8),
        dataclasses.replace(HOPPER, fraction_bits=24),
        dataclasses.replace(HOPPER, zero_exponent=-132),
        dataclasses.replace(HOPPER, exp2=AMPERE.exp2),
        dataclasses.replace(HOPPER, significant_bits=14),
    ]
    digests = {c.digest() for c in [*CONTRACTS, *map(TENSOR_CORE.on, others)]}
    assert len(digests) == len(CONTRACTS) + len(others)


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_key_and_pickle_round_trip(contract: Contract) -> None:
    assert contract_from_key(contract.key) == contract
    assert pickle.loads(pickle.dumps(contract)) == contract


def test_frozen_and_readable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TENSOR_CORE.step = "fma"  # type: ignore[misc]
    assert str(FMA) == "FMA"
    assert str(FMA.segmented(8)) == "FMA.segmented(8)"
    assert str(TENSOR_CORE.on(AMPERE)) == (
        "TENSOR_CORE[AMPERE: group 8, 24 fraction bits, zero exponent -132, exp2 POLYNOMIAL]"
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": "two words"}, "name: expected an identifier"),
        ({"group": 12}, "group: expected 4, 8, 16 or 32, got 12"),
        ({"group": True}, "group"),
        ({"fraction_bits": 22}, "fraction_bits: expected an int in"),
        ({"fraction_bits": 25.0}, "fraction_bits"),
        ({"significant_bits": 25}, "significant_bits: expected an int in"),
        ({"zero_exponent": 0}, "zero_exponent: expected an int in"),
        ({"exp2": "POLYNOMIAL"}, "exp2: expected one of POLYNOMIAL, INTERPOLATION, got 'POLYNOMIAL'"),
    ],
)
def test_mma_model_validates_itself(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(HOPPER, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        (("", "mma"), ValueError, "name"),
        (("X", "mfma"), ValueError, 'step: expected "mma", "fma" or "scaled"'),
        (("X", "fma", HOPPER), ValueError, "takes no MmaModel"),
        (("X", "scaled"), ValueError, "takes an MmaModel, and no segments"),
        (("X", "scaled", HOPPER_FP8, 2), ValueError, "takes an MmaModel, and no segments"),
        (("X", "scaled", HOPPER), ValueError, "mma: expected a group of 32"),
        (("X", "mma", HOPPER_FP8), ValueError, "mma: expected a group of 32"),
        (("X", "mma", "HOPPER"), TypeError, "mma: expected an MmaModel"),
        (("X", "fma", None, 3), ValueError, "segments: expected a power of two from 1 to 64, got 3"),
        (("X", "fma", None, 0), ValueError, "segments"),
        (("X", "fma", None, 128), ValueError, "segments"),
        (("X", "fma", None, True), ValueError, "segments"),
    ],
)
def test_contract_validates_itself(args: tuple[object, ...], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Contract(*args)  # type: ignore[arg-type]


def test_defaults_by_dtype_and_device() -> None:
    assert resolve(None, torch.float32, "cpu") == FMA.key
    assert resolve(None, torch.bfloat16, "cpu") == TENSOR_CORE.on(HOPPER).key
    assert resolve(None, torch.float16, "cuda") == TENSOR_CORE.key
    assert resolve(FMA, torch.float16, "cpu") == FMA.key
    segmented = TENSOR_CORE.segmented(8)
    assert resolve(segmented, torch.float16, "cpu") == segmented.on(HOPPER).key
    assert resolve(segmented, torch.float16, "cuda") == segmented.key


def test_use_mma_model_nests_restores_and_stays_in_its_thread() -> None:
    def current() -> str:
        return resolve(None, torch.bfloat16, "cpu")

    with samebits.use_mma_model(AMPERE):
        seen = in_threads(current)
        with samebits.use_mma_model(HOPPER):
            assert current() == TENSOR_CORE.on(HOPPER).key
        assert current() == TENSOR_CORE.on(AMPERE).key
        with pytest.raises(RuntimeError, match="inside"), samebits.use_mma_model(HOPPER):
            raise RuntimeError("inside")
        assert current() == TENSOR_CORE.on(AMPERE).key
    assert current() == TENSOR_CORE.on(HOPPER).key
    assert seen == [TENSOR_CORE.on(HOPPER).key]
    with pytest.raises(TypeError, match="expected an MmaModel, got str"), samebits.use_mma_model("AMPERE"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="expected one for operands of 16 bits, got HOPPER_FP8"):
        samebits.use_mma_model(HOPPER_FP8)
    a = torch.ones(2, 2, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="contract FP8 takes float8_e4m3fn or float8_e5m2"):
        samebits.matmul(a, a, contract=FP8)


def test_explicit_model_wins_over_the_context() -> None:
    a = torch.randn(8, 256).bfloat16()
    explicit = samebits.matmul(a, a.mT, out_dtype=torch.float32, contract=TENSOR_CORE.on(HOPPER))
    with samebits.use_mma_model(AMPERE):
        inside = samebits.matmul(a, a.mT, out_dtype=torch.float32, contract=TENSOR_CORE.on(HOPPER))
        ampere = samebits.matmul(a, a.mT, out_dtype=torch.float32)
    assert torch.equal(explicit, inside)
    assert not torch.equal(explicit, ampere)


def test_the_interpolation_of_exp2_is_that_of_the_document() -> None:
    *columns, constant = functions.EX2_SM90
    assert list(zip(*columns, strict=True)) == naive_attention.NUMBERS
    assert f"C0[g] · 2^13 + {constant} + C1[g]" in DOCUMENT
    for model in (AMPERE, HOPPER):
        assert naive_attention.EXP2[model.name] == model.exp2.name
        assert re.search(rf"\| `{model.name}` \|.*\| `{model.exp2.name}` \|", DOCUMENT)


def test_constants_are_the_same_everywhere() -> None:
    header = constants.HEADER.read_text()
    assert header == constants.text()
    in_header = {
        name: float.fromhex(value)
        for name, value in re.findall(r"constexpr float (\w+) = (-?0x[\w.+-]+)f;", header)
    }
    assert in_header == functions.CONSTANTS
    for name in ("VOCAB_BLOCK", "CHAINS"):
        assert f"constexpr int {name} = {getattr(functions, name)};" in header
    in_page = {
        name: float.fromhex(value)
        for names, value in re.findall(r"\| ([A-Z][A-Z0-9_, ]*) \| `(-?0x[^`]+)`", DOCUMENT)
        for name in names.split(", ")
    }
    assert in_page == functions.CONSTANTS
    for value in functions.CONSTANTS.values():
        assert float(np.float32(value)) == value

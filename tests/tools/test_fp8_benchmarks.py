"""Benchmarks of FP8's bits and errors, in small on a CPU, and their tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from benchmarks import fp8_accuracy, fp8_invariance
from benchmarks.record import environment
from benchmarks.tables.products import gpu_fp8_accuracy
from benchmarks.tables.proofs import gpu_fp8_invariance

MADE = {"environment": environment("c0ffee") | {"gpu": "A GPU"}}


def test_every_way_to_a_product_has_its_bits() -> None:
    setups = fp8_invariance.invariance(fp8_invariance.SMALL_SETUPS, fp8_invariance.SMALL, "cpu")
    ways = [way for s in setups for way in s["ways"]]
    assert {way["differing"] for way in ways} == {0}
    assert min(way["values"] for way in ways) > 0
    count = Counter(way["way"] for way in ways)
    assert count["second implementation, whole"] == count["second implementation, a part"] == 1
    assert {"rows alone", "batches of 7", "beside NaN and infinite scales"} <= count.keys()
    assert {"layers, padded with gradients", "quantized on the CPU"} <= count.keys()
    compared = sum(way["values"] for way in ways)
    said = gpu_fp8_invariance(MADE | {"setups": setups, "compared": compared, "differing": 0, "seconds": 2.0})
    assert f"{compared:,} values of 2 products of up to 40 rows, in 2 s: 0 differ." in said
    assert "| rows alone |" in said


def test_products_that_depend_on_the_batch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By every way that changes the batch, but not where all of it moves."""
    own = samebits.scaled_mm

    def by_the_largest(a: Tensor, b: Tensor, scale_a: Tensor, *others: Any, **options: Any) -> Tensor:
        largest = scale_a.nan_to_num(0, 0, 0).max()
        return own(a, b, scale_a / largest, *others, **options) * largest

    monkeypatch.setattr(samebits, "scaled_mm", by_the_largest)
    (setup,) = fp8_invariance.invariance(fp8_invariance.SMALL_SETUPS[1:], fp8_invariance.SMALL, "cpu")
    wrong = {way["way"] for way in setup["ways"] if way["differing"]}
    assert {"rows alone", "batches of 7", "CPU reference, rows", "second implementation, a part"} <= wrong
    assert not {"at other addresses", "in another order"} & wrong


def test_a_wrong_quantization_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = samebits.quantize

    def by_the_largest(x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        values, scale = own(x, **options)
        return values, scale.max().expand_as(scale).contiguous()

    monkeypatch.setattr(samebits, "quantize", by_the_largest)
    (setup,) = fp8_invariance.invariance(fp8_invariance.SMALL_SETUPS[1:], fp8_invariance.SMALL, "cpu")
    assert "quantized in batches" in {way["way"] for way in setup["ways"] if way["differing"]}


def test_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_accuracy, "M", 24)
    monkeypatch.setattr(fp8_accuracy, "for_pytorch", lambda *x: x)

    def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, *others: Any, output_dtype: torch.dtype) -> Tensor:
        if output_dtype == torch.float32:
            raise RuntimeError("no such output\nbut bfloat16")
        exact = fp8_accuracy.dequantized(a, scale_a) @ fp8_accuracy.dequantized(b.T, others[1]).T
        return exact.to(output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    torch.manual_seed(0)
    cases = [case for kind in fp8_accuracy.KINDS for case in fp8_accuracy.measure(kind, 384, 256, "cpu")]
    assert len(cases) == 6
    for case in cases:
        ours = case["error"]["samebits"]
        assert 0 < ours < (1e-3 if case["out"] == "float32" else 3e-3)
        assert 0.001 < case["of_quantization"] < 0.06
        assert ("without_torch" in case) == (case["out"] == "float32") == ("torch" not in case["error"])
    said = gpu_fp8_accuracy(MADE | {"cases": cases})
    assert "| normal | float32 | 1 |" in said
    assert "| refused |" in said

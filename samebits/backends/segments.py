"""Sums cut into segments: what all backends share. ``docs/contract.md``, "Segments", says which sums."""

from __future__ import annotations

from samebits.contract import contract_from_key

__all__ = ["check_terms", "refuse_start", "segment_bounds"]


def check_terms(contract: str, k: int, what: str = "a, b: inner dimension") -> int:
    """The number of segments under `contract` of a sum of `k` terms.

    Raises:
        ValueError: it does not divide `k`. The message begins with `what`, the size that is `k`.
    """
    segments = contract_from_key(contract).segments
    if k % segments:
        raise ValueError(f"samebits: {what}: expected a multiple of {segments} under {contract}, got {k}")
    return segments


def segment_bounds(k: int, contract: str) -> list[int]:
    """Where the segments of a sum of `k` terms begin, and `k`."""
    segments = check_terms(contract, k)
    return [s * (k // segments) for s in range(segments)] + [k]


def refuse_start(contract: str, accumulate: bool) -> None:
    """Refuse a sum in segments that is to go on from given values: its chains start from +0."""
    if accumulate and contract_from_key(contract).segments > 1:
        raise ValueError(f"samebits: accumulate: expected False under {contract}, whose segments start at +0")

"""Attention's bits and how a sequence is fed: benchmarks/results/<gpu>/attention_invariance.json.

python -m benchmarks attention_invariance [--device cpu] [--commit COMMIT] [--out FILE]

Every query of one prefill is computed again: in chunks, in decoding with and without pages, packed and padded
among other sequences, and over a cache that has dropped keys. So are the gradients, packed and padded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.record import RESULTS, arguments, environment, results, write
from samebits.backends.attention import SEGMENT
from samebits.ops.attention import attention
from samebits.testing import bits

Three = tuple[Tensor, Tensor, Tensor]
Way = tuple[str, list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Setup:
    """A kind of attention. ``window`` is that to the left; -1 is none."""

    head: int
    values: int
    heads: int
    kv_heads: int
    dtype: torch.dtype
    window: int = -1
    softcap: float = 0.0
    sinks: bool = False

    def options(self, device: str) -> dict[str, Any]:
        torch.manual_seed(1)
        sinks = torch.randn(self.heads).to(device) if self.sinks else None
        return {"window": (self.window, 0), "softcap": self.softcap, "sinks": sinks}

    def make(self, tokens: int, device: str) -> Three:
        """q, k and v of a sequence, ``[tokens, heads, size]``."""
        shapes = (self.heads, self.head), (self.kv_heads, self.head), (self.kv_heads, self.values)
        q, k, v = (torch.randn(tokens, *shape, device=device, dtype=self.dtype) for shape in shapes)
        return q, k, v


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    Attributes:
        tokens: of the sequence.
        others: tokens of those beside it.
        chunks: queries of a chunk.
        pages: slots of a page.
        rows: queries decoded by one call; calls go on until `steps` queries are done.
        steps: queries that are decoded, the last ones.
    """

    tokens: int
    others: tuple[int, ...]
    chunks: tuple[int, ...]
    pages: tuple[int, ...]
    rows: tuple[int, ...]
    steps: int


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SETUPS = (
    Setup(128, 128, 32, 8, BF16),
    Setup(64, 64, 32, 8, BF16),
    Setup(128, 128, 32, 8, BF16, window=1023),
    Setup(128, 128, 16, 16, F16, softcap=30.0),
    Setup(64, 64, 64, 8, BF16, window=127, sinks=True),
    Setup(192, 128, 16, 16, BF16),
    Setup(256, 256, 16, 4, BF16),
    Setup(64, 64, 8, 2, F32),
)
SIZES = Sizes(5000, (700, 1, 3333), (4096, 1000, 333, 64), (16, 100, 256), (1, 24, 512), 1536)

SMALL_SETUPS = (
    Setup(16, 16, 2, 1, BF16),
    Setup(16, 32, 2, 2, F32, window=39, softcap=5.0, sinks=True),
)
SMALL = Sizes(150, (33, 1, 171), (100, 7), (16, 9), (1, 5), 12)


def forwards(s: Setup, x: Three, want: Tensor, sizes: Sizes, device: str) -> Iterator[Way]:
    """Other ways to the output ``want[tokens, heads, size]`` of a sequence."""
    q, k, v = x
    options, tokens = s.options(device), sizes.tokens

    def run(*some: Tensor, **more: Any) -> Tensor:
        out = attention(*some, **options | more)
        assert isinstance(out, Tensor)
        return out

    for size in sizes.chunks:
        ends = [*range(size, tokens, size), tokens]
        parts = [
            run(q[None, end - n : end], k[None, :end], v[None, :end])[0]
            for end, n in ((end, end - i * size) for i, end in enumerate(ends))
        ]
        yield f"chunks of {size}", [torch.cat(parts)], [want]

    steps = torch.arange(tokens - min(sizes.steps, tokens), tokens, device=device)
    few = steps[:: max(1, len(steps) // 64)]
    for rows in sizes.rows:
        todo = few if rows == 1 else steps
        found = []
        for at in todo.split(rows):
            cache = (t[None].expand(len(at), *t.shape) for t in (k, v))
            found.append(run(q[at][:, None], *cache, key_length=(at + 1).to(torch.int32))[:, 0])
        yield f"decoding, {rows} at a time", [torch.cat(found)], [want[todo]]
    for page in sizes.pages:
        count = -(-tokens // page)
        places = torch.randperm(count + 3, device=device)[:count]
        pages = []
        for t in (k, v):
            pool = t.new_full((count + 3, page, *t.shape[1:]), float("nan"))
            pool[places] = F.pad(t, (0, 0, 0, 0, 0, count * page - tokens)).unflatten(0, (count, page))
            pages.append(pool)
        found = []
        for at in steps.split(sizes.rows[-1]):
            table = places.to(torch.int32).expand(len(at), -1)
            lengths = (at + 1).to(torch.int32)
            found.append(run(q[at][:, None], *pages, block_table=table, key_length=lengths)[:, 0])
        yield f"decoding from pages of {page}", [torch.cat(found)], [want[steps]]

    if s.window >= 0:
        kept = s.window + sizes.rows[-1]
        found = []
        for end in range(tokens, max(tokens - sizes.steps, kept), -sizes.rows[-1]):
            # A cache that keeps the window. Segments are cut where they would be with all keys.
            first = end - kept
            cache = (F.pad(t[first:end], (0, 0, 0, 0, first % SEGMENT, 0))[None] for t in (k, v))
            found.append(run(q[None, end - sizes.rows[-1] : end], *cache)[0])
        got = torch.cat(found[::-1])
        yield "a cache that drops keys", [got], [want[tokens - len(got) :]]


def among_others(
    s: Setup, x: Three, grad: Tensor, want: list[Tensor], sizes: Sizes, device: str
) -> Iterator[Way]:
    """The output and gradients ``want`` of a sequence, packed and padded among others."""
    options, tokens = s.options(device), sizes.tokens
    others = [s.make(n, device) for n in sizes.others]
    parts = [others[0], x, *others[1:]]
    lengths = [len(p[0]) for p in parts]
    begin = lengths[0]
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    packed = [torch.cat([p[i] for p in parts]) for i in range(3)]
    grads = torch.cat([torch.randn(n, *grad.shape[1:], device=device).to(grad.dtype) for n in lengths])
    here = slice(begin, begin + tokens)
    grads[here] = grad
    given = options | {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    yield "packed", [t[here] for t in gradients(packed, grads, given)], want

    for side in ("left", "right"):
        whole = max(lengths) + 77
        rows: list[list[Tensor]] = [[], [], [], []]
        for n, part in zip(lengths, parts, strict=True):
            room = (whole - n, 0) if side == "left" else (0, whole - n)
            own = grad if part is x else torch.randn_like(grad[:1]).expand(n, *grad.shape[1:])
            for row, t in zip(rows, (*part, own), strict=True):
                row.append(F.pad(t, (0, 0, 0, 0, *room)))
        batch = [torch.stack(row) for row in rows]
        padding = torch.tensor([whole - n for n in lengths], dtype=torch.int32, device=device)
        given = options | {"key_start": padding if side == "left" else None}
        if side == "left":  # what lies in front is not of the sequence
            for i, n in enumerate(lengths):
                for t in batch[1:3]:
                    t[i, : whole - n] = float("nan")
        here = slice(whole - tokens, whole) if side == "left" else slice(0, tokens)
        found = gradients(batch[:3], batch[3], given)
        yield f"padded on the {side}", [t[1, here] for t in found], want


def gradients(x: list[Tensor], grad: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    leaves = [t.detach().requires_grad_() for t in x]
    with torch.enable_grad():
        out = attention(*leaves, **options)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def compare(ways: Iterator[Way]) -> list[dict[str, Any]]:
    """Counts of values, and of those with other bits."""
    found = []
    for name, got, want in ways:
        assert [t.shape for t in got] == [t.shape for t in want], name
        differing = sum(int((bits(a) != bits(b)).sum()) for a, b in zip(got, want, strict=True))
        found.append({"way": name, "values": sum(t.numel() for t in got), "differing": differing})
    return found


@torch.no_grad()
def invariance(setups: tuple[Setup, ...], sizes: Sizes, device: str) -> list[dict[str, Any]]:
    """All setups, and the ways of each."""
    found = []
    for s in setups:
        torch.manual_seed(0)
        x = s.make(sizes.tokens, device)
        grad = torch.randn(sizes.tokens, s.heads, s.values, device=device, dtype=s.dtype)
        out, *grads = (t[0] for t in gradients([t[None] for t in x], grad[None], s.options(device)))
        ways = compare(forwards(s, x, out, sizes, device))
        ways += compare(among_others(s, x, grad, [out, *grads], sizes, device))
        found.append(asdict(s) | {"dtype": str(s.dtype).removeprefix("torch."), "ways": ways})
    return found


def run(name: str, description: str | None, setups: Callable[[bool, str], list[dict[str, Any]]]) -> None:
    """Compute the setups, which may be small, on a device; write the counts to ``<name>.json``.

    Exits with 1 if any bits differ.
    """
    parser = arguments(description)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny sizes")
    options = parser.parse_args()
    record = environment(options.commit)
    begin = time.perf_counter()
    small = options.device == "cpu"
    found = setups(small, options.device)
    ways = [way for s in found for way in s["ways"]]
    data = {
        "environment": record,
        "seconds": round(time.perf_counter() - begin, 1),
        "compared": sum(way["values"] for way in ways),
        "differing": sum(way["differing"] for way in ways),
        "setups": found,
    }
    for s in found:
        for way in s["ways"]:
            if way["differing"]:
                print(f"{way['differing']:,} of {way['values']:,} differ: {way['way']}, {s}")
    print(f"{data['compared']:,} values, {data['differing']:,} differ, {data['seconds']} s")
    file = f"{name}.json"
    out = options.out or RESULTS / "cpu" / file if small else results(options.out, file)
    if options.out or not small:
        write(out, data)
    sys.exit(bool(data["differing"]))


def main() -> None:
    def setups(small: bool, device: str) -> list[dict[str, Any]]:
        return invariance(SMALL_SETUPS if small else SETUPS, SMALL if small else SIZES, device)

    run("attention_invariance", __doc__, setups)

"""Delta rules and linear attention: a second implementation, rows in any company, states, float64, errors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import samebits
from samebits import FMA, TENSOR_CORE, RecurrentState
from samebits.backends.cuda import delta as on_cuda
from samebits.backends.delta import layout
from samebits.contract import HOPPER
from samebits.ops import _delta
from samebits.testing import assert_same_bits
from tests.support.devices import case
from tests.support.fake_gpu import fake_gpu
from tests.support.naive_delta import Naive

OPERATIONS = ("gated_delta_rule", "kda", "lightning_attention")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE = float(torch.tensor(0.6))


def operands(
    operation: str,
    dtype: torch.dtype,
    batch: int = 2,
    tokens: int = 70,
    *,
    heads: int = 2,
    key_heads: int = 1,
    sizes: tuple[int, int] = (16, 8),
    seed: int = 0,
) -> dict[str, Tensor]:
    r = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=r)

    K, V = sizes
    q, k = (torch.nn.functional.normalize(normal(batch, tokens, key_heads, K), dim=-1) for _ in range(2))
    given = {"q": q.to(dtype), "k": k.to(dtype), "v": normal(batch, tokens, heads, V).to(dtype)}
    if operation == "ssd":
        given["dt"] = torch.rand(batch, tokens, heads, generator=r)
        return given | {"A": -torch.rand(heads, generator=r), "D": normal(heads, V)}
    channels = (K,) if operation == "kda" else ()
    given["g"] = -torch.rand(batch, tokens, heads, *channels, generator=r) * 0.4
    if operation != "lightning_attention":
        given["beta"] = torch.rand(batch, tokens, heads, generator=r)
    return given


def call(operation: str, given: dict[str, Tensor], **options: Any) -> tuple[Tensor, RecurrentState]:
    found: tuple[Tensor, RecurrentState] = getattr(samebits, operation)(**given, **options)
    return found


def part(given: dict[str, Tensor], rows: Any = slice(None), tokens: Any = slice(None)) -> dict[str, Tensor]:
    return {name: t[rows][:, tokens] for name, t in given.items()}


def go_on(
    operation: str, given: dict[str, Tensor], begin: Tensor | RecurrentState
) -> tuple[Tensor, RecurrentState]:
    if operation != "ssd":
        return call(operation, given, initial_state=begin, output_final_state=True, scale=SCALE)
    q, k, v, dt, A, D = given.values()
    begin = begin.mT if isinstance(begin, Tensor) else begin
    found: Any = samebits.ssd(v, dt, A, k, q, D=D, initial_states=begin, return_final_states=True)
    return found


@pytest.mark.parametrize("cut", [0, 21])
@pytest.mark.parametrize("operation", [*OPERATIONS, "ssd"])
@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "f32"), (torch.bfloat16, "bf16")])
def test_second_implementation(operation: str, dtype: torch.dtype, name: str, cut: int) -> None:
    """Of two heads that share a key, in a call that goes on after `cut` tokens. No chunk but one is full."""
    r = torch.Generator().manual_seed(1)
    is_ssd = operation == "ssd"
    given = operands(operation, dtype, 1, 67, sizes=(3, 2))
    initial, of_final = (torch.randn(1, 2, 3, 2, generator=r) for _ in range(2))
    seeds = torch.randn(1, 67 - cut, 2, 2, generator=r).to(dtype)

    def of_tokens(start: int, stop: int) -> dict[str, Tensor]:
        return {n: t if n in ("A", "D") else t[:, start:stop] for n, t in given.items()}

    leaves = {n: t.clone().requires_grad_() for n, t in of_tokens(cut, 67).items()}
    if cut:
        begin: Tensor | RecurrentState = go_on(operation, of_tokens(0, cut), initial)[1]
    else:
        begin = leaves["initial"] = initial.clone().requires_grad_()
    out, state = go_on(operation, {n: leaves[n] for n in given}, begin)
    of_matrix = of_final.mT if is_ssd else of_final
    got = torch.autograd.grad([out, state.matrix], [*leaves.values()], [seeds, of_matrix])

    g = given["dt"] * given["A"] if is_ssd else given["g"]
    q, k = (given[n][0, :, 0].tolist() for n in "qk")
    heads = []
    for h in range(2):
        beta, weights = (given[n][0, :, h].tolist() if n in given else None for n in ("beta", "dt"))
        naive = Naive(
            *(q, k, given["v"][0, :, h].tolist(), g[0, :, h].reshape(67, -1).tolist(), beta),
            initial[0, h].tolist(),
            1.0 if is_ssd else SCALE,
            "FMA" if name == "f32" else "HOPPER",
            name,
            weights,
            given["D"][h].tolist() if is_ssd else None,
        )
        results = torch.tensor([x for c in naive.chunks for x in c.o])
        assert_same_bits(out[0, :, h], results[cut:].to(dtype))
        assert_same_bits((state.matrix.mT if is_ssd else state.matrix)[0, h], torch.tensor(naive.final))
        heads.append(naive.backward(seeds[0, :, h].tolist(), of_final[0, h].tolist(), cut))

    want = {
        n: torch.stack([torch.tensor(of[n]) for of in heads], 0 if n in ("initial", "skip") else 1)
        for n in heads[0]
    }
    want |= {n: want[n][:, 0] + want[n][:, 1] for n in "qk"}
    if is_ssd:
        steps, dg = given["dt"][0, cut:], want["g"][..., 0]
        want["dt"] = want["weights"] + given["A"] * dg
        want["A"] = sum((steps * dg).unbind(), torch.zeros(2))
        want["D"] = want["skip"]
    for (n, leaf), have in zip(leaves.items(), got, strict=True):
        assert_same_bits(have, want[n].reshape(leaf.shape).to(leaf.dtype), n)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_cut_gives_the_bits_of_one_prefill(operation: str, dtype: torch.dtype) -> None:
    given = operands(operation, dtype, tokens=140)
    whole, final = call(operation, given, output_final_state=True)
    state = None
    pieces = []
    for start, stop in ((0, 7), (7, 63), (63, 64), (64, 65), (65, 66), (66, 128), (128, 140)):
        o, state = call(
            operation, part(given, tokens=slice(start, stop)), initial_state=state, output_final_state=True
        )
        pieces.append(o)
    assert_same_bits(torch.cat(pieces, 1), whole)
    assert_same_bits(state.matrix, final.matrix)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_bits_in_any_company(operation: str, dtype: torch.dtype) -> None:
    """Alone, in a batch beside NaN, packed, with padding on either side: results and gradients."""
    lengths = (70, 33, 65)
    rows = [operands(operation, dtype, 1, n, seed=n) for n in lengths]
    longest = max(lengths) + 5
    seeds = [torch.randn(1, n, 2, 8, generator=torch.Generator().manual_seed(n)).to(dtype) for n in lengths]

    def run(given: dict[str, Tensor], seed: Tensor, **options: Any) -> list[Tensor]:
        leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
        out, state = call(operation, leaves, output_final_state=True, **options)
        gradients = torch.autograd.grad(out, [*leaves.values()], seed)
        return [out.detach(), *gradients, state.matrix.detach()]

    def padded(t: Tensor, left: int) -> Tensor:
        out = torch.full((1, longest, *t.shape[2:]), math.nan, dtype=t.dtype)
        out[:, left : left + t.shape[1]] = t
        return out

    alone = [run(x, s) for x, s in zip(rows, seeds, strict=True)]
    start = torch.tensor([3, longest - 33, 0])
    batch = {
        name: torch.cat([padded(x[name], a) for x, a in zip(rows, start.tolist(), strict=True)])
        for name in rows[0]
    }
    seed = torch.cat([padded(s, a) for s, a in zip(seeds, start.tolist(), strict=True)])
    length = start + torch.tensor(lengths)
    together = run(batch, seed, key_start=start, key_length=length)
    packed = run(
        {name: torch.cat([x[name] for x in rows], 1) for name in rows[0]},
        torch.cat(seeds, 1),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
    )
    ends = torch.tensor(lengths).cumsum(0).tolist()
    for n, want in enumerate(alone):
        a, b = start[n], length[n]
        for i, x in enumerate(want[:-1]):
            assert_same_bits(together[i][n : n + 1, a:b], x)
            assert_same_bits(packed[i][:, ends[n] - lengths[n] : ends[n]], x)
            outside = torch.cat([together[i][n, :a], together[i][n, b:]])
            assert_same_bits(outside, torch.zeros_like(outside))
        assert_same_bits(together[-1][n : n + 1], want[-1])
        assert_same_bits(packed[-1][n : n + 1], want[-1])


@pytest.mark.parametrize(("slot", "inside"), [(2**32 + 5, 70), (-(2**32) + 5, 0)])
def test_slots_beyond_32_bits_are_as_those_beyond_the_tokens(slot: int, inside: int) -> None:
    """Where values are not read, in a traced call as on a GPU."""
    given = operands("gated_delta_rule", torch.float32)
    traced = torch.compile(samebits.gated_delta_rule, backend="eager", fullgraph=True)
    for bound in ("key_start", "key_length"):
        got, _ = traced(**given, **{bound: torch.tensor([9, slot])})
        want, _ = samebits.gated_delta_rule(**given, **{bound: torch.tensor([9, inside])})
        assert_same_bits(got, want, bound)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_states_are_cut_copied_and_reordered(operation: str) -> None:
    given = operands(operation, torch.bfloat16, tokens=75)
    _, state = call(operation, part(given, tokens=slice(0, 70)), output_final_state=True)
    more = part(given, tokens=slice(70, 75))
    want, after = call(operation, more, initial_state=state.clone(), output_final_state=True)
    assert state.count.tolist() == [6, 6]

    junk = operands(operation, torch.bfloat16, tokens=3, seed=9)
    call(operation, junk, initial_state=state, output_final_state=True)
    got, again = call(operation, more, initial_state=state.cut(3), output_final_state=True)
    assert again is state
    assert_same_bits(got, want)
    assert_same_bits(again.matrix, after.matrix)
    with pytest.raises(ValueError, match="cut: expected from 0 to as many tokens as the open chunk"):
        state.cut(12)

    order = torch.tensor([1, 1, 0])
    beams = after[order]
    next_one = operands(operation, torch.bfloat16, tokens=1, seed=5)
    single, _ = call(operation, next_one, initial_state=after)
    assert_same_bits(call(operation, part(next_one, order), initial_state=beams)[0], single[order])
    both = after.repeat_interleave(2)
    assert len(both) == 4
    assert_same_bits(both.data[::2], after.data)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 5e-7), (torch.bfloat16, 4e-3), (torch.float16, 6e-4)]
)
def test_accuracy_against_float64(operation: str, dtype: torch.dtype, error: float) -> None:
    given = operands(operation, dtype, 1, 200, sizes=(32, 32))
    out, state = call(operation, given, output_final_state=True)
    x = {name: t[0].double() for name, t in given.items()}
    matrix, found = torch.zeros(2, 32, 32, dtype=torch.float64), []
    for t in range(200):
        decay = x["g"][t].exp()
        matrix = matrix * (decay[..., None] if operation == "kda" else decay[:, None, None])
        u = x["v"][t]
        if "beta" in x:
            u = x["beta"][t][:, None] * (u - torch.einsum("d,hde->he", x["k"][t, 0], matrix))
        matrix = matrix + x["k"][t, 0][:, None] * u[:, None]
        found.append(torch.einsum("d,hde->he", x["q"][t, 0], matrix) * 32**-0.5)

    def relative(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b).norm() / b.norm())

    assert relative(out[0], torch.stack(found)) < error
    assert relative(state.matrix[0], matrix) < error


def test_gamma_is_a_decay_for_each_head() -> None:
    given = operands("lightning_attention", torch.float32)
    gamma = torch.tensor([-0.1, -0.7])
    given["g"] = gamma.expand(2, 70, 2)
    want, _ = call("lightning_attention", given)
    del given["g"]
    assert_same_bits(call("lightning_attention", given, g_gamma=gamma)[0], want)
    with pytest.raises(ValueError, match="g_gamma: expected a value for each head"):
        call("lightning_attention", given, g_gamma=gamma[:1])
    with pytest.raises((TypeError, ValueError), match="g_gamma: expected device cpu like v, got meta"):
        call("lightning_attention", given, g_gamma=gamma.to("meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_queries_of_length_1(dtype: torch.dtype) -> None:
    given = operands("gated_delta_rule", dtype)
    given["q"], given["k"] = given["q"] * 3, given["k"] * 5
    leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
    out, _ = call("gated_delta_rule", leaves, use_qk_l2norm_in_kernel=True)
    normal = {
        n: (t.double() / (t.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(dtype)
        if n in ("q", "k")
        else t
        for n, t in given.items()
    }
    want, _ = call("gated_delta_rule", normal)
    torch.testing.assert_close(out, want, atol=2e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-2)
    (dq,) = torch.autograd.grad(out.float().sum(), leaves["q"])
    along = (dq.double() * given["q"].double()).sum(-1)
    assert float(along.abs().max()) < (0.05 if dtype == torch.bfloat16 else 1e-5)  # length has no gradient


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("operation", "normalize"),
    [*((operation, False) for operation in OPERATIONS), ("gated_delta_rule", True), ("kda", True)],
)
def test_padding_is_not_read(operation: str, normalize: bool, bad: float) -> None:
    """Whatever is there, gradients there are 0, and those of tokens have the bits that they have alone."""
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True} if normalize else {}
    bounds = {"key_start": torch.tensor([3, 0]), "key_length": torch.tensor([70, 66])}
    given = operands(operation, torch.bfloat16)
    for t in given.values():
        t[0, :3] = t[1, 66:] = bad
    leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
    out, _ = call(operation, leaves, **bounds, **options)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    out.backward(seed)
    for row, tokens in ((0, slice(3, 70)), (1, slice(0, 66))):
        alone = {n: t.requires_grad_() for n, t in part(given, slice(row, row + 1), tokens).items()}
        call(operation, alone, **options)[0].backward(seed[row : row + 1, tokens])
        for name, t in leaves.items():
            grad = t.grad
            assert grad is not None
            assert_same_bits(grad[row : row + 1, tokens], alone[name].grad)
            outside = torch.ones(70, dtype=torch.bool)
            outside[tokens] = False
            assert not grad[row, outside].count_nonzero(), name  # NaN is none


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 37, 64, 128, 136, 256])
def test_length_1_on_a_gpu(dtype: torch.dtype, size: int) -> None:
    """Heads where they lie in a product's result, and in other ways."""
    whole = case("special", (2, 301, 7, size), dtype, "cpu")
    grad = case("normal", (2, 301, 4, size), dtype, "cpu", 1)
    places: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x[:, :, 2:6],
        lambda x: x[:, :, :4].transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x[:, :, :1].expand(-1, -1, 4, -1),
    )
    for place in places:
        x, on_gpu = place(whole), place(whole.cuda())
        assert_same_bits(_delta.normalized(on_gpu).cpu(), _delta.normalized(x))
        want = _delta._normalized_gradient(x, grad)
        assert_same_bits(_delta._normalized_gradient(on_gpu, grad.cuda()).cpu(), want)


def test_contracts_and_autocast() -> None:
    given = operands("gated_delta_rule", torch.bfloat16)
    tensor_core, state = call("gated_delta_rule", given, output_final_state=True)
    assert_same_bits(call("gated_delta_rule", given, contract=TENSOR_CORE.on(HOPPER))[0], tensor_core)
    _, by_fma = call("gated_delta_rule", given, contract=FMA, output_final_state=True)
    assert (by_fma.matrix != state.matrix).any()
    wide = {n: t.float() for n, t in given.items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(call("gated_delta_rule", wide)[0], tensor_core)


def bad(**changes: Any) -> Any:
    given = operands("gated_delta_rule", torch.float32)
    return {name: change(given[name]) if name in given else change for name, change in changes.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (bad(k=lambda t: t[..., :8]), "q, k: expected .* of one shape"),
        (bad(v=lambda t: t[:, :5]), "v: expected"),
        (
            bad(q=lambda t: t.repeat(1, 1, 3, 1), k=lambda t: t.repeat(1, 1, 3, 1)),
            "a multiple of the 3 heads",
        ),
        (bad(g=lambda t: t[..., 0]), "g: expected shape"),
        (bad(beta=lambda t: t[:1]), "beta: expected shape"),
        (bad(scale=math.inf), "scale: expected a finite number"),
        (bad(cu_seqlens=torch.tensor([0, 70])), "expected a batch of 1 with cu_seqlens"),
        (bad(key_start=torch.tensor([0, 71])), "key_start: expected values in"),
        (bad(key_start=torch.tensor([0])), "key_start: expected shape"),
        (bad(initial_state=torch.zeros(2, 2, 16, 9)), "initial_state: expected shape"),
        (bad(v=lambda t: t.double()), "v: expected bfloat16, float16 or float32"),
        (bad(q=lambda t: t.to(torch.bfloat16)), "k: expected torch.bfloat16 like q"),
        (bad(beta=lambda t: None), "beta: expected a Tensor"),
    ],
)
def test_errors(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = operands("gated_delta_rule", torch.float32) | changes
    with pytest.raises((TypeError, ValueError), match=rf"samebits\.gated_delta_rule: .*{message}"):
        samebits.gated_delta_rule(**given)


def test_states_of_other_calls_are_refused() -> None:
    given = operands("gated_delta_rule", torch.float32)
    _, state = call("gated_delta_rule", given, output_final_state=True)
    with pytest.raises(ValueError, match="initial_state: expected a state of such heads"):
        call("gated_delta_rule", operands("gated_delta_rule", torch.bfloat16), initial_state=state)
    with pytest.raises(ValueError, match="initial_state: expected 1 sequences, got 2"):
        call("gated_delta_rule", part(given, slice(0, 1)), initial_state=state)
    with pytest.raises(ValueError, match="state: expected shape"):
        RecurrentState(state.layout, state.data[:, 1:])
    with pytest.raises(ValueError, match="expected dense, aligned rows"):  # which sequences would share
        RecurrentState(state.layout, state.data[:1].expand(4, -1))


def z_saved(given: dict[str, Tensor], **options: Any) -> int:
    """How many tensors of the shape and type of z a call leaves its backward."""
    saved: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        samebits.gated_delta_rule(**leaves, **options)
    alike = (t for t in saved if t.dtype == torch.float32 and t.shape == given["v"].shape[1:])
    return len([*alike]) - (given["v"].dtype == torch.float32)


@pytest.mark.parametrize(
    ("dtype", "key_size", "contract", "on_gpu", "count"),
    [
        *((torch.bfloat16, 16, None, on_gpu, int(on_gpu)) for on_gpu in (False, True)),
        (torch.bfloat16, 16, FMA, True, 0),
        (torch.bfloat16, 144, None, True, 0),
        (torch.float32, 16, None, True, 0),
    ],
)
def test_what_a_forward_saves(
    dtype: torch.dtype, key_size: int, contract: Any, on_gpu: bool, count: int
) -> None:
    """z where a backward takes it, and nothing in its place elsewhere."""
    given = operands("gated_delta_rule", dtype, 1, 70, sizes=(key_size, 8))
    with fake_gpu() if on_gpu else contextlib.nullcontext():
        assert z_saved(given, contract=contract) == count


@pytest.mark.parametrize("key_size", [16, 144])
def test_tensors_without_data_have_the_shape_of_what_a_forward_saves(key_size: int) -> None:
    given = operands("gated_delta_rule", torch.bfloat16, 1, 70, sizes=(key_size, 8))
    q, k, v, g, beta = (t[0] for t in given.values())
    spans = torch.empty(1, 0, dtype=torch.int32)
    args = q, k, v, g, beta, *(None,) * 4, spans, 0.5, False, False, TENSOR_CORE.key, True
    with fake_gpu():
        found = _delta._run(*args)
        with FakeTensorMode() as mode:
            expected = _delta._fake(*(mode.from_tensor(t) if isinstance(t, Tensor) else t for t in args))
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    assert found[-1].shape == (v.shape if key_size == 16 else (0,))


def test_a_backward_gets_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks may give it back with other strides, which kernels do not ask for."""
    got: list[Tensor] = []

    def note(x: Any, state: Tensor, *given: Any, z: Tensor) -> Any:
        got.extend((x.spans, state, z))
        return backward(x, state, *given, z=z)

    backward = on_cuda.backward
    monkeypatch.setattr(on_cuda, "backward", note)
    given = operands("gated_delta_rule", torch.bfloat16, 3, 70)
    leaves = [t.requires_grad_() for t in given.values()]
    own = layout("gated_delta_rule", 2, 16, 8, torch.bfloat16)
    state = RecurrentState(own, torch.zeros(3, own.words))

    def turned(t: Tensor) -> Tensor:
        return t.mT.contiguous().mT if t.ndim > 1 else t

    with fake_gpu(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, turned):
        options = {"initial_state": state, "key_length": torch.tensor([70, 1, 30])}
        out, _ = samebits.gated_delta_rule(*leaves, **options)
        torch.autograd.grad(out.float().sum(), leaves)
    assert [(t.shape, t.is_contiguous()) for t in got] == [
        ((3, 2), True),
        (state.data.shape, True),
        ((210, 2, 8), True),
    ]


def test_a_training_step_that_is_compiled() -> None:
    given = operands("gated_delta_rule", torch.bfloat16, 1, 70)
    leaves = [t.requires_grad_() for t in given.values()]

    def loss(*x: Tensor) -> Tensor:
        return samebits.gated_delta_rule(*x)[0].float().square().sum()

    want = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(*leaves), leaves)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("operation", [*OPERATIONS, "weighted"])
def test_operators(operation: str) -> None:
    weighted = operation == "weighted"
    given = operands("lightning_attention" if weighted else operation, torch.float32, 1, 4)
    x = [t.flatten(0, 1).requires_grad_() for t in given.values()]
    x += [None] * (5 - len(x))  # type: ignore[list-item]
    heads, size = x[2].shape[1:]
    of_rows = [torch.rand(4, heads), torch.rand(heads, size)] if weighted else []
    x += [t.requires_grad_() for t in of_rows] or [None, None]  # type: ignore[list-item]
    spans = torch.tensor([[0, 4]], dtype=torch.int32)
    initial = torch.zeros(1, 2, 16, 8, requires_grad=True)
    args = (*x, initial, None, spans, 0.5, True, weighted, FMA.key, True)
    torch.library.opcheck(torch.ops.samebits.delta.default, args)
    sizes = heads, given["q"].shape[3], size
    own = layout(operation, *sizes, torch.float32, operation == "kda", weighted)
    state = torch.zeros(1, own.words)
    plain = [None if t is None else t.detach() for t in x]
    torch.library.opcheck(
        torch.ops.samebits.delta_.default, (*plain, state, spans, 0.5, False, weighted, FMA.key)
    )

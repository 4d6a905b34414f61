"""Verification of delta rules, state spaces and short convolutions, on operands made for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from samebits.ops.causal_conv1d import causal_conv1d, causal_conv1d_update
from samebits.ops.delta_rule import gated_delta_rule, kda, lightning_attention
from samebits.ops.selective_scan import selective_scan
from samebits.ops.ssd import ssd
from samebits.ops.state_space import selective_state_update
from samebits.testing import KINDS, values

Results = tuple[Tensor, ...]
SCHEDULES = 3
DTYPES = torch.bfloat16, torch.float16, torch.float32
# Rows, channels, tokens, taps.
_CONVOLVED = (
    *((1, 8, 1, 4), (2, 24, 37, 4), (3, 5, 70, 3), (1, 512, 130, 2), (2, 1, 33, 4), (1, 7, 9, 1)),
    (2, 72, 1096, 4),
)
# Rows, tokens, heads, channels of a head, groups, states, and dtypes.
_OF_HEADS = (
    *(((1, 65, 2, 64, 1, 128), DTYPES[0]), ((1, 70, 2, 128, 1, 128), DTYPES[1])),
    *(((3, 9, 4, 40, 2, 64), DTYPES[1]), ((1, 1, 2, 256, 2, 256), DTYPES[0])),
    *(((2, 131, 3, 17, 1, 20), dtype) for dtype in DTYPES),
)
# Rows, channels, tokens, groups, states.
_OF_CHANNELS = (
    (1, 1, 1, 1, 1),
    (2, 48, 70, 1, 16),
    (1, 40, 33, 2, 20),
    (3, 130, 19, 1, 8),
    (3, 257, 18, 1, 16),
)
# Rows, tokens, key heads, heads, sizes of keys and values. A kernel takes seconds to compile: not all dtypes.
# The last token of 65 is a step that closes a chunk.
_RULES = (
    *(((1, 65, 1, 1, 128, 128), DTYPES[0]), ((1, 70, 1, 1, 128, 128), DTYPES[2])),
    *(((3, 9, 2, 4, 64, 40), DTYPES[1]), ((1, 1, 2, 2, 256, 256), DTYPES[0])),
    *(((2, 131, 1, 2, 20, 17), dtype) for dtype in DTYPES),
)


def convolutions(times: int) -> Iterator[tuple[str, str, Any, Any]]:
    """The line of the report, the name, and what draws and runs a case."""
    kinds = itertools.cycle(KINDS)
    for dtype, shape, last in itertools.product(DTYPES, _CONVOLVED, (False, True)):
        for _ in range(times):
            kind = next(kinds)
            name = f"{shape}, {'channels' if last else 'tokens'} side by side, {dtype}, {kind}"
            yield "tokens", name, partial(_taps, kind, shape, dtype, last), partial(_convolved, last)


def _taps(kind: str, shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> Results:
    rows, channels, tokens, taps = shape
    x = values(kind, (rows, tokens, channels) if last else (rows, channels, tokens), dtype, 1)
    weight, bias = values("normal", (channels, taps), dtype, 2), values("normal", (channels,), dtype, 3)
    before = values("normal", (rows, channels, taps - 1), dtype, 4)
    cuts = torch.tensor([0, tokens // 3, tokens // 2, tokens]).int()
    return x, weight, bias, before, cuts


def _convolved(last: bool, x: Tensor, weight: Tensor, bias: Tensor, before: Tensor, cuts: Tensor) -> Results:
    x = x.transpose(1, 2) if last else x
    numbers = torch.arange(x.shape[2], device=x.device)[None].expand(len(x), -1) // 5
    state = torch.nn.functional.pad(before, (1, 0))
    halves = x.shape[2] // 2
    step = causal_conv1d_update(x[..., :halves], state, weight, bias, "silu") if halves else x[..., :0]
    rest = causal_conv1d_update(x[..., halves:], state, weight, bias, "silu")
    one = causal_conv1d_update(x[..., 0].contiguous(), state, weight, bias, "silu")
    given: dict[str, Any] = {"x": x, "weight": weight, "bias": bias}
    y, after = causal_conv1d(**given, initial_states=before, activation="silu", return_final_states=True)
    numbered: Any = causal_conv1d(**given, seq_idx=numbers)
    packed: Any = causal_conv1d(x[:1], weight, cu_seqlens=cuts, activation="silu")
    gradients: Results = ()
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias, before)]
        for activation in (None, "silu"):
            options: dict[str, Any] = dict(zip(("x", "weight", "bias"), leaves, strict=False))
            options["activation"] = activation
            whole: Any = causal_conv1d(**options, initial_states=leaves[3])
            parts: Any = causal_conv1d(**options, seq_idx=numbers)
            gradients += torch.autograd.grad(whole, leaves, x) + torch.autograd.grad(parts, leaves[:3], x)
    return y, after, step, rest, one, state, *gradients, numbered, packed


def state_spaces(times: int) -> Iterator[tuple[str, str, Any, Any]]:
    """The same. Values are small, so that states stay finite but for one kind."""
    kinds = itertools.cycle(("normal", "normal", "tiny", "special"))
    for dtype, channels, _ in itertools.product(DTYPES, _OF_CHANNELS, range(times)):
        kind = next(kinds)
        draw = partial(_channels, kind, channels, dtype)
        name = f"{channels}, {dtype}, {kind}"
        yield "channels", name, draw, _scheduled(_of_channels)
        if kind != "special":
            yield (
                "gradients",
                f"channels {channels}, {dtype}, {kind}",
                draw,
                _scheduled(_gradients_of_channels),
            )


def _heads(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Results:
    rows, tokens, heads, of_head, groups, states = shape
    x, z = (values(kind, (rows, tokens, heads, of_head), dtype, seed) for seed in (1, 2))
    b, c = (values("normal", (rows, tokens, groups, states), dtype, seed) for seed in (3, 4))
    dt, A = (
        values("normal", (rows, tokens, heads), dtype, 5),
        -values("normal", (heads,), torch.float32, 6).abs(),
    )
    D, bias = values("normal", (heads,), dtype, 7), values("normal", (heads,), torch.float32, 8) - 3
    return x, dt, A, b, c, D, z, bias, values("normal", (rows, heads, of_head, states), torch.float32, 9)


def _of_heads(
    x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, z: Tensor, bias: Tensor, states: Tensor
) -> Results:
    """In one call with gates, by calls that go on, and packed."""
    tokens: dict[str, Any] = {"x": x, "dt": dt, "B": b, "C": c}
    options: dict[str, Any] = {"A": A, "D": D, "dt_bias": bias, "dt_softplus": True}
    options["return_final_states"] = True
    gated, state = ssd(**tokens, z=z, initial_states=states, **options)
    found, count = [gated, state.matrix], x.shape[1]
    going_on: Any = states
    for start, stop in itertools.pairwise(sorted({0, count * 2 // 3, max(count - 1, 0), count})):
        of: dict[str, Any] = {name: t[:, start:stop] for name, t in tokens.items()}
        y, going_on = ssd(**of, initial_states=going_on, dt_limit=(0.0, 0.5), **options)
        found.append(y)
    first: dict[str, Any] = {name: t[:1] for name, t in tokens.items()}
    cuts = torch.tensor([0, 0, count // 3, count], device=x.device)
    y, packed = ssd(**first, cu_seqlens=cuts, **options)
    return *found, going_on.matrix, y, packed.matrix


def _gradients_of_heads(
    x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, z: Tensor, bias: Tensor, states: Tensor
) -> Results:
    """Padded, from plain states, and gated, from where a state goes on."""
    start = torch.arange(len(x), device=x.device).clamp(max=x.shape[1])
    options: dict[str, Any] = {"dt_softplus": True, "return_final_states": True}
    given = {"x": x, "dt": dt, "A": A, "B": b, "C": c}
    more = {"D": D, "dt_bias": bias, "initial_states": states}
    with torch.enable_grad():
        leaves: dict[str, Any] = {k: t.detach().requires_grad_() for k, t in (given | more).items()}
        y, state = ssd(**leaves, **options, key_start=start)
        found = torch.autograd.grad([y, state.matrix], [*leaves.values()], [z, states])
        leaves = {name: leaves[name] for name in given} | {"z": z.detach().requires_grad_()}
        y, state = ssd(**leaves, initial_states=state, **options)
        return *found, *torch.autograd.grad([y, state.matrix], [*leaves.values()], [z, states])


def _channels(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Results:
    rows, channels, tokens, groups, states = shape
    u, z = (values(kind, (rows, channels, tokens), dtype, seed) for seed in (1, 2))
    b, c = (values("normal", (rows, groups, states, tokens), dtype, seed) for seed in (3, 4))
    delta, A = (
        values("normal", u.shape, dtype, 5),
        -values("normal", (channels, states), torch.float32, 6).abs(),
    )
    D, bias = values("normal", (channels,), dtype, 7), values("normal", (channels,), torch.float32, 8) - 3
    return u, delta, A, b, c, D, z, bias


def _of_channels(
    u: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, z: Tensor, bias: Tensor
) -> Results:
    y, state = selective_scan(u, delta, A, b, c, D, z, bias, True, True)
    moved = state.clone()
    given = u[..., 0], delta[..., 0], A, b[..., 0], c[..., 0], D, z[..., 0], bias
    return y, state, selective_state_update(moved, *given, dt_softplus=True), moved


def _gradients_of_channels(
    u: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, z: Tensor, bias: Tensor
) -> Results:
    with torch.enable_grad():
        u, delta, A, b, c, D, gate, bias = (
            t.detach().requires_grad_() for t in (u, delta, A, b, c, D, z, bias)
        )
        y = selective_scan(u, delta, A, b, c, D, gate, bias, True)
        steps = delta.detach().to(torch.float32).abs().requires_grad_()
        plain = selective_scan(u, steps, A, b, c)
        assert isinstance(y, Tensor)
        assert isinstance(plain, Tensor)
        found = torch.autograd.grad(y, [u, delta, A, b, c, D, gate, bias], z)
        return *found, *torch.autograd.grad(plain, [u, steps, A, b, c], z)


def delta_rules(times: int) -> Iterator[tuple[str, str, Any, Any]]:
    """The same, each under the kernel's choice and under one schedule, in turns."""
    kinds, numbers = itertools.cycle(("normal", "tiny", "sparse", "cancel")), itertools.count()
    operations: tuple[Any, ...] = (gated_delta_rule, kda, lightning_attention)
    for (shape, dtype), operation, _ in itertools.product(_RULES, operations, range(times)):
        if operation is kda and shape[4] > 128:  # gradients take more shared memory than there is
            continue
        kind, number = next(kinds), next(numbers)
        draw, name = partial(_ruled, kind, shape, dtype, operation is kda), f"{shape}, {dtype}, {kind}"
        run = _delta_scheduled(partial(_of_rule, operation), number)
        yield operation.__name__, name, draw, run
        run = _delta_scheduled(partial(_gradients_of_rule, operation), number)
        yield "gradients", f"{operation.__name__} {name}", draw, run
    for (shape, dtype), _ in itertools.product(_OF_HEADS, range(times)):
        kind, number = next(kinds), next(numbers)
        draw, name = partial(_heads, kind, shape, dtype), f"{shape}, {dtype}, {kind}"
        yield "ssd", name, draw, _delta_scheduled(_of_heads, number)
        yield "gradients", f"ssd {name}", draw, _delta_scheduled(_gradients_of_heads, number)


def _ruled(kind: str, shape: tuple[int, ...], dtype: torch.dtype, by_channel: bool) -> Results:
    rows, tokens, key_heads, heads, key_size, size = shape
    q, k = (values("normal", (rows, tokens, key_heads, key_size), dtype, seed) for seed in (1, 2))
    v = values(kind, (rows, tokens, heads, size), dtype, 3)
    of_g = (rows, tokens, heads, key_size) if by_channel else (rows, tokens, heads)
    g = -values("normal", of_g, torch.float32, 4).abs() / 8
    beta = values("normal", (rows, tokens, heads), torch.float32, 5).sigmoid()
    initial = values("normal", (rows, heads, key_size, size), torch.float32, 6)
    return q, k, v, g, beta, initial


def _of_rule(
    operation: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor
) -> Results:
    """In one call, by calls that go on, and packed."""
    given, options = {"q": q, "k": k, "v": v, "g": g}, {"output_final_state": True}
    if operation is lightning_attention:  # whose sums would grow
        given = given | {"k": k / 8}
    else:
        given, options = given | {"beta": beta}, options | {"use_qk_l2norm_in_kernel": True}
    whole, state = operation(**given, initial_state=initial, **options)
    found, tokens = [whole, state.matrix], q.shape[1]
    going_on: Any = initial
    for start, stop in itertools.pairwise(sorted({0, tokens * 2 // 3, max(tokens - 1, 0), tokens})):
        of = {name: t[:, start:stop] for name, t in given.items()}
        y, going_on = operation(**of, initial_state=going_on, **options)
        found.append(y)
    first = {name: t[:1] for name, t in given.items()}
    cuts = torch.tensor([0, 0, tokens // 3, tokens], device=q.device)
    packed, state_of_packed = operation(**first, cu_seqlens=cuts, **options)
    return *found, going_on.matrix, packed, state_of_packed.matrix


def _gradients_of_rule(
    operation: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor
) -> Results:
    """From matrices, and from where a state goes on, padded."""
    tokens = q.shape[1]
    options: dict[str, Any] = {"output_final_state": True}
    if operation is not lightning_attention:
        options["use_qk_l2norm_in_kernel"] = True
    start = torch.arange(len(q), device=q.device).clamp(max=tokens)
    with torch.enable_grad():
        given = {"q": q, "k": k / 8 if operation is lightning_attention else k, "v": v, "g": g}
        if operation is not lightning_attention:
            given["beta"] = beta
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        first = initial.detach().requires_grad_()
        y, state = operation(**leaves, initial_state=first, key_start=start, **options)
        found = torch.autograd.grad([y, state.matrix], [*leaves.values(), first], [v, initial])
        y, state = operation(**leaves, initial_state=state, **options)
        return *found, *torch.autograd.grad([y, state.matrix], [*leaves.values()], [v, initial])


def _delta_scheduled(run: Callable[..., Results], number: int) -> Callable[..., Results]:
    """`run`, with a `schedule` under the schedules of this number, if they fit into a GPU's shared memory."""

    def call(*operands: Tensor, schedule: int | None = None) -> Results:
        if schedule is None:
            return run(*operands)
        from samebits.backends.cuda import (
            delta,
            delta_schedules,
            devices,
            linear_attention,
            linear_schedules,
        )

        schedules, of_gradients = [*delta_schedules.catalogue()], [*delta_schedules.catalogue_of_gradients()]
        forward, gradients = schedules[number % len(schedules)], of_gradients[number % len(of_gradients)]
        choose, choose_of_gradients = delta_schedules.choose, delta_schedules.choose_of_gradients
        of_linear = [*linear_schedules.catalogue_of_linear()]
        linear, choose_linear = of_linear[number // 3 % len(of_linear)], linear_schedules.choose_linear
        choose_chunks, choose_states = delta_schedules.choose_chunks, delta_schedules.choose_states

        def chosen(dtype: torch.dtype, key_size: int, *rest: Any) -> delta_schedules.Schedule:
            *_, tensor_core, by_channel, device, weighted = rest
            needs = forward.memory(dtype, key_size, tensor_core, by_channel, weighted)
            fits = needs <= devices.device_info(device).max_smem
            return forward if fits else choose(dtype, key_size, *rest)

        def chosen_of_gradients(
            dtype: torch.dtype, key_size: int, size: int, *rest: Any
        ) -> delta_schedules.DeltaGradients:
            _, tensor_core, of_rule, by_channel, device = rest
            needs = max(gradients.memory(dtype, key_size, size, tensor_core, by_channel))
            fits = needs <= devices.device_info(device).max_smem
            fits = fits and gradients.takes(key_size, tensor_core, of_rule, by_channel)
            return gradients if fits else choose_of_gradients(dtype, key_size, size, *rest)

        def chosen_linear(key_size: int, *rest: Any) -> linear_schedules.Linear:
            *_, weighted, device = rest
            needs = max(part.memory(key_size, weighted) for part in (linear.states, linear.rows))
            fits = needs <= devices.device_info(device).max_smem
            return linear if fits else choose_linear(key_size, *rest)

        def chosen_linear_gradients(
            key_size: int, size: int, *rest: Any
        ) -> linear_schedules.LinearGradients | None:
            *_, weighted, device = rest
            every: tuple[Any, ...] = (*linear_schedules.catalogue_of_linear_gradients(), None)
            found = every[number // 3 % len(every)]  # the last: by records
            if found is None:
                return None
            fits = found.most_memory(key_size, size, weighted) <= devices.device_info(device).max_smem
            return found if fits else linear_schedules.choose_linear_gradients(key_size, size, *rest)

        def chosen_chunks(key_size: int, *rest: Any) -> delta_schedules.DeltaChunks:
            of_chunks = delta_schedules.catalogue_of_chunks()
            chunks = of_chunks[number % len(of_chunks)]
            *_, by_channel, device = rest
            fits = chunks.memory(key_size, by_channel) <= devices.device_info(device).max_smem
            return chunks if fits else choose_chunks(key_size, *rest)

        def chosen_states(key_size: int, by_channel: bool, device: int) -> delta_schedules.DeltaStates:
            of_states = delta_schedules.catalogue_of_states()
            states = of_states[number % len(of_states)]
            fits = states.memory(key_size, by_channel) <= devices.device_info(device).max_smem
            return states if fits else choose_states(key_size, by_channel, device)

        def chosen_step(*of: Any) -> delta_schedules.Step:
            steps = delta_schedules.catalogue_of_steps(of[4])
            return steps[number % len(steps)]

        with (
            mock.patch.object(delta, "choose", chosen),
            mock.patch.object(linear_attention, "choose_linear", chosen_linear),
            mock.patch.object(linear_attention, "choose_chunks", chosen_chunks),
            mock.patch.object(linear_attention, "choose_states", chosen_states),
            mock.patch.object(delta, "choose_step", chosen_step),
            mock.patch.object(delta, "choose_of_gradients", chosen_of_gradients),
            mock.patch.object(delta, "choose_linear_gradients", chosen_linear_gradients),
        ):
            return run(*operands)

    return call


def _scheduled(run: Callable[..., Results]) -> Callable[..., Results]:
    """`run`, whose scans have the schedule of this place."""

    def call(*operands: Tensor, schedule: int | None = None) -> Results:
        if schedule is None:
            return run(*operands)
        from samebits.backends.cuda import selective_scan

        def chosen(size: int, *_: int) -> selective_scan.ChannelScan:
            return selective_scan.catalogue(size)[schedule]

        with mock.patch.object(selective_scan, "choose", chosen):
            return run(*operands)

    return call

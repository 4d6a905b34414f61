"""The tables of ``docs/models.md`` about architectures, from results of ``python -m benchmarks zoo``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from benchmarks.tables.text import made_with, table
from benchmarks.zoo.reasons import FROM_THE_START, POSITIONS, REASONS, STEPS

GROUPS = {
    "rows": ("rows",),
    "padding": ("right padding", "left padding"),
    "decode": ("decode", "static cache"),
    "generate": ("generate",),
    "gradients": ("gradients", "gradients with padding", "checkpointing", "LoRA"),
}
STATES = ("uncovered", "fails", "differs")
Found = dict[str, Any]


def failures(found: Found) -> Iterator[tuple[str, str, Found]]:
    """The checks that an architecture does not pass: dtype, check, result. The gravest come first."""
    for state in STATES:
        for dtype, checks in found.get("checks", {}).items():
            for name, result in checks.items():
                if isinstance(result, dict) and result["state"] == state:
                    yield dtype, name, result


def verdict(found: Found) -> tuple[str, str]:
    """What became of an architecture, and why: the first check that does not pass."""
    if "unbuilt" in found:
        return "not built", found["unbuilt"]
    for dtype, name, result in failures(found):
        return result["state"], f"{name}, {dtype}: {result['said']}"
    if all(_cell(found, group) == "–" for group in GROUPS.values()):
        return "not checked", "no check could be run"
    return "passes", ""


def reason(found: Found) -> str:
    """One that says what in the model it is, if that is known, and what was seen."""
    dtype, name, result = next(failures(found))
    said = f"`{result['said']}`" if result["state"] == "uncovered" else result["said"]
    seen = (
        f"{result['state']} in {name} ({dtype}): {said}"
        if result["state"] != "differs"
        else f"{name} ({dtype}): {said}"
    )
    known = REASONS.get(found["name"])
    return f"{known}. {seen}" if known else seen


def _drift(found: Found, dtype: str, only: tuple[str, ...]) -> str:
    numbers = [
        x if isinstance(x, float | int) else x.get("torch")
        for name, x in found["checks"][dtype].items()
        if name in only and not isinstance(x, str) and not _other(x)
    ]
    known = [x for x in numbers if x is not None]
    return f"{max(known):.1g}" if known else "–"


def _padded_on_the_right_alone(found: Found) -> bool:
    results = [checks.get("left padding") for checks in found.get("checks", {}).values()]
    return any(r in FROM_THE_START or (isinstance(r, dict) and r["state"] == "reported") for r in results)


def _other(result: Any) -> bool:
    return isinstance(result, dict) and result["state"] in ("not applicable", "reported")


def _cell(found: Found, group: tuple[str, ...]) -> str:
    results = [r for checks in found["checks"].values() for n, r in checks.items() if n in group]
    results = [r for r in results if not isinstance(r, str) and not _other(r)]
    for state in STATES:
        for r in results:
            if isinstance(r, dict) and r["state"] == state:
                return state if state != "differs" else r["said"].split(" elements")[0]
    return "0" if results else "–"


def _table(architectures: list[Found]) -> str:
    forward = (*GROUPS["rows"], *GROUPS["padding"], *GROUPS["decode"])
    rows = [
        [
            f"`{a['name']}`" + " †" * (a["name"] in STEPS) + " ‡" * _padded_on_the_right_alone(a),
            a["kind"],
            f"{_drift(a, 'float32', forward)}, {_drift(a, 'bfloat16', forward)}",
            f"{_drift(a, 'float32', GROUPS['gradients'])}, {_drift(a, 'bfloat16', GROUPS['gradients'])}",
            *(_cell(a, group) for group in GROUPS.values()),
        ]
        for a in architectures
    ]
    return table(["architecture", "kind", "PyTorch, forward", "PyTorch, gradients", *GROUPS], rows)


def fp8(data: Found) -> str:
    """Models in block FP8."""
    every = data["architectures"]
    passing = sum(verdict(a)[0] == "passes" for a in every)
    said = (
        f"**{passing} of {len(every)}** pass every check, with activations in float32 and in bfloat16."
        " PyTorch has no such products on a CPU: its columns are of the same models before they were"
        " quantized."
    )
    return "\n\n".join((said, _table(every), made_with(data)))


def architectures(data: Found) -> str:
    every = data["architectures"]
    built = [a for a in every if "unbuilt" not in a]
    passing = [a for a in built if verdict(a)[0] == "passes"]
    unchecked = [a for a in built if verdict(a)[0] == "not checked"]
    failing = [a for a in built if verdict(a)[0] not in ("passes", "not checked")]
    one_side = sum(map(_padded_on_the_right_alone, passing))
    names_unchecked = ", ".join(f"`{a['name']}`" for a in unchecked)
    parts = [
        f"**{len(passing)} of {len(built)}** architectures that can be built pass every check that was run on"
        f" them, in float32 and bfloat16. {len(unchecked)} could not be checked ({names_unchecked})."
        f" Of {one_side} of those that pass (‡) padding was checked on the right only:"
        " attention of their own, chunks or positions count from the row's start, so padding on the left may"
        " change their bits, and is reported where it is attention's.",
        _table([*passing, *failing, *unchecked]),
        "† decodes by another algorithm than it prefills by: its decoding alone is compared with its decoding"
        " in a batch. "
        + " ".join(f"{what}: {', '.join(f'`{n}`' for n in names)}." for what, names in _steps(built)),
    ]
    if failing:
        parts += [
            "Those that do not pass:",
            table(["architecture", "why"], ([f"`{a['name']}`", reason(a)] for a in failing)),
        ]
    parts += [
        "Checks that were not run, but for those that the kind of a model has not:",
        table(["check", "why", "architectures"], _not_applicable(built)),
        "Not built:",
        table(["why", "architectures"], _unbuilt(every)),
        made_with(data),
    ]
    return "\n\n".join(parts)


def _steps(built: list[Found]) -> list[tuple[str, list[str]]]:
    found = defaultdict(list)
    for a in built:
        if a["name"] in STEPS:
            found[STEPS[a["name"]]].append(a["name"])
    return sorted(found.items())


ORDINARY = (
    "does not decode",
    "pictures of one size",
    "checked of others",
    "checked in bfloat16",
    POSITIONS,
)


def _not_applicable(built: list[Found]) -> list[list[str]]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for a in built:
        said = {
            (name, r if isinstance(r, str) else r["said"])
            for checks in a["checks"].values()
            for name, r in checks.items()
            if isinstance(r, str) or _other(r)
        }
        for name, why in sorted(said):
            if why not in ORDINARY:
                found[name, why].append(f"`{a['name']}`")
    return [[name, _escaped(why), ", ".join(sorted(set(a)))] for (name, why), a in sorted(found.items())]


def _unbuilt(every: list[Found]) -> list[list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for a in every:
        if "unbuilt" in a:
            found[a["unbuilt"].removeprefix("ValueError: ")].append(f"`{a['name']}`")
    return [[_escaped(why), ", ".join(names)] for why, names in sorted(found.items())]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")

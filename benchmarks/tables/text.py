"""What tables have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.record import load, measured


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_commit(name: str, case: dict[str, Any]) -> str:
    """With the commit of a case that is of another run than the other results."""
    return name + (f" at `{case['commit'][:10]}`" if "commit" in case else "")


def made_with(data: dict[str, Any]) -> str:
    e = data["environment"]
    versions = ", ".join(f"{name} {v}" for name, v in e["versions"].items())
    return (
        f"Measured {e['date']} at commit `{e['commit'][:10]}` on {e['cpu']}, {e['threads']} threads,"
        f" Python {e['python']}; {versions}."
    )


def measured_on_gpu(data: dict[str, Any]) -> str:
    e, count = data["environment"], {1: "one", 2: "two"}.get(data.get("ranks", 1), "several")
    versions = ", ".join(f"{name} {v}" for name, v in e["versions"].items())
    said = (("gpu", f" on {count} {{}}"), ("driver", ", driver {}"))
    where = "".join(text.format(e[key]) for key, text in said if key in e)
    digest = f"; contract digest `{e['digest']}`" if "digest" in e else ""
    return f"Measured {e['date']} at commit `{e['commit'][:10]}`{where}; {versions}{digest}."


def measured_at(gpu: str, files: Iterable[str]) -> str:
    """Where, when and at which commits all of these results of a GPU were measured."""
    made = sorted((load(f"{gpu}/{name}") for name in files if gpu in measured(name)), key=_date)
    when = " to ".join(dict.fromkeys((_date(made[0]), _date(made[-1]))))
    runs = (run for data in made for run in (data["environment"], *data.get("cases", ())) if "commit" in run)
    at = " and ".join(dict.fromkeys(f"`{run['commit'][:10]}`" for run in runs))
    return f"Measured {when} at commit {at} on one {made[0]['environment']['gpu']}"


def _date(data: dict[str, Any]) -> str:
    return str(data["environment"]["date"][:10])

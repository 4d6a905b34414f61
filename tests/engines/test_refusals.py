"""What is refused before an engine is there."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

import samebits.sglang
import samebits.vllm
from samebits.engines import refusals


@pytest.mark.parametrize(
    ("options", "group", "engine"),
    [
        (samebits.vllm.options, "vllm.general_plugins", "vLLM"),
        (samebits.sglang.options, "sglang.srt.plugins", "SGLang"),
    ],
)
def test_an_engine_that_would_not_find_the_plug_in(
    monkeypatch: pytest.MonkeyPatch, options: object, group: str, engine: str
) -> None:
    """It would serve with bits of its own, and no error."""
    assert callable(options)
    for variable in ("VLLM_PLUGINS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    found = [EntryPoint("other", "other:register", group)]
    monkeypatch.setattr(refusals, "entry_points", lambda *, group: [f for f in found if f.group == group])
    with pytest.raises(refusals.RefusedError, match=f"not installed, so {engine} does not find it"):
        options()
    found.append(EntryPoint("samebits", "samebits:register", group))
    options()

"""The pages that tools write, in a browser: readable in both themes, and no wider than a narrow screen."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import GPUS, load
from samebits.tools.bench.page import write_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SHOWN = """
<iframe id=page width={width} height=900 srcdoc="{page}"></iframe><pre id=found></pre><script>
onload = () => {{
  const inside = document.getElementById("page").contentDocument, root = inside.documentElement;
  const colours = element => [getComputedStyle(inside.body).backgroundColor, getComputedStyle(element).color];
  const drawn = [...inside.querySelectorAll("svg text, svg tspan")].map(t => getComputedStyle(t).fill);
  const found = {{width: root.scrollWidth, colours: colours(inside.body), drawn: [...new Set(drawn)]}};
  document.getElementById("found").textContent = JSON.stringify(found);
}};
</script>
"""
DARK, LIGHT = 0, 1
"""As Chromium numbers the themes that a reader prefers."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("matplotlib")
    file = tmp_path_factory.mktemp("page") / "page.html"
    write_page(load(f"{GPUS[0]}/bench.json"), file)
    return file.read_text()


def shown(page: str, folder: Path, width: int, theme: int) -> Any:
    """What the browser makes of a page in a frame of that width."""
    assert BROWSER is not None
    around = folder / "around.html"
    around.write_text(SHOWN.format(width=width, page=html.escape(page)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    options += [f"--blink-settings=preferredColorScheme={theme}", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        [BROWSER, *options, around.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r"<pre id=\"found\">(.+?)</pre>", done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


def luminance(colour: str) -> float:
    """Of ``rgb(…)``, as contrasts are defined for the web."""
    parts = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=["dark", "light"])
@pytest.mark.parametrize("width", [360, 1200])
def test_a_page_is_readable(page: str, tmp_path: Path, width: int, theme: int) -> None:
    found = shown(page, tmp_path, width, theme)
    assert found["width"] <= width
    ground, ink = map(luminance, found["colours"])
    assert (ground < 0.1) == (theme == DARK), found["colours"]
    assert found["drawn"]
    for colour in (ink, *map(luminance, found["drawn"])):
        light, dark = max(colour, ground), min(colour, ground)
        assert (light + 0.05) / (dark + 0.05) > 4.5, found

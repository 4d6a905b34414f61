"""``python -m samebits``: the command line."""

from samebits.tools.cli import app

app(prog_name="samebits")

"""``python -m samebits``: the command line."""

from samebits.cli import app

app(prog_name="samebits")

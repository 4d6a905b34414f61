"""Models of Hugging Face, from folders and from its cache alone."""

from __future__ import annotations

import os
import sys
from typing import Any


def stay_offline() -> None:
    """Keep transformers off the network: some parts of it ask in spite of ``local_files_only``."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants: Any = sys.modules.get("huggingface_hub.constants")
    if constants is not None:  # it has read the variable already
        constants.HF_HUB_OFFLINE = True

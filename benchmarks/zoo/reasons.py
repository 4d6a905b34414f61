"""Why architectures differ or decode by steps: what is known of them."""

from __future__ import annotations

STEPS: dict[str, str] = {}
"""Models that decode by another algorithm than they prefill by, and what it is."""

REASONS: dict[str, str] = {}
"""What in a model makes it fail."""

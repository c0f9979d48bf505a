"""Where this repository lies."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).parents[2]

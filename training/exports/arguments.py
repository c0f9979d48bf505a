"""Arguments of a class's forward pass that not all classes, or releases of transformers, have alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return by which argument a class's `forward` takes its cache, and under which name it returns it; empty if it has
    none. transformers 5.24 renamed past_key_values to cache.
    """
    names = inspect.signature(forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), "")


def logits_only(model: Any) -> dict[str, bool]:
    """Return the arguments by which a mixture of experts leaves out the loss of its router."""
    name = "output_router_logits"
    return {name: False} if name in inspect.signature(model.forward).parameters else {}

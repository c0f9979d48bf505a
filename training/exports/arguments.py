"""Arguments of a class's forward pass that not all classes have alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return by which argument a class's `forward` takes its cache, and under which name it returns it; empty if it has
    none.
    """
    return "cache" if "cache" in inspect.signature(forward).parameters else ""


def logits_only(model: Any) -> dict[str, bool]:
    """Return the arguments by which a mixture of experts leaves out the loss of its router."""
    name = "output_router_logits"
    return {name: False} if name in inspect.signature(model.forward).parameters else {}

"""Reads a Hugging Face config.json with this release of transformers; code that lies beside it is never run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

logger = logging.getLogger(__name__)

KERNELS = ("_attn_implementation", "_experts_implementation")  # fields of transformers' configs

# What configs and classes of transformers raise for values that they do not know, by the field that is wrong.
WRONG_VALUES = (
    StrictDataclassError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
)


def read_settings(path: Path | str, *, where: str = "", **changes: Any) -> Any:
    """Return the transformers config of a folder, a config.json or a model on the hub, with changed fields.

    `where`: the node that this runs on. How attention and experts are computed is left to us, whatever the file asks
    for. Raises ValueError if this release of transformers cannot read it.
    """
    import transformers

    try:
        settings = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, **changes)
    except WRONG_VALUES as error:
        raise ValueError(
            f"model.path: transformers {transformers.__version__}{where} cannot read its config.json: "
            f"{first_line(error)} Choose a model of a type that this release has; code in a model's folder is never run"
        ) from None
    asked = {
        f"{field[1:]}={value}" for each in _with_parts(settings) for field in KERNELS if (value := _take(each, field))
    }
    if asked:
        logger.warning("config.json of %s asks for %s: ignored, Shardline chooses it", path, ", ".join(sorted(asked)))
    return settings


def _with_parts(settings: Any) -> Iterator[Any]:
    """Yield a config and those in it, of text, images or sound."""
    yield settings
    for name in settings.sub_configs:
        if hasattr(part := getattr(settings, name, None), "sub_configs"):
            yield from _with_parts(part)


def _take(settings: Any, field: str) -> Any:
    """Return a field of a config, and leave the choice to its class: the field may name a program of the hub."""
    value = getattr(settings, field, None)
    vars(settings)[f"{field}_internal"] = None
    return value


def first_line(error: Exception) -> str:
    """Return an error's cause in one line that ends with a full stop; transformers wraps that of a wrong field."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    line = (
        lines[-1]
        if "validation error" in lines[0].lower()
        else repr(error)
        if isinstance(error, KeyError)
        else lines[0]
    )
    return f"{line.rstrip(' .')}."

"""Reads a Hugging Face config.json with this release of transformers; code that lies beside it is never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

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


def read_settings(path: Path, *, where: str = "") -> Any:
    """Return the transformers config of a folder, or of a config.json; `where`: the node that this runs on.

    Raises ValueError if this release of transformers cannot read it.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except WRONG_VALUES as error:
        raise ValueError(
            f"model.path: transformers {transformers.__version__}{where} cannot read its config.json: "
            f"{first_line(error)} Choose a model of a type that this release has; code in a model's folder is never run"
        ) from None


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

"""Device names as keys of the config: `{H100: 2.5, cpu: 0.02}` has a value for each device that a key matches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

from pydantic import StringConstraints

# A parameter of the MLflow run is named after it, so it holds nothing that MLflow refuses in a name.
DeviceName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")]
Value = TypeVar("Value")


def value_for(values: Mapping[str, Value], *, name: str, kind: str) -> Value | None:
    """The value of the longest key whose words the device's name contains, else that of its kind; None without one."""
    for found in (name, kind):
        if matching := [key for key in values if _padded(key) in _padded(found)]:
            return values[max(matching, key=lambda key: len(_padded(key)))]
    return None


def key_for(name: str) -> str:
    """A key that matches devices of this name: `NVIDIA A100-SXM4-80GB` is `nvidia a100 sxm4 80gb`."""
    spaced = "".join(letter if letter.isalnum() else " " for letter in name.lower())
    return " ".join(spaced.split())


def check_keys(field: str, keys: Iterable[str]) -> None:
    """Raises ValueError for two keys of the field that match the same devices."""
    known: dict[str, str] = {}
    for key in keys:
        if (other := known.setdefault(key_for(key), key)) != key:
            raise ValueError(f"{field} has {other} and {key}, which match the same devices: keep one")


def _padded(name: str) -> str:
    """The words of a name, each between spaces, so that `A10` is not found in `A100`."""
    return f" {key_for(name)} "

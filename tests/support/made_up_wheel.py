"""Wheels of a package made-up, whose only module is made_up."""

from __future__ import annotations

import zipfile
from pathlib import Path


def made_up_wheel(folder: Path, *, code: str, version: str = "1.0", python: str = "py3") -> Path:
    """Write the wheel to `folder`; `python` is the tag of the Pythons that it is for, such as py311."""
    path, about = folder / f"made_up-{version}-{python}-none-any.whl", f"made_up-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("made_up.py", code)
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: made-up\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {python}-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return path

"""What torch.compile needs of a host: a compiler, Python's headers, on GPUs Triton. Needs only Python itself."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path


def why_no_compile(device_kind: str) -> str:
    """Return the program that torch.compile lacks on this host, with the cure; empty if it lacks nothing.

    Inductor builds its code for CPUs, and Triton what calls its kernels, against Python's headers.
    """
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler}: install one (apt-get install g++), or set CXX"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.exists():
        return f"Python's headers are not there ({headers}): install them (apt-get install python3-dev)"
    if device_kind == "cuda" and find_spec("triton") is None:
        return "the package triton is not installed: use a build of torch that comes with it (pip install triton)"
    return ""

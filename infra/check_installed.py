"""What `make setup` ends with: shows that the packages that it installed work.

They are imported, and `multiprocess`, by which `datasets` and `datatrove` use several processes, starts one. Its wheel
for another Python has the same version number, is accepted by every installer, and fails only there.

    python -m infra.check_installed     exit code 1, and the package that failed as the last line of standard output
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path

MODULES = ("torch", "deepspeed", "transformers", "onnxruntime", "onnxscript", "mlflow", "prefect", "datasets")


def main(*modules: str) -> None:
    began = time.monotonic()
    try:
        for name in modules or MODULES:
            importlib.import_module(name)
        start_a_process()
    except Exception as error:
        traceback.print_exc()
        print(package_that_raised(error))
        sys.exit(1)
    print(f"{', '.join(modules or MODULES)} and new processes work (checked in {time.monotonic() - began:.0f} s)")


def start_a_process() -> None:
    with importlib.import_module("multiprocess").get_context("spawn").Pool(1) as pool:
        assert pool.map(len, ["two"]) == [3]


def package_that_raised(error: BaseException) -> str:
    """Return the installed package with the innermost of the traceback's files; empty if none has any of them."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    for file in reversed(files):
        for package in metadata.distributions():
            if any(file == package.locate_file(name) for name in package.files or () if name.name == file.name):
                return package.name
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])

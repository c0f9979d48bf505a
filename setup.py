"""Writes the checkout's commit into a wheel. All else about the package is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class WithCommit(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        sys.path.insert(0, str(HERE))
        from tasks.tracking import code_version

        commit = code_version.write_stamp(Path(self.build_lib, "tasks", "tracking"))
        if commit == "unknown":
            why = "git knows none of this folder: build it in a checkout, with pip wheel"
            print(f"the wheel will not name its commit: {why}", file=sys.stderr)


setup(cmdclass={"build_py": WithCommit})

"""Run by train.Dockerfile: installs Shardline and training's packages to /opt/shardline, beside the base image's.

The base image's torch is kept: it is built for the image's CUDA and NCCL. It is often a pre-release (2.13.0a0+nv26.06),
which pip would replace if it were asked for torch>=2.13.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

TARGET = Path("/opt/shardline")
HERE = Path(__file__).parent


def main(part: str) -> None:
    if part == "dependencies":
        install_dependencies()
    else:
        _pip("--no-deps", ".")


def install_dependencies() -> None:
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    torch = _installed_torch()
    if torch:
        requirements = without_torch(requirements, torch=torch)
        print(f"keeping the base image's torch {torch}", flush=True)
        (HERE / "keep.txt").write_text(f"torch=={torch}\n")
    has_pip = importlib.util.find_spec("pip") is not None
    venv.create(TARGET, system_site_packages=True, symlinks=True, with_pip=not has_pip)
    _pip(*(["--constraint", str(HERE / "keep.txt")] if torch else []), *requirements)
    if torch and list(TARGET.rglob("torch-*.dist-info")):
        sys.exit(f"pip installed another torch over the base image's {torch}")


def without_torch(requirements: list[str], *, torch: str) -> list[str]:
    """Return the requirements without torch, which the base image has.

    Exits, with the cure, if that torch is too old.
    """
    wanted = next(word for word in requirements if _name(word) == "torch")
    if _release(torch) < _release(wanted):
        sys.exit(f"the base image has torch {torch}, Shardline needs {wanted}: take a newer BASE_IMAGE")
    return [word for word in requirements if word != wanted]


def _pip(*words: str) -> None:
    """Install, then compile on all cores, because pip uses only one; .pyc files are not checked, because files in an
    image do not change. PIP_CONSTRAINT is removed: NVIDIA's images set it to their own versions, and these packages are
    installed beside them.
    """
    python = str(TARGET / "bin" / "python")
    options = ["--no-compile", "--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off"]
    found = ["--find-links", str(HERE)] if any(HERE.glob("*.whl")) else []
    ca = {"PIP_CERT": str(HERE / "ca.pem")} if (HERE / "ca.pem").exists() else {}
    command = [python, "-m", "pip", "install", *options, *found, *words]
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"} | ca
    if (done := subprocess.run(command, cwd=HERE, env=environment)).returncode:
        sys.exit(done.returncode)
    # Some packages contain templates that are not valid Python; pip ignores them too.
    compiling = [python, "-m", "compileall", "-qq", "-j", "0", "--invalidation-mode", "unchecked-hash", str(TARGET)]
    subprocess.run(compiling, check=False)


def _installed_torch() -> str:
    """Return the version of torch in the base image; empty if it has none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return match[0]


def _release(text: str) -> tuple[int, int]:
    """Return (2, 13) for `torch>=2.13`, (2, 13) for `2.13.0a0+nv26.06`."""
    match = re.search(r"(\d+)\.(\d+)", text)
    assert match is not None, text
    return int(match[1]), int(match[2])


if __name__ == "__main__":
    main(sys.argv[1])

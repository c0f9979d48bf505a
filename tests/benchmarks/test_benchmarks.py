"""Every benchmark starts, at its smallest size, and ends with the figures that its docstring promises."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.conftest import missing

REPO = Path(__file__).parents[2]
SMALLER = {"gpu": ["--tiny"]}  # beside --quick; on a CPU
IN_SECONDS = {"planner_vs_published"}


def benchmarks() -> list[str]:
    return sorted(path.stem for path in (REPO / "benchmarks").glob("*.py") if '"--quick"' in path.read_text())


def marked(name: str) -> object:
    needs_hosts = "benchmarks.hosts" in (REPO / "benchmarks" / f"{name}.py").read_text()
    marks = [pytest.mark.rig, pytest.mark.skipif(bool(missing()), reason=missing())] if needs_hosts else []
    return pytest.param(name, marks=marks if name in IN_SECONDS else [*marks, pytest.mark.slow])


def promised(name: str) -> set[str]:
    """The keys that the docstring names where it speaks of the last line."""
    docstring = ast.get_docstring(ast.parse((REPO / "benchmarks" / f"{name}.py").read_text())) or ""
    return set(re.findall(r"`([a-z]\w+)`", docstring.partition("The last line is one JSON object")[2]))


def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=os.environ | environment)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [marked(name) for name in benchmarks()])
def test_a_benchmark_ends_with_the_figures_it_promises(name: str) -> None:
    done = run(name, "--quick", *SMALLER.get(name, []))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    *table, last = done.stdout.splitlines()
    figures = json.loads(last)
    assert table
    assert promised(name)
    assert promised(name) - figures.keys() == set()


def test_a_benchmark_for_gpus_says_that_there_is_none() -> None:
    done = run("gpu", "--quick", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().splitlines()[-1].startswith("benchmarks.gpu needs a CUDA device, torch sees none")

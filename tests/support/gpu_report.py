"""`make test-gpu`: everything of ours that needs a GPU, on this machine, and one page about it to commit.

    python -m tests.support.gpu_report [--quick]

Runs the tests of ranks with their devices on CUDA and those marked `gpu`, benchmarks/gpu.py, and the build of the
training image where Docker answers. Leaves docs/gpu-report.md; exits with 1 if any of it failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

import torch

from tests.support.repository import REPO

REPORT = REPO / "docs" / "gpu-report.md"
ON_DEVICE = (
    *(f"tests/training/{package}" for package in ("strategies", "checkpoint", "trainer", "inference", "runtime")),
    "tests/training/monitoring/test_nonfinite.py",
)
LAST_LINES = 30


@dataclass(frozen=True)
class Part:
    """One command: what it is for, how it ended, and what it printed last."""

    title: str
    command: tuple[str, ...]
    passed: bool
    seconds: float
    summary: str
    output: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tests marked gpu and the smallest benchmark only")
    quick = parser.parse_args().quick
    if not torch.cuda.is_available():
        print("make test-gpu needs a CUDA device, torch sees none: run it on a machine with a GPU", file=sys.stderr)
        sys.exit(2)
    parts = [tests("tests marked gpu", ("-m", "gpu"))]
    if not quick:
        parts.append(tests("tests of ranks, on GPUs", ("-m", "not rig and not long", *ON_DEVICE)))
    parts.append(run("benchmarks.gpu", (sys.executable, "-m", "benchmarks.gpu", *(("--quick",) if quick else ()))))
    if not quick and shutil.which("docker"):
        parts.append(run("the training image", (sys.executable, "-m", "flows.cli", "image", "build")))
    REPORT.write_text(page(parts))
    print(f"\n{REPORT.relative_to(REPO)} has the results: commit it")
    sys.exit(0 if all(part.passed for part in parts) else 1)


def tests(title: str, options: tuple[str, ...]) -> Part:
    """pytest on GPUs. Without parallel processes, which would share them."""
    results = REPO / ".gpu-results.xml"
    part = run(title, (sys.executable, "-m", "pytest", "-q", f"--junitxml={results}", *options))
    suite = next(ElementTree.parse(results).iter("testsuite"))
    results.unlink()
    counts = ", ".join(f"{suite.get(what)} {what}" for what in ("tests", "failures", "errors", "skipped"))
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    return Part(title, part.command, part.passed, part.seconds, counts, "\n".join(map(str, failed)))


def run(title: str, command: tuple[str, ...]) -> Part:
    """Run it, showing what it prints."""
    print(f"\n== {title}: {' '.join(command)}", flush=True)
    began, lines = time.monotonic(), []
    env = os.environ | {"SHARDLINE_TEST_DEVICE": "cuda"}
    with subprocess.Popen(
        command, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines = [*lines[1 - LAST_LINES :], line]
    passed, seconds = process.returncode == 0, time.monotonic() - began
    return Part(title, command, passed, seconds, f"exit code {process.returncode}", "".join(lines))


def page(parts: list[Part]) -> str:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    named = ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=REPO, capture_output=True, text=True)
    lines = [
        "# On GPUs",
        "",
        f"`make test-gpu`, {datetime.date.today()}, commit {commit.stdout.strip()}: {named}; torch "
        f"{torch.__version__}, CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}.",
        "",
        "| part | result | seconds |",
        "|---|---|---|",
        *(
            f"| {part.title} | {'passed' if part.passed else '**failed**'}: {part.summary} | {part.seconds:.0f} |"
            for part in parts
        ),
    ]
    for part in parts:
        shown = " ".join(part.command).replace(sys.executable, "python").replace(f"{REPO}/", "")
        lines += [
            "",
            f"## {part.title}",
            "",
            f"`{shown}`",
            "",
            "```",
            part.output.strip().replace(str(REPO), "."),
            "```",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

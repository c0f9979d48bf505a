"""Runs the ranks under Nsight Systems if profile.nsys asks for it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from tasks.hardware.preflight import HostFacts
from training.config.run import RunConfig
from training.records.plan import CustomProgramPlan, RankPlan

CURE = "or use profile.steps=[20,21] for a trace by torch's own profiler"


def check_here(config: RunConfig) -> None:
    """Raise ValueError if config.profile asks for Nsight Systems, and this machine does not have it."""
    if config.profile.nsys and config.launch.launcher == "local" and shutil.which("nsys") is None:
        raise ValueError(f"profile.nsys=true, but there is no nsys on PATH: install Nsight Systems, {CURE}")


def check_image(config: RunConfig, facts: Mapping[str, HostFacts]) -> None:
    """Raise ValueError if config.profile asks for Nsight Systems, and a host's image does not have it."""
    without = [name for name, found in facts.items() if not found.nsys]
    if config.profile.nsys and without:
        raise ValueError(
            f"profile.nsys=true, but the image {config.launch.image} has no nsys on PATH (looked on "
            f"{', '.join(without)}): build it on a base that has Nsight Systems, as NVIDIA's PyTorch images do, {CURE}"
        )


def prefix(
    module: str, plan: RankPlan | CustomProgramPlan, *, run_dir: Path, rank: str = "%q{RANK}"
) -> tuple[str, ...]:
    """Return the start of each rank's command: nsys writes runs/ID/profile/TIME-rank-N.nsys-rep. Makes that folder.

    On GPUs it records only the steps of profile.steps, if there are any, with a report for each
    (docs.nvidia.com/nsight- systems, --capture-range); for a whole run it writes gigabytes. `rank`: its number, or
    nsys' placeholder for an environment variable.
    """
    profile = plan.config.profile
    if not profile.nsys or module != "training.train":
        return ()
    steps: tuple[str, ...] = ()
    if profile.steps and plan.device_kind == "cuda":
        steps = ("--capture-range=cudaProfilerApi", f"--capture-range-end=repeat:{len(profile.steps)}")
    (run_dir / "profile").mkdir(exist_ok=True)
    report = run_dir / "profile" / f"{time.strftime('%Y%m%d-%H%M%S')}-rank-{rank}"
    return ("nsys", "profile", "--sample=none", "--trace=cuda,nvtx,osrt", *steps, "-o", str(report))

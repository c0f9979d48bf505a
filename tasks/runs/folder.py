"""Finds the runs' folders, and reads one: its plan, its config, its newest checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.workspace.paths import home
from tasks.workspace.skip import of_this_format
from training.config.run import RunConfig
from training.records.plan import RunPlan
from training.records.record import DamagedRecord, OtherFormat, Record

RECORDS = ("run.json", "plan.json")  # of which each run has one

PLANS = ("plan.json", "trainer.json")  # Shardline's launcher, and that of a user's program


def run_folders() -> list[Path]:
    """Return the folders of this SHARDLINE_HOME's runs, without those of another version of Shardline."""
    return of_this_format(all_run_folders(), of_this_version, what="run", name=lambda folder: folder.name)


def all_run_folders() -> list[Path]:
    """Return the folders of this SHARDLINE_HOME's runs, of whatever version."""
    return sorted(path for path in home().iterdir() if any((path / name).exists() for name in RECORDS))


def of_this_version(folder: Path) -> Path:
    """Return the folder of a run. Raises OtherFormat; damage is for those to tell who read more."""
    record = next(folder / name for name in RECORDS if (folder / name).exists())
    try:
        Record.fields(record)
    except OtherFormat:
        raise
    except (OSError, DamagedRecord):
        pass
    return folder


def read_plan(run_dir: Path) -> RunPlan | None:
    path = run_dir / "plan.json"
    return RunPlan.read(path) if path.exists() else None


def earlier_plans(run_dir: Path) -> list[RunPlan]:
    """Return the plans that plan.json has replaced, newest first."""
    paths = sorted(run_dir.glob("plan-*.json"), key=lambda path: int(path.stem.removeprefix("plan-")), reverse=True)
    return [RunPlan.read(path) for path in paths]


def latest_config(run_dir: Path, *, begun_with: RunConfig) -> RunConfig:
    """Return the plan's config, which a resume may have changed; without a plan, the config that the run began with."""
    plan = read_plan(run_dir)
    return plan.config if plan else begun_with


def steps_done(run_dir: Path) -> int:
    """Return the step of the newest checkpoint."""
    return max((int(path.name) for path in (run_dir / "checkpoints").glob("[0-9]*")), default=0)


def flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("train.steps", 480), ("data.sources.0.path", "books"), …"""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            yield from flattened(dict(zip(map(str, range(len(value))), value, strict=True)), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

"""A stage of a flow: a Prefect task whose seconds are recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.tracking.mlflow_run import TrackedRun
from training.records.record import write_atomically

P = ParamSpec("P")
R = TypeVar("R")


def stage(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a Prefect task of that name, without a result cache, because each stage checks its own record."""
    return task(name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)


@contextmanager
def timed(run: TrackedRun, name: str) -> Iterator[None]:
    """Record the stage's seconds in runs/ID/stages.json; if a resume repeats a stage, its seconds are added up."""
    path, start = run.folder / "stages.json", time.perf_counter()
    try:
        yield
    finally:
        seconds = stage_seconds(run)
        seconds[name] = round(seconds.get(name, 0.0) + time.perf_counter() - start, 2)
        with suppress(OSError):  # on a full disk this figure is lost; that must not hide why the stage ended
            write_atomically(path, json.dumps(seconds))


def stage_seconds(run: TrackedRun) -> dict[str, float]:
    path = run.folder / "stages.json"
    return json.loads(path.read_text()) if path.exists() else {}

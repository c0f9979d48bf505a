"""A stage of a flow: a Prefect task whose seconds are recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled, State

from flows.servers.embedded import is_gone
from tasks.runs.errors import RunStopped
from tasks.tracking.mlflow_run import TrackedRun
from training.records.record import DamagedRecord, read_fields, write_atomically

P = ParamSpec("P")
R = TypeVar("R")


def stage(name: str, *, run_name: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a Prefect task of that name, without a result cache, because each stage checks its own record.

    A RunStopped ends the task as Cancelled, and is raised to the flow. Once the embedded server is gone, the function
    is called without Prefect. `run_name`: of one run of the task, by default `name`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def cancelled_if_stopped(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except RunStopped as stop:
                if is_gone():
                    raise
                return cast(R, Cancelled(message=str(stop)))

        named = task(name=name, task_run_name=run_name or name, cache_policy=NO_CACHE, persist_result=False)
        made = named(cancelled_if_stopped)

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            result = (function if is_gone() else made)(*args, **kwargs)
            if isinstance(result, State):  # Prefect returns it to a caller in a flow as it is
                raise RunStopped(result.message)
            return result

        return run

    return decorate


@contextmanager
def timed(run: TrackedRun, name: str) -> Iterator[None]:
    """Record the stage's seconds in runs/ID/stages.json; if a resume repeats a stage, its seconds are added up."""
    path, start = run.folder / "stages.json", time.perf_counter()
    try:
        yield
    finally:
        with suppress(OSError, DamagedRecord):  # this figure is lost; that must not hide why the stage ended
            seconds = stage_seconds(run)
            seconds[name] = round(seconds.get(name, 0.0) + time.perf_counter() - start, 2)
            write_atomically(path, json.dumps(seconds))


def stage_seconds(run: TrackedRun) -> dict[str, float]:
    path = run.folder / "stages.json"
    return read_fields(path) if path.exists() else {}

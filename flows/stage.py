"""A stage is a Prefect task."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE

P = ParamSpec("P")
R = TypeVar("R")


def stage(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A Prefect task by that name. No result cache: each stage has its record, and checks that it is still true."""
    return task(name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)

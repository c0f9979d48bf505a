"""Tokenization by Prefect's task runners: processes of this machine, Dask and Ray clusters (data.engine).

Each task is a Prefect task, so Prefect's page shows where it runs. A small number of tasks runs without a runner, and
processes of this machine do where Prefect is embedded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, as_completed
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner

import tasks
from flows.servers.embedded import is_embedded
from tasks.data.engine import Engine, LocalProcesses, Task, check_of_worker, killed, start_worker
from tasks.hardware.machine import usable_cores
from training.config.data import DataConfig, EngineConfig

logger = logging.getLogger(__name__)

ANSWERS_WITHIN_S = 20
HOW_TO_START = {
    "dask": "`dask scheduler` on one machine, `dask worker tcp://HEAD:8786 --nthreads 1 --nworkers auto` on all",
    "ray": "`ray start --head --ray-client-server-port 10001`, `ray start --address HEAD:6379` on the others",
}


@task(name="Chunks", task_run_name="{title}", cache_policy=NO_CACHE, persist_result=False)
def do_task(title: str, run: Callable[[], list[tuple[int, Any]]]) -> list[tuple[int, Any]]:
    return run()


@contextmanager
def engine_of(data: DataConfig) -> Iterator[Engine]:
    """Yield the engine of `data.engine`. Its runner starts with the first work that needs it; ends with the block.

    Prefect's processes wait for its server forever once that is gone, so with the embedded one, which has no page to
    show tasks on, processes of this machine are used without Prefect.
    """
    processes = data.processes or usable_cores()
    with ExitStack() as stack:
        plain = data.engine.kind == "local" and is_embedded()
        yield LocalProcesses(processes) if plain else PrefectEngine(data.engine, processes, stack)


class PrefectEngine:
    tasks_per_worker = 4  # each costs the process that distributes them 9 ms, or 43 ms with Dask (docs/data.md)

    def __init__(self, config: EngineConfig, processes: int, stack: ExitStack) -> None:
        self.config, self.processes, self.stack = config, processes, stack
        self.runner: TaskRunner[Any] | None = None

    @property
    def is_cluster(self) -> bool:
        return self.config.kind != "local"

    @property
    def workers(self) -> int:
        if not (self.is_cluster and self.config.address):
            return self.processes
        self._start()
        return _workers_of_dask(self.runner) if self.config.kind == "dask" else _workers_of_ray()

    def run(self, tasks: Sequence[Task]) -> Iterator[list[tuple[int, Any]]]:
        # As in tasks.data.engine.LocalProcesses; but a cluster is always used if the config names one.
        if not self.is_cluster and (self.processes == 1 or len(tasks) <= self.processes):
            yield from (each.run() for each in tasks)
            return
        if not tasks:
            return
        self._start()
        with self._lost_workers():
            if self.is_cluster:
                self._check_worker(tasks[0])
            try:
                for future in as_completed([self._submit(each) for each in tasks]):
                    yield future.result()
            except BaseException:
                self._stop()  # tasks that have not started are cancelled
                raise

    def _submit(self, each: Task) -> PrefectFuture[list[tuple[int, Any]]]:
        assert self.runner is not None
        # The bound method is passed: Prefect would search a dataclass for futures, which takes minutes if it is large.
        return self.runner.submit(do_task, {"title": each.title, "run": each.run})

    def _start(self) -> None:
        if self.runner is None:
            runner = _runner(self.config, self.processes)
            with self._unreachable():
                started: Any = self.stack.enter_context(runner)
                if self.config.kind == "dask":
                    # This connects. pure=False: otherwise Dask hashes all of Prefect's context to find equal tasks.
                    started.client.submit = partial(started.client.submit, pure=False)
                self.runner = started

    def _stop(self) -> None:
        self.stack.close()
        self.runner = None

    def _check_worker(self, first: Task) -> None:
        check = check_of_worker(first)
        try:
            self._submit(check).result()
        except ImportError as error:
            raise ValueError(
                f"data.engine: a worker of {self._described} cannot import what the tasks need ({error}): install the "
                "same version of Shardline there as here"
            ) from error
        finally:
            check.work.mark.unlink(missing_ok=True)

    @property
    def _described(self) -> str:
        return f"the {self.config.kind} cluster at {self.config.address or 'this machine'}"

    @contextmanager
    def _unreachable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ConnectionError) as error:
            raise ValueError(
                f"data.engine.address={self.config.address}: no {self.config.kind} cluster answers there within "
                f"{ANSWERS_WITHIN_S} s ({error}); start one ({HOW_TO_START[self.config.kind]}), or correct the address"
            ) from error

    @contextmanager
    def _lost_workers(self) -> Iterator[None]:
        try:
            yield
        except _errors_of_cluster(self.config.kind) as error:
            if not self.is_cluster:
                raise killed(self.processes) from error
            raise RuntimeError(
                f"{self._described} was lost, or a task ended several of its workers, most often because memory ran "
                f"out ({type(error).__name__}: {error}): the same command continues where this one stopped"
            ) from error


def _runner(config: EngineConfig, workers: int) -> TaskRunner[Any]:
    """Return the task runner, not started. Raises ValueError if its library is missing."""
    if config.kind == "local":
        return ProcessPoolTaskRunner(max_workers=workers, initializer=start_worker)
    try:
        if config.kind == "dask":
            from distributed.security import Security
            from prefect_dask import DaskTaskRunner

            if config.address:
                return DaskTaskRunner(address=config.address, client_kwargs={"timeout": ANSWERS_WITHIN_S})
            # Only who has this key may send it work, and no page is open to other machines.
            only_us = {"security": Security.temporary()}
            cluster = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None}
            return DaskTaskRunner(cluster_kwargs=cluster | only_us, client_kwargs=only_us)
        import ray  # noqa: F401  (prefect_ray loads it later)
        from prefect_ray import RayTaskRunner
    except ImportError as error:
        raise ValueError(
            f"data.engine.kind={config.kind} needs a library that is not installed ({error}): "
            f"pip install 'shardline[{config.kind}]'"
        ) from None
    if config.address:
        return RayTaskRunner(address=config.address)
    _check_folder_for_ray(Path.cwd())
    return RayTaskRunner(init_kwargs={"num_cpus": workers, "include_dashboard": False})


def _check_folder_for_ray(folder: Path) -> None:
    """Raise ValueError if `folder`, which Ray puts first on its workers' path, has modules named like Shardline's."""
    ours = Path(tasks.__path__[0]).parent
    names = ("flows", "infra", "tasks", "training")
    found = [path.name for name in names for path in (folder / name, folder / f"{name}.py") if path.exists()]
    if found and folder != ours:
        raise ValueError(
            f"data.engine.kind=ray: Ray's workers would import {', '.join(found)} of {folder} instead of Shardline's: "
            "start this command from another folder, or set data.engine.kind=local"
        )


def _workers_of_dask(runner: Any) -> int:
    workers = sum(runner.client.nthreads().values())
    if not workers:
        raise ValueError(
            f"data.engine.address={runner.address}: the scheduler has no workers: start some ({HOW_TO_START['dask']})"
        )
    return workers


def _workers_of_ray() -> int:
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _errors_of_cluster(kind: str) -> tuple[type[BaseException], ...]:
    """Return the errors that mean that a worker or the whole cluster is gone; a failed task raises others."""
    if kind == "dask":
        from distributed import CancelledError as FutureCancelled
        from distributed import KilledWorker
        from distributed.comm import CommClosedError

        return FutureCancelled, KilledWorker, CommClosedError
    if kind == "ray":
        from ray.exceptions import RayError

        return RayError, ConnectionError
    return BrokenExecutor, CancelledError

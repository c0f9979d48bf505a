"""The interface between the work on a corpus's chunks and the processes or cluster that do it.

A task is a function of a description alone, so that any process that sees the corpus and the shard folder can do it.
Here processes of this machine do it; flows/stages/engine.py uses Prefect's task runners.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import platform
import signal
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from tasks.data.chunks import Chunk
from tasks.hardware.machine import usable_cores
from training.records.record import write_atomically

MOST_TASKS = 4096  # of a corpus of any size
TASK_BYTES = 2**26  # of text, about 1 s on one core: shorter tasks would keep the process that distributes them busy
PARALLELISM = "TOKENIZERS_PARALLELISM"
PRELOADED = ["tasks.data.sharding", "gigatoken"]


@dataclass(frozen=True)
class Task:
    """Consecutive chunks for one worker. `work`: the arguments that `function` needs beside the chunk."""

    title: str
    function: Callable[[Any, Chunk], Any]
    work: Any
    chunks: tuple[Chunk, ...]

    def run(self) -> list[tuple[int, Any]]:
        """Return the results by the chunks' indices."""
        return [(chunk.index, self.function(self.work, chunk)) for chunk in self.chunks]


class Engine(Protocol):
    """Runs tasks, at most `workers` at once, and yields their results in the order in which they end."""

    @property
    def workers(self) -> int: ...

    @property
    def tasks_per_worker(self) -> int:
        """At least so many, so that the others wait at most that part of the time for the last task."""

    def run(self, tasks: Sequence[Task]) -> Iterator[list[tuple[int, Any]]]: ...


def run_chunks(
    engine: Engine, title: str, function: Callable[[Any, Chunk], Any], work: Any, chunks: Sequence[Chunk]
) -> Generator[tuple[int, Any]]:
    """Yield each chunk's index and the result of `function`, as chunks are finished."""
    least = engine.tasks_per_worker * engine.workers
    for results in engine.run(tasks_of(title, function, work, chunks, least=least)):
        yield from results


def tasks_of(
    title: str, function: Callable[[Any, Chunk], Any], work: Any, chunks: Sequence[Chunk], *, least: int
) -> list[Task]:
    """Group the chunks into tasks: at least `least`, but at most thousands, whatever the size of the corpus."""
    total = sum(chunk.num_bytes for chunk in chunks)
    number = min(len(chunks), MOST_TASKS, max(least, total // TASK_BYTES))
    borders = [len(chunks) * index // number for index in range(number + 1)] if number else []
    return [
        Task(
            f"{title} {first}" + (f"-{stop - 1}" if stop > first + 1 else ""), function, work, tuple(chunks[first:stop])
        )
        for first, stop in itertools.pairwise(borders)
    ]


@dataclass(frozen=True)
class SharedFiles:
    """A mark in the shard folder, with its content, that each worker must see."""

    folder: Path
    mark: Path
    content: str


def check_of_worker(task: Task) -> Task:
    """Return a task that raises ValueError, with the cure, on a worker that does not see the files of `task`."""
    content, folder = uuid.uuid4().hex, task.work.folder
    mark = folder / f".{content}.part"
    write_atomically(mark, content)
    return Task("check that workers see the files", see_files, SharedFiles(folder, mark, content), task.chunks)


def see_files(files: SharedFiles, chunk: Chunk) -> None:
    host = platform.node()
    if not files.mark.is_file() or files.mark.read_text() != files.content:
        raise ValueError(
            f"data.engine: a worker on {host} does not see {files.folder}, where the shards are written: set "
            "SHARDLINE_HOME to a folder that all machines share under the same path"
        )
    for source in (span.source for span in chunk.spans):
        if source.remote or source.format == "hub":
            continue
        size = source.path.stat().st_size if source.path.is_file() else 0
        if size < source.record.num_bytes:
            raise ValueError(
                f"data.engine: a worker on {host} sees {size:,} of {source.record.num_bytes:,} bytes in {source.path}: "
                "put the corpus into a folder that all machines share under the same path, or give a URL"
            )


class LocalProcesses:
    """This process and others of this machine, one per core by default; this one alone for a small number of tasks."""

    tasks_per_worker = 32

    def __init__(self, processes: int = 0) -> None:
        self.workers = processes or usable_cores()

    def run(self, tasks: Sequence[Task]) -> Iterator[list[tuple[int, Any]]]:
        # With at most one task per process, the tokenizer's own threads are as fast, and no process (1 s) is started.
        if self.workers == 1 or len(tasks) <= self.workers:
            yield from (task.run() for task in tasks)
            return
        # This process has threads (tokenizer, progress bar), whose locks a fork would copy. A server without threads
        # imports what workers need, once, and forks them all: the second pool of a corpus starts within 0.1 s. This
        # process does tasks as they do, so that its core is not idle while the server imports.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        pool = ProcessPoolExecutor(
            self.workers - 1, mp_context=context, initializer=start_worker, initargs=(dict(os.environ),)
        )
        here = threading.Lock()

        def do(task: Task) -> list[tuple[int, Any]]:
            if here.acquire(blocking=False):
                try:
                    return task.run()
                finally:
                    here.release()
            try:
                there = pool.submit(task.run)
            except (BrokenProcessPool, EOFError, ConnectionError) as error:  # the server that starts workers is gone
                raise killed(self.workers) from error
            try:
                return there.result()
            except BrokenProcessPool as error:
                raise killed(self.workers) from error

        threads = ThreadPoolExecutor(2 * self.workers - 1)  # so that each process has its next task when it ends one
        try:
            with one_thread():
                for future in as_completed([threads.submit(do, task) for task in tasks]):
                    yield future.result()
        finally:
            threads.shutdown(cancel_futures=True)
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let tokenizers encode with one thread, because there are as many processes as cores."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"
    try:
        yield
    finally:
        os.environ.pop(PARALLELISM) if before is None else os.environ.update({PARALLELISM: before})


def killed(workers: int) -> RuntimeError:
    return RuntimeError(
        f"one of {workers} tokenizing processes was killed, most often because memory ran out: lower "
        "data.processes or data.shard_mib; the same command continues where this one stopped"
    )


def start_worker(environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Prepare a started process for tasks. `environment`: its parent's, for one forked by a server with another."""
    if environment:
        os.environ.clear()
    os.environ.update(environment)
    os.environ[PARALLELISM] = "false"  # one thread, because there are as many processes as cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches all processes; only the parent handles it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent ends: after kill -9 of the parent it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

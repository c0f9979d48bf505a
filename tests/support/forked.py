"""Programs of tests, forked from a process that has imported what they need.

A command of ours, or a server, imports for 3 to 5 s of a core before it begins. Its process, environment and output are
those of a program that is started anew, as those are where a start, its imports or a kill of it are tested.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
set_by_imports: dict[str, str] = {}  # variables that a program's imports would set: MLflow's of its telemetry


class Forked:
    """`python -m MODULE ARGUMENT…`, with what tests use of subprocess.Popen; `stdout` has what goes to stderr, too."""

    def __init__(self, module: str, *arguments: str) -> None:
        reader, writer = SERVER.Pipe(duplex=False)
        with reader, writer:
            output = writer, writer
            self.process = SERVER.Process(target=_run, args=(module, arguments, dict(os.environ), output))
            self.process.start()
            self.stdout = os.fdopen(os.dup(reader.fileno()))
        assert self.process.pid is not None
        self.pid, self.kill, self.wait = self.process.pid, self.process.kill, self.process.join

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """What it says until its end; for programs that say little."""
        self.wait(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout)
        return self.stdout.read(), None


def run_program(
    args: Sequence[str], *, env: Mapping[str, str] = os.environ, timeout: float | None = None, **_: bool
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run with captured output; [python, "-m", MODULE, ARGUMENT…] is forked."""
    if args[1] != "-m":
        return subprocess.run(args, env=env, timeout=timeout, capture_output=True, text=True)
    _, _, module, *arguments = args
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out"), Path(folder, "err")
        process = SERVER.Process(target=_run, args=(module, arguments, dict(env), output))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(args, timeout or 0)
        return subprocess.CompletedProcess(args, process.exitcode or 0, *(path.read_text() for path in output))


def _run(module: str, arguments: Sequence[str], environment: dict[str, str], output: tuple[Any, Any]) -> None:
    """`output`: a path or a connection for stdout, and for stderr."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment | set_by_imports)
    for number, to in zip((1, 2), output, strict=True):
        os.dup2(os.open(to, os.O_WRONLY | os.O_CREAT) if isinstance(to, Path) else to.fileno(), number)
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # as an interpreter ends: it waits for threads, then calls what was registered
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()

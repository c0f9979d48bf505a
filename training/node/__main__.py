"""The program that a launcher starts on each host for each attempt: `python -m training.node [--stand-by] NODE.json`.

It starts the ranks of this host, and stops them with a checkpoint on SIGTERM, when the launcher on this machine ends,
or when the launcher's lease is no longer renewed. So a launcher that is killed with -9, or cut off, leaves no ranks
behind. It writes a record of its end. It does not import torch, which would take 1.5 s on one core at each start. With
--stand-by it imports the ranks' program, and takes tasks over its standard input, one after the other, until a task is
not done or the input ends. Exit codes: 0 done, 130 stopped as asked, 137 asked to stop and killed, otherwise the exit
code of the process that started the ranks.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from training.node.fork_server import RankOrder
from training.node.output import Causes, Output
from training.node.ranks import (
    ENDS,
    adopt_orphans,
    command,
    end_starter,
    kill_family,
    kill_siblings,
    rank_environment,
    rank_order,
    stop_ranks,
)
from training.records.node import HandedTask, NodeEnd, NodeEnding, NodeTask, RankEnd, RankEnds, RankFailure, StopCause
from training.tracking.redaction import USER, without_secrets

POLL_S = 0.1
TORCHRUN_S = 5.0  # wait for torchrun's end after its ranks: alone it waits up to 300 s for other hosts' torchruns
SIBLINGS_S = 1.0  # wait for the other ranks after a failure: the launcher waits 2 s to find the host where it began
LOOK_EVERY_S = 1.0  # seconds between checks of the lease
STOPPED, KILLED = 130, 137


def main(path: Path) -> int:
    """Run the task at `path`."""
    task = NodeTask.read(path)
    order, output = StopOrder(task), Output()
    secrets: dict[str, str] = {}
    try:
        secrets = _parsed(_read_line(order, timeout_s=task.lease_s)) if task.secrets_on_stdin else {}
    except ValueError as error:
        return _finish(task, _not_started(str(error), order), secrets, output=output)
    with started(task, secrets) as process:
        end = _run(task, secrets, process, order=order, output=output)
    return _finish(task, end, secrets, output=output)


def stand_by(path: Path) -> int:
    """Import the program of the task at `path`, then take tasks, each with its secrets and its log, over stdin.

    The first tasks' ranks are forked from one process, so that later ones need no imports. Ends after a task that is
    not done, and as done once standard input is closed.
    """
    task, output = NodeTask.read(path), Output()
    order = StopOrder(task)
    with started(task, {}) as starter:
        while True:
            try:
                content = _read_line(order, timeout_s=float("inf"), died=lambda: starter.process.poll() is not None)
            except ValueError as error:
                output.say(str(error))
                output.close()
                return STOPPED if order.cause() else 1
            if not content:
                return 0
            handed = HandedTask.model_validate_json(content)
            order.end()
            if handed.log:
                _write_output_to(Path(handed.log))
            task, output = NodeTask.read(Path(handed.task)), Output()
            end = _run(task, handed.secrets, starter, order=StopOrder(task), output=output, keeps_starter=True)
            code = _finish(task, end, handed.secrets, output=output)
            if end.ending != "done":
                return code
            order, output = StopOrder(task.model_copy(update={"lease": "", "heartbeat": ""})), Output()


def _write_output_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _finish(task: NodeTask, end: NodeEnd, secrets: dict[str, str], *, output: Output) -> int:
    _write(_without(end, secrets), Path(task.end), output=output)
    output.close()
    failed = end.exit_code if end.exit_code > 0 else 128 - end.exit_code
    return {"done": 0, "stopped": STOPPED, "killed": KILLED, "failed": failed}[end.ending]


def _not_started(why: str, order: StopOrder) -> NodeEnd:
    asked = order.cause()
    return _end("stopped" if asked else "failed", code=1, asked=asked, order=order, last_lines=(why,))


@dataclass(frozen=True)
class Starter:
    """The process that starts the ranks, Shardline's fork server or torchrun, and the folder of its reports."""

    process: subprocess.Popen[bytes]
    log_dir: Path

    def order(self, ranks: RankOrder) -> None:
        """Order ranks from the fork server."""
        (self.log_dir / ENDS).unlink(missing_ok=True)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: its output and exit code show the cause
            self.process.stdin.write(ranks.model_dump_json().encode() + b"\n")
            self.process.stdin.flush()

    def poll(self) -> int | None:
        """Return the exit code of the process or, where it waits for another order, of the last one; else None."""
        ends = self.ends()
        return self.process.poll() if ends is None else int(any(end.exit_code for end in ends))

    def ends(self) -> tuple[RankEnd, ...] | None:
        """Return how the ordered ranks ended; None before all have."""
        path = self.log_dir / ENDS
        return RankEnds.read(path).ends if path.exists() else None


@contextmanager
def started(task: NodeTask, secrets: dict[str, str]) -> Iterator[Starter]:
    """Start the process that starts the ranks; the fork server imports their program, and then waits for its order."""
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        process = subprocess.Popen(
            command(task, log_dir=Path(folder)),
            env=rank_environment(task, secrets),
            stdin=subprocess.PIPE if task.is_ours else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if os.sched_getscheduler(0) == os.SCHED_IDLE:  # counts within a session; each session has a weight of its own
            with suppress(OSError):  # a kernel that weighs no sessions
                Path(f"/proc/{process.pid}/autogroup").write_text("19")
        try:
            yield Starter(process, Path(folder))
        finally:
            process.kill()
            process.wait()


def _run(
    task: NodeTask,
    secrets: dict[str, str],
    starter: Starter,
    *,
    order: StopOrder,
    output: Output,
    keeps_starter: bool = False,
) -> NodeEnd:
    """Start the ranks, wait for them, and stop them if asked; afterwards none of this node's processes is alive.

    `keeps_starter`: the fork server lives on after ranks that are done, for the next task.
    """
    process = starter.process
    assert process.stdout is not None
    output.start(process.stdout.fileno())
    if task.is_ours:
        starter.order(rank_order(task, secrets, log_dir=starter.log_dir))
    while (code := starter.poll()) is None and not order.cause():
        time.sleep(POLL_S)
        now = time.monotonic()
        kill_siblings(process, [pid for pid, told in [*output.causes.told.items()] if now > told + SIBLINGS_S])
    asked: StopCause = order.cause() if code is None else ""
    ending: NodeEnding = "failed" if code else "done"
    if asked:
        output.say(f"{asked}: stopping the ranks")
        ending = "stopped" if stop_ranks(task, process, at_once=order.allows_no_grace) else "killed"
    keeps = keeps_starter and ending == "done"
    if not keeps:
        ended = end_starter(process, patience_s=TORCHRUN_S if ending == "stopped" else 0.0)
        code = ended if code is None else code
    kill_family(but=process.pid if keeps else 0)
    output.drain()
    failures = _failures(task, code, starter, output.causes) if code and ending == "failed" else ()
    lines = tuple(output.causes.last_lines)
    return _end(ending, code=code or 0, asked=asked, order=order, failures=failures, last_lines=lines)


def _failures(task: NodeTask, code: int, starter: Starter, causes: Causes) -> tuple[RankFailure, ...]:
    if not task.is_ours:
        return causes.failures(starter.log_dir)
    could_not_import = RankEnd(rank=task.first_rank, local_rank=0, exit_code=code)
    return causes.failures_of(starter.ends() or [could_not_import])


def _end(
    ending: NodeEnding,
    *,
    code: int,
    asked: StopCause,
    order: StopOrder,
    failures: tuple[RankFailure, ...] = (),
    last_lines: tuple[str, ...] = (),
) -> NodeEnd:
    seconds = time.monotonic() - order.began
    return NodeEnd(
        ending=ending, exit_code=code, asked=asked, seconds=seconds, failures=failures, last_lines=last_lines
    )


class StopOrder:
    """Whether to stop: SIGTERM or SIGINT, a launcher that ended, or a lease that is stale or withdrawn.

    A thread reads the lease. A file server that hangs blocks only this thread, and the lease becomes stale. A lease's
    age is the time on this host's clock since it was last seen to change, because hosts' clocks differ. The file is
    opened each time, because NFS answers a stat from its cache for up to 60 s. The heartbeat is written after each
    check.
    """

    def __init__(self, task: NodeTask) -> None:
        self._task = task
        self._signalled = self._withdrawn = False
        self._stale = self._over = False
        self._seen: tuple[bytes, int] | None = None
        self.began = self._seen_at = time.monotonic()
        signal.signal(signal.SIGTERM, self._remember)
        signal.signal(signal.SIGINT, self._remember)
        threading.Thread(target=self._watch, daemon=True, name="lease").start()

    def cause(self) -> StopCause:
        """The reason to stop, or empty. Once set it stays; only a withdrawn lease replaces another cause."""
        if self._withdrawn:
            return "lease withdrawn"
        if self._signalled:
            return "signal"
        if self._task.launcher_pid and os.getppid() != self._task.launcher_pid:
            return "launcher ended"
        if self._task.lease and time.monotonic() - self._seen_at > self._task.lease_s:
            self._stale = True
        return "lease stale" if self._stale else ""

    def end(self) -> None:
        """Stop checking the lease."""
        self._over = True

    def allows_no_grace(self) -> bool:
        """Whether ranks are killed at once: after a withdrawn lease, the next attempt waits for this one's end."""
        return self._withdrawn

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = True

    def _watch(self) -> None:
        while not self._over:
            if self._task.lease:
                self._look(Path(self._task.lease))
            if self._task.heartbeat:
                write_heartbeat(Path(self._task.heartbeat))
            time.sleep(LOOK_EVERY_S)

    def _look(self, lease: Path) -> None:
        try:
            with lease.open("rb") as file:
                seen = (file.read(), os.fstat(file.fileno()).st_mtime_ns)
        except FileNotFoundError:
            self._withdrawn = True
        except OSError:  # storage that does not answer counts as not renewed
            pass
        else:
            if seen != self._seen:
                self._seen, self._seen_at = seen, time.monotonic()


def write_heartbeat(path: Path) -> None:
    """Write the uptime into the file, as infra/heartbeat.py describes it; a full disk leaves the one before."""
    aside = path.with_name(f".{path.name}")
    with suppress(OSError):
        aside.write_bytes(Path("/proc/uptime").read_bytes().partition(b".")[0])
        aside.replace(path)


def _read_line(order: StopOrder, *, timeout_s: float, died: Callable[[], bool] = lambda: False) -> bytes:
    """Read a line from stdin, or what is left up to its end.

    Raises ValueError if it takes too long, the node is asked to stop, or `died` is true.
    """
    deadline, content = time.monotonic() + timeout_s, b""
    while not order.cause() and not died():
        if select.select([sys.stdin.fileno()], [], [], POLL_S)[0]:
            chunk = os.read(sys.stdin.fileno(), 65_536)
            content += chunk
            if not chunk or chunk.endswith(b"\n"):
                return content
        if time.monotonic() > deadline:
            raise ValueError(f"secrets must come over stdin, but stdin was not closed within {timeout_s:.0f} s")
    raise ValueError(f"{order.cause() or 'the process of the imports ended'} before the ranks were started")


def _parsed(content: bytes) -> dict[str, str]:
    try:
        secrets = json.loads(content)
    except ValueError:
        secrets = None
    if not isinstance(secrets, dict) or not all(isinstance(value, str) for value in secrets.values()):
        raise ValueError(f"{len(content)} bytes came over stdin, but no JSON object of environment variables")
    return secrets


def _without(end: NodeEnd, secrets: dict[str, str]) -> NodeEnd:
    """Return the record with *** in place of secrets that errors quote."""

    def hidden(text: str) -> str:
        return without_secrets(text, more=[value for name, value in secrets.items() if name != USER])

    failures = tuple(failure.model_copy(update={"cause": hidden(failure.cause)}) for failure in end.failures)
    return end.model_copy(update={"failures": failures, "last_lines": tuple(map(hidden, end.last_lines))})


def _write(end: NodeEnd, path: Path, *, output: Output) -> None:
    try:
        end.write(path)
    except OSError as error:  # a full or lost disk may be the cause of the end; the exit code still reports it
        output.say(f"the record of the end cannot be written to {path}: {error}")
        for failure in end.failures:  # Docker keeps this log on another disk; the launcher reads its last lines
            output.say(f"rank {failure.rank} failed: {failure.cause}")


if __name__ == "__main__":
    sys.exit(stand_by(Path(sys.argv[2])) if sys.argv[1] == "--stand-by" else main(Path(sys.argv[1])))

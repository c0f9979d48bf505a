"""The program that a launcher starts on each host for each attempt: `python -m training.node NODE.json`.

It starts torchrun for the ranks of this host and stops them in order when told so (SIGTERM), or when the launcher on
this machine ends, or the launcher's lease is no longer renewed, so that a launcher killed with -9, or cut off, leaves
no ranks behind. How it ended goes to a record. Nothing here imports torch: 1.5 s of a core at each start.

Exit codes: 0 done, 130 stopped as asked, 137 asked and killed, else torchrun's.
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
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from training.node.output import Output
from training.node.ranks import (
    adopt_orphans,
    command,
    end_torchrun,
    kill_family,
    kill_siblings,
    rank_environment,
    stop_ranks,
)
from training.records.node import NodeEnd, NodeEnding, NodeTask, RankFailure, StopCause
from training.tracking.redaction import USER, without_secrets

POLL_S = 0.1
TORCHRUN_S = 5.0  # for torchrun to leave when its ranks have: alone it waits up to 300 s for other hosts' torchruns
SIBLINGS_S = 1.0  # for the other ranks to leave when one failed: the launcher looks 2 s for the host where it began
LOOK_EVERY_S = 1.0  # at the lease
STOPPED, KILLED = 130, 137


def main(path: Path) -> int:
    task = NodeTask.read(path)
    order, output = StopOrder(task), Output()
    with tempfile.TemporaryDirectory(prefix="torchrun-") as log_dir:
        secrets: dict[str, str] = {}
        try:
            secrets = _read_secrets(order, timeout_s=task.lease_s) if task.secrets_on_stdin else {}
            end = _run(task, secrets, order=order, output=output, log_dir=Path(log_dir))
        except ValueError as error:
            output.say(str(error))
            asked = order.cause()
            end = _end("stopped" if asked else "failed", code=1, asked=asked, last_lines=(str(error),))
    _write(_without(end, secrets), Path(task.end), output=output)
    output.close()
    failed = end.exit_code if end.exit_code > 0 else 128 - end.exit_code
    return {"done": 0, "stopped": STOPPED, "killed": KILLED, "failed": failed}[end.ending]


def _run(task: NodeTask, secrets: dict[str, str], *, order: StopOrder, output: Output, log_dir: Path) -> NodeEnd:
    """Starts the ranks, waits for them, and stops them if told so; no process of ours is alive afterwards."""
    adopt_orphans()
    process = subprocess.Popen(
        command(task, log_dir=log_dir),
        env=rank_environment(task, secrets),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    output.start(process.stdout.fileno())
    while process.poll() is None and not order.cause():
        time.sleep(POLL_S)
        now = time.monotonic()
        kill_siblings(process, [pid for pid, told in [*output.causes.told.items()] if now > told + SIBLINGS_S])
    asked: StopCause = order.cause() if process.returncode is None else ""
    ending: NodeEnding = "failed" if process.returncode else "done"
    if asked:
        output.say(f"{asked}: stopping the ranks")
        ending = "stopped" if stop_ranks(task, process, at_once=order.allows_no_grace) else "killed"
    code = end_torchrun(process, patience_s=TORCHRUN_S if ending == "stopped" else 0.0)
    kill_family()
    output.drain()
    failures = _failures(task, code, output=output, log_dir=log_dir) if ending == "failed" else ()
    return _end(ending, code=code, asked=asked, failures=failures, last_lines=tuple(output.causes.last_lines))


def _failures(task: NodeTask, code: int, *, output: Output, log_dir: Path) -> tuple[RankFailure, ...]:
    return (output.causes.failure_of_one(code),) if task.is_alone else output.causes.failures(log_dir)


def _end(
    ending: NodeEnding,
    *,
    code: int,
    asked: StopCause,
    failures: tuple[RankFailure, ...] = (),
    last_lines: tuple[str, ...] = (),
) -> NodeEnd:
    seconds = time.time() - psutil.Process().create_time()
    return NodeEnd(
        ending=ending, exit_code=code, asked=asked, seconds=seconds, failures=failures, last_lines=last_lines
    )


class StopOrder:
    """Whether to stop: SIGTERM or SIGINT, a launcher that ended, or a lease that is stale or withdrawn.

    The lease is read by a thread, which a file server that hangs may block without keeping us from acting: the lease
    then goes stale. Ages are by our own clock, since the lease was last seen to change: hosts' clocks differ. It is
    opened each time, because NFS answers a mere stat from a cache for up to 60 s. The heartbeat is touched after it.
    """

    def __init__(self, task: NodeTask) -> None:
        self._task = task
        self._signalled = self._withdrawn = False
        self._stale = False
        self._seen: tuple[bytes, int] | None = None
        self._seen_at = time.monotonic()
        signal.signal(signal.SIGTERM, self._remember)
        signal.signal(signal.SIGINT, self._remember)
        threading.Thread(target=self._watch, daemon=True, name="lease").start()

    def cause(self) -> StopCause:
        """The reason to stop, or empty. Once set it stays; only a withdrawn lease takes the place of other causes."""
        if self._withdrawn:
            return "lease withdrawn"
        if self._signalled:
            return "signal"
        if self._task.launcher_pid and os.getppid() != self._task.launcher_pid:
            return "launcher ended"
        if self._task.lease and time.monotonic() - self._seen_at > self._task.lease_s:
            self._stale = True
        return "lease stale" if self._stale else ""

    def allows_no_grace(self) -> bool:
        """Whether ranks are killed at once: the next attempt waits for the end of one whose lease was withdrawn."""
        return self._withdrawn

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = True

    def _watch(self) -> None:
        while True:
            if self._task.lease:
                self._look(Path(self._task.lease))
            if self._task.heartbeat:
                with suppress(OSError):
                    Path(self._task.heartbeat).touch()
            time.sleep(LOOK_EVERY_S)

    def _look(self, lease: Path) -> None:
        try:
            with lease.open("rb") as file:
                seen = (file.read(), os.fstat(file.fileno()).st_mtime_ns)
        except FileNotFoundError:
            self._withdrawn = True
        except OSError:  # storage that does not answer renews nothing
            pass
        else:
            if seen != self._seen:
                self._seen, self._seen_at = seen, time.monotonic()


def _read_secrets(order: StopOrder, *, timeout_s: float) -> dict[str, str]:
    """Reads environment variables from stdin: a JSON object, up to its end.

    Raises ValueError, which quotes nothing of it, if it is not one, does not arrive in time, or we are told to stop.
    """
    deadline, content = time.monotonic() + timeout_s, b""
    while not order.cause():
        if select.select([sys.stdin.fileno()], [], [], POLL_S)[0]:
            chunk = os.read(sys.stdin.fileno(), 65_536)
            content += chunk
            if not chunk:
                return _parsed(content)
        if time.monotonic() > deadline:
            raise ValueError(f"secrets were to come over stdin, but it was not closed within {timeout_s:.0f} s")
    raise ValueError(f"{order.cause()} before the ranks were started")


def _parsed(content: bytes) -> dict[str, str]:
    try:
        secrets = json.loads(content)
    except ValueError:
        secrets = None
    if not isinstance(secrets, dict) or not all(isinstance(value, str) for value in secrets.values()):
        raise ValueError(f"{len(content)} bytes came over stdin, but no JSON object of environment variables")
    return secrets


def _without(end: NodeEnd, secrets: dict[str, str]) -> NodeEnd:
    """The record with *** in place of secrets that errors quote."""

    def hidden(text: str) -> str:
        return without_secrets(text, more=[value for name, value in secrets.items() if name != USER])

    failures = tuple(failure.model_copy(update={"cause": hidden(failure.cause)}) for failure in end.failures)
    return end.model_copy(update={"failures": failures, "last_lines": tuple(map(hidden, end.last_lines))})


def _write(end: NodeEnd, path: Path, *, output: Output) -> None:
    try:
        end.write(path)
    except OSError as error:  # a full or lost disk may be what ended us; the exit code still tells
        output.say(f"the record of the end cannot be written to {path}: {error}")
        for failure in end.failures:  # Docker keeps this log on another disk: the launcher reads its last lines
            output.say(f"rank {failure.rank} failed: {failure.cause}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

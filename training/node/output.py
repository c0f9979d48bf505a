"""Passes on the output of a node's ranks without ever blocking them, and finds the cause of failures in it."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from training.records.node import RankEnd, RankFailure
from training.tracking.redaction import plain

MOST_WAITING = 4 * 2**20  # bytes to keep while nobody reads: after the end of dockerd a pipe blocks at 64 KiB
CHUNK = 65_536
LOOK_EVERY_S = 0.1
FLUSH_S = 2.0
LAST_LINES = 25
LONGEST_CAUSE = 2_000  # characters
LONGEST_LINE = 65_536  # bytes; a longer line is read as several lines

OF_RANK = re.compile(r"\[rank(\d+)\]: ?(.*)")  # torch writes this before each line of an uncaught exception
REPORTED_RANK = re.compile(r"\s+rank\s+: (\d+) \(local_rank: (\d+)\)")  # torchrun's report
REPORTED_EXIT = re.compile(r"\s+exitcode\s+: (-?\d+) \(pid: (\d+)\)")
TOLD_TO_LEAVE = re.compile(r".*Sending process (\d+) closing signal ")  # torchrun, to the siblings of a failed rank
# NCCL's watchdog ends a rank by abort(), without a Python exception. It says why in its log, and C++ says it once more
# of the exception that nobody caught; there the rank is its number in a group, which only the default group's all have.
WATCHDOG = re.compile(r"\[[EF]\d* .*?(Watchdog caught .*|NCCL error.*|CUDA error.*|Terminating the process .*)")
UNCAUGHT = re.compile(r"\s*what\(\):\s+(.*)")
IN_DEFAULT_GROUP = re.compile(r"\[(?:PG (?:ID )?0 [^]]*)?Rank (\d+)\]")
LINE_END = re.compile(rb"\r?\n|\r(?=[^\n])")  # a progress bar is drawn again after each carriage return
TORCHRUN_ERRORS = ("ChildFailedError", "SignalException")  # these report that a rank failed, but not the cause


class Causes:
    """Searches lines for exceptions and for torchrun's report of exit codes."""

    def __init__(self) -> None:
        self.exceptions: dict[int | None, str] = {}  # by rank; None: printed before there was a process group
        self.aborts: dict[int | None, str] = {}  # C++'s reason for the end of a rank; None: rank unknown
        self.exits: dict[int, tuple[int, int]] = {}  # code and pid
        self.local_ranks: dict[int, int] = {}
        self.told: dict[int, float] = {}  # PID -> time at which torchrun asked it to end, because a sibling failed
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._in_traceback: set[int | None] = set()
        self._nccl_errors: dict[int | None, dict[int | None, str]] = {}  # rank -> the one of these that has its error
        self._before_last_error: set[int | None] = set()
        self._reported = 0
        self._is_redrawn = False

    def feed(self, line: str, *, is_redrawn: bool = False) -> None:
        """Read a line. `is_redrawn`: the next line replaces this one, as in a progress bar."""
        if self._is_redrawn:
            self.last_lines.pop()
        self._is_redrawn = is_redrawn
        line = plain(line)
        self.last_lines.append(line)
        if match := REPORTED_RANK.match(line):
            self._reported = int(match[1])
            self.local_ranks[self._reported] = int(match[2])
        elif match := REPORTED_EXIT.match(line):
            self.exits[self._reported] = int(match[1]), int(match[2])
        elif match := TOLD_TO_LEAVE.match(line):
            self.told[int(match[1])] = time.monotonic()
        else:
            named = OF_RANK.match(line)
            rank, text = (int(named[1]), named[2]) if named else (None, line)
            self._look_for_exception(rank, text)
            self._look_for_abort(rank, text)
            self._look_for_last_error(rank, text)

    def _look_for_exception(self, rank: int | None, text: str) -> None:
        """Keep the line after a traceback's indented lines; of a chain of exceptions the last one."""
        if text.startswith("Traceback (most recent call last)"):
            self._in_traceback.add(rank)
        elif rank in self._in_traceback and text and not text[0].isspace():
            self._in_traceback.discard(rank)
            if not any(name in text for name in TORCHRUN_ERRORS):
                self._keep(self.exceptions, rank, text)

    def _look_for_abort(self, rank: int | None, text: str) -> None:
        """Keep the first message of an abort; later ones repeat it."""
        if (match := WATCHDOG.match(text)) and rank not in self.aborts:
            self._keep(self.aborts, rank, match[1])
        elif match := UNCAUGHT.match(text):
            named = IN_DEFAULT_GROUP.match(match[1])
            self.aborts.setdefault(int(named[1]) if named else rank, match[1][:LONGEST_CAUSE])

    def _keep(self, errors: dict[int | None, str], rank: int | None, text: str) -> None:
        errors[rank] = text[:LONGEST_CAUSE]
        if "NCCL error" in text:
            self._nccl_errors[rank] = errors

    def _look_for_last_error(self, rank: int | None, text: str) -> None:
        """Add the cause of an NCCL error, which NCCL prints below it: Cuda failure 2 'out of memory'.

        Only the first of the watchdog's lines names the rank.
        """
        if rank in self._before_last_error and self._nccl_errors:
            of_rank = rank if rank in self._nccl_errors else list(self._nccl_errors)[-1]
            self._nccl_errors.pop(of_rank)[of_rank] += f": {text.strip()}"[:LONGEST_CAUSE]
        self._before_last_error.discard(rank)
        if text.strip() == "Last error:":
            self._before_last_error.add(rank)

    def failures(self, log_dir: Path) -> tuple[RankFailure, ...]:
        """The failures that torchrun reports, in its order, without ranks ended because another one failed."""
        written = dict(_error_files(log_dir))
        return tuple(
            RankFailure(
                rank=rank,
                exit_code=code,
                cause=written.get(rank) or self._cause(rank, code),
                local_rank=self.local_ranks.get(rank),
            )
            for rank, (code, pid) in self.exits.items()
            if not (pid in self.told and code in {-signal.SIGTERM, -signal.SIGKILL})
        )

    def failures_of(self, ends: Iterable[RankEnd]) -> tuple[RankFailure, ...]:
        """Return the failures among these ends of ranks, without ranks that were ended because another one failed."""
        return tuple(
            RankFailure(
                rank=end.rank,
                exit_code=end.exit_code,
                cause=self._cause(end.rank, end.exit_code),
                local_rank=end.local_rank,
            )
            for end in ends
            if end.exit_code and not end.ended_by_us
        )

    def _cause(self, rank: int, code: int) -> str:
        """Return the cause that the output shows; error files (torch's @record) have more details."""
        known = self.exceptions.get(rank) or self.aborts.get(rank)
        if code == -signal.SIGABRT:
            known = known or self.aborts.get(None)
        return known or self.exceptions.get(None) or _describe_exit(code)


def _error_files(log_dir: Path) -> Iterable[tuple[int, str]]:
    """Return rank and message of each error.json that torch's `record` wrote under torchrun's --log-dir."""
    for path in sorted(log_dir.rglob("error.json")):
        message = json.loads(path.read_text())["message"]
        extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        if "rank" in extra:
            yield int(extra["rank"]), plain(str(message["message"]))[:LONGEST_CAUSE]


def _describe_exit(exit_code: int) -> str:
    return f"ended by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


class Output:
    """Copies a pipe to stdout in a thread.

    If nobody reads stdout, the oldest lines are dropped, and a line reports this. The node's own messages use the same
    way (`say`), so that a blocked log cannot prevent stopping the ranks.
    """

    def __init__(self, *, sink: int = 1) -> None:
        self.causes = Causes()
        self._source = -1
        self._sink, self._was_blocking = sink, os.get_blocking(sink)
        self._waiting, self._lock = bytearray(), threading.Lock()
        self._rest = bytearray()  # the start of a line that has not ended yet
        self._closes, self._close_by = False, float("inf")  # until then it takes messages, also after the ranks' end
        self._ranks_ended = False
        self._read_to_end = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True, name="output")

    def start(self, source: int) -> None:
        os.set_blocking(self._sink, False)
        self._source = source
        self._thread.start()

    def say(self, text: str) -> None:
        self._pass_on(f"{time.strftime('%Y-%m-%d %H:%M:%S')} node: {text}\n".encode())

    def drain(self) -> None:
        """Wait, after the ranks' end, until all their output is read; their starter may live on, and hold the pipe."""
        self._ranks_ended = True
        self._read_to_end.wait(FLUSH_S)

    def close(self) -> None:
        """Write the remaining output, if it is read within FLUSH_S."""
        if self._source < 0:
            self.start(os.open(os.devnull, os.O_RDONLY))
        self._close_by = time.monotonic() + FLUSH_S
        self._closes = True
        self._thread.join()
        os.set_blocking(self._sink, self._was_blocking)

    def _copy(self) -> None:
        is_open = True
        while (is_open or self._waiting or not self._closes) and time.monotonic() < self._close_by:
            sinks, was_last = [self._sink] if self._waiting else [], self._ranks_ended
            ready, writable, _ = select.select([self._source] if is_open else [], sinks, [], LOOK_EVERY_S)
            if ready or (is_open and was_last):
                chunk = os.read(self._source, CHUNK) if ready else b""
                self._read_lines(chunk)
                self._pass_on(chunk)
                if not chunk:
                    is_open = False
                    self._read_to_end.set()
            if writable:
                self._write()

    def _write(self) -> None:
        with self._lock:
            try:
                del self._waiting[: os.write(self._sink, self._waiting[:CHUNK])]
            except BlockingIOError:  # less space than select reported
                pass
            except OSError:  # the reader is gone, or the disk of a log file is full
                self._waiting.clear()

    def _pass_on(self, chunk: bytes) -> None:
        with self._lock:
            self._waiting += chunk
            if len(self._waiting) > MOST_WAITING:
                at_least = len(self._waiting) - MOST_WAITING // 2
                cut = self._waiting.find(b"\n", at_least) + 1 or at_least
                self._waiting[:cut] = b"node: nobody read the log for a while, %d bytes of it are lost\n" % cut

    def _read_lines(self, chunk: bytes) -> None:
        """Read the lines that are complete or too long; after the last, empty chunk also the rest."""
        self._rest += chunk
        if chunk and len(self._rest) < LONGEST_LINE and not LINE_END.search(chunk):
            return
        data, begin = bytes(self._rest), 0
        for end in LINE_END.finditer(data):
            self.causes.feed(data[begin : end.start()].decode(errors="replace"), is_redrawn=end[0] == b"\r")
            begin = end.end()
        if begin < len(data) and (not chunk or len(data) - begin >= LONGEST_LINE):
            self.causes.feed(data[begin:].decode(errors="replace"))
            begin = len(data)
        self._rest = bytearray(data[begin:])

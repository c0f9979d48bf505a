"""Starts the ranks of training/generate.py, with torchrun if there are several, and talks to them over a Unix socket.

The socket is in a folder that only this user may enter. The ranks end when the socket is closed, so they do not outlive
this process, however it ends.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tasks.inference.engine import EngineDied
from tasks.workspace.processes import end_process
from training.records.decoding import (
    CHANNEL,
    CancelRequest,
    DecodePlan,
    DecodeRequest,
    NewTokens,
    RanksReady,
    RequestRefused,
    ToRanks,
    read_from_ranks,
    to_line,
)
from training.tracking.redaction import plain

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0  # enough to load a large model from a slow disk
END_TIMEOUT_S = 20.0  # for torchrun to end after one of its ranks has died
POLL_S = 0.1
LAST_LINES = 15


Tokens = queue.SimpleQueue[int | None | Exception]  # None: the text has ended


class TorchRanks:
    """Ranks that have loaded the model. `on_death` is called once, from a thread, if they end before `close`.

    Raises RuntimeError with the end of their log if they do not start.
    """

    def __init__(self, plan: DecodePlan, *, on_death: Callable[[], None]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shardline-ranks-"))  # mode 0700
        self.plan, self.on_death, self.alive, self.closing = plan, on_death, True, False
        self.lock = threading.RLock()  # reentrant: a thread that holds the lock may collect a stream, which cancels it
        self.texts: list[dict[int, Tokens]] = [{} for _ in range(plan.leaders)]  # by channel and request
        self.log_path = self.folder / "ranks.log"
        self.channels: list[socket.socket] = []
        try:
            self.process = self._start()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        for number in range(len(self.channels)):
            threading.Thread(target=self._read, args=(number,), daemon=True, name=f"ranks-{number}").start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.plan.write(self.folder / "decode.json")
        with socket.socket(socket.AF_UNIX) as listener, self.log_path.open("ab") as log:
            listener.bind(str(self.folder / CHANNEL))
            listener.listen()
            listener.settimeout(POLL_S)
            process = subprocess.Popen(
                command_for(self.plan, self.folder / "decode.json"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal reaches only this process, which closes the channel
                env=_environment(self.plan),
            )
            try:
                deadline = time.monotonic() + START_TIMEOUT_S
                while len(self.channels) < self.plan.leaders:
                    with suppress(TimeoutError):
                        self.channels.append(listener.accept()[0])
                    if process.poll() is not None:
                        raise RuntimeError(
                            f"the ranks did not start (exit code {process.returncode}): {self.error_in_log()}"
                        )
                    if time.monotonic() > deadline:
                        raise RuntimeError(
                            f"the ranks were not ready in {START_TIMEOUT_S:.0f} s: {self.error_in_log()}"
                        )
            except BaseException:
                end_process(process, grace_s=0, with_descendants=True)
                raise
        return process

    def error_in_log(self) -> str:
        """Return the error line in the ranks' log, or its last lines."""
        lines = plain(self.log_path.read_text(errors="replace")).splitlines() if self.log_path.exists() else []
        killed = [line.strip() for line in lines if "received by PID" in line and "SIGTERM" not in line]
        errors = [line.strip() for line in lines if "Error: " in line and "ChildFailedError" not in line]
        return next(iter(killed or errors), "\n".join(lines[-LAST_LINES:]) or "their log is empty")

    def submit(self, request: DecodeRequest) -> Tokens:
        """Send a request to the copy of the model with the fewest requests; return the queue of its tokens."""
        tokens: Tokens = queue.SimpleQueue()
        with self.lock:
            if not self.alive:
                raise EngineDied("the ranks have ended")
            channel = min(range(len(self.texts)), key=lambda each: len(self.texts[each]))
            self.texts[channel][request.number] = tokens
            self._send(channel, request)
        return tokens

    def cancel(self, request: int) -> None:
        with self.lock:
            for channel, texts in enumerate(self.texts):
                if (tokens := texts.pop(request, None)) is not None:
                    tokens.put(None)
                    self._send(channel, CancelRequest(number=request))

    def _send(self, channel: int, message: ToRanks) -> None:
        with suppress(OSError):  # the rank is dead, which the channel's reader reports
            self.channels[channel].sendall(to_line(message))

    def _read(self, channel: int) -> None:
        """Distribute the messages of a channel until it is closed, then report that the ranks have ended."""
        try:
            self._distribute(channel)
        finally:
            self._report_death()

    def _distribute(self, channel: int) -> None:
        with suppress(OSError), self.channels[channel].makefile("rb") as lines:
            for line in lines:
                match read_from_ranks(line):
                    case RanksReady() as ready:
                        logger.info(
                            "rank %d has loaded the model on %s in %s (%s)",
                            ready.rank,
                            ready.device,
                            ready.precision,
                            ready.why,
                        )
                    case RequestRefused(number=request, why=why):
                        self._end_text(channel, request, ValueError(why))
                    case NewTokens(tokens=new, ended=ended):
                        for request, token in new:
                            if (tokens := self.texts[channel].get(request)) is not None:
                                tokens.put(token)
                        for request in ended:
                            self._end_text(channel, request, None)

    def _end_text(self, channel: int, request: int, error: Exception | None) -> None:
        with self.lock:
            tokens = self.texts[channel].pop(request, None)
        if tokens is not None:
            tokens.put(error)

    def _report_death(self) -> None:
        with self.lock:
            is_first, self.alive = self.alive, False
        if not is_first or self.closing:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_TIMEOUT_S)
        end_process(self.process, grace_s=0, with_descendants=True)
        code = self.process.returncode
        cause = f"Signal {-code}" if code < 0 else f"exit code {code}: {self.error_in_log()}"
        error = EngineDied(f"the torch engine's ranks have ended by themselves ({cause})")
        self._fail_all(error)
        self._release()
        logger.error("%s", error)
        self.on_death()

    def _fail_all(self, error: Exception) -> None:
        with self.lock:
            waiting = [tokens for texts in self.texts for tokens in texts.values()]
            for texts in self.texts:
                texts.clear()
        for tokens in waiting:
            tokens.put(error)

    def close(self) -> None:
        """End the ranks; running requests raise EngineDied."""
        self.closing = True
        with self.lock:
            self.alive = False
        self._fail_all(EngineDied("the engine was closed"))
        # Without grace, because the ranks have nothing to save and would take seconds to end by themselves.
        end_process(self.process, grace_s=0, with_descendants=True)
        self._release()

    def _release(self) -> None:
        for channel in self.channels:
            channel.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def command_for(plan: DecodePlan, path: Path) -> list[str]:
    program = ["-m", "training.generate", str(path)]
    if plan.degree == 1:
        return [sys.executable, "-u", *program]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [sys.executable, *torchrun, "--nproc-per-node", str(plan.degree), *program]


def _environment(plan: DecodePlan) -> dict[str, str]:
    return {
        "GOMP_SPINCOUNT": "1000",  # as in tasks/launch/local.py: threads that spin while they wait take others' cores
        **os.environ,
        "OMP_NUM_THREADS": str(plan.threads_per_rank),
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }

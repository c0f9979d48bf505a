"""The ranks of training/generate.py: started under torchrun, spoken to over a Unix socket, ended with it.

The socket lies in a folder that only we may enter. The ranks end when it is closed, so they do not outlive us,
however we end.
"""

from __future__ import annotations

import json
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
from typing import Any

import psutil

from tasks.inference.engine import EngineDied
from training.records.decoding import DecodePlan

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0  # a large model from a slow disk
END_TIMEOUT_S = 20.0  # for a step that is on its way
POLL_S = 0.1
LAST_LINES = 15


Tokens = queue.SimpleQueue[int | None | Exception]  # None: the text has ended


class TorchRanks:
    """Ranks that are ready. `on_death` is called once, from a thread, if they end before `close`.

    Raises RuntimeError with the end of their log if they do not get ready.
    """

    def __init__(self, plan: dict[str, Any], *, on_death: Callable[[], None]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shardline-ranks-"))  # mode 0700
        self.plan = DecodePlan.model_validate({**plan, "channel": str(self.folder / "channel")})
        self.on_death, self.alive, self.closing = on_death, True, False
        self.lock = threading.RLock()  # a stream may be collected, and cancelled, anywhere
        self.texts: list[dict[int, Tokens]] = [{} for _ in range(self.plan.leaders)]  # by channel and request
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
            listener.bind(self.plan.channel)
            listener.listen()
            listener.settimeout(POLL_S)
            process = subprocess.Popen(
                command_for(self.plan, self.folder / "decode.json"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is ours alone: we close the channel
                env=_environment(self.plan),
            )
            try:
                deadline = time.monotonic() + START_TIMEOUT_S
                while len(self.channels) < self.plan.leaders:
                    with suppress(TimeoutError):
                        self.channels.append(listener.accept()[0])
                    if process.poll() is not None:
                        raise RuntimeError(f"the ranks did not start (exit code {process.returncode}): {self.said()}")
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"the ranks were not ready in {START_TIMEOUT_S:.0f} s: {self.said()}")
            except BaseException:
                end_family(process)
                raise
        return process

    def said(self) -> str:
        """The error in the ranks' log, or its last lines."""
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        killed = [line.strip() for line in lines if "received by PID" in line and "SIGTERM" not in line]
        errors = [line.strip() for line in lines if "Error: " in line and "ChildFailedError" not in line]
        return next(iter(killed or errors), "\n".join(lines[-LAST_LINES:]) or "they left no word")

    def ask(self, message: dict[str, Any]) -> Tokens:
        """Hand a request to the ranks that have the fewest, and get its tokens as they come."""
        tokens: Tokens = queue.SimpleQueue()
        with self.lock:
            if not self.alive:
                raise EngineDied("the ranks have ended")
            number = min(range(len(self.texts)), key=lambda each: len(self.texts[each]))
            self.texts[number][message["id"]] = tokens
            self._send(number, message)
        return tokens

    def cancel(self, request: int) -> None:
        with self.lock:
            for number, texts in enumerate(self.texts):
                if (tokens := texts.pop(request, None)) is not None:
                    tokens.put(None)
                    self._send(number, {"cancel": request})

    def _send(self, number: int, message: dict[str, Any]) -> None:
        with suppress(OSError):  # a dead rank is told of by its reader
            self.channels[number].sendall(json.dumps(message).encode() + b"\n")

    def _read(self, number: int) -> None:
        texts = self.texts[number]
        with suppress(OSError), self.channels[number].makefile("rb") as lines:
            for line in lines:
                news = json.loads(line)
                if "ready" in news:
                    logger.info("rank %(ready)d on %(device)s has the model in %(precision)s (%(why)s), %(how)s", news)
                    continue
                if "failed" in news:
                    with self.lock:
                        failed = texts.pop(news["failed"], None)
                    if failed is not None:
                        failed.put(ValueError(news["why"]))
                    continue
                for request, token in news["tokens"]:
                    if (tokens := texts.get(request)) is not None:
                        tokens.put(token)
                for request in news["ended"]:
                    with self.lock:
                        ended = texts.pop(request, None)
                    if ended is not None:
                        ended.put(None)
        self._lost()

    def _lost(self) -> None:
        with self.lock:
            first, self.alive = self.alive, False
        if not first or self.closing:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_TIMEOUT_S)
        end_family(self.process)
        code = self.process.returncode
        said = f"Signal {-code}" if code < 0 else f"exit code {code}: {self.said()}"
        why = EngineDied(f"the torch engine's ranks have ended by themselves ({said})")
        self._fail_all(why)
        self._let_go()
        logger.error("%s", why)
        self.on_death()

    def _fail_all(self, why: Exception) -> None:
        with self.lock:
            waiting = [tokens for texts in self.texts for tokens in texts.values()]
            for texts in self.texts:
                texts.clear()
        for tokens in waiting:
            tokens.put(why)

    def close(self) -> None:
        """End the ranks; requests under way fail."""
        self.closing = True
        with self.lock:
            self.alive = False
        self._fail_all(EngineDied("the engine was closed"))
        end_family(self.process)  # they hold nothing that could be lost, and would take seconds to leave by themselves
        self._let_go()

    def _let_go(self) -> None:
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


def end_family(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of it and of its children: torchrun gives each rank a session of its own."""
    with suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family)
    process.wait()

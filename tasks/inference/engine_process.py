"""Runs an engine's program as a child process: asks it over a Unix socket, restarts it once, and ends it with this one.

The socket is in a folder that only this user may enter, so the program needs no port and no key.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tasks.inference.engine import EngineDied
from tasks.inference.onnx_generator import GrammarFailed
from tasks.workspace.processes import end_process
from tasks.workspace.wait import until
from training.tracking.redaction import plain

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 1800.0  # vLLM compiles the model and captures graphs: minutes
ANSWER_S = 5.0
POLL_S = 0.1
END_S = 20.0
LAST_LINES = 15
# Environment variables that the program does not get: with them vLLM would require an API key, write to our metrics
# files, and have secrets of services that it never calls.
OURS = ("VLLM_API_KEY", "PROMETHEUS_MULTIPROC_DIR", "MLFLOW_", "PREFECT_")


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over the socket at `path`. `cancel` may be called from any thread; the reader then ends."""

    def __init__(self, path: Path, *, timeout_s: float | None = None) -> None:
        super().__init__("engine", timeout=timeout_s)
        self.path, self.timeout_s = path, timeout_s
        self._socket: socket.socket | None = None

    def connect(self) -> None:
        self.sock = self._socket = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout_s)
        self.sock.connect(str(self.path))

    def cancel(self) -> None:
        if self._socket:
            with suppress(OSError):  # it is closed already
                self._socket.shutdown(socket.SHUT_RDWR)


class EngineProcess:
    """A program with a model loaded. If it ends, it is restarted once: what ended it twice would end it again.

    `command`: returns the program and its arguments, by the path of its socket. Raises RuntimeError with the end of the
    program's log if it does not start.
    """

    def __init__(self, name: str, command: Callable[[Path], list[str]], *, environment: dict[str, str]) -> None:
        self.name, self.environment = name, environment
        self.folder = Path(tempfile.mkdtemp(prefix="shardline-engine-"))  # mode 0700
        self.path, self.log_path = self.folder / "http", self.folder / "engine.log"
        self.command = command(self.path)
        self.health = b""  # what it answers at /health once it is ready
        self.ready, self.closed, self.why_not = False, False, f"{name} is being started"
        self.failed = False  # True: it is not restarted any more
        self.changed = threading.Condition()
        self.process: subprocess.Popen[bytes] | None = None
        # The kernel ends the program when the thread that started it ends, so this thread lives as long as the program.
        threading.Thread(target=self._keep, daemon=True, name=name).start()
        try:
            if not self.wait_ready(START_TIMEOUT_S + END_S):
                raise RuntimeError(self.why_not)
        except BaseException:  # also for Ctrl-C, which does not reach the program in its own session
            self.close()
            raise

    def wait_ready(self, timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.ready or self.failed or self.closed, timeout_s) and self.ready

    def open(self, body: dict[str, object]) -> Reply:
        """Send a request to /v1/completions; return its reply once it has accepted the request.

        Raises ValueError where the program refuses the request, EngineDied where it cannot be reached.
        """
        if not self.ready:
            raise EngineDied(self.why_not)
        connection = UnixConnection(self.path)
        try:
            content = json.dumps(body).encode()
            connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status == http.HTTPStatus.OK:
                return Reply(self.name, connection, response)
            why = _message(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise EngineDied(f"{self.name} did not answer ({type(error).__name__}: {error})") from None
        if response.status < 500:
            raise ValueError(f"{self.name} refuses the request: {why}")
        raise EngineDied(f"{self.name} answered with status {response.status}: {why}")

    def close(self) -> None:
        with self.changed:
            self.closed, self.ready = True, False
            self.why_not = self.why_not or "the engine was closed"
            process = self.process
            self.changed.notify_all()
        if process:
            end_process(process, grace_s=END_S, with_descendants=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _keep(self) -> None:
        for is_last in (False, True):
            with self.changed:
                if self.closed:
                    return
                self.path.unlink(missing_ok=True)
                self.process = process = self._start()
            if has_started := self._wait_until_it_answers(process):
                self._note(ready=True)
                logger.info("%s is ready: %s", self.name, " ".join(self.command))
                process.wait()
            cause = self._cause(process.poll())
            with suppress(ProcessLookupError):  # the processes that it started and may have left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if self.closed:
                return
            if not has_started:
                return self._note(failed=f"{self.name} did not start ({cause})")
            if is_last:
                twice = f"{self.name} has ended twice ({cause}): see the log, and start the server again"
                return self._note(failed=twice)
            self._note(why_not=f"{self.name} has ended ({cause}) and is being started again")

    def _cause(self, code: int | None) -> str:
        if code is None:
            return f"no answer within {START_TIMEOUT_S:.0f} s: {self.error_in_log()}"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}: {self.error_in_log()}"

    def _note(self, *, ready: bool = False, why_not: str = "", failed: str = "") -> None:
        with self.changed:
            self.ready, self.why_not, self.failed = ready, failed or why_not, bool(failed)
            self.changed.notify_all()
        if failed or why_not:
            logger.error("%s", failed or why_not)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "tasks.workspace.end_with_parent", *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment | self.environment,
            )

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes]) -> bool:
        """Return whether GET /health succeeds before the process ends."""

        def answers() -> bool:
            connection = UnixConnection(self.path, timeout_s=ANSWER_S)
            try:
                connection.request("GET", "/health")
                response = connection.getresponse()
                self.health = response.read()
                return response.status == http.HTTPStatus.OK
            except (OSError, http.client.HTTPException):  # it does not listen yet
                return False
            finally:
                connection.close()

        has_ended = process.poll
        until(lambda: has_ended() is not None or answers(), timeout_s=START_TIMEOUT_S, every_s=POLL_S)
        return has_ended() is None and answers()

    def error_in_log(self) -> str:
        """Return the last error in the log that is not about another one, or its last lines."""
        lines = plain(self.log_path.read_text(errors="replace")).splitlines() if self.log_path.exists() else []
        errors = [line.strip() for line in lines if "rror: " in line and "root cause" not in line]
        return errors[-1] if errors else "\n".join(lines[-LAST_LINES:]) or "its log is empty"


class Reply:
    """The reply to an accepted request: its whole JSON, or its server-sent events as they arrive."""

    def __init__(self, name: str, connection: UnixConnection, response: http.client.HTTPResponse) -> None:
        self._name, self._connection, self._response, self.cancelled = name, connection, response, False
        self._read_ahead: list[dict[str, object] | None] = []

    def wait_accepted(self) -> None:
        """Wait for the first event, by which vLLM refuses what it finds wrong after its status 200: a grammar.

        Raises ValueError for a refusal, EngineDied as `next_event` does.
        """
        self._read_ahead.append(self.next_event())

    def whole(self) -> dict[str, object]:
        """Return the JSON. Raises EngineDied if the program ends before it has answered."""
        try:
            content: dict[str, object] = json.loads(self._response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineDied(f"{self._name} ended in the middle of a reply ({type(error).__name__})") from None
        return content

    def next_event(self) -> dict[str, object] | None:
        """Return the JSON of the next event; None at the end, and after `cancel`.

        Raises GrammarFailed for a request that the program calls wrong, EngineDied as `whole` does.
        """
        if self._read_ahead:
            return self._read_ahead.pop()
        while True:
            try:
                line = self._response.readline()
            except (OSError, http.client.HTTPException, ValueError) as error:
                line, how = b"", type(error).__name__
            else:
                how = "the connection was closed"
            if self.cancelled or line.startswith(b"data: [DONE]"):
                return None
            if not line:
                raise EngineDied(f"{self._name} ended in the middle of a text ({how})")
            if line.startswith(b"data:"):
                found: dict[str, object] = json.loads(line[len(b"data:") :])
                refused = found.get("error")
                if isinstance(refused, dict) and 400 <= int(refused.get("code") or 500) < 500:
                    raise GrammarFailed(f"{self._name} refuses the request: {refused.get('message')}")
                if "error" in found:
                    raise EngineDied(f"{self._name} aborted a text: {_message(line[len(b'data:') :])}")
                return found

    def cancel(self) -> None:
        """End the request by closing its connection; may be called from any thread."""
        self.cancelled = True
        self._connection.cancel()


def _message(content: bytes) -> str:
    """Return the message in an error: {"error": {"message": …}}."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")[:1000]

"""Starts a Prefect server on loopback for the time of one command, if no other server is configured.

Other servers are the one that PREFECT_API_URL names, and the one that `shardline up` started.

Prefect's own ephemeral server shares our terminal's process group: a Ctrl-C ends it first, and the flow can then no
longer report its final state. This one has a session of its own, and starts while Python imports the flow.

If it ends before the command, the command goes on without it: `is_gone` is asked before Prefect is.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from flows.servers.password import CLIENTS, client_settings, new_password, server_settings
from tasks.display.progress import time_progress
from tasks.workspace.locks import exclusive
from tasks.workspace.paths import home, make_private, open_private
from tasks.workspace.processes import end_process, free_port
from tasks.workspace.wait import until

logger = logging.getLogger(__name__)

READY_WITHIN_S = 120  # a first start migrates a database, which takes 10 s and more
POLL_S = 0.05
STOP_WITHIN_S = 5
EMBEDDED = "SHARDLINE_EMBEDDED_PREFECT"
NOTICED_WITHIN_S = 1.0  # an error of Prefect's client may be seen before the end of the server's process
_ended, _stopping = threading.Event(), threading.Event()


def start_servers() -> Callable[[], None]:
    """Start Prefect's server for a flow; returns a function that waits until it and MLflow answer.

    Import the flow between the two calls: that takes as long as the server needs to start.
    """
    wait_for_prefect = start_prefect_server()

    def wait() -> None:
        from tasks.tracking.client import connect

        connect()
        wait_for_prefect()

    return wait


def start_prefect_server() -> Callable[[], None]:
    """Set up Prefect's environment and start a server; returns a function that waits until it answers.

    To be called before prefect is imported: what is registered at exit first runs last, and Prefect sends its last
    logs and events at exit (to a server that is gone it would try for over a minute).
    What the user set in the environment stays.
    """
    defaults = {
        "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",  # each event that its threads cannot send
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # lines before and after the flow are for stderr only
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    of_up = client_settings()
    url = os.environ.get("PREFECT_API_URL", of_up.get("PREFECT_API_URL"))
    if url is not None:
        os.environ |= of_up if url == of_up.get("PREFECT_API_URL") else {}
        return lambda: None
    os.environ.setdefault("PREFECT_HOME", str(home() / "prefect"))
    folder, first = Path(os.environ["PREFECT_HOME"]), ExitStack()
    first.enter_context(first_start(folder))
    port, password, log_path = free_port(), new_password("admin"), folder / "server.log"
    environment = _environment() | server_settings(port, password)
    make_private(*folder.glob("*.db*"))
    with open_private(log_path, "wb") as log:
        server = subprocess.Popen(
            _command(port), env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, umask=0o077
        )
    atexit.register(_stop, server)
    os.environ |= {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", CLIENTS: password, EMBEDDED: "1"}

    def wait() -> None:
        with first:
            _wait(server, port, log_path)

    return wait


@contextmanager
def first_start(folder: Path) -> Iterator[None]:
    """Start one server at a time on a new PREFECT_HOME, as each makes the database's tables, without a lock of its own.

    The block ends when the server answers; after that servers start as they like, until Prefect is upgraded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f".made-{importlib.metadata.version('prefect')}"

    def on_wait() -> None:
        logger.info("waiting for another process, which makes Prefect's database in %s", folder)

    with ExitStack() as lock:
        if not made.exists():
            lock.enter_context(exclusive(folder / ".made.lock", on_wait=on_wait))
            if made.exists():
                lock.close()
        yield
        made.touch()


def is_embedded() -> bool:
    """Whether the server ends with this process, so that links to it break afterwards."""
    return EMBEDDED in os.environ


def is_gone(*, within_s: float = 0.0) -> bool:
    """Whether the embedded server has ended while the command goes on. `within_s`: wait so long to notice it."""
    return is_embedded() and _ended.wait(within_s)


def _stop(server: subprocess.Popen[bytes]) -> None:
    _stopping.set()
    end_process(server, grace_s=STOP_WITHIN_S)


def _watch(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait for the server's end. If the command goes on then, say so, and answer in its place."""
    code = server.wait()
    if _stopping.is_set():
        return
    logging.raiseExceptions = False  # otherwise each batch of logs that Prefect's handler cannot send is an error
    with suppress(OSError):  # without it Prefect's clients try for a minute, and each call is as good
        answers = ThreadingHTTPServer(("127.0.0.1", port), _AnswersGone)
        threading.Thread(target=answers.serve_forever, daemon=True).start()
    logger.warning(
        "the embedded Prefect server ended (%s): this command goes on without it; the next command, or `shardline "
        "reconcile`, reports to Prefect how it ended",
        f"signal {-code}" if code < 0 else f"exit code {code}",
    )
    _ended.set()


class _AnswersGone(BaseHTTPRequestHandler):
    """Answers every request with 410. Prefect's clients try again for a minute where nothing answers, and the clients
    of its logs and events, in threads of their own, could not be told otherwise.
    """

    protocol_version = "HTTP/1.1"  # which websockets need

    def parse_request(self) -> bool:
        if super().parse_request():
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_error(410)
        return False

    def log_message(self, format: str, *args: object) -> None:
        """Keep stderr for the command."""


def _command(port: int) -> list[str]:
    found = importlib.util.find_spec("prefect")
    assert found is not None
    assert found.origin is not None
    app_dir = str(Path(found.origin).parents[1])
    application = ["--app-dir", app_dir, "--factory", "prefect.server.api.server:create_app"]
    return [
        sys.executable,
        "-P",
        "-c",
        "import gc; gc.set_threshold(50_000); import uvicorn; uvicorn.main()",  # imports a quarter sooner than with 700
        *application,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-level",
        "error",
        "--lifespan",
        "on",
    ]


def _environment() -> dict[str, str]:
    """Return the environment as Prefect sets it (SubprocessASGIServer in prefect/server/api/server.py)."""
    return {
        **os.environ,
        "PREFECT_UI_ENABLED": "0",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
    }


def _wait(server: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
    import httpx  # only here, so that it loads while the server starts

    url = f"http://127.0.0.1:{port}/api/health"
    # One client, because each new one loads certificates. trust_env: a proxy would not reach this machine's loopback.
    with httpx.Client(timeout=5, trust_env=False) as client:

        def answers_or_ended() -> bool:
            try:
                return client.get(url).status_code == 200 or server.poll() is not None
            except httpx.TransportError:
                return server.poll() is not None

        with time_progress(f"waiting for the embedded Prefect server, at most {READY_WITHIN_S:.0f} s"):
            ready = until(answers_or_ended, timeout_s=READY_WITHIN_S, every_s=POLL_S)
    if not ready or server.poll() is not None:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-10:])
        raise RuntimeError(
            f"the embedded Prefect server did not start (exit code {server.poll()}):\n{tail}\nIf its database "
            f"is at fault, move {log_path.parent} away: it has Prefect's pages of earlier runs, which no run needs"
        )
    threading.Thread(target=_watch, args=(server, port), name="embedded-prefect", daemon=True).start()

"""`shardline serve --replicas N`: N server processes behind one port; one that dies is started again.

This process opens the socket from which all replicas accept connections, so that queued connections outlive any
replica. (With sockets of their own and SO_REUSEPORT, the kernel would drop the queue of a replica that ends.) Each
replica writes to a pipe when it is ready; the kernel closes the pipe when the replica has ended.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import psutil
from prometheus_client.multiprocess import mark_process_dead

from tasks.hardware.machine import gpus_here, usable_cores
from tasks.serving.connections import DRAIN_S
from tasks.serving.listener import listen, print_address, url_of
from tasks.serving.metrics import SHARED_FOLDER
from tasks.serving.server_record import ServerRecord
from tasks.workspace.processes import end_process, local_process, process_key, stop_with_parent
from training.config.serving import InferenceConfig, ServeConfig
from training.tracking.redaction import without_credentials

logger = logging.getLogger(__name__)

SPAWN = multiprocessing.get_context("spawn")
RETRY_S = 5.0  # seconds until a replica that died before it was ready is started again
CLOSING_S = 10.0  # seconds after DRAIN_S for engines to end


@dataclass(frozen=True)
class ReplicaTask:
    """The task of one replica. `record` lacks the process, which the replica adds."""

    number: int
    ref: str
    tracking_uri: str
    cache_dir: Path | None
    record_path: Path | None
    record: ServerRecord
    listeners: tuple[socket.socket, socket.socket]  # the public one, and the replica's own
    gpus: str | None  # value of CUDA_VISIBLE_DEVICES; None: unchanged
    load_lock: Path
    wait_s: float  # seconds before it loads the model
    config: ServeConfig


class ReplicaStatus(NamedTuple):
    """The message of a replica that is ready, or the reason why it is not."""

    model: str = ""
    version: int = 0
    prompt: str = ""
    error: str = ""
    is_bad_input: bool = False


@dataclass
class Replica:
    task: ReplicaTask
    process: SpawnProcess
    pipe: Connection
    is_ready: bool = False

    def read_status(self) -> ReplicaStatus | None:
        """Wait for the next status; None if the replica has ended."""
        try:
            status: ReplicaStatus = self.pipe.recv()
        except (EOFError, OSError):
            return None
        return status


def serve_by_replicas(
    ref: str,
    *,
    replicas: int,
    host: str,
    port: int,
    tracking_uri: str,
    cache_dir: Path | None,
    servers_dir: Path | None,
    config: ServeConfig,
) -> None:
    """Serve like tasks.serving.server.serve, but with several processes; call it from the main thread.

    Also raises ValueError for too few GPUs. The first replica starts alone and downloads the version for all.
    """
    gpus = gpus_of_replicas(config.inference, replicas)
    threads = config.inference.threads or max(1, usable_cores() // (replicas * config.inference.degree))
    inference = config.inference.model_copy(update={"threads": threads})
    config = config.known_as(host).model_copy(update={"inference": inference})
    with ExitStack() as stack:
        public = stack.enter_context(listen(host, port))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardline-replicas-")))  # mode 0700
        os.environ[SHARED_FOLDER] = str(folder)  # the replicas read it when they import prometheus_client
        url, started = url_of(host, public), list[Replica]()
        stack.callback(_end, started, public)
        for number in range(replicas):
            private = stack.enter_context(listen("127.0.0.1", 0))
            task = ReplicaTask(
                number=number,
                ref=ref,
                tracking_uri=tracking_uri,
                cache_dir=cache_dir,
                record_path=servers_dir / f"{os.getpid()}-{number}.json" if servers_dir else None,
                record=ServerRecord(
                    url=url_of("127.0.0.1", private),
                    ref=ref,
                    model="",
                    process="",
                    public_url=url,
                    supervisor=process_key(os.getpid()),
                ),
                listeners=(public, private),
                gpus=gpus[number],
                load_lock=folder / "load_lock",
                wait_s=0.0,
                config=config,
            )
            started.append(_start(task))
            if number == 0:
                first = _ready(started[0])
        for replica in started[1:]:
            _ready(replica)
        print_address(f"{first.model} version {first.version} ({ref}) by {replicas} replicas", url, prompt=first.prompt)
        while True:
            _watch(started, metrics=folder)


def gpus_of_replicas(inference: InferenceConfig, replicas: int) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES for each replica, with `inference.degree` GPUs; None if replicas use no GPUs.

    Raises ValueError for too few GPUs.
    """
    gpus = gpus_here()
    if not gpus or inference.engine == "onnx":
        return [None] * replicas
    each = inference.degree
    if replicas * each > len(gpus):
        raise ValueError(
            f"{replicas} replicas with {each} GPUs each (inference.degree) need {replicas * each}, and {len(gpus)} are "
            "visible: start fewer replicas, or serve on the CPU with inference.engine=onnx"
        )
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = named[: len(gpus)] if named != [""] else [str(number) for number in range(len(gpus))]
    return [",".join(names[first : first + each]) for first in range(0, replicas * each, each)]


def _start(task: ReplicaTask) -> Replica:
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_run, args=(task, theirs))  # by a pipe: arguments would show MLflow's password
    process.start()
    theirs.close()
    return Replica(task, process, ours)


def _ready(replica: Replica) -> ReplicaStatus:
    """Wait until the replica is ready. If it fails, raises ValueError for bad input, else RuntimeError."""
    status = replica.read_status()
    if status is None:
        raise RuntimeError(f"replica {replica.task.number} ended before it was ready: {_how_ended(replica)}")
    if status.error:
        raise (ValueError if status.is_bad_input else RuntimeError)(status.error)
    replica.is_ready = True
    return status


def _watch(replicas: list[Replica], *, metrics: Path) -> None:
    """Wait until a replica reports its status or ends; restart one that has ended."""
    readable = wait([replica.pipe for replica in replicas])
    for place, replica in enumerate(replicas):
        if replica.pipe not in readable:
            continue
        status = replica.read_status()
        if status is not None:
            replica.is_ready = not status.error
            continue
        how = _how_ended(replica)
        wait_s = 0.0 if replica.is_ready else RETRY_S
        logger.warning("replica %d has ended (%s) and is started again", replica.task.number, how)
        mark_process_dead(replica.process.pid, str(metrics))
        replicas[place] = _start(replace(replica.task, wait_s=wait_s))
        replica.pipe.close()


def _how_ended(replica: Replica) -> str:
    replica.process.join()
    code = replica.process.exitcode
    assert code is not None
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _end(replicas: list[Replica], public: socket.socket) -> None:
    """End all replicas together: each finishes its requests; replicas that still run after the deadline are killed."""
    public.close()  # so that new connections are refused as soon as the replicas accept none
    for replica in replicas:
        replica.process.terminate()
    deadline = time.monotonic() + DRAIN_S + CLOSING_S
    try:
        for replica in replicas:
            replica.process.join(max(0.0, deadline - time.monotonic()))
        if any(replica.process.is_alive() for replica in replicas):
            logger.warning("replicas still run %.0f s after SIGTERM: killing them", DRAIN_S + CLOSING_S)
    finally:
        for replica in replicas:
            if replica.process.is_alive():
                end_process(psutil.Process(replica.process.pid), grace_s=0, with_descendants=True)
            replica.pipe.close()
            if replica.task.record_path:
                replica.task.record_path.unlink(missing_ok=True)


def _run(task: ReplicaTask, status: Connection) -> None:
    """Serve until SIGTERM, in the replica's process. It ends with its supervisor, however the supervisor ends."""
    os.setsid()  # a Ctrl-C in the terminal reaches only the supervisor, which ends the replicas
    stop_with_parent()
    signal.signal(signal.SIGTERM, _interrupt)
    if local_process(task.record.supervisor) is None:  # it ended before this process asked to end with it
        sys.exit(1)
    for inherited in (*task.listeners, status):
        os.set_inheritable(inherited.fileno(), False)
    if task.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = task.gpus
    _set_up_logging(f"replica {task.number}")
    try:
        time.sleep(task.wait_s)
        _serve(task, status)
    except KeyboardInterrupt:
        return
    sys.exit(1)


def _serve(task: ReplicaTask, status: Connection) -> None:
    from tasks.serving.server import follow_and_serve

    with ExitStack() as stack:
        try:
            follow_and_serve(
                task.ref,
                [stack.enter_context(listener) for listener in task.listeners],
                tracking_uri=task.tracking_uri,
                cache_dir=task.cache_dir,
                record_path=task.record_path,
                record=task.record.model_copy(update={"process": process_key(os.getpid())}),
                config=task.config,
                announce=lambda served: status.send(ReplicaStatus(served.name, served.version, served.example)),
                load_lock=task.load_lock,
            )
        except Exception as error:
            why = without_credentials(str(error), uri=task.tracking_uri)
            logger.error("%s", why)
            status.send(ReplicaStatus(error=why, is_bad_input=isinstance(error, ValueError)))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _set_up_logging(name: str) -> None:
    """Log as the command does, with the replica's name in each line."""
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format=f"%(asctime)s {name}: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("tasks").setLevel(logging.INFO)

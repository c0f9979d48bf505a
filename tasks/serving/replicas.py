"""`shardline serve --replicas N`: N server processes behind one port; one that dies is started again.

This process opens the socket from which all replicas accept connections, so that queued connections outlive any
replica. (With sockets of their own and SO_REUSEPORT, the kernel would drop the queue of a replica that ends.) Each
replica writes to a pipe when it is ready; the kernel closes the pipe when the replica has ended.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from prometheus_client.multiprocess import mark_process_dead

from tasks.hardware.machine import gpus_here, usable_cores
from tasks.serving.connections import DRAIN_S
from tasks.serving.listener import listen, print_address, url_of
from tasks.serving.metrics import SHARED_FOLDER
from tasks.serving.server_record import ServerRecord
from tasks.workspace.processes import end_process, process_key
from training.config.serving import InferenceConfig, ServeConfig
from training.records.record import Record

logger = logging.getLogger(__name__)

RETRY_S = 5.0  # seconds until a replica that died before it was ready is started again
CLOSING_S = 10.0  # seconds after DRAIN_S for engines to end


class ReplicaTask(Record):
    """The task of a replica, sent over its standard input, because arguments would show `tracking_uri`'s password."""

    number: int
    ref: str
    tracking_uri: str
    cache_dir: Path | None
    record_path: Path | None
    url: str
    public_url: str
    supervisor: str
    listeners: tuple[int, ...]  # inherited file descriptors: of the public socket, and of the replica's own
    status_pipe: int
    load_lock: Path
    wait_s: float  # seconds before it loads the model
    config: ServeConfig


class ReplicaStatus(Record):
    """The line that a replica writes to its pipe: it is ready, or the reason why it is not."""

    model: str = ""
    version: int = 0
    prompt: str = ""
    error: str = ""
    is_bad_input: bool = False


@dataclass
class Replica:
    task: ReplicaTask
    private: socket.socket
    gpus: str | None  # value of CUDA_VISIBLE_DEVICES; None: unchanged
    process: subprocess.Popen[bytes]
    pipe: IO[bytes]  # unbuffered, so that `select` sees every line
    is_ready: bool = False

    def read_status(self) -> ReplicaStatus | None:
        """Wait for the next line; None if the replica has ended."""
        line = self.pipe.readline()
        return ReplicaStatus.model_validate_json(line) if line else None


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
                url=url_of("127.0.0.1", private),
                public_url=url,
                supervisor=process_key(os.getpid()),
                listeners=(public.fileno(), private.fileno()),
                status_pipe=-1,
                load_lock=folder / "load_lock",
                wait_s=0.0,
                config=config,
            )
            started.append(_start(task, private=private, gpus=gpus[number], metrics=folder))
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


def _start(task: ReplicaTask, *, private: socket.socket, gpus: str | None, metrics: Path) -> Replica:
    environment = os.environ | {SHARED_FOLDER: str(metrics)}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    ours, theirs = os.pipe()
    task = task.model_copy(update={"status_pipe": theirs})
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tasks.serving.replica"],
        stdin=subprocess.PIPE,
        pass_fds=[*task.listeners, theirs],
        env=environment,
        start_new_session=True,  # a Ctrl-C in the terminal reaches only this process, which ends the replicas
    )
    os.close(theirs)
    assert process.stdin
    with process.stdin as pipe:
        pipe.write(task.model_dump_json().encode())
    return Replica(task, private, gpus, process, os.fdopen(ours, "rb", buffering=0))


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
    readable, _, _ = select.select([replica.pipe for replica in replicas], [], [])
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
        task = replica.task.model_copy(update={"wait_s": wait_s})
        replicas[place] = _start(task, private=replica.private, gpus=replica.gpus, metrics=metrics)
        replica.pipe.close()


def _how_ended(replica: Replica) -> str:
    code = replica.process.wait()
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _end(replicas: list[Replica], public: socket.socket) -> None:
    """End all replicas together: each finishes its requests; replicas that still run after the deadline are killed."""
    public.close()  # so that new connections are refused as soon as the replicas accept none
    for replica in replicas:
        replica.process.terminate()
    deadline = time.monotonic() + DRAIN_S + CLOSING_S
    try:
        for replica in replicas:
            replica.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        logger.warning("replicas still run %.0f s after SIGTERM: killing them", DRAIN_S + CLOSING_S)
    finally:
        for replica in replicas:
            if replica.process.poll() is None:
                end_process(replica.process, grace_s=0, with_descendants=True)
            replica.pipe.close()
            if replica.task.record_path:
                replica.task.record_path.unlink(missing_ok=True)


def record_of(task: ReplicaTask) -> ServerRecord:
    """Return the record of the replica that runs in this process."""
    return ServerRecord(
        url=task.url,
        ref=task.ref,
        model="",
        process=process_key(os.getpid()),
        public_url=task.public_url,
        supervisor=task.supervisor,
    )

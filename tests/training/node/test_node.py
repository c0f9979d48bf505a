"""A container's main program: real torchruns around small programs, told to stop in each of the ways there are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.workspace.processes import free_port
from tests.support.repository import REPO
from training.records.node import NodeEnd, NodeTask

DEADLINE_S = 60
SECRET = 's3cr3t/tok"en'

SHOW = """
import json, os, pathlib, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
names += ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TOKEN", "MLFLOW_RUN_ID"]
seen = [sys.argv[1:], [os.environ.get(name) for name in names]]
pathlib.Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(seen))
"""
WAIT = """
import os, pathlib, signal, subprocess, sys, time
me = pathlib.Path(f"rank-{os.environ['RANK']}")
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
me.with_suffix(".pids").write_text(f"{os.getpid()} {child.pid}")
while not signals or sys.argv[1] == "deaf":
    time.sleep(0.05)
child.kill()
time.sleep(0.5)
me.with_suffix(".saved").write_text("a checkpoint")
"""
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
    raise ValueError("cannot log in with " + os.environ["TOKEN"])
time.sleep(1000)
"""
DEAF = """
import os, pathlib, signal, time
if os.environ["RANK"] == "1":
    while not os.path.exists("fail"):
        time.sleep(0.05)
    raise KeyError("verses")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("deaf-" + os.environ["RANK"]).touch()
time.sleep(1000)
"""
PRINT = """
for i in range(600_000):
    print("line", i)
"""


class Node:
    """`python -m training.node` on a script, in a folder of its own."""

    def __init__(self, folder: Path, script: str, *, secrets: dict[str, str] | None = None, **task: Any) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "program.py").write_text(script)
        name = f"node-{task.get('node_rank', 0)}"
        self.task = NodeTask(
            script=str(folder / "program.py"),
            master_port=task.pop("master_port", None) or free_port(),
            end=str(folder / f"{name}-end.json"),
            secrets_on_stdin=secrets is not None,
            environment={"OMP_NUM_THREADS": "1"} | task.pop("environment", {}),
            **task,
        )
        self.task.write(folder / f"{name}.json")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "training.node", str(folder / f"{name}.json")],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self.process.stdin is not None
        if secrets is not None:
            self.process.stdin.write(json.dumps(secrets).encode())
        self.process.stdin.close()
        self.process.stdin = None  # as communicate() wants it

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not all((self.folder / name).exists() for name in names):
            assert self.process.poll() is None, self.process.communicate()[0].decode()
            assert time.monotonic() < deadline, f"no {names} in {DEADLINE_S} s"
            time.sleep(0.02)

    def finish(self) -> tuple[int, NodeEnd, str]:
        """Exit code, record, and what was printed."""
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, NodeEnd.read(Path(self.task.end)), output.decode()

    def ends_with(self, code: int, ending: str, asked: str) -> None:
        found, end, output = self.finish()
        assert (found, end.ending, end.asked) == (code, ending, asked), output


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(script: str, **task: Any) -> Node:
        nodes.append(Node(tmp_path, script, **task))
        return nodes[-1]

    yield make
    for node in nodes:
        node.process.kill()
        node.process.wait()


def pids(folder: Path) -> list[int]:
    return [int(pid) for path in folder.glob("rank-*.pids") for pid in path.read_text().split()]


@pytest.mark.slow
def test_two_hosts_with_unlike_numbers_of_ranks_get_torchruns_environment_and_the_secrets(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    """Arguments arrive as they are, also those that torchrun would take for its own."""
    port, arguments = free_port(), ("--d", "1", "--nnodes", "7", "--", "--log")
    common = {"num_nodes": 2, "master_port": port, "args": arguments, "interface": "lo"}
    common |= {"secrets": {"TOKEN": SECRET}, "environment": {"MLFLOW_RUN_ID": "abc"}}
    nodes = [start(SHOW, node_rank=rank, num_ranks=2 - rank, **common) for rank in range(2)]
    for node in nodes:
        node.ends_with(0, "done", "")
    seen = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(3)]
    assert [tuple(given) for given, _ in seen] == [arguments] * 3
    shared = ["127.0.0.1", "lo", "lo", SECRET, "abc"]
    assert [values for _, values in seen] == [
        ["0", "0", "3", "2", *shared],
        ["1", "1", "3", "2", *shared],
        ["2", "0", "3", "1", *shared],
    ]


def test_told_to_stop_ranks_get_time_for_a_checkpoint_and_leave_nothing_behind(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    node = start(WAIT, num_ranks=2, args=("listens",))
    node.wait_for("rank-0.pids", "rank-1.pids")
    node.process.terminate()
    node.ends_with(130, "stopped", "signal")
    assert (tmp_path / "rank-0.saved").exists()
    assert (tmp_path / "rank-1.saved").exists()
    assert not any(map(psutil.pid_exists, pids(tmp_path)))


def test_ranks_that_do_not_listen_are_killed_after_the_grace_with_all_they_started(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    node = start(WAIT, num_ranks=2, args=("deaf",), grace_s=0.5)
    node.wait_for("rank-0.pids", "rank-1.pids")
    stopped_at = time.monotonic()
    node.process.send_signal(signal.SIGINT)
    node.ends_with(137, "killed", "signal")
    assert time.monotonic() - stopped_at < 15, "torchrun alone would have given them 30 s"
    assert len(pids(tmp_path)) == 4
    assert not any(map(psutil.pid_exists, pids(tmp_path)))


@pytest.mark.slow
def test_ranks_outlive_a_lease_that_is_renewed_and_stop_when_it_is_not(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    lease, heartbeat, launcher_died = tmp_path / "lease", tmp_path / "heartbeat", threading.Event()
    lease.touch()

    def renew() -> None:
        seconds = 0  # the launcher's clock may be wrong by decades
        while not launcher_died.wait(0.5):
            seconds += 1
            os.utime(lease, (seconds, seconds))

    launcher = threading.Thread(target=renew)
    launcher.start()
    node = start(WAIT, args=("listens",), lease=str(lease), lease_s=3.0, heartbeat=str(heartbeat))
    node.wait_for("rank-0.pids", "heartbeat")
    with pytest.raises(subprocess.TimeoutExpired):
        node.process.wait(4.0)  # more than the lease
    assert time.time() - heartbeat.stat().st_mtime < 2.5
    launcher_died.set()
    launcher.join()
    node.ends_with(130, "stopped", "lease stale")
    assert (tmp_path / "rank-0.saved").exists()


def test_a_withdrawn_lease_ends_ranks_at_once(start: Callable[..., Node], tmp_path: Path) -> None:
    (tmp_path / "lease").touch()
    node = start(WAIT, args=("deaf",), lease=str(tmp_path / "lease"), lease_s=1000, grace_s=1000)
    node.wait_for("rank-0.pids")
    (tmp_path / "lease").unlink()
    node.ends_with(137, "killed", "lease withdrawn")
    assert not any(map(psutil.pid_exists, pids(tmp_path)))


@pytest.mark.slow
def test_the_record_names_the_rank_that_failed_and_why_without_secrets(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    code, end, output = start(FAIL, num_ranks=2, args=("raises",), secrets={"TOKEN": SECRET}).finish()
    assert (code, end.ending, end.asked) == (1, "failed", ""), output
    failure = next(failure for failure in end.failures if failure.rank == 1)
    assert (failure.exit_code, failure.cause) == (1, "ValueError: cannot log in with ***")
    assert SECRET not in "\n".join(path.read_text() for path in tmp_path.glob("*.json"))


@pytest.mark.slow
def test_siblings_of_a_rank_that_failed_are_not_waited_for(start: Callable[..., Node]) -> None:
    """torchrun gives them 30 s, as long as they do not listen; and reports that they died of a signal too."""
    node = start(DEAF, num_ranks=3)
    node.wait_for("deaf-0", "deaf-2")
    failed = time.monotonic()
    (node.folder / "fail").touch()
    code, end, output = node.finish()
    assert time.monotonic() - failed < 15
    assert (code, end.ending) == (1, "failed"), output
    assert [(each.rank, each.exit_code, each.cause) for each in end.failures] == [(1, 1, "KeyError: 'verses'")], output


@pytest.mark.slow
def test_the_record_says_which_signal_ended_a_rank(start: Callable[..., Node]) -> None:
    code, end, output = start(FAIL, num_ranks=2, args=("killed",)).finish()
    assert (code, end.ending) == (1, "failed"), output
    killed = next(failure for failure in end.failures if failure.rank == 1)
    assert (killed.exit_code, killed.cause) == (-9, "ended by signal 9")


@pytest.mark.slow
def test_ranks_do_not_wait_for_a_log_that_nobody_reads(start: Callable[..., Node]) -> None:
    """As when dockerd is killed: 64 KiB later every print would block. 7 MB are printed, the end of it is kept."""
    node = start(PRINT)
    deadline = time.monotonic() + DEADLINE_S
    while not Path(node.task.end).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    code, end, output = node.finish()
    assert (code, end.ending) == (0, "done")
    assert end.last_lines[-1] == "line 599999"
    assert len(output) < 5 * 2**20


def test_secrets_that_are_none_are_refused_before_anything_starts(start: Callable[..., Node]) -> None:
    code, end, output = start(SHOW, secrets=["not", SECRET]).finish()
    assert (code, end.ending) == (1, "failed")
    assert "no JSON object of environment variables" in end.last_lines[-1]
    assert "s3cr3t" not in output


def test_the_main_program_starts_without_torch() -> None:
    code = "import sys, training.node; print({'torch', 'numpy', 'mlflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.strip() == "set()"

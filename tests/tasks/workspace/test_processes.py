"""A recorded process stays itself however the clock is set, and is never another one with its PID."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType

from flows.prefect_ui.flow import PROCESS, START
from flows.servers import local
from flows.stages.crashed_runs import has_crashed
from tasks.launch import local as local_launch
from tasks.operations.gpu_queue import _orphaned_ranks
from tasks.operations.ps import list_running
from tasks.operations.servers import list_servers, stop_server
from tasks.promotion.lock import LivenessTracker, LockTag
from tasks.promotion.servers import Server
from tasks.runs.owner import Owner, RanksLauncher, owner_process
from tasks.serving.server_record import ServerRecord
from tasks.workspace import processes
from tasks.workspace.locks import owned
from tasks.workspace.paths import UP_FILE, up_url
from tasks.workspace.processes import has_ended, local_process, process_key
from tests.support.waiting import until
from training.facts.formats import FORMATS
from training.records.record import write_atomically


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    return tmp_path


def in_ps(key: str, home: Path) -> bool:
    ServerRecord(url="http://127.0.0.1:9", ref="m@champion", model="m", process=key).write(home / "servers" / "1.json")
    (server,) = list_servers()
    return server.status != "killed"


def in_ps_of_runs(key: str, home: Path) -> bool:
    number = FORMATS["records"].number
    plan = f'{{"format": {number}, "ranks_per_host": [1], "config": {{"launch": {{}}}}}}'
    write_atomically(home / "run" / "plan.json", plan)
    RanksLauncher(launcher=key).write(home / "run" / "gang.json")
    return [row.run for row in list_running([]).running] == ["run"]


def is_stopped(key: str, home: Path) -> bool:
    ServerRecord(url="http://127.0.0.1:9", ref="m@champion", model="m", process=key).write(home / "servers" / "1.json")
    return bool(stop_server("http://127.0.0.1:9").pids)


def of_up(key: str, home: Path) -> bool:
    write_atomically(home / UP_FILE, f'{{"mlflow": {{"url": "http://127.0.0.1:9", "process": "{key}"}}}}')
    return up_url("mlflow") != "" and local._process("mlflow") is not None


def ended_by_down(key: str, home: Path) -> bool:
    write_atomically(home / UP_FILE, f'{{"mlflow": {{"url": "http://127.0.0.1:9", "process": "{key}"}}}}')
    return local.down() == ["mlflow"]


def in_reconcile(key: str, home: Path) -> bool:
    labels = {PROCESS: key, START: 1}
    return not has_crashed(
        FlowRun(id=uuid4(), flow_id=uuid4(), state=State(type=StateType.RUNNING), run_count=1, labels=labels)
    )


def in_a_rollout(key: str, home: Path) -> bool:
    (home / "record").touch()
    return not Server("http://127.0.0.1:9", descriptor=home / "record", process=key).crashed


def with_the_lock(key: str, home: Path) -> bool:
    tag = LockTag(state="holding", who="ada", what="promotes", process=key, urgent=False, heartbeat=3)
    return "shardline.turn.1" in LivenessTracker().living({"shardline.turn.1": tag.content().decode()})


def as_owner(key: str, home: Path) -> bool:
    Owner(process=key, children=()).write(home / "run" / "owner.json")
    with owned(home / "run"):
        return owner_process(home / "run") is not None


def with_gpus(key: str, home: Path) -> bool:
    RanksLauncher(launcher=key).write(home / "run" / "gang.json")
    return _orphaned_ranks("run") is not None


def before_a_resume(key: str, home: Path) -> bool:
    RanksLauncher(launcher=key).write(home / "run" / "gang.json")
    local_launch.end_earlier_attempt(home / "run", grace_s=5)
    pid = processes.pid_of(key)  # gone, once the test's process has asked for its end
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


OBSERVERS = (
    in_ps,
    in_ps_of_runs,
    is_stopped,
    of_up,
    ended_by_down,
    in_reconcile,
    in_a_rollout,
    with_the_lock,
    as_owner,
    with_gpus,
    before_a_resume,
)


@pytest.mark.parametrize("step_s", [3.0, -3.0, 86_400.0])
@pytest.mark.parametrize("sees_it_live", OBSERVERS, ids=lambda observer: observer.__name__)
def test_a_living_process_is_one_after_a_step_of_the_clock(
    sees_it_live: Callable[[str, Path], bool],
    step_s: float,
    home: Path,
    sleeper: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel's boot time is the wall clock less the uptime: a step of the clock is a step of it."""
    key = process_key(sleeper.pid)
    booted_at = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_at + step_s)
    monkeypatch.setattr("psutil._psplatform.boot_time", lambda: booted_at + step_s)
    assert sees_it_live(key, home)


@pytest.mark.parametrize("sees_it_live", [in_ps, of_up, in_a_rollout], ids=lambda observer: observer.__name__)
def test_a_living_process_is_one_when_its_host_has_another_name(
    sees_it_live: Callable[[str, Path], bool],
    home: Path,
    sleeper: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = process_key(sleeper.pid)
    monkeypatch.setattr("socket.gethostname", lambda: "laptop-in-another-network")
    assert sees_it_live(key, home)


@pytest.mark.parametrize("name", ["python", "a) Z 1 (b", "((", "x y) R"])
def test_the_name_of_a_command_does_not_change_its_key(name: str, tmp_path: Path) -> None:
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, {name.encode()!r}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        key = process_key(process.pid)
        process.stdout.readline()
        assert f"({name})" in Path(f"/proc/{process.pid}/stat").read_text() or name == "python"
        assert process_key(process.pid) == key
        assert local_process(key) is not None
        process.communicate()
    assert has_ended(key)


def test_another_process_with_the_pid_is_not_the_one_that_was_recorded(sleeper: subprocess.Popen[bytes]) -> None:
    host, pid, ticks, kernel = process_key(sleeper.pid).split("/")
    earlier = f"{host}/{pid}/{int(ticks) - 1}/{kernel}"
    assert has_ended(earlier)
    assert local_process(earlier) is None


@pytest.mark.parametrize("sees_it_live", [in_ps, of_up, in_reconcile, in_a_rollout, with_the_lock, with_gpus])
def test_a_zombie_has_ended(sees_it_live: Callable[[str, Path], bool], home: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    key = process_key(process.pid)
    process.kill()
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "a zombie")
    assert has_ended(key)
    assert not sees_it_live(key, home)
    process.wait()
    assert has_ended(key)


def test_after_a_boot_nothing_is_known_of_processes_before_it(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another boot may give the PID to a process that began equally many ticks after it."""
    key = process_key(sleeper.pid)
    kernel = processes._kernel()
    monkeypatch.setattr(processes, "_kernel", lambda: f"another-boot-{kernel.rpartition('-')[2]}")
    assert local_process(key) is None
    assert not has_ended(key), "a clone of the machine may run it"


@pytest.mark.parametrize(
    "key",
    ["", "0:0", "elsewhere/7/1.00", f"elsewhere/{os.getpid()}/1/no-kernel"],
    ids=["none", "no key", "no kernel", "another kernel"],
)
def test_a_key_of_elsewhere_is_neither_alive_nor_ended(key: str) -> None:
    assert local_process(key) is None
    assert not has_ended(key)


def test_processes_of_another_pid_namespace_are_not_judged(sleeper: subprocess.Popen[bytes]) -> None:
    """A container has the host's boot ID, its own PIDs, and perhaps the host's name."""
    command = f"from tasks.workspace.processes import *; print(process_key({os.getpid()}), process_key(1))"
    inside = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", command],
        capture_output=True,
        text=True,
        check=False,
    )
    if inside.returncode:
        pytest.skip(f"this machine allows no namespaces: {inside.stderr.strip()}")
    (first,) = inside.stdout.split()
    assert first.split("/")[1] == "1"
    assert local_process(first) is None
    assert not has_ended(first)

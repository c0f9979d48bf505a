"""Jobs on real daemons: their rights, their limits, their end, and that nothing is left of those that fail."""

from __future__ import annotations

import hashlib
import json
import resource
import time
from dataclasses import replace
from pathlib import Path

import pytest

from infra import containers
from infra.containers import ATTEMPT, RUN, Bind, Job, State
from infra.heartbeat import Heartbeat
from infra.hosts import HostClient, HostError, connect, on_all
from tests.support.rig.rig import Rig, RigHost
from tests.support.waiting import until


def job(rig: Rig, code: str, **over: object) -> Job:
    """Python code as a job; without heavy imports it is up in 0.3 s."""
    made = Job(
        image=rig.image,
        command=("python", "-c", code),
        name="job",
        mounts=rig.binds,
        memlock=False,
        labels={RUN: "r", ATTEMPT: "1"},
    )
    return replace(made, **over)  # type: ignore[arg-type]


def client_of(host: RigHost) -> HostClient:
    return connect(host.docker_host())


def ended(client: HostClient, container: str) -> State:
    """Wait for its end."""

    def over() -> bool:
        now = containers.state(client, container)
        return now is not None and not now.running

    until(over, "its end")
    final = containers.state(client, container)
    assert final is not None
    return final


def output(client: HostClient, container: str) -> str:
    return str(client.api.logs(container).decode())


def wait_for_output(client: HostClient, container: str, text: str) -> None:
    """Wait until its log holds the text."""
    until(lambda: text in output(client, container), f"{text!r} in its output")


RIGHTS = """
import json, os
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
def refused(path):
    try:
        open(path, "w").close()
    except OSError as error:
        return error.strerror
found = {key: status[key].strip() for key in ("Uid", "Gid", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs")}
found |= {"root": refused("/file"), "mount": refused(os.environ["PYTHONPATH"] + "/file"), "tmp": refused("/tmp/file")}
found |= {"shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize, "host": os.uname().nodename}
found |= {"docker": os.path.exists("/var/run/docker.sock"), "one": open("/proc/1/cmdline").read().split("\\0")[0]}
print(json.dumps(found))
"""


def test_a_job_has_the_least_rights_it_can_do_with(rig: Rig) -> None:
    client = client_of(rig.hosts[1])
    container = containers.start(client, job(rig, RIGHTS, shm_gib=0.25, pids=64, memory_gib=0.5, cpus=0.5))
    assert ended(client, container).exit_code == 0
    found = json.loads(output(client, container))
    assert found["Uid"].split() == found["Gid"].split() == ["10001"] * 4
    assert {found[key] for key in ("CapPrm", "CapEff", "CapBnd")} == {"0" * 16}
    assert found["NoNewPrivs"] == "1"
    assert found["root"] == found["mount"] == "Read-only file system"
    assert found["tmp"] is None
    assert found["shm"] == 2**28
    assert found["host"] == "host1"  # it is in its host's network, not in the launcher's
    assert not found["docker"]
    assert "docker-init" in found["one"]

    config = client.api.inspect_container(container)
    limits = config["HostConfig"]
    assert limits["CapDrop"] == ["ALL"]
    assert limits["ReadonlyRootfs"]
    assert not limits["Privileged"]
    assert any("no-new-privileges" in option for option in limits["SecurityOpt"])
    assert (limits["PidsLimit"], limits["Memory"], limits["MemorySwap"]) == (64, 2**29, 2**29)
    assert limits["NanoCpus"] == 5 * 10**8


def test_a_secret_comes_over_standard_input_and_shows_nowhere(rig: Rig) -> None:
    """Over TLS and over a unix socket; 300 kB are more than any buffer in between holds."""
    secret = json.dumps({"PASSWORD": "hunter2" * 43_000}).encode()
    code = "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    for host in (rig.hosts[0].docker_host(), rig.hosts[1].docker_host(url=rig.hosts[1].socket, tls_dir=None)):
        client = connect(host)
        container = containers.start(client, job(rig, code), secret=secret)
        assert ended(client, container).exit_code == 0
        assert output(client, container).strip() == hashlib.sha256(secret).hexdigest()
        assert "hunter2" not in json.dumps(client.api.inspect_container(container))


def test_a_job_that_ends_before_it_read_its_secret_has_started(rig: Rig) -> None:
    """Its exit code tells more than a broken pipe."""
    client = client_of(rig.hosts[0])
    code = "import os; os.close(0); os._exit(3)"
    container = containers.start(client, job(rig, code), secret=bytes(2**22))
    assert ended(client, container).exit_code == 3


def test_out_of_memory_is_told_from_a_kill(rig: Rig) -> None:
    client = client_of(rig.hosts[0])
    greedy = containers.start(client, job(rig, "x = bytearray(2**30)", memory_gib=0.1, name="greedy"))
    killed = containers.start(client, job(rig, "import time; time.sleep(600)", name="killed"))
    containers.kill(client, killed)
    assert [(s.exit_code, s.oom_killed) for s in (ended(client, greedy), ended(client, killed))] == [
        (137, True),
        (137, False),
    ]


STOPPED = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(3), print("saved", flush=True), sys.exit(0)))
print("ready", flush=True)
time.sleep(600)
"""


def test_all_hosts_stop_at_once_and_in_order(rig: Rig) -> None:
    hosts = {host.name: host for host in rig.hosts}
    clients = {name: client_of(host) for name, host in hosts.items()}
    started = {name: containers.start(client, job(rig, STOPPED)) for name, client in clients.items()}
    for name, client in clients.items():
        wait_for_output(client, started[name], "ready")
    begin = time.monotonic()
    dockers = [host.docker_host() for host in rig.hosts]
    on_all(dockers, lambda host: containers.stop(clients[host.name], started[host.name], grace_s=20))
    took_s = time.monotonic() - begin
    assert all("saved" in output(client, started[name]) for name, client in clients.items())
    assert all(ended(client, started[name]).exit_code == 0 for name, client in clients.items())
    assert took_s < 7, f"stopping three hosts that need 3 s each took {took_s:.1f} s"


def test_a_job_that_does_not_stop_is_killed_after_its_grace(rig: Rig) -> None:
    client = client_of(rig.hosts[0])
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    container = containers.start(client, job(rig, code))
    wait_for_output(client, container, "ready")
    containers.stop(client, container, grace_s=1)
    assert ended(client, container).exit_code == 137


def test_ending_what_is_gone_is_no_error(rig: Rig) -> None:
    client = client_of(rig.hosts[0])
    container = containers.start(client, job(rig, "pass"))
    ended(client, container)
    containers.kill(client, container)
    containers.stop(client, container, grace_s=1)
    containers.remove(client, container)
    containers.remove(client, container)
    assert containers.state(client, container) is None
    assert rig.containers(rig.hosts[0]) == []


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"gpus": -1}, "nvidia-container-toolkit"),
        ({"gpu_ids": ("0",)}, "nvidia-container-toolkit"),
        ({"mounts": (Bind("/nowhere", "/nowhere"),)}, "/nowhere"),
        ({"image": "sha256:" + "0" * 64}, "does not have the image"),
        ({"memlock": True}, "launch.memlock=false"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_no_container(rig: Rig, over: dict[str, object], words: str) -> None:
    host = rig.hosts[2]
    if "memlock" in over and _may_lift_memlock():
        pytest.skip("this kernel lets root of a container lift the limit on locked memory")
    with pytest.raises(HostError, match=words) as caught:
        containers.start(client_of(host), job(rig, "pass", **over), secret=b"s")
    assert caught.value.hosts == ("host2",)
    assert not caught.value.unreachable
    assert rig.containers(host) == []
    assert not Path("/nowhere").exists()


def _may_lift_memlock() -> bool:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY


def test_a_name_that_is_taken_is_an_error_and_its_container_stays(rig: Rig) -> None:
    client = client_of(rig.hosts[0])
    first = containers.start(client, job(rig, "import time; time.sleep(600)"))
    with pytest.raises(HostError, match="already"):
        containers.start(client, job(rig, "pass"))
    assert [found.id for found in rig.containers(rig.hosts[0])] == [first]
    state = containers.state(client, first)
    assert state is not None
    assert state.running


def test_containers_are_found_by_run(rig: Rig) -> None:
    client = client_of(rig.hosts[0])
    for i, label in enumerate([{RUN: "a", ATTEMPT: "1"}, {RUN: "a", ATTEMPT: "2"}, {RUN: "b"}, {"other": "x"}]):
        containers.start(client, job(rig, "pass", name=f"job{i}", labels=label))
    names = {run: sorted(found.name for found in containers.find(client, run=run)) for run in ("", "a", "c")}
    assert names == {"": ["job0", "job1", "job2"], "a": ["job0", "job1"], "c": []}


def test_a_heartbeat_that_stops_makes_it_unhealthy(rig: Rig) -> None:
    client = client_of(rig.hosts[0])
    uptime = "Path('/proc/uptime').read_text().partition('.')[0]"
    code = f"import time; from pathlib import Path; Path('/tmp/beat').write_text({uptime}); time.sleep(600)"
    container = containers.start(
        client, job(rig, code, heartbeat=Heartbeat("/tmp/beat", max_age_s=3, start_s=1, every_s=1))
    )

    def health() -> str:
        state = containers.state(client, container)
        assert state is not None
        assert state.running
        return state.health

    until(lambda: health() == "healthy", "a healthy container")
    until(lambda: health() == "unhealthy", "an unhealthy container")

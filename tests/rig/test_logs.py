"""A container's log in a file here: whole and in order, whatever happened on the way."""

from __future__ import annotations

from pathlib import Path

from infra import containers
from infra.logs import LogFollower
from tests.rig.test_containers import client_of, job, wait_for_output
from tests.support.rig.rig import Rig
from tests.support.waiting import until

COUNT = """
import sys, time
for i in range({n}):
    print(f"line {{i}}", flush=True, file=sys.stderr if i % 10 == 9 else sys.stdout)
    time.sleep({every_s})
"""


def missing_or_doubled(text: str, n: int) -> list[int]:
    """Lines of each stream are in order; the streams, each read by a thread of Docker's, may swap neighbours."""
    numbers = [int(line.removeprefix("line ")) for line in text.splitlines()]
    for stream in (lambda i: i % 10 == 9, lambda i: i % 10 != 9):
        assert (mine := list(filter(stream, numbers))) == sorted(mine)
    return sorted({*range(n)} ^ {*numbers}) + [i for i in {*numbers} if numbers.count(i) > 1]


def test_a_log_is_whole_after_a_cut_of_the_network(rig: Rig, tmp_path: Path) -> None:
    """8 s without network, longer than a switch takes to restart."""
    host, path = rig.hosts[0], tmp_path / "host0.log"
    client = client_of(host)
    container = containers.start(client, job(rig, COUNT.format(n=200, every_s=0.05)))
    follower = LogFollower(host.docker_host(), container, path)
    until(lambda: "line 20\n" in path.read_text(), "line 20 in the log")
    rig.partition(host)
    rig_client = rig.daemons[0].client()
    until(lambda: b"line 100\n" in rig_client.api.logs(container), "line 100 at the daemon")
    assert "line 100\n" not in path.read_text()
    rig.heal(host)
    follower.join(60)
    assert not follower.is_alive()
    assert missing_or_doubled(path.read_text(), 200) == []


def test_a_log_is_whole_after_its_daemon_was_killed(rig: Rig, tmp_path: Path) -> None:
    """With --live-restore the container goes on, and what it writes waits in a pipe for the next daemon."""
    host, path = rig.hosts[1], tmp_path / "host1.log"
    container = containers.start(client_of(host), job(rig, COUNT.format(n=60, every_s=0.05)))
    follower = LogFollower(host.docker_host(), container, path)
    until(lambda: "line 10\n" in path.read_text(), "line 10 in the log")
    rig.kill_daemon(host)
    rig.start_daemon(host)
    follower.join(30)
    assert missing_or_doubled(path.read_text(), 60) == []


def test_a_second_launcher_goes_on_where_a_killed_one_stood(rig: Rig, tmp_path: Path) -> None:
    host, path = rig.hosts[0], tmp_path / "host0.log"
    path.write_text("an earlier attempt's\n")
    client = client_of(host)
    container = containers.start(client, job(rig, COUNT.format(n=100, every_s=0.03)))
    first = LogFollower(host.docker_host(), container, path)
    until(lambda: "line 20\n" in path.read_text(), "line 20 in the log")
    first.close()  # its position is up to a second old, as after a kill
    written = path.read_text()
    wait_for_output(client, container, "line 60\n")
    assert path.read_text() == written
    second = LogFollower(host.docker_host(), container, path)
    second.join(30)
    first_line, _, rest = path.read_text().partition("\n")
    assert first_line == "an earlier attempt's"
    assert missing_or_doubled(rest, 100) == []


def test_a_full_disk_neither_ends_the_follower_nor_tears_a_line(rig: Rig) -> None:
    host, small = rig.hosts[0], rig.make_home(size_mib=1)
    path, ballast = small / "logs" / "host0.log", small / "ballast"
    ballast.write_bytes(bytes(2**20 - 2 * 4096 - 4096))
    container = containers.start(client_of(host), job(rig, COUNT.format(n=3000, every_s=0.002)))
    follower = LogFollower(host.docker_host(), container, path)
    wait_for_output(client_of(host), container, "line 1500\n")
    ballast.unlink()
    follower.join(30)
    assert missing_or_doubled(path.read_text(), 3000) == []


def test_long_lines_stay_whole(rig: Rig, tmp_path: Path) -> None:
    """Docker cuts them in pieces of 16 KiB, each with a time of its own."""
    host, path = rig.hosts[0], tmp_path / "host0.log"
    container = containers.start(client_of(host), job(rig, "print('x' * 100_000); print('end')"))
    LogFollower(host.docker_host(), container, path).join(30)
    assert path.read_text() == "x" * 100_000 + "\nend\n"

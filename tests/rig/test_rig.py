"""The rig itself: what a test session that was killed leaves behind is swept by the next one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.rig.rig import DATA, STATE, Rig

SESSION = """
import signal
from infra import containers
from infra.hosts import connect
from tests.support.rig.rig import Rig
from tests.rig.test_containers import job
rig = Rig()
rig.up()
rig.make_home(size_mib=1)
containers.start(connect(rig.hosts[0].docker_host()), job(rig, "import time; time.sleep(600)"))
print(rig.slot, flush=True)
signal.pause()
"""


def left_of(slot: int) -> list[str]:
    """Processes, networks, mounts, files and cgroups."""
    processes = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if f"{STATE}/{slot}/".encode() in _bytes_of(path)
    ]
    networks = [path.name for path in Path("/run/netns").glob(f"shardline-rig{slot}-*")]
    cables = [str(path) for path in Path("/sys/class/net").glob(f"slrig{slot}")]
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if f"{DATA}/{slot}/" in line]
    files = [str(path) for path in (STATE / str(slot), DATA / str(slot)) if path.exists()]
    cgroups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/shardline-rig{slot}")]
    return processes + networks + cables + mounts + files + cgroups


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def test_what_a_killed_session_left_is_swept_by_the_next(rig: Rig) -> None:
    """While our own goes on untouched."""
    session = subprocess.Popen([sys.executable, "-c", SESSION], stdout=subprocess.PIPE, text=True)
    assert session.stdout is not None
    slot = int(session.stdout.readline())
    session.send_signal(signal.SIGKILL)
    session.wait()
    assert len(left_of(slot)) > 10
    begin = time.monotonic()
    second = Rig()
    second.down()
    assert left_of(slot) == []
    assert left_of(second.slot) == []
    assert time.monotonic() - begin < 10
    assert slot != rig.slot
    assert [rig.containers(host) for host in rig.hosts] == [[], [], []]

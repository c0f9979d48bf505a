"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, with ports and folders of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.local_servers import lasting_ports
from tests.support.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "sinfo", "scancel")
NODES = ("n1", "n2")
# A dead node counts as DOWN after 6 s instead of five minutes, and a job that is ended gets 8 s instead of 30.
CONF = """\
ClusterName=shardline
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
SlurmctldPort={slurmctld}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldTimeout=30
SlurmdTimeout=6
KillWait=8
MessageTimeout=5
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=9 PreemptMode=OFF
"""


def why_no_slurm() -> str | None:
    """Why this machine cannot have a cluster; None if it can."""
    if os.geteuid() != 0:
        return "a Slurm of our own needs root: slurmd starts steps as their users"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"Slurm needs {', '.join(missing)}: tests/slurm/install.sh installs them"
    return None


class SlurmCluster:
    """Nodes n1 and n2 of one core each; what tests do to them, and how all of it goes away."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)  # munge wants the folders above its socket to be open to all
        self.conf = self.folder / "slurm.conf"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.last_job = 0

    def up(self) -> None:
        for name in ("munge", "state", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        controller, *ports = lasting_ports(1 + len(NODES))
        memory_mib = psutil.virtual_memory().total // 2**20 // 2
        nodes = (
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory={memory_mib}"
            for node, port in zip(NODES, ports, strict=True)
        )
        self.conf.write_text(CONF.format(folder=self.folder, slurmctld=controller, nodes="\n".join(nodes)))
        files = {name: self.folder / "munge" / name for name in ("socket", "pid", "log", "seed")}
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={files['socket']}",
            f"--pid-file={files['pid']}",
            f"--log-file={files['log']}",
            f"--seed-file={files['seed']}",
        )
        until(files["socket"].exists, "munged's socket", within_s=10)
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.wait_idle()

    def start_controller(self) -> None:
        self._start("slurmctld", "-D", "-f", str(self.conf))

    def start_node(self, node: str) -> None:
        self._start(node, "-D", "-N", node, "-f", str(self.conf), program="slurmd")

    def _start(self, name: str, *words: str, program: str = "") -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(shutil.which(program or name)), *words],
                env={"PATH": os.environ["PATH"], "SLURM_CONF": str(self.conf)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def down(self) -> None:
        for process in [*self._steps(), *map(_as_psutil, reversed(self.processes.values()))]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self.processes.values():
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    # What happens to it

    def stop_controller(self) -> None:
        self.processes["slurmctld"].terminate()
        self.processes["slurmctld"].wait()

    def submit(self, script: str, *options: str) -> str:
        """Somebody else's job."""
        return self.ask("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}").strip()

    def kill_node(self, node: str) -> None:
        """Power loss: its slurmd, and all that it started, are gone at once."""
        self.processes[node].kill()
        self.processes[node].wait()
        for process in self._steps(node):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def start_node_once_down(self, node: str) -> None:
        """Power is back, after Slurm has noticed that it was gone; does not wait for that."""

        def start() -> None:
            until(lambda: self.node_states()[node].startswith("down"), f"{node} is down", every_s=0.5)
            self.start_node(node)

        threading.Thread(target=start, daemon=True).start()

    def _steps(self, *nodes: str) -> list[psutil.Process]:
        """The slurmstepd of these nodes, or of all, and every process below them."""
        found = []
        for process in psutil.process_iter(["name"]):
            if process.info["name"] == "slurmstepd":  # it has no environment left; what it started has
                with suppress(psutil.NoSuchProcess):
                    family = process.children(recursive=True)
                    if any(self._runs_on(member, nodes or NODES) for member in family):
                        found += [process, *family]
        return found

    def _runs_on(self, process: psutil.Process, nodes: Sequence[str]) -> bool:
        with suppress(psutil.Error):
            environment = process.environ()
            return environment.get("SLURM_CONF") == str(self.conf) and environment.get("SLURMD_NODENAME") in nodes
        return False

    # Asking it

    def ask(self, program: str, *words: str) -> str:
        """Standard output of one of Slurm's commands."""
        environment = os.environ | {"SLURM_CONF": str(self.conf)}
        done = subprocess.run([program, *words], env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{program} {' '.join(words)}: {done.stderr}"
        return done.stdout

    def jobs(self, *states: str) -> list[str]:
        """IDs of jobs that are waiting, running or ending; or in these states."""
        return self.ask("squeue", "--noheader", "--format=%i", *(f"--states={state}" for state in states)).split()

    def all_jobs(self) -> list[str]:
        """IDs of our jobs since the last reset, ended ones too."""
        return [job for job in self.jobs("all") if int(job) > self.last_job]

    def node_states(self) -> dict[str, str]:
        rows = self.ask("sinfo", "--noheader", "--Node", "--format=%N %T").split("\n")
        return dict(row.split() for row in rows if row)

    def wait_idle(self) -> None:
        def idle() -> bool:
            with suppress(AssertionError):  # the controller does not answer yet
                return set(self.node_states().values()) == {"idle"}
            return False

        until(idle, f"idle nodes (logs in {self.folder})", within_s=60, every_s=0.2)

    def reset(self) -> None:
        """No jobs, and all nodes as at first."""
        for name in ("slurmctld", *NODES):
            if self.processes[name].poll() is not None:
                self.start_controller() if name == "slurmctld" else self.start_node(name)

        def answers() -> bool:
            with suppress(AssertionError):
                return bool(self.node_states())
            return False

        until(answers, "slurmctld", within_s=30, every_s=0.2)
        with suppress(AssertionError):  # they end already
            self.ask("scancel", *self.jobs())
        for node, state in self.node_states().items():
            with suppress(AssertionError):  # it has come back by itself meanwhile
                if re.match("drain|down", state):
                    self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.wait_idle()
        self.last_job = max(map(int, self.jobs("all")), default=0)


def _as_psutil(process: subprocess.Popen[bytes]) -> psutil.Process:
    return psutil.Process(process.pid)

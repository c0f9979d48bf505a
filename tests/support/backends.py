"""Where tests launch a run of two ranks, and how they harm it there: this machine, Docker hosts, Slurm, Kubernetes.

Ranks are processes of this machine in each of them, so that most harm is done in the same way.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tasks.workspace.processes import free_port
from tests.support.configs import inventory, read_plan
from tests.support.kubernetes_api import KubernetesApi
from tests.support.launched_runs import tokens_of
from tests.support.rig.rig import Rig
from tests.support.rig.runs import check_memory, docker_config, kill_containers
from tests.support.slurm_cluster import SlurmCluster
from tests.support.tiny_shards import plan_tiny_run
from tests.support.waiting import until
from training.config.run import RunConfig
from training.records.inventory import Inventory
from training.records.plan import RunPlan

STEPS, EVERY, STRIKE = 20, 4, 6  # checkpoints are of steps 4, 8, …; something happens at step 6 or soon after
SETTINGS: dict[str, Any] = {
    "parallel__strategy": "ddp",
    "parallel__timeout_s": 30,
    "train__steps": STEPS,
    "train__global_batch": 48,  # steps of 0.15 s and more: time to strike between two of them
    "train__micro_batch": 2,
    "checkpoint__every_steps": EVERY,
    "evaluation__every_steps": STEPS,
}
LEASE_S = 6.0
NO_MACHINE_HAS = 2**40  # an MLP so wide that its first matrix is refused wherever it is asked for


class Backend(ABC):
    """Makes runs of two ranks for a launcher. `hosts`: how many they are on."""

    hosts, host_name = 2, "host{}"
    sigterm_is_the_users = False  # of a rank that somebody tells to stop
    dead_node_shows_as = frozenset({"killed"})  # causes of an attempt whose node died
    notices_dead_node_s = 0.0

    def __init__(self, home: Path, shards: Path) -> None:
        self.home, self.tokens = home, tokens_of(home, shards)

    @property
    @abstractmethod
    def launch(self) -> dict[str, Any]:
        """Fields of `launch`, as tiny_config takes them."""

    @property
    def machines(self) -> Inventory:
        made = inventory(*[1] * self.hosts if self.hosts > 1 else [2]).hosts
        named = (host.model_copy(update={"name": self.host_name.format(n)}) for n, host in enumerate(made))
        return Inventory(hosts=tuple(named))

    def make(self, name: str, **overrides: Any) -> Path:
        """runs/NAME with its plan; its folder."""
        fields = SETTINGS | self.launch | overrides
        return plan_tiny_run(self.home / name, shards_dir=self.tokens, machines=self.machines, **fields).parent

    # Harm

    def kill_rank(self, run_dir: Path) -> None:
        ranks_of(run_dir)[-1].kill()

    @abstractmethod
    def kill_node(self, run_dir: Path) -> str:
        """Kill what stands for a host, with its ranks where they cannot outlive it; the host's name."""

    def hang(self, run_dir: Path) -> psutil.Process:
        """Stop a rank, which then neither works nor ends; returns it. Once it has stopped, a SIGTERM waits for it."""
        rank = ranks_of(run_dir)[-1]
        rank.suspend()
        until(lambda: rank.status() == psutil.STATUS_STOPPED, "the rank has stopped")
        return rank

    def terminate_ranks(self, run_dir: Path) -> None:
        """SIGTERM, of which their nodes know nothing."""
        for rank in ranks_of(run_dir):
            rank.terminate()

    def starved(self, plan: RunPlan) -> RunPlan:
        """The plan, of a run for which there is too little memory."""
        return plan.model_copy(update={"shape": plan.shape.model_copy(update={"mlp_width": NO_MACHINE_HAS})})

    # Afterwards

    def assert_nothing_is_left(self, run_dir: Path) -> None:
        until(lambda: not _processes_of(run_dir), "the end of all processes", within_s=20)
        assert not list(run_dir.glob("*/*/lease"))


class Local(Backend):
    """Ranks of this machine."""

    hosts = 1
    sigterm_is_the_users = True

    @property
    def launch(self) -> dict[str, Any]:
        return {"launch__lease_s": 600.0}  # so that nothing ends by a lease that is stale

    def kill_node(self, run_dir: Path) -> str:
        """The node program alone: its ranks live on until somebody ends them."""
        (node,) = (node for node in nodes_of(run_dir) if _ranks_below(node))
        node.kill()
        return read_plan(run_dir).hosts[0]


class Docker(Backend):
    """A container on each of two hosts of the rig."""

    def __init__(self, home: Path, shards: Path, rig: Rig) -> None:
        super().__init__(home, shards)
        self.rig = rig

    @property
    def launch(self) -> dict[str, Any]:
        return docker_config(self.rig, 1, 1, lease_s=LEASE_S)

    def make(self, name: str, **overrides: Any) -> Path:
        run_dir = super().make(name, **overrides)
        check_memory(run_dir)
        return run_dir

    def kill_node(self, run_dir: Path) -> str:
        """All containers of the first host, where ranks meet."""
        host = self.rig.hosts[0]
        kill_containers(self.rig, host)
        return host.name

    def lose_host(self, run_dir: Path) -> None:
        """The second host loses power."""
        self.rig.power_off(self.rig.hosts[1])

    def starved(self, plan: RunPlan) -> RunPlan:
        """The second host's container gets less than Python's imports need."""
        config = plan.config.model_dump()
        config["launch"]["hosts"][1]["memory_gib"] = 0.15
        return plan.model_copy(update={"config": RunConfig.model_validate(config)})

    def assert_nothing_is_left(self, run_dir: Path) -> None:
        super().assert_nothing_is_left(run_dir)
        on = [host for host in self.rig.hosts if self.rig.daemons[host.index].alive()]
        assert {host.name: self.rig.containers(host) for host in on} == {host.name: [] for host in on}


class Slurm(Backend):
    """A step on each of two nodes of the cluster."""

    host_name = "node{}"
    dead_node_shows_as = frozenset({"network", "lost host", "killed"})
    notices_dead_node_s = 30.0  # and until Slurm has given another

    def __init__(self, home: Path, shards: Path, cluster: SlurmCluster) -> None:
        super().__init__(home, shards)
        self.cluster = cluster

    @property
    def launch(self) -> dict[str, Any]:
        return {
            "launch__launcher": "slurm",
            "launch__slurm": {"nodes": 2, "time_limit_s": 600, "signal_s": 10},
            "launch__lost_after_s": 10.0,
            "launch__lease_s": LEASE_S,
        }

    def lose_host(self, run_dir: Path) -> None:
        """The second node loses power."""
        self.cluster.kill_node("n2")

    def kill_node(self, run_dir: Path) -> str:
        """The second node loses power, which comes back once Slurm has noticed."""
        self.lose_host(run_dir)
        self.cluster.start_node_once_down("n2")
        return "node1"

    def assert_nothing_is_left(self, run_dir: Path) -> None:
        until(lambda: not self.cluster.jobs(), "no jobs", within_s=20, every_s=0.2)
        super().assert_nothing_is_left(run_dir)


class Kubernetes(Backend):
    """A pod on each of two machines of a cluster that runs pods as processes of this machine: not a real one."""

    host_name = "node-{}"

    def __init__(self, home: Path, shards: Path, api: KubernetesApi) -> None:
        super().__init__(home, shards)
        self.api, self.port = api, free_port()

    @property
    def launch(self) -> dict[str, Any]:
        cluster = {"kubeconfig": str(self.api.kubeconfig), "nodes": 2, "volume_claim": "shared", "exclusive": True}
        return {
            "launch__launcher": "kubernetes",
            "launch__kubernetes": cluster,
            "launch__image": "registry/train",
            "launch__user": "10001:10001",
            "launch__port": self.port,
            "launch__wait_s": 60.0,
            "launch__lease_s": LEASE_S,
            "launch__collective_test": False,
        }

    def pod(self) -> dict[str, Any]:
        """The pod of the second node."""
        return self.api.running()[1]

    def lose_host(self, run_dir: Path) -> None:
        """The second node's machine is cut off."""
        self.api.lose(self.pod()["spec"]["nodeName"])

    def kill_node(self, run_dir: Path) -> str:
        self.api.kill(self.pod())
        return "node-1"

    def assert_nothing_is_left(self, run_dir: Path) -> None:
        """A pod of a lost machine stays listed, and its processes are those of a machine that nobody reaches."""
        left = [pod for pod in self.api.all("pods") if pod["spec"].get("nodeName") not in self.api.lost]
        assert not left
        assert not self.api.all("secrets")
        if not self.api.lost:
            super().assert_nothing_is_left(run_dir)


# A run's processes, wherever its ranks were launched


def nodes_of(run_dir: Path) -> list[psutil.Process]:
    """The node programs of a run, those that stand by too."""
    return [process for process in _processes_of(run_dir, of="attempts") if process.name() != "srun"]


def ranks_of(run_dir: Path) -> list[psutil.Process]:
    """The ranks of a run, in their order."""
    ranks: dict[str, psutil.Process] = {}
    for node in nodes_of(run_dir):
        ranks |= _ranks_below(node)
    return [ranks[name] for name in sorted(ranks)]


def _ranks_below(node: psutil.Process) -> dict[str, psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        named = {process.name(): process for process in node.children(recursive=True)}
        return {name: process for name, process in named.items() if name.startswith("rank-")}
    return {}


def _processes_of(run_dir: Path, *, of: str = "") -> list[psutil.Process]:
    """Those with a path in this folder of the run in their command line; our own process is not one."""
    return [process for process in psutil.process_iter() if any(f"{run_dir / of}" in word for word in _words(process))]


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def resume_once_told(rank: psutil.Process) -> threading.Thread:
    """Let a rank that was stopped go on as soon as SIGTERM waits for it; the thread that does so."""

    def resume() -> None:
        until(lambda: _awaits(rank, signal.SIGTERM), "SIGTERM to the ranks")
        rank.resume()

    thread = threading.Thread(target=resume, daemon=True)
    thread.start()
    return thread


def _awaits(process: psutil.Process, number: signal.Signals) -> bool:
    """Whether a signal was sent to a process that is stopped."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return bool(int(status["ShdPnd"], 16) >> (number - 1) & 1)


@contextmanager
def memory_folder() -> Iterator[Path]:
    """For checkpoint.memory_dir: in the memory of this machine, which all hosts of a test share."""
    folder = Path(tempfile.mkdtemp(prefix="shardline-test-", dir="/dev/shm"))
    folder.chmod(0o777)  # as /dev/shm is for all users
    try:
        yield folder / "shardline"
    finally:
        shutil.rmtree(folder)

"""The launch and trainer sections of the config: where ranks run, and which program they run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from training.config.kubernetes import KubernetesConfig
from training.config.section import Section
from training.config.slurm import SlurmConfig

# Settings of NCCL and its transports only: with other names, such as LD_PRELOAD, a config could run code.
NcclName = Annotated[str, StringConstraints(pattern=r"^(NCCL|TORCH_NCCL|GLOO|UCX|FI)_[A-Z0-9_]+$")]
DevicePath = Annotated[str, StringConstraints(pattern=r"^/dev/[A-Za-z0-9][A-Za-z0-9._/-]*$")]
Cause = Literal[
    "lost host",
    "network",
    "daemon",
    "killed",
    "timeout",
    "gpu fault",
    "error",
    "out of memory",
    "bad loss",
    "bad config",
]


class HostConfig(Section):
    """A host with a Docker daemon. The defaults fit this machine."""

    name: str = Field("", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$|^$")
    """Short name of the host, different from all other hosts' names; empty means a name made from
    its Docker address.
    """
    docker: str = Field("unix:///var/run/docker.sock", pattern=r"^(unix:///.+|tcp://[^/]+:\d+|ssh://.+)$")
    """Address of the host's Docker daemon: unix:///PATH, tcp://HOST:2376 (with TLS), or ssh://USER@HOST."""
    tls: str = ""
    """Folder with this client's ca.pem, cert.pem and key.pem for a tcp:// daemon. none: such a daemon without TLS,
    which makes everybody who reaches its port root on the host. Empty for unix:// and ssh://.
    """
    address: str = "127.0.0.1"
    """IP address at which the other hosts reach this host's ranks."""
    interface: str = ""
    """Network interface that has this address, e.g. eth0; empty lets NCCL and gloo choose."""
    gpus: int = Field(0, ge=-1, le=1024)
    """Number of GPUs to use on this host; -1 means all of them, 0 means to train on the CPU."""
    gpu_ids: tuple[str, ...] = ()
    """Indices or UUIDs of the GPUs to use, instead of a number of them."""
    slots: int = Field(0, ge=0, le=1024)
    """Number of ranks on this host; 0 means one per GPU, or one if it has no GPU."""
    home: str = ""
    """Path at which this host mounts the storage of SHARDLINE_HOME; empty means the same path as here."""
    cpus: float = Field(0.0, ge=0)
    """Number of CPU cores that the container may use; 0 means all."""
    memory_gib: float = Field(0.0, ge=0)
    """Memory, in GiB, that the container may use; 0 means no limit."""


class LaunchConfig(Section):
    """The hosts that ranks run on, and the reaction to a host that fails."""

    launcher: Literal["local", "docker", "kubernetes", "slurm"] = "local"
    """Where ranks run. local: as processes on this machine. docker: in one container on each host. kubernetes: in the
    pods of launch.kubernetes. slurm: on the nodes of launch.slurm.
    """
    hosts: tuple[HostConfig, ...] = ()
    """The Docker hosts to run on, in the order of their ranks."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """The pods of a run on Kubernetes, and what they ask of the cluster."""
    slurm: SlurmConfig = SlurmConfig()
    """The nodes of a run under Slurm, and how programs start there."""
    hosts_file: str = ""
    """Path of a YAML file with a list of hosts, instead of `hosts`."""
    image: str = ""
    """Training image, by digest (NAME@sha256:…), ID or name. Every host must have the same image. With launcher=slurm
    it is Pyxis' (srun --container-image); empty then means no container.
    """
    user: str = Field("", pattern=r"^(\d+(:\d+)?)?$")
    """User that ranks run as, as uid:gid; empty means the user who launches, or 10001:10001 if that is root."""
    mounts: tuple[str, ...] = ()
    """Additional read-only mounts of each container, as SOURCE:TARGET."""
    port: int = Field(29_400, ge=1024, le=65_535)
    """TCP port on the first host at which ranks meet (the rendezvous)."""
    shm_gib: float = Field(0.0, ge=0)
    """Size of each container's /dev/shm in GiB. NCCL and data loaders share memory through it; 0 means 16 on hosts
    whose GPUs are used, 1 on others.
    """
    memlock: bool = True
    """Lift the limit on locked memory, which InfiniBand needs. Set it to false if the kernel refuses."""
    devices: Literal["auto"] | tuple[DevicePath, ...] = "auto"
    """Device files or folders of the host that each container gets. auto: /dev/infiniband if the host has it; a host
    that has InfiniBand adapters but no /dev/infiniband is refused. An empty list means none, so that NCCL uses TCP.
    """
    nccl: dict[NcclName, str] = Field({})
    """Additional environment variables for NCCL and its transports, e.g. {NCCL_IB_HCA: mlx5_0}."""
    min_hosts: int = Field(0, ge=0)
    """Minimum number of hosts with which training continues when others are lost; 0 means that all
    hosts are required.
    """
    wait_s: float = Field(600.0, ge=0)
    """Seconds to wait for required hosts that do not answer."""
    attempts: int = Field(5, ge=1, le=1000)
    """Maximum number of attempts in a row that save no new checkpoint."""
    lost_after_s: float = Field(20.0, ge=1)
    """Seconds without an answer from a host's Docker daemon, and without progress in training, after which the host
    counts as lost.
    """
    daemon_grace_s: float = Field(60.0, ge=1)
    """Seconds that a Docker daemon may be unreachable, while training still advances, before its host
    counts as lost.
    """
    lease_s: float = Field(60.0, ge=5)
    """Seconds without a renewal by the launcher after which containers stop by themselves."""
    standby_after_s: float | None = Field(60.0, ge=0)
    """Seconds of training after which each host starts a standby: a process that has already imported the training
    program, and replaces failed ranks without the time of that import. It needs about 0.5 GiB of memory. null means no
    standby. The kubernetes launcher has none.
    """
    collective_test: bool = True
    """Test the network before training: run an all-reduce between all hosts, and check its result and its speed."""

    @model_validator(mode="after")
    def check(self) -> LaunchConfig:
        if self.launcher in {"docker", "kubernetes"} and not self.image:
            raise ValueError(
                f"launch.launcher={self.launcher} needs launch.image: build one with `shardline image build`"
            )
        if self.launcher == "kubernetes" and not self.kubernetes.volume_claim:
            raise ValueError(
                "launch.launcher=kubernetes needs launch.kubernetes.volume_claim: the PersistentVolumeClaim that holds "
                "SHARDLINE_HOME for this machine and for the pods"
            )
        if self.launcher == "kubernetes" and self.min_hosts > self.kubernetes.nodes:
            raise ValueError(
                f"launch.min_hosts = {self.min_hosts} of launch.kubernetes.nodes = {self.kubernetes.nodes}: lower it"
            )
        if self.hosts and self.hosts_file:
            raise ValueError(
                f"launch.hosts and launch.hosts_file = {self.hosts_file} are both set: leave one of them out"
            )
        names = [host.name for host in self.hosts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"launch.hosts names {', '.join(twice)} more than once: each host needs a name of its own")
        if self.hosts and self.min_hosts > len(self.hosts):
            raise ValueError(f"launch.min_hosts = {self.min_hosts} of {len(self.hosts)} hosts: lower it")
        if self.launcher == "slurm" and self.min_hosts > self.slurm.nodes:
            nodes = self.slurm.nodes
            raise ValueError(f"launch.min_hosts = {self.min_hosts} of launch.slurm.nodes = {nodes}: lower it")
        if self.launcher == "slurm" and self.image and self.slurm.command_prefix:
            raise ValueError(
                f"launch.image = {self.image} and launch.slurm.command_prefix are two ways to run in a container: give "
                "one of them"
            )
        if self.user.split(":")[0] == "0":
            raise ValueError(
                "launch.user = 0 is root: ranks need none of its rights; give a uid that may write the run folder"
            )
        return self


class TrainerConfig(Section):
    """A training program of the user's, launched like Shardline's own; it logs into the same MLflow run."""

    module: str = ""
    """Python module of a training program to run instead of Shardline's own. The run then has no tokenization,
    evaluation or registration.
    """
    script: str = ""
    """Python file of a training program to run instead of Shardline's own. In containers, its path must lie in
    SHARDLINE_HOME, in one of launch.mounts or in the image.
    """
    args: tuple[str, ...] = ()
    """Command-line arguments of the program. {run_dir} in an argument is replaced by the path of the run's folder."""

    @property
    def given(self) -> bool:
        return bool(self.module or self.script)

    @model_validator(mode="after")
    def check(self) -> TrainerConfig:
        if self.module and self.script:
            raise ValueError(f"trainer.module = {self.module} and trainer.script = {self.script}: give one of them")
        if self.args and not self.given:
            raise ValueError("trainer.args are for a program: give trainer.module or trainer.script")
        return self

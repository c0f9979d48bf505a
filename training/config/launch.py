"""Where ranks run: in processes of this machine, or in a container on each of several Docker hosts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from training.config.section import Section

# Of NCCL and what it rides on; any other name, such as LD_PRELOAD, would be a way to run code.
NcclName = Annotated[str, StringConstraints(pattern=r"^(NCCL|TORCH_NCCL|GLOO|UCX|FI)_[A-Z0-9_]+$")]
Cause = Literal[
    "lost host", "network", "daemon", "killed", "timeout", "error", "out of memory", "bad loss", "bad config"
]


class HostConfig(Section):
    """A machine with a Docker daemon. What is empty has an obvious value on a host that is this machine."""

    name: str = Field(
        "", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$|^$", description="Short name, unlike the others'."
    )
    docker: str = Field(
        "unix:///var/run/docker.sock",
        pattern=r"^(unix:///.+|tcp://[^/]+:\d+|ssh://.+)$",
        description="The daemon: unix:///PATH, tcp://HOST:2376 with TLS, or ssh://USER@HOST.",
    )
    tls: str = Field("", description="tcp: folder with ca.pem, cert.pem and key.pem of this client; empty: no TLS.")
    address: str = Field("127.0.0.1", description="Address for ranks to meet at, reachable from the other hosts.")
    interface: str = Field(
        "", description="Network interface of that address, e.g. eth0; empty: NCCL's and gloo's choice."
    )
    gpus: int = Field(0, ge=-1, le=1024, description="GPUs to use; -1: all of them; 0: train on the CPU.")
    gpu_ids: tuple[str, ...] = Field((), description="These GPUs instead, by index or UUID.")
    slots: int = Field(0, ge=0, le=1024, description="Ranks on this host; 0: one per GPU, or one without.")
    home: str = Field("", description="SHARDLINE_HOME's storage as this host mounts it; empty: the same path as here.")
    cpus: float = Field(0.0, ge=0, description="Cores that the container may use; 0: all.")
    memory_gib: float = Field(0.0, ge=0, description="Memory that the container may use; 0: no limit.")


class LaunchConfig(Section):
    launcher: Literal["local", "docker"] = Field(
        "local", description="local: processes here. docker: one container per host."
    )
    hosts: tuple[HostConfig, ...] = Field((), description="Docker hosts; strongest first, or as they come.")
    hosts_file: str = Field("", description="YAML file with a list of hosts, instead of `hosts`.")
    image: str = Field("", description="Training image by digest (NAME@sha256:…), id or name; the same on every host.")
    user: str = Field(
        "", pattern=r"^(\d+(:\d+)?)?$", description="uid:gid of ranks; empty: yours, or 10001:10001 for root."
    )
    mounts: tuple[str, ...] = Field((), description="More read-only mounts, SOURCE:TARGET each.")
    port: int = Field(29_400, ge=1024, le=65_535, description="Port of the rendezvous on the first host.")
    shm_gib: float = Field(1.0, gt=0, description="Size of /dev/shm: NCCL and loaders share memory through it.")
    memlock: bool = Field(
        True, description="Lift the limit on locked memory (InfiniBand needs it); some kernels refuse."
    )
    pids: int = Field(4096, ge=64, description="Most processes and threads in a container.")
    nccl: dict[NcclName, str] = Field({}, description="More NCCL_* settings, e.g. {NCCL_IB_HCA: mlx5_0}.")
    min_hosts: int = Field(0, ge=0, description="Go on with as few hosts as this; 0: all of them are needed.")
    wait_s: float = Field(600.0, ge=0, description="How long to wait for hosts that are needed and do not answer.")
    attempts: int = Field(5, ge=1, le=1000, description="Starts in a row without a new checkpoint between them.")
    backoff_s: float = Field(1.0, ge=0, description="Wait before the second attempt; doubles, up to a minute.")
    retried: tuple[Cause, ...] = Field(
        ("lost host", "network", "daemon", "killed", "timeout"),
        description="Causes of an end that another attempt may mend.",
    )
    lost_after_s: float = Field(
        20.0, ge=1, description="A host whose daemon is silent for so long, with no step made meanwhile, is lost."
    )
    daemon_grace_s: float = Field(
        60.0, ge=1, description="How long a daemon may not answer while steps are still made, before its host is lost."
    )
    lease_s: float = Field(60.0, ge=5, description="Containers end by themselves when the launcher was silent so long.")
    collective_test: bool = Field(
        True, description="Before training, all-reduce between all hosts: right, and how fast."
    )

    @model_validator(mode="after")
    def check(self) -> LaunchConfig:
        if self.launcher == "docker" and not self.image:
            raise ValueError("launch.launcher=docker needs launch.image: build one with `shardline image build`")
        if self.hosts and self.hosts_file:
            raise ValueError(
                f"launch.hosts and launch.hosts_file = {self.hosts_file} are both set: leave one of them out"
            )
        names = [host.name for host in self.hosts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"launch.hosts names {', '.join(twice)} more than once: each host needs a name of its own")
        if self.hosts and self.min_hosts > len(self.hosts):
            raise ValueError(f"launch.min_hosts = {self.min_hosts} of {len(self.hosts)} hosts: lower it")
        if self.user.split(":")[0] == "0":
            raise ValueError(
                "launch.user = 0 is root: ranks need none of its rights; give a uid that may write the run folder"
            )
        return self


class TrainerConfig(Section):
    """A training program of the user's, launched as ours would be; it logs into the same MLflow run."""

    module: str = Field(
        "",
        description="Python module to run instead of training.train; no tokens, evaluation and registry then.",
    )
    script: str = Field(
        "",
        description="Python file to run instead, by its path in the container: below SHARDLINE_HOME, in a mount, or in "
        "the image.",
    )
    args: tuple[str, ...] = Field((), description="Its arguments; {run_dir} in them is the run's folder.")

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

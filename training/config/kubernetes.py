"""The launch.kubernetes section of the config: the pods that ranks run in, and what they ask of the cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from training.config.section import Section

DnsName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
OptionalDnsName = Annotated[str, StringConstraints(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$")]
Key = Annotated[str, StringConstraints(pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?(m|k|[KMGTPE]i?)?$")]
RDMA = ("rdma", "hca", "infiniband")  # in the names of resources that device plugins of InfiniBand adapters offer


class KubernetesConfig(Section):
    """The pods that ranks run in: one for each node of the run, all alike."""

    kubeconfig: str = ""
    """Path of the kubeconfig file; empty means KUBECONFIG, ~/.kube/config, or inside a pod its service account."""
    context: str = ""
    """Context of the kubeconfig file; empty means its current context."""
    namespace: OptionalDnsName = ""
    """Namespace of the pods; empty means the context's, or inside a pod its own."""
    nodes: int = Field(1, ge=1, le=9999)
    """Number of nodes of the run, each with one pod."""
    exclusive: bool = True
    """Place each pod of an attempt on a machine of its own. Set it to false to let them share one."""
    gpus_per_node: int = Field(0, ge=0, le=1024)
    """Number of GPUs of each pod; 0 means to train on the CPU."""
    gpu_resource: Key = "nvidia.com/gpu"
    """Name of the resource that stands for a GPU."""
    slots: int = Field(0, ge=0, le=1024)
    """Number of ranks on each node; 0 means one per GPU, or one without GPUs."""
    cpus: float = Field(0.0, ge=0)
    """Number of CPU cores that each pod asks for and may use; 0 means no request and no limit."""
    memory_gib: float = Field(0.0, ge=0)
    """Memory, in GiB, that each pod asks for and may use, /dev/shm included; 0 means no request and no limit."""
    resources: dict[Key, Quantity] = Field({})
    """Additional resources of each pod, e.g. {rdma/hca_shared_devices_a: 1} for InfiniBand."""
    volume_claim: OptionalDnsName = ""
    """PersistentVolumeClaim (ReadWriteMany) with SHARDLINE_HOME; pods mount it at the path that SHARDLINE_HOME has
    here.
    """
    volume_path: str = Field("", pattern=r"^([^/].*)?$")
    """Folder within the volume that is SHARDLINE_HOME, relative to its root; empty means the root."""
    node_selector: dict[Key, LabelValue] = Field({})
    """Labels that the pods' machines must have."""
    tolerations: tuple[dict[str, str], ...] = ()
    """Taints of machines that the pods may be placed on, as in a pod's own tolerations: {key: nvidia.com/gpu, operator:
    Exists, effect: NoSchedule}.
    """
    queue: OptionalDnsName = ""
    """Kueue's local queue, in which each attempt waits for its quota; empty means no queue."""
    priority_class: OptionalDnsName = ""
    """PriorityClass of the pods; empty means the default one."""
    image_pull_secrets: tuple[DnsName, ...] = ()
    """Names of Secrets in the namespace with which the image is pulled."""
    service_account: OptionalDnsName = ""
    """Service account of the pods, which get no token of it; empty means the namespace's default."""
    labels: dict[Key, LabelValue] = Field({})
    """Additional labels of the objects and pods."""
    annotations: dict[Key, str] = Field({})
    """Additional annotations of the objects and pods."""

    @property
    def has_rdma(self) -> bool:
        """Whether the pods ask for InfiniBand adapters, as far as the names of their resources tell."""
        return any(word in name for name in self.resources for word in RDMA)

    @model_validator(mode="after")
    def check(self) -> KubernetesConfig:
        if 0 < self.gpus_per_node < self.slots:
            raise ValueError(
                f"launch.kubernetes.slots = {self.slots} on {self.gpus_per_node} GPUs: each rank needs a GPU of its "
                "own; set slots=0"
            )
        if self.gpu_resource in self.resources:
            raise ValueError(
                f"launch.kubernetes.resources has {self.gpu_resource} too: set launch.kubernetes.gpus_per_node instead"
            )
        return self

"""Prepares ranks in containers: NCCL settings, ownership of the run's files, access to MLflow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from tasks.hardware.hosts import rank_user, read_hosts
from tasks.planning.custom_program import is_loopback
from tasks.store.shards import BLOCKS
from tasks.workspace.paths import home, tracking_uri
from training.config.credentials import without_url_credentials
from training.config.launch import LaunchConfig
from training.tracking.redaction import SECRETS

# NCCL's settings, all in one place; launch.nccl adds to them and overrides them. The interface comes from each host's
# `interface` (NCCL_SOCKET_IFNAME), the timeout of collectives from parallel.timeout_s.
NCCL = {
    "NCCL_DEBUG": "WARN",  # prints why a connection failed; INFO also prints the chosen rings and links
    "NCCL_IB_TIMEOUT": "22",  # 17 s per try, so that an InfiniBand switch may reroute (NCCL's default: 20, 4 s)
}

# OpenMP threads that wait by spinning lose their core to other processes: with one other busy process on
# 2 cores, 2 threads trained at 217 tokens/s; at 1000 spins 8,266, and as fast as before (20,900) when alone.
SPINS = {"GOMP_SPINCOUNT": "1000"}

# Variables that a rank needs, beside the secrets, if token shards or MLflow's artifacts are on S3.
OBJECT_STORE = (
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "MLFLOW_S3_ENDPOINT_URL",
    "MLFLOW_S3_IGNORE_TLS",
)


def rank_defaults(of_torch: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of all ranks that a user's own replace. `of_torch`: those that torch reads (plan.py)."""
    return {**NCCL, **SPINS, **of_torch, "TOKENIZERS_PARALLELISM": "false"}


def node_environment(ranks: Mapping[str, str], launch: LaunchConfig, *, threads: int, host: str) -> dict[str, str]:
    """Return the variables of a node's task. `ranks`: those of a program's ranks on all hosts."""
    return {**ranks, **launch.nccl, "OMP_NUM_THREADS": str(threads), "SHARDLINE_HOST": host}


def give_to_ranks(run_dir: Path, launch: LaunchConfig) -> None:
    """Give the run's files to the user that ranks run as, if this process is root; else ranks run as its user."""
    if os.getuid() != 0:
        return
    uid, _, gid = rank_user(launch).partition(":")
    for path in (run_dir, *run_dir.rglob("*")):
        try:
            if not path.is_symlink() and path.stat().st_uid != int(uid):
                os.chown(path, int(uid), int(gid or uid))
        except FileNotFoundError:  # ranks of an earlier attempt remove their files meanwhile
            continue
        except PermissionError:
            raise ValueError(
                f"{path} cannot be given to uid {uid}, whose ranks must write it: over NFS root has no special "
                "rights (root_squash); start Shardline as the user who owns the shared folder"
            ) from None


def compile_cache(launch: LaunchConfig) -> Path:
    """Return the folder for compiled code in SHARDLINE_HOME, which ranks may write; make it if it is missing."""
    folder = home() / "compiled"
    folder.mkdir(exist_ok=True)
    if os.getuid() == 0:
        uid, _, gid = rank_user(launch).partition(":")
        os.chown(folder, int(uid), int(gid or uid))
    return folder


def give_block_cache(launch: LaunchConfig) -> None:
    """Give the folder of blocks from an object store to the user that ranks run as, if this process is root."""
    folder = home() / "tokens" / BLOCKS
    if os.getuid() != 0 or not folder.parent.exists():
        return
    folder.mkdir(exist_ok=True)
    uid, _, gid = rank_user(launch).partition(":")
    for path in (folder, *folder.iterdir()):
        os.chown(path, int(uid), int(gid or uid))


def ranks_reach_mlflow(launch: LaunchConfig) -> bool:
    """Whether MLflow is a server that all hosts reach: no file of this machine, and not its loopback address."""
    uri = urlsplit(tracking_uri())
    far = launch.launcher in {"kubernetes", "slurm"}
    far = far or any(not host.docker.startswith("unix:") for host in read_hosts(launch))
    return uri.scheme in {"http", "https"} and not (far and is_loopback(uri.hostname or ""))


def tracking_for_ranks(launch: LaunchConfig, *, mlflow_run_id: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return variables and secrets by which a rank reaches the run in MLflow; secrets are sent over standard input. If
    ranks cannot reach MLflow, the launcher sends the metrics.
    """
    uri = tracking_uri()
    secrets = {name: os.environ[name] for name in SECRETS if name in os.environ}
    environment = {name: os.environ[name] for name in OBJECT_STORE if name in os.environ}
    if not ranks_reach_mlflow(launch):
        return environment | {"MLFLOW_TRACKING_URI": ""}, secrets
    environment |= {"MLFLOW_RUN_ID": mlflow_run_id}
    if without_url_credentials(uri) != uri:
        return environment, secrets | {"MLFLOW_TRACKING_URI": uri}
    return environment | {"MLFLOW_TRACKING_URI": uri}, secrets

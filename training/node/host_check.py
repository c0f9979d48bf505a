"""Checks a host from inside a short-lived container before a run starts there.

    python -m training.node.host_check '{"host": "gpu1", "folder": "/runs/ID", "token": "…", …}'      see `Asked`

The last line of stdout is one JSON object: `findings`, the problems with their cures, and the facts of the host.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from training.node.compiler import why_no_compile
from training.node.host_memory import HOST_MEMORY, make_run_folder, remove_abandoned
from training.node.infiniband import ADAPTERS, active_adapters
from training.node.infiniband import findings as infiniband_findings

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
CPUINFO = Path("/proc/cpuinfo")
BUSY_WINDOW_S = 0.2
OBJECTIVES = ("causal", "masked")
COUNT_S = 180.0  # importing torch from a cold network disk takes a minute
MADE_BY_RANKS = ("checkpoints", "metrics.jsonl", "stacks", "profile", "export")


@dataclass(frozen=True)
class Asked:
    """`home`: the shared folder's path on the host.

    `folder`: the run folder's path, the same inside and for the launcher. `memory_dir`: checkpoint.memory_dir, of which
    only the last name is used here, because its parent is mounted at HOST_MEMORY; empty: no copies are made in memory.
    """

    host: str
    home: str
    folder: str
    token: str
    address: str
    interface: str
    port: int
    shm_gib: float
    disk_gib: float
    gpus: bool = False
    infiniband: bool = True  # whether its adapters shall be used
    adapters: str = ADAPTERS
    memory_dir: str = ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Python's arguments for the check."""
        return "-m", "training.node.host_check", json.dumps(asdict(self))


def main(asked: Asked) -> None:
    folder = Path(asked.folder)
    storage, is_shared, wrote = check_storage(asked, folder)
    adapters, gpus = active_adapters(asked.adapters), visible_gpus()
    report = {
        "findings": [
            *storage,
            *check_network(asked),
            *check_room(asked, folder, is_shared=is_shared),
            *(infiniband_findings(adapters) if asked.gpus and asked.infiniband else []),
            *(prepare_host_memory(asked) if asked.memory_dir else []),
            *(count_models(asked, folder) if wrote else []),
        ],
        "wrote": wrote,
        "hostname": socket.gethostname(),
        "cores": min(len(os.sched_getaffinity(0)), int(os.environ.get("SLURM_CPUS_ON_NODE", 1 << 16))),
        "memory_gib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB,
        "disk_free_gib": shutil.disk_usage(folder).free / GIB if is_shared else 0.0,
        "shared_memory_gib": shutil.disk_usage(SHARED_MEMORY).total / GIB,
        "gpus": gpus,
        "compile_lacks": why_no_compile("cuda" if gpus else "cpu"),
        "infiniband": adapters,
        "cpu_model": cpu_model(),
        "busy_percent": psutil.cpu_percent(interval=BUSY_WINDOW_S),  # the host's, also in a container
        "driver": driver(),
        "nsys": shutil.which("nsys") is not None,
        "sources": sources_sha256(Path(__file__).parents[1]),
    }
    print(json.dumps(report))


# Storage


def own_name(token: str) -> str:
    """Return the name of the file that the launcher writes to the run folder, for hosts to check."""
    return f".preflight-{token}"


def answer_name(token: str, host: str) -> str:
    """Return the name of the file that `host` writes beside it, for the launcher to check."""
    return f"{own_name(token)}-{host}"


def check_storage(asked: Asked, folder: Path) -> tuple[list[str], bool, bool]:
    """Return findings, whether the launcher's file is visible, and whether the answer was written."""
    cure = "mount the launcher's shared folder there, or set the host's `home` to where it is mounted"
    try:
        is_there, is_shared = folder.is_dir(), (folder / own_name(asked.token)).exists()
    except OSError as error:
        return [f"uid {os.getuid()} cannot enter {asked.home} ({error.strerror}): {_owner_cure(asked)}"], False, False
    if not is_there:
        return [f"{asked.home} is not the launcher's storage, because it has no {folder.name}/: {cure}"], False, False
    findings = []
    if not is_shared:
        findings.append(
            f"{asked.home} is not the launcher's storage, because its {folder.name}/ lacks the file that the "
            f"launcher has just written: {cure}"
        )
    wrote = False
    answer = folder / answer_name(asked.token, asked.host)
    try:
        with answer.open("x") as file:
            file.write(asked.host)
            file.flush()
            os.fsync(file.fileno())
        wrote = is_shared
        if not is_shared:
            answer.unlink()
    except OSError as error:
        findings.append(_unwritable(folder, asked, why=error.strerror or str(error)))
    made = [folder / name for name in MADE_BY_RANKS if (folder / name).exists()]
    findings += [_unwritable(path, asked) for path in made if not os.access(path, os.W_OK)]
    return findings, is_shared, wrote


def _unwritable(path: Path, asked: Asked, *, why: str = "Permission denied") -> str:
    status = path.stat()
    return (
        f"uid {os.getuid()} cannot write {path} ({why}; it belongs to {status.st_uid}:{status.st_gid}, mode "
        f"{status.st_mode & 0o7777:04o}): {_owner_cure(asked)}"
    )


def _owner_cure(asked: Asked) -> str:
    return f"`chown -R {os.getuid()}:{os.getgid()} {asked.home}` there, or set launch.user to the folder's owner"


# Counting a model's parameters, for a launcher without torch


def request_name(objective: str) -> str:
    """Return the name of the config.json that the launcher leaves in the run folder, to be counted by a host."""
    return f".count-{objective}.json"


def counted_name(objective: str) -> str:
    """Return the name of the file with the count: a ModelShape."""
    return f".counted-{objective}.json"


def counting_s(folder: Path) -> float:
    """Return how much longer checks may take because a model in the run folder is to be counted."""
    return COUNT_S if any((folder / request_name(objective)).exists() for objective in OBJECTIVES) else 0.0


def count_models(asked: Asked, folder: Path) -> list[str]:
    """Count the parameters of the model whose config.json lies in the run folder, with this host's transformers."""
    findings = []
    for objective in OBJECTIVES:
        answer = folder / counted_name(objective)
        if answer.exists() or not (request := folder / request_name(objective)).exists():
            continue
        try:
            counted = count(request, objective, node=asked.host)
        except ValueError as error:
            findings.append(str(error))
            continue
        part = answer.with_name(f"{answer.name}.{asked.host}")
        part.write_text(counted)
        part.replace(answer)
    return findings


def count(config_json: Path, objective: str, *, node: str = "") -> str:
    """Count a model's parameters in a process with torch; return its ModelShape as JSON. `node`: this host's name, for
    a launcher elsewhere. Raises ValueError with the cause.
    """
    program = [sys.executable, "-m", "training.models.sizes", str(config_json.resolve()), objective, node]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=COUNT_S)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"model.path's parameters were not counted within {COUNT_S:g} s {f'on {node}' if node else 'here'}: start "
            "the run again, which finds torch's files in the disk cache; if it is slow again, put the virtual "
            "environment or image on a local disk"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(last if done.returncode == 2 else f"the parameters of model.path cannot be counted: {last}")
    return done.stdout.splitlines()[-1]


# Network


def check_network(asked: Asked) -> list[str]:
    """Check that the address is this host's, on that interface, and that the rendezvous port is free."""
    addresses = local_addresses()
    listed = ", ".join(f"{name} {address}" for name, address in addresses) or "none"
    findings = []
    if asked.address not in {address for _, address in addresses}:
        findings.append(f"address {asked.address} is not this host's. Its addresses: {listed}: set `address`")
    names = {name for _, name in socket.if_nameindex()}
    for interface in filter(None, asked.interface.split(",")):
        if interface not in names:
            findings.append(f"there is no interface {interface}. Its addresses: {listed}: set `interface`")
        elif not any(address == asked.address for name, address in addresses if name.split(":")[0] == interface):
            findings.append(
                f"interface {interface} does not have the address {asked.address}. Its addresses: {listed}: "
                "set `interface` or `address`, so that they belong together"
            )
    return findings + check_port(asked.port, family=socket.AF_INET6 if ":" in asked.address else socket.AF_INET)


def check_port(port: int, *, family: socket.AddressFamily) -> list[str]:
    """Check the port on all addresses, as torch's store does; a port that lingers from an earlier attempt is free."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return [
                f"port {port} is not available ({error.strerror}): a program listens there (`ss -ltnp` shows it): "
                "stop it, or set launch.port"
            ]
    return []


def local_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) of all IPv4 and IPv6 addresses."""
    return [
        (name, each.address.partition("%")[0])  # fe80::1%eth0
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in {socket.AF_INET, socket.AF_INET6}
    ]


# Devices and free space


def visible_gpus() -> list[str]:
    """Return the GPUs that nvidia-smi lists, with UUIDs, if the image has it; otherwise the device files."""
    if program := shutil.which("nvidia-smi"):
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30)
        return [line.strip() for line in done.stdout.splitlines() if line.startswith("GPU ")]
    return sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))


def driver() -> str:
    """Return the version of NVIDIA's kernel module; empty if there is none."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", path.read_text()) if path.exists() else None
    return found[1] if found else ""


def check_room(asked: Asked, folder: Path, *, is_shared: bool) -> list[str]:
    findings, memory_gib = [], psutil.virtual_memory().available / GIB
    if is_shared and (free_gib := shutil.disk_usage(folder).free / GIB) < asked.disk_gib:
        findings.append(f"{asked.home} has {free_gib:.2f} GiB free, {asked.disk_gib:g} are needed: free some space")
    if asked.shm_gib > memory_gib:
        findings.append(
            f"{asked.shm_gib:g} GiB of /dev/shm are wanted, but {memory_gib:.1f} GiB of memory are free: set "
            "launch.shm_gib to less"
        )
    if (shm_gib := shutil.disk_usage(SHARED_MEMORY).free / GIB) < 0.9 * asked.shm_gib:
        findings.append(
            f"/dev/shm has {shm_gib:.2f} GiB free, {asked.shm_gib:g} are wanted: set launch.shm_gib to less"
        )
    return findings


def prepare_host_memory(asked: Asked, *, mounted_at: Path = Path(HOST_MEMORY)) -> list[str]:
    """Make the run's folder for copies in the host's memory, which the ranks' container mounts; remove old folders."""
    memory_dir, run_id = mounted_at / Path(asked.memory_dir).name, Path(asked.folder).name
    remove_abandoned(memory_dir, but=run_id)
    try:
        make_run_folder(memory_dir, run_id)
    except OSError as error:
        return [
            f"uid {os.getuid()} cannot make {asked.memory_dir}/{run_id} ({error}): name a folder in a file system in "
            "memory that it may write in checkpoint.memory_dir, or set checkpoint.memory_every_steps=0"
        ]
    return []


def cpu_model() -> str:
    """Return the processor's name; its architecture's on machines that do not tell it."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def sources_sha256(folder: Path) -> str:
    """Return a hash of all files of the training package: an image of other sources would run other code than the
    launcher planned for."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main(Asked(**json.loads(sys.argv[1])))

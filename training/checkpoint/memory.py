"""Checkpoints in the memory of the run's hosts: finds them, completes them on every host, and removes them.

Each rank keeps its files of a checkpoint on its own host and on the next host in the ring (memory_saver.py), so that
the files of all ranks survive when one host is lost. They lie on tmpfs:

    checkpoint.memory_dir/RUN/HOST/00000480-3f2a9c01/
        model-00001-of-00004.safetensors …      the same files as on disk (load.py), of this host's ranks and of those
                                                of the host before it
        rank-0.json …                           size and sha256 of a rank's files; written last
    checkpoint.memory_dir/RUN/HOST/00000480-3f2a9c01.whole/
        …, manifest.json                        made when an attempt begins: the files of all ranks, fetched from the
                                                hosts that have them, and an ordinary checkpoint to whoever loads it
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint.writer import free_space, write_index
from training.node.host_memory import USED, check_own, hold, make_run_folder, remove_abandoned
from training.records.checkpoint import CHECKPOINT_MANIFEST
from training.records.memory_checkpoint import MEMORY_RECORD, MemoryRecord, RankShare, memory_record
from training.records.plan import RunPlan
from training.records.record import DamagedRecord, sha256_config, sha256_file
from training.runtime.mesh import timeout
from training.runtime.process import Rank

logger = logging.getLogger(__name__)

T = TypeVar("T")
CHUNK_BYTES = 2**26  # bytes sent at a time; a host that has the file already receives it too, and drops it
WHOLE = ".whole"


class HostMemory:
    """This rank's view of the copies in the hosts' memory. All methods with "Collective" are called on all ranks."""

    def __init__(self, plan: RunPlan, *, rank: Rank, run_dir: Path) -> None:
        """Collective. Raises ValueError if checkpoint.memory_dir cannot be used."""
        self.plan, self.rank, self.record_path = plan, rank, run_dir / MEMORY_RECORD
        # Separate connections: otherwise training's small messages would wait for large files.
        self.group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout(plan))
        self.host = os.environ.get("SHARDLINE_HOST") or socket.gethostname()
        self.hosts: dict[str, list[int]] = defaultdict(list)  # the ranks of each host, in the order of ranks
        for number, host in enumerate(self.gather(self.host)):
            self.hosts[host].append(number)
        self.leaders = {host: ranks[0] for host, ranks in self.hosts.items()}
        self.leader_group = dist.new_group(list(self.leaders.values()), backend="gloo", timeout=timeout(plan))
        memory_dir = Path(plan.config.checkpoint.memory_dir)
        self.is_leader = self.leaders[self.host] == rank.rank
        if self.is_leader and (removed := remove_abandoned(memory_dir, but=plan.run_id)):
            logger.info("%s: removed the copies of %s, which no run used any more", memory_dir, ", ".join(removed))
        try:
            self.run_folder = make_run_folder(memory_dir, plan.run_id)
            self.folder = self.run_folder / self.host
            self.folder.mkdir(mode=0o700, exist_ok=True)
            hold(self.run_folder)
        except OSError as error:
            raise ValueError(
                f"checkpoint.memory_dir = {memory_dir} cannot be used on {self.host} ({error}): name a folder in "
                f"memory (tmpfs) that uid {os.getuid()} may write, or set checkpoint.memory_every_steps=0"
            ) from None

    def gather(self, value: T) -> list[T]:
        """Return all ranks' values, in the order of ranks. Collective."""
        values: list[Any] = [None] * self.rank.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def newest(self) -> MemoryRecord | None:
        """Return the checkpoint that the run's record names, even if files of it are lost. Collective."""
        found: list[Any] = [None]
        if self.rank.rank == 0:
            found = [memory_record(self.record_path.parent)]
        dist.broadcast_object_list(found, src=0, group=self.group)
        record: MemoryRecord | None = found[0]
        return record

    def whole_folder(self, record: MemoryRecord) -> Path:
        return self.folder / f"{record.name}{WHOLE}"

    def make_whole(self, record: MemoryRecord) -> str | None:
        """Copy the files of all ranks to every host; return None, or the reason why that failed, the same on all ranks.
        Collective. Every rank needs all files, because a checkpoint has whole tensors, and each rank loads its part of
        them.
        """
        shares: dict[int, RankShare] = {}
        holders: dict[int, set[str]] = defaultdict(set)
        for number, verified in enumerate(self.gather(self._verified(record))):
            for owner, share in verified.items():
                shares[owner] = share
                holders[owner].add(next(host for host, ranks in self.hosts.items() if number in ranks))
        if fault := self._fault(shares):
            return fault
        fault = self._link(record, shares, holders) if self.is_leader else None
        if fault := next(filter(None, self.gather(fault)), None):
            return fault
        if self.is_leader:
            self._fetch(record, shares, holders)
            self._complete(record, shares)
        dist.barrier(group=self.group)
        return None

    def _verified(self, record: MemoryRecord) -> dict[int, RankShare]:
        """Return the intact shares on this host, by rank; each of its ranks hashes a part of them."""
        folder, ranks, intact = self.folder / record.name, self.hosts[self.host], dict[int, RankShare]()
        for path in sorted(folder.glob("rank-*.json"))[ranks.index(self.rank.rank) :: len(ranks)]:
            try:
                share = _intact_share(path, record)
                intact[share.rank] = share
            except (OSError, DamagedRecord) as error:
                logger.warning("%s: a copy is not used: %s", self.host, error)
        return intact

    def _fault(self, shares: Mapping[int, RankShare]) -> str | None:
        """Return why this run cannot load a checkpoint from these shares."""
        if not shares:
            return f"nothing of it is left on {', '.join(self.hosts)}"
        checkpoint = next(iter(shares.values())).checkpoint
        if missing := sorted(set(range(checkpoint.world_size)) - set(shares)):
            return f"the files of ranks {', '.join(map(str, missing))} are on none of {', '.join(self.hosts)}"
        if checkpoint.config_sha256 != sha256_config(self.plan.config):
            return "the run's config has changed since"
        return None

    def _link(
        self, record: MemoryRecord, shares: Mapping[int, RankShare], holders: Mapping[int, set[str]]
    ) -> str | None:
        """Link the files that this host has into the complete checkpoint's folder, and make room for the others."""
        folder = self.whole_folder(record)
        shutil.rmtree(folder, ignore_errors=True)  # from an attempt that was killed
        folder.mkdir(mode=0o700)
        try:
            for owner, share in shares.items():
                for name, file in share.files.items():
                    if self.host in holders[owner]:
                        (folder / name).hardlink_to(self.folder / record.name / name)
                    else:
                        make_room(folder / name, file.written.size_bytes)
        except OSError as error:
            shutil.rmtree(folder)
            return f"{self.host} cannot hold all of it ({error}; {free_space(folder.parent)})"
        return None

    def _fetch(self, record: MemoryRecord, shares: Mapping[int, RankShare], holders: Mapping[int, set[str]]) -> None:
        """Send each missing file from the first host that has it. Collective among the hosts' leaders."""
        for owner, share in sorted(shares.items()):
            if len(holders[owner]) == len(self.hosts):
                continue
            source = next(leader for host, leader in self.leaders.items() if host in holders[owner])
            for name, file in sorted(share.files.items()):
                content = mapped(self.whole_folder(record) / name, file.written.size_bytes)
                for part in content.split(CHUNK_BYTES):
                    drops = self.host in holders[owner] and self.rank.rank != source
                    dist.broadcast(torch.empty_like(part) if drops else part, src=source, group=self.leader_group)

    def _complete(self, record: MemoryRecord, shares: Mapping[int, RankShare]) -> None:
        """Add the index files and the manifest."""
        folder, rank_files = self.whole_folder(record), [share.files for _, share in sorted(shares.items())]
        for kind in ("model", "optimizer"):
            write_index(folder, kind, rank_files)
        files = {name: file.written for of_rank in rank_files for name, file in of_rank.items()}
        manifest = shares[0].checkpoint.model_copy(update={"files": files})
        manifest.write(folder / CHECKPOINT_MANIFEST)

    def keep_only(self, *names: str) -> None:
        """Remove all other folders of this run from the host's memory. One rank per host is enough."""
        for folder in self.folder.iterdir():
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)

    def forget(self, record: MemoryRecord | None) -> None:
        """Keep only the copy of `record`, from which training continues; None: remove all. Collective."""
        dist.barrier(group=self.group)  # until all ranks have loaded the complete checkpoint
        if self.rank.rank == 0 and record is None:
            self.record_path.unlink(missing_ok=True)
        if self.is_leader:
            self.keep_only(*([record.name] if record else []))

    def remove(self) -> None:
        """Remove all copies, because the run has ended. Collective."""
        self.forget(None)
        if self.is_leader:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):  # in a container the run's folder is a mount, so it stays, empty
                (self.run_folder / USED).unlink(missing_ok=True)
                self.run_folder.rmdir()


def _intact_share(path: Path, record: MemoryRecord) -> RankShare:
    """Return a rank's share with intact files. Raises OSError or DamagedRecord; another user's are never read."""
    for parent in (path.parent.parent.parent, path.parent.parent, path.parent, path):
        check_own(parent)
    share = RankShare.read(path)
    if share.checkpoint.step != record.step:
        raise DamagedRecord(path, f"is of step {share.checkpoint.step}, and the run's record names step {record.step}")
    for own, written in ((path.with_name(name), file.written) for name, file in share.files.items()):
        check_own(own)
        if own.stat().st_size != written.size_bytes or sha256_file(own) != written.sha256:
            raise DamagedRecord(own, f"is damaged: {path.name} names another size or sha256")
    return share


def make_room(path: Path, size: int) -> None:
    """Make a file of that size.

    Raises OSError if memory is short; a write into a mapping would end the process instead.
    """
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def mapped(path: Path, size: int) -> Tensor:
    """Return a file's bytes as a tensor; writing to the tensor writes to the file."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

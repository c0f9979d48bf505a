"""Saves to the memory of hosts while training continues: each rank's files on its own host and on the next one.

The loop waits only for the copy out of device memory. A thread then writes the rank's files to tmpfs and exchanges them
with its neighbours, over separate connections, while the next step is computed. Before that step counts, the loop waits
until all ranks' threads have agreed and the run's record names the copy, so that a failure loses at most
checkpoint.memory_every_steps steps. The previous copy is removed when the next is complete: at any time there is one
complete copy, and at most two.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from functools import partial
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch import Tensor

from training.checkpoint.memory import HostMemory, make_room, mapped
from training.checkpoint.safetensors_files import Abandoned
from training.checkpoint.saver import unfilled_manifest
from training.checkpoint.staging import Staging
from training.checkpoint.writer import free_space, write_rank_file
from training.data.batch import MicroBatches
from training.node.host_memory import note_use
from training.records.checkpoint import CheckpointManifest
from training.records.memory_checkpoint import MemoryRecord, RankShare
from training.records.plan import RunPlan
from training.runtime.errors import NonFiniteLoss
from training.strategies import Strategy
from training.strategies.spikes import Spikes

logger = logging.getLogger(__name__)

END_S = 5.0  # longest wait for the thread of a rank that fails, because its peers may wait for it


class MemorySaver:
    """A run's copies in memory. All ranks call the same methods; leaving the context removes the copies.

    After an error they stay, for the next attempt. `loaded`: the copy that this attempt continues from.
    """

    def __init__(
        self,
        memory: HostMemory,
        *,
        plan: RunPlan,
        strategy: Strategy,
        micro_batches: MicroBatches,
        spikes: Spikes,
        loaded: MemoryRecord | None,
    ) -> None:
        self.memory, self.plan, self.strategy, self.rank = memory, plan, strategy, memory.rank
        self.manifest = partial(unfilled_manifest, plan, micro_batches=micro_batches, spikes=spikes)
        self.staging = Staging(plan, memory.rank)
        self.newest = loaded
        self.attempt = memory.gather(secrets.token_hex(4))[0]
        self.receivers = neighbours(memory.hosts)
        self.abandoned = threading.Event()
        self.thread: threading.Thread | None = None  # of the copy that is being made
        self.stalled_s = 0.0  # by that copy

    @property
    def is_copying(self) -> bool:
        return self.thread is not None

    def __enter__(self) -> MemorySaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, NonFiniteLoss):
            self.abandoned.set()
        if self.thread is not None:
            self.thread.join(END_S if error is not None else None)
        if error is None:
            self.memory.remove()

    def save(self, step: int, *, tokens: int, val_loss: float | None) -> None:
        """Begin a copy. `finish` comes before the next one."""
        began = time.perf_counter()
        assert self.thread is None
        manifest = self.manifest(step=step, tokens=tokens, val_loss=val_loss)
        files = self.staging.files(self.strategy)
        self.thread = threading.Thread(target=self._run, args=(manifest, files), name=f"memory-{step}", daemon=True)
        self.thread.start()
        self.stalled_s = time.perf_counter() - began

    def finish(self) -> float:
        """Wait until the copy is complete or has failed; return the seconds that training waited for it."""
        began = time.perf_counter()
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        return self.stalled_s + time.perf_counter() - began

    # In the thread

    def _run(self, manifest: CheckpointManifest, files: dict[str, dict[str, Tensor]]) -> None:
        record = MemoryRecord(step=manifest.step, name=f"{manifest.step:08d}-{self.attempt}")
        try:
            faults = self._copy(record, manifest, files)
        except RuntimeError as error:  # a rank is gone, so training fails too, and reports the cause
            faults = [f"the ranks lost each other ({error})"]
        if not faults:
            self.newest = record
        elif self.rank.rank == 0 and not self.abandoned.is_set():
            before = f"the one of step {self.newest.step} stays" if self.newest else "there is no earlier copy"
            logger.warning("no copy of step %d in the hosts' memory: %s; %s", record.step, "; ".join(faults), before)

    def _copy(
        self, record: MemoryRecord, manifest: CheckpointManifest, files: dict[str, dict[str, Tensor]]
    ) -> list[str]:
        """Make the copy. Returns the error, the same on all ranks; empty if there was none."""
        memory, me = self.memory, self.rank.rank
        folder, share, fault = memory.folder / record.name, None, None
        try:
            if memory.is_leader:
                memory.keep_only(record.name, *([self.newest.name] if self.newest else []))
                note_use(memory.run_folder)
            share = self._write(folder, manifest, files)
        except (OSError, Abandoned) as error:
            fault = self._in_words(error)
        shares = memory.gather(share)
        senders = [each for each in shares if each is not None and self.receivers.get(each.rank) == me]
        try:
            for sender in senders if None not in shares else ():
                for name, file in sender.files.items():
                    make_room(folder / name, file.written.size_bytes)
        except OSError as error:
            fault = self._in_words(error)
        if faults := [found for found in memory.gather(fault) if found]:
            return faults
        assert share is not None
        self._exchange(folder, share, senders)
        for whole in (share, *senders):
            whole.write(folder / f"rank-{whole.rank}.json")
            for name in (f"rank-{whole.rank}.json", *whole.files):
                (folder / name).chmod(0o600)  # or another umask would let a group write it
        dist.barrier(group=memory.group)  # all parts exist
        if me == 0:
            try:
                record.write(memory.record_path)
            except OSError as error:
                fault = f"its record could not be written ({error})"
        return [found for found in memory.gather(fault) if found]

    def _write(self, folder: Path, manifest: CheckpointManifest, files: dict[str, dict[str, Tensor]]) -> RankShare:
        """Write this rank's own files."""
        folder.mkdir(mode=0o700, exist_ok=True)
        written = {
            name: write_rank_file(folder / name, tensors, abandoned=self.abandoned) for name, tensors in files.items()
        }
        return RankShare(rank=self.rank.rank, checkpoint=manifest, files=written)

    def _exchange(self, folder: Path, share: RankShare, senders: list[RankShare]) -> None:
        """Send this rank's files to the next host, and receive those of the previous host, from memory to memory."""
        works, group = [], self.memory.group
        if (receiver := self.receivers.get(share.rank)) is not None:
            for number, (name, file) in enumerate(sorted(share.files.items())):
                content = mapped(folder / name, file.written.size_bytes)
                works.append(dist.isend(content, receiver, group=group, tag=number))
        for sender in senders:
            for number, (name, file) in enumerate(sorted(sender.files.items())):
                content = mapped(folder / name, file.written.size_bytes)
                works.append(dist.irecv(content, sender.rank, group=group, tag=number))
        for work in works:
            assert work is not None
            work.wait()

    def _in_words(self, error: Exception) -> str:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"{self.memory.host}, rank {self.rank.rank}: {why}; {free_space(self.memory.run_folder)}"


def neighbours(hosts: dict[str, list[int]]) -> dict[int, int]:
    """Return each rank's receiver, on the next host of the ring; a single host has none.

    >>> neighbours({"a": [0, 1], "b": [2]})
    {0: 2, 1: 2, 2: 0}
    """
    rings = list(hosts.values())
    if len(rings) == 1:
        return {}
    following = zip(rings, rings[1:] + rings[:1], strict=True)
    return {rank: after[place % len(after)] for ranks, after in following for place, rank in enumerate(ranks)}

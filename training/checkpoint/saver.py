"""Saves while training continues: each rank copies its share to host memory, and a thread writes it to disk.

The loop does not wait for the disk. While a checkpoint is being written, a small CPU all-reduce, started at one step
and read at the next, counts the ranks that have finished. Only one checkpoint is written at a time: if the next is due
earlier, training waits, so that memory does not grow.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from training.checkpoint.staging import Staging
from training.checkpoint.writer import NUM_TRIES, WriteFailure, Writer
from training.config.parallel import Stages
from training.data.batch import MicroBatches
from training.models.language_model import LanguageModel
from training.records.checkpoint import CheckpointManifest, checkpoint_folder
from training.records.model_state import check_state
from training.records.plan import RunPlan
from training.records.record import sha256_config
from training.runtime.errors import NonFiniteLoss
from training.runtime.process import Rank
from training.strategies import Strategy
from training.strategies.spikes import Spikes

logger = logging.getLogger(__name__)

ASK_EVERY_S = 0.05  # seconds between checks while ranks wait for each other


class Saver:
    """A run's checkpoints. All ranks call the same methods; leaving the context waits for the last checkpoint.

    Raises ValueError if a checkpoint would not have the model's whole state.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        plan: RunPlan,
        strategy: Strategy,
        model: LanguageModel,
        rank: Rank,
        micro_batches: MicroBatches,
        spikes: Spikes,
    ) -> None:
        self.run_dir, self.plan, self.strategy, self.rank = run_dir, plan, strategy, rank
        self.manifest = partial(unfilled_manifest, plan, micro_batches=micro_batches, spikes=spikes)
        self.hf_config: Any = model.hf.config
        self.staging = Staging(plan, rank)
        _check_whole(strategy, model, rank)
        self.writer: Writer | None = None  # writes the current checkpoint, or wrote the last one
        self.in_flight = False
        self._counts = torch.zeros(3, dtype=torch.int64)  # ranks that have written, first rank has published, failures
        self._sent: dist.Work | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait until the last checkpoint is published; after an error on this rank alone, abandon it."""
        try:
            if error is None or isinstance(error, NonFiniteLoss):  # all ranks get these errors at the same step
                self.finish()
        finally:
            if self.in_flight and self.writer is not None:
                self.writer.abandon()

    def save(self, step: int, *, tokens: int, val_loss: float | None, stages: Stages | None = None) -> float:
        """Begin the checkpoint of `step`; return the seconds that training waited.

        `stages`: the pipeline stages with which training continues, if they differ from the plan's. Raises RuntimeError
        if the previous checkpoint is still being written, and fails finally.
        """
        began = time.perf_counter()
        if self.writer is not None:
            self._wait_for(self.writer, step)
        manifest = self.manifest(step=step, tokens=tokens, val_loss=val_loss)
        if stages is not None:
            manifest = manifest.model_copy(update={"stages": stages})
        folder = checkpoint_folder(self.run_dir, step)
        self.writer = Writer(self.plan, manifest, folder=folder, rank=self.rank, hf_config=self.hf_config)
        self.writer.start(self.staging.files(self.strategy))
        self.in_flight = True
        return time.perf_counter() - began

    def _wait_for(self, writer: Writer, step: int) -> None:
        """Wait until the previous checkpoint is published, because only then its buffers are free."""
        began, waiting = time.perf_counter(), self.in_flight
        self.finish()
        if waiting and self.rank.rank == 0:
            logger.info(
                "step %d: waited %.1f s for the checkpoint of step %d: its disk is slower than "
                "checkpoint.every_steps = %d steps",
                step,
                time.perf_counter() - began,
                writer.manifest.step,
                self.plan.config.checkpoint.every_steps,
            )

    def advance(self) -> None:
        """Check the checkpoint that is being written; call this once per step. Takes no time while there is none.

        Failed tries are logged on all ranks. Raises RuntimeError, on all ranks, after NUM_TRIES.
        """
        self._receive()
        self._send()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is published. Raises as `advance`."""
        while self.in_flight:
            self._receive()
            if self.in_flight and self.writer is not None:
                self.writer.changed.wait(ASK_EVERY_S)
            self._send()
        if self.writer is not None:
            self.writer.thread.join()  # the first rank's thread may still delete old checkpoints

    def _send(self) -> None:
        if not self.in_flight or self.writer is None:
            return
        self.writer.changed.clear()
        self._counts[0] = self.writer.written.is_set()
        self._counts[1] = self.writer.published.is_set()
        self._counts[2] = self.writer.failures.qsize()
        self._sent = dist.all_reduce(self._counts, async_op=True)

    def _receive(self) -> None:
        if self._sent is None or self.writer is None:
            return
        self._sent.wait()
        self._sent = None
        written, published, failures = self._counts.tolist()
        if failures:
            self._report(self.writer)
        if written == self.rank.world_size and not self.writer.complete.is_set():
            self._gather_rank_files(self.writer)
        self.in_flight = not published

    def _gather_rank_files(self, writer: Writer) -> None:
        """Send the names and hashes of this rank's written files to the first rank: a few kB per checkpoint."""
        all_rank_files: list[Any] | None = [None] * self.rank.world_size if self.rank.rank == 0 else None
        dist.gather_object(writer.rank_files, all_rank_files, dst=0)
        writer.publish(all_rank_files or [])

    def _report(self, writer: Writer) -> None:
        own = [writer.failures.get() for _ in range(writer.failures.qsize())]
        gathered: list[list[WriteFailure]] = [[] for _ in range(self.rank.world_size)]
        dist.all_gather_object(gathered, own)
        step = writer.manifest.step
        for failure in itertools.chain.from_iterable(gathered):
            text = (
                f"checkpoint of step {step}: rank {failure.rank} could not write {failure.path} "
                f"({failure.error}), try {failure.attempt} of {NUM_TRIES}"
            )
            if failure.attempt == NUM_TRIES:
                raise RuntimeError(
                    f"{text}: free space or repair the disk, then start the run again: it continues from the "
                    "checkpoint before"
                )
            logger.warning("%s", text)


def _check_whole(strategy: Strategy, model: LanguageModel, rank: Rank) -> None:
    """Compare what all ranks together save with the model. Collective: a rank sends a byte for each of its tensors."""
    own = {name: tuple(parts.shape) for name, parts in strategy.weights()}
    others = {name: shape for name, shape in own.items() if model.state_shapes.get(name) != shape}
    held: list[tuple[bytes, dict[str, tuple[int, ...]]]] = [(b"", {})] * rank.world_size
    dist.all_gather_object(held, (bytes(name in own for name in model.state_shapes), others))
    saved: dict[str, Sequence[int]] = {}
    for mask, different in held:
        saved |= dict(itertools.compress(model.state_shapes.items(), mask))
        saved |= different
    cure = "this is a fault of Shardline: please report it with the model's config.json"
    check_state(saved, model.state_shapes, where="a checkpoint of these ranks", cure=cure)


def unfilled_manifest(
    plan: RunPlan, *, step: int, tokens: int, val_loss: float | None, micro_batches: MicroBatches, spikes: Spikes
) -> CheckpointManifest:
    """Return the manifest of a checkpoint whose files are not written yet."""
    return CheckpointManifest(
        step=step,
        tokens=tokens,
        strategy=plan.strategy,
        optimizer=plan.config.train.optimizer,
        mesh=plan.mesh,
        stages=plan.stages,
        sequence_parallel=plan.sequence_parallel,
        world_size=plan.world_size,
        config_sha256=sha256_config(plan.config),
        val_loss=val_loss,
        micro_batches=micro_batches.sizes,
        spikes=spikes.state(),
        files={},
    )

"""Measures the speed of a run: counts steps, sequences, tokens and bytes, and divides by their time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from training.records.plan import RunPlan
from training.shards.packing import BY_DOCUMENT

RATES = ("samples_per_s", "tokens_per_s", "step_ms", "matmul_share", "mfu")


@dataclass
class Throughput:
    """The tokens and samples that all ranks together trained in a number of seconds."""

    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Throughput) -> Throughput:
        return Throughput(
            self.steps + other.steps,
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
        )

    def rates(self, plan: RunPlan) -> dict[str, float]:
        """Return mfu, the model's FLOPs as a share of the datasheets' peak (PaLM, appendix B), and matmul_share, the
        same relative to the measured matmul rate. Each is left out if its divisor is unknown.
        """
        if not self.steps:
            return {}
        predicted, tokens_per_s = plan.predicted, self.tokens / self.seconds
        rates = {
            "samples_per_s": self.sequences / self.seconds,
            "tokens_per_s": tokens_per_s,
            "step_ms": 1000 * self.seconds / self.steps,
        }
        tflops_per_rank = tokens_per_s * predicted.flops_per_token / plan.world_size / 1e12
        peaks = {"matmul_share": predicted.peak_tflops, "mfu": predicted.datasheet_tflops}
        return rates | {name: tflops_per_rank / peak for name, peak in peaks.items() if peak}


class Rates:
    """Counts steps and tokens from a run's start, and computes rates since the last row.

    `step` and `tokens` count from the checkpoint that the run was resumed from; `rows` are those of earlier attempts.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        device: torch.device,
        start: int,
        tokens: int,
        rows: Sequence[Mapping[str, float]],
    ) -> None:
        self.plan, self.device, self.step, self.tokens = plan, device, start, tokens
        self.batches = plan.batches
        self.recent, self.since, self.is_paused = Throughput(), time.perf_counter(), False
        self.sent_bytes, self.last_row_step, self.last_row_tokens = 0, start, tokens
        self.first_row: tuple[int, float] | None = None  # step and time of the last row
        self.after_first_row, self.train_s = Throughput(), 0.0
        # An attempt that finds all steps finished computes no rates: the last logged ones stay.
        last: Mapping[str, float] = next((row for row in reversed(rows) if "tokens_per_s" in row), {})
        self.latest = {name: last[name] for name in RATES if name in last}

    def add(self, num_tokens: int, *, sent_bytes: int) -> None:
        """Count a step: `num_tokens` over all ranks, `sent_bytes` by this rank."""
        self.step += 1
        self.tokens += num_tokens
        self.sent_bytes += sent_bytes
        if not self.is_paused:
            self.recent.steps += 1
            self.recent.sequences += self._sequences(self.step) - self._sequences(self.step - 1)
            self.recent.tokens += num_tokens

    def _sequences(self, steps: int) -> int:
        """Return the sequences of the first `steps` steps; max_epochs may end within the last batch."""
        return min(self.batches.sequences_before(steps), self.plan.sequences)

    def leave_out(self) -> None:
        """Count a step without a batch."""
        self.step += 1
        self.last_row_step += 1  # shares are of the other steps

    def row(self) -> dict[str, float]:
        """Return the rates of the steps since the last row, or the last row's if none of them counts."""
        now = time.perf_counter()
        self.recent.seconds, self.since = now - self.since, now
        self.latest = self.recent.rates(self.plan) or self.latest
        self.train_s += self.recent.seconds
        if self.first_row is not None:
            self.after_first_row += self.recent
        self.recent = Throughput()
        found = self.latest | self._eta(now) | self._communication() | self._padding()
        if self.plan.batch_phases:
            found["global_batch"] = self.batches.size(self.step - 1)
        self.sent_bytes, self.last_row_step, self.last_row_tokens = 0, self.step, self.tokens
        return found

    def _eta(self, now: float) -> dict[str, float]:
        """Seconds to the last step at the pace of sequences since the first row, pauses included; the first step is no
        measure."""
        if self.first_row is None:
            self.first_row = self.step, now
            return {}
        step, began = self.first_row
        done, so_far = self._sequences(step), self._sequences(self.step)
        return {"eta_s": (self.plan.sequences - so_far) * (now - began) / (so_far - done)}

    def _communication(self) -> dict[str, float]:
        """Return the MiB that this rank sent per step since the last row; empty if its strategy does not count them."""
        if not self.sent_bytes:
            return {}
        return {"communication_mib": self.sent_bytes / (self.step - self.last_row_step) / 2**20}

    def _padding(self) -> dict[str, float]:
        """Return the share of places without a token in all sequences since the last row, if the packing pads them."""
        train = self.plan.config.train
        first, last = self._sequences(self.last_row_step), self._sequences(self.step)
        if train.packing not in BY_DOCUMENT or first == last:
            return {}
        return {"padding_share": 1 - (self.tokens - self.last_row_tokens) / ((last - first) * train.context)}

    def overall(self) -> dict[str, Any]:
        """Return a TrainResult's rates, without the first step, which compiles, if there are others."""
        unknown = {"samples_per_s": 0.0, "tokens_per_s": 0.0, "step_ms": 0.0, "matmul_share": None, "mfu": None}
        return unknown | (self.after_first_row.rates(self.plan) or self.latest) | {"train_s": self.train_s}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside, and steps that are added meanwhile, count in no rate."""
        self._wait_for_device()  # queued work belongs to the earlier steps
        began, self.is_paused = time.perf_counter(), True
        try:
            yield
            self._wait_for_device()
        finally:
            self.is_paused = False
            self.since += time.perf_counter() - began

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

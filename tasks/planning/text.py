"""What a plan says of text that is not tokenized yet: how much it is, and how often the run would see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tasks.display.numbers import format_count
from training.planner.mixture import plan_sources
from training.records.plan import RunPlan
from training.records.token_shards import (
    Ledger,
    LeftOut,
    characters_lost,
    documents_left_out,
    files_left_out,
    garbled_text,
)
from training.records.words import counted
from training.shards.packing import Epoch


@dataclass(frozen=True)
class TextEstimate:
    """How much text a corpus has. `is_counted`: all of it was read, and only `tokens` are an estimate.

    `ledger`, `skipped_examples`: what was left out or skipped of what was read; its characters are those of the sample.
    """

    name: str
    files: int
    file_bytes: int
    documents: int
    text_bytes: int
    tokens: int
    train_tokens: int
    sample_bytes: int
    is_counted: bool
    left_out: tuple[LeftOut, ...]
    ledger: Ledger
    skipped_examples: tuple[str, ...]
    hints: tuple[str, ...]
    garbled_example: str = ""

    def lines(self, epochs: float | None) -> Iterator[str]:
        """Yield sentences for the plan. `epochs`: how often the run would see the text, if that is known."""
        about = "" if self.is_counted else "about "
        seen = "" if epochs is None else f": about {epochs:.2g} epochs"
        yield (
            f"text: {self.name}: {about}{counted(self.documents, 'document')} in {counted(self.files, 'file')}, "
            f"{about}{self.text_bytes / 1e6:,.1f} MB, about {format_count(self.tokens)} tokens (from a sample of "
            f"{self.sample_bytes / 1e6:,.2f} MB; it is not tokenized yet), about {format_count(self.train_tokens)} of "
            f"them to train on{seen}"
        )
        yield from (line for line, _ in files_left_out(self.left_out, read_bytes=self.file_bytes))
        read = "" if self.is_counted else "in the part that was read, "
        yield from (line for line, _ in documents_left_out(self.ledger, self.skipped_examples, read=read))
        yield from (line for line, _ in characters_lost(self.ledger, read="in the sample, "))
        yield from (line for line, _ in garbled_text(self.ledger, self.garbled_example, read=read))
        yield from (f"text: {hint}" for hint in self.hints)


def describe_estimates(plan: RunPlan, text: Sequence[TextEstimate]) -> list[str]:
    """Return sentences on text that is not tokenized yet."""
    train, data = plan.config.train, plan.config.data
    if not text:
        return []
    epochs: list[float | None] = [None] * len(text)
    if len(text) == max(1, len(data.sources)):  # none of them is on the hub, or shards
        each = [Epoch(max(1, one.train_tokens // train.context), one.train_tokens) for one in text]
        sequences = plan.batches.sequences_before(plan.steps)
        sources, _ = plan_sources(data, each, plan.batches, steps=plan.steps, sequences=sequences)
        epochs = [source.epochs for source in sources]
    return [line for one, times in zip(text, epochs, strict=True) for line in one.lines(times)]

"""What a run sees of its text: epochs, cut documents, padding, and a warning above four epochs."""

from __future__ import annotations

from collections.abc import Sequence

from training.config.data import DataConfig
from training.records.plan import PlannedSource

MANY_EPOCHS = 4  # so often repeated text teaches about as much as new text (Muennighoff et al. 2023, figure 4)


def describe_sources(data: DataConfig, sources: Sequence[PlannedSource], *, steps: int) -> list[str]:
    """Return sentences on how often each source is seen."""
    if not data.sources:
        return [f"text: {source.epochs:.3g} epochs of {source.name}" for source in sources]
    tokens = [source.epochs * source.tokens for source in sources]
    each = [
        f"{source.name} {seen / sum(tokens):.1%} of the tokens, {source.epochs:.3g} epochs"
        for source, seen in zip(sources, tokens, strict=True)
        if seen
    ]
    each += [f"{source.name} held-out text only" for source in sources if not source.epochs]
    late = (
        f"text: the phase from step {phase.first_step(steps)} on is not reached, because training ends after {steps}"
        for phase in data.phases
        if phase.first_step(steps) >= steps
    )
    return [f"text: {'; '.join(each)}", *late]


def describe_packing(sources: Sequence[PlannedSource], *, packing: str, context: int) -> list[str]:
    """Return a sentence on cut documents and padding in what the run sees, if the packing counts documents."""
    documents = sum(source.epochs * source.documents for source in sources)
    if not documents:
        return []
    cut = sum(source.epochs * source.cut_documents for source in sources) / documents
    places = context * sum(source.epochs * source.sequences for source in sources)
    padding = 1 - sum(source.epochs * source.tokens for source in sources) / places
    return [
        f"text: train.packing={packing} cuts {cut:.2%} of the documents, those longer than train.context = "
        f"{context:,} tokens, and {padding:.2%} of the places in sequences are padding"
    ]


def warn_of_repeats(sources: Sequence[PlannedSource]) -> list[str]:
    """Return a sentence for each source that is seen more than four times."""
    return [
        f"{source.name} is seen {source.epochs:.1f} times: beyond {MANY_EPOCHS} epochs text teaches less each time "
        "(Muennighoff et al. 2023, arXiv:2305.16264); give more text, train for fewer steps, or lower its weight"
        for source in sources
        if source.epochs > MANY_EPOCHS
    ]

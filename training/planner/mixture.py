"""Counts how much of each source a run sees: shares by phase, and epochs."""

from __future__ import annotations

from collections.abc import Sequence

from training.config.data import DataConfig, SourceConfig
from training.config.train import Batches
from training.records.plan import MixturePhase, PlannedSource
from training.shards.mixture import Mixture
from training.shards.packing import Epoch


def one_pass(data: DataConfig, epoch: Sequence[Epoch]) -> Epoch:
    """Return the unit of train.max_epochs: all text once, or the configured `epochs` of each source."""
    times = [_times(source) for source in data.sources] or [1.0]
    return Epoch(
        round(sum(n * each.sequences for n, each in zip(times, epoch, strict=True))),
        round(sum(n * each.tokens for n, each in zip(times, epoch, strict=True))),
    )


def plan_sources(
    data: DataConfig, epoch: Sequence[Epoch], batches: Batches, *, steps: int, sequences: int
) -> tuple[tuple[PlannedSource, ...], tuple[MixturePhase, ...]]:
    """Return the sources that a run of these steps and sequences sees, and their shares.

    `epoch`: one epoch of each source. Raises ValueError for impossible shares, with the numbers and the cure.
    """
    if not data.sources:
        (one,) = epoch
        return (PlannedSource(name=data.described, epochs=sequences / one.sequences, **one._asdict()),), ()
    names = [source.label for source in data.sources]
    of_each = zip(data.sources, epoch, strict=True)
    if short := [source.label for source, one in of_each if source.seen and not one.sequences]:
        raise ValueError(
            f"data.sources: the training text of {short[0]} fills no sequence of train.context tokens: give more of "
            "it, lower train.context, or leave the source out"
        )
    phases = [MixturePhase(first_step=0, shares=_own_shares(data, epoch, sequences=sequences))]
    for phase in data.phases:
        first, weights = phase.first_step(steps), [phase.weights.get(name, 0.0) for name in names]
        if first == phases[-1].first_step:  # a very short run
            phases.pop()
        if first < steps:
            phases.append(MixturePhase(first_step=first, shares=_normalized(_by_sequence(weights, epoch))))
    counts = Mixture(phases, batches).counts(sequences).tolist()
    planned = (
        PlannedSource(name=name, epochs=count / max(1, one.sequences), **one._asdict())
        for name, one, count in zip(names, epoch, counts, strict=True)
    )
    return tuple(planned), tuple(phases)


def _own_shares(data: DataConfig, epoch: Sequence[Epoch], *, sequences: int) -> tuple[float, ...]:
    """Return shares of the sequences by the sources' `weight` and `epochs`.

    Epochs give a number of sequences, and weights divide the rest of the run. If no source has a weight, only the
    proportions of epochs count: a run of another length sees more or less of each source.
    """
    counts = [
        0.0 if source.weight is not None else _times(source) * one.sequences
        for source, one in zip(data.sources, epoch, strict=True)
    ]
    weights = [source.weight or 0.0 for source in data.sources]
    if not any(weights):
        return _normalized(counts)
    if sum(counts) >= sequences:
        raise ValueError(
            f"data.sources: the sources with epochs have {sum(counts):,.0f} sequences, the whole run has "
            f"{sequences:,}: nothing is left for those with a weight; train for more steps, or lower the epochs"
        )
    rest = 1 - sum(counts) / sequences
    shares = _normalized(_by_sequence(weights, epoch))
    return tuple(count / sequences + rest * share for count, share in zip(counts, shares, strict=True))


def _times(source: SourceConfig) -> float:
    """Return the epochs of a source in one pass; a source with a weight counts once."""
    return 1.0 if source.epochs is None else source.epochs


def _by_sequence(weights: Sequence[float], epoch: Sequence[Epoch]) -> list[float]:
    """Turn weights of tokens into weights of sequences, which under some packings have different numbers of tokens."""
    return [weight * one.sequences / max(1, one.tokens) for weight, one in zip(weights, epoch, strict=True)]


def _normalized(weights: Sequence[float]) -> tuple[float, ...]:
    return tuple(weight / sum(weights) for weight in weights)

"""Groups of data-parallel ranks, and what gradients can be compressed: why so, and why not."""

from __future__ import annotations

from collections.abc import Sequence

from training.config.parallel import ParallelConfig
from training.config.run import RunConfig
from training.planner.job import Layout
from training.planner.price.pricing import KEEPS_RESIDUALS


def choose_groups(parallel: ParallelConfig, layout: Layout, ranks_per_host: Sequence[int]) -> tuple[int, str]:
    """Return the number of data-parallel ranks in a group, and the reason; 0 for strategies without groups.

    Raises ValueError, with the numbers and the cure, if the ranks do not make equal groups.
    """
    strategy, dp, tp = layout.strategy, layout.dp, layout.tp
    if not layout.row.in_groups:
        return 0, ""
    ranks, why = parallel.group_ranks, "asked for by parallel.group_ranks"
    if not ranks:
        ranks, why = ranks_per_host[0] // tp, "one per host"
        if len(set(ranks_per_host)) > 1 or ranks_per_host[0] % tp:
            raise ValueError(
                f"parallel.strategy={strategy}: hosts of {', '.join(map(str, ranks_per_host))} ranks and tp = "
                f"{tp} make no equal groups: set parallel.group_ranks to a divisor of {dp}"
            )
    if dp % ranks:
        raise ValueError(
            f"{dp} data-parallel ranks cannot be split into groups of parallel.group_ranks = {ranks}: set it to a "
            f"divisor of {dp}"
        )
    if dp == ranks:
        why += "; a single group has no other group to synchronize with"
    return ranks, f"{dp // ranks} groups of {ranks} data-parallel ranks: {why}"


def check_communication(config: RunConfig, *, dp: int, precision: str) -> None:
    """Raise ValueError for settings that do not work on `dp` data-parallel ranks, or that send more than they save."""
    parallel, train = config.parallel, config.train
    skips = precision == "fp16" or "skip" in {train.on_nonfinite, train.on_spike}
    why = ""
    if parallel.row.drifts:
        why = f"parallel.strategy={parallel.strategy} lets each group see its own gradient only"
    elif parallel.compression in KEEPS_RESIDUALS:
        why = f"parallel.compression={parallel.compression} adds unsent parts to the next step's gradient"
    if why and skips:
        raise ValueError(
            f"{why}, so it cannot skip a step, as precision {precision} with "
            f"train.on_nonfinite={train.on_nonfinite} and train.on_spike={train.on_spike} does: set "
            "parallel.precision=fp32 or bf16, train.on_nonfinite=stop, and train.on_spike=continue or rewind"
        )
    if parallel.compression == "topk" and parallel.topk_ratio * dp >= 1:
        raise ValueError(
            f"parallel.topk_ratio = {parallel.topk_ratio:g} on {dp} data-parallel ranks sends as much as no "
            f"compression, or more, as each rank gets every other's places and values: set it below {1 / dp:.2g}, "
            "or use parallel.compression=powersgd, whose bytes do not grow with the ranks"
        )

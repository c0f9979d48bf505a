"""What ranks send each other, as arithmetic: bytes by collective, and which compression of gradients pays."""

from __future__ import annotations

from training.config import RunConfig

KEEPS_RESIDUALS = ("topk", "powersgd")


def all_reduce_bytes(num_bytes: int, ranks: int) -> int:
    """What each rank sends to sum `num_bytes` over so many ranks: the least there is, and what a ring of them sends
    (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations")."""
    return 2 * num_bytes * (ranks - 1) // ranks


def gather_bytes(num_bytes: int, ranks: int) -> int:
    """What each rank sends, itself or by passing it on, so that all have the `num_bytes` that each of them brings."""
    return num_bytes * (ranks - 1)


def own_bytes(config: RunConfig, parameters: float) -> float:
    """What a rank with so many of the model's parameters holds that no other rank has, and that checkpoints keep."""
    return 4 * parameters if config.parallel.compression in KEEPS_RESIDUALS else 0


def check_compression(config: RunConfig, *, dp: int, precision: str) -> None:
    """Raises ValueError for a compression that cannot work on so many data-parallel ranks, or sends more than none."""
    parallel = config.parallel
    if parallel.compression in KEEPS_RESIDUALS and (precision == "fp16" or config.train.on_nonfinite == "skip"):
        raise ValueError(
            f"parallel.compression={parallel.compression} adds what it did not send to the next step's gradient, where "
            f"an infinite one would stay for ever, and precision {precision} with train.on_nonfinite="
            f"{config.train.on_nonfinite} goes on after such steps: set parallel.precision=fp32 or bf16 and "
            "train.on_nonfinite=stop, or parallel.compression=bf16"
        )
    if parallel.compression == "topk" and parallel.topk_ratio * dp >= 1:
        raise ValueError(
            f"parallel.topk_ratio = {parallel.topk_ratio:g} on {dp} data-parallel ranks sends as much as no "
            f"compression, or more, as each rank gets every other's places and values: set it below {1 / dp:.2g}, "
            "or use parallel.compression=powersgd, whose bytes do not grow with the ranks"
        )

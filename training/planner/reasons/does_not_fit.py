"""Nothing fits: the layout that comes closest, what it lacks and where, and only cures that help."""

from __future__ import annotations

import math
from dataclasses import replace

from training.config.run import RunConfig
from training.planner.cluster import MEMORY_SHARE
from training.planner.price.memory import GIB
from training.planner.price.pricing import PricedLayout, Ranking
from training.planner.price.replicas import RankPrices
from training.planner.question import Question


def why_not_any(question: Question, ranking: Ranking, if_open: Ranking) -> str:
    """Return the error. `if_open`: the ranking if the config left the layout open."""
    config, inventory, least = question.config, question.inventory, ranking.unfitting[0]
    if least.layout.stages and question.has_stages:
        by_rank = RankPrices(replace(question, measurements=()), least.cluster.ranks_per_host)
        each = ((replica, 1) for replica in by_rank.replicas(least.layout))
        rank, _ = by_rank.fullest(least.layout, each)
        needed = sum(by_rank.memory(least.layout, rank, 1).values())
        return (
            f"{least.layout}: {rank.layers} layers need {needed:.2f} GiB on {rank.device.name} at micro-batch 1, "
            f"{rank.device.usable_gib:.2f} GiB usable: move layers to other stages, or use more of them"
        )
    devices = [(host, device) for host in inventory.hosts for device in host.devices]
    host, smallest = min(devices, key=lambda found: found[1].memory_gib)
    largest_gib = max(device.memory_gib for _, device in devices)
    layout, cures, lacks = least.layout, _cures(config, least, if_open), []
    if least.needed_gib > least.usable_gib:
        parts = ", ".join(f"{part} {gib:.1f}" for part, gib in least.memory.items())
        lacks.append(
            f"on {smallest.name} of {host.name}: {least.needed_gib * GIB:,.0f} bytes = {least.needed_gib:.1f} GiB per "
            f"rank at micro-batch {layout.micro_batch} ({parts}), {least.usable_gib:.1f} GiB usable, "
            f"{least.needed_gib - least.usable_gib:.1f} GiB too few"
        )
        if largest_gib > smallest.memory_gib:
            cures.insert(0, f"leave {host.name} out (others have up to {largest_gib:.1f} GiB)")
    if least.host_missing_gib > 0:
        host = min(inventory.hosts, key=lambda each: each.memory_gib)
        lacks.append(
            f"in the memory of {host.name}: with {layout.offload} offloaded {least.host_gib:.1f} GiB, "
            f"{least.usable_host_gib:.1f} GiB usable ({MEMORY_SHARE:.0%} of {host.memory_gib:.1f}), "
            f"{least.host_missing_gib:.1f} GiB too few"
        )
        cures.insert(0, f"use hosts with {math.ceil(least.host_gib / MEMORY_SHARE)} GiB of memory")
    return f"{layout.strategy}: the model does not fit {'; nor '.join(lacks)}: {', '.join(cures)}, or a smaller model"


def _cures(config: RunConfig, least: PricedLayout, if_open: Ranking) -> list[str]:
    """Return what would let the closest layout fit, of settings and of more devices."""
    cures = [f"leave the layout to the plan ({each.layout} fits)" for each in if_open.fitting[:1]]
    by_tokens = ("activations", "layer being recomputed", "logits", "gathered sequence", "fragmentation")
    fixed_gib = sum(gib for part, gib in least.memory.items() if part not in by_tokens)
    if least.needed_gib > least.usable_gib >= fixed_gib:
        cures.append("lower train.context" + (" or train.micro_batch" if least.layout.micro_batch > 1 else ""))
    if config.parallel.strategy == "auto" or config.parallel.row.stage == 3:
        cures.append("use more devices")
    return cures

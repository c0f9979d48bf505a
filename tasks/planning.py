"""Config, inventory and shards to runs/ID/plan.json, written once; and the plan in words."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from training.config import RunConfig
from training.plan import make_plan
from training.records import Inventory, RunPlan, TokenShards

logger = logging.getLogger(__name__)


def plan_run(
    config: RunConfig,
    *,
    inventory: Inventory,
    run_id: str = "dry-run",
    shards: TokenShards | None = None,
    shards_dir: Path | None = None,
) -> RunPlan:
    """`make_plan`, with the model's config.json fetched where it is needed. Raises ValueError for what cannot work."""
    return make_plan(
        config,
        inventory,
        run_id=run_id,
        shards=shards,
        shards_dir=str(shards_dir or ""),
        hf_config=_hf_config(config),
    )


def write_plan(plan: RunPlan, run_dir: Path) -> RunPlan:
    """Write plan.json, or keep the one that is there: a resumed run goes on with the plan it began with."""
    path = run_dir / "plan.json"
    if path.exists():
        logger.info("going on with the plan in %s", path)
        kept = RunPlan.read(path)
        if kept.shards_fingerprint != plan.shards_fingerprint:
            raise ValueError(
                f"the corpus has changed since {path.parent.name} was planned (tokens {plan.shards_fingerprint[:12]}, "
                f"planned with {kept.shards_fingerprint[:12]}): restore the files, or start a new run"
            )
        return kept
    plan.write(path)
    for reason in plan.reasons:
        logger.info("plan: %s", reason)
    return plan


def _hf_config(config: RunConfig) -> dict[str, Any] | None:
    """config.json of model.path: a local folder, else the hub."""
    if config.model.architecture != "path" and config.model.init != "pretrained":
        return None
    path = Path(config.model.path) / "config.json"
    if not path.exists():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(config.model.path, "config.json"))
        except Exception as error:
            raise ValueError(
                f"model.path = {config.model.path!r} is neither a folder with a config.json nor on the hub ({error})"
            ) from error
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def plan_in_words(plan: RunPlan) -> list[tuple[str, str]]:
    """Label and value pairs for the terminal and for Prefect's table."""
    shape, predicted = plan.shape, plan.predicted
    memory = sum(predicted.memory_gib.values())
    parts = ", ".join(f"{part} {gib:.2f}" for part, gib in predicted.memory_gib.items())
    layout = " + ".join(map(str, plan.ranks_per_host))
    return [
        ("model", f"{shape.architecture}, {shape.layers} layers x {shape.width}, {shape.parameters:,} parameters"),
        ("vocabulary, context", f"{plan.vocab_size:,} tokens, {plan.config.train.context} positions"),
        ("strategy", f"{plan.config.parallel.strategy} on {layout} {plan.device_kind} ranks, {plan.precision}"),
        (
            "global batch",
            f"{plan.config.train.global_batch} sequences = {plan.batch_tokens:,} tokens: {plan.world_size} ranks x "
            f"{plan.accumulation} accumulated x micro-batch {plan.micro_batch}",
        ),
        ("steps", f"{plan.steps:,} steps, {plan.steps * plan.batch_tokens:,} tokens"),
        ("memory per rank", f"{memory:.2f} GiB predicted ({parts})"),
        ("compute", f"{predicted.flops_per_token / 1e6:,.1f} MFLOP per token (6N + 12LHQT)"),
        ("speed", f"{predicted.tokens_per_s:,.0f} tokens/s predicted, {predicted.train_s / 60:,.1f} min in all"),
        ("checkpoint", f"{predicted.checkpoint_gib:.2f} GiB each, {plan.config.checkpoint.keep_last} kept"),
        *(("because", reason) for reason in plan.reasons),
    ]

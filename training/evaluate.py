"""The evaluation program: `torchrun … -m training.evaluate PLAN`, on any number of ranks.

PLAN is an evaluation's plan, or runs/ID/plan.json for the run's last checkpoint. It writes eval.json beside it: exact
figures over the whole held-out split, source by source, the scores of downstream tasks, and samples.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from training.checkpoint.averaged_weights import AveragedWeights
from training.checkpoint.safetensors_files import TensorFiles
from training.data.batch import IGNORED
from training.data.held_out import held_out_placed
from training.evaluation.loaded_model import Opened, open_model
from training.inference.samples import Sampler
from training.records.checkpoint import CHECKPOINT_MANIFEST, check_model, reading
from training.records.evaluation_plan import read_evaluation_plan
from training.records.results import EvalReport, Sample, SourceFigures, TaskScore
from training.records.token_shards import TokenShards
from training.runtime.process import process_group
from training.shards.sources import HeldOutSources, held_out_sources
from training.strategies.torch_strategy import TorchStrategy
from training.tracking.progress import Progress, to_rank_log

logger = logging.getLogger(__name__)


def main(plan_path: Path) -> None:
    plan = read_evaluation_plan(plan_path).on_ranks(int(os.environ.get("WORLD_SIZE", "1")))
    folder = plan_path.parent / plan.model
    checkpoint = folder if (folder / CHECKPOINT_MANIFEST).exists() else None
    with (
        process_group(plan) as rank,
        ExitStack() as held,
        Progress(to_rank_log if rank.is_metrics_rank else None, part="loading the model") as progress,
    ):
        started = time.perf_counter()
        for each in {*map(Path, plan.averaged), *([checkpoint] if checkpoint else [])}:
            held.enter_context(reading(each))
            if rank.rank == 0:
                check_model(each)
        opened = open_model(plan, folder, rank=rank)
        manifest = TokenShards.read(Path(plan.shards_dir) / "manifest.json")
        sources = held_out_sources(manifest)
        sums, of_weights = held_out_sums(opened, sources, progress), dict[str, Any]()
        if plan.averaged:
            sums, of_weights = choose_weights(opened, sums, sources, progress)
        task_scores = score_tasks(opened, progress)
        progress.begin("writing samples")
        samples = generate_samples(opened)
        if rank.rank == 0:
            figures = figures_of(sums.sum(0), manifest.text_bytes("validation"), causal=opened.model.causal)
            EvalReport(
                step=plan.step,
                checkpoint_sha256=plan.checkpoint_sha256,
                shards_fingerprint=plan.shards_fingerprint,
                **figures,
                sources=by_source(sums, sources, causal=opened.model.causal),
                tasks=task_scores,
                samples=samples,
                **of_weights,
                seconds=time.perf_counter() - started,
            ).write(plan_path.with_name("eval.json"))


@torch.no_grad()
def held_out_sums(opened: Opened, sources: HeldOutSources, progress: Progress) -> np.ndarray:
    """fp64 [sources, 3] over all ranks: summed loss, right first guesses and predicted tokens of the validation split.

    A token counts for the source that it, the target, was read from: a sequence may hold several. Token losses are
    summed in fp64, so that the number of ranks changes nothing beyond the last digits.
    """
    rank, plan = opened.rank, opened.plan
    sums = torch.zeros(len(sources.names), 3, dtype=torch.float64, device=rank.device)
    batches = held_out_placed(plan, rank=opened.dp_rank, world_size=plan.dp, device=rank.device)
    progress.begin("evaluating held-out text", total=len(batches), unit="batches")
    for batch, places in batches:
        losses, right = opened.strategy.scores(batch)
        predicted = (batch.targets.flatten() != IGNORED) & opened.counts
        rows = torch.from_numpy(sources.of(places).reshape(-1)).to(rank.device)
        sums.index_add_(0, rows, torch.stack([losses.double(), right.double(), predicted.double()], dim=1))
        progress.advance()
    dist.all_reduce(sums)
    return sums.cpu().numpy()


def choose_weights(
    opened: Opened, last: np.ndarray, sources: HeldOutSources, progress: Progress
) -> tuple[np.ndarray, dict[str, Any]]:
    """Measure the average of the checkpoints beside the last weights, whose sums are `last`; the model then has those
    that export.weights chooses. Return their sums, and the report's fields on both. Collective.
    """
    plan, strategy = opened.plan, opened.strategy
    assert isinstance(strategy, TorchStrategy)
    folders, asked = [Path(each) for each in plan.averaged], plan.config.export.weights
    strategy.load_weights(AveragedWeights(folders, plan.config.train))
    average = held_out_sums(opened, sources, progress)
    last_loss, average_loss = (float(sums[:, 0].sum() / sums[:, 2].sum()) for sums in (last, average))
    is_last = asked == "last" or (asked == "better" and last_loss <= average_loss)
    if is_last:
        strategy.load_weights(TensorFiles(folders[-1], "model"))
    return (last if is_last else average), {
        "weights": "last" if is_last else "average",
        "last_loss": last_loss,
        "average_loss": average_loss,
        "averaged_steps": [int(each.name) for each in folders],
    }


def figures_of(sums: np.ndarray, text_bytes: int, *, causal: bool) -> dict[str, float | int | None]:
    """Return figures from [summed loss, right guesses, tokens].

    A masked model predicts too few tokens for bits per byte.
    """
    loss_sum, correct, tokens = map(float, sums)
    loss = loss_sum / tokens
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss_sum / math.log(2) / text_bytes if causal else None,
        "accuracy": correct / tokens,
        "tokens": int(tokens),
        "text_bytes": text_bytes,
    }


def by_source(sums: np.ndarray, sources: HeldOutSources, *, causal: bool) -> tuple[SourceFigures, ...]:
    """Return figures of each source, the largest first; sources without a predicted token are left out."""
    rows = zip(sources.names, sources.text_bytes, sums, strict=True)
    return tuple(
        SourceFigures(source=name, **figures_of(row, text_bytes, causal=causal))
        for name, text_bytes, row in rows
        if row[2]
    )


def score_tasks(opened: Opened, progress: Progress) -> tuple[TaskScore, ...]:
    if not opened.plan.config.evaluation.has_tasks:
        return ()
    from training.evaluation.lm_eval_model import task_scores  # here: it takes seconds and needs an extra

    return task_scores(opened, progress)


def generate_samples(opened: Opened) -> tuple[Sample, ...]:
    """Generate one continuation per prompt, each from its own seed, so that runs can be compared."""
    if not opened.model.causal:
        return ()
    sampler = Sampler(opened.plan, new_tokens=opened.plan.config.evaluation.sample_tokens)
    texts = sampler.texts(opened.strategy, device=opened.rank.device)
    return tuple(Sample(prompt=prompt, text=text) for prompt, text in zip(sampler.prompts, texts, strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

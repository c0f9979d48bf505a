"""The evaluation program: `torchrun … -m training.evaluate runs/ID/plan.json`, on any number of ranks.

Exact figures of the run's last checkpoint over the whole held-out split, and samples; leaves eval.json.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from training.data import held_out
from training.loss import IGNORED
from training.model import LanguageModel, load_model
from training.rank import Rank, entered
from training.records import RunPlan, TokenShards, TrainResult
from training.results import EvalReport, Sample
from training.retention import reading


def main(plan_path: Path) -> None:
    plan, run_dir = RunPlan.read(plan_path), plan_path.parent
    trained = TrainResult.read(run_dir / "result.json")
    folder = run_dir / trained.checkpoint
    with entered(plan, world_size=int(os.environ.get("WORLD_SIZE", "1"))) as rank, reading(folder):
        began = time.perf_counter()
        model = load_model(folder, plan).to(rank.device)
        loss_sum, correct, tokens = held_out_sums(model, plan, rank)
        if rank.rank == 0:
            text_bytes = TokenShards.read(Path(plan.shards_dir) / "manifest.json").text_bytes("validation")
            causal = plan.config.objective == "causal"
            EvalReport(
                step=trained.step,
                checkpoint_sha256=trained.checkpoint_sha256,
                shards_fingerprint=plan.shards_fingerprint,
                loss=loss_sum / tokens,
                perplexity=math.exp(min(loss_sum / tokens, 700.0)),
                bits_per_byte=loss_sum / math.log(2) / text_bytes if causal else None,
                accuracy=correct / tokens,
                tokens=tokens,
                text_bytes=text_bytes,
                samples=samples(model, plan, rank) if causal else (),
                seconds=time.perf_counter() - began,
            ).write(run_dir / "eval.json")


@torch.no_grad()
def held_out_sums(model: LanguageModel, plan: RunPlan, rank: Rank) -> tuple[float, int, int]:
    """Summed loss, right first guesses and predicted tokens over the whole validation split, over all ranks.

    Sums in fp64, so that the number of ranks changes nothing beyond the last digits.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=rank.device)
    for batch in held_out(plan, rank=rank.rank, world_size=rank.world_size, device=rank.device):
        loss, correct = model.scores(batch)
        predicted = (batch.targets != IGNORED).sum()
        totals += torch.stack([loss.double(), correct.double(), predicted.double()])
    dist.all_reduce(totals)
    return float(totals[0]), int(totals[1]), int(totals[2])


@torch.no_grad()
def samples(model: LanguageModel, plan: RunPlan, rank: Rank) -> tuple[Sample, ...]:
    """One continuation per configured prompt, each from its own seed, so that runs can be compared."""
    from tokenizers import Tokenizer

    wanted = plan.config.evaluation
    tokenizer = Tokenizer.from_file(str(Path(plan.shards_dir) / "tokenizer" / "tokenizer.json"))
    result = []
    for number, prompt in enumerate(wanted.prompts):
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [plan.end_id]
        ids = ids[-(plan.config.train.context - 1) :]
        torch.manual_seed(plan.config.train.seed + number)
        output = model.hf.generate(  # type: ignore[operator]
            torch.tensor([ids], device=rank.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=rank.device),
            max_new_tokens=min(wanted.sample_tokens, plan.config.train.context - len(ids)),
            do_sample=wanted.temperature > 0,
            temperature=wanted.temperature or None,
            top_k=wanted.top_k or None,
            use_cache=True,
            eos_token_id=plan.end_id,
            pad_token_id=plan.end_id,
        )
        text = tokenizer.decode(output[0, len(ids) :].tolist(), skip_special_tokens=True)
        result.append(Sample(prompt=prompt, text=text))
    return tuple(result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What the model writes at fixed prompts and seeds, at every validation: runs/ID/samples.jsonl, and MLflow's table."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch

from training.inference.sampling import Draw
from training.inference.generate_uncached import continuations
from training.records.plan import RunPlan
from training.records.record import write_atomically
from training.strategies import Strategy
from training.tracking.rows import SAMPLES, read_rows

logger = logging.getLogger(__name__)


class Sampler:
    """The configured prompts as tokens, and the way back to text. Prompt n has the seed train.seed + n."""

    def __init__(self, plan: RunPlan, *, new_tokens: int) -> None:
        from tokenizers import Tokenizer

        self.plan, self.new_tokens, self.prompts = plan, new_tokens, plan.config.evaluation.prompts
        self.tokenizer = Tokenizer.from_file(str(Path(plan.shards_dir) / "tokenizer" / "tokenizer.json"))
        encoded = [self.tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in self.prompts]
        self.ids = [ids or [plan.end_id] for ids in encoded]  # after the end token a document starts
        self.seeds = [plan.config.train.seed + number for number in range(len(self.prompts))]

    def texts(self, strategy: Strategy, *, device: torch.device) -> list[str]:
        """Collective; `strategy`'s model in eval mode."""
        wanted = self.plan.config.evaluation
        new = continuations(
            strategy,
            self.ids,
            new_tokens=self.new_tokens,
            draw=Draw(wanted.temperature, wanted.top_k, top_p=1.0),
            seeds=self.seeds,
            end_id=self.plan.end_id,
            context=self.plan.config.train.context,
            device=device,
        )
        return [str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in new]


class SampleLog:
    """Samples while training, under evaluation.samples_while_training; a masked model writes nothing.

    Rows that a full disk does not take wait for the next ones, like those of the metrics.
    """

    def __init__(self, plan: RunPlan, run_dir: Path, *, start: int, writes: bool) -> None:
        new_tokens = plan.config.evaluation.samples_while_training
        wanted = new_tokens > 0 and plan.config.objective == "causal"
        self.sampler = Sampler(plan, new_tokens=new_tokens) if wanted else None
        self.path, self.writes, self.run, self.waiting = run_dir / SAMPLES, writes, plan.run_id, ""
        if writes and self.path.exists():  # what comes after `start` is written again
            rows = [row for row in read_rows(self.path) if row["step"] <= start]
            write_atomically(self.path, "".join(f"{json.dumps(row)}\n" for row in rows))

    def add(self, step: int, strategy: Strategy, *, device: torch.device) -> None:
        """One row per prompt. Collective; the model is in eval mode."""
        if self.sampler is None:
            return
        texts = self.sampler.texts(strategy, device=device)
        if not self.writes:
            return
        rows = zip(self.sampler.prompts, texts, self.sampler.seeds, strict=True)
        lines = [
            json.dumps({"step": step, "prompt": prompt, "text": text, "seed": seed, "run": self.run})
            for prompt, text, seed in rows
        ]
        self.waiting += "".join(f"{line}\n" for line in lines)
        kept = self.path.read_bytes() if self.path.exists() else b""
        try:
            write_atomically(self.path, kept + self.waiting.encode())
            self.waiting = ""
        except OSError as error:
            logger.warning("samples wait for room in %s (%s)", self.path, error)

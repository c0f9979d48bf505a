"""Texts that a model writes from fixed prompts and seeds: at every validation (samples.jsonl) and in its evaluation."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch

from training.inference.generate_uncached import continuations
from training.inference.sampling import SamplingParams
from training.records.plan import RankPlan, RunPlan
from training.records.record import write_atomically
from training.shards.prompts import sample_prompts
from training.strategies import Strategy
from training.tokenizer.text_encoder import TextEncoder
from training.tracking.rows import SAMPLES, read_rows

logger = logging.getLogger(__name__)
TOP_K = 50  # tokens that a sample may take next: what the server takes unless asked


class Sampler:
    """Generates a text for each prompt. Prompt n has the seed train.seed + n."""

    def __init__(self, plan: RankPlan, *, new_tokens: int) -> None:
        self.plan, self.new_tokens = plan, new_tokens
        self.prompts = sample_prompts(plan.config, Path(plan.shards_dir))
        encoder = TextEncoder(Path(plan.shards_dir) / "tokenizer", plan.text_encoding.model_dump())
        self.tokenizer, encoded = encoder.tokenizer, [encoder.encode(prompt) for prompt in self.prompts]
        self.ids = [ids or [plan.end_id] for ids in encoded]  # empty prompt: a document starts after the end token
        self.seeds = [plan.config.train.seed + number for number in range(len(self.prompts))]

    def texts(self, strategy: Strategy, *, device: torch.device) -> list[str]:
        """Return one continuation per prompt. Collective; `strategy`'s model is in eval mode."""
        settings = self.plan.config.evaluation
        new = continuations(
            strategy,
            self.ids,
            new_tokens=self.new_tokens,
            params=SamplingParams(settings.temperature, TOP_K, top_p=1.0),
            seeds=self.seeds,
            end_ids=self.plan.end_ids,
            context=self.plan.config.train.context,
            device=device,
        )
        return [str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in new]


class SampleLog:
    """Writes runs/ID/samples.jsonl as evaluation.samples_while_training asks; a masked model has no samples.

    Rows that cannot be written, on a full disk, are kept and written with the next ones, as for the metrics.
    """

    def __init__(self, plan: RunPlan, run_dir: Path, *, start: int, writes: bool) -> None:
        new_tokens = plan.config.evaluation.samples_while_training
        has_samples = new_tokens > 0 and plan.config.objective == "causal"
        self.sampler = Sampler(plan, new_tokens=new_tokens) if has_samples else None
        self.path, self.writes, self.run, self.unwritten = run_dir / SAMPLES, writes, plan.run_id, ""
        if writes and self.path.exists():  # steps after `start` will be repeated
            rows = [row for row in read_rows(self.path) if row["step"] <= start]
            write_atomically(self.path, "".join(f"{json.dumps(row)}\n" for row in rows))

    def add(self, step: int, strategy: Strategy, *, device: torch.device) -> None:
        """Write one row per prompt. Collective; the model is in eval mode."""
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
        self.unwritten += "".join(f"{line}\n" for line in lines)
        kept = self.path.read_bytes() if self.path.exists() else b""
        try:
            write_atomically(self.path, kept + self.unwritten.encode())
            self.unwritten = ""
        except OSError as error:
            logger.warning("cannot write samples to %s (%s): they are kept for the next attempt", self.path, error)

"""A simple training loop in one file, in eager mode, after nanoGPT's train.py.

python -m benchmarks.baselines.plain RUN_DIR
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines.job import Job, Rows, huggingface_model, read_job
from training.strategies.optim import BETA1


def get_batch(job: Job, step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and next tokens of the step, int64 [batch, context] each."""
    context, tokens = job.plan.config.train.context, job.tokens
    x = torch.stack([torch.from_numpy(tokens[i : i + context].astype(np.int64)) for i in job.starts[step]])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + context].astype(np.int64)) for i in job.starts[step]])
    if job.device.type == "cuda":
        return tuple(t.pin_memory().to(job.device, non_blocking=True) for t in (x, y))  # type: ignore[return-value]
    return x, y


def configure_optimizer(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    train, parameters = job.plan.config.train, list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = {"fused": True} if job.device.type == "cuda" else {}
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(BETA1, train.beta2), **fused)


def main(run_dir: Path) -> None:
    job = read_job(run_dir)
    train = job.plan.config.train
    model = huggingface_model(job.plan)
    optimizer = configure_optimizer(model, job)
    autocast = torch.autocast(job.device.type, torch.bfloat16) if job.plan.precision == "bf16" else nullcontext()
    rows = Rows(job)
    x, y = get_batch(job, 0)
    for step in range(1, job.plan.steps + 1):
        with autocast:
            logits = model(input_ids=x).logits
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
        if step < job.plan.steps:
            x, y = get_batch(job, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % train.log_every_steps == 0:
            rows.write(step, loss.item())


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The training loop of plain.py with Hugging Face Accelerate, as in the quick tour of Accelerate.

python -m benchmarks.baselines.accelerated RUN_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.baselines.job import Rows, Sequences, huggingface_model, read_job
from benchmarks.baselines.plain import configure_optimizer


def main(run_dir: Path) -> None:
    job = read_job(run_dir)
    train = job.plan.config.train
    accelerator = Accelerator(
        cpu=job.device.type == "cpu", mixed_precision="no" if job.plan.precision == "fp32" else job.plan.precision
    )
    model = huggingface_model(job.plan)
    model, optimizer, loader = accelerator.prepare(
        model, configure_optimizer(model, job), DataLoader(Sequences(job), batch_size=train.global_batch)
    )
    rows = Rows(job)
    for step, batch in enumerate(loader, start=1):
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"].view(-1))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step % train.log_every_steps == 0:
            rows.write(step, loss.item())


if __name__ == "__main__":
    main(Path(sys.argv[1]))

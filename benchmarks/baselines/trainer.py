"""Hugging Face Trainer with its defaults, except for what runs must share: batch, order, schedule, clipping.

python -m benchmarks.baselines.trainer RUN_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.baselines.job import Job, Rows, Sequences, huggingface_model, read_job
from training.strategies.optim import BETA1


class Log(TrainerCallback):
    """Logs the loss of single steps, to be compared step by step: Trainer itself logs the mean since its last log."""

    def __init__(self, job: Job) -> None:
        self.rows, self.latest = Rows(job), Tensor()

    def loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        self.latest = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return self.latest

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > self.rows.step:  # Trainer logs once more at the end
            self.rows.write(state.global_step, float(self.latest))


def main(run_dir: Path) -> None:
    job = read_job(run_dir)
    train, log = job.plan.config.train, Log(job)
    arguments = TrainingArguments(
        output_dir=str(run_dir / "trainer"),
        max_steps=job.plan.steps,
        per_device_train_batch_size=train.global_batch,
        learning_rate=train.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=train.weight_decay,
        adam_beta1=BETA1,
        adam_beta2=train.beta2,
        max_grad_norm=train.clip_norm,
        logging_steps=train.log_every_steps,
        bf16=job.plan.precision == "bf16",
        gradient_checkpointing=job.plan.activation_checkpointing == "full",
        use_cpu=job.device.type == "cpu",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(
        model=huggingface_model(job.plan),
        args=arguments,
        train_dataset=Sequences(job),
        callbacks=[log],
        compute_loss_func=log.loss,
    )
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

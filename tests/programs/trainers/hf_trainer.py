"""A script as people write it for Hugging Face's Trainer: it knows nothing of Shardline, MLflow runs or hosts.

python hf_trainer.py OUTPUT_DIR STEPS
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up: a model learns them at once."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


def main(output_dir: str, steps: int) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    arguments = TrainingArguments(
        output_dir=output_dir,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=steps,
        report_to="mlflow",
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
    )
    trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Counting())
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

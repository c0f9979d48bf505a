"""A script as people write it for Accelerate, with its MLflow tracker; it knows nothing of Shardline.

python accelerated.py STEPS
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main(steps: int) -> None:
    accelerator = Accelerator(cpu=True, log_with="mlflow")
    accelerator.init_trackers("a-project-of-its-own", config={"steps": steps})
    torch.manual_seed(0)
    inputs = torch.randn(192, 8)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (batch, wanted) in zip(range(1, steps + 1), loader, strict=False):
        loss = torch.nn.functional.mse_loss(model(batch), wanted)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean")
        accelerator.log({"loss": float(mean), "processes": accelerator.num_processes}, step=step)
    accelerator.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]))

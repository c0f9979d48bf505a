"""The program that measures the documents of one step's batch: `torchrun … -m training.blame PLAN`.

PLAN is a BlamePlan. It writes blame.json beside it: the loss of each document in the batch, under a checkpoint before.
"""

from __future__ import annotations

import operator
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from training.data.batch import IGNORED, MicroBatches
from training.data.loader import Loader
from training.evaluation.loaded_model import Opened, open_model
from training.records.blame import Blame, BlamedDocument, BlamePlan
from training.records.checkpoint import check_model, reading
from training.records.plan import RunPlan
from training.runtime.process import process_group


def main(plan_path: Path) -> None:
    plan = BlamePlan.read(plan_path)
    folder = plan_path.parent / plan.model
    with process_group(plan) as rank, reading(folder):
        if rank.rank == 0:
            check_model(folder)
        opened = open_model(plan, folder, rank=rank)
        documents = blamed_documents(opened, RunPlan.read(Path(plan.run_plan)), step=plan.batch_step)
        if rank.rank == 0:
            Blame(documents=documents).write(plan_path.with_name("blame.json"))


@torch.no_grad()
def blamed_documents(opened: Opened, run: RunPlan, *, step: int) -> tuple[BlamedDocument, ...]:
    """Return the documents of the step's batch, the largest mean loss first. Collective; ranks share the model, and
    each reads the whole batch.
    """
    train, size = run.config.train, opened.plan.micro_batches[0]
    whole = MicroBatches((run.batches.size(step - 1),))
    loader = Loader(run, dp_rank=0, device=opened.rank.device, micro_batches=whole, ahead=0)
    (batch,) = loader.share(step - 1).batches
    places = loader.rows(step - 1).places(train.context).reshape(-1)
    losses = [
        opened.strategy.scores(batch.each(operator.itemgetter(slice(first, first + size))))[0]
        for first in range(0, len(batch.inputs), size)
    ]
    summed = torch.cat(losses).double()
    dist.all_reduce(summed)
    predicted = (batch.targets.flatten() != IGNORED).cpu().numpy()
    bounds = loader.stream.document_bounds()
    numbers = bounds.searchsorted(places, side="right") - 1
    own_losses, found = summed.cpu().numpy(), []
    for number in np.unique(numbers[predicted]).tolist():
        own = predicted & (numbers == number)
        found.append(
            BlamedDocument(
                number=number,
                loss=float(own_losses[own].mean()),
                tokens=int(own.sum()),
                first=int(places[own].min()),
                stop=int(places[own].max()) + 1,
                document=(int(bounds[number]), int(bounds[number + 1])),
            )
        )
    loader.close()
    return tuple(sorted(found, key=lambda each: -each.loss))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

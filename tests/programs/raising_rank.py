"""Training and the network test, where rank 1 raises while its peer waits for it, on a backend that ends like NCCL.

NCCL's destroy_process_group waits for all ranks of the group; gloo's does not.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from training import train
from training.hardware import check_network

ERROR = "the memory of rank 1 is broken"


def main(path: Path) -> None:
    """`path`: a run's plan, or where the network test writes its report."""
    destroy = dist.destroy_process_group

    def wait_for_peers_and_destroy(*arguments: Any) -> None:
        dist.barrier()
        destroy(*arguments)

    def fail(*_arguments: Any, **_named: Any) -> Any:
        raise RuntimeError(ERROR)

    dist.destroy_process_group = wait_for_peers_and_destroy
    os.environ["GROUP_RANK"] = "0"  # one host
    if path.name == "plan.json":
        if os.environ["RANK"] == "1":
            train.restore = fail
        train.main(path)
    else:
        if os.environ["RANK"] == "1":
            check_network._all_reduce_rates = fail
        check_network.main(path)

"""Training and the network test, where rank 1 raises while its peer waits for it, on a backend that ends like NCCL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support import nccl_like
from training import train
from training.hardware import check_network

ERROR = "the memory of rank 1 is broken"


def main(path: Path) -> None:
    """`path`: a run's plan, or where the network test writes its report."""

    def fail(*_arguments: Any, **_named: Any) -> Any:
        raise RuntimeError(ERROR)

    nccl_like.install()
    os.environ["GROUP_RANK"] = "0"  # one host
    if path.name == "plan.json":
        if os.environ["RANK"] == "1":
            train.restore = fail
        train.main(path)
    else:
        if os.environ["RANK"] == "1":
            check_network._all_reduce_rates = fail
        check_network.main(path)

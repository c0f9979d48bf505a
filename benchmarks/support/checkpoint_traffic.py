"""A rank program that measures, by the kernel's counters, the bytes received while a checkpoint is staged.

    torchrun … -m benchmarks.support.checkpoint_traffic FOLDER

Stages a checkpoint of each run in FOLDER (NAME/plan.json), one after the other; writes NAME/traffic-RANK.json.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from training.checkpoint.staging import Staging
from training.records.plan import RunPlan
from training.runtime.process import Rank, process_group
from training.trainer.state import restore

BYTES_RECEIVED = slice(128, 136)  # tcpi_bytes_received of struct tcp_info (linux/tcp.h)


def received_bytes() -> int:
    """Return the bytes that this process's TCP connections have received so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not a TCP socket
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED.stop)
                total += struct.unpack("=Q", info[BYTES_RECEIVED])[0]
    return total


def main(folder: Path) -> None:
    paths = sorted(folder.glob("*/plan.json"))
    with process_group(RunPlan.read(paths[0])) as rank:
        for path in paths:
            (path.parent / f"traffic-{rank.rank}.json").write_text(json.dumps(traffic(path, rank)))


def traffic(plan_path: Path, rank: Rank) -> dict[str, int]:
    plan = RunPlan.read(plan_path)
    state = restore(plan, rank=rank, run_dir=plan_path.parent)
    staging = Staging(plan, rank)
    staging.fill(state.strategy)  # the first one connects the ranks
    dist.barrier()
    before = received_bytes()
    files = staging.fill(state.strategy)
    dist.barrier()
    received = received_bytes() - before
    kept = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    return {"rank": rank.rank, "received_bytes": received, "kept_bytes": kept}


if __name__ == "__main__":
    main(Path(sys.argv[1]))

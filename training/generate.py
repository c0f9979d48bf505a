"""The program that generates text: `torchrun … -m training.generate decode.json`, on as many ranks as the plan says.

Requests come through the socket beside the plan, tokens go back as they are made; when the socket is closed, or its
owner has died, all ranks leave. The ranks share one copy of the model, or have a copy and a connection each.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from training.inference.continuous_batching import Batcher, DecodingSequence
from training.inference.decode_ranks import PipelineRanks, SingleRank, TensorParallelRanks
from training.inference.model_shard import ModelShard, WholeModel, is_admitted, load_shard, load_whole
from training.inference.socket_channel import Channel
from training.inference.steps import Idle, wire_size
from training.records.decoding import (
    CHANNEL,
    CancelRequest,
    DecodePlan,
    DecodeRequest,
    NewTokens,
    RanksReady,
    RequestRefused,
)
from training.runtime.onednn import prefer_onednn

logger = logging.getLogger(__name__)

TIMEOUT = datetime.timedelta(minutes=10)  # for one step; torchrun notices a dead rank within a second
HEARTBEAT_S = 60.0  # seconds between Idle steps to ranks that wait
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(plan_path: Path) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    plan = DecodePlan.read(plan_path)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size != plan.degree:
        raise ValueError(f"torchrun started {size} ranks, the plan has {plan.degree}: start it with that many")
    device = _device(plan)
    is_shared = plan.parallel in {"tensor", "pipeline"} and plan.degree > 1
    if is_shared:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    precision, why = _precision(plan, device)
    ranks = _load(plan, dtype=DTYPES[precision], device=device)
    if is_shared:
        dist.barrier()  # all have loaded
    if is_shared and rank > 0:
        assert isinstance(ranks, TensorParallelRanks | PipelineRanks)
        ranks.follow()
    else:
        channel = Channel(plan_path.with_name(CHANNEL))
        channel.send(RanksReady(rank=rank, device=str(device), precision=precision, why=why))
        lead(ranks, channel, plan)
    if is_shared:
        dist.destroy_process_group()  # not by a rank that raised above: its peers still wait for it


def lead(ranks: SingleRank, channel: Channel, plan: DecodePlan) -> None:
    """Serve requests until the channel is closed."""
    batcher = Batcher(ranks, rows=plan.rows, context=plan.context)
    vocab_size = _vocab_size(plan)
    while not channel.closed:
        messages = channel.receive(wait_s=HEARTBEAT_S if batcher.is_idle else 0)
        if batcher.is_idle and not messages:
            ranks.submit(Idle())
        for message in messages:
            if isinstance(message, CancelRequest):
                batcher.cancel(message.number)
            else:
                _accept(message, batcher, channel, vocab_size=vocab_size)
        new = batcher.advance()
        if new.tokens or new.ended:
            channel.send(new)
    while batcher.in_flight:  # the other ranks have begun these steps
        batcher.finish_step()
    ranks.close()


def _accept(request: DecodeRequest, batcher: Batcher, channel: Channel, *, vocab_size: int) -> None:
    try:
        sequence = DecodingSequence.start(request, vocab_size=vocab_size, context=batcher.context)
    except ValueError as error:
        channel.send(RequestRefused(number=request.number, why=str(error)))
        return
    if sequence.tokens_left > 0:
        batcher.add(sequence)
    else:
        channel.send(NewTokens(ended=(request.number,)))


def _device(plan: DecodePlan) -> torch.device:
    if plan.device_kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(plan.threads_per_rank)
    prefer_onednn()
    return torch.device("cpu")


def _precision(plan: DecodePlan, device: torch.device) -> tuple[str, str]:
    """Return the plan's precision, or the best that the device computes fast; and why."""
    if plan.precision != "auto":
        return plan.precision, "inference.precision"
    if device.type == "cpu":
        return "fp32", "on CPUs"
    capability = torch.cuda.get_device_capability(device)
    chosen = "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    return chosen, f"compute capability {capability[0]}.{capability[1]}: bf16 from 8.0 on, fp16 from 7.0 on"


def _load(plan: DecodePlan, *, dtype: torch.dtype, device: torch.device) -> SingleRank:
    """Load this rank's share of the model; return the rank that runs it."""
    folder = Path(plan.folder)
    if not is_admitted(folder):
        return SingleRank(WholeModel(load_whole(folder, dtype=dtype).to(device), vocab_size=_vocab_size(plan)))
    sizes = {"rows": plan.rows, "context": plan.context}
    if plan.parallel == "tensor" and plan.degree > 1:
        mesh = init_device_mesh(plan.device_kind, (plan.degree,), mesh_dim_names=("tp",))
        model = load_shard(folder, dtype=dtype, tensor=mesh).to(device)
        shard = ModelShard(model, batches=1, first=True, last=True, **sizes)
        return TensorParallelRanks(shard, wire_size=wire_size(**sizes), vocab_size=_vocab_size(plan))
    if plan.parallel == "pipeline" and plan.degree > 1:
        stage = (dist.get_rank() - 1) % plan.degree
        model = load_shard(folder, dtype=dtype, stage=stage, stages=plan.degree).to(device)
        shard = ModelShard(model, batches=plan.degree, first=stage == 0, last=stage == plan.degree - 1, **sizes)
        return PipelineRanks(shard, wire_size=wire_size(**sizes))
    model = load_shard(folder, dtype=dtype).to(device)
    return SingleRank(ModelShard(model, batches=1, first=True, last=True, **sizes))


def _vocab_size(plan: DecodePlan) -> int:
    return int(json.loads((Path(plan.folder) / "config.json").read_text())["vocab_size"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))

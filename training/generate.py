"""The program that generates text: `torchrun … -m training.generate decode.json`, on as many ranks as the plan says.

Requests come through the plan's channel, tokens go back as they are made; when the channel is closed, or whoever held
it is dead, all ranks leave. The ranks share one copy of the model, or have a copy and a channel each.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from training.inference.continuous_batching import Batcher, Request
from training.inference.decode_ranks import Alone, Sharing, Stages
from training.inference.model_shard import AnyClass, Do, Part, is_described, load_part, load_whole
from training.inference.socket_channel import Channel
from training.records.decoding import DecodePlan
from training.runtime.onednn import prefer_onednn

logger = logging.getLogger(__name__)

TIMEOUT = datetime.timedelta(minutes=10)  # of one step; a dead rank is noticed by torchrun, within a second
HEARTBEAT_S = 60.0  # between two signs of life to ranks that wait
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(plan_path: Path) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    plan = DecodePlan.read(plan_path)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size != plan.degree:
        raise ValueError(f"torchrun started {size} ranks, the plan has {plan.degree}: start it with that many")
    device = _device(plan)
    shared = plan.parallel in {"tensor", "pipeline"} and plan.degree > 1
    if shared:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        precision, why = _precision(plan, device)
        ranks = _ranks(plan, dtype=DTYPES[precision], device=device)
        if shared and rank > 0:
            assert isinstance(ranks, Sharing | Stages)
            dist.barrier()
            ranks.follow()
            return
        if shared:
            dist.barrier()  # all have loaded
        channel = Channel(Path(plan.channel))
        channel.send({"ready": rank, "device": str(device), "precision": precision, "why": why, "how": ranks.how})
        lead(ranks, channel, plan)
    finally:
        if shared:
            dist.destroy_process_group()


def lead(ranks: Alone, channel: Channel, plan: DecodePlan) -> None:
    """Serve requests until the channel is closed."""
    batcher = Batcher(ranks, rows=plan.rows, context=plan.context)
    vocab_size = _vocab_size(plan)
    while not channel.closed:
        messages = channel.take(wait_s=HEARTBEAT_S if batcher.is_idle else 0)
        if batcher.is_idle and not messages:
            ranks.submit([Do.IDLE])
        for message in messages:
            _receive(message, batcher, channel, vocab_size=vocab_size)
        news = batcher.advance()
        if news.tokens or news.ended:
            channel.send({"tokens": news.tokens, "ended": news.ended})
    while batcher.on_their_way:  # ranks that have begun a step finish it
        batcher.finish_step()
    ranks.submit([Do.STOP])
    if isinstance(ranks, Stages):
        ranks.wait()


def _receive(message: dict[str, Any], batcher: Batcher, channel: Channel, *, vocab_size: int) -> None:
    if "cancel" in message:
        batcher.cancel(message["cancel"])
        return
    try:
        request = Request.of(message, vocab_size=vocab_size, context=batcher.context)
    except ValueError as error:
        channel.send({"failed": message["id"], "why": str(error)})
        return
    if request.left > 0:
        batcher.add(request)
    else:
        channel.send({"tokens": [], "ended": [request.number]})


def _device(plan: DecodePlan) -> torch.device:
    if plan.device_kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(plan.threads_per_rank)
    prefer_onednn()
    return torch.device("cpu")


def _precision(plan: DecodePlan, device: torch.device) -> tuple[str, str]:
    """As asked for, or what the device is made for, and why."""
    if plan.precision != "auto":
        return plan.precision, "asked for by inference.precision"
    if device.type == "cpu":
        return "fp32", "on CPUs"
    capability = torch.cuda.get_device_capability(device)
    chosen = "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    return chosen, f"compute capability {capability[0]}.{capability[1]}: bf16 from 8.0 on, fp16 from 7.0 on"


def _ranks(plan: DecodePlan, *, dtype: torch.dtype, device: torch.device) -> Alone:
    """This rank's part of the model, loaded, and its place among the others."""
    folder = Path(plan.folder)
    if plan.deepspeed:
        return _deepspeed_ranks(plan, dtype=dtype, device=device)
    if not is_described(folder):
        return Alone(AnyClass(load_whole(folder, dtype=dtype).to(device), vocab_size=_vocab_size(plan)))
    longest = _longest_step(plan)
    sizes = {"rows": plan.rows, "context": plan.context}
    if plan.parallel == "tensor" and plan.degree > 1:
        mesh = init_device_mesh(plan.device_kind, (plan.degree,), mesh_dim_names=("tp",))
        model = load_part(folder, dtype=dtype, tensor=mesh).to(device)
        return Sharing(
            Part(model, batches=1, first=True, last=True, **sizes), longest=longest, vocab_size=_vocab_size(plan)
        )
    if plan.parallel == "pipeline" and plan.degree > 1:
        stage = (dist.get_rank() - 1) % plan.degree
        model = load_part(folder, dtype=dtype, stage=stage, stages=plan.degree).to(device)
        part = Part(model, batches=plan.degree, first=stage == 0, last=stage == plan.degree - 1, **sizes)
        return Stages(part, longest=longest)
    model = load_part(folder, dtype=dtype).to(device)
    return Alone(Part(model, batches=1, first=True, last=True, **sizes))


def _deepspeed_ranks(plan: DecodePlan, *, dtype: torch.dtype, device: torch.device) -> Alone:
    from training.inference.deepspeed import deepspeed_model

    folder, vocab_size = Path(plan.folder), _vocab_size(plan)
    hf, how = deepspeed_model(folder, dtype=dtype, device=device, degree=plan.degree, context=plan.context)
    whole = AnyClass(hf, vocab_size=vocab_size)
    shares = plan.degree > 1
    ranks = Sharing(whole, longest=_longest_step(plan), vocab_size=vocab_size) if shares else Alone(whole)
    ranks.how = how
    return ranks


def _longest_step(plan: DecodePlan) -> int:
    return 3 + max(plan.context, 2 * plan.rows)


def _vocab_size(plan: DecodePlan) -> int:
    return int(json.loads((Path(plan.folder) / "config.json").read_text())["vocab_size"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What a plan costs per rank, as arithmetic: memory by part, time, the size of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping

from training.communication import own_bytes
from training.config import RunConfig
from training.inventory import Device, Inventory
from training.records import ModelShape, Prediction
from training.shape import flops_per_token

GIB = 2**30
PROCESS_GIB = {"cpu": 0.6, "cuda": 1.5}  # torch + transformers resident; CUDA context and NCCL buffers
ASSUMED_UTILISATION = 0.5  # of the measured matmul rate; runs record how far this was off
ZERO_STAGE = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}  # fsdp shards what stage 3 does
DESCRIBED = ("llama", "gpt2", "bert")  # architectures with an entry in training/anatomy.py
CHUNK_TOKENS = 2048  # logits are made for so many tokens at a time (training/loss.py)


def memory_gib(
    config: RunConfig, shape: ModelShape, *, device_kind: str, mesh: Mapping[str, int], micro_batch: int, precision: str
) -> dict[str, float]:
    """GiB per rank by part, for fp32 weights, gradients and AdamW moments (16 bytes per parameter in all).

    ZeRO stage 1 shards the moments, 2 also gradients, 3 also weights (Rajbhandari et al. 2020, section 5).
    Activations: s*b*h*(18 + 4*mlp/h) bytes a layer in 16 bits without attention scores, which SDPA never
    stores (Korthikanti et al. 2022, eq. 2: 34 = 18 + 16 for mlp = 4h); gated MLPs hold one product more. With full
    activation checkpointing only each layer's input. tp and pp divide a model before stages do; what is offloaded to
    the host does not count on a GPU.
    """
    offload = config.parallel.offload if device_kind == "cuda" else "none"
    tp, pp = mesh["tp"], mesh["pp"]
    stage, n, p = ZERO_STAGE[config.parallel.strategy], mesh["dp"], shape.parameters / (tp * pp)
    width_bytes = 4 if precision == "fp32" else 2
    tokens = micro_batch * config.train.context
    mlp_factor = 6 if shape.architecture not in {"gpt2", "bert"} else 4
    layer = tokens * shape.width * (18 + mlp_factor * shape.mlp_width / shape.width / tp) * width_bytes / 2
    if config.train.activation_checkpointing == "full":
        layer = tokens * shape.width * width_bytes
    in_flight = pp  # 1F1B: the first stage holds as many micro-batches as there are stages
    staged = device_kind == "cpu" and config.checkpoint.asynchronous  # on a GPU host they are not the device's
    parts = {
        "weights": 0 if offload == "parameters" else 4 * p / (n if stage >= 3 else 1),
        "gradients": 4 * p / (n if stage >= 2 else 1),
        "DeepSpeed's copy of its weights": 4 * p / n if config.parallel.strategy in {"zero1", "zero2"} else 0,
        "optimizer": 0 if offload != "none" else 8 * p / (n if stage >= 1 else 1),
        "cast weights": 0 if precision == "fp32" else 2 * p / (shape.layers if stage >= 3 else 1),
        "kept by compression": own_bytes(config, p),
        "checkpoint being written": 12 * p / n + own_bytes(config, p) if staged else 0,
        "activations": shape.layers / pp * layer * in_flight,
        "logits": _logits_bytes(shape, tokens=tokens, tp=tp, width_bytes=width_bytes),
        "process": PROCESS_GIB[device_kind] * GIB,
    }
    return {part: num_bytes / GIB for part, num_bytes in parts.items() if num_bytes}


def _logits_bytes(shape: ModelShape, *, tokens: int, tp: int, width_bytes: int) -> float:
    """A chunk of them, their gradient, and the fp32 gradient of the output layer (training/loss.py).

    Classes that we do not describe make them whole: in `width_bytes`, in fp32, their softmax, and two gradients.
    """
    if shape.architecture not in DESCRIBED:
        return tokens * shape.vocab_size * (12 + 2 * width_bytes)
    return shape.vocab_size / tp * (min(tokens, CHUNK_TOKENS) * (8 + width_bytes) + 4 * shape.width)


def matmul_tflops(device: Device, precision: str) -> float:
    """As measured; fp32 products run as tf32 where a GPU has it (training/rank.py). 0: not measured."""
    measured = device.matmul_tflops
    return measured.get("tf32" if precision == "fp32" and "tf32" in measured else precision, 0.0)


def predict(
    config: RunConfig,
    shape: ModelShape,
    inventory: Inventory,
    mesh: Mapping[str, int],
    steps: int,
    micro_batch: int,
    precision: str,
    gain: float = 1.0,
) -> Prediction:
    """`gain`: how much sooner a step ends than with equal shares, which wait for the slowest device."""
    devices = [device for host in inventory.hosts for device in host.devices]
    slowest = min(matmul_tflops(device, precision) for device in devices)
    tokens_per_s = gain * math.prod(mesh.values()) * slowest * 1e12 * ASSUMED_UTILISATION / flops_per_token(shape)
    tokens = steps * config.train.global_batch * config.train.context
    parts = memory_gib(
        config,
        shape,
        device_kind=inventory.device_kind,
        mesh=mesh,
        micro_batch=micro_batch,
        precision=precision,
    )
    return Prediction(
        memory_gib=parts,
        flops_per_token=flops_per_token(shape),
        peak_tflops=slowest,
        tokens_per_s=tokens_per_s,
        train_s=tokens / tokens_per_s if tokens_per_s else 0.0,
        checkpoint_gib=(12 * shape.parameters + mesh["dp"] * own_bytes(config, shape.parameters)) / GIB,
    )

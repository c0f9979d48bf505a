"""From a config, the shards' counts and an inventory to a RunPlan: arithmetic that can be read, nothing else.

No torch, no files, no clock: the same inputs give the same plan on any machine. What cannot work is
refused here, on the head node, with the numbers and the cure; what was chosen is said in `reasons`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from training.config import RunConfig
from training.records import Device, Host, Inventory, ModelShape, Prediction, RunPlan, TokenShards
from training.shape import ASSUMED_VOCAB, flops_per_token, model_shape, vocab_size

GIB = 2**30
BF16_GAIN_ON_CPU = 1.3  # below this bf16 is emulated or memory-bound, and fp32 costs nothing in accuracy
MEMORY_SHARE = 0.9  # of a device; the rest is left to fragmentation and to other programs
PROCESS_GIB = {"cpu": 0.6, "cuda": 1.5}  # torch + transformers resident; CUDA context and NCCL buffers
ASSUMED_UTILISATION = 0.5  # of the measured matmul rate; runs record how far this was off
ZERO_STAGE = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


def make_plan(
    config: RunConfig,
    inventory: Inventory,
    *,
    run_id: str = "dry-run",
    shards: TokenShards | None = None,
    shards_dir: str = "",
    hf_config: Mapping[str, Any] | None = None,
) -> RunPlan:
    """The plan of `config` on `inventory`.

    `shards` gives the exact vocabulary; without them (a dry run) the config's is used. `hf_config` is the
    content of config.json for `model.architecture=path` or pretrained weights.
    Raises ValueError, naming the numbers and the cure, for what cannot work.
    """
    shape = model_shape(config, vocab_size=vocab_size(config, shards, hf_config), hf_config=hf_config)
    _check_shards(config, shards)
    reasons = _assumptions(config, shards)
    precision, why = _precision(config, inventory)
    reasons.append(f"precision {precision}: {why}")
    ranks_per_host, why = _ranks(config, inventory)
    reasons.append(f"ranks {sum(ranks_per_host)}: {why}")
    world_size = sum(ranks_per_host)
    micro_batch, why = _micro_batch(config, shape, inventory, world_size, precision)
    reasons.append(f"micro-batch {micro_batch}: {why}")
    hosts = inventory.hosts[: len(ranks_per_host)]
    predicted = _predict(config, shape, inventory, world_size, micro_batch, precision)
    _check_disk(config, predicted.checkpoint_gib, hosts[0])
    return RunPlan(
        run_id=run_id,
        config=config,
        shards_dir=shards_dir,
        shards_fingerprint=shards.fingerprint if shards else "",
        vocab_size=shape.vocab_size,
        end_id=shards.end_id if shards else 0,
        mask_id=shards.mask_id if shards else None,
        shape=shape,
        device_kind=inventory.device_kind,
        mesh={"dp": world_size},
        ranks_per_host=ranks_per_host,
        threads_per_rank=min(max(1, host.cores // n) for host, n in zip(hosts, ranks_per_host, strict=True)),
        micro_batch=micro_batch,
        accumulation=config.train.global_batch // world_size // micro_batch,
        precision=precision,
        steps=config.train.steps,
        predicted=predicted,
        reasons=tuple(reasons),
    )


def _assumptions(config: RunConfig, shards: TokenShards | None) -> list[str]:
    """What is taken for granted, or will surprise."""
    reasons, tokenizer, train = [], config.data.tokenizer, config.train
    if shards is None and tokenizer.kind != "bpe" and not tokenizer.vocab_size:
        reasons.append(f"vocabulary {ASSUMED_VOCAB[tokenizer.kind]:,}: assumed, the corpus is not tokenized yet")
    if train.warmup_steps >= train.steps:
        reasons.append(f"learning rate: the {train.steps} steps end within the {train.warmup_steps} of warm-up")
    return reasons


def _check_shards(config: RunConfig, shards: TokenShards | None) -> None:
    if shards is None:
        return
    for split in ("train", "validation"):
        if shards.tokens(split) <= config.train.context:
            raise ValueError(
                f"the {split} split has {shards.tokens(split):,} tokens, one sequence needs "
                f"train.context + 1 = {config.train.context + 1}: give more text, lower train.context, "
                "or change data.validation_fraction"
            )
    if config.objective == "masked" and shards.mask_id is None:
        raise ValueError("a masked-LM model needs a tokenizer with a mask token: use data.tokenizer.kind=bpe")


# The machines


def choose_precision(inventory: Inventory) -> tuple[Literal["fp32", "bf16"], str]:
    """The precision for matrix products and why; the weakest device decides for all."""
    devices = [device for host in inventory.hosts for device in host.devices]
    if inventory.device_kind == "cuda":
        weakest = min(devices, key=_capability)
        if _capability(weakest) >= (8, 0):
            return "bf16", f"{weakest.name} has compute capability {weakest.compute_capability} (bf16 from 8.0 on)"
        return "fp32", f"{weakest.name} has compute capability {weakest.compute_capability}, bf16 needs 8.0"
    gains = [d.matmul_tflops.get("bf16", 0.0) / max(d.matmul_tflops.get("fp32", 0.0), 1e-9) for d in devices]
    gain = min(gains)
    if gain >= BF16_GAIN_ON_CPU:
        return "bf16", f"bf16 matrix products measured {gain:.1f}x as fast as fp32 on this CPU"
    return "fp32", f"bf16 measured only {gain:.1f}x as fast as fp32 on this CPU, below {BF16_GAIN_ON_CPU}x"


def _capability(device: Device) -> tuple[int, int]:
    major, _, minor = (device.compute_capability or "0.0").partition(".")
    return int(major), int(minor or 0)


def _precision(config: RunConfig, inventory: Inventory) -> tuple[Literal["fp32", "bf16"], str]:
    chosen, why = choose_precision(inventory)
    asked = config.parallel.precision
    if asked == "auto":
        return chosen, why
    if asked == "bf16" and chosen == "fp32" and inventory.device_kind == "cuda":
        raise ValueError(f"parallel.precision=bf16: {why}: use auto or fp32")
    return asked, "asked for by parallel.precision"


def _ranks(config: RunConfig, inventory: Inventory) -> tuple[tuple[int, ...], str]:
    """Ranks per host. Automatic: as many as there are devices and the global batch can be dealt to evenly."""
    slots = [len(host.devices) for host in inventory.hosts]
    available, batch, asked = sum(slots), config.train.global_batch, config.parallel.ranks
    layout = f"{len(slots)} host{'s' if len(slots) > 1 else ''} with {available} device{'s' if available > 1 else ''}"
    if config.parallel.strategy == "single":
        return (1,), "strategy single is one process"
    if asked > available:
        raise ValueError(f"parallel.ranks = {asked}, but {layout}: lower parallel.ranks or set it to 0")
    ranks = asked or next(n for n in range(min(available, batch), 0, -1) if batch % n == 0)
    why = "asked for by parallel.ranks" if asked else layout
    if not asked and ranks < available:
        why += f", of which {ranks} divide train.global_batch = {batch}; {available - ranks} stay idle"
    per_host: list[int] = []
    for slot in slots:
        per_host.append(min(slot, ranks - sum(per_host)))
    return tuple(n for n in per_host if n), why


# Memory, time, disk


def memory_gib(
    config: RunConfig, shape: ModelShape, *, device_kind: str, world_size: int, micro_batch: int, precision: str
) -> dict[str, float]:
    """GiB per rank by part, for fp32 weights, gradients and AdamW moments (16 bytes per parameter in all).

    ZeRO stage 1 shards the moments, 2 also gradients, 3 also weights (Rajbhandari et al. 2020, section 5).
    Activations: s*b*h*(18 + 4*mlp/h) bytes a layer in 16 bits without attention scores, which SDPA never
    stores (Korthikanti et al. 2022, eq. 2: 34 = 18 + 16 for mlp = 4h); gated MLPs hold one product more.
    """
    stage, n, p = ZERO_STAGE[config.parallel.strategy], world_size, shape.parameters
    width_bytes = 2 if precision == "bf16" else 4
    tokens = micro_batch * config.train.context
    mlp_factor = 6 if shape.architecture not in {"gpt2", "bert"} else 4
    layer = tokens * shape.width * (18 + mlp_factor * shape.mlp_width / shape.width) * width_bytes / 2
    parts = {
        "weights": 4 * p / (n if stage >= 3 else 1),
        "gradients": 4 * p / (n if stage >= 2 else 1),
        "optimizer": 8 * p / (n if stage >= 1 else 1),
        "cast weights": 2 * p if precision == "bf16" else 0,
        "activations": shape.layers * layer,
        "logits": tokens * shape.vocab_size * (8 + width_bytes),
        "process": PROCESS_GIB[device_kind] * GIB,
    }
    return {part: num_bytes / GIB for part, num_bytes in parts.items() if num_bytes}


def _smallest_device_gib(inventory: Inventory) -> float:
    return min(device.memory_gib for host in inventory.hosts for device in host.devices)


def _micro_batch(
    config: RunConfig, shape: ModelShape, inventory: Inventory, world_size: int, precision: str
) -> tuple[int, str]:
    sequences, asked = config.train.global_batch // world_size, config.train.micro_batch
    limit = MEMORY_SHARE * _smallest_device_gib(inventory)

    def needed(micro_batch: int) -> dict[str, float]:
        return memory_gib(
            config,
            shape,
            device_kind=inventory.device_kind,
            world_size=world_size,
            micro_batch=micro_batch,
            precision=precision,
        )

    if asked and sequences % asked:
        raise ValueError(
            f"{sequences} sequences per rank (train.global_batch = {config.train.global_batch} / {world_size} ranks) "
            f"are no multiple of train.micro_batch = {asked}: change one of them, or set train.micro_batch=0"
        )
    candidates = [asked] if asked else [n for n in range(sequences, 0, -1) if sequences % n == 0]
    for micro_batch in candidates:
        total = sum(needed(micro_batch).values())
        if total <= limit:
            why = f"{total:.2f} GiB predicted of {limit:.2f} GiB usable per rank"
            return micro_batch, "asked for, " + why if asked else "the largest that fits, " + why
    parts = needed(candidates[-1])
    raise ValueError(
        f"the model does not fit: {sum(parts.values()):.1f} GiB per rank at micro-batch {candidates[-1]} ("
        + ", ".join(f"{part} {gib:.1f}" for part, gib in parts.items())
        + f"), {limit:.1f} GiB usable: use a higher ZeRO stage (parallel.strategy=zero3), more ranks, "
        "a smaller model, or a smaller train.micro_batch or train.context"
    )


def _predict(
    config: RunConfig, shape: ModelShape, inventory: Inventory, world_size: int, micro_batch: int, precision: str
) -> Prediction:
    devices = [device for host in inventory.hosts for device in host.devices]
    slowest = min(device.matmul_tflops.get(precision, 0.0) for device in devices)
    tokens_per_s = world_size * slowest * 1e12 * ASSUMED_UTILISATION / flops_per_token(shape)
    tokens = config.train.steps * config.train.global_batch * config.train.context
    parts = memory_gib(
        config,
        shape,
        device_kind=inventory.device_kind,
        world_size=world_size,
        micro_batch=micro_batch,
        precision=precision,
    )
    return Prediction(
        memory_gib=parts,
        flops_per_token=flops_per_token(shape),
        tokens_per_s=tokens_per_s,
        train_s=tokens / tokens_per_s if tokens_per_s else 0.0,
        checkpoint_gib=12 * shape.parameters / GIB,
    )


def _check_disk(config: RunConfig, checkpoint_gib: float, host: Host) -> None:
    """One checkpoint more than kept (the new one is whole before the old one goes); a checkpoint is 3 x the weights.

    The export (Hugging Face and ONNX) and its registered copy are 2 x the weights each.
    """
    needed = checkpoint_gib * (config.checkpoint.keep_last + 1 + 4 / 3)
    if needed > host.disk_free_gib:
        raise ValueError(
            f"{config.checkpoint.keep_last} + 1 checkpoints of {checkpoint_gib:.2f} GiB and the registered export need "
            f"{needed:.1f} GiB, {host.name} has {host.disk_free_gib:.1f} GiB free: free some, lower "
            "checkpoint.keep_last, or set SHARDLINE_HOME to a larger disk"
        )

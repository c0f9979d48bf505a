"""From a config, the shards' counts and an inventory to a RunPlan: arithmetic that can be read, nothing else.

No torch, no files, no clock: the same inputs give the same plan on any machine. What cannot work is
refused here, on the head node, with the numbers and the cure; what was chosen is said in `reasons`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from training.config import RunConfig
from training.cost import DESCRIBED, memory_gib, predict
from training.packing import Epoch
from training.records import Device, Host, Inventory, ModelShape, RunPlan, TokenShards
from training.schedule import check_schedule
from training.shape import ASSUMED_VOCAB, model_shape, vocab_size

BF16_GAIN_ON_CPU = 1.3  # below this bf16 is emulated or memory-bound, and fp32 costs nothing in accuracy
MEMORY_SHARE = 0.9  # of a device; the rest is left to fragmentation and to other programs


def make_plan(
    config: RunConfig,
    inventory: Inventory,
    *,
    run_id: str = "dry-run",
    shards: TokenShards | None = None,
    shards_dir: str = "",
    epoch: Epoch | None = None,
    hf_config: Mapping[str, Any] | None = None,
) -> RunPlan:
    """The plan of `config` on `inventory`.

    `shards` gives the exact vocabulary; without them (a dry run) the config's is used. `epoch` (packing.one_epoch)
    is what max_epochs is counted with; without it that limit is left out. `hf_config` is the content of config.json
    for `model.architecture=path` or pretrained weights.
    Raises ValueError, naming the numbers and the cure, for what cannot work.
    """
    shape = model_shape(config, vocab_size=vocab_size(config, shards, hf_config), hf_config=hf_config)
    _check_shards(config, shards)
    _check_packing(config, shape)
    steps, sequences, limit = length(config, epoch)
    check_schedule(config.train, steps=steps)
    reasons = [f"{steps} steps: {limit}", *_assumptions(config, shards, steps=steps)]
    precision, why = _precision(config, inventory)
    reasons.append(f"precision {precision}: {why}")
    ranks_per_host, why = _ranks(config, inventory)
    reasons.append(f"ranks {sum(ranks_per_host)}: {why}")
    mesh = _mesh(config, shape, sum(ranks_per_host))
    micro_batch, why = _micro_batch(config, shape, inventory, mesh, precision)
    reasons.append(f"micro-batch {micro_batch}: {why}")
    accumulation = config.train.global_batch // mesh["dp"] // micro_batch
    _check_accumulation(config, mesh, accumulation)
    hosts = inventory.hosts[: len(ranks_per_host)]
    predicted = predict(config, shape, inventory, mesh, steps, micro_batch, precision)
    _check_disk(config, predicted.checkpoint_gib, steps, hosts[0])
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
        mesh=mesh,
        ranks_per_host=ranks_per_host,
        threads_per_rank=min(max(1, host.cores // n) for host, n in zip(hosts, ranks_per_host, strict=True)),
        micro_batch=micro_batch,
        accumulation=accumulation,
        precision=precision,
        steps=steps,
        sequences=sequences,
        predicted=predicted,
        reasons=tuple(reasons),
    )


def _assumptions(config: RunConfig, shards: TokenShards | None, *, steps: int) -> list[str]:
    """What is taken for granted, or will surprise."""
    reasons, tokenizer, train = [], config.data.tokenizer, config.train
    if shards is None and tokenizer.kind != "bpe" and not tokenizer.vocab_size:
        reasons.append(f"vocabulary {ASSUMED_VOCAB[tokenizer.kind]:,}: assumed, the corpus is not tokenized yet")
    if train.warmup_steps >= steps:
        reasons.append(f"learning rate: the {steps} steps end within the {train.warmup_steps} of warm-up")
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


def _check_packing(config: RunConfig, shape: ModelShape) -> None:
    if config.train.packing == "documents" and shape.architecture not in DESCRIBED:
        raise ValueError(
            f"train.packing=documents needs attention that we can mask, of {', '.join(DESCRIBED)}; a "
            f"{shape.architecture} model has its own: set train.packing=padded, or stream"
        )


# The machines


def choose_precision(inventory: Inventory) -> tuple[Literal["fp32", "bf16", "fp16"], str]:
    """The precision for matrix products and why; the weakest device decides for all."""
    devices = [device for host in inventory.hosts for device in host.devices]
    if inventory.device_kind == "cuda":
        weakest = min(devices, key=_capability)
        if _capability(weakest) >= (8, 0):
            return "bf16", f"{weakest.name} has compute capability {weakest.compute_capability} (bf16 from 8.0 on)"
        which = f"{weakest.name} has compute capability {weakest.compute_capability}"
        if _capability(weakest) >= (7, 0):
            return "fp16", f"{which}: fp16 tensor cores (from 7.0 on), no bf16 (from 8.0 on)"
        return "fp32", f"{which}, fp16 needs 7.0 and bf16 8.0"
    gains = [d.matmul_tflops.get("bf16", 0.0) / max(d.matmul_tflops.get("fp32", 0.0), 1e-9) for d in devices]
    gain = min(gains)
    if gain >= BF16_GAIN_ON_CPU:
        return "bf16", f"bf16 matrix products measured {gain:.1f}x as fast as fp32 on this CPU"
    return "fp32", f"bf16 measured only {gain:.1f}x as fast as fp32 on this CPU, below {BF16_GAIN_ON_CPU}x"


def _capability(device: Device) -> tuple[int, int]:
    major, _, minor = (device.compute_capability or "0.0").partition(".")
    return int(major), int(minor or 0)


def _precision(config: RunConfig, inventory: Inventory) -> tuple[Literal["fp32", "bf16", "fp16"], str]:
    chosen, why = choose_precision(inventory)
    asked = config.parallel.precision
    if asked == "auto":
        return chosen, why
    if inventory.device_kind == "cuda" and (asked, chosen) in {("bf16", "fp16"), ("bf16", "fp32"), ("fp16", "fp32")}:
        raise ValueError(f"parallel.precision={asked}: {why}: use auto or fp32")
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
    model_ranks = config.parallel.tp * config.parallel.pp
    if available < model_ranks or (asked and asked % model_ranks):
        per_host_slots = f"{len(slots)} nodes x {slots[0]} devices" if len(set(slots)) == 1 else layout
        raise ValueError(
            f"{per_host_slots} = {asked or available} ranks, not divisible by tp*pp = {model_ranks}: "
            "change parallel.tp, parallel.pp or the host list"
        )
    replicas = next(n for n in range(min(available // model_ranks, batch), 0, -1) if batch % n == 0)
    ranks = asked or replicas * model_ranks
    why = "asked for by parallel.ranks" if asked else layout
    if not asked and ranks < available:
        why += f", of which {ranks} divide train.global_batch = {batch}; {available - ranks} stay idle"
        if model_ranks > 1:
            why = f"{layout}, dealt as {replicas} x tp*pp = {model_ranks}; {available - ranks} stay idle"
    per_host: list[int] = []
    for slot in slots:
        per_host.append(min(slot, ranks - sum(per_host)))
    return tuple(n for n in per_host if n), why


def _mesh(config: RunConfig, shape: ModelShape, world_size: int) -> dict[str, int]:
    """Sizes of the axes, outermost first: tp peers talk in every layer, so they are neighbours on one host."""
    tp, pp, stages = config.parallel.tp, config.parallel.pp, config.parallel.pp * config.parallel.pp_stages_per_rank
    if (tp > 1 or pp > 1) and shape.architecture not in DESCRIBED:
        raise ValueError(
            f"a {shape.architecture} model has no tensor or pipeline plan (there is one for "
            f"{', '.join(DESCRIBED)}): set parallel.tp=1 parallel.pp=1 and use ddp, fsdp, zero1, zero2 or zero3"
        )
    for what, size in (
        ("attention heads", shape.heads),
        ("key/value heads", shape.kv_heads),
        ("MLP width", shape.mlp_width),
    ):
        if size % tp:
            raise ValueError(f"{size} {what} cannot be shared by parallel.tp = {tp}: choose a tp that divides {size}")
    if shape.layers < stages:
        raise ValueError(
            f"{shape.layers} layers cannot fill parallel.pp x pp_stages_per_rank = {stages} stages: "
            "lower parallel.pp or parallel.pp_stages_per_rank"
        )
    return {"pp": pp, "dp": world_size // (tp * pp), "tp": tp}


def _check_accumulation(config: RunConfig, mesh: dict[str, int], accumulation: int) -> None:
    """1F1B fills its stages with at least as many micro-batches as ranks; interleaved, in rounds of as many.

    DDP's static graph cannot begin with a micro-batch that is not reduced (an assertion in torch 2.13's reducer).
    """
    if config.parallel.static_graph and accumulation > 1:
        raise ValueError(
            f"parallel.static_graph with {accumulation} accumulated micro-batches is more than DDP can: set "
            f"train.micro_batch={config.train.global_batch // mesh['dp']} or parallel.static_graph=false"
        )
    pp, interleaved = mesh["pp"], config.parallel.pp_stages_per_rank > 1
    if accumulation < pp or (interleaved and accumulation % pp):
        need = f"a multiple of {pp}" if interleaved else f"at least {pp}"
        raise ValueError(
            f"{accumulation} micro-batches per step and pipeline, parallel.pp = {pp} needs {need}: "
            "raise train.global_batch or lower train.micro_batch"
        )


def length(config: RunConfig, epoch: Epoch | None) -> tuple[int, int, str]:
    """Steps, and sequences in all of them, under every limit that can be counted beforehand; and which limit it is.

    Whole batches, but where max_epochs ends: the last is smaller there, so that each pass takes every sequence once.
    """
    train, sequence_tokens = config.train, float(config.train.context)
    if epoch is not None:
        sequence_tokens = epoch.tokens / epoch.sequences  # on average: packing=padded leaves some of them empty
    limits = [(train.steps, train.steps * train.global_batch, "train.steps")]
    if train.max_tokens:
        steps = max(1, int(train.max_tokens / sequence_tokens / train.global_batch))
        limits.append((steps, steps * train.global_batch, f"train.max_tokens = {train.max_tokens:,}"))
    if train.max_epochs and epoch is not None:
        sequences = max(1, round(train.max_epochs * epoch.sequences))
        why = f"train.max_epochs = {train.max_epochs:g}, of {epoch.sequences:,} sequences each"
        limits.append((-(-sequences // train.global_batch), sequences, why))
    return min(limits)


# Memory, time, disk


def _smallest_device_gib(inventory: Inventory) -> float:
    return min(device.memory_gib for host in inventory.hosts for device in host.devices)


def _micro_batch(
    config: RunConfig, shape: ModelShape, inventory: Inventory, mesh: Mapping[str, int], precision: str
) -> tuple[int, str]:
    sequences, asked = config.train.global_batch // mesh["dp"], config.train.micro_batch
    limit = MEMORY_SHARE * _smallest_device_gib(inventory)

    def needed(micro_batch: int) -> dict[str, float]:
        return memory_gib(
            config,
            shape,
            device_kind=inventory.device_kind,
            mesh=mesh,
            micro_batch=micro_batch,
            precision=precision,
        )

    if asked and sequences % asked:
        raise ValueError(
            f"{sequences} sequences per data-parallel rank (train.global_batch = {config.train.global_batch} / "
            f"{mesh['dp']}) are no multiple of train.micro_batch = {asked}: change one of them, or set "
            "train.micro_batch=0"
        )
    fitting = [n for n in range(sequences, 0, -1) if sequences % n == 0]
    filling = [n for n in fitting if sequences // n >= mesh["pp"] and sequences // n % mesh["pp"] == 0]
    candidates = [asked] if asked else filling or fitting
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


def _check_disk(config: RunConfig, checkpoint_gib: float, steps: int, host: Host) -> None:
    """One checkpoint more than kept (the new one is whole before the old one goes); a checkpoint is 3 x the weights.

    The export (Hugging Face and ONNX) and its registered copy are 2 x the weights each.
    """
    saving = config.checkpoint
    kept = saving.keep_last + saving.keep_best + (steps // saving.keep_every_steps if saving.keep_every_steps else 0)
    needed = checkpoint_gib * (kept + 1 + 4 / 3)
    if needed > host.disk_free_gib:
        raise ValueError(
            f"{kept} + 1 checkpoints of {checkpoint_gib:.2f} GiB and the registered export need {needed:.1f} GiB, "
            f"{host.name} has {host.disk_free_gib:.1f} GiB free: free some, lower checkpoint.keep_last, raise "
            "checkpoint.keep_every_steps, or set SHARDLINE_HOME to a larger disk"
        )

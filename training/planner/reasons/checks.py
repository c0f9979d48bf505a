"""What a run cannot be, of its config, its text and its layout: each refused with the numbers and the cure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.config.parallel import Precision
from training.config.run import RunConfig
from training.config.serving import InferenceConfig
from training.facts.families import types_counting_from_pad, why_not
from training.planner.chosen_layout import ChosenLayout
from training.planner.model_shape import pad_id, shape_of_hf
from training.records.inventory import Host
from training.records.plan import ModelShape
from training.records.record import read_fields
from training.records.token_shards import TokenShards
from training.shards.packing import OWN_DOCUMENT


def check_run(config: RunConfig, shape: ModelShape, shards: TokenShards | None, hf_config: Mapping[str, Any]) -> None:
    """Raise ValueError for what cannot work on any machine."""
    _check_shards(config, shards)
    _check_packing(config, shape)
    _check_training(config, shape, hf_config)


def _check_training(config: RunConfig, shape: ModelShape, hf_config: Mapping[str, Any]) -> None:
    """Raise ValueError for what this model cannot be trained with."""
    if config.train.optimizer == "muon" and shape.sizes.why_not_muon:
        raise ValueError(shape.sizes.why_not_muon)
    if config.train.compile is True and hf_config.get("output_router_logits"):
        raise ValueError(
            "config.json of model.path has output_router_logits=true, and the balance loss cannot be collected from "
            "compiled layers: set train.compile=false, or output_router_logits to false"
        )


def _check_shards(config: RunConfig, shards: TokenShards | None) -> None:
    if shards is None:
        return
    for split in ("train", "validation"):
        if shards.tokens(split) <= config.train.context:
            raise ValueError(
                f"the {split} split has {shards.tokens(split):,} tokens, one sequence needs "
                f"train.context + 1 = {config.train.context + 1:,}: give more text, lower train.context, "
                "or change data.validation_fraction"
            )
    if config.objective == "masked" and shards.mask_id is None:
        raise ValueError("a masked-LM model needs a tokenizer with a mask token: use data.tokenizer.kind=bpe")


def _check_packing(config: RunConfig, shape: ModelShape) -> None:
    packing = config.train.packing
    if packing in OWN_DOCUMENT and (why := why_not(shape, "documents")):
        raise ValueError(
            f"train.packing={packing} keeps attention within documents, which models of type {shape.architecture} "
            f"cannot: {why}: set train.packing=padded, or stream"
        )


def check_positions(config: RunConfig, hf: Mapping[str, Any], *, end_id: int) -> list[str]:
    """Return sentences on the table of positions of a class that counts them from its pad token's ID + 1 on.

    `end_id`: the end token, which is the pad token of a model with random weights. Raises ValueError if the context
    exceeds the positions that are left.
    """
    if hf.get("model_type") not in types_counting_from_pad():
        return []
    pad, rows = pad_id(hf), int(hf.get("max_position_embeddings") or 0)
    positions = rows - pad - 1
    if config.train.context > positions:
        raise ValueError(
            f"train.context = {config.train.context} exceeds the {positions} positions of model.path: its type is "
            f"{hf['model_type']}, which counts them from its pad token's ID + 1 = {pad + 1} on, of "
            f"max_position_embeddings = {rows}: lower train.context"
        )
    if config.model.init == "pretrained" or end_id == pad:
        return []
    return [
        f"positions: type {hf['model_type']} counts them from its pad token's ID + 1 on, here {end_id + 1}, so its "
        f"table gets {rows + end_id - pad:,} rows for the {positions:,} positions of config.json"
    ]


def check_choice(config: RunConfig, chosen: ChosenLayout, hf_config: Mapping[str, Any]) -> None:
    """Raise ValueError for fields that do not work with the chosen layout and precisions."""
    shape, kind = chosen.question.shape, chosen.cluster.kind
    tp, precisions = chosen.mesh["tp"], chosen.split.precisions
    _check_residual(config, shape, precisions)
    _check_fp8_by(config, shape, kind, precisions, tp=tp)
    _check_async_tp(config, kind, tp=tp, split=chosen.layout.sequence_parallel)
    _check_cross_attention(config, chosen, hf_config)


def _check_cross_attention(config: RunConfig, chosen: ChosenLayout, hf: Mapping[str, Any]) -> None:
    """Raise ValueError for parameters that get no gradient under a strategy that needs one of each."""
    layout = chosen.layout
    waits = layout.row.engine == "ddp" and layout.dp > 1
    needs_all = (waits and layout.pp == 1) or (layout.row.by_deepspeed and layout.tp == layout.pp == 1)
    if hf.get("add_cross_attention") and needs_all and not config.train.freeze:
        raise ValueError(
            "config.json of model.path has add_cross_attention=true: a language model has no encoder to attend to, so "
            f"these layers get no gradient, and {layout.strategy} needs one for each trained parameter: leave them out "
            "of training with train.freeze='[\"*cross*\"]'"
        )


def _check_residual(config: RunConfig, shape: ModelShape, precisions: Sequence[Precision]) -> None:
    if config.train.residual == "fp32":
        return
    if other := sorted({*precisions} - {"bf16", "fp8"}):
        raise ValueError(
            f"train.residual=bf16 goes with products in bf16 or fp8, and these devices' are in {', '.join(other)}: set "
            "train.residual=fp32, or parallel.precision=bf16 where they have it"
        )
    if why := why_not(shape, "pp"):
        raise ValueError(
            f"train.residual=bf16 does not work with models of type {shape.architecture}: {why}: set "
            "train.residual=fp32, or parallel.strategy=fsdp, which carries bf16 in any model"
        )


def _check_fp8_by(
    config: RunConfig, shape: ModelShape, device_kind: str, precisions: Sequence[Precision], *, tp: int
) -> None:
    if config.parallel.fp8_by == "shardline":
        return
    faults = {
        f"computes in {', '.join(sorted({*precisions}))} (parallel.precision)": "fp8" not in precisions,
        f"runs on {device_kind}, not on GPUs": device_kind != "cuda",
        f"has train.compile={config.train.compile}, and its casts are slow unless compiled": (
            config.train.compile is not True
        ),
        f"has a model of type {shape.architecture}, whose layers are not torch's Linear": shape.architecture
        not in {"llama", "bert"},
        f"has parallel.tp = {tp}, whose pieces of layers are our own": tp > 1,
    }
    _refuse("parallel.fp8_by=torchao", "parallel.fp8_by=shardline", faults)


def _check_async_tp(config: RunConfig, device_kind: str, *, tp: int, split: bool) -> None:
    if not config.parallel.async_tp:
        return
    faults = {
        f"runs on {device_kind}, not on GPUs": device_kind != "cuda",
        "has parallel.tp = 1": tp == 1,
        "has no sequence parallelism (parallel.sequence_parallel), whose gathers and sums it divides": not split,
        f"has train.compile={config.train.compile}, and it is made of compiled layers": config.train.compile
        is not True,
    }
    _refuse("parallel.async_tp=true", "parallel.async_tp=false", faults)


def _refuse(asked: str, cure: str, faults: Mapping[str, bool]) -> None:
    """Raise ValueError with those faults of the run that are true."""
    if found := [fault for fault, is_so in faults.items() if is_so]:
        text = "; it ".join(found)
        raise ValueError(f"{asked} does not work here, because this run {text}. Change that, or set {cure}")


# Disks


def disk_gib_needed(config: RunConfig, *, checkpoint_gib: float, steps: int) -> float:
    """Return the GiB that a run's checkpoints, its export and the export's registered copy take at most.

    There is one more checkpoint than are kept, because the new one is complete before the old one is deleted. A
    checkpoint has 3 x the bytes of the weights; the export (Hugging Face and ONNX) and its registered copy have 2 x
    each.
    """
    return checkpoint_gib * (_kept_checkpoints(config, steps) + 1 + 4 / 3)


def _kept_checkpoints(config: RunConfig, steps: int) -> int:
    saving = config.checkpoint
    return (
        max(saving.keep_last, config.train.num_averaged)
        + saving.keep_best
        + (steps // saving.keep_every_steps if saving.keep_every_steps else 0)
    )


def check_disk(config: RunConfig, checkpoint_gib: float, steps: int, host: Host) -> None:
    """Raise ValueError if checkpoints and exports do not fit on the disk."""
    needed = disk_gib_needed(config, checkpoint_gib=checkpoint_gib, steps=steps)
    if needed > host.disk_free_gib:
        raise ValueError(
            f"{_kept_checkpoints(config, steps)} + 1 checkpoints of {checkpoint_gib:.2f} GiB and the registered export "
            f"need {needed:.1f} GiB, "
            f"{host.name} has {host.disk_free_gib:.1f} GiB free: free some space, lower checkpoint.keep_last, raise "
            "checkpoint.keep_every_steps, or set SHARDLINE_HOME to a larger disk"
        )


# Divided over devices for inference


def check_inference(folder: Path, inference: InferenceConfig) -> None:
    """Raise ValueError, with the numbers and the cure, if the model cannot be divided as configured."""
    degree = inference.degree
    if inference.parallel == "none" and degree > 1:
        raise ValueError(
            f"inference.degree = {degree}, but inference.parallel = none: set inference.parallel to data (copies), "
            "tensor (split matrices) or pipeline (distributed layers), or leave the degree out"
        )
    if inference.parallel not in {"tensor", "pipeline"}:
        return
    settings = dict(read_fields(folder / "config.json"))
    shape = shape_of_hf(settings, vocab_size=int(settings["vocab_size"]))
    if why := why_not(shape, "tp" if inference.parallel == "tensor" else "pp"):
        raise ValueError(
            f"models of type {shape.architecture} have no inference.parallel={inference.parallel}: {why}: set "
            "inference.parallel=data"
        )
    if inference.parallel == "pipeline" and shape.layers < degree:
        raise ValueError(
            f"{shape.layers} layers cannot fill inference.degree = {degree} stages: lower it to {shape.layers} or less"
        )
    kv_heads = [("key/value heads", heads) for heads in (shape.kv_heads, *shape.some_kv_heads)]
    for what, size in (("attention heads", shape.heads), *kv_heads):
        if inference.parallel == "tensor" and size % degree:
            raise ValueError(
                f"{size} {what} cannot be shared by inference.degree = {degree} ranks: choose a degree that divides "
                f"{size}, or inference.parallel=pipeline"
            )

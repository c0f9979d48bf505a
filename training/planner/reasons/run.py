"""What a plan assumes of a run, and what may surprise, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.config.data import ASSUMED_VOCAB
from training.config.run import RunConfig
from training.config.size_rule import describe as describe_size
from training.config.train import warn_of_warmup
from training.facts.families import why_not
from training.planner.chosen_layout import ChosenLayout
from training.planner.cluster import MEMORY_SHARE
from training.planner.gpu_catalog import slow_devices
from training.planner.precision import FP8_MULTIPLE, ChosenPrecision
from training.planner.price.pricing import copy_s, host_copies_gib
from training.planner.question import Question
from training.planner.reasons.hosts import assumptions
from training.planner.run_length import RunLength
from training.records.inventory import Host
from training.records.plan import ModelShape, Prediction
from training.records.token_shards import TokenShards
from training.records.words import counted, format_duration

FURTHER_WORDS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # multi-token prediction
SHARED_MEMORY = "/dev/shm"


def why_run(config: RunConfig, chosen: ChosenLayout, run: RunLength, shards: TokenShards | None) -> list[str]:
    """Return sentences on a run's length and batches, and on what its plan assumes."""
    shape, inventory = chosen.question.shape, chosen.question.inventory
    slow = (f"{host}: {why}" for (host, _), why in slow_devices(inventory).items())
    return [
        f"{counted(run.steps, 'step')}: {run.why}",
        *_why_batches(run),
        *_why_average(config, run.steps),
        *_why_muon(chosen.best.seconds),
        *describe_size(config),
        *_assumptions(config, shards, steps=run.steps),
        *_why_trial(config, chosen),
        *assumptions(inventory),
        *slow,
        *(_why_fp8(shape) if "fp8" in chosen.split.precisions else []),
    ]


def _why_batches(run: RunLength) -> list[str]:
    """Return a sentence on the sizes of the global batch, if it grows."""
    first, *later = run.batches.phases
    if not later:
        return []
    sizes = "; ".join(
        f"{phase.global_batch:,} from step {phase.first_step + 1:,} on"
        + (f", which the {counted(run.steps, 'step')} do not reach" if phase.first_step >= run.steps else "")
        for phase in later
    )
    return [
        f"batch: {first.global_batch:,} sequences in a step, {sizes} (train.batch_schedule); micro-batches keep their "
        "size, larger steps accumulate more of them; step times are means of all steps"
    ]


def _why_average(config: RunConfig, steps: int) -> list[str]:
    """Return a sentence on train.average. Raises ValueError if the run makes fewer checkpoints than it takes."""
    train, every = config.train, config.checkpoint.every_steps
    number, made = train.num_averaged, -(-steps // every)
    if made < number:
        raise ValueError(
            f"train.average={train.average} takes the last {number} checkpoints (train.average_checkpoints), and "
            f"{counted(steps, 'step')} with checkpoint.every_steps = {every} make {made}: set "
            f"checkpoint.every_steps={max(1, steps // number)} or train.average=none"
        )
    about = f"average: the {train.average} of the last {number} checkpoints' weights is evaluated beside the last ones"
    chosen = f"export.weights={config.export.weights} chooses which are exported; the checkpoints are kept for it"
    return [f"{about}, and {chosen}"] if number else []


def _why_muon(seconds: Mapping[str, float]) -> list[str]:
    """Return a sentence if Muon's products are more than a tenth of a step. `seconds`: of a step by part."""
    if (products := seconds.get("Muon's products", 0.0)) < sum(seconds.values()) / 10:
        return []
    return [
        f"muon: its products take {products / sum(seconds.values()):.0%} of a step, {1000 * products:.0f} ms; a larger "
        "train.global_batch has fewer steps of them, train.optimizer=adamw none"
    ]


def _assumptions(config: RunConfig, shards: TokenShards | None, *, steps: int) -> list[str]:
    """Return sentences on the plan's assumptions, and on facts that may surprise."""
    reasons, tokenizer, train = [], config.data.tokenizer, config.train
    of_weights = config.model.init == "pretrained"
    if shards is None and tokenizer.kind != "bpe" and not (tokenizer.vocab_size or of_weights):
        reasons.append(
            f"vocabulary {ASSUMED_VOCAB[tokenizer.kind]:,}: assumed, because the corpus is not tokenized yet"
        )
    reasons += warn_of_warmup(train, steps=steps)
    if train.on_spike != "continue":
        does = {"skip": "its update is skipped", "rewind": "training goes on from the checkpoint before, without it"}
        reasons.append(
            f"spikes: train.on_spike={train.on_spike}: a step whose loss or gradient norm is more than "
            f"{train.spike_deviations:g} standard deviations above the mean of the last {train.spike_window_steps} "
            f"updates is a spike, and {does[train.on_spike]}"
        )
    if train.z_loss:
        reasons.append(
            f"loss: train.z_loss={train.z_loss:g} adds {train.z_loss:g} x log(Z)^2 of every predicted token, logged as "
            "z_loss; loss, val_loss and evaluation stay cross-entropy"
        )
    return reasons


def _why_trial(config: RunConfig, chosen: ChosenLayout) -> list[str]:
    """Return a sentence on the trial that precedes training, if there is one."""
    if not wants_trial(config, chosen.cluster.kind, compiled=chosen.config.train.compile is True):
        return []
    if config.train.micro_batch:
        return ["compile: a trial of a few steps will confirm that compiled layers work and fit"]
    return ["micro-batch: predicted to fit; a trial of a few steps will confirm this before training"]


def _why_fp8(shape: ModelShape) -> list[str]:
    """Return a sentence on what fp8 leaves in bf16, if it leaves anything."""
    if (share := shape.sizes.fp8_share) == 1:
        return []
    return [
        f"fp8: computes {share:.0%} of the numbers that a token is multiplied with in the layers; experts, routers "
        f"and sizes that are no multiples of {FP8_MULTIPLE} stay in bf16"
    ]


def other_losses(hf: Mapping[str, Any]) -> list[str]:
    """Return sentences on losses beside cross-entropy that a config.json asks for."""
    reasons = []
    if hf.get("output_router_logits"):
        reasons.append(
            "loss: output_router_logits=true in config.json adds the class's balance loss of experts to cross-entropy. "
            "The class computes it in each micro-batch, so another train.micro_batch gives other values; the metric "
            "auxiliary_loss is the mean of a step's micro-batches"
        )
    reasons += [
        f"loss: config.json has {field}={hf[field]}; the class that transformers trains has no such layers: none is "
        "trained or exported, and the loss is that of the next word alone"
        for field in FURTHER_WORDS
        if hf.get(field)
    ]
    return reasons


def wants_trial(config: RunConfig, device_kind: str, *, compiled: bool) -> bool:
    """Whether a trial precedes training, by train.micro_batch_trial.

    auto: on GPUs, if the plan chooses the size of the micro-batch, or to compile; on CPUs, if it chooses to compile a
    model at model.path, as kernels were made of few types' layers.
    """
    train = config.train
    if train.micro_batch_trial != "auto":
        return train.micro_batch_trial == "always"
    chooses_size = not train.micro_batch and isinstance(config.parallel.shares, str)
    chose_to_compile = compiled and train.compile == "auto"
    if device_kind != "cuda":
        return chose_to_compile and bool(config.model.path)
    return chooses_size or chose_to_compile


def compile_refusal(question: Question) -> str:
    """Return the reason why layers cannot be compiled, or may not compile; empty if they can."""
    shape = question.shape
    if found := question.config.parallel.row.cannot_compile:
        return f"{question.config.parallel.strategy} {found}"
    if why := why_not(shape, "compile"):
        return f"layers of type {shape.architecture} were not seen to compile: {why}; train.compile=true tries it"
    for host in question.inventory.hosts:
        if host.compile_lacks:
            return f"on {host.name} {host.compile_lacks}"
    return ""


def why_compiled(is_on: bool, *, saved_s: float, eager_s: float, compiling_s: float) -> str:
    """Say why layers are compiled, or are not. `eager_s`: of the training without."""
    costs = f"about {format_duration(compiling_s)} to begin with"
    if not is_on:
        saved = f"{format_duration(max(0.0, saved_s))} of {format_duration(eager_s)}"
        return f"compile off: it would save {saved} of training, and takes {costs}"
    return (
        f"compile on: a step is predicted to take {saved_s / eager_s:.1%} less time, {format_duration(saved_s)} in "
        f"all, for {costs}; all hosts have what it needs"
    )


def why_precision(asked: ChosenPrecision, other: ChosenPrecision, as_long: float, *, is_taken: bool) -> str:
    """Say what a step takes in the precision that is not taken. `as_long`: in `other` over that in `asked`."""
    if is_taken:
        return f"precision: with {asked} on all devices a step would take {1 / as_long:.2f}x as long"
    why = f"precision: with {other}{' on all devices' * asked.is_mixed} a step would take {as_long:.2f}x as long"
    return why + ", which is less than the prediction can tell apart" * (as_long < 1 and not asked.is_mixed)


# Copies in memory


def price_memory_copies(chosen: ChosenLayout, predicted: Prediction) -> str:
    """One sentence with the price of the copies. Raises ValueError if a host's memory is too small for them."""
    config, cluster = chosen.question.config, chosen.cluster
    every, ranks = config.checkpoint.memory_every_steps, cluster.ranks_per_host
    checkpoint_gib, step_s = predicted.checkpoint_gib, predicted.step_ms / 1000
    needed = host_copies_gib(checkpoint_gib, ranks)
    for host, gib, num_ranks in zip(chosen.hosts, needed, ranks, strict=True):
        _check_room(config, host, copies_gib=gib, buffers_gib=checkpoint_gib * num_ranks / sum(ranks))
    seconds = copy_s(checkpoint_gib, cluster, threads=chosen.threads_per_rank, step_s=step_s)
    return (
        f"copies in memory every {every} steps: up to {max(needed):.2f} GiB on each host, "
        f"{seconds:.2g} s each, {seconds / every / step_s:.1%} of the steps' time"
        + ("" if cluster.num_hosts > 1 else "; one host keeps no copy for another, so they are lost with it")
    )


def _check_room(config: RunConfig, host: Host, *, copies_gib: float, buffers_gib: float) -> None:
    """Raises ValueError unless the copies, and the buffers they are written from, fit into the host's memory."""
    saving = config.checkpoint
    room, what = MEMORY_SHARE * host.memory_gib - buffers_gib, f"{MEMORY_SHARE:.0%} of its memory, less buffers,"
    in_containers = config.launch.launcher != "local"  # their own /dev/shm is another; preflight looks at the host's
    if host.shared_memory_gib is not None and saving.memory_dir.startswith(SHARED_MEMORY) and not in_containers:
        room, what = min((room, what), (host.shared_memory_gib, SHARED_MEMORY))
    if copies_gib > room:
        raise ValueError(
            f"checkpoint.memory_every_steps = {saving.memory_every_steps} needs {copies_gib:.2f} GiB of {host.name}'s "
            f"memory for copies of the training state, {what} has {max(0.0, room):.2f} GiB: set it to 0, train on "
            "more hosts, or name a larger tmpfs in checkpoint.memory_dir"
        )

"""Makes a RunPlan from a config, the counts of token shards and an inventory, by readable arithmetic.

It uses no torch, files or clock, so that the same inputs give the same plan on any machine. Configs that cannot work
are refused here, on the head node, with the numbers and the cure. `reasons` lists the choices and why.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from training.config.data import ASSUMED_VOCAB
from training.config.parallel import Precision
from training.config.run import RunConfig
from training.config.size_rule import describe as describe_size
from training.config.train import MOST_STEPS, Batches, TrainConfig, check_schedule, warn_of_warmup
from training.facts.families import why_not
from training.planner.chosen_layout import ChosenLayout, choose_layout
from training.planner.cluster import Ring
from training.planner.gpu_catalog import mean_datasheet_tflops, slow_devices
from training.planner.hosts import best_hosts
from training.planner.hypothetical_hosts import assumptions
from training.planner.job import Question
from training.planner.mixture import describe_packing, describe_sources, one_pass, plan_sources, warn_of_repeats
from training.planner.model_shape import check_positions, model_shape, vocab_size
from training.planner.precision import FP8_MULTIPLE, ChosenPrecision, own_precisions, resolved_precision
from training.planner.pricing import predict, price_memory_copies, seconds_of
from training.planner.replicas import COMPUTING
from training.planner.search import TIED
from training.records.correction import Measurement
from training.records.inventory import Host, Inventory
from training.records.plan import ModelShape, Prediction, RunPlan
from training.records.text_encoding import NOTHING_SPECIAL
from training.records.token_shards import TokenShards
from training.records.words import counted, format_duration
from training.shards.packing import OWN_DOCUMENT, Epoch

# Share of train.steps, because rates that were measured beside other programs can be a tenth of the true ones.
FEWEST_STEPS = 0.2
FURTHER_WORDS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # multi-token prediction
COMPILING_S = 60.0  # seconds that torch.compile takes when training begins: assumed, not measured


def make_plan(
    config: RunConfig,
    inventory: Inventory,
    *,
    run_id: str = "dry-run",
    shards: TokenShards | None = None,
    shards_dir: str = "",
    epoch: Sequence[Epoch] | None = None,
    hf_config: Mapping[str, Any] | None = None,
    hf_shape: ModelShape | None = None,
    measurements: Sequence[Measurement] = (),
    steps_in_time: int = 0,
) -> RunPlan:
    """Return the plan of `config` on `inventory`.

    `shards` gives the exact vocabulary; without them (a dry run) the config's is used. `epoch` (packing.one_epoch)
    is one of each source, with which max_epochs and shares are counted; without it both are left out. `hf_config` is
    the content of model.path's config.json, `hf_shape` that model's shape with its counted parameters. `measurements`:
    of earlier runs; those on this machine correct the prices (corrections.py). `steps_in_time`: the steps for which the
    run's first plan found time in train.target_minutes; 0: by this plan's prediction.
    Raises ValueError, with the numbers and the cure, for a config that cannot work.
    """
    end_id = shards.end_id if shards else 0
    words = vocab_size(config, shards, hf_config)
    shape = model_shape(config, vocab_size=words, end_id=end_id, hf_config=hf_config, hf_shape=hf_shape)
    _check_shards(config, shards)
    _check_packing(config, shape)
    _check_training(config, shape, hf_config or {})
    why_positions = check_positions(config, hf_config or {}, end_id=end_id)
    question = Question(config, shape, inventory, measurements)
    choice, why_hosts = _choose_compile(question, epoch, steps_in_time=steps_in_time)
    chosen, split, used = choice.chosen, choice.chosen.split, choice.question.inventory
    _check_choice(config, shape, used.device_kind, chosen)
    _check_cross_attention(config, chosen, hf_config or {})
    batches = batches_of(config, epoch)

    def total_s(steps: int) -> float:
        return steps * sum(_step_s(chosen, batches, steps).values()) if steps else 0.0

    run = _run_length(config, epoch, total_s, steps_in_time=steps_in_time)
    compiled = chosen.config.train.compile is True
    text, why_text = _text(config, epoch, run)
    assumed = _assumptions(config, shards, used, steps=run.steps, compiled=compiled)
    why_fp8 = _why_fp8(shape) if "fp8" in split.precisions else []
    why_steps, why_losses = [f"{counted(run.steps, 'step')}: {run.why}"], _other_losses(hf_config or {})
    why_steps += [*_why_batches(run), *_why_average(config, run.steps), *_why_muon(chosen.best.seconds)]
    reasons = [*why_steps, *describe_size(config), *assumed, *why_fp8, *why_positions, *why_losses, *why_text]
    hosts = choice.hosts
    names = dict.fromkeys(host.name for host in hosts)
    predicted = _predicted(chosen, used, run=run)
    _check_disk(config, predicted.checkpoint_gib, run.steps, hosts[0])
    threads = min(max(1, host.cores // n) for host, n in zip(hosts, chosen.cluster.ranks_per_host, strict=True))
    if config.checkpoint.memory_every_steps:
        reasons.append(
            price_memory_copies(
                config,
                hosts,
                chosen.cluster,
                checkpoint_gib=predicted.checkpoint_gib,
                threads=threads,
                step_s=predicted.step_ms / 1000,
            )
        )
    return RunPlan(
        run_id=run_id,
        config=config,
        shards_dir=shards_dir,
        shards_fingerprint=shards.fingerprint if shards else "",
        vocab_size=shape.vocab_size,
        end_id=end_id,
        mask_id=shards.mask_id if shards else None,
        text_encoding=shards.encoding if shards else NOTHING_SPECIAL,
        shape=shape,
        device_kind=used.device_kind,
        **chosen.plan_fields(),
        **run.plan_fields(),
        **text,
        precision_by_device=dict(chosen.precision.own) if len({*split.precisions}) > 1 else {},
        hosts=tuple(names),
        idle_hosts=tuple(host.name for host in inventory.hosts if host.name not in names),
        threads_per_rank=threads,
        compiled=compiled,
        predicted=predicted,
        reasons=(*reasons, *chosen.reasons, *choice.why, *why_hosts),
    )


def _check_training(config: RunConfig, shape: ModelShape, hf_config: Mapping[str, Any]) -> None:
    """Raise ValueError for what this model cannot be trained with."""
    if config.train.optimizer == "muon" and shape.sizes.why_not_muon:
        raise ValueError(shape.sizes.why_not_muon)
    if config.train.compile is True and hf_config.get("output_router_logits"):
        raise ValueError(
            "config.json of model.path has output_router_logits=true, and the balance loss cannot be collected from "
            "compiled layers: set train.compile=false, or output_router_logits to false"
        )


def _why_fp8(shape: ModelShape) -> list[str]:
    """Return a sentence on what fp8 leaves in bf16, if it leaves anything."""
    if (share := shape.sizes.fp8_share) == 1:
        return []
    return [
        f"fp8: computes {share:.0%} of the numbers that a token is multiplied with in the layers; experts, routers "
        f"and sizes that are no multiples of {FP8_MULTIPLE} stay in bf16"
    ]


@dataclass(frozen=True)
class RunLength:
    """The length of a run. `in_time`: steps that train.target_minutes has time for, 0: no limit; `why`: the limit."""

    steps: int
    in_time: int
    sequences: int
    why: str
    batches: Batches

    def plan_fields(self) -> dict[str, Any]:
        """Return the fields of a RunPlan that the length decides."""
        phases = self.batches.phases if len(self.batches.phases) > 1 else ()
        lengths = {"steps": self.steps, "steps_in_time": self.in_time, "sequences": self.sequences}
        return {**lengths, "batch_phases": phases}


def _run_length(
    config: RunConfig, epoch: Sequence[Epoch] | None, total_s: Callable[[int], float], *, steps_in_time: int
) -> RunLength:
    """Return the run's length. `total_s`: seconds of so many steps; `steps_in_time`: of the run's first plan; 0: by
    `total_s`.
    """
    in_time = steps_in_time or steps_that_fit(config.train, total_s)
    steps, sequences, why = length(config, epoch, steps_in_time=in_time)
    check_schedule(config.train, steps=steps)
    if steps == in_time:
        why += f"; {_time_limit(config.train, steps, total_s, is_kept=bool(steps_in_time))}"
    return RunLength(steps, in_time, sequences, why, batches_of(config, epoch))


def _step_s(chosen: ChosenLayout, batches: Batches, steps: int) -> dict[str, float]:
    """Return the mean seconds of the first `steps` steps by part: larger ones accumulate more, and once do the rest."""
    job, layout = chosen.job, replace(chosen.layout, stages=())  # as in _times_as_long_eager
    times = batches.sequences_before(steps) / steps / job.global_batch  # a fraction: the parts are linear in it
    if times == 1:
        return dict(chosen.best.seconds)
    larger = replace(layout, accumulation=times * layout.accumulation)  # type: ignore[arg-type]
    once, more = (seconds_of(chosen.config, job, each, chosen.cluster) for each in (layout, larger))
    mean = sum(more.values()) / sum(once.values())  # of parts that only unlike replicas have
    return {p: seconds * (more[p] / once[p] if p in once else mean) for p, seconds in chosen.best.seconds.items()}


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


def _text(config: RunConfig, epoch: Sequence[Epoch] | None, run: RunLength) -> tuple[dict[str, Any], list[str]]:
    """Return the plan's fields on the sources of text, and sentences on them; nothing without token shards."""
    if epoch is None:
        return {}, []
    steps = run.steps
    sources, mixture = plan_sources(config.data, epoch, run.batches, steps=steps, sequences=run.sequences)
    packing = describe_packing(sources, packing=config.train.packing, context=config.train.context)
    reasons = describe_sources(config.data, sources, steps=steps) + packing + warn_of_repeats(sources)
    return {"sources": sources, "mixture": mixture}, reasons


@dataclass(frozen=True)
class Choice:
    """The layout on some hosts; `why`: sentences on the precision of unlike devices."""

    question: Question
    chosen: ChosenLayout
    why: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        return self.chosen.best.step_s

    @property
    def computing_s(self) -> float:
        return sum(self.chosen.best.seconds.get(part, 0.0) for part in COMPUTING)

    @property
    def tokens_per_s(self) -> float:
        train = self.question.config.train
        return train.global_batch * train.context / self.step_s

    @property
    def spare(self) -> float:
        return 1 - self.chosen.best.needed_gib / self.chosen.best.usable_gib

    @property
    def network(self) -> Ring:
        return self.chosen.cluster.network

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Those that have ranks."""
        return self.question.inventory.hosts[: self.chosen.cluster.num_hosts]


def _choose_compile(
    question: Question, epoch: Sequence[Epoch] | None, *, steps_in_time: int
) -> tuple[Choice, tuple[str, ...]]:
    """Return what `_choose` does, with layers compiled or not; and why, where train.compile leaves it open."""
    config = question.config

    def choose(compiled: bool) -> tuple[Choice, tuple[str, ...]]:
        return best_hosts(question.compiled(compiled), _choose)

    if config.train.compile != "auto":
        return choose(config.train.compile)
    if refusal := _compile_refusal(question):
        choice, why_hosts = choose(False)
        return choice, (*why_hosts, f"compile off: {refusal}")
    try:
        choice, why_hosts = choose(True)
    except ValueError as error:
        if config.parallel.strategy != "auto":
            raise
        choice, why_hosts = choose(False)  # zero3 may fit
        return choice, (*why_hosts, f"compile off: {error}")
    eager_s = choice.step_s * _times_as_long_eager(choice.chosen)
    in_time = steps_in_time or steps_that_fit(config.train, lambda steps: steps * eager_s)
    steps, *_ = length(config, epoch, steps_in_time=in_time)
    saved_s = steps * (eager_s - choice.step_s)
    if saved_s < COMPILING_S:
        choice, why_hosts = choose(False)
        return choice, (
            *why_hosts,
            f"compile off: it would save {format_duration(max(0.0, saved_s))} of {format_duration(steps * eager_s)} of "
            f"training, and takes about {format_duration(COMPILING_S)} to begin with",
        )
    return choice, (
        *why_hosts,
        f"compile on: a step is predicted to take {1 - choice.step_s / eager_s:.1%} less time, "
        f"{format_duration(saved_s)} in all, for about {format_duration(COMPILING_S)} to begin with; all hosts have "
        "what it needs",
    )


def _times_as_long_eager(chosen: ChosenLayout) -> float:
    """Return the time of an eager step over that of a compiled one, on devices like the run's slowest."""
    layout = replace(chosen.layout, stages=())  # one of unlike stages is priced rank by rank: here as equal ones
    eager, compiled = (
        sum(seconds_of(config, chosen.job, layout, chosen.cluster).values())
        for on in (False, True)
        for config in [
            chosen.config.model_copy(update={"train": chosen.config.train.model_copy(update={"compile": on})})
        ]
    )
    return eager / compiled


def _compile_refusal(question: Question) -> str:
    """Return the reason why layers cannot be compiled, or may not compile; empty if they can."""
    shape = question.shape
    if question.config.parallel.strategy == "zero3":
        return "zero3 gathers weights inside each layer"
    if why := why_not(shape, "compile"):
        return f"layers of type {shape.architecture} were not seen to compile: {why}; train.compile=true tries it"
    for host in question.inventory.hosts:
        if host.compile_lacks:
            return f"on {host.name} {host.compile_lacks}"
        if host.compile_lacks is None:
            return (
                f"{host.name} runs an earlier version of Shardline, which does not look for a compiler: update it "
                "there (`shardline image build` makes a new image), or set train.compile=true to compile anyway"
            )
    return ""


def _choose(question: Question) -> Choice:
    """Return the best layout on these hosts; unlike devices each in their own precision, where that is faster."""
    config, inventory = question.config, question.inventory

    def choose(precision: ChosenPrecision) -> Choice:
        return Choice(question, choose_layout(question, precision))

    asked = resolved_precision(config, inventory)
    choice = choose(asked)
    other = ChosenPrecision(asked.common, asked.why) if asked.is_mixed else own_precisions(config, inventory)
    if other is None:
        return choice
    try:
        in_other = choose(other)
    except ValueError as error:
        return replace(choice, why=(f"precision {other} is not possible here: {error}",))
    as_long = in_other.step_s / choice.step_s
    if not asked.is_mixed and TIED * as_long < 1:
        why = f"precision: with {asked} on all devices a step would take {1 / as_long:.2f}x as long"
        return replace(in_other, why=(why,))
    why = f"precision: with {other}{' on all devices' * asked.is_mixed} a step would take {as_long:.2f}x as long"
    if as_long < 1 and not asked.is_mixed:
        why += ", which is less than the prediction can tell apart"
    return replace(choice, why=(why,))


def _predicted(chosen: ChosenLayout, inventory: Inventory, *, run: RunLength) -> Prediction:
    """Return the prediction; of steps of several sizes the mean."""
    per_host = zip(inventory.hosts, chosen.cluster.ranks_per_host, strict=False)
    devices = [device for host, ranks in per_host for device in host.devices[:ranks]]
    return predict(
        chosen.config,
        chosen.job,
        chosen.layout,
        chosen.cluster,
        num_steps=run.steps,
        sequences=run.batches.sequences_before(run.steps) / run.steps,
        seconds=_step_s(chosen, run.batches, run.steps),
        peak_tflops=chosen.best.mean_tflops,
        datasheet_tflops=mean_datasheet_tflops([(each.name, chosen.precision.of(each)) for each in devices]),
        correction=chosen.best.correction,
        memory=chosen.memory,
    )


def _assumptions(
    config: RunConfig, shards: TokenShards | None, inventory: Inventory, *, steps: int, compiled: bool
) -> list[str]:
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
    if wants_trial(config, inventory.device_kind, compiled=compiled):
        if config.train.micro_batch:
            reasons.append("compile: a trial of a few steps will confirm that compiled layers work and fit")
        else:
            reasons.append("micro-batch: predicted to fit; a trial of a few steps will confirm this before training")
    slow = (f"{host}: {why}" for (host, _), why in slow_devices(inventory).items())
    return [*reasons, *assumptions(inventory), *slow]


def _other_losses(hf: Mapping[str, Any]) -> list[str]:
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


def _check_choice(config: RunConfig, shape: ModelShape, device_kind: str, chosen: ChosenLayout) -> None:
    """Raise ValueError for fields that do not work with the chosen layout and precisions."""
    tp, precisions = chosen.mesh["tp"], chosen.split.precisions
    _check_residual(config, shape, precisions)
    _check_fp8_by(config, shape, device_kind, precisions, tp=tp)
    _check_async_tp(config, device_kind, tp=tp, split=chosen.layout.sequence_parallel)


def _check_cross_attention(config: RunConfig, chosen: ChosenLayout, hf: Mapping[str, Any]) -> None:
    """Raise ValueError for parameters that get no gradient under a strategy that needs one of each."""
    layout = chosen.layout
    waits = layout.strategy in {"ddp", "local-sgd"} and layout.dp > 1 and not config.parallel.static_graph
    needs_all = (waits and layout.pp == 1) or (layout.strategy.startswith("zero") and layout.tp == layout.pp == 1)
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


def steps_that_fit(train: TrainConfig, total_s: Callable[[int], float]) -> int:
    """Return the number of steps that fit into train.target_minutes, by the seconds of so many steps; 0 without this
    limit.
    """
    if not train.target_minutes:
        return 0
    fit = bisect.bisect_right(range(MOST_STEPS), 60 * train.target_minutes, key=total_s) - 1
    return max(math.ceil(FEWEST_STEPS * train.steps), fit)


def _time_limit(train: TrainConfig, steps: int, total_s: Callable[[int], float], *, is_kept: bool) -> str:
    """Return why train.target_minutes gives this number of steps, and how to get all of them."""
    if is_kept:
        why = "as in this run's first plan"
    else:
        why = f"a step takes {1000 * total_s(steps) / steps:,.0f} ms as predicted for this machine"
        if total_s(steps) > 60 * train.target_minutes:
            why += f", and {steps:,} is the minimum, {FEWEST_STEPS:.0%} of train.steps"
    all_steps = format_duration(total_s(train.steps))
    return f"{why}; train.target_minutes=0 takes all {train.steps:,}, about {all_steps} of training"


def batches_of(config: RunConfig, epoch: Sequence[Epoch] | None) -> Batches:
    """Return the sequences of each step."""
    return Batches.of(config.train, sequence_tokens=_sequence_tokens(config, epoch))


def _sequence_tokens(config: RunConfig, epoch: Sequence[Epoch] | None) -> float:
    """Return the mean tokens of a sequence, because some packings leave places empty."""
    if epoch is None:
        return float(config.train.context)
    whole = one_pass(config.data, epoch)
    return whole.tokens / whole.sequences


def length(config: RunConfig, epoch: Sequence[Epoch] | None, *, steps_in_time: int = 0) -> tuple[int, int, str]:
    """Return the number of steps, the sequences in all of them, and the limit that sets the number.

    Batches are whole, except the last one under max_epochs, so that each pass takes every sequence once.
    `steps_in_time`: the limit that train.target_minutes sets; 0: none.
    """
    train, batches = config.train, batches_of(config, epoch)
    limits = {"train.steps": train.steps}
    if train.max_tokens:
        sequences = int(train.max_tokens / _sequence_tokens(config, epoch))
        limits[f"train.max_tokens = {train.max_tokens:,}"] = max(1, batches.steps_for(sequences + 1) - 1)
    if steps_in_time:
        limits[f"train.target_minutes = {train.target_minutes:g}"] = steps_in_time
    found = [(steps, batches.sequences_before(steps), why) for why, steps in limits.items()]
    if train.max_epochs and epoch is not None:
        whole = one_pass(config.data, epoch).sequences
        sequences = max(1, round(train.max_epochs * whole))
        why = f"train.max_epochs = {train.max_epochs:g}, of {whole:,} sequences each"
        found.append((batches.steps_for(sequences), sequences, why))
    return min(found)


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


def _check_disk(config: RunConfig, checkpoint_gib: float, steps: int, host: Host) -> None:
    """Raise ValueError if checkpoints and exports do not fit on the disk."""
    needed = disk_gib_needed(config, checkpoint_gib=checkpoint_gib, steps=steps)
    if needed > host.disk_free_gib:
        raise ValueError(
            f"{_kept_checkpoints(config, steps)} + 1 checkpoints of {checkpoint_gib:.2f} GiB and the registered export "
            f"need {needed:.1f} GiB, "
            f"{host.name} has {host.disk_free_gib:.1f} GiB free: free some space, lower checkpoint.keep_last, raise "
            "checkpoint.keep_every_steps, or set SHARDLINE_HOME to a larger disk"
        )

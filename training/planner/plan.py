"""Makes a RunPlan from a config, the counts of token shards and an inventory, by readable arithmetic.

It uses no torch, files or clock, so that the same inputs give the same plan on any machine. Configs that cannot work
are refused here, on the head node, with the numbers and the cure. `reasons` lists the choices and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from training.config.run import RunConfig
from training.planner.choose import choose_layout
from training.planner.chosen_layout import ChosenLayout
from training.planner.corrections import correct_memory, exposed_s
from training.planner.gpu_catalog import mean_datasheet_tflops
from training.planner.hosts import best_hosts
from training.planner.mixture import plan_sources
from training.planner.model_shape import flops_per_token, model_shape, vocab_size
from training.planner.precision import ChosenPrecision, own_precisions, resolved_precision
from training.planner.price.memory import GIB
from training.planner.price.pricing import TIED, likely_range, num_shards, rank_checkpoint_bytes
from training.planner.question import Question
from training.planner.reasons.checks import check_choice, check_disk, check_positions, check_run
from training.planner.reasons.run import (
    compile_refusal,
    other_losses,
    price_memory_copies,
    why_compiled,
    why_precision,
    why_run,
)
from training.planner.reasons.text import describe_packing, describe_sources, warn_of_repeats
from training.planner.run_length import RunLength, length, mean_step_s, run_length, steps_that_fit, times_as_long_eager
from training.records.correction import Measurement
from training.records.inventory import Inventory
from training.records.plan import ModelShape, Prediction, RunPlan
from training.records.text_encoding import NOTHING_SPECIAL
from training.records.token_shards import TokenShards
from training.shards.packing import Epoch

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
    check_run(config, shape, shards, hf_config or {})
    why_positions = check_positions(config, hf_config or {}, end_id=end_id)
    question = Question(config, shape, inventory, measurements)
    chosen, why_hosts = _choose_compile(question, epoch, steps_in_time=steps_in_time)
    check_choice(config, chosen, hf_config or {})
    run = run_length(config, epoch, chosen, steps_in_time=steps_in_time)
    text, why_text = _text(config, epoch, run)
    reasons = [*why_run(config, chosen, run, shards), *why_positions, *other_losses(hf_config or {}), *why_text]
    predicted = _predict(chosen, run)
    check_disk(config, predicted.checkpoint_gib, run.steps, chosen.hosts[0])
    if config.checkpoint.memory_every_steps:
        reasons.append(price_memory_copies(chosen, predicted))
    names = dict.fromkeys(host.name for host in chosen.hosts)
    return RunPlan(
        run_id=run_id,
        config=config,
        shards_dir=shards_dir,
        shards_fingerprint=shards.fingerprint if shards else "",
        vocab_size=shape.vocab_size,
        end_id=end_id,
        mask_id=shards.mask_id if shards else None,
        text_encoding=shards.text_encoding if shards else NOTHING_SPECIAL,
        shape=shape,
        **chosen.plan_fields(),
        **run.plan_fields(),
        **text,
        hosts=tuple(names),
        idle_hosts=tuple(host.name for host in inventory.hosts if host.name not in names),
        predicted=predicted,
        reasons=(*reasons, *chosen.reasons, *why_hosts),
    )


def _text(config: RunConfig, epoch: Sequence[Epoch] | None, run: RunLength) -> tuple[dict[str, Any], list[str]]:
    """Return the plan's fields on the sources of text, and sentences on them; nothing without token shards."""
    if epoch is None:
        return {}, []
    steps = run.steps
    sources, mixture = plan_sources(config.data, epoch, run.batches, steps=steps, sequences=run.sequences)
    packing = describe_packing(sources, packing=config.train.packing, context=config.train.context)
    reasons = describe_sources(config.data, sources, steps=steps) + packing + warn_of_repeats(sources)
    return {"sources": sources, "mixture": mixture}, reasons


def _choose_compile(
    question: Question, epoch: Sequence[Epoch] | None, *, steps_in_time: int
) -> tuple[ChosenLayout, tuple[str, ...]]:
    """Return what `_choose` does, with layers compiled or not; and why, where train.compile leaves it open."""
    config = question.config

    def choose(compiled: bool) -> tuple[ChosenLayout, tuple[str, ...]]:
        return best_hosts(question.changed("train", compile=compiled), _choose)

    if config.train.compile != "auto":
        return choose(config.train.compile)
    if refusal := compile_refusal(question):
        choice, why_hosts = choose(False)
        return choice, (*why_hosts, f"compile off: {refusal}")
    try:
        choice, why_hosts = choose(True)
    except ValueError as error:
        if config.parallel.strategy != "auto":
            raise
        choice, why_hosts = choose(False)  # zero3 may fit
        return choice, (*why_hosts, f"compile off: {error}")
    eager_s = choice.step_s * times_as_long_eager(choice)
    in_time = steps_in_time or steps_that_fit(config.train, lambda steps: steps * eager_s)
    steps, *_ = length(config, epoch, steps_in_time=in_time)
    saved_s = steps * (eager_s - choice.step_s)
    if saved_s < COMPILING_S:
        choice, why_hosts = choose(False)
    why = why_compiled(saved_s >= COMPILING_S, saved_s=saved_s, eager_s=steps * eager_s, compiling_s=COMPILING_S)
    return choice, (*why_hosts, why)


def _choose(question: Question) -> ChosenLayout:
    """Return the best layout on these hosts; unlike devices each in their own precision, where that is faster."""
    config, inventory = question.config, question.inventory

    def choose(precision: ChosenPrecision) -> ChosenLayout:
        return choose_layout(replace(question, precision=precision))

    asked = resolved_precision(config, inventory)
    choice = choose(asked)
    other = ChosenPrecision(asked.common, asked.why) if asked.is_mixed else own_precisions(config, inventory)
    if other is None:
        return choice
    try:
        in_other = choose(other)
    except ValueError as error:
        return choice.because(f"precision {other} is not possible here: {error}")
    as_long = in_other.step_s / choice.step_s
    is_taken = not asked.is_mixed and TIED * as_long < 1
    return (in_other if is_taken else choice).because(why_precision(asked, other, as_long, is_taken=is_taken))


def _predict(chosen: ChosenLayout, run: RunLength) -> Prediction:
    """Return the prediction; of steps of several sizes the mean. TFLOP/s are means of the ranks."""
    question, layout, cluster, correction = chosen.question, chosen.layout, chosen.cluster, chosen.best.correction
    shape, seconds = question.shape, mean_step_s(chosen, run.batches, run.steps)
    whole, flops = sum(seconds.values()), flops_per_token(shape)
    tokens_per_s = run.batches.sequences_before(run.steps) / run.steps * question.config.train.context / whole
    tflops = tokens_per_s * flops / layout.world_size / 1e12
    per_host = zip(question.inventory.hosts, cluster.ranks_per_host, strict=False)
    devices = [device for host, ranks in per_host for device in host.devices[:ranks]]
    peak = chosen.best.mean_tflops if cluster.is_measured else 0.0
    datasheet = mean_datasheet_tflops([(each.name, question.precision.of(each)) for each in devices])
    own = rank_checkpoint_bytes(chosen.config, shape.parameters, num_shards(chosen.config, layout, cluster))
    least, most = likely_range(cluster.kind, correction.measured)
    return Prediction(
        memory_gib=correct_memory(chosen.memory, correction.memory, device_kind=cluster.kind),
        step_s=seconds,
        step_range_ms=(1000 * least * whole, 1000 * most * whole),
        exposed_communication_s=exposed_s(seconds),
        flops_per_token=flops,
        peak_tflops=peak,
        datasheet_tflops=datasheet,
        matmul_share=tflops / peak if peak else None,
        mfu=tflops / datasheet if datasheet else None,
        tokens_per_s=tokens_per_s,
        train_s=run.steps * whole,
        checkpoint_gib=(12 * shape.parameters + layout.gradient_ranks * own) / GIB,
        correction=correction,
    )

"""Writes a run's plan, plan.json, from its config, the inventory and the shards; and again for other hosts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks.planning.counted import counted_shape
from tasks.planning.custom_program import replan_custom_program
from tasks.planning.measured_runs import read_measurements
from tasks.planning.pretrained import generation, hf_config
from tasks.planning.price import price_per_hour
from tasks.planning.text import TextEstimate
from tasks.runs.folder import earlier_plans, read_plan
from tasks.runs.resume import Change, remember, steps_in_time
from tasks.store.local_copy import local_copies
from tasks.tracking.mlflow_run import TrackedRun
from training.config.run import RunConfig
from training.config.train import warn_of_warmup
from training.planner.corrections import machine_of
from training.planner.plan import make_plan
from training.planner.reasons.text import warn_of_repeats
from training.records.inventory import Inventory
from training.records.plan import AnyPlan, CustomProgramPlan, ModelShape, RunPlan
from training.records.token_shards import TokenShards
from training.records.trial import read_trials
from training.shards.format import MANIFEST
from training.shards.packing import one_epoch

logger = logging.getLogger(__name__)

# Fields that a plan for other hosts copies.
LAYOUT_FIELDS = {
    "strategy",
    "tp",
    "pp",
    "cp",
    "pp_stages_per_rank",
    "stages",
    "sequence_parallel",
    "offload",
    "group_ranks",
    "activation_checkpointing",
}


def plan_run(
    config: RunConfig,
    *,
    inventory: Inventory,
    run_id: str = "dry-run",
    shards: TokenShards | None = None,
    shards_dir: Path | None = None,
    steps_in_time: int = 0,
    text: TextEstimate | None = None,
) -> RunPlan:
    """Call `make_plan`, with the model's config.json if it needs one. Raises ValueError for a plan that cannot work.

    `text`: an estimate of the corpus, where there are no shards yet.
    """
    if config.trainer.given:
        raise ValueError("a run with `trainer` has no plan: it gets a rank on each device, or parallel.ranks of them")
    sampled, epoch = (text.shards, text.epochs) if text and text.epochs else (None, None)
    if shards_dir:
        epoch = one_epoch(shards_dir, packing=config.train.packing, context=config.train.context)
    plan = make_plan(
        config,
        inventory,
        run_id=run_id,
        shards=shards or sampled,
        shards_dir=str(shards_dir or ""),
        epoch=epoch,
        hf_config=hf_config(config.model),
        hf_shape=counted_shape(config),
        measurements=read_measurements(inventory),
        steps_in_time=steps_in_time,
    )
    price, why = price_per_hour(config.prices, inventory, _layout(plan))
    about_text = [shards.text_line(), *shards.ledger_lines()] if shards else text.lines() if text else ()
    priced = {"price_per_hour": price, "reasons": (*plan.reasons, *about_text, *([why] if why else []))}
    return plan.model_copy(
        update={"local_copies": local_copies(config)} | generation(config.model, plan.end_id) | priced
    )


def write_plan(
    config: RunConfig,
    *,
    run: TrackedRun,
    inventory: Inventory,
    shards: TokenShards,
    shards_dir: Path,
    changes: Sequence[Change] = (),
) -> RunPlan:
    """Write runs/ID/plan.json, once: a resumed run keeps its plan, unless it is resumed with `changes`.

    Then the new plan takes its place, the old one becomes plan-1.json (plan-2.json, …), and the changes are added to
    resume-overrides.json. Raises ValueError for a plan that cannot work, for other tokens, and for weights that would
    not fit.
    """
    kept = read_plan(run.folder)
    if kept is None:
        plan = plan_run(config, inventory=inventory, run_id=run.run_id, shards=shards, shards_dir=shards_dir)
        plan = plan.model_copy(update={"mlflow_run_id": run.mlflow_run_id})
    else:
        _check_same_tokens(kept, shards)
        used = without_idle(kept, inventory)
        here = {
            "shards_dir": str(shards_dir),
            "mlflow_run_id": run.mlflow_run_id,
            "local_copies": local_copies(kept.config),
            "priced": kept.priced if kept.priced and kept.priced.machine == machine_of(used) else None,
        }
        if any(getattr(kept, field) != value for field, value in here.items()):  # another machine, or new rates
            kept = kept.model_copy(update=here)
            kept.write(run.folder / "plan.json")
        if not changes:
            logger.info("the run continues with its plan, %s", run.folder / "plan.json")
            return kept
        plan = _replanned(kept, config, changes, inventory=inventory, shards=shards, shards_dir=shards_dir)
        kept.write(run.folder / f"plan-{len(list(run.folder.glob('plan-*.json'))) + 1}.json")
        if _evaluated(kept.config) != _evaluated(config):
            (run.folder / "eval.json").unlink(missing_ok=True)
        if kept.config.export != config.export:
            (run.folder / "export" / "export.json").unlink(missing_ok=True)
    if changes:
        remember(run.folder, tuple(changes))
    plan.write(run.folder / "plan.json")
    warnings = [
        *warn_of_repeats(plan.sources),
        *warn_of_warmup(plan.config.train, steps=plan.steps),
        *shards.ledger_warnings(),
    ]
    for reason in plan.reasons:
        logger.log(logging.WARNING if reason in warnings else logging.INFO, "plan: %s", reason)
    return plan


def _evaluated(config: RunConfig) -> tuple[Any, ...]:
    """Return the settings that an evaluation's figures depend on."""
    return (config.evaluation, config.train.num_averaged and (config.train, config.export.weights))


def _replanned(
    kept: RunPlan,
    config: RunConfig,
    changed: Sequence[Change],
    *,
    inventory: Inventory,
    shards: TokenShards,
    shards_dir: Path,
) -> RunPlan:
    """Return the plan of a resumed run whose config has changed, for the current machines, in the same precision.

    Changes that are exact to the bit also keep ranks, threads and micro-batches, whatever this inventory would suggest.
    Other changes keep the strategy if it still fits, unless they change the layout themselves.
    """
    exact, fields = all(change.effect == "exact" for change in changed), {change.field for change in changed}
    pinned = config.model_dump(mode="json")

    chooses_again = any(field.startswith("parallel.") or field.partition(".")[2] in LAYOUT_FIELDS for field in fields)
    used = inventory if chooses_again and not exact else without_idle(kept, inventory)

    def planned(content: dict[str, Any]) -> RunPlan:
        return plan_run(
            RunConfig.model_validate(content),
            inventory=used,
            run_id=kept.run_id,
            shards=shards,
            shards_dir=shards_dir,
            steps_in_time=steps_in_time(kept, config),
        )

    if "parallel.precision" not in fields:
        pinned["parallel"]["precision"] = kept.pinned_precision
    if exact:
        plan = planned(pinned | {section: pinned[section] | chosen for section, chosen in kept.chosen.items()})
    elif chooses_again:
        plan = planned(pinned)
    else:
        plan = _as_before(kept, pinned, planned)
    _check_same_shape(plan, kept)
    return plan.model_copy(
        update={
            "config": config,
            "mlflow_run_id": kept.mlflow_run_id,
            "threads_per_rank": kept.threads_per_rank if exact else plan.threads_per_rank,
            "idle_hosts": _idle(plan, inventory),
            "reasons": (*plan.reasons, f"resumed with other settings: {'; '.join(map(str, changed))}"),
        }
    )


def plan_for_hosts(plan: AnyPlan, inventory: Inventory, *, run_dir: Path, why: str) -> AnyPlan:
    """Return the plan of the same run for the current hosts. Raises ValueError if it cannot run on them."""
    if isinstance(plan, CustomProgramPlan):
        return replan_custom_program(plan, inventory)
    return replan(run_dir, inventory=inventory, why=why)


def replan(run_dir: Path, *, inventory: Inventory, why: str) -> RunPlan:
    """Return the plan for the current hosts: the same batches on other ranks, which load the same checkpoint.

    plan.json stays if it was made for these hosts, in any order; otherwise it becomes plan-N.json. An earlier plan of
    the run for these hosts is used again, with the same number of threads, so that results are the same to the bit. The
    strategy is kept if it still fits; otherwise the planner chooses the open settings again. Raises ValueError if the
    run does not fit on these hosts.
    """
    kept = RunPlan.read(run_dir / "plan.json")
    used = without_idle(kept, inventory)
    if sorted(kept.hosts) == sorted(host.name for host in used.hosts):
        return kept
    try:
        plan = _planned_for(kept, used, micro_batch=0)
    except ValueError:
        used = inventory
        plan = _planned_for(kept, used, micro_batch=0)
    trials = read_trials(run_dir)
    more_is_too_much = kept.config.train.micro_batch or (trials is not None and trials.lowered)
    if more_is_too_much and plan.micro_batch > kept.micro_batch:  # as the user or a trial found
        share = kept.config.train.global_batch // plan.dp
        fitting = max(size for size in range(1, kept.micro_batch + 1) if share % size == 0)
        plan = _planned_for(kept, used, micro_batch=fitting)
    if _layout(plan) == _layout(kept):  # some hosts stay idle either way
        return kept
    update = {"config": kept.config, "mlflow_run_id": kept.mlflow_run_id, "reasons": (*plan.reasons, why)}
    update |= {"idle_hosts": _idle(plan, inventory)}
    same = (old for old in earlier_plans(run_dir) if _layout(old) == _layout(plan) and old.config == kept.config)
    plan = next(same, plan.model_copy(update=update))
    kept.write(run_dir / f"plan-{len(list(run_dir.glob('plan-*.json'))) + 1}.json")
    plan.write(run_dir / "plan.json")
    logger.warning("replanned for %s: %s", ", ".join(plan.hosts), why)
    return plan


def without_idle(plan: RunPlan, inventory: Inventory) -> Inventory:
    """Return the hosts without those that the plan leaves idle, as long as there are enough others."""
    used = tuple(host for host in inventory.hosts if host.name not in plan.idle_hosts)
    return Inventory(hosts=used) if len(used) >= max(1, plan.config.launch.min_hosts) else inventory


def _idle(plan: RunPlan, inventory: Inventory) -> tuple[str, ...]:
    return tuple(host.name for host in inventory.hosts if host.name not in plan.hosts)


def with_micro_batches(plan: RunPlan, micro_batches: tuple[int, ...], *, inventory: Inventory) -> RunPlan:
    """Return the same plan with smaller micro-batches and their prediction; none may grow to its earlier size again."""
    alike, pinned = len(set(micro_batches)) == 1, plan.config.model_dump(mode="json")
    for section, chosen in plan.chosen.items():
        pinned[section] |= chosen
    pinned["parallel"]["shares"] = "equal" if alike else micro_batches
    pinned["train"]["micro_batch"] = micro_batches[0] if alike else 0
    lower = _planned_again(plan, pinned, inventory=inventory)
    update = {name: getattr(lower, name) for name in ("micro_batches", "accumulation", "predicted")}
    sizes = zip(micro_batches, plan.micro_batches, plan.largest_micro_batches, strict=True)
    largest = [max(size, min(limit, before - 1)) for size, before, limit in sizes]  # `before` was too much for one
    return plan.model_copy(update=update | {"largest_micro_batches": tuple(largest)})


def next_layout(plan: RunPlan, *, inventory: Inventory, why: str) -> RunPlan | None:
    """Return a plan of the same run in the next layout of the ranking that needs less memory; None if there is none."""
    this, *others = plan.ranking or (None,)
    left = [each for each in others if this is not None and not each.why_not and each.memory_gib < this.memory_gib]
    for number, layout in enumerate(left):
        content = plan.config.model_dump(mode="json")
        content["parallel"] |= {"precision": plan.pinned_precision, "ranks": plan.world_size, **layout.as_asked()}
        content["train"] |= {"activation_checkpointing": layout.activation_checkpointing, "compile": plan.compiled}
        try:
            other = _planned_again(plan, content, inventory=inventory)
        except ValueError as error:
            logger.info("trial: %s is not possible here: %s", layout.strategy, error)
            continue
        update = {"config": plan.config, "mlflow_run_id": plan.mlflow_run_id, "reasons": (*other.reasons, why)}
        update |= {"idle_hosts": plan.idle_hosts, "ranking": (other.ranking[0], *left[number + 1 :])}
        return other.model_copy(update=update)
    return None


def without_compile(plan: RunPlan, *, inventory: Inventory, why: str) -> RunPlan:
    """Return a plan of the same run without compiled layers, in the same layout if that still fits."""
    content = plan.config.model_dump(mode="json")
    asked = plan.config.parallel.ranks if plan.config.parallel.ranks <= inventory.num_devices else 0
    content["parallel"] |= {"precision": plan.pinned_precision, "ranks": asked}
    content["train"]["compile"] = False
    eager = _as_before(plan, content, lambda each: _planned_again(plan, each, inventory=inventory))
    update = {"config": plan.config, "mlflow_run_id": plan.mlflow_run_id, "reasons": (*eager.reasons, why)}
    update |= {"idle_hosts": (*eager.idle_hosts, *plan.idle_hosts)}  # a trial's hosts are the plan's
    return eager.model_copy(update=update)


def _planned_again(plan: RunPlan, content: dict[str, Any], *, inventory: Inventory) -> RunPlan:
    shards_dir = Path(plan.shards_dir)
    return plan_run(
        RunConfig.model_validate(content),
        inventory=inventory,
        run_id=plan.run_id,
        shards=TokenShards.read(shards_dir / MANIFEST),
        shards_dir=shards_dir,
        steps_in_time=plan.steps_in_time,
    )


def _planned_for(kept: RunPlan, inventory: Inventory, *, micro_batch: int) -> RunPlan:
    """Return the run's plan for other hosts, in its earlier layout if possible. `micro_batch` 0: the largest."""
    left_open, shards_dir = kept.config.model_dump(mode="json"), Path(kept.shards_dir)
    asked = kept.config.parallel.ranks if kept.config.parallel.ranks <= inventory.num_devices else 0
    left_open["parallel"] |= {"precision": kept.pinned_precision, "ranks": asked}
    left_open["train"]["micro_batch"] = micro_batch
    if not kept.compiled:  # a trial may have failed with compiled layers
        left_open["train"]["compile"] = False
    # other replicas need other shares
    left_open["parallel"]["shares"] = "equal" if kept.config.parallel.shares == "equal" else "auto"
    left_open["parallel"]["rebalance"] = kept.config.parallel.rebalance

    def planned(content: dict[str, Any]) -> RunPlan:
        return plan_run(
            RunConfig.model_validate(content),
            inventory=inventory,
            run_id=kept.run_id,
            shards=TokenShards.read(shards_dir / MANIFEST),
            shards_dir=shards_dir,
            steps_in_time=kept.steps_in_time,
        )

    if kept.config.parallel.strategy == "auto" and kept.strategy == "single" and inventory.num_devices > 1:
        return planned(left_open)  # there was only one device before
    return _as_before(kept, left_open, planned)


def _as_before(kept: RunPlan, content: dict[str, Any], planned: Callable[[dict[str, Any]], RunPlan]) -> RunPlan:
    """Return the plan with the run's LAYOUT_FIELDS; if that is impossible, a plan with other values, and a note."""
    pinned = {
        section: content[section] | {field: value for field, value in chosen.items() if field in LAYOUT_FIELDS}
        for section, chosen in kept.chosen.items()
    }
    try:
        return planned(content | pinned)
    except ValueError as error:
        plan, why = planned(content), f"layout: chosen again, because the earlier one is not possible here: {error}"
        return plan.model_copy(update={"reasons": (*plan.reasons, why)})


def _layout(plan: RunPlan) -> dict[str, int]:
    """Return host's name -> number of ranks."""
    return dict(zip(plan.hosts, plan.ranks_per_host, strict=True))


def _check_same_tokens(kept: RunPlan, shards: TokenShards) -> None:
    if kept.shards_fingerprint != shards.fingerprint:
        raise ValueError(
            f"the tokens are not those that {kept.run_id} was planned with ({shards.fingerprint[:12]}, planned with "
            f"{kept.shards_fingerprint[:12]}): the corpus has changed, or this version reads it otherwise; restore the "
            "files or the version, or start a new run"
        )


def _check_same_shape(plan: RunPlan, kept: RunPlan) -> None:
    """Raise ValueError if the model's weights would have other shapes; its context may differ.

    A head node without torch describes a model at model.path by its bare config.json, where defaults are missing: of
    those only the class and the words are compared, and loading a checkpoint compares every shape.
    """
    own = set(ModelShape.model_fields) - {"context", "head_dim", "sizes", "adds_loss"} | {"parameters"}
    fields = sorted({"architecture", "vocab_size"} if plan.config.model.path else own)
    differing = [
        f"{what} {was} -> {now}"
        for what in fields
        if (was := getattr(kept.shape, what)) != (now := getattr(plan.shape, what))
    ]
    if differing:
        raise ValueError(
            f"the weights of {kept.run_id} do not fit the model of the new settings ({', '.join(differing)}): "
            "leave its settings as they were, or start a new run"
        )

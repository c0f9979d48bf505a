"""Writes a run's plan, plan.json, from its config, the inventory and the shards; and again for other hosts."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
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
        plan = _with_changes(kept, config, changes, inventory=inventory)
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


def _with_changes(kept: RunPlan, config: RunConfig, changed: Sequence[Change], *, inventory: Inventory) -> RunPlan:
    """Return the plan of a resumed run whose config has changed, for the current machines, in the same precision.

    Changes that are exact to the bit also keep ranks, threads and micro-batches, whatever this inventory would suggest.
    Other changes keep the strategy if it still fits, unless they change the layout themselves.
    """
    exact, fields = all(change.effect == "exact" for change in changed), {change.field for change in changed}
    content = config.model_dump(mode="json")
    chooses_again = any(field.startswith("parallel.") or field.partition(".")[2] in LAYOUT_FIELDS for field in fields)
    if "parallel.precision" not in fields:
        content["parallel"]["precision"] = kept.pinned_precision
    plan = _planned_again(
        kept,
        _as_chosen(kept, content) if exact else content,
        hosts=inventory if chooses_again and not exact else without_idle(kept, inventory),
        because=f"resumed with other settings: {'; '.join(map(str, changed))}",
        keep_layout=not exact and not chooses_again,
        config=config,
    )
    _check_same_shape(plan, kept)
    threads = kept.threads_per_rank if exact else plan.threads_per_rank
    return plan.model_copy(update={"threads_per_rank": threads, "idle_hosts": _idle(plan, inventory)})


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
        plan = _planned_for(kept, used, because=why)
    except ValueError:
        used = inventory
        plan = _planned_for(kept, used, because=why)
    trials = read_trials(run_dir)
    more_is_too_much = kept.config.train.micro_batch or (trials is not None and trials.lowered)
    if more_is_too_much and plan.micro_batch > kept.micro_batch:  # as the user or a trial found
        share = kept.config.train.global_batch // plan.dp
        fitting = max(size for size in range(1, kept.micro_batch + 1) if share % size == 0)
        plan = _planned_for(kept, used, because=why, micro_batch=fitting)
    if _layout(plan) == _layout(kept):  # some hosts stay idle either way
        return kept
    same = (old for old in earlier_plans(run_dir) if _layout(old) == _layout(plan) and old.config == kept.config)
    plan = next(same, plan.model_copy(update={"idle_hosts": _idle(plan, inventory)}))
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
    alike, content = len(set(micro_batches)) == 1, _as_chosen(plan, plan.config.model_dump(mode="json"))
    content["parallel"]["shares"] = "equal" if alike else micro_batches
    content["train"]["micro_batch"] = micro_batches[0] if alike else 0
    lower = _planned_again(plan, content, hosts=inventory)
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
            other = _planned_again(plan, content, hosts=inventory, because=why)
        except ValueError as error:
            logger.info("trial: %s is not possible here: %s", layout.strategy, error)
            continue
        return other.model_copy(update={"ranking": (other.ranking[0], *left[number + 1 :])})
    return None


def without_compile(plan: RunPlan, *, inventory: Inventory, why: str) -> RunPlan:
    """Return a plan of the same run without compiled layers, in the same layout if that still fits."""
    content = _left_open(plan, hosts=inventory)
    content["train"]["compile"] = False
    return _planned_again(plan, content, hosts=inventory, because=why, keep_layout=True)


def _planned_for(kept: RunPlan, hosts: Inventory, *, because: str, micro_batch: int = 0) -> RunPlan:
    """Return the run's plan for other hosts, in its earlier layout if possible. `micro_batch` 0: the largest."""
    content = _left_open(kept, hosts=hosts)
    content["train"]["micro_batch"] = micro_batch
    if not kept.compiled:  # a trial may have failed with compiled layers
        content["train"]["compile"] = False
    if kept.config.parallel.shares != "equal":  # other replicas need other shares
        content["parallel"]["shares"] = "auto"
    had_one = kept.config.parallel.strategy == "auto" and kept.strategy == "single" and hosts.num_devices > 1
    return _planned_again(kept, content, hosts=hosts, because=because, keep_layout=not had_one)


def _left_open(kept: RunPlan, *, hosts: Inventory) -> dict[str, Any]:
    """Return the content of the run's config with the plan's precision, and no more ranks than the hosts have."""
    content = kept.config.model_dump(mode="json")
    asked = kept.config.parallel.ranks if kept.config.parallel.ranks <= hosts.num_devices else 0
    content["parallel"] |= {"precision": kept.pinned_precision, "ranks": asked}
    return content


def _as_chosen(kept: RunPlan, content: dict[str, Any], *, only: Container[str] | None = None) -> dict[str, Any]:
    """Return the content of a config that asks for what the plan has chosen. `only`: in these fields; None: in all."""
    return content | {
        section: content[section] | {field: value for field, value in chosen.items() if only is None or field in only}
        for section, chosen in kept.chosen.items()
    }


def _planned_again(
    kept: RunPlan,
    content: dict[str, Any],
    *,
    hosts: Inventory,
    because: str = "",
    keep_layout: bool = False,
    config: RunConfig | None = None,
) -> RunPlan:
    """Return another plan of the same run, with `because` as its last reason.

    `content`: of a config that asks for what shall stay. `keep_layout`: its LAYOUT_FIELDS stay too; if that is
    impossible they are chosen again, and a reason says so. `config`: the run's from now on; None: it stays.
    """
    config, shards_dir = config or kept.config, Path(kept.shards_dir)
    shards = TokenShards.read(shards_dir / MANIFEST)

    def planned(content: dict[str, Any]) -> RunPlan:
        return plan_run(
            RunConfig.model_validate(content),
            inventory=hosts,
            run_id=kept.run_id,
            shards=shards,
            shards_dir=shards_dir,
            steps_in_time=steps_in_time(kept, config),
        )

    reasons = [because] if because else []
    try:
        plan = planned(_as_chosen(kept, content, only=LAYOUT_FIELDS) if keep_layout else content)
    except ValueError as error:
        if not keep_layout:
            raise
        plan = planned(content)
        reasons.insert(0, f"layout: chosen again, because the earlier one is not possible here: {error}")
    return plan.model_copy(
        update={
            "config": config,
            "mlflow_run_id": kept.mlflow_run_id,
            "reasons": (*plan.reasons, *reasons),
            "idle_hosts": (*plan.idle_hosts, *(host for host in kept.idle_hosts if host not in plan.hosts)),
        }
    )


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

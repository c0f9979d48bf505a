"""The planner learns: what runs measured corrects plans for the same machine and jobs like theirs, within bounds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.configs import inventory, reasons, tiny_config
from training.config.train import BatchPhase
from training.planner.cluster import MEMORY_SHARE
from training.planner.corrections import LAST_RUNS, MOST, exposed_s, measurement_of
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.planner.plan import make_plan
from training.records.correction import Correction, Measurement
from training.records.inventory import Inventory
from training.records.plan import RunPlan
from training.records.train_result import TrainResult

COMMON = {"train__global_batch": 16, "train__micro_batch": 0, "train__context": 64, "model__width": 128}


def machine(num_hosts: int = 1, *, measured_at: str = "2026-01-01T00:00:00+00:00", **fields: Any) -> Inventory:
    """Hosts with two devices each, whose rates were measured."""
    rates = {"allreduce_gb_per_s": 1.0, "allreduce_latency_us": 100.0, "measured_at": measured_at}
    if num_hosts > 1:
        rates |= {"network_gb_per_s": 1.0, "network_latency_us": 200.0}
    hosts = inventory(*(2,) * num_hosts, **fields).hosts
    return Inventory(hosts=tuple(host.model_copy(update=rates) for host in hosts))


def planned(measurements: list[Measurement], *, on: Inventory | None = None, **overrides: Any) -> RunPlan:
    """By ddp, unless the overrides say otherwise."""
    config = tiny_config(**COMMON | {"parallel__strategy": "ddp"} | overrides)
    return make_plan(config, on or machine(), measurements=measurements)


def rows(step_ms: float, *, steps: int = 60, exposed: float | None = None) -> list[dict[str, float]]:
    """metrics.jsonl of one attempt; `exposed`: the share of a step in the timed ones."""
    logged: list[dict[str, float]] = [{"step": 1, "tokens_per_s": 1.0, "step_ms": 9 * step_ms}]
    for step in range(10, steps + 1, 10):
        if exposed is not None:  # the profiler slows such a step
            split = {"step_ms": 1.2 * step_ms, "exposed_communication_ms": 1.2 * step_ms * exposed}
            logged.append({"step": step, **{f"split/{phase}": ms for phase, ms in split.items()}})
        logged.append({"step": step, "tokens_per_s": 1.0, "step_ms": step_ms, "eta_s": 1.0})
    return logged


def ended(plan: RunPlan, *, step_s: float, memory_gib: float | None = None) -> TrainResult:
    return TrainResult(
        step=60,
        loss=1.0,
        tokens=1,
        samples_per_s=1.0,
        tokens_per_s=1.0,
        step_ms=1000 * step_s,
        device_utilisation=None,
        peak_memory_gib=plan.predicted.peak_gib(plan.device_kind) if memory_gib is None else memory_gib,
        memory={},
        skipped_steps=0,
        checkpoint="checkpoints/1",
        checkpoint_sha256="",
        stopped_by="steps",
        train_s=1.0,
    )


def ran(
    plan: RunPlan, *, step: float = 1.0, run_id: str = "r1", memory: float = 1.0, exposed: float | None = None
) -> Measurement:
    """What a run measured that took so many times the step that was predicted without corrections, and the memory."""
    free = sum(plan.predicted.step_s.values())
    assert plan.predicted.correction == Correction()
    gib = memory * plan.predicted.peak_gib(plan.device_kind)
    result = ended(plan, step_s=step * free, memory_gib=gib)
    named = plan.model_copy(update={"run_id": run_id})
    return measurement_of(named, result, rows(1000 * step * free, exposed=exposed), ended_at="2026-01-02")


def test_the_next_plan_predicts_what_the_run_measured_and_names_the_run() -> None:
    before = planned([])
    after = planned([ran(before, step=1.2, memory=1.1, run_id="monday")])
    assert after.predicted.step_ms == pytest.approx(1.2 * before.predicted.step_ms)
    assert after.predicted.tokens_per_s == pytest.approx(before.predicted.tokens_per_s / 1.2)
    assert after.predicted.peak_gib("cpu") == pytest.approx(1.1 * before.predicted.peak_gib("cpu"))
    assert after.predicted.correction.runs == ("monday",)
    ratios = zip(after.predicted.step_range_ms, before.predicted.step_range_ms, strict=True)
    assert [now / then for now, then in ratios] == pytest.approx([1.2, 1.2])
    (why,) = reasons(after, "predictions: ")
    assert why == (
        "predictions: corrected by what 1 run on this machine (monday) measured: computing 1.20 x as long, "
        "communication "
        "1.20 x, memory 1.10 x"
    )
    assert not reasons(before, "predictions: ")


def test_corrections_do_not_add_up() -> None:
    """A run of a corrected plan is compared with what the prices are without it."""
    before = planned([])
    first = ran(before, step=1.2, memory=1.1)
    corrected = planned([first])
    result = ended(
        corrected, step_s=1.2 * sum(before.predicted.step_s.values()), memory_gib=1.1 * before.predicted.peak_gib("cpu")
    )
    second = measurement_of(corrected, result, rows(result.step_ms), ended_at="2026-01-03")
    assert second.computing_s == pytest.approx(first.computing_s)
    assert second.communication_s == pytest.approx(first.communication_s)
    assert second.predicted_memory_gib == pytest.approx(first.predicted_memory_gib)
    assert planned([first, second]).predicted.step_ms == pytest.approx(corrected.predicted.step_ms)


def test_one_odd_run_among_the_last_counts_for_little_and_none_for_more_than_the_bound() -> None:
    before = planned([])
    odd = [ran(before, step=step, run_id=f"r{i}") for i, step in enumerate((1.1, 1.12, 4.0, 1.1, 1.12))]
    assert planned(odd).predicted.step_ms == pytest.approx(1.12 * before.predicted.step_ms, rel=0.02)
    alone = planned([ran(before, step=4.0, memory=9.0)])
    assert alone.predicted.step_ms == pytest.approx(MOST * before.predicted.step_ms)
    assert alone.predicted.peak_gib("cpu") == pytest.approx(MOST * before.predicted.peak_gib("cpu"))
    assert reasons(alone, "computing 1.50 x (the bound) as long")
    old = [ran(before, step=1.4, run_id=f"old{i}") for i in range(LAST_RUNS)]
    new = [ran(before, step=0.9, run_id=f"new{i}") for i in range(LAST_RUNS)]
    assert planned(old + new).predicted.correction.runs == tuple(f"new{i}" for i in range(LAST_RUNS))


def test_computing_and_communication_are_corrected_apart_where_steps_were_timed() -> None:
    before = planned([])
    predicted_s, comm_s = sum(before.predicted.step_s.values()), exposed_s(before.predicted.step_s)
    share = comm_s / predicted_s
    measured = ran(before, step=1.05, exposed=1.3 * share / 1.05)
    after = planned([measured]).predicted
    assert exposed_s(after.step_s) == pytest.approx(1.3 * comm_s)
    assert after.step_ms == pytest.approx(1050 * predicted_s)
    for step, exposed in ((1.2, min(0.9, 5 * share / 1.2)), (1.49, 0.0)):
        beyond = planned([ran(before, step=step, exposed=exposed)]).predicted
        most = max(beyond.correction.communication, beyond.correction.computing)
        assert most == pytest.approx(MOST)
        assert beyond.step_ms == pytest.approx(1000 * step * predicted_s), "the other takes what is beyond the bound"


def test_having_run_is_no_advantage_and_no_handicap() -> None:
    """One layout was measured, much slower or faster than planned: all are moved alike, and the order stays."""
    free = planned([], parallel__strategy="auto")
    for step in (0.7, 1.4):
        after = planned([ran(free, step=step)], parallel__strategy="auto")
        assert (after.strategy, after.micro_batches) == (free.strategy, free.micro_batches)
        ratios = [
            now.step_s / then.step_s
            for now, then in zip(after.ranking, free.ranking, strict=True)
            if now.step_s is not None and then.step_s is not None
        ]
        assert len(ratios) > 2
        assert ratios == pytest.approx([step] * len(ratios))


def test_what_runs_of_several_layouts_showed_of_each_other_decides() -> None:
    free = planned([], parallel__strategy="auto")
    others = {name: planned([], parallel__strategy=name) for name in ("ddp", "zero1", "fsdp") if name != free.strategy}
    slower = ran(free, step=1.45, run_id="chosen")
    for name, other in others.items():
        faster = ran(other, step=0.7, run_id=name)
        after = planned([slower, faster], parallel__strategy="auto")
        assert after.strategy == name
    never = planned([slower, faster], parallel__strategy="zero2")
    assert never.predicted.correction.computing == pytest.approx((1.45 + 0.7) / 2)
    assert reasons(never, "as zero2 on 2 ranks did not: 2 runs on this machine (chosen, ")
    assert never.predicted.correction.memory == 1.0


@pytest.mark.parametrize(
    ("on", "overrides"),
    [
        (machine(measured_at="2026-02-02T00:00:00+00:00"), {}),  # measured anew
        (machine(2), {}),
        (machine(kind="cuda", memory_gib=80.0), {}),
        (Inventory(hosts=(machine().hosts[0].model_copy(update={"cores": 64}),)), {}),
        (Inventory(hosts=(machine().hosts[0].model_copy(update={"name": "another"}),)), {}),
        (inventory(2), {}),  # never measured
        (hypothetical_inventory("1x2xA100-80GB-SXM"), {}),
        (machine(), {"parallel__precision": "bf16"}),
        (machine(), {"model__architecture": "gpt2", "model__kv_heads": 4}),
        (machine(), {"train__context": 512}),  # eight times the work
    ],
)
def test_unlike_machines_and_jobs_teach_nothing(on: Inventory, overrides: dict[str, Any]) -> None:
    measured = ran(planned([]), step=1.3, memory=1.3)
    assert planned([measured], on=on, **overrides) == planned([], on=on, **overrides)


def test_jobs_that_are_alike_teach_each_other() -> None:
    measured = ran(planned([]), step=1.3)
    before, after = (planned(each, train__global_batch=32) for each in ([], [measured]))
    assert after.predicted.step_ms == pytest.approx(1.3 * before.predicted.step_ms)


def test_runs_of_this_job_alone_correct_it_where_there_are_any() -> None:
    similar = planned([], train__global_batch=32)
    others = [ran(similar, step=0.9, run_id=f"other{number}") for number in range(2)]
    corrected = planned([ran(planned([]), step=1.2, run_id="this"), *others]).predicted.correction
    assert (corrected.measured, corrected.runs, corrected.computing) == ("this job", ("this",), pytest.approx(1.2))


def test_what_fits_is_never_counted_smaller_and_counted_larger_if_it_was() -> None:
    """What took more than planned gets a smaller micro-batch; less than planned is predicted, and not filled up."""
    sizes = {"train__global_batch": 256, "train__context": 256, "model__width": 512, "parallel__strategy": "zero2"}
    needed_gib = planned([], **sizes).ranking[0].memory_gib
    small = machine(memory_gib=0.95 * needed_gib / MEMORY_SHARE)  # for half of that micro-batch, and no 1.4 times it
    free = planned([], on=small, **sizes)
    less, more = (planned([ran(free, memory=memory)], on=small, **sizes) for memory in (0.7, 1.4))
    assert less.predicted.peak_gib("cpu") == pytest.approx(0.7 * free.predicted.peak_gib("cpu"))
    assert (less.micro_batches, less.largest_micro_batches) == (free.micro_batches, free.largest_micro_batches)
    assert more.micro_batches < free.micro_batches
    assert more.largest_micro_batches < free.largest_micro_batches


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"priced": None}, "not made from this measurement of this machine's rates"),
        ({"rebalance": True}, "its batches could change while it trained"),
        ({"batch_phases": (BatchPhase(0, 48), BatchPhase(5, 96))}, "its batches could change while it trained"),
        ({"idle_hosts": ("host1",)}, "hosts were idle"),
    ],
)
def test_plans_whose_steps_are_not_those_that_were_priced_teach_nothing(change: dict[str, Any], why: str) -> None:
    plan = planned([])
    with pytest.raises(ValueError, match=why):
        ran(plan.model_copy(update=change))


def test_only_steady_steps_of_the_last_attempt_count() -> None:
    plan = planned([])
    result = ended(plan, step_s=0.1)
    with pytest.raises(ValueError, match="after its first step it logged 1 row of figures over 9 steps"):
        measurement_of(plan, result, rows(100, steps=10), ended_at="")
    with pytest.raises(ValueError, match="after its first step it logged 1 row of figures over 9 steps"):
        measurement_of(plan, result, rows(100) + rows(100, steps=10), ended_at="")  # a resume that did the rest
    with pytest.raises(ValueError, match="logged 0 rows of figures over 0 steps"):
        measurement_of(plan, result, [], ended_at="")
    unsteady = rows(100)
    for row in unsteady[1::2]:
        row["step_ms"] *= 2
    with pytest.raises(ValueError, match="not steady"):
        measurement_of(plan, result, unsteady, ended_at="")
    resumed = rows(100, exposed=0.5) + rows(100, exposed=0.25)
    assert measurement_of(plan, result, resumed, ended_at="").exposed_share == pytest.approx(0.25)

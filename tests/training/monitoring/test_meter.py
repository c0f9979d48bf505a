"""Rows of metrics: what they say of the steps since the last one, and that the steps between cost nothing."""

from __future__ import annotations

import json
import math
import mmap
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.support.tiny_shards import MakeRun
from training.data.batch import MicroBatches
from training.monitoring.meter import Meter
from training.records.plan import RunPlan
from training.records.train_result import TrainResult
from training.runtime.process import Rank
from training.strategies import StepStats
from training.strategies.spikes import Spikes
from training.tracking.rows import read_rows


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def plan(make_run: MakeRun) -> RunPlan:
    return RunPlan.read(make_run("metered", train__steps=100))


def meter_of(plan: RunPlan, **options: object) -> Meter:
    given = {"start": 0, "tokens": 0, "rows": (), "micro_batches": MicroBatches.of(plan)} | options
    return Meter(plan, rank=Rank(0, 1, torch.device("cpu")), **{"spikes": Spikes(plan.config.train)} | given)  # type: ignore[arg-type]


def stats(loss: float = 2.0, **changes: object) -> StepStats:
    """The stats of a step of 128 targets."""
    one = {"loss_sum": torch.tensor(128 * loss), "num_targets": 128, "grad_norm": torch.tensor(0.5)} | changes
    return StepStats(**one)  # type: ignore[arg-type]


def test_a_row_is_about_the_newest_step_and_the_rates_since_the_last_row(plan: RunPlan) -> None:
    meter = meter_of(plan)
    for loss in (4.0, 3.0):
        meter.add(stats(loss), num_tokens=128)
    first = meter.row()
    assert (first["loss"], first["grad_norm"], first["tokens"]) == (3.0, 0.5, 256)
    began = time.perf_counter()
    time.sleep(0.2)
    meter.add(stats(2.0), num_tokens=100)
    second, seconds = meter.row(), time.perf_counter() - began
    assert second["tokens"] == 356
    assert second["step_ms"] == pytest.approx(1000 * seconds, rel=0.3)
    assert second["tokens_per_s"] == pytest.approx(100 / seconds, rel=0.3)
    assert second["samples_per_s"] == pytest.approx(8 / seconds, rel=0.3)
    peak = plan.predicted.peak_tflops * 1e12
    assert second["matmul_share"] == pytest.approx(second["tokens_per_s"] * plan.predicted.flops_per_token / peak)
    assert second["eta_s"] == pytest.approx(97 * seconds, rel=0.3)


def test_memory_and_utilisation_are_those_of_the_process(plan: RunPlan) -> None:
    meter = meter_of(plan)
    meter.add(stats(), num_tokens=128)
    before = meter.row()
    held = mmap.mmap(-1, 100 * 2**20)  # not from the heap, which may have room left from other tests
    for _ in range(100):
        held.write(bytes([1]) * 2**20)
    while time.process_time() < meter.devices.probe.cpu_s + 0.2:
        held.find(b"0")
    meter.add(stats(), num_tokens=128)
    after = meter.row()
    grown = after["memory/resident_gib"] - before["memory/resident_gib"]
    assert grown * 1024 == pytest.approx(100, abs=30)
    assert after["memory_average/resident_gib"] == pytest.approx(before["memory/resident_gib"] + grown / 2)
    assert after["memory_peak/resident_gib"] >= after["memory/resident_gib"]
    assert 0.05 < after["device_utilisation"] < 1.5


def test_time_and_steps_in_a_pause_count_in_no_rate(plan: RunPlan) -> None:
    meter = meter_of(plan)
    meter.add(stats(), num_tokens=128)
    meter.row()
    meter.add(stats(), num_tokens=128)
    with meter.paused():
        time.sleep(0.3)
        meter.add(stats(), num_tokens=128)
    row = meter.row()
    assert row["tokens"] == 3 * 128
    assert row["step_ms"] < 150
    assert meter.overall()["train_s"] < 0.15


def test_a_checkpoint_in_between_takes_nothing_from_the_next_row(plan: RunPlan) -> None:
    meter = meter_of(plan)
    meter.add(stats(3.0), num_tokens=128)
    meter.row()
    for loss in (2.0, 1.0):
        meter.add(stats(loss), num_tokens=128)
    with meter.paused():
        meter.read_steps()
    assert meter.row()["loss"] == 1.0


def test_steps_left_out_are_counted_and_the_loss_is_that_of_a_step_that_was_made(make_run: MakeRun) -> None:
    plan = RunPlan.read(make_run("skips", train__on_nonfinite="skip", train__steps=100))
    meter = meter_of(plan, rows=[{"step": 9, "loss": 7.0, "skipped_steps": 2}])
    assert meter.reader.loss == 7.0
    lost = stats(math.nan, grad_norm=torch.tensor(math.nan), skipped=True)
    for one in (stats(3.0), lost):
        meter.add(one, num_tokens=128)
    row = meter.row()
    assert (row["loss"], row["skipped_steps"]) == (3.0, 3)
    meter.add(lost, num_tokens=128)
    assert "loss" not in meter.row()
    assert meter.reader.loss == 3.0


def test_a_step_between_log_points_reads_no_tensor(plan: RunPlan) -> None:
    """On a GPU it would wait for all that is queued. Tensors without content can be kept, not read."""
    meter, nothing = meter_of(plan), torch.empty((), device="meta")
    meter.add(stats(loss_sum=nothing, grad_norm=nothing), num_tokens=128)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        meter.row()


def test_rows_of_two_ranks_have_every_figure(make_run: MakeRun) -> None:
    plan_path = make_run("two", ranks=2, train__steps=20, profile__split_every_steps=6, profile__steps=[3])
    run_ranks(plan_path)
    rows = read_rows(plan_path.parent / "metrics.jsonl")
    wanted = {
        "samples_per_s",
        "tokens_per_s",
        "matmul_share",
        "step_ms",
        "loss",
        "grad_norm",
        "tokens",
        "device_utilisation",
    }
    wanted |= {"memory/resident_gib", "memory_peak/resident_gib", "memory_average/resident_gib"}
    logged = [row for row in rows if "loss" in row]
    assert len(logged) == 20
    assert all(wanted <= row.keys() for row in logged)
    assert all("eta_s" in row for row in logged[1:])
    assert logged[-1]["tokens"] == 20 * 8 * 16
    stalls = [(row["step"], row["log_stall_ms"]) for row in rows if "log_stall_ms" in row]
    assert [step for step, _ in stalls] == list(range(21)), "once a step, though some have more than one row"
    assert 0 < max(stall_ms for _, stall_ms in stalls) < 1000
    (machine,) = (plan_path.parent / "system").glob("*.jsonl")
    last = read_rows(machine)[-1]
    assert last["step"] == 20
    of_it = {key.rpartition("/")[2]: value for key, value in last.items() if key.startswith(f"system/{machine.stem}/")}
    assert 0 < of_it["system_memory_usage_percentage"] < 100
    assert 0 < of_it["cpu_utilization_percentage"] <= 100
    splits = {row["step"]: row for row in rows if "split/step_ms" in row}
    assert splits.keys() == {6, 12, 18}
    for split in splits.values():
        parts = [split[f"split/{part}_ms"] for part in ("data", "forward", "backward", "optimizer")]
        assert min(parts) > 0
        assert 0.7 * split["split/step_ms"] < sum(parts) <= split["split/step_ms"]
        assert 0 < split["split/exposed_communication_ms"] < split["split/step_ms"]
    result = TrainResult.read(plan_path.parent / "result.json")
    assert result.matmul_share is not None
    assert result.mfu is None, "a CPU is in no catalogue"
    assert result.memory.keys() == {"peak_resident_gib", "average_resident_gib"}
    traces = {path.name for path in (plan_path.parent / "profile").iterdir()}
    assert traces == {"step-00000003-rank-0.json.gz", "step-00000003-rank-1.json.gz"}
    assert json.dumps(logged)

"""corrections.json: written by several runs at once, damaged, deleted, and read by the next plan."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from tasks.planning.measured_runs import CORRECTIONS, keep, learn, read_measurements
from tasks.planning.plan import plan_run
from tests.support.configs import inventory, tiny_config
from training.planner.corrections import LAST_RUNS
from training.records.correction import Measurement, Measurements, Priced
from training.records.inventory import Inventory
from training.records.train_result import TrainResult

HOST = inventory(2).hosts[0].model_copy(update={"measured_at": "2026-01-01T00:00:00+00:00"})
MACHINE = Inventory(hosts=(HOST,))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    return tmp_path


def measured(run_id: str, *, layout: str = "ddp on 2 ranks") -> Measurement:
    priced = plan_run(tiny_config(), inventory=MACHINE).priced
    assert priced is not None
    return Measurement(
        run_id=run_id,
        ended_at="2026-01-01",
        priced=priced.model_copy(update={"layout": layout}),
        step_s=1.2,
        exposed_share=None,
        memory_gib=1.0,
        computing_s=0.9,
        communication_s=0.1,
        predicted_memory_gib=1.0,
    )


def test_runs_that_end_at_once_lose_nothing(home: Path) -> None:
    runs = {f"r{number}" for number in range(12)}
    threads = [threading.Thread(target=keep, args=(measured(run, layout=run),)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.run_id for each in read_measurements(MACHINE)} == runs


def test_the_last_runs_of_each_layout_are_kept_and_a_run_counts_once(home: Path) -> None:
    keep(measured("alone", layout="single on 1 rank"))
    for number in range(LAST_RUNS + 2):
        keep(measured(f"r{number}"))
    keep(measured("r3"))
    kept = [each.run_id for each in read_measurements(MACHINE)]
    assert kept == ["alone", "r2", "r4", "r5", "r6", "r3"]


def test_the_next_plan_is_corrected_until_the_file_is_deleted(home: Path) -> None:
    config = tiny_config(parallel__strategy="ddp")
    before = plan_run(config, inventory=MACHINE)
    keep(measured("r1"))
    after = plan_run(config, inventory=MACHINE)
    assert after.predicted.step_ms == pytest.approx(1.2 * before.predicted.step_ms)
    assert plan_run(config, inventory=inventory(2)).predicted == before.predicted, "hosts that were not measured"
    (home / CORRECTIONS).unlink()
    assert plan_run(config, inventory=MACHINE) == before


@pytest.mark.parametrize("content", [b"", b'{"measurements": [{"run_id"', b"\xff\xfe", b'{"by": "another version"}'])
def test_a_damaged_file_costs_corrections_and_no_plan(
    home: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (home / CORRECTIONS).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        plan_run(tiny_config(), inventory=MACHINE)
    assert f"planning without the speeds that earlier runs measured: {home / CORRECTIONS} " in caplog.text
    keep(measured("r1"))
    assert [each.run_id for each in Measurements.read(home / CORRECTIONS).measurements] == ["r1"]


def test_a_run_that_teaches_nothing_says_why_and_ends_well(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_run(tiny_config(), inventory=MACHINE, run_id="short")
    plan.write(home / "short" / "plan.json")
    result = TrainResult.model_construct(step_ms=1.0, peak_memory_gib=1.0)
    with caplog.at_level(logging.INFO):
        learn(home / "short", result)
    assert "do not correct the predictions of later plans: after its first step it logged 0 rows" in caplog.text
    assert not (home / CORRECTIONS).exists()


def test_a_disk_that_takes_nothing_is_a_warning(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"step": step, "tokens_per_s": 1.0, "step_ms": 5.0, "eta_s": 1.0} for step in (1, 10, 20, 30)]
    del rows[0]["eta_s"]  # an attempt's first row has none
    plan = plan_run(tiny_config(), inventory=MACHINE, run_id="long")
    plan.write(home / "long" / "plan.json")
    (home / "long" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (home / CORRECTIONS).mkdir()  # neither read nor replaced
    learn(home / "long", TrainResult.model_construct(step_ms=5.0, peak_memory_gib=1.0))
    assert "the speeds that this run measured could not be kept" in caplog.text


def test_hosts_are_the_same_machine_in_any_order() -> None:
    two = (HOST, HOST.model_copy(update={"name": "another"}))
    either = [plan_run(tiny_config(), inventory=Inventory(hosts=hosts)).priced for hosts in (two, two[::-1])]
    assert isinstance(either[0], Priced)
    assert either[0] == either[1]

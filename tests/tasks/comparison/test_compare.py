"""The rows of a comparison from what the runs left behind, and the files that show them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.comparison.compare import Comparison, StrategyOutcome, StrategyRow, compare_runs, one_device, outcome_of
from tasks.comparison.report import headline, table, write_page
from tasks.comparison.strategies import read_strategies
from tasks.planning.price import RunCost
from tasks.runs.errors import RunFailed, RunStopped
from tests.support.configs import inventory, read_plan, tiny_config
from training.planner.plan import make_plan

STEPS, TOKENS = 40, 8 * 16
DONE = StrategyOutcome(outcome="done", run_id="run")


def run_folder(folder: Path, *, strategy: str, ranks: int, samples_per_s: float, loss_shift: float = 0.0) -> Path:
    """A run whose loss falls from 4.0 by 0.05 a step; its first row is slow, and one later row was disturbed."""
    config = tiny_config(parallel__strategy=strategy, train__steps=STEPS, train__log_every_steps=2)
    make_plan(config, inventory(ranks), run_id=folder.name).write(folder / "plan.json")
    rows = [{"step": 0, "time_ms": 0, "trainable_parameters": 5}]
    for step in (1, *range(2, STEPS + 1, 2)):
        rate = samples_per_s / (100 if step <= 4 else 10 if step == 20 else 1)
        rows.append(
            {
                "step": step,
                "tokens": step * TOKENS,
                "samples_per_s": rate,
                "tokens_per_s": 16 * rate,
                "step_ms": 8000 / rate,
                "matmul_share": 0.3,
                "device_utilisation": 0.9,
                "elapsed_s": step * 8 / samples_per_s,
                "loss": 4.0 - 0.05 * step + loss_shift,
                "memory/resident_gib": 0.4,
                "memory_peak/resident_gib": 0.6 + step / 1000,
                "memory_average/resident_gib": 0.5,
            }
        )
        if step % 10 == 0:
            rows.append({"step": step, "split/exposed_communication_ms": 2.0 + (step == 10)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {
        "single": run_folder(tmp_path / "single", strategy="single", ranks=1, samples_per_s=100.0),
        "ddp": run_folder(tmp_path / "ddp", strategy="ddp", ranks=2, samples_per_s=150.0, loss_shift=1e-6),
        "fsdp": run_folder(tmp_path / "fsdp", strategy="fsdp", ranks=2, samples_per_s=80.0, loss_shift=0.5),
    }


REFUSED = StrategyOutcome(outcome="refused", cause="tp does not divide <heads>")


def compared(
    folders: dict[str, Path], *, target_loss: float = 0.0, **outcomes: StrategyOutcome
) -> dict[str, StrategyRow]:
    strategies = read_strategies(["ddp,fsdp,tp2"])
    known = {"single": DONE, "ddp": DONE, "fsdp": DONE, "tp2": REFUSED, **outcomes}
    rows, _ = compare_runs(strategies, known, folders=folders, target_loss=target_loss)
    return {row.strategy: row for row in rows}


def test_rates_are_medians_after_warm_up(folders: dict[str, Path]) -> None:
    rows = compared(folders)
    assert rows["single"].samples_per_s == 100.0, "neither the slow start nor the disturbed row shows"
    assert rows["ddp"].tokens_per_s == 2400.0
    assert rows["ddp"].step_ms == pytest.approx(8000 / 150)
    assert rows["ddp"].exposed_communication_ms == 2.0
    assert rows["ddp"].peak_memory_gib == 0.64
    assert rows["ddp"].average_memory_gib == 0.5


def test_speedup_and_efficiency_are_against_one_device(folders: dict[str, Path]) -> None:
    rows = compared(folders)
    assert (rows["ddp"].speedup, rows["ddp"].scaling_efficiency) == (1.5, 0.75)
    assert rows["single"].speedup == 1.0
    assert rows["ddp"].loss_difference == pytest.approx(1e-6)
    without = compared(folders, single=StrategyOutcome(outcome="out of memory", cause="no room"))
    assert without["ddp"].speedup is None, "there is nothing to hold it against"
    assert without["ddp"].samples_per_s == 150.0


def test_device_hours_per_token_are_always_there_and_costs_where_devices_have_prices(
    folders: dict[str, Path], comparison: Comparison
) -> None:
    row = compared(folders)["ddp"]
    assert row.device_hours_per_1b_tokens == pytest.approx(2 * 1e9 / 2400 / 3600)
    assert (row.cost_per_1b_tokens, row.cost) == (None, None)
    assert not any(heading.startswith(("cost", "MFU")) for heading in table(comparison)[0]), "no column of empty cells"

    plan = read_plan(folders["ddp"])
    plan.model_copy(update={"price_per_hour": 0.04}).write(folders["ddp"] / "plan.json")
    spent = RunCost(device_hours={"training": 1.0}, cost={"training": 0.5}, currency="USD", tokens=5120)
    spent.write(folders["ddp"] / "cost.json")
    rows = compared(folders)
    priced = comparison.model_copy(update={"rows": tuple(rows.values())})
    headings, cells = table(priced)
    shown = dict(zip(headings, cells[1], strict=True))
    assert (shown["cost, per 1B tokens"], shown["cost, of the run"]) == ("4.63 USD", "0.50 USD")
    assert "ddp is the cheapest: 4.63 USD per 1B tokens." in headline(priced)
    assert "4.63 USD" not in table(priced)[1][0], "the others have no price"


def test_batches_and_errors_of_the_prediction(folders: dict[str, Path]) -> None:
    row = compared(folders)["ddp"]
    assert (row.micro_batches, row.accumulation, row.batches_per_device, row.total_batch) == ((2, 2), 2, (4, 4), 8)
    assert row.predicted_tokens_per_s is not None
    assert row.speed_error == pytest.approx(2400 / row.predicted_tokens_per_s - 1)
    assert row.predicted_memory_gib is not None
    assert row.memory_error == pytest.approx(0.64 / row.predicted_memory_gib - 1)


def test_steps_to_a_given_target(folders: dict[str, Path]) -> None:
    rows = compared(folders, target_loss=3.0)
    # The mean of the last five rows is that of two rows before: loss 3.0 at step 20 shows at 24.
    assert (rows["single"].steps_to_target, rows["single"].seconds_to_target) == (24, 24 * 8 / 100)
    assert rows["fsdp"].steps_to_target == 34
    assert compared(folders, target_loss=0.1)["single"].steps_to_target is None


def test_without_a_target_it_is_the_lowest_that_all_have_reached(folders: dict[str, Path]) -> None:
    rows = compared(folders)
    assert rows["fsdp"].steps_to_target == STEPS, "its lowest is the highest"
    assert rows["single"].steps_to_target == 30
    stopped = compared(folders, fsdp=StrategyOutcome(outcome="stopped", cause="interrupted"))
    assert stopped["single"].steps_to_target == STEPS, "a run that was stopped sets no target"
    assert stopped["fsdp"].samples_per_s == 80.0, "but shows what it measured"


def test_a_failure_is_a_row_with_its_cause_and_no_figures(folders: dict[str, Path]) -> None:
    rows = compared(folders, fsdp=StrategyOutcome(outcome="error", cause="boom"))
    assert (rows["tp2"].outcome, rows["tp2"].cause, rows["tp2"].devices) == ("refused", REFUSED.cause, None)
    assert (rows["fsdp"].cause, rows["fsdp"].devices, rows["fsdp"].samples_per_s) == ("boom", 2, None)


LOST_IN_TRIAL = "gpu1, GPU 3: torch.OutOfMemoryError: of 80 GiB"
LOST = "gpu1: training.runtime.errors.NonFiniteLoss: step 8"


@pytest.mark.parametrize(
    ("error", "outcome", "cause"),
    [
        (ValueError("tp does not fit\nat all"), "refused", "tp does not fit"),
        (RunFailed("training.train on …", cause="bad loss", detail=LOST), "bad loss", "NonFiniteLoss: step 8"),
        (
            RunFailed("training.trainer.trial on …", cause="out of memory", detail=LOST_IN_TRIAL),
            "out of memory",
            "OutOfMemoryError: of 80 GiB",
        ),
        (
            RunFailed("training.train on …", cause="killed", detail="gpu1: rank 1 was killed (SIGKILL)"),
            "killed",
            "gpu1: rank 1 was killed",
        ),
        (RunFailed("the container's memory is used up", cause="out of memory"), "out of memory", "the container's"),
        (RuntimeError("MLflow did not answer"), "error", "MLflow did not answer"),
        (RunStopped("interrupted"), "stopped", "interrupted"),
    ],
)
def test_errors_have_a_kind_and_one_line(error: Exception, outcome: str, cause: str) -> None:
    found = outcome_of(error)
    assert found.outcome == outcome
    assert found.cause.startswith(cause)
    assert "\n" not in found.cause


def test_the_baseline_gets_one_device_with_its_share_of_the_cores() -> None:
    (host,) = one_device(inventory(4, 4)).hosts
    assert (len(host.devices), host.cores) == (1, 2), "each of the 4 ranks has 2 of the 8 cores"


@pytest.fixture
def comparison(folders: dict[str, Path]) -> Comparison:
    return Comparison(
        run_id="tiny-compare-1",
        mlflow_run_id="0",
        name="tiny",
        rows=tuple(compared(folders).values()),
        target_loss=2.4,
        target_was_given=False,
        machine=("host0: 2 x cpu",),
        commit="0" * 40,
        command="shardline compare comparison.yaml --strategies ddp,fsdp,tp2",
        open_mlflow="mlflow ui",
        report="comparison.html",
    )


def test_the_page_is_one_file_and_says_what_failed(comparison: Comparison, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"png")
    write_page(tmp_path / "page.html", comparison, chart=picture, config="name: tiny")
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "http" not in page
    assert 'src="data:image/png;base64,cG5n"' in page
    assert "tp does not divide &lt;heads&gt;" in page
    assert comparison.command in page


def test_table_and_headline(comparison: Comparison) -> None:
    headings, rows = table(comparison)
    ddp = dict(zip(headings, rows[1], strict=True))
    assert ddp["strategy"] == "ddp"
    assert (ddp["speed, samples/s"], ddp["speed-up, vs one device"], ddp["outcome"]) == ("150", "1.50x", "done")
    assert "ddp is the fastest: 2,400 tokens/s, 1.50x one device (75% scaling efficiency)" in headline(comparison)
    assert "Not finished: tp2 (refused)" in headline(comparison)

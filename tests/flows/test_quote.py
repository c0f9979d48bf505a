"""`shardline quote`: rows are plans, the choice is the best of them, and what cannot be used is refused."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from flows.cli.command import main
from flows.presets import load_config
from tasks.planning import quote as quoting
from tasks.planning.machines import EXAMPLE, Machines, read_machines
from tasks.planning.plan import plan_run
from tasks.planning.quote import Goals, Quote, make_quote, read_deadline
from tasks.planning.text import TextEstimate
from tests.support.manifests import write_manifest
from training.config.run import RunConfig
from training.planner.gpu_catalog import known_gpus
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.planner.job import Layout
from training.planner.price.pricing import PricedLayout
from training.planner.price.replicas import RankPrices
from training.records.token_shards import TokenShards
from training.shards.format import MANIFEST
from training.shards.packing import Epoch

H100 = {"name": "h100", "hosts": "8xH100-80GB-SXM,400Gb", "price_per_hour": 30, "source": "s", "date": "2026-11-01"}
MACHINES: dict[str, Any] = {
    "currency": "EUR",
    "machines": [
        H100 | {"counts": [1, 2]},
        {"name": "a10", "hosts": "1xA10", "price_per_hour": 0.6},
        {"name": "4090", "hosts": "1xRTX-4090", "price_per_hour": 0.3, "date": "2026-11-01"},
        {"name": "unpriced", "hosts": "1xL4"},
    ],
}


def small() -> RunConfig:
    model = ["model.width=256", "model.heads=8", "model.kv_heads=4", "train.optimizer=adamw"]
    return load_config("quickstart", [*model, "train.steps=100000", "train.micro_batch=2"])


@pytest.fixture(scope="module")
def quoted() -> Quote:
    return make_quote(small(), Machines.model_validate(MACHINES), Goals(1e9, 1e9))


def test_a_row_is_the_plan_for_its_hosts(quoted: Quote) -> None:
    config = small()
    config = config.model_copy(update={"train": config.train.model_copy(update={"target_minutes": 0.0})})
    assert [row.machine for row in quoted.rows].count("h100") == 2
    for row in quoted.rows:
        plan = plan_run(config, inventory=hypothetical_inventory(row.hosts))
        assert (row.train_s, row.tokens_per_s) == (plan.predicted.train_s, plan.predicted.tokens_per_s)
        assert (row.strategy, row.mesh, row.steps) == (plan.strategy, plan.mesh, plan.steps)
        assert row.train_range_s == pytest.approx([ms * plan.steps / 1000 for ms in plan.predicted.step_range_ms])
        assert row.memory_gib == pytest.approx(sum(plan.predicted.memory_gib.values()), rel=0.05)
        if row.cost is not None:
            per_hour = {"h100": 30, "a10": 0.6, "4090": 0.3}[row.machine] * row.num_hosts
            assert row.cost == pytest.approx(per_hour * plan.predicted.train_s / 3600)


@pytest.mark.parametrize("always", [48, 1])
def test_the_marked_rows_are_the_best_of_all(always: int, quoted: Quote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where hosts that cannot be the answer are not planned."""
    monkeypatch.setattr(quoting, "PLANNED_FIRST", always)
    priced = [row for row in quoted.rows if row.cost is not None]
    times, costs = sorted(row.train_s for row in priced), sorted(row.cost or 0 for row in priced)
    for deadline_s in (0.5 * times[0], 1.01 * times[0], 1.01 * times[-1]):
        for budget in (0.5 * costs[0], 1.01 * costs[0], 1.01 * costs[-1]):
            found = make_quote(small(), Machines.model_validate(MACHINES), Goals(deadline_s, budget))
            in_time = min((r.cost or 0 for r in priced if r.train_s <= deadline_s), default=None)
            affordable = min((r.train_s for r in priced if (r.cost or 0) <= budget), default=None)
            assert (found.cheapest and found.cheapest.cost) == in_time
            assert (found.fastest and found.fastest.train_s) == affordable
            said = " ".join(found.verdict)
            assert ("none is done within" in said) == (in_time is None)
            assert ("none costs at most" in said) == (affordable is None)
            both = any(row.meets for row in found.rows)
            assert ("none meets both" in said) != both


def test_what_the_nearest_would_take_is_enough(quoted: Quote) -> None:
    nearest = min(quoted.rows, key=lambda row: row.train_s)
    missed = make_quote(small(), Machines.model_validate(MACHINES), Goals(0.9 * nearest.train_s, None))
    assert missed.cheapest is None
    assert nearest.name in missed.verdict[0]
    needed = missed.verdict[0].partition("--deadline ")[2].partition(",")[0]
    assert (
        make_quote(small(), Machines.model_validate(MACHINES), Goals(read_deadline(needed), None)).cheapest is not None
    )
    least = min(row.cost for row in quoted.rows if row.cost is not None)
    dear = make_quote(small(), Machines.model_validate(MACHINES), Goals(None, 0.4 * least))
    needed = dear.verdict[0].partition("--budget ")[2].partition(",")[0]
    assert dear.fastest is None
    assert make_quote(small(), Machines.model_validate(MACHINES), Goals(None, float(needed))).fastest is not None


def test_without_prices_the_fastest_is_said_and_no_picture_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory without a network is one host; a number of hosts that is given twice is one row."""
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "runs"))
    file = tmp_path / "machines.yaml"
    own = [{"name": "own", "hosts": "1xA10,64GiB"}, {"name": "lent", "hosts": "1xL4", "counts": [1, 1]}]
    file.write_text(yaml.safe_dump({"currency": "EUR", "machines": own}))
    assert main(["quote", "quickstart", "train.steps=1000", "--deadline", "1W", "--machines", str(file), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["num_hosts"] for row in answer["rows"]] == [1, 1]
    assert answer["verdict"][0].startswith("none that is done within 7 d has a price; the fastest is 1 x own")
    assert (answer["cheapest"], answer["picture"]) == (None, "")
    file.write_text("")
    assert main(["quote", "quickstart", "--deadline", "1w", "--machines", str(file)]) == 2
    assert "currency: Field required; machines: Field required" in capsys.readouterr().err


@pytest.mark.slow
def test_two_hundred_types_of_machines_take_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second prices 1,200 to 2,600 layouts, and ten are promised."""
    plans, layouts, price = Mock(wraps=quoting.plan_run), list[Layout](), RankPrices.price

    def counted(by_rank: RankPrices, layout: Layout) -> PricedLayout:
        layouts.append(layout)
        return price(by_rank, layout)

    monkeypatch.setattr(quoting, "plan_run", plans)
    monkeypatch.setattr(RankPrices, "price", counted)
    machines = [
        {"name": f"{n} {gpu.name}", "hosts": f"{n}x{gpu.name},100Gb", "counts": [1, 2]}
        | {"price_per_hour": n * gpu.peak_tflops["fp32"] ** 0.5}
        for gpu in known_gpus().values()
        for n in (1, 2, 4, 8, 16)
    ]
    offers = Machines.model_validate({"currency": "EUR", "machines": machines})
    found = make_quote(load_config("gpt2-124m", []), offers, Goals(None, 50.0))
    assert len(found.rows) + len(found.cannot) + len(found.not_planned) == 2 * len(machines) > 380
    assert plans.call_count < 50
    assert len(layouts) < 20_000


def test_epochs_count_where_the_text_is_known(tmp_path: Path) -> None:
    config = small()
    config = config.model_copy(update={"train": config.train.model_copy(update={"max_epochs": 2.0})})
    one = Machines.model_validate(MACHINES | {"machines": [H100 | {"counts": [1]}]})
    write_manifest(tmp_path, [], vocab_size=300, end_id=0)
    shards = TokenShards.read(tmp_path / MANIFEST)
    epoch = Epoch(1_000_000 // config.train.context, 1_000_000)
    text = TextEstimate("my texts", shards, shards, (epoch,), is_counted=True, read_bytes=1)
    batch_tokens = config.train.global_batch * config.train.context
    assert make_quote(config, one, Goals(1e9, None), text=text).rows[0].steps == 2_000_000 // batch_tokens
    unknown = make_quote(config, one, Goals(1e9, None))
    assert unknown.rows[0].steps == config.train.steps
    assert "train.max_epochs is left out: how much text there is, is not known here" in unknown.notes


def test_prices_that_are_missing_or_old_are_said() -> None:
    said = "\n".join(Machines.model_validate(MACHINES).warnings(datetime.date(2027, 6, 1)))
    assert "no price_per_hour, so no cost: unpriced" in said
    assert "without a date, so they may be old: a10" in said
    assert "older than 90 days (up to 212), look them up again: h100, 4090" in said


def test_json_is_one_object_and_the_picture_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "runs"))
    file = tmp_path / "machines.yaml"
    file.write_text(yaml.safe_dump(MACHINES))
    words = ["quote", "quickstart", "train.steps=1000", "--deadline", "12h", "--machines", str(file)]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["cheapest"] in answer["rows"]
    assert (answer["currency"], answer["fastest"], answer["deadline_s"]) == ("EUR", None, 43_200)
    assert {row["steps"] for row in answer["rows"]} == {1000}, "the deadline takes the place of train.target_minutes"
    assert Path(answer["picture"]).read_bytes().startswith(b"\x89PNG")
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert answer["cheapest"]["hosts"] in shown
    assert "s (2026-11-01)" in shown
    assert answer["picture"] in shown.replace("\n", "")


def test_the_example_is_read_and_dated() -> None:
    example = read_machines(EXAMPLE)
    assert all(each.price_per_hour and each.date and "." in each.source for each in example.machines)


def test_deadlines() -> None:
    assert [read_deadline(text) for text in ("7d", "12h", "90m", "1.5 d", "1w", "1D 12h")] == [
        604_800,
        43_200,
        5400,
        129_600,
        604_800,
        129_600,
    ]


@pytest.mark.parametrize(
    ("words", "machine", "said"),
    [
        (["--deadline", "7 parsecs"], {}, "--deadline 7 parsecs: write weeks, days, hours or minutes"),
        (["--deadline", "0d"], {}, "--deadline 0d"),
        (["--budget", "-5"], {}, "--budget -5: give an amount above 0"),
        (["--budget", "0"], {}, "--budget 0: give an amount above 0 EUR"),
        ([], {}, "--deadline 7d"),
        (["--deadline", "7d"], {"hosts": "8xH1000"}, "h100: no GPU named 'H1000' is known; did you mean"),
        (["--deadline", "7d"], {"hosts": "1xCPU"}, "machines without an NVIDIA GPU cannot be quoted"),
        (["--deadline", "7d"], {"hosts": "2x8xH100-80GB-SXM,400Gb"}, "write one host of one kind"),
        (["--deadline", "7d"], {"hosts": "8xH100-80GB-SXM,400Gb+1x4xRTX-3090"}, "write one host of one kind"),
        (["--deadline", "7d"], {"hosts": "8xH100-80GB-SXM", "counts": [2]}, "h100: 2x8xH100-80GB-SXM: 2 hosts need"),
        (["--deadline", "7d"], {"counts": [0]}, "machines.1.counts.1: Input should be greater than or equal to 1"),
        (["--deadline", "7d"], {"price_per_hour": -1}, "machines.1.price_per_hour: Input should be greater than"),
        (["--deadline", "7d"], {"price_per_hour": "$3"}, "machines.1.price_per_hour: Input should be a valid number"),
        (["--deadline", "7d"], {"counts": [1_000_000_000]}, "machines.1.counts.1: Input should be less than"),
        (["--deadline", "7d"], {"currency": "USD"}, "machines.1.currency: there is no such field: a machine has name"),
        (["--deadline", "7d"], {"name": "4090"}, "4090 is there more than once"),
    ],
)
def test_what_cannot_be_used_is_refused(
    words: list[str],
    machine: dict[str, object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "runs"))
    file = tmp_path / "machines.yaml"
    changed = [H100 | machine, *MACHINES["machines"][1:]]
    file.write_text(yaml.safe_dump(MACHINES | {"machines": changed}))
    assert main(["quote", "quickstart", *words, "--machines", str(file)]) == 2
    assert said in capsys.readouterr().err

"""Prices of devices: which one a device has, what a plan says it will cost, and what a run's stages did cost."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tasks.planning.describe import describe_plan
from tasks.planning.plan import plan_run
from tasks.planning.price import RunCost, price_of, price_per_hour
from tests.support.configs import inventory, tiny_config
from training.config.prices import PricesConfig
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.records.inventory import Device, Inventory


def device(name: str, kind: str = "cuda") -> Device:
    return Device.model_validate({"kind": kind, "name": name, "memory_gib": 80})


FIRST = "hypothetical-0"
RANKS = {FIRST: 8, "hypothetical-1": 4}


def two_kinds() -> Inventory:
    return hypothetical_inventory("1x8xH100-80GB-SXM,400Gb+1x4xA100-80GB-SXM")


@pytest.mark.parametrize(
    ("found", "price"),
    [
        (device("NVIDIA H100 80GB HBM3"), 2.5),
        (device("H100-80GB-SXM"), 2.5),
        (device("NVIDIA H100 NVL"), 3.0),
        (device("NVIDIA A100-SXM4-80GB"), 1.5),
        (device("NVIDIA A10"), 0.5),
        (device("NVIDIA A10G"), 9.0),
        (device("x86_64", "cpu"), 0.02),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_longest_match_of_whole_words_counts_and_then_the_kind(found: Device, price: float) -> None:
    prices = {"h100": 2.5, "H100 NVL": 3.0, "nvidia a100-SXM4-80GB": 1.5, "A10": 0.5, "cuda": 9.0, "CPU": 0.02}
    assert price_of(found, PricesConfig(per_device_hour=prices)) == price


def test_the_price_of_an_hour_is_that_of_the_devices_in_use() -> None:
    prices = PricesConfig(per_device_hour={"H100": 2.5, "A100": 1.5})
    assert price_per_hour(prices, two_kinds(), RANKS) == (8 * 2.5 + 4 * 1.5, "")
    assert price_per_hour(prices, two_kinds(), {FIRST: 8}) == (20.0, "")
    assert price_per_hour(PricesConfig(), two_kinds(), RANKS) == (None, ""), "nobody asked"
    assert price_per_hour(PricesConfig(per_device_hour={"cuda": 0}), two_kinds(), RANKS) == (0.0, "")


def test_a_device_without_a_price_makes_the_cost_unknown_and_is_named() -> None:
    config = tiny_config(
        prices__per_device_hour={"H100": 2.5}, train__global_batch=12, train__micro_batch=0, parallel__strategy="ddp"
    )
    plan = plan_run(config, inventory=two_kinds())
    assert (plan.price_per_hour, plan.cost) == (None, None)
    assert plan.reasons[-1] == "cost unknown: prices.per_device_hour has no price for A100-80GB-SXM (cuda)"
    assert "cost" not in dict(describe_plan(plan))
    assert dict(describe_plan(plan))["device hours"].endswith(" per 1B tokens")


def test_a_plan_says_its_device_hours_and_its_cost() -> None:
    config = tiny_config(prices__per_device_hour={"cuda": 2.5}, prices__currency="EUR", parallel__strategy="ddp")
    plan = plan_run(config, inventory=inventory(2, 2, kind="cuda"))
    plan = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"train_s": 1800.0})})
    assert (plan.world_size, plan.price_per_hour, plan.device_hours, plan.cost) == (4, 10.0, 2.0, 5.0)
    rows, tokens = dict(describe_plan(plan)), plan.steps * plan.batch_tokens
    assert rows["device hours"] == f"2 GPU hours predicted, {2e9 / tokens:,.0f} per 1B tokens"
    assert rows["cost"] == (
        f"5.00 EUR predicted, {5e9 / tokens:,.2f} EUR per 1B tokens, at 10.00 EUR an hour for 4 GPUs"
    )


def test_the_metrics_of_a_run_that_has_no_prices_are_its_device_hours() -> None:
    spent = RunCost(device_hours={"training": 3.0, "export": 1.0}, cost=None, currency="USD", tokens=2_000_000)
    assert spent.figures() == {"cost/device_hours": 4.0}
    priced = spent.model_copy(update={"cost": {"training": 6.0, "export": 2.0}})
    assert priced.figures() == {"cost/device_hours": 4.0, "cost/price": 8.0, "cost/per_1b_tokens": 3000.0}
    assert "cost/per_1b_tokens" not in priced.model_copy(update={"tokens": 0}).figures()


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ({"per_device_hour": {"H100": -1}}, "greater than or equal to 0"),
        ({"per_device_hour": {"H100-SXM": 1, "h100 sxm": 2}}, "which match the same devices: keep one"),
        ({"per_device_hour": {"Xeon(R)": 1}}, "should match pattern"),
        ({"currency": "dollars"}, "should match pattern"),
    ],
)
def test_prices_that_make_no_sense_are_refused(prices: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PricesConfig.model_validate(prices)

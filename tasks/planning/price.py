"""Prices a run: before it by its predicted hours, after it by the hours for which its stages used devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from training.config.device_names import value_for
from training.config.prices import PricesConfig
from training.records.inventory import Device, Inventory
from training.records.plan import AnyPlan
from training.records.record import Record

COST = "cost.json"  # a file in the run folder
TRAINING = "training"  # the stage whose hours and cost are also given per token


class RunCost(Record):
    """runs/ID/cost.json, written when a run ends, however it ends: each stage's device hours and cost."""

    device_hours: dict[str, float]
    """Hours of all devices together in each stage, from the start of its ranks to their end."""
    cost: dict[str, float] | None
    """Cost of each stage's device hours, in `currency`; None if a device has no price."""
    currency: str
    """Currency of the cost: prices.currency."""
    tokens: int
    """Tokens that training has seen; steps repeated after a failure count once here, but twice in the hours."""

    @property
    def total_device_hours(self) -> float:
        return sum(self.device_hours.values())

    @property
    def total_cost(self) -> float | None:
        return None if self.cost is None else sum(self.cost.values())

    @property
    def cost_per_1b_tokens(self) -> float | None:
        """Return the cost of training alone; None if it is unknown."""
        return None if self.cost is None or not self.tokens else per_1b(self.cost.get(TRAINING, 0.0), self.tokens)

    def figures(self) -> dict[str, float]:
        """Return the metrics for the MLflow run, without unknown ones."""
        known = {
            "cost/device_hours": self.total_device_hours,
            "cost/price": self.total_cost,
            "cost/per_1b_tokens": self.cost_per_1b_tokens,
        }
        return {key: value for key, value in known.items() if value is not None} if self.device_hours else {}


def price_of(device: Device, prices: PricesConfig) -> float | None:
    """Return the price of one hour of the device, by its name, otherwise by its kind; None if there is none."""
    return value_for(prices.per_device_hour, name=device.name, kind=device.kind)


def price_per_hour(
    prices: PricesConfig, inventory: Inventory, ranks_by_host: Mapping[str, int]
) -> tuple[float | None, str]:
    """Return the price per hour of all devices that have ranks, together; None if one has no price.

    The second value is the reason, if there are prices at all; otherwise empty.
    """
    if not prices.per_device_hour:
        return None, ""
    devices = [device for host in inventory.hosts for device in host.devices[: ranks_by_host.get(host.name, 0)]]
    known = [price for device in devices if (price := price_of(device, prices)) is not None]
    if len(known) == len(devices):
        return sum(known), ""
    unpriced = sorted({f"{device.name} ({device.kind})" for device in devices if price_of(device, prices) is None})
    return None, f"cost unknown: prices.per_device_hour has no price for {', '.join(unpriced)}"


def price_per_device(plan: AnyPlan) -> float | None:
    """Return the average price of one hour of one of the plan's devices."""
    return None if plan.price_per_hour is None else plan.price_per_hour / plan.world_size


def attempt_price(plans: Iterable[AnyPlan], ranks: dict[str, int]) -> float | None:
    """Return the price of one device hour, by the first of the plans that has these ranks on these hosts."""
    had = (plan for plan in plans if dict(zip(plan.hosts, plan.ranks_per_host, strict=True)) == ranks)
    return next(map(price_per_device, had), None)


def per_1b(amount: float, tokens: float) -> float:
    return amount / tokens * 1e9

"""The precision of a plan: what the weakest device supports, or each kind of device its own, and why."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.configs import reasons, tiny_config
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.planner.plan import make_plan
from training.records.inventory import Inventory
from training.records.plan import RunPlan

LARGE = {
    "model__layers": 12,
    "model__width": 768,
    "model__heads": 12,
    "model__kv_heads": 12,
    "train__context": 1024,
    "train__global_batch": 512,
    "train__micro_batch": 0,
}
TABLE = {"A100": "bf16", "V100": "fp16"}


def unlike(weaker: str = "V100-32GB-SXM") -> Inventory:
    return hypothetical_inventory(f"1x4xA100-80GB-SXM,200Gb+1x4x{weaker}")


def planned(hosts: Inventory, precision: Any = "auto", **overrides: Any) -> RunPlan:
    return make_plan(tiny_config(**LARGE, parallel__precision=precision, **overrides), hosts)


def reason(plan: RunPlan, start: str) -> str:
    (found,) = reasons(plan, start)
    return found


@pytest.mark.slow
def test_each_kind_of_device_gets_the_precision_that_the_config_names() -> None:
    plan = planned(unlike(), TABLE)
    assert (plan.strategy, plan.mesh) == ("ddp", {"pp": 1, "dp": 8, "tp": 1})
    assert (plan.precision, plan.precisions) == ("fp16", ("bf16",) * 4 + ("fp16",) * 4)
    assert plan.scales_loss
    assert reason(plan, "precision bf16 on A100-80GB-SXM, fp16 on V100-32GB-SXM: asked for by parallel.precision")
    one = planned(unlike(), "fp16")  # whose gradients may be sharded
    gain = one.predicted.step_ms / plan.predicted.step_ms
    assert 0.95 < gain < 1.05
    assert reason(plan, f"precision: with fp16 on all devices a step would take {gain:.2f}x as long")


@pytest.mark.slow
def test_own_precisions_are_chosen_where_they_are_faster() -> None:
    """Beside a P100, which has no fast 16 bits, an A100 would compute in tf32; beside a V100 as fast in fp16."""
    ddp = {"parallel__strategy": "ddp"}
    plan = planned(unlike("P100-16GB-SXM"), **ddp)
    assert (plan.strategy, plan.precision, {*plan.precisions}) == ("ddp", "fp32", {"bf16", "fp32"})
    assert not plan.scales_loss
    one = planned(unlike("P100-16GB-SXM"), "fp32", **ddp)
    gain = one.predicted.step_ms / plan.predicted.step_ms
    assert gain > 1.3
    assert reason(plan, f"precision: with fp32 on all devices a step would take {gain:.2f}x as long")
    assert plan.micro_batches[0] / plan.micro_batches[-1] > one.micro_batches[0] / one.micro_batches[-1]
    alike = planned(unlike())
    assert (alike.precision, alike.precisions) == ("fp16", ())
    why = reason(alike, "precision: with bf16 on A100-80GB-SXM, fp16 on V100-32GB-SXM a step would take ")
    assert re.search(r"(0\.9|1\.0)\dx as long", why)


def test_peaks_are_means_over_ranks_in_their_own_precision() -> None:
    plan = planned(unlike(), {"A100": "bf16", "V100": "fp32"}, parallel__strategy="ddp")
    assert plan.predicted.datasheet_tflops == (312 + 15.7) / 2
    assert plan.predicted.peak_tflops == pytest.approx((0.85 * 312 + 0.88 * 15.7) / 2)


def test_a_table_that_means_one_precision_here_leaves_the_strategy_open() -> None:
    plan = planned(hypothetical_inventory("1x8xA100-80GB-SXM"), TABLE, parallel__strategy="fsdp")
    assert (plan.precision, plan.precisions, plan.strategy) == ("bf16", (), "fsdp")
    few = planned(unlike(), TABLE, parallel__ranks=4)
    assert (few.precision, few.precisions) == ("bf16", ()), "all of the ranks are on A100s"


def test_what_a_plan_chose_means_the_same_again_and_is_possible_on_other_devices() -> None:
    plan = planned(unlike("P100-16GB-SXM"), parallel__strategy="ddp")
    asked = plan.config.model_dump()
    for section, chosen in plan.chosen.items():
        asked[section] |= chosen
    again = make_plan(type(plan.config).model_validate(asked), unlike("P100-16GB-SXM"))
    assert (again.precisions, again.micro_batches) == (plan.precisions, plan.micro_batches)
    other = planned(unlike("V100-32GB-SXM"), plan.pinned_precision, parallel__strategy="ddp")
    assert {*other.precisions} == {"bf16", "fp32"}, "a device that was not there computes in what all supported"


@pytest.mark.parametrize("weaker", ["H100-80GB-SXM", pytest.param("A100-80GB-SXM", marks=pytest.mark.slow)])
def test_fp8_in_a_table_is_refused_as_fp8_for_all_is(weaker: str) -> None:
    hosts = hypothetical_inventory(f"1x4xH100-80GB-SXM,200Gb+1x4x{weaker}")
    table = {"H100": "fp8", "A100": "bf16"}
    assert planned(hosts, table).describe_precision in ("fp8", "fp8 + bf16")
    with pytest.raises(ValueError, match=r"multiples of 16, not train\.context = 1000"):
        make_plan(tiny_config(**(LARGE | {"train__context": 1000}), parallel__precision=table), hosts)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"parallel__strategy": "fsdp"}, "parallel.strategy=fsdp with tp = 1 and pp = 1 has not"),
        ({"parallel__strategy": "ddp", "parallel__tp": 2}, "parallel.strategy=ddp with tp = 2 and pp = 1 has not"),
        ({"parallel__stages": ((12,), (6, 6))}, "parallel.stages with tp = 1 and pp = 1 has not"),
        ({"parallel__pp": 2}, "parallel.strategy=auto with tp = 1 and pp = 2 has not"),
        ({"parallel__precision": {"A100": "bf16"}}, "has none for V100-32GB-SXM: add it, or cuda: fp32 for all others"),
        ({"parallel__precision": {"cuda": "bf16"}}, "compute capability 7.0"),
        ({"parallel__precision": {"A100": "fp8", "V100": "fp16"}}, "fp8 needs 8.9"),
        ({"parallel__precision": {"A100": "bf16", "a100": "fp16"}}, "A100 and a100, which match the same devices"),
        ({"parallel__precision": {}}, "names no device"),
        ({"parallel__precision": {"A100": "fp64"}}, "precision.*A100\n.*fp8"),
        ({"parallel__strategy": "local-sgd"}, "cannot skip a step, as precision fp16"),
    ],
)
def test_what_cannot_be_is_refused(overrides: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_plan(tiny_config(**LARGE, **({"parallel__precision": TABLE} | overrides)), unlike())

"""Unlike devices in a plan: who gets how much of the batch, and why."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest

from tasks.planning.describe import describe_plan
from tests.support.configs import inventory, pinned, reasons, tiny_config
from training.config.run import RunConfig
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.planner.plan import make_plan
from training.planner.price.pricing import COMPUTING
from training.records.inventory import Inventory
from training.records.plan import Place


def unlike(*rates: float, memory_gib: float = 12.0) -> Inventory:
    """Hosts of one CPU rank each, with such fp32 rates and as fast a memory; the last one with so much of it."""
    hosts = inventory(*(1 for _ in rates)).hosts
    devices = [
        host.devices[0].model_copy(update={"matmul_tflops": {"fp32": rate}, "memory_gb_per_s": 100 * rate})
        for host, rate in zip(hosts, rates, strict=True)
    ]
    devices[-1] = devices[-1].model_copy(update={"memory_gib": memory_gib})
    return Inventory(hosts=tuple(h.model_copy(update={"devices": (d,)}) for h, d in zip(hosts, devices, strict=True)))


def test_unlike_hosts_get_unequal_shares_and_the_plan_says_why() -> None:
    plan = make_plan(tiny_config(train__global_batch=24, train__micro_batch=0), unlike(0.2, 0.1))
    assert (plan.micro_batches, plan.accumulation, plan.rebalance) == ((16, 8), 1, True)
    (why,) = reasons(plan, "shares: ")
    equal = make_plan(
        tiny_config(train__global_batch=24, train__micro_batch=0, parallel__shares="equal"), unlike(0.2, 0.1)
    )
    gain = plan.predicted.tokens_per_s / equal.predicted.tokens_per_s
    assert 1.05 < gain < 1.5
    assert re.fullmatch(
        r"shares: cpu 16, cpu 8: in proportion to [\d,]+ and [\d,]+ sequences/s, predicted from matrix products at "
        rf"0\.2 and 0\.1 TFLOP/s; with equal shares \(1 x 12 each\) a step would take {gain:.2f}x as long",
        why,
    )
    computing = [sum(each.predicted.step_s.get(part, 0.0) for part in COMPUTING) for each in (plan, equal)]
    assert 1.15 < computing[1] / computing[0] < 1.5, "what a host launches does not grow with its share"


@pytest.mark.parametrize(
    ("rates", "sizes"),
    [
        ((0.100, 0.107), (8, 8)),  # the noise of like CPUs
        ((0.100, 0.130), (7, 9)),
        ((0.2, 0.2, 0.2, 0.1), (5, 5, 4, 2)),
    ],
)
def test_devices_that_measure_alike_keep_equal_shares(rates: tuple[float, ...], sizes: tuple[int, ...]) -> None:
    config = tiny_config(train__global_batch=16, train__micro_batch=0, parallel__strategy="ddp")
    plan = make_plan(config, unlike(*rates))
    assert (plan.micro_batches, plan.accumulation) == (sizes, 1)


def test_figures_of_unlike_devices_are_said_by_kind() -> None:
    """The ranking has the shares' speed, so that no other one stands beside it."""
    hosts = hypothetical_inventory("1x4xA100-80GB-SXM,400Gb+1x4xRTX-3090,400Gb")
    config = RunConfig.model_validate(
        {
            "model": {"layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "mlp_width": 5632},
            "train": {"context": 4096, "global_batch": 512, "compile": False},
        }
    )
    plan = make_plan(config, hosts)
    said = dict(describe_plan(plan))
    speeds = re.findall(r"([\d,]+) tokens/s predicted", " ".join(plan.reasons))
    assert {*speeds, said["speed"].split(" ")[0]} == {f"{plan.predicted.tokens_per_s:,.0f}"}
    assert plan.ranking[0].tokens_per_s == pytest.approx(plan.predicted.tokens_per_s)
    for share in plan.by_device:
        assert (
            f"{share.memory_gib:.2f} of {share.usable_gib:.2f} GiB on {share.ranks} x {share.device}"
            in said["memory per rank"]
        )
        assert share.memory_gib <= share.usable_gib
    assert [share.device for share in plan.by_device] == ["A100-80GB-SXM", "RTX-3090"]
    assert "of the measured" not in said["speed"]


def test_a_device_that_the_model_does_not_fit_on_is_named_with_the_bytes() -> None:
    bytes_needed, cure = (
        r"7\d\d,\d\d\d,\d\d\d bytes = 0.7 GiB per rank",
        r"leave host1 out \(others have up to 12.0 GiB\)",
    )
    why = f"does not fit on cpu of host1: {bytes_needed} .* too few: {cure}"
    with pytest.raises(ValueError, match=why):
        make_plan(tiny_config(parallel__strategy="ddp"), unlike(0.2, 0.2, memory_gib=0.4))


def test_a_smaller_memory_bounds_its_share() -> None:
    """11 of 32 would be in proportion; 9 fit, and a third micro-batch would cost more than that."""
    large = {"model__width": 512, "train__context": 256, "train__global_batch": 64, "train__micro_batch": 0}
    config = tiny_config(**large, parallel__strategy="zero2")
    plan = make_plan(config, unlike(0.2, 0.1, memory_gib=1.52))
    assert plan.largest_micro_batches[1] == 9
    assert (plan.micro_batches, plan.accumulation) == ((23, 9), 2)
    assert reasons(plan, "cpu 23, cpu 9 (all that its memory holds)")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"parallel__shares": "equal"}, ((12, 12), 1, False)),
        ({"parallel__shares": "equal", "parallel__rebalance": "on"}, ((12, 12), 1, True)),
        ({"parallel__shares": (5, 3)}, ((5, 3), 3, True)),
        ({"parallel__shares": (5, 3), "parallel__rebalance": "off"}, ((5, 3), 3, False)),
        ({"train__micro_batch": 6}, ((8, 4), 2, True)),  # 6 on average
    ],
)
def test_shares_can_be_pinned(overrides: dict[str, Any], expected: tuple[tuple[int, ...], int, bool]) -> None:
    config = tiny_config(**{"train__global_batch": 24, "train__micro_batch": 0, **overrides})
    plan = make_plan(config, unlike(0.2, 0.1))
    assert (plan.micro_batches, plan.accumulation, plan.rebalance) == expected
    again = make_plan(pinned(config, plan), unlike(0.1, 0.3))
    assert (again.micro_batches, again.accumulation, again.rebalance) == expected


def test_ranks_of_one_cpu_share_its_cores_and_so_the_chances_of_a_measurement() -> None:
    (host,) = inventory(2).hosts
    devices = [
        d.model_copy(update={"matmul_tflops": {"fp32": r}}) for d, r in zip(host.devices, (0.1, 0.15), strict=True)
    ]
    machine = Inventory(hosts=(host.model_copy(update={"devices": tuple(devices)}),))
    plan = make_plan(tiny_config(parallel__strategy="ddp"), machine)
    assert not plan.is_unequal
    assert not plan.rebalance


def test_a_replica_is_as_fast_as_its_slowest_device() -> None:
    """dp lies between pp and tp: with tp replica 0 is hosts 0 and 1, with pp hosts 0 and 2; one of them is slow."""
    config = tiny_config(train__global_batch=24, train__micro_batch=0, parallel__tp=2, parallel__strategy="ddp")
    assert make_plan(config, unlike(0.2, 0.2, 0.2, 0.1)).micro_batches == (14, 10), "sums take both as long"
    config = tiny_config(train__global_batch=24, train__micro_batch=0, parallel__pp=2, parallel__strategy="ddp")
    plan = make_plan(config, unlike(0.2, 0.1, 0.2, 0.2))
    assert (plan.micro_batches, plan.accumulation) == ((8, 4), 2)
    assert plan.rebalance


def test_the_prediction_does_not_depend_on_the_process() -> None:
    """Of replicas that finish together the first one's seconds are predicted, whatever strings hash to."""
    code = (
        "from training.config.run import RunConfig\n"
        "from training.planner.hypothetical_hosts import hypothetical_inventory\n"
        "from training.planner.plan import make_plan\n"
        "config = RunConfig.model_validate({'parallel': {'strategy': 'ddp', 'ranks': 2, 'shares': (3, 1)},\n"
        "    'train': {'global_batch': 8}})\n"
        "print(make_plan(config, hypothetical_inventory('1x8xA100-80GB-SXM')).predicted.step_s)"
    )
    environments = [os.environ | {"PYTHONHASHSEED": str(seed)} for seed in range(3)]
    runs = [subprocess.run([sys.executable, "-c", code], env=env, capture_output=True) for env in environments]
    assert runs[0].stdout
    assert len({run.stdout for run in runs}) == 1


# Replicas of unlike shape, and unequal stages

LARGE: dict[str, Any] = {  # 0.38 GiB of weights, gradients and moments
    "model__layers": 8,
    "model__width": 512,
    "train__context": 256,
    "train__global_batch": 48,
    "train__micro_batch": 0,
}


def small_beside_a_large_one(small_gib: float) -> Inventory:
    """One host of full speed, two of half of it with so much memory each."""
    machines = unlike(0.2, 0.1, 0.1)
    small = [
        host.model_copy(update={"devices": (host.devices[0].model_copy(update={"memory_gib": small_gib}),)})
        for host in machines.hosts[1:]
    ]
    hosts = (machines.hosts[0], *small)
    return Inventory(hosts=tuple(host.model_copy(update={"network_gb_per_s": 0.5}) for host in hosts))


def stages(*replicas: tuple[int, ...]) -> dict[str, Any]:
    return LARGE | {"parallel__stages": replicas}


def test_two_small_devices_are_a_replica_beside_one_that_holds_the_model() -> None:
    """Neither of the small ones can hold the model: sharded over all, it is gathered in each micro-batch."""
    plan = make_plan(tiny_config(**LARGE), small_beside_a_large_one(1.25))
    assert (plan.strategy, plan.mesh, plan.world_size) == ("ddp", {"pp": 2, "dp": 2, "tp": 1}, 3)
    assert plan.stages[0] == (8,)
    first, second = plan.stages[1]
    assert (first + second, plan.places[1:]) == (8, [Place(1, 0, 0), Place(1, 1, 0)])
    assert first >= second, "the last stage has the output layer besides"
    assert sum(plan.micro_batches) * plan.accumulation == 48
    assert plan.micro_batches[0] >= plan.micro_batches[1]
    even = make_plan(tiny_config(**LARGE, parallel__stages="even"), small_beside_a_large_one(1.25))
    assert not even.stages
    gain = plan.predicted.tokens_per_s / even.predicted.tokens_per_s
    assert gain > 1.05
    (why,) = reasons(plan, "strategy ddp: cpu alone, cpu in stages of")
    assert ": the fastest that fits, " in why
    assert plan.ranking[0].stages == plan.stages


def test_where_every_device_holds_the_model_replicas_stay_of_one_shape() -> None:
    plan = make_plan(tiny_config(**LARGE), small_beside_a_large_one(12.0))
    assert (plan.stages, plan.mesh) == ((), {"pp": 1, "dp": 3, "tp": 1})


def test_stages_can_be_pinned_and_a_resume_keeps_them() -> None:
    config = tiny_config(**stages((8,), (6, 2)))
    plan = make_plan(config, unlike(0.2, 0.1, 0.1))
    assert (plan.stages, plan.ranks_per_host, plan.config) == (((8,), (6, 2)), (1, 1, 1), config)
    again = make_plan(pinned(config, plan), unlike(0.1, 0.1, 0.3))
    assert (again.stages, again.micro_batches, again.accumulation) == (
        plan.stages,
        plan.micro_batches,
        plan.accumulation,
    )


def test_layers_of_a_pipeline_follow_the_speed_of_its_devices() -> None:
    """No device holds the model, nor do the two small ones together."""
    machines = small_beside_a_large_one(1.05)
    first = machines.hosts[0].devices[0].model_copy(update={"memory_gib": 1.3})
    machines = Inventory(hosts=(machines.hosts[0].model_copy(update={"devices": (first,)}), *machines.hosts[1:]))
    plan = make_plan(tiny_config(**LARGE), machines)
    assert (plan.mesh, plan.stages) == ({"pp": 3, "dp": 1, "tp": 1}, ((4, 2, 2),))
    assert reasons(plan, "cpu in stages of 4 + 2 + 2 layers")
    assert reasons(plan, "does not fit: ddp dp 3")


SHARES: dict[str, Any] = {"train__global_batch": 24}


@pytest.mark.parametrize(
    ("machines", "asked", "why"),
    [
        (unlike(0.2, 0.1), SHARES | {"parallel__shares": (4, 2, 1)}, "are 3 shares, 7 .* 2 data-parallel replicas"),
        (unlike(0.2, 0.1), SHARES | {"parallel__shares": (4, 3)}, "must be a multiple of the shares"),
        (unlike(0.2, 0.1, 0.1), stages((8,), (4, 3)), r"replicas have \[8, 7\] layers"),
        (unlike(0.2, 0.1, 0.1), stages((7,), (4, 3)), "the 8 layers of the model together"),
        (unlike(0.2, 0.1, 0.1), stages((8,), (8,)), "2 replicas of one stage each: set parallel.stages=even"),
        (unlike(0.2, 0.1, 0.1), stages((8,), (2, 2, 2, 2)), "5 ranks with tp = 1, but there are 3 devices"),
        (unlike(*[0.2] * 9), stages((8,), (4, 4)) | {"parallel__tp": 3}, "4 attention heads .* parallel.tp = 3"),
        (
            unlike(*[0.2] * 9),
            stages((8,), (4, 4)) | {"parallel__offload": "optimizer"},
            "offload=optimizer is not there for ddp with tp = 1, pp = 2",
        ),
        (
            small_beside_a_large_one(0.6),
            stages((8,), (1, 7)),
            r"\d layers need [\d.]+ GiB on cpu at micro-batch 1, 0.54 GiB usable: move layers to other stages",
        ),
    ],
)
def test_shares_and_stages_that_cannot_be_are_refused(machines: Inventory, asked: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_plan(tiny_config(**asked), machines)


def test_a_large_output_layer_takes_layers_from_the_last_stage_of_equal_devices() -> None:
    """128,000 words at the width of an 8B model: their products are those of two and a half layers."""
    model = {"layers": 16, "width": 4096, "heads": 32, "kv_heads": 8, "tie_embeddings": False}
    settings: dict[str, Any] = {
        "data": {"path": "stdlib", "tokenizer": {"kind": "bpe", "vocab_size": 128_000}},
        "model": model,
        "train": {"global_batch": 256, "context": 2048},
    }
    hosts = hypothetical_inventory("4x1xV100-32GB-SXM,1Gb")
    plan = make_plan(RunConfig.model_validate(settings), hosts)
    (sizes,) = plan.stages
    assert (plan.mesh, sum(sizes)) == ({"pp": 4, "dp": 1, "tp": 1}, 16)
    assert sizes[-1] < min(sizes[:-1])
    even = make_plan(RunConfig.model_validate(settings | {"parallel": {"stages": "even"}}), hosts)
    assert plan.predicted.tokens_per_s > 1.05 * even.predicted.tokens_per_s


def test_many_runs_of_unlike_devices_are_planned_in_no_time() -> None:
    """Thirty hosts, each unlike its neighbours: combinations of pipelines would be 2^30."""
    rates = [0.2, 0.1] * 15
    hosts = [host.model_copy(update={"devices": host.devices * 4}) for host in unlike(*rates).hosts]
    began = time.monotonic()
    make_plan(tiny_config(**LARGE | {"train__global_batch": 240}), Inventory(hosts=tuple(hosts)))
    assert time.monotonic() - began < 20

"""What the collective test finds of the network goes into the inventory; the strongest host comes first."""

from __future__ import annotations

import pytest

from tasks.hardware.measure_hosts import strongest_first, with_network
from tests.support.configs import inventory
from training.records.node import Bandwidth, CollectiveReport, PairBandwidth


def report(*pairs: tuple[str, str, float]) -> CollectiveReport:
    rates = (
        Bandwidth(num_bytes=1024, seconds=250e-6, algbw_gb_s=0.004, busbw_gb_s=0.006),
        Bandwidth(num_bytes=2**24, seconds=0.02, algbw_gb_s=0.8, busbw_gb_s=1.2),
    )
    return CollectiveReport(
        backend="gloo",
        hosts=("host0", "host1", "host2"),
        num_ranks=3,
        wrong_ranks=(),
        all_reduce=rates,
        pairs=tuple(PairBandwidth(hosts=(one, other), gb_s=rate, latency_s=1e-4) for one, other, rate in pairs),
        seconds=1.0,
    )


def test_the_slowest_host_has_the_bus_bandwidth_and_faster_ones_more() -> None:
    found = report(("host0", "host1", 4.0), ("host0", "host2", 1.0), ("host1", "host2", 0.9))
    hosts = with_network(inventory(1, 1, 1), found).hosts
    assert [host.network_gb_per_s for host in hosts] == pytest.approx([4.8, 4.8, 1.2])
    assert [host.network_latency_us for host in hosts] == pytest.approx([250.0] * 3)


def test_hosts_that_took_no_part_keep_what_they_have() -> None:
    assert with_network(inventory(1), report()).hosts[0].network_gb_per_s == 0.0


def test_the_strongest_host_comes_first_alike_ones_stay_and_gpus_go_before_cores() -> None:
    one, three, two = inventory(1, 3, 2).hosts
    noisy = two.devices[0].model_copy(update={"matmul_tflops": {"fp32": 0.081, "bf16": 0.092}})
    alike = two.model_copy(update={"name": "alike", "devices": (noisy, noisy)})
    assert [host.name for host in strongest_first([one, three, two])] == ["host1", "host2", "host0"]
    assert [host.name for host in strongest_first([two, alike])] == ["host2", "alike"], "within 25%"
    assert [host.name for host in strongest_first([alike, two])] == ["alike", "host2"]
    slow = three.devices[0].model_copy(update={"kind": "cuda", "matmul_tflops": {"fp32": 0.001}})
    gpus = one.model_copy(update={"name": "gpus", "devices": (slow,)})
    assert [host.name for host in strongest_first([three, gpus])] == ["gpus", "host1"]

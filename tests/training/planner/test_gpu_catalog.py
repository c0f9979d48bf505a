"""Known GPUs by the names drivers give them, what is slow beside its like, and inventories of machines not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.cli import command
from training.planner.gpu_catalog import find_gpu, known_gpus, mean_datasheet_tflops, nearest_names, slow_devices
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.records.inventory import Device, Host, Inventory


def gpu(name: str, *, memory_gb_per_s: float = 0.0, **tflops: float) -> Device:
    return Device(
        kind="cuda", name=name, memory_gib=80, matmul_tflops=tflops or {"bf16": 260.0}, memory_gb_per_s=memory_gb_per_s
    )


def hosts(*devices: tuple[Device, ...]) -> Inventory:
    return Inventory(
        hosts=tuple(
            Host(name=f"host{i}", cores=8, memory_gib=64, disk_free_gib=100, devices=some)
            for i, some in enumerate(devices)
        )
    )


# Names


@pytest.mark.parametrize(
    ("driver_name", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-SXM"),
        ("NVIDIA H100 PCIe", "H100-80GB-PCIe"),
        ("NVIDIA H200", "H200-141GB-SXM"),
        ("Tesla V100-SXM2-16GB", "V100-16GB-SXM"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX-3090-Ti"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA H20", "H20-96GB-SXM"),
        ("NVIDIA B300 SXM6 AC", "B300-288GB-SXM"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Blackwell"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX-2080-Ti"),
    ],
)
def test_drivers_names_lead_to_the_table(driver_name: str, known: str) -> None:
    found = find_gpu(driver_name)
    assert found is not None
    assert found.name == known


@pytest.mark.parametrize(
    "other",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "AMD MI300X",
    ],
)
def test_a_lesser_edition_is_not_what_it_is_named_after(other: str) -> None:
    assert find_gpu(other) is None


def test_every_row_has_the_precisions_of_its_capability_and_says_whose_shares_it_takes() -> None:
    for known in known_gpus().values():
        capability = float(known.compute_capability)
        assert ("bf16" in known.peak_tflops) == ("tf32" in known.peak_tflops) == (capability >= 8.0), known.name
        assert ("fp8" in known.peak_tflops) == (capability >= 8.9), known.name
        assert known.measured_as in known_gpus()
        assert known_gpus()[known.measured_as].measured_as == known.measured_as
        for precision, rate in known.attainable_tflops.items():
            assert 0.3 * known.peak_tflops[precision] < rate < 1.2 * known.peak_tflops[precision], known.name


def test_datasheets() -> None:
    h100, t4 = known_gpus()["H100-80GB-SXM"], known_gpus()["T4"]
    assert (h100.peak_tflops["bf16"], h100.peak_tflops["fp8"], h100.memory_gb_per_s) == (989, 1979, 3350)
    assert (t4.peak_tflops, t4.memory_gb_per_s) == ({"fp32": 8.1, "fp16": 65.0}, 320)


def test_mfu_is_of_the_mean_datasheet_and_unknown_where_one_gpu_is() -> None:
    mixed = ["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090"]
    assert mean_datasheet_tflops([(name, "bf16") for name in mixed]) == (312 + 71) / 2
    assert mean_datasheet_tflops([(name, "fp32") for name in mixed]) == (156 + 35.6) / 2, (
        "training uses tf32 where there is one"
    )
    assert mean_datasheet_tflops([(name, "bf16") for name in (*mixed, "NVIDIA GeForce RTX 4090 Laptop GPU")]) is None
    assert mean_datasheet_tflops([("Tesla T4", "bf16")]) is None


# Slow devices


def test_a_gpu_slower_than_another_of_its_name_is_slow_wherever_that_is() -> None:
    slow = slow_devices(hosts((gpu("NVIDIA Q1", bf16=250),), (gpu("NVIDIA Q1", bf16=230), gpu("NVIDIA Q1", bf16=200))))
    assert list(slow) == [("host1", 1)]
    assert "is slow: 200 TFLOP/s in bf16, 20% below another of its kind, 250" in slow["host1", 1]


def test_a_gpu_alone_is_compared_with_what_others_measured() -> None:
    assert slow_devices(hosts((gpu("NVIDIA A100-SXM4-80GB", bf16=250, memory_gb_per_s=1750),))) == {}
    (words,) = slow_devices(hosts((gpu("NVIDIA A100-SXM4-80GB", bf16=200, memory_gb_per_s=1750),))).values()
    assert "200 TFLOP/s in bf16, 25% below the usual 265 (as measured on A100-80GB-SXM)" in words
    (words,) = slow_devices(hosts((gpu("NVIDIA A100-SXM4-80GB", bf16=260, memory_gb_per_s=900),))).values()
    assert "900 GB/s of memory, 50% below the usual 1794" in words


def test_other_kinds_and_unknown_gpus_are_not_compared() -> None:
    assert slow_devices(hosts((gpu("NVIDIA Q1", bf16=250), gpu("NVIDIA Q2", bf16=20)))) == {}


# Machines that are not there


def test_hosts_as_text_become_an_inventory() -> None:
    made = hypothetical_inventory("16x8xH100-80GB-SXM,400Gb")
    assert [len(host.devices) for host in made.hosts] == [8] * 16
    host, device = made.hosts[0], made.hosts[0].devices[0]
    assert len({host.name for host in made.hosts}) == 16
    assert made.device_kind == "cuda"
    assert device.matmul_tflops["bf16"] == pytest.approx(0.8 * 989)
    assert host.allreduce_gb_per_s == pytest.approx(370, rel=0.05)  # nccl-tests on 8 H100
    assert host.network_gb_per_s == pytest.approx(46, rel=0.01)  # 400 Gbit/s are 50 GB/s, for all 8 GPUs
    assert host.network_latency_us > host.allreduce_latency_us > 0
    eight = hypothetical_inventory("2x8xH100-80GB-SXM, 8x400Gb").hosts[0]
    assert eight.network_gb_per_s == pytest.approx(8 * host.network_gb_per_s)


def test_unlike_hosts_share_the_slower_network() -> None:
    made = hypothetical_inventory("1x8xA100-80GB-SXM,200Gb+1x4xRTX-3090")
    assert [(host.devices[0].name, len(host.devices)) for host in made.hosts] == [("A100-80GB-SXM", 8), ("RTX-3090", 4)]
    assert made.hosts[0].network_gb_per_s == made.hosts[1].network_gb_per_s == pytest.approx(23)
    assert made.hosts[1].allreduce_gb_per_s < 20  # PCIe: a bridge joins two of the four
    made = hypothetical_inventory("1x8xA100-80GB-SXM,1.5TiB,200Gb+1x4xRTX-3090,100Gb, 64GiB")
    assert [(host.memory_gib, host.network_gb_per_s) for host in made.hosts] == [(1536, 23), (64, 11.5)]


def test_a_host_alone_needs_no_network() -> None:
    (host,) = hypothetical_inventory("1x1xT4").hosts
    assert (host.network_gb_per_s, host.allreduce_gb_per_s) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("16x8xH100,400Gb", "did you mean H100-80GB-SXM, H100-80GB-PCIe, H100-94GB-NVL"),
        ("1x8xRTX3090", "did you mean RTX-3090"),
        ("8xT4", "is not HOSTSxGPUSxNAME,NETWORK"),
        ("0x8xT4", "no hosts or no GPUs"),
        ("2x8xT4", "need a network"),
        ("2x8xT4,fast", "such as 400Gb, 8x400Gb or 100Mb; and memory, if you give it, as 64GiB"),
        ("2x8xT4,400GB", "write 3200Gb if you mean that, or 400Gb for 400 gigabits/s"),
        ("1x8xMI300X", "'MI300X' is none of NVIDIA's GPUs"),
        ("1x8xRadeon-RX-7900", "is none of NVIDIA's GPUs"),
        ("", "'' is not HOSTSxGPUSxNAME,NETWORK"),
        ("-1x8xT4", "'-1x8xT4' is not HOSTSxGPUSxNAME,NETWORK"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_cure(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hypothetical_inventory(text)


@pytest.mark.parametrize("text", ["", "-1x8xT4"])
def test_the_command_says_so_in_our_words_and_plans_nothing(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["plan", "--hosts", text]) == 2
    assert f"shardline: --hosts: {text!r} is not HOSTSxGPUSxNAME,NETWORK" in capsys.readouterr().err


def test_nearest_names_are_those_with_all_its_words_first() -> None:
    assert nearest_names("A100-80GB") == ["A100-80GB-SXM", "A100-80GB-PCIe"]


def test_a_plan_for_other_machines_does_not_measure_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    assert command.main(["plan", "llama-1b", "--hosts", "2x8xA100-80GB-SXM,200Gb", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["ranks_per_host"], plan["device_kind"], plan["precision"]) == ([8, 8], "cuda", "bf16")
    assert any("hypothetical hosts: nothing was measured" in reason for reason in plan["reasons"])
    assert not (tmp_path / "hardware.json").exists()

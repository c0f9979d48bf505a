"""What the doctor's report tells: the numbers, their meaning, and a cure with every warning."""

from __future__ import annotations

import json
from typing import Any

from tasks.hardware.doctor import doctor_record, doctor_report, find_warnings, hardware_rows
from training.records.inventory import Device, Host, Inventory, Link


def cpu_host(*, num_devices: int = 2, bf16: float = 0.4, **changes: Any) -> Host:
    device = Device(
        kind="cpu", name="AMD EPYC", memory_gib=12, matmul_tflops={"fp32": 0.1, "bf16": bf16}, memory_gb_per_s=15
    )
    facts: dict[str, Any] = {
        "name": "bench",
        "cores": 2,
        "memory_gib": 24,
        "disk_free_gib": 70,
        "devices": (device,) * num_devices,
        "allreduce_gb_per_s": 0.4,
        "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "c++": "12"},
        "shared_memory_gib": 8.0,
    }
    return Host(**facts | changes)


def gpu(name: str = "NVIDIA A100", *, bf16: float = 250.0, memory_gib: float = 80, capability: str = "8.0") -> Device:
    return Device(
        kind="cuda",
        name=name,
        memory_gib=memory_gib,
        compute_capability=capability,
        matmul_tflops={"fp32": 18.0, "tf32": 120.0, "bf16": bf16, "fp16": 250.0},
        memory_gb_per_s=1400,
    )


def report(*hosts: Host) -> str:
    return doctor_report(Inventory(hosts=hosts), width=200)


def test_the_report_says_what_the_numbers_mean() -> None:
    text = report(cpu_host())
    assert "2 cores, 24.0 GiB memory" in text
    assert "precision: bf16, because bf16 matrix products measured 4.0x as fast as fp32" in text
    assert "ranks: 2, 1 thread each" in text
    assert "up to 805 M parameters" in text  # 12 GiB / 16 bytes
    assert "0.4 GB/s bus bandwidth between 2 ranks, 1 s for the fp32 gradients of 100M" in text  # 0.4 GB
    assert "room for 62 checkpoints" in text  # 75.2 GB / 1.2 GB
    assert "!" not in text


def test_slow_bf16_means_fp32() -> None:
    assert "precision: fp32, because bf16 measured only 0.5x" in report(cpu_host(bf16=0.05))


def test_the_bus_bandwidth_is_turned_back_into_time() -> None:
    meaning = doctor_record(Inventory(hosts=(cpu_host(num_devices=4, cores=4),)))["meaning"]
    assert meaning["allreduce_100m_fp32_s"] == {"bench": 1.5}  # 0.4 GB x 2 x 3/4 at 0.4 GB/s


def test_the_record_is_one_json_object_with_inventory_and_meaning() -> None:
    inventory = Inventory(hosts=(cpu_host(num_devices=1, allreduce_gb_per_s=0.0),))
    record = json.loads(json.dumps(doctor_record(inventory)))
    assert record["meaning"]["precision"] == "bf16"
    assert record["meaning"]["allreduce_100m_fp32_s"] == {"bench": None}
    assert Inventory.model_validate({"hosts": record["hosts"]}) == inventory


def test_every_shortage_has_its_warning_and_cure() -> None:
    lacks = {"compile_lacks": "there is no C++ compiler g++: install one (apt-get install g++), or set CXX"}
    host = cpu_host(cores=1, disk_free_gib=1.5, shared_memory_gib=1 / 16, versions={"torch": "2.13.0"}, **lacks)
    text = report(host)
    assert "! bench: 1 core: " in text
    assert "--cpus" in text
    assert "2 CPU ranks share 1 core " in text
    assert "set parallel.ranks to 1" in text
    assert "1.5 GiB of disk free, below 5" in text
    assert "SHARDLINE_HOME" in text
    assert "/dev/shm holds 64 MiB" in text
    assert "--shm-size=8g" in text
    assert "torch.compile cannot work: there is no C++ compiler" in text
    assert "apt-get install g++" in text


def test_a_driver_that_torch_cannot_use_is_told_with_the_cure() -> None:
    versions = {"torch": "2.13.0+cpu", "c++": "12", "driver": "580.1"}
    (warning,) = find_warnings(Inventory(hosts=(cpu_host(versions=versions),)))
    assert "torch 2.13.0+cpu is a build without CUDA" in warning
    assert "pip install" in warning
    (warning,) = find_warnings(Inventory(hosts=(cpu_host(versions=versions | {"cuda": "13.0"}),)))
    assert "sees no GPU" in warning
    assert "Update the driver" in warning


def test_gpus_are_reported_by_capability() -> None:
    text = report(cpu_host(devices=(gpu(), gpu()), versions={"c++": "12", "driver": "580.1"}))
    assert "NVIDIA A100 (compute capability 8.0)" in text
    assert "ranks: 2, one per GPU" in text
    assert "up to 5.37 B parameters" in text  # 80 GiB / 16 bytes
    assert "!" not in text


def test_unlike_and_slow_gpus_are_named() -> None:
    versions = {"c++": "12", "driver": "580.1"}
    slow = cpu_host(devices=(gpu(), gpu(bf16=200.0)), versions=versions)
    (warning,) = find_warnings(Inventory(hosts=(slow,)))
    assert "bench: GPU 1 (NVIDIA A100) is slow: 200 TFLOP/s in bf16, 20% below another of its kind, 250" in warning
    mixed = cpu_host(devices=(gpu(), gpu("NVIDIA Other", memory_gib=24, bf16=70.0)), versions=versions)
    (warning,) = find_warnings(Inventory(hosts=(mixed,)))
    assert "NVIDIA A100 (80 GiB) and NVIDIA Other (24 GiB)" in warning


def test_links_are_told_by_kind_with_the_slowest_of_each() -> None:
    links = (
        Link(ranks=(0, 1), kind="NV12", peer_access=True, gb_per_s=250),
        Link(ranks=(0, 2), kind="SYS", peer_access=False, gb_per_s=9),
        Link(ranks=(1, 2), kind="SYS", peer_access=False, gb_per_s=11),
    )
    text = report(cpu_host(devices=(gpu(),) * 3, links=links, versions={"c++": "12", "driver": "580.1"}))
    assert "1 x NV12 250 to 250 GB/s (slowest 0-1); 2 x SYS, no peer access 9 to 11 GB/s (slowest 0-2)" in text


def test_the_table_of_devices_has_a_row_each_and_says_which_is_slow() -> None:
    rows = hardware_rows(Inventory(hosts=(cpu_host(devices=(gpu(), gpu(bf16=200.0))), cpu_host(name="other"))))
    assert [(row["host"], row["rank"]) for row in rows] == [("bench", 0), ("bench", 1), ("other", 0), ("other", 1)]
    assert rows[0]["slow"] == ""
    assert "200 TFLOP/s in bf16, 20% below" in rows[1]["slow"]
    assert rows[2]["fp32 TFLOP/s"] == 0.1

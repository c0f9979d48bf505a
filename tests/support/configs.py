"""Configs and inventories that tests plan with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.config.run import RunConfig
from training.records.inventory import Device, Host, Inventory
from training.records.plan import RunPlan


def read_plan(run_dir: Path) -> RunPlan:
    return RunPlan.read(run_dir / "plan.json")


def reasons(plan: RunPlan, words: str) -> list[str]:
    """Returns the reasons of a plan that begin with these words; if none does, those that hold them."""
    begun = [reason for reason in plan.reasons if reason.startswith(words)]
    return begun or [reason for reason in plan.reasons if words in reason]


def inventory(*hosts: int, kind: str = "cpu", memory_gib: float = 12.0, disk_gib: float = 500.0) -> Inventory:
    """A made-up inventory with this number of devices on each host; GPUs have an H100's rates."""
    rates = {"fp32": 0.08, "bf16": 0.09} if kind == "cpu" else {"fp32": 50.0, "bf16": 800.0}
    device = Device(
        kind=kind,
        name=kind,
        memory_gib=memory_gib,
        matmul_tflops=rates,
        compute_capability="9.0" if kind == "cuda" else None,
    )
    hosts_made = (
        Host(
            name=f"host{i}",
            cores=2 * n,
            memory_gib=64,
            disk_free_gib=disk_gib,
            devices=(device,) * n,
            compile_lacks="a made-up host compiles nothing",
        )
        for i, n in enumerate(hosts)
    )
    return Inventory(hosts=tuple(hosts_made))


def gpus(*capabilities: str) -> Inventory:
    """A made-up host with a GPU of each compute capability."""
    devices = tuple(
        Device(kind="cuda", name=f"GPU {c}", memory_gib=24, compute_capability=c, matmul_tflops={"bf16": 300.0})
        for c in capabilities
    )
    return Inventory(hosts=(Host(name="h", cores=8, memory_gib=64, disk_free_gib=100, devices=devices),))


def with_hosts(machines: Inventory, **fields: Any) -> Inventory:
    """The same machines, each host with these fields."""
    return Inventory(hosts=tuple(host.model_copy(update=fields) for host in machines.hosts))


def pinned(config: RunConfig, plan: RunPlan) -> RunConfig:
    """The config with what its plan chose written into it."""
    content = config.model_dump()
    for section, chosen in plan.chosen.items():
        content[section] |= chosen
    return RunConfig.model_validate(content)


def unlike_hosts(*names: str, kind: str = "cpu") -> Inventory:
    """Made-up hosts of one device each, alike but for these names."""
    hosts = inventory(*(1 for _ in names), kind=kind).hosts
    devices = [host.devices[0].model_copy(update={"name": name}) for host, name in zip(hosts, names, strict=True)]
    return Inventory(hosts=tuple(h.model_copy(update={"devices": (d,)}) for h, d in zip(hosts, devices, strict=True)))


def tiny_config(**overrides: Any) -> RunConfig:
    """A run of 8 steps of a tiny model; overrides as section__field=value."""
    config: dict[str, Any] = {
        "name": "tiny",
        "data": {"path": "stdlib"},
        "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "dropout": 0.1},
        "train": {
            "steps": 8,
            "context": 16,
            "global_batch": 8,
            "micro_batch": 2,
            "learning_rate": 3e-3,
            "warmup_steps": 2,
            "log_every_steps": 1,
        },
        "parallel": {"precision": "fp32", "timeout_s": 60},
        "checkpoint": {"every_steps": 3, "keep_last": 2},
        "evaluation": {"every_steps": 4, "quick_sequences": 6, "samples_while_training": 0},
    }
    for key, value in overrides.items():
        section, _, field = key.partition("__")
        config.setdefault(section, {})[field] = value
    return RunConfig.model_validate(config)

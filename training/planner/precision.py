"""Chooses the precision of matrix products: one that every device of a run supports, or one for each kind of device.

Devices with different precisions add up whole gradients in fp32, so that they learn as one process does, within the
rounding of each precision. If one of them computes in fp16, all multiply their loss by its scale (strategies/optim.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from training.config.device_names import value_for
from training.config.parallel import ParallelConfig, Precision
from training.config.run import RunConfig
from training.facts.strategies import having
from training.records.inventory import Device, Inventory

WHOLE = having("mixes_precisions")[0]  # which strategy devices of unlike precision get
FP8_CAPABILITY = (8, 9)
NOT_IN_FP8 = re.compile(r"(^|\.)(experts|gate|router|shared_expert_gate)(\.|$)")  # modules
FP8_MULTIPLE = 16  # every dimension of a product is a multiple of this (torch._scaled_mm)
BF16_GAIN_ON_CPU = 1.3  # below this gain bf16 is emulated or memory-bound, and fp32 is more accurate
BY_SUPPORT: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "fp8")  # a GPU that supports one supports those before it


@dataclass(frozen=True)
class ChosenPrecision:
    """`common`: the precision that all devices support.

    `own`: device's name -> its precision if they differ, otherwise empty.
    """

    common: Precision
    why: str
    own: Mapping[str, Precision] = field(default_factory=dict)

    def of(self, device: Device) -> Precision:
        return self.own.get(device.name, self.common)

    @property
    def is_mixed(self) -> bool:
        return bool(self.own)

    @property
    def scales_loss(self) -> bool:
        return "fp16" in {self.common, *self.own.values()}

    def __str__(self) -> str:
        """`bf16`, or `bf16 on A100-80GB-SXM, fp16 on V100-32GB-SXM`."""
        return ", ".join(f"{precision} on {name}" for name, precision in self.own.items()) or self.common


def resolved_precision(config: RunConfig, inventory: Inventory) -> ChosenPrecision:
    """Return the precision that the config asks for, or the one that is chosen for all devices.

    Raises ValueError for a precision that a device does not support, and for devices that the config leaves out.
    """
    asked = config.parallel.precision
    if isinstance(asked, str):
        return ChosenPrecision(*_one_precision(asked, inventory))
    alike, own = _by_name(inventory), dict[str, Precision]()
    for name, part in alike.items():
        found = value_for(asked, name=name, kind=inventory.device_kind)
        if found is None:
            raise ValueError(
                f"parallel.precision = {_in_words(asked)} has none for {name}: add it, or "
                f"{inventory.device_kind}: fp32 for all others"
            )
        own[name], _ = _one_precision(found, part)
    return _chosen(own, "asked for by parallel.precision")


def own_precisions(config: RunConfig, inventory: Inventory) -> ChosenPrecision | None:
    """Return the best precision of each kind of device; None if all are equal, or if the config sets it."""
    parallel = config.parallel
    if parallel.precision != "auto" or parallel.strategy not in ("auto", WHOLE) or not _is_undivided(parallel):
        return None
    own = {name: choose_precision(part)[0] for name, part in _by_name(inventory).items()}
    chosen = _chosen(own, "what each supports")
    return chosen if chosen.is_mixed else None


def with_whole_gradients(parallel: ParallelConfig, precision: ChosenPrecision) -> ParallelConfig:
    """Return the config's layouts in which devices may have different precisions.

    Raises ValueError if there are none.
    """
    if parallel.strategy == "single":
        return parallel
    if not (parallel.strategy == "auto" or parallel.row.mixes_precisions) or not _is_undivided(parallel):
        how = "parallel.stages" if not isinstance(parallel.stages, str) else f"parallel.strategy={parallel.strategy}"
        raise ValueError(
            f"parallel.precision: {precision} need ranks that hold and sum whole fp32 gradients, which {how} with "
            f"tp = {max(1, parallel.tp)} and pp = {max(1, parallel.pp)} has not: set parallel.strategy=ddp with "
            f"tp = pp = 1, or parallel.precision={precision.common} for all devices"
        )
    strategy = WHOLE if parallel.strategy == "auto" else parallel.strategy
    return ParallelConfig(**parallel.model_dump() | {"strategy": strategy, "tp": 1, "pp": 1})


def _is_undivided(parallel: ParallelConfig) -> bool:
    return max(parallel.tp, parallel.pp) <= 1 and isinstance(parallel.stages, str)


def weakest_precision(precisions: set[Precision]) -> Precision:
    """Return the one of these precisions that all devices support."""
    return min(precisions, key=BY_SUPPORT.index)


def _chosen(own: Mapping[str, Precision], why: str) -> ChosenPrecision:
    common = weakest_precision(set(own.values()))
    return ChosenPrecision(common, why, own if len(set(own.values())) > 1 else {})


def _by_name(inventory: Inventory) -> dict[str, Inventory]:
    """Return name -> the inventory's devices of that name."""
    names = dict.fromkeys(device.name for host in inventory.hosts for device in host.devices)
    if len(names) == 1:
        return dict.fromkeys(names, inventory)
    parts = {}
    for name in names:
        hosts = [(host, tuple(each for each in host.devices if each.name == name)) for host in inventory.hosts]
        parts[name] = Inventory(
            hosts=tuple(host.model_copy(update={"devices": devices}) for host, devices in hosts if devices)
        )
    return parts


def _in_words(table: Mapping[str, Precision]) -> str:
    return "{" + ", ".join(f"{name}: {precision}" for name, precision in table.items()) + "}"


def _one_precision(asked: Literal["auto"] | Precision, inventory: Inventory) -> tuple[Precision, str]:
    """Return one precision for all devices, and why. Raises ValueError if the weakest device does not support it."""
    chosen, why = choose_precision(inventory)
    if asked == "auto":
        return chosen, why
    if asked == "fp8":
        return asked, _check_fp8(inventory)
    if inventory.device_kind == "cuda" and BY_SUPPORT.index(asked) > BY_SUPPORT.index(chosen):
        raise ValueError(f"parallel.precision={asked}: {why}: use auto or fp32")
    return asked, "asked for by parallel.precision"


def choose_precision(inventory: Inventory) -> tuple[Precision, str]:
    """bf16 from Ampere on (compute capability 8.0), fp16 on Volta and Turing (7.0, 7.5), else fp32; on CPUs by rate."""
    if inventory.device_kind == "cuda":
        weakest, which = _weakest(inventory, capability)
        which += f" has compute capability {weakest.compute_capability}"
        if capability(weakest) >= (8, 0):
            return "bf16", f"{which} (bf16 from 8.0 on)"
        if capability(weakest) >= (7, 0):
            return "fp16", f"{which}: fp16 tensor cores (from 7.0 on), no bf16 (from 8.0 on)"
        return "fp32", f"{which}, fp16 needs 7.0 and bf16 8.0"
    weakest, which = _weakest(inventory, _bf16_gain)
    on = "this CPU" if which == weakest.name else which
    gain = _bf16_gain(weakest)
    if gain >= BF16_GAIN_ON_CPU:
        return "bf16", f"bf16 matrix products measured {gain:.1f}x as fast as fp32 on {on}"
    return "fp32", f"bf16 measured only {gain:.2g}x as fast as fp32 on {on}, below {BF16_GAIN_ON_CPU}x"


def _check_fp8(inventory: Inventory) -> str:
    """Return why fp8 is used. Raises ValueError for a device that does not support it."""
    if inventory.device_kind == "cpu":
        return "asked for by parallel.precision; CPUs emulate it, slower than bf16"
    weakest, which = _weakest(inventory, capability)
    if capability(weakest) < FP8_CAPABILITY:
        raise ValueError(
            f"parallel.precision=fp8: {which} has compute capability {weakest.compute_capability}, fp8 needs 8.9 (Ada, "
            "Hopper or later): leave that device out, or use auto"
        )
    return "asked for by parallel.precision: the layers' products in fp8, the rest in bf16"


def capability(device: Device) -> tuple[int, int]:
    major, _, minor = (device.compute_capability or "0.0").partition(".")
    return int(major), int(minor or 0)


def _bf16_gain(device: Device) -> float:
    rates = device.matmul_tflops
    return rates.get("bf16", 0.0) / max(rates.get("fp32", 0.0), 1e-9)


def _weakest(inventory: Inventory, measure: Callable[[Device], object]) -> tuple[Device, str]:
    """Return the device with the smallest `measure`, and its name; with host and number if devices are unlike."""
    placed = [(host.name, i, device) for host in inventory.hosts for i, device in enumerate(host.devices)]
    host, i, weakest = min(placed, key=lambda place: measure(place[2]))  # type: ignore[arg-type, return-value]
    if len({device.name for _, _, device in placed}) == 1:
        return weakest, weakest.name
    return weakest, f"the weakest of {len(placed)} devices, device {i} of {host} ({weakest.name}),"

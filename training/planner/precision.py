"""The precision of matrix products: what every device of a run supports, decided by the weakest, and why."""

from __future__ import annotations

from collections.abc import Callable

from training.config.parallel import Precision
from training.config.run import RunConfig
from training.planner.job import KNOWN_ARCHITECTURES
from training.records.inventory import Device, Inventory
from training.records.plan import ModelShape

FP8_CAPABILITY = (8, 9)
FP8_MULTIPLE = 16  # every dimension of a product is a multiple of this (torch._scaled_mm)
BF16_GAIN_ON_CPU = 1.3  # below this bf16 is emulated or memory-bound, and fp32 costs nothing in accuracy


def resolved_precision(config: RunConfig, inventory: Inventory) -> tuple[Precision, str]:
    """The precision that the config asks for, or the one chosen for it, and why.

    Raises ValueError for a precision that the weakest device does not support.
    """
    chosen, why = choose_precision(inventory)
    asked = config.parallel.precision
    if asked == "auto":
        return chosen, why
    if asked == "fp8":
        return asked, _check_fp8(inventory)
    if inventory.device_kind == "cuda" and (asked, chosen) in {("bf16", "fp16"), ("bf16", "fp32"), ("fp16", "fp32")}:
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
    return "fp32", f"bf16 measured only {gain:.1f}x as fast as fp32 on {on}, below {BF16_GAIN_ON_CPU}x"


def _check_fp8(inventory: Inventory) -> str:
    """Say why fp8 is used. Raises ValueError for a device that does not support it."""
    if inventory.device_kind == "cpu":
        return "asked for by parallel.precision; CPUs emulate it, slower than bf16"
    weakest, which = _weakest(inventory, capability)
    if capability(weakest) < FP8_CAPABILITY:
        raise ValueError(
            f"parallel.precision=fp8: {which} has compute capability {weakest.compute_capability}, fp8 needs 8.9 (Ada, "
            "Hopper or later): leave that device out, or use auto"
        )
    return "asked for by parallel.precision: the layers' products in fp8, the rest in bf16"


def fp8_refusal(shape: ModelShape, *, tp: int) -> str | None:
    """Say why the model's matrix products cannot be computed in fp8 by torch._scaled_mm; None if they can."""
    if shape.architecture not in KNOWN_ARCHITECTURES:
        return (
            f"parallel.precision=fp8 is there for {', '.join(KNOWN_ARCHITECTURES)} models, not for "
            f"{shape.architecture}: use bf16"
        )
    sizes = {
        "width / tp": shape.width / tp,
        "width of keys / tp": shape.width / shape.heads * shape.kv_heads / tp,
        "MLP width / tp": shape.mlp_width / tp,
        "train.context": shape.context,
    }
    if odd := {what: size for what, size in sizes.items() if size % FP8_MULTIPLE}:
        words = ", ".join(f"{what} = {size:g}" for what, size in odd.items())
        return (
            f"parallel.precision=fp8 multiplies matrices whose sizes are multiples of {FP8_MULTIPLE}, not {words}: "
            "change them, or set parallel.precision=bf16"
        )
    return None


def capability(device: Device) -> tuple[int, int]:
    major, _, minor = (device.compute_capability or "0.0").partition(".")
    return int(major), int(minor or 0)


def _bf16_gain(device: Device) -> float:
    rates = device.matmul_tflops
    return rates.get("bf16", 0.0) / max(rates.get("fp32", 0.0), 1e-9)


def _weakest(inventory: Inventory, measure: Callable[[Device], object]) -> tuple[Device, str]:
    """The device with the smallest `measure`, and its name; with its host and number if devices are unlike."""
    placed = [(host.name, i, device) for host in inventory.hosts for i, device in enumerate(host.devices)]
    host, i, weakest = min(placed, key=lambda place: measure(place[2]))  # type: ignore[arg-type, return-value]
    if len({device.name for _, _, device in placed}) == 1:
        return weakest, weakest.name
    return weakest, f"the weakest of {len(placed)} devices, device {i} of {host} ({weakest.name}),"

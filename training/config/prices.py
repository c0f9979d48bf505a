"""The prices section of the config: what an hour of a device costs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from training.config.section import Section

# A parameter of the MLflow run is named after it, so it holds nothing that MLflow refuses in a name.
DeviceName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")]
Price = Annotated[float, Field(ge=0)]


def words(name: str) -> str:
    """The words of a device's name, for comparison: `NVIDIA A100-SXM4-80GB` is ` nvidia a100 sxm4 80gb `."""
    spaced = "".join(letter if letter.isalnum() else " " for letter in name.lower())
    return f" {' '.join(spaced.split())} "


class PricesConfig(Section):
    """Prices of devices, from which plans, reports and comparisons say what a run costs."""

    per_device_hour: dict[DeviceName, Price] = Field(
        {},
        description="Price of one device for an hour, by the device's name as `shardline doctor` shows it, by some "
        "successive words of that name, or by its kind, cuda or cpu: {H100: 2.5, cpu: 0.02}. Case does not matter, the "
        "longest match counts, and a kind counts only where no name matches. A cost is unknown if a device of the run "
        "has no price. On a CPU a device is the share of the cores that one rank gets.",
    )
    currency: str = Field("USD", pattern=r"^[A-Z]{3}$", description="Three-letter code of the currency of all prices.")

    @model_validator(mode="after")
    def check(self) -> PricesConfig:
        known: dict[str, str] = {}
        for name in self.per_device_hour:
            if (other := known.setdefault(words(name), name)) != name:
                raise ValueError(
                    f"prices.per_device_hour has {other} and {name}, which match the same devices: keep one"
                )
        return self

"""The prices section of the config: what an hour of a device costs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from training.config.device_names import DeviceName, check_keys
from training.config.section import Section

Price = Annotated[float, Field(ge=0)]


class PricesConfig(Section):
    """Prices of devices, from which plans, reports and comparisons say what a run costs."""

    per_device_hour: dict[DeviceName, Price] = Field({})
    """Price of one device for an hour, by the device's name as `shardline doctor` shows it, by some successive words of
    that name, or by its kind, cuda or cpu: {H100: 2.5, cpu: 0.02}. Case does not matter, the longest match counts, and
    a kind counts only where no name matches. A cost is unknown if a device of the run has no price. On a CPU a device
    is the share of the cores that one rank gets.
    """
    currency: str = Field("USD", pattern=r"^[A-Z]{3}$")
    """Three-letter code of the currency of all prices."""

    @model_validator(mode="after")
    def check(self) -> PricesConfig:
        check_keys("prices.per_device_hour", self.per_device_hour)
        return self

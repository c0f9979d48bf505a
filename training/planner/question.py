"""What a plan answers: the run that is asked for, its model, the machines there are, and what ran on them before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from training.config.run import RunConfig
from training.records.correction import Measurement
from training.records.inventory import Host, Inventory
from training.records.plan import ModelShape


@dataclass(frozen=True)
class Question:
    """A run to plan on an inventory. `measurements`: of earlier runs, which correct the prices."""

    config: RunConfig
    shape: ModelShape
    inventory: Inventory
    measurements: Sequence[Measurement] = ()

    def on(self, hosts: Sequence[Host]) -> Question:
        """Return the same run on these hosts alone."""
        return replace(self, inventory=Inventory(hosts=tuple(hosts)))

    def compiled(self, compiled: bool) -> Question:
        return self.changed("train", compile=compiled)

    def changed(self, section: str, **fields: object) -> Question:
        """Return the question with other values of some fields of a section of the config."""
        values = getattr(self.config, section).model_copy(update=fields)
        return replace(self, config=self.config.model_copy(update={section: values}))

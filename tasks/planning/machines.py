"""Machines that could be rented, and their prices: a YAML file such as machines.yaml, the example beside this one."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from training.config.section import Section
from training.planner.hypothetical_hosts import hypothetical_inventory

EXAMPLE = Path(__file__).with_name("machines.yaml")
COUNTS = (1, 2, 4, 8, 16)
MOST_HOSTS = 1024  # of which a plan takes seconds
NO_GPU = "; machines without an NVIDIA GPU cannot be quoted"
OLD_DAYS = 90  # prices on demand of the same machines have changed by a third within as many


class Machine(Section):
    """A type of machine. `hosts`: one of them, as `plan --hosts` takes it after the number of hosts."""

    name: str = Field(min_length=1)
    hosts: str
    price_per_hour: float | None = Field(None, ge=0, allow_inf_nan=False)  # of one host
    source: str = ""
    date: datetime.date | None = None  # of the price
    counts: tuple[Annotated[int, Field(ge=1, le=MOST_HOSTS)], ...] = ()

    @property
    def tried(self) -> tuple[int, ...]:
        """Return the numbers of hosts to plan for: the given ones, else COUNTS, or 1 where no network joins hosts."""
        has_network = any(not part.strip().endswith("iB") for part in self.hosts.split(",")[1:])  # 64GiB is memory
        return tuple(dict.fromkeys(self.counts)) or (COUNTS if has_network else (1,))

    def text(self, count: int) -> str:
        """Return so many of these hosts, as `plan --hosts` takes them."""
        return f"{count}x{self.hosts}"


class Machines(Section):
    """The file: machines, and the currency of all prices."""

    currency: str
    machines: tuple[Machine, ...]

    @model_validator(mode="after")
    def refuse_what_cannot_be_planned(self) -> Self:
        names = [each.name for each in self.machines]
        if not names:
            raise ValueError("it has no machines: list one at least")
        if not re.fullmatch("[A-Z]{3}", self.currency):
            raise ValueError(f"currency = {self.currency}: write three capitals, such as EUR, for all prices")
        for each in self.machines:
            if names.count(each.name) > 1:
                raise ValueError(f"{each.name} is there more than once: give each a name of its own")
            if "+" in each.hosts or re.match(r"\d+x\d+x", each.hosts):
                one = "write one host of one kind, such as 8xH100-80GB-SXM,400Gb, and in counts how many of them"
                raise ValueError(f"{each.name}: hosts = {each.hosts}: {one}")
            for count in {min(each.tried), max(each.tried)}:
                try:
                    hypothetical_inventory(each.text(count))
                except ValueError as error:
                    why = str(error).removeprefix("--hosts: ").removeprefix("--hosts ")
                    raise ValueError(f"{each.name}: {why}{NO_GPU * (' is known' in why)}") from None
        return self

    def warnings(self, today: datetime.date) -> list[str]:
        """Return a sentence each for prices that are missing, old, or of no known day."""
        days = {each.name: (today - each.date).days for each in self.machines if each.date}
        unpriced = [each.name for each in self.machines if each.price_per_hour is None]
        found = {
            "no price_per_hour, so no cost": unpriced,
            "prices without a date, so they may be old": [
                each.name for each in self.machines if not each.date and each.name not in unpriced
            ],
            f"prices older than {OLD_DAYS} days (up to {max(days.values(), default=0)}), look them up again": [
                name for name in days if days[name] > OLD_DAYS
            ],
        }
        return [f"{what}: {', '.join(names)}" for what, names in found.items() if names]


def read_machines(path: Path) -> Machines:
    """Read the file. Raises ValueError, naming the machine and the field, for one that cannot be used."""
    try:
        content = yaml.safe_load(path.read_text())
        return Machines.model_validate(content if isinstance(content, dict) else {})
    except FileNotFoundError:
        raise ValueError(f"--machines {path} does not exist: copy {EXAMPLE}, an example, and fill it in") from None
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ValueError(f"--machines {path} cannot be read as YAML: {error}") from None
    except ValidationError as error:
        unknown = f"there is no such field: a machine has {', '.join(Machine.model_fields)}, the file one currency"
        found = []
        for each in error.errors(include_input=False):
            place = ".".join(str(part + 1) if isinstance(part, int) else part for part in each["loc"])
            why = unknown if each["type"] == "extra_forbidden" else each["msg"].removeprefix("Value error, ")
            found.append(f"{place}: {why}" if place else why)
        raise ValueError(f"--machines {path}: {'; '.join(found)} ({EXAMPLE} is an example)") from None

"""Machines that could be rented, and their prices: a YAML file such as machines.yaml, the example beside this one."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from training.config.section import Section
from training.planner.hypothetical_hosts import hypothetical_inventory

EXAMPLE = Path(__file__).with_name("machines.yaml")
COUNTS = (1, 2, 4, 8, 16)
OLD_DAYS = 90  # prices on demand of the same machines have changed by a third within as many


class Machine(Section):
    """A type of machine. `hosts`: one of them, as `plan --hosts` takes it after the number of hosts."""

    name: str = Field(min_length=1)
    hosts: str
    price_per_hour: float | None = Field(None, ge=0)  # of one host
    source: str = ""
    date: datetime.date | None = None  # of the price
    counts: tuple[int, ...] = ()

    @property
    def tried(self) -> tuple[int, ...]:
        """Return the numbers of hosts to plan for: the given ones, else COUNTS, or 1 where no network joins hosts."""
        return self.counts or (COUNTS if "," in self.hosts else (1,))

    def text(self, count: int) -> str:
        """Return so many of these hosts, as `plan --hosts` takes them."""
        return f"{count}x{self.hosts}"


class Machines(Section):
    """The file: machines, and the currency of all prices."""

    currency: str = Field(pattern=r"^[A-Z]{3}$")
    machines: tuple[Machine, ...] = Field(min_length=1)

    @property
    def sources(self) -> list[str]:
        """Return where the prices are from, and of which days: `lambda.ai/instances (2026-09-20)`."""
        return sorted({f"{each.source or 'no source'} ({each.date or 'no date'})" for each in self.machines})

    def warnings(self, today: datetime.date) -> Iterator[str]:
        """Yield a sentence for prices that are missing, old, or of no known day."""
        undated = [each.name for each in self.machines if each.price_per_hour is not None and each.date is None]
        unpriced = [each.name for each in self.machines if each.price_per_hour is None]
        old = {each.name: (today - each.date).days for each in self.machines if each.date}
        old = {name: days for name, days in old.items() if days > OLD_DAYS}
        if unpriced:
            yield f"no price_per_hour, so no cost: {', '.join(unpriced)}"
        if undated:
            yield f"prices without a date, so they may be old: {', '.join(undated)}"
        if old:
            yield f"prices older than {OLD_DAYS} days (up to {max(old.values())}), look them up again: {', '.join(old)}"


def read_machines(path: Path) -> Machines:
    """Read the file. Raises ValueError, naming the machine and the field, for one that cannot be used."""
    try:
        found = Machines.model_validate(yaml.safe_load(path.read_text()))
    except FileNotFoundError:
        raise ValueError(f"--machines {path} does not exist: copy {EXAMPLE}, an example, and fill it in") from None
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ValueError(f"--machines {path} cannot be read as YAML: {error}") from None
    except ValidationError as error:
        problems = [f"{_place(*each['loc'])}: {each['msg']}" for each in error.errors(include_input=False)]
        raise ValueError(f"--machines {path}: {'; '.join(problems)} ({EXAMPLE} is an example)") from None
    names = Counter(each.name for each in found.machines)
    if twice := [name for name, number in names.items() if number > 1]:
        raise ValueError(f"--machines {path}: {', '.join(twice)} is there more than once: give each a name of its own")
    for each in found.machines:
        for count in {min(each.tried), max(each.tried)}:
            try:
                hypothetical_inventory(each.text(count))
            except ValueError as error:
                why = str(error).removeprefix("--hosts: ").removeprefix("--hosts ")
                raise ValueError(f"--machines {path}: {each.name}: {why}") from None
    return found


def _place(*location: str | int) -> str:
    """`machines.2.hosts` counted from 1, as people count."""
    return ".".join(str(part + 1) if isinstance(part, int) else part for part in location) or "the file"

"""What to rent: plans a config on machines that could be rented, and finds those that meet a deadline or a budget."""

from __future__ import annotations

import datetime
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tasks.display.numbers import format_money
from tasks.planning.machines import Machine, Machines
from tasks.planning.plan import plan_run
from tasks.planning.text import TextEstimate
from training.config.run import RunConfig
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.planner.mixture import one_pass
from training.records.inventory import Inventory
from training.records.plan import RunPlan
from training.records.record import Record
from training.records.words import format_duration

UNITS_S = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
DURATION = r"(\d+(?:\.\d+)?)\s*([mhdw])"
PLANNED_FIRST = 24  # inventories that are planned in any case; beyond these, only those that could still be the answer
LIMITS = dict.fromkeys(("products", "Muon's products", "attention"), "compute")
LIMITS |= dict.fromkeys(("memory-bound", "optimizer"), "memory bandwidth")
LIMITS |= dict.fromkeys(("recomputing", "offload"), "memory size")
LEFT_OUT = (
    "times are of training steps alone: start-up, compiling, validation, checkpoints, evaluation, export and waiting "
    "for data come on top, as do storage, traffic and tax; machines stay rented throughout (no spot machines)"
)


class QuoteRow(Record):
    """A number of machines, their plan and its cost."""

    machine: str
    """Name of the kind of machine in the file of machines."""
    num_hosts: int
    """Number of machines of this kind."""
    hosts: str
    """The machines in the words that `plan --hosts` takes."""
    gpu: str
    """Name of the machines' kind of GPU."""
    num_gpus: int
    """GPUs of all these machines."""
    used_gpus: int
    """GPUs that the plan uses, one for each rank."""
    strategy: str
    """Strategy that the plan chose."""
    mesh: dict[str, int]
    """Number of ranks along each axis (pp, dp, cp, tp)."""
    micro_batch: int
    """Sequences of one forward pass of a replica."""
    precision: str
    """Precision of matrix products."""
    steps: int
    """Optimizer steps of the run."""
    tokens: int
    """Tokens of all steps."""
    tokens_per_s: float
    """Predicted tokens per second over all ranks."""
    train_s: float
    """Predicted seconds of all steps, without validations and checkpoints."""
    train_range_s: tuple[float, float]
    """Least and most seconds of all steps that are likely, by the plan's range of a step."""
    memory_gib: float
    """Predicted GiB of the rank with the least memory to spare."""
    usable_gib: float
    """GiB for training on the GPU of the rank with the least memory to spare."""
    limited_by: str
    """What takes most of a step: compute, memory bandwidth, memory size, communication or another part."""
    limited_share: float
    """Share of a step that `limited_by` takes."""
    cost: float | None
    """Predicted cost of training; None if the machine has no price."""
    cost_range: tuple[float, float] | None
    """Least and most cost that is likely, by the plan's range of a step; None without a price."""
    meets_deadline: bool | None
    """Whether the predicted time is within the deadline; None if there is no deadline."""
    meets_budget: bool | None
    """Whether the predicted cost is within the budget; None if there is no budget."""

    @property
    def meets(self) -> bool:
        return self.meets_deadline is not False and self.meets_budget is not False

    @property
    def name(self) -> str:
        return f"{self.num_hosts} x {self.machine}"

    @property
    def layout(self) -> str:
        """`hsdp dp 16 tp 2, micro-batch 4, bf16`."""
        axes = "".join(f" {axis} {size}" for axis, size in self.mesh.items() if size > 1)
        idle = "" if self.used_gpus == self.num_gpus else f", {self.num_gpus - self.used_gpus} GPUs idle"
        return f"{self.strategy}{axes}, micro-batch {self.micro_batch}, {self.precision}{idle}"


class Quote(Record):
    """The answer of `shardline quote`."""

    config: str
    """Name of the config that was priced."""
    deadline_s: float | None
    """Seconds within which training must be done; None: not asked for."""
    budget: float | None
    """Most that training may cost, in `currency`; None: not asked for."""
    currency: str
    """Currency of all amounts, from the file of machines."""
    rows: tuple[QuoteRow, ...]
    """Machines in numbers that can train the config, the cheapest first."""
    cheapest: QuoteRow | None
    """Cheapest row within the deadline; None if there is none or nothing has a price."""
    fastest: QuoteRow | None
    """Fastest row within the budget; None if there is none."""
    cannot: dict[str, str]
    """Why no plan is possible, by hosts."""
    not_planned: tuple[str, ...]
    """Hosts that even at their best would be no better than those in `rows`, so that they were not planned."""
    verdict: tuple[str, ...]
    """Sentences that answer the question."""
    notes: tuple[str, ...]
    """Sentences on what the numbers leave out or guess."""
    price_sources: tuple[str, ...]
    """Where the prices are from, each with its date."""
    picture: str = ""
    """Path of a picture of cost against time; empty if none was drawn."""


class Goals(NamedTuple):
    """The deadline and the budget of a quote; None: none."""

    deadline_s: float | None
    budget: float | None

    def missed(self, seconds: float, cost: float | None) -> list[tuple[bool, float]]:
        """Return for each goal whether it is missed, and what is to be small: cost in time, time within the budget."""
        cost, found = math.inf if cost is None else cost, []
        if self.deadline_s is not None:
            found.append((True, seconds) if seconds > self.deadline_s else (False, cost))
        if self.budget is not None:
            found.append((True, cost) if cost > self.budget else (False, seconds))
        return found


def read_deadline(text: str) -> float:
    """Return the seconds of `2w`, `7d`, `12h`, `90m` or `1d 12h`. Raises ValueError for other text."""
    seconds = sum(float(number) * UNITS_S[unit] for number, unit in re.findall(DURATION, text.lower()))
    if re.sub(DURATION, "", text.lower()).strip() or not 0 < seconds < math.inf:
        raise ValueError(f"--deadline {text}: write weeks, days, hours or minutes: 2w, 7d, 12h or 90m")
    return seconds


def make_quote(config: RunConfig, machines: Machines, goals: Goals, *, text: TextEstimate | None = None) -> Quote:
    """Plan `config` on all machines in all counts that could be the answer. `text`: an estimate of its corpus.

    Raises ValueError if nothing is asked for, or no machine can train it.
    """
    if goals == (None, None):
        raise ValueError("say when it must be done (--deadline 7d), what it may cost (--budget 5000), or both")
    if goals.budget is not None and not 0 < goals.budget < math.inf:
        raise ValueError(f"--budget {goals.budget:g}: give an amount above 0 {machines.currency}")
    config, notes = _of_fixed_length(config, text)
    offers = [(machine, count) for machine in machines.machines for count in machine.tried]
    plans, not_planned = _plan_all(config, offers, goals)
    found = [
        _row(*offer, plan, goals) for offer in offers if isinstance(plan := plans.get(offer[0].text(offer[1])), RunPlan)
    ]
    cannot = {hosts: plan for hosts, plan in plans.items() if isinstance(plan, str)}
    if not found:
        most = max(cannot, key=lambda hosts: sum(host.memory_gib for host in hypothetical_inventory(hosts).hosts))
        where = f"no plan is possible on any of these machines; on {most}: " if len({*cannot.values()}) > 1 else ""
        raise ValueError(f"{where}{cannot[most]}")
    rows = sorted(found, key=lambda row: (math.inf if row.cost is None else row.cost, row.train_s))
    cheapest = next((row for row in rows if row.meets_deadline and row.cost is not None), None)
    fastest = min((row for row in rows if row.meets_budget), key=lambda row: row.train_s, default=None)
    return Quote(
        config=config.name,
        deadline_s=goals.deadline_s,
        budget=goals.budget,
        currency=machines.currency,
        rows=tuple(rows),
        cheapest=cheapest,
        fastest=fastest,
        cannot=cannot,
        not_planned=tuple(not_planned),
        verdict=tuple(_verdict(rows, cheapest, fastest, goals, machines.currency)),
        notes=(*machines.warnings(datetime.date.today()), *notes, LEFT_OUT),
        price_sources=tuple(sorted({f"{e.source or 'no source'} ({e.date or 'no date'})" for e in machines.machines})),
    )


def _of_fixed_length(config: RunConfig, text: TextEstimate | None) -> tuple[RunConfig, list[str]]:
    """Return the config with as many steps on every machine, and sentences on what its length leaves out or guesses."""
    train, notes = config.train, []
    if train.target_minutes:
        train = train.model_copy(update={"target_minutes": 0.0})
        notes.append("train.target_minutes is left out: all of train.steps are quoted")
    if train.max_epochs and text and text.epochs:
        tokens = max(1, round(train.max_epochs * one_pass(config.data, text.epochs).tokens))
        train = train.model_copy(update={"max_tokens": min(tokens, train.max_tokens or tokens)})
        notes.append(f"train.max_epochs = {train.max_epochs:g}: about {tokens:,} tokens, as a sample of the text says")
    elif train.max_epochs:
        notes.append("train.max_epochs is left out: how much text there is, is not known here")
    return config.model_copy(update={"train": train}), notes


class Hosts(NamedTuple):
    """All that a plan depends on of hosts that are alike. `gb_per_s`: of their network, 0 for a single one."""

    gpu: str
    gpus_per_host: int
    host_memory_gib: float
    number: int
    gb_per_s: float


def _plan_all(
    config: RunConfig, offers: Sequence[tuple[Machine, int]], goals: Goals
) -> tuple[dict[str, RunPlan | str], list[str]]:
    """Return a plan, or why there is none, by hosts; and the hosts that could not be the answer any more.

    The most promising by the rate and price of their GPUs come first. After PLANNED_FIRST the fastest do, and hosts are
    left out that at their best would still be no better than what is found.
    """
    kinds, inventories = dict[str, Hosts](), dict[Hosts, Inventory]()
    prices, flops_per_s = defaultdict[Hosts, float](lambda: math.inf), dict[Hosts, float]()
    for machine, count in offers:
        inventory = hypothetical_inventory(machine.text(count))
        host, gpu = inventory.hosts[0], inventory.hosts[0].devices[0]
        gb_per_s = host.network_gb_per_s if count > 1 else 0.0
        kind = kinds[machine.text(count)] = Hosts(gpu.name, len(host.devices), host.memory_gib, count, gb_per_s)
        inventories[kind] = inventory
        if machine.price_per_hour is not None:
            prices[kind] = min(count * machine.price_per_hour, prices[kind])
        rates = (
            rate for name, rate in gpu.matmul_tflops.items() if name != "fp8" or "fp8" in config.parallel.precision
        )
        flops_per_s[kind] = 1e12 * max(rates) * inventory.num_devices
    plans = dict[Hosts, RunPlan | str]()
    best: list[tuple[bool, float]] = []
    reached = defaultdict[str, float](float)  # FLOP/s of a GPU while it computes, the most of all plans
    flops = 0.0

    def outcome(kind: Hosts, seconds: float) -> list[tuple[bool, float]]:
        return goals.missed(seconds, seconds / 3600 * prices[kind])

    promising = sorted(inventories, key=lambda kind: prices[kind] / flops_per_s[kind])
    for kind in (*promising[:PLANNED_FIRST], *sorted(promising[PLANNED_FIRST:], key=lambda kind: -flops_per_s[kind])):
        most = min(flops_per_s[kind], inventories[kind].num_devices * (reached[kind.gpu] or math.inf))
        if len(plans) >= PLANNED_FIRST and best and not any(map(tuple.__lt__, outcome(kind, flops / most), best)):
            continue
        try:
            plan = plans[kind] = plan_run(config, inventory=inventories[kind])
        except ValueError as why:
            plans[kind] = str(why)
            continue
        flops, seconds = plan.predicted.flops_per_token * plan.tokens, plan.predicted.train_s
        reached[kind.gpu] = max(flops / (_limits(plan)["compute"] * seconds * plan.world_size), reached[kind.gpu])
        found = outcome(kind, seconds)
        best = [*map(min, best or found, found)]
    planned = {hosts: plans[kind] for hosts, kind in kinds.items() if kind in plans}
    return planned, sorted(kinds.keys() - planned.keys())


def _limits(plan: RunPlan) -> dict[str, float]:
    """Return the share of a step that each thing limits."""
    found, step_s = defaultdict[str, float](float), plan.predicted.step_s
    for part, seconds in step_s.items():
        found["communication" if "exposed" in part else LIMITS.get(part, part)] += seconds / sum(step_s.values())
    return found


def _row(machine: Machine, count: int, plan: RunPlan, goals: Goals) -> QuoteRow:
    hosts, limits, predicted = machine.text(count), _limits(plan), plan.predicted
    inventory = hypothetical_inventory(hosts)
    limit = max(limits, key=limits.__getitem__)
    least, most = (ms / 1000 * plan.steps for ms in predicted.step_range_ms)
    per_s = None if machine.price_per_hour is None else count * machine.price_per_hour / 3600
    cost = None if per_s is None else per_s * predicted.train_s
    return QuoteRow(
        machine=machine.name,
        num_hosts=count,
        hosts=hosts,
        gpu=inventory.hosts[0].devices[0].name,
        num_gpus=inventory.num_devices,
        used_gpus=plan.world_size,
        **{field: getattr(plan, field) for field in ("strategy", "mesh", "micro_batch", "steps", "tokens")},
        precision=plan.describe_precision,
        tokens_per_s=predicted.tokens_per_s,
        train_s=predicted.train_s,
        train_range_s=(least, most),
        memory_gib=plan.ranking[0].memory_gib,
        usable_gib=plan.ranking[0].usable_gib,
        limited_by=limit,
        limited_share=limits[limit],
        cost=cost,
        cost_range=None if per_s is None else (per_s * least, per_s * most),
        meets_deadline=None if goals.deadline_s is None else predicted.train_s <= goals.deadline_s,
        meets_budget=None if goals.budget is None else cost is not None and cost <= goals.budget,
    )


def _verdict(
    rows: Sequence[QuoteRow], cheapest: QuoteRow | None, fastest: QuoteRow | None, goals: Goals, currency: str
) -> Iterator[str]:
    """Yield sentences: the best row for each goal, or the nearest one and what it would take."""

    def said(row: QuoteRow) -> str:
        cost = "no price" if row.cost is None else format_money(row.cost, currency)
        return f"{row.name} ({row.layout}): {format_duration(row.train_s)}, {cost}"

    soonest = min(rows, key=lambda row: row.train_s)
    if goals.deadline_s is not None:
        deadline, times = format_duration(goals.deadline_s), soonest.train_s / goals.deadline_s
        sure = next((row for row in rows if row.cost is not None and row.train_range_s[1] <= goals.deadline_s), None)
        hours = soonest.train_s / 3600
        needed = f"{math.ceil(hours)}h" if hours > 1 else f"{math.ceil(60 * hours)}m"
        if times > 1:
            yield (
                f"none is done within {deadline}; the nearest is {said(soonest)}, {times:.2f} times as long: it would "
                f"take --deadline {needed}, or {math.ceil(soonest.num_hosts * times)} such hosts if each did as much "
                "(in the file of machines `counts`, and a network in `hosts`)"
            )
        elif cheapest is None:
            yield f"none that is done within {deadline} has a price; the fastest is {said(soonest)}"
        else:
            yield f"the cheapest within {deadline}: {said(cheapest)}"
            if cheapest is not sure:
                slowest = format_duration(cheapest.train_range_s[1])
                yield f"should it be as slow as its range allows, that takes {slowest}, too long" + (
                    f"; the cheapest whose whole range is in time: {said(sure)}" if sure else ""
                )
    if goals.budget is not None:
        budget, nearest = format_money(goals.budget, currency), rows[0]
        if fastest is not None:
            yield f"the fastest for {budget}: {said(fastest)}"
        elif nearest.cost is None:
            yield "no machine has a price, so none is known to keep to the budget"
        else:
            needed = f"{math.ceil(nearest.cost)}" if nearest.cost > 10 else f"{math.ceil(1e4 * nearest.cost) / 1e4:g}"
            steps = f"{math.floor(nearest.steps * goals.budget / nearest.cost):,} of the {nearest.steps:,} steps"
            why = f"none costs at most {budget}; the nearest is {said(nearest)}"
            yield f"{why}: it would take --budget {needed}, or {steps}"
    if None not in goals and not any(row.meets for row in rows):
        yield "none meets both the deadline and the budget"

"""What to rent: plans a config on machines that could be rented, and finds those that meet a deadline or a budget."""

from __future__ import annotations

import datetime
import math
import multiprocessing
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from tasks.display.numbers import format_money
from tasks.hardware.machine import usable_cores
from tasks.planning.machines import Machine, Machines
from tasks.planning.plan import plan_run
from tasks.planning.text import TextEstimate
from training.config.run import RunConfig
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.planner.mixture import one_pass
from training.records.record import Record
from training.records.words import format_duration
from training.shards.packing import Epoch

UNITS_S = {"m": 60, "h": 3600, "d": 86_400}
ALWAYS = 24  # inventories that are planned in any case; beyond these, only those that could still be the answer
AT_A_TIME = 8  # planned before the next look at which others could be
WORTH_PROCESSES = 8  # plans of about 0.1 s each, for which other processes are started
LIMITS = {
    "products": "compute",
    "Muon's products": "compute",
    "attention": "compute",
    "memory-bound": "memory bandwidth",
    "optimizer": "memory bandwidth",
    "recomputing": "memory size",
    "offload": "memory size",
}
LEFT_OUT = (
    "times are of training steps alone: start-up, compiling, validation, checkpoints, evaluation, export and waiting "
    "for data come on top, as do storage, traffic and tax; machines stay rented throughout (no spot machines)"
)


class HostsPlan(Record):
    """The prediction of a plan for some hosts. `hosts`: as `plan --hosts` takes them; ranges as the plan's of a step.

    `limited_by`: what takes most of a step; `limited_share`: its share; `compute_share`: of products and attention.
    """

    hosts: str
    gpu: str
    num_gpus: int
    used_gpus: int
    strategy: str
    mesh: dict[str, int]
    micro_batch: int
    precision: str
    steps: int
    tokens: int
    tokens_per_s: float
    flops_per_token: float
    train_s: float
    train_range_s: tuple[float, float]
    memory_gib: float  # of a rank
    usable_gib: float
    limited_by: str
    limited_share: float
    compute_share: float

    @property
    def layout(self) -> str:
        """`hsdp dp 16 tp 2, micro-batch 4, bf16`."""
        axes = "".join(f" {axis} {size}" for axis, size in self.mesh.items() if size > 1)
        idle = "" if self.used_gpus == self.num_gpus else f", {self.num_gpus - self.used_gpus} GPUs idle"
        return f"{self.strategy}{axes}, micro-batch {self.micro_batch}, {self.precision}{idle}"


Answer = HostsPlan | str  # a str says why there is no plan


class QuoteRow(HostsPlan):
    """A number of machines with their plan and cost; None: no price, or not asked for."""

    machine: str
    num_hosts: int
    cost: float | None
    cost_range: tuple[float, float] | None
    meets_deadline: bool | None
    meets_budget: bool | None

    @property
    def meets(self) -> bool:
        return self.meets_deadline is not False and self.meets_budget is not False

    @property
    def name(self) -> str:
        return f"{self.num_hosts} x {self.machine}"


class Quote(Record):
    """The answer of `shardline quote`, the rows by cost.

    `cheapest` meets the deadline, `fastest` the budget. `cannot`: hosts and why no plan is possible on them.
    `not_planned`: hosts that are no better than these even at their best: at the full rate of their GPUs' matrix
    products, and computing no faster than other hosts of the same GPUs.
    """

    config: str
    deadline_s: float | None
    budget: float | None
    currency: str
    rows: tuple[QuoteRow, ...]
    cheapest: QuoteRow | None
    fastest: QuoteRow | None
    cannot: dict[str, str]
    not_planned: tuple[str, ...]
    verdict: tuple[str, ...]
    notes: tuple[str, ...]
    price_sources: tuple[str, ...]
    picture: str = ""


class Goals(NamedTuple):
    """The deadline and the budget of a quote; None: none. `objectives` are tuples, the smallest is the best."""

    deadline_s: float | None
    budget: float | None

    def objectives(self, seconds: float, cost: float | None) -> list[tuple[bool, float]]:
        """Return whether the goal is missed, and what to make small: cost in time, time within the budget."""
        cost, found = math.inf if cost is None else cost, []
        if self.deadline_s is not None:
            late = seconds > self.deadline_s
            found.append((late, seconds if late else cost))
        if self.budget is not None:
            dear = cost > self.budget
            found.append((dear, cost if dear else seconds))
        return found


def read_deadline(text: str) -> float:
    """Return the seconds of `7d`, `12h` or `90m`. Raises ValueError for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([dhm])", text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"--deadline {text}: write days, hours or minutes: 7d, 12h or 90m")
    return float(match[1]) * UNITS_S[match[2]]


def make_quote(config: RunConfig, machines: Machines, goals: Goals, *, text: Sequence[TextEstimate] = ()) -> Quote:
    """Plan `config` on all machines in all counts that could be the answer. `text`: estimates of its corpus.

    Raises ValueError if nothing is asked for, or no machine can train it.
    """
    if goals.deadline_s is None and goals.budget is None:
        raise ValueError("say when it must be done (--deadline 7d), what it may cost (--budget 5000), or both")
    if goals.budget is not None and not 0 < goals.budget < math.inf:
        raise ValueError(f"--budget {goals.budget:g}: give an amount above 0 {machines.currency}")
    config, notes = _of_fixed_length(config, text)
    offers = [(machine, count) for machine in machines.machines for count in machine.tried]
    plans, not_planned = _plan_all(config, offers, goals)
    cannot = {hosts: why for hosts, why in plans.items() if isinstance(why, str)}
    rows = [
        _row(machine, count, plan, goals)
        for machine, count in offers
        if isinstance(plan := plans.get(machine.text(count)), HostsPlan)
    ]
    if not rows:
        hosts, why = list(cannot.items())[-1]
        raise ValueError(f"no plan is possible on any of these machines; on {hosts}: {why}")
    rows.sort(key=lambda row: (math.inf if row.cost is None else row.cost, row.train_s))
    in_time = _best(rows, Goals(goals.deadline_s, None))
    affordable = _best(rows, Goals(None, goals.budget))
    return Quote(
        config=config.name,
        deadline_s=goals.deadline_s,
        budget=goals.budget,
        currency=machines.currency,
        rows=tuple(rows),
        cheapest=in_time if in_time and in_time.meets_deadline and in_time.cost is not None else None,
        fastest=affordable if affordable and affordable.meets_budget else None,
        cannot=cannot,
        not_planned=tuple(not_planned),
        verdict=tuple(_verdict(rows, in_time, affordable, goals, machines.currency)),
        notes=(*machines.warnings(datetime.date.today()), *notes, LEFT_OUT),
        price_sources=tuple(machines.sources),
    )


def _of_fixed_length(config: RunConfig, text: Sequence[TextEstimate]) -> tuple[RunConfig, list[str]]:
    """Return the config with as many steps on every machine, and sentences on what its length leaves out or guesses."""
    train, notes = config.train, []
    if train.target_minutes:
        train = train.model_copy(update={"target_minutes": 0.0})
        notes.append("train.target_minutes is left out: all of train.steps are quoted")
    if train.max_epochs and len(text) == max(1, len(config.data.sources)):
        each = [Epoch(max(1, one.train_tokens // train.context), one.train_tokens) for one in text]
        tokens = max(1, round(train.max_epochs * one_pass(config.data, each).tokens))
        train = train.model_copy(update={"max_tokens": min(tokens, train.max_tokens or tokens)})
        notes.append(f"train.max_epochs = {train.max_epochs:g}: about {tokens:,} tokens, as a sample of the text says")
    elif train.max_epochs:
        notes.append("train.max_epochs is left out: how much text there is, is not known here")
    return config.model_copy(update={"train": train}), notes


# Plans


def _plan_all(
    config: RunConfig, offers: Sequence[tuple[Machine, int]], goals: Goals
) -> tuple[dict[str, Answer], list[str]]:
    """Return a plan, or why there is none, by hosts; and the hosts that could not be the answer any more.

    The most promising by the rate and price of their GPUs come first. Beyond ALWAYS, hosts are left out that at their
    best would still be no better than what is found.
    """
    prices: dict[str, float] = {}
    for machine, count in offers:
        own = math.inf if machine.price_per_hour is None else count * machine.price_per_hour
        prices[machine.text(count)] = min(own, prices.get(machine.text(count), math.inf))
    gpus = {hosts: _gpus(hosts, fp8="fp8" in str(config.parallel.precision)) for hosts in prices}
    plans: dict[str, Answer] = {}
    best: list[tuple[bool, float]] = []
    fewest_s: dict[str, float] = {}  # that one GPU of a kind would need to compute all steps, as planned so far
    flops = 0.0

    def at_best(hosts: str) -> list[tuple[bool, float]]:
        gpu, number, rate = gpus[hosts]
        seconds = max(flops / rate, fewest_s.get(gpu, 0.0)) / number
        return goals.objectives(seconds, seconds / 3600 * prices[hosts])

    pending = sorted(prices, key=lambda hosts: prices[hosts] / gpus[hosts][1] / gpus[hosts][2])
    with _mapped(partial(_plan_on, config), number=len(pending)) as plan_each:
        while pending:
            size = AT_A_TIME if plans else ALWAYS
            for hosts, plan in zip(pending[:size], plan_each(pending[:size]), strict=True):
                plans[hosts] = plan
                if isinstance(plan, HostsPlan):
                    flops = plan.flops_per_token * plan.tokens
                    computing_s = plan.compute_share * plan.train_s * plan.used_gpus
                    fewest_s[plan.gpu] = min(computing_s, fewest_s.get(plan.gpu, math.inf))
                    found = goals.objectives(plan.train_s, plan.train_s / 3600 * prices[hosts])
                    best = [min(pair) for pair in zip(best or found, found, strict=True)]
            pending = pending[size:]
            if best:
                pending = [hosts for hosts in pending if any(map(tuple.__lt__, at_best(hosts), best))]
    return plans, sorted(set(prices) - set(plans))


def _gpus(hosts: str, *, fp8: bool) -> tuple[str, int, float]:
    """Return the GPU's name, their number, and the FLOP/s of one in large matrix products, in its fastest precision."""
    inventory = hypothetical_inventory(hosts)
    device = inventory.hosts[0].devices[0]
    rate = max(tflops for precision, tflops in device.matmul_tflops.items() if fp8 or precision != "fp8")
    return device.name, inventory.num_devices, 1e12 * rate


@contextmanager
def _mapped(plan: Callable[[str], Answer], *, number: int) -> Iterator[Callable[..., Iterable[Answer]]]:
    """Give what maps `plan` over hosts: in a process for each core, where there is enough to do."""
    cores = min(usable_cores(), number)
    if cores < 2 or number < WORTH_PROCESSES:
        yield partial(map, plan)
        return
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("fork")) as pool:  # what is imported stays
        yield partial(pool.map, plan)


def _plan_on(config: RunConfig, hosts: str) -> Answer:
    """Return what `plan --hosts` predicts, or why it refuses."""
    inventory = hypothetical_inventory(hosts)
    try:
        plan = plan_run(config, inventory=inventory)
    except ValueError as error:
        return str(error)
    chosen, predicted = plan.ranking[0], plan.predicted
    by_limit: dict[str, float] = defaultdict(float)
    for part, seconds in predicted.step_s.items():
        by_limit["communication" if "exposed" in part else LIMITS.get(part, part)] += seconds
    limit = max(by_limit, key=by_limit.__getitem__)
    least, most = (ms / 1000 * plan.steps for ms in predicted.step_range_ms)
    return HostsPlan(
        hosts=hosts,
        gpu=inventory.hosts[0].devices[0].name,
        num_gpus=inventory.num_devices,
        used_gpus=plan.world_size,
        strategy=plan.strategy,
        mesh=plan.mesh,
        micro_batch=plan.micro_batch,
        precision=plan.describe_precision,
        steps=plan.steps,
        tokens=plan.tokens,
        tokens_per_s=predicted.tokens_per_s,
        flops_per_token=predicted.flops_per_token,
        train_s=predicted.train_s,
        train_range_s=(least, most),
        memory_gib=chosen.memory_gib,
        usable_gib=chosen.usable_gib,
        limited_by=limit,
        limited_share=by_limit[limit] / sum(by_limit.values()),
        compute_share=by_limit["compute"] / sum(by_limit.values()),
    )


def _row(machine: Machine, count: int, plan: HostsPlan, goals: Goals) -> QuoteRow:
    per_s = None if machine.price_per_hour is None else count * machine.price_per_hour / 3600
    cost = None if per_s is None else per_s * plan.train_s
    least, most = plan.train_range_s
    return QuoteRow(
        **plan.model_dump(),
        machine=machine.name,
        num_hosts=count,
        cost=cost,
        cost_range=None if per_s is None else (per_s * least, per_s * most),
        meets_deadline=None if goals.deadline_s is None else plan.train_s <= goals.deadline_s,
        meets_budget=None if goals.budget is None else cost is not None and cost <= goals.budget,
    )


# What follows


def _best(rows: Sequence[QuoteRow], goal: Goals) -> QuoteRow | None:
    """Return the row that is best for this goal, whether it meets it or comes nearest; None if there is no goal."""
    if goal == (None, None):
        return None
    return min(rows, key=lambda row: (goal.objectives(row.train_s, row.cost), row.train_s))


def _verdict(
    rows: Sequence[QuoteRow], in_time: QuoteRow | None, affordable: QuoteRow | None, goals: Goals, currency: str
) -> Iterator[str]:
    """Yield sentences: the best row for each goal, or the nearest one and what it would take."""

    def said(row: QuoteRow) -> str:
        cost = "no price" if row.cost is None else format_money(row.cost, currency)
        return f"{row.name} ({row.layout}): {format_duration(row.train_s)}, {cost}"

    if in_time and goals.deadline_s is not None:
        deadline = format_duration(goals.deadline_s)
        if in_time.meets_deadline:
            yield f"the cheapest within {deadline}: {said(in_time)}"
            yield from _if_slow(rows, in_time, goals.deadline_s, said)
        else:
            times = in_time.train_s / goals.deadline_s
            hosts = math.ceil(in_time.num_hosts * times)
            yield (
                f"none is done within {deadline}; the nearest is {said(in_time)}, {times:.2f} times as long: it would "
                f"take --deadline {math.ceil(in_time.train_s / 3600)}h, or {hosts} such hosts if each did as much "
                "(`counts` in the file of machines)"
            )
    if affordable and goals.budget is not None:
        budget = format_money(goals.budget, currency)
        if affordable.meets_budget:
            yield f"the fastest for {budget}: {said(affordable)}"
        elif affordable.cost is None:
            yield "no machine has a price, so none is known to keep to the budget"
        else:
            yield (
                f"none costs at most {budget}; the nearest is {said(affordable)}: it would take --budget "
                f"{math.ceil(affordable.cost)}, or {1 - goals.budget / affordable.cost:.0%} fewer steps"
            )
    if None not in goals and not any(row.meets for row in rows):
        yield "none meets both the deadline and the budget"


def _if_slow(
    rows: Sequence[QuoteRow], chosen: QuoteRow, deadline_s: float, said: Callable[[QuoteRow], str]
) -> Iterator[str]:
    """Yield what is sure to be in time, if the slow end of the chosen row's range is not."""
    if chosen.train_range_s[1] <= deadline_s:
        return
    late = f"should it be as slow as its range allows, that takes {format_duration(chosen.train_range_s[1])}, too long"
    sure = next((row for row in rows if row.train_range_s[1] <= deadline_s), None)
    yield f"{late}; the cheapest whose whole range is in time: {said(sure)}" if sure else late

"""Whether a run is faster on some of its hosts: without a kind of device, or, behind a slow network, on fewer hosts.

Every such set of hosts is planned like all hosts are, and the fastest is taken if the config leaves hosts and strategy
open. Sets are not tried where the network between hosts was not measured, nor where they cannot be faster.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from training.planner.chosen_layout import DoesNotFit
from training.planner.cluster import ALIKE, Ring, matmul_tflops
from training.planner.job import Question
from training.planner.precision import BY_SUPPORT
from training.planner.search import TIED
from training.records.inventory import Device, Host

MAX_NAMED = 4  # idle hosts
LEAST_COMPUTING = 0.8  # of the time that a rank computes on all hosts: fewer of them have larger, faster products
KINDS_COMBINED = 4  # of more kinds of hosts only all, each alone, and all but the slowest ones are tried


class Planned(Protocol):
    """The best layout on some hosts, as far as hosts are concerned."""

    @property
    def step_s(self) -> float: ...
    @property
    def computing_s(self) -> float:
        """The part of a step that fewer hosts of the same kind would need in proportion more of."""
        ...

    @property
    def tokens_per_s(self) -> float: ...
    @property
    def spare(self) -> float:
        """The share of a rank's usable memory that is left, where least is."""
        ...

    @property
    def network(self) -> Ring: ...
    @property
    def hosts(self) -> tuple[Host, ...]: ...


Plan = TypeVar("Plan", bound=Planned)


def best_hosts(question: Question, plan: Callable[[Question], Plan]) -> tuple[Plan, tuple[str, ...]]:
    """Return the fastest plan, on all hosts or on some of them, and sentences on what the others would make.

    Raises ValueError, of all hosts, if nothing is possible on any set of them.
    """
    refusal: ValueError | None = None
    found: list[Plan] = []
    is_possible = True
    question = _where_ranks_are(question)
    everything = question.inventory.hosts
    for hosts in [everything, *_sets_of_hosts(question)]:
        if found:
            least_s = _least_s(question, hosts)
            if is_possible and _are_alike(everything):
                more = LEAST_COMPUTING * len(everything) / len(hosts)
                least_s = max(least_s, more * found[0].computing_s)
            if least_s >= min(each.step_s for each in found):
                continue
        try:
            found.append(plan(question.on(hosts)))
        except ValueError as error:
            refusal = refusal or error
            if hosts is everything and not (_may_choose(question) and isinstance(error, DoesNotFit)):
                raise  # a config that cannot be
            is_possible = is_possible and hosts is not everything
    if not found:
        assert refusal is not None
        raise refusal
    fastest = min(found, key=lambda each: each.step_s)
    of_all = found[0] if is_possible else None
    tied = [each for each in found if each.step_s <= TIED * fastest.step_s]
    fastest = max(tied, key=lambda each: round(each.spare, 1))
    taken = fastest if of_all is None or _may_choose(question) else of_all
    why = _why(question, found, taken, fastest, of_all, refusal)
    if fastest is not of_all and _are_alike(everything):
        why += _less_sent(question, plan, fastest)
    return taken, why


def _where_ranks_are(question: Question) -> Question:
    """Return the question on the first hosts that have parallel.ranks devices; on all, if it is 0 or there are less."""
    ranks, hosts = question.config.parallel.ranks, question.inventory.hosts
    reached = itertools.accumulate(len(host.devices) for host in hosts)
    enough = next((number for number, devices in enumerate(reached, 1) if devices >= ranks), len(hosts))
    return question.on(hosts[:enough]) if ranks > 0 and enough < len(hosts) else question


def _may_choose(question: Question) -> bool:
    return question.config.parallel.strategy == "auto"


def _sets_of_hosts(question: Question) -> Iterator[tuple[Host, ...]]:
    """Yield the sets to try besides all hosts: by kind of device, and of one kind half, a quarter, …, one."""
    config, hosts = question.config, question.inventory.hosts
    is_pinned = config.parallel.ranks or not isinstance(config.parallel.stages, str)
    if is_pinned or len(hosts) == 1 or not all(host.network_gb_per_s for host in hosts):
        return
    for some in _by_kind(hosts):
        sizes = [len(some) >> halving for halving in range(len(some).bit_length())] if _are_alike(some) else [len(some)]
        for size in sizes:
            if max(1, config.launch.min_hosts) <= size < len(hosts):
                yield some[:size]


def _by_kind(hosts: Sequence[Host]) -> list[tuple[Host, ...]]:
    """Return the hosts of each combination of kinds, in their order; all of them first."""
    kinds = kinds_of(hosts)
    numbers = sorted(set(kinds))
    if len(numbers) <= KINDS_COMBINED:
        combined = [each for size in range(len(numbers), 0, -1) for each in itertools.combinations(numbers, size)]
    else:  # hosts are in the order of their strength
        combined = [*(tuple(numbers[:size]) for size in range(len(numbers), 1, -1)), *((number,) for number in numbers)]
    return [tuple(host for host, kind in zip(hosts, kinds, strict=True) if kind in some) for some in combined]


def _are_alike(hosts: Sequence[Host]) -> bool:
    return len(set(kinds_of(hosts))) == 1


def kinds_of(hosts: Sequence[Host]) -> list[int]:
    """Return the number of each host's kind: hosts with as many devices that are alike are of one kind."""
    found: dict[tuple[str, ...], list[tuple[int, Host]]] = {}
    kinds, number = list[int](), itertools.count()
    for host in hosts:
        same = found.setdefault(tuple(device.name for device in host.devices), [])
        kind = next((kind for kind, other in same if are_alike(host.devices[0], other.devices[0])), None)
        if kind is None:
            kind = next(number)
            same.append((kind, host))
        kinds.append(kind)
    return kinds


def are_alike(one: Device, other: Device) -> bool:
    """Whether devices have one name, and rates and memory that differ by less than ALIKE."""
    if one is other:
        return True
    pairs = [(best_tflops(one), best_tflops(other)), (one.memory_gib, other.memory_gib)]
    return one.name == other.name and all(a == b or 1 / ALIKE < a / max(b, 1e-9) < ALIKE for a, b in pairs)


def best_tflops(device: Device) -> float:
    return max((matmul_tflops(device, precision) for precision in BY_SUPPORT), default=0.0)


def _least_s(question: Question, hosts: Sequence[Host]) -> float:
    """Return the seconds that these hosts need for a step's matrix products at their full rates; 0 if unknown."""
    devices = {id(device): device for host in hosts for device in host.devices}
    number = Counter(id(device) for host in hosts for device in host.devices)
    tflops = sum(times * best_tflops(devices[key]) for key, times in number.items())
    train = question.config.train
    multiplied = sum(layer.count * layer.multiplied for layer in question.shape.sizes.layers)
    flops = 6 * multiplied * train.global_batch * train.context
    return flops / (tflops * 1e12) if tflops else 0.0


# Sentences


def _why(
    question: Question,
    found: Sequence[Plan],
    taken: Plan,
    fastest: Plan,
    of_all: Plan | None,
    refusal: ValueError | None,
) -> tuple[str, ...]:
    """Return the sentence on the set that was taken, or would be, and those on sets of other kinds."""
    everything = question.inventory.hosts
    if of_all is None:
        return (f"hosts: {_part(taken.hosts, everything)}: taken, because of all hosts: {refusal}",)
    others = [each for each in found if each is not of_all and each is not fastest and not _are_alike(everything)]
    speeds = "".join(f", {_part(each.hosts, everything)} {_speed(each)}" for each in others)
    if fastest is of_all:
        is_said = others and len(of_all.hosts) == len(everything)  # else the number of ranks leaves some out
        return (f"hosts: all of them make {_speed(of_all)}{speeds}: all are taken",) if is_said else ()
    used = {host.name for host in fastest.hosts}
    idle = [host for host in everything if host.name not in used]
    if taken is fastest:
        how = f"taken; idle: {_names(idle)}"
    elif everything[: len(used)] == fastest.hosts:
        how = f"parallel.ranks={sum(len(host.devices) for host in fastest.hosts)} would take them"
    else:
        how = f"a run without {_names(idle)} would take them alone"
    return (
        f"hosts: {_part(fastest.hosts, everything)} make {_speed(fastest)}, all of them {_speed(of_all)} over a "
        f"network of {of_all.network.gb_per_s:.3g} GB/s{speeds}: {how}",
    )


def _less_sent(question: Question, plan: Callable[[Question], Plan], fastest: Plan) -> tuple[str, ...]:
    """Return a sentence that names compression or local-sgd on all hosts, where faster. They change learning."""
    ways: dict[str, dict[str, Any]] = {
        "parallel.strategy=local-sgd": {"strategy": "local-sgd"},
        "parallel.strategy=ddp parallel.compression=powersgd": {"strategy": "ddp", "compression": "powersgd"},
    }
    found = []
    for way, fields in ways.items():
        try:
            other = plan(question.changed("parallel", **fields))
        except ValueError:
            continue
        if TIED * other.step_s < fastest.step_s:
            found.append(f"{way} {_speed(other)}")
    if not found:
        return ()
    return (
        f"all hosts would make, sending less: {', '.join(found)}; that changes what is learned, so it is not taken",
    )


def _part(hosts: Sequence[Host], everything: Sequence[Host]) -> str:
    """`2 of 4 (16 H100-80GB-SXM)`."""
    names = Counter(device.name for host in hosts for device in host.devices)
    devices = " + ".join(f"{number} {name}" for name, number in names.items())
    return f"{len(hosts)} of {len(everything)} ({devices})"


def _names(hosts: Sequence[Host]) -> str:
    more = len(hosts) - MAX_NAMED
    return ", ".join(host.name for host in hosts[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _speed(planned: Planned) -> str:
    return f"{planned.tokens_per_s:,.0f} tokens/s"

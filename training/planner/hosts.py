"""Whether a run is faster on some of its hosts: without a kind of device, or, behind a slow network, on fewer hosts.

Every such set of hosts is planned like all hosts are, and the fastest is taken if the config leaves hosts and strategy
open. Sets are not tried where the network between hosts was not measured, nor where they cannot be faster.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from training.planner.chosen_layout import ChosenLayout
from training.planner.cluster import are_alike, matmul_tflops
from training.planner.precision import BY_SUPPORT
from training.planner.price.pricing import DoesNotFit, best_first
from training.planner.question import Question
from training.planner.reasons.hosts import why_hosts, why_less_sent, why_without
from training.records.inventory import Device, Host

LEAST_COMPUTING = 0.8  # of the time that a rank computes on all hosts: fewer of them have larger, faster products
KINDS_COMBINED = 4  # of more kinds of hosts only all, each alone, and all but the slowest ones are tried


def best_hosts(question: Question, plan: Callable[[Question], ChosenLayout]) -> tuple[ChosenLayout, tuple[str, ...]]:
    """Return the fastest plan, on all hosts or on some of them, and sentences on what the others would make.

    Raises ValueError, of all hosts, if nothing is possible on any set of them.
    """
    refusal: ValueError | None = None
    found: list[ChosenLayout] = []
    is_possible = True
    question = _where_ranks_are(question)
    everything = question.inventory.hosts
    for hosts in [everything, *_sets_of_hosts(question)]:
        if found:
            least_s = _least_s(question, hosts)
            if is_possible and _is_one_kind(everything):
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
    of_all, best = found[0] if is_possible else None, best_first([each.best for each in found])[0]
    fastest = next(each for each in found if each.best is best)
    taken = fastest if of_all is None or _may_choose(question) else of_all
    others = [] if _is_one_kind(everything) else [each for each in found if each is not of_all and each is not fastest]
    why = why_hosts(everything, taken, fastest, of_all, others) if of_all else why_without(taken, everything, refusal)
    if fastest is not of_all and _is_one_kind(everything):
        why += why_less_sent(_plans_that_send_less(question, plan), fastest)
    return taken, why


def _plans_that_send_less(question: Question, plan: Callable[[Question], ChosenLayout]) -> dict[str, ChosenLayout]:
    """Return what local-sgd and PowerSGD would give on all hosts, by what to set.

    They change learning, so they are only mentioned.
    """
    ways: dict[str, dict[str, Any]] = {
        "parallel.strategy=local-sgd": {"strategy": "local-sgd"},
        "parallel.strategy=ddp parallel.compression=powersgd": {"strategy": "ddp", "compression": "powersgd"},
    }
    found = {}
    for way, fields in ways.items():
        with contextlib.suppress(ValueError):
            found[way] = plan(question.changed("parallel", **fields))
    return found


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
        sizes = (
            [len(some) >> halving for halving in range(len(some).bit_length())] if _is_one_kind(some) else [len(some)]
        )
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


def _is_one_kind(hosts: Sequence[Host]) -> bool:
    return len(set(kinds_of(hosts))) == 1


def kinds_of(hosts: Sequence[Host]) -> list[int]:
    """Return the number of each host's kind: hosts with as many devices that are alike are of one kind."""
    found: dict[tuple[str, ...], list[tuple[int, Host]]] = {}
    kinds, number = list[int](), itertools.count()
    for host in hosts:
        same = found.setdefault(tuple(device.name for device in host.devices), [])
        kind = next((kind for kind, other in same if are_alike(_figures(host), _figures(other))), None)
        if kind is None:
            kind = next(number)
            same.append((kind, host))
        kinds.append(kind)
    return kinds


def _figures(host: Host) -> tuple[float, float]:
    return best_tflops(host.devices[0]), host.devices[0].memory_gib


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

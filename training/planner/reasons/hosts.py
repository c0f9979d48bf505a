"""What is assumed of hosts, and why a run takes those that it takes, with what the others would make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from training.planner.chosen_layout import ChosenLayout
from training.planner.hypothetical_hosts import HYPOTHETICAL, NETWORK_SHARE
from training.planner.price.pricing import TIED
from training.records.inventory import Host, Inventory

MAX_NAMED = 4  # idle hosts


def assumptions(inventory: Inventory) -> list[str]:
    """Sentences for the plan's reasons on what it assumes of hypothetical hosts; none for real hosts."""
    hosts = [host for host in inventory.hosts if HYPOTHETICAL in host.versions]
    if not hosts:
        return []
    gpus = sorted({host.versions[HYPOTHETICAL] for host in hosts})
    found = [
        f"hypothetical hosts: nothing was measured. Rates of matrix products are those that others measured "
        f"({'; '.join(gpus)}), links the share of the datasheet's that NCCL usually reaches"
    ]
    if len(inventory.hosts) > 1:
        rates = sorted({f"{host.network_gb_per_s / NETWORK_SHARE * 8:.0f}" for host in hosts}, key=float)
        found.append(
            f"network: {' and '.join(rates)} Gbit/s per host, shared by its GPUs (8x400Gb would be eight adapters of "
            "400 Gbit/s)"
        )
    return found


def why_without(taken: ChosenLayout, everything: Sequence[Host], refusal: ValueError | None) -> tuple[str, ...]:
    return (f"hosts: {_part(taken.hosts, everything)}: taken, because of all hosts: {refusal}",)


def why_hosts(
    everything: Sequence[Host],
    taken: ChosenLayout,
    fastest: ChosenLayout,
    of_all: ChosenLayout,
    others: Sequence[ChosenLayout],
) -> tuple[str, ...]:
    """Return the sentence on the set that was taken, or would be, and on `others` of unlike hosts."""
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
        f"network of {of_all.cluster.network.gb_per_s:.3g} GB/s{speeds}: {how}",
    )


def why_less_sent(ways: Mapping[str, ChosenLayout], fastest: ChosenLayout) -> tuple[str, ...]:
    """Return a sentence that names what sends less on all hosts, where it is faster."""
    found = [f"{way} {_speed(other)}" for way, other in ways.items() if TIED * other.step_s < fastest.step_s]
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


def _speed(planned: ChosenLayout) -> str:
    return f"{planned.tokens_per_s:,.0f} tokens/s"

"""Prices runs of other programs as `shardline plan` would price a run of ours, and judges the prices.

A row says what ran (model, machines, layout, precision, recomputation) and what was measured; it is priced by
`our_cost_model` (training/planner/cost_model.py) on hypothetical hosts, with no constants composed for its program:
only what the program says of itself (`Traits`: its residual stream, kernels and overlap) is taken as a config of ours
would say it. Rows come from a JSON file (`read_rows`) or are those of published.py (planner_vs_published.py). A family
is what one source measured; a sweep is several layouts of the same model, machines, program, context and global batch.
"""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from training.config.run import RunConfig
from training.planner.cluster import Cluster, cluster_of
from training.planner.cost_model import CostModel, TimeCosts
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.planner.job import Job, Layout
from training.planner.memory import memory_gib
from training.planner.model_shape import own_shape
from training.planner.pricing import MEMORY_SHARE, PricedLayout, cost_model_of, likely_range, num_shards
from training.planner.search import best_first
from training.planner.step_time import step_s as seconds_of_step
from training.records.correction import Measured

PRECISIONS = {"mxfp8": "fp8"}  # a plan knows one kind of fp8
# How many seconds a step takes, from what a row measured: the unit, and the tokens, sequences and GPUs of a step.
UNITS = ("seconds a step", "tokens/s a GPU", "tokens/s", "sequences/s", "TFLOP/s a GPU")


@dataclass(frozen=True)
class Traits:
    """A program says this of its kernels and its communication; the defaults are what a plan takes of ours on GPUs."""

    bf16_residual: bool = False
    is_compiled: bool = True  # or has kernels of its own for what lies between products
    keeps_scores: bool = False  # attention without a fused kernel, all of whose scores are kept and none skipped
    scatters_boundary: bool = False
    overlaps: bool = False  # sums of tp, gradients, and the weights that were updated, with computing

    def of_kernel(self, kernel: str) -> Traits:
        """Return the traits with what a row's `kernel` says in words; "" if it says nothing."""
        is_flash = "flash" in kernel or "cudnn" in kernel.lower()
        is_compiled = self.is_compiled and kernel not in ("flash_attention2", "eager")
        return replace(self, is_compiled=is_compiled, keeps_scores=self.keeps_scores and not is_flash)

    def applied(self, model: CostModel) -> CostModel:
        if self.keeps_scores:
            model = model.replaced(kept=replace(model.program.kept, scores=SCORE_BYTES), skips_masked=False)
        if self.overlaps:
            model = model.replaced(hides=TimeCosts.hides, hides_update=True, tp_exposed=0.5)
        return model.replaced(scatters_boundary=self.scatters_boundary)


SCORE_BYTES = 5.0  # for each head and pair of tokens: Korthikanti et al. 2022, section 4.1
# By how a program's name begins. Sources: Narayanan et al. 2021, 4.1 and 4.2; NeMo's and Megatron-Bridge's performance
# guides (tp_comm_overlap, overlap_grad_reduce, overlap_param_gather); MaxText's XLA flags for latency hiding.
TRAITS = {
    "megatron": Traits(bf16_residual=True, keeps_scores=True, scatters_boundary=True),
    "megafa": Traits(bf16_residual=True, scatters_boundary=True),
    "nemo": Traits(bf16_residual=True, scatters_boundary=True, overlaps=True),
    "bridge": Traits(bf16_residual=True, scatters_boundary=True, overlaps=True),
    "maxtext": Traits(overlaps=True),
}


def traits_of(program: str, kernel: str = "") -> Traits:
    found = next((traits for name, traits in TRAITS.items() if program.startswith(name)), Traits())
    return found.of_kernel(kernel)


@dataclass(frozen=True)
class PlannedRow:
    """One run as the planner's inputs. `step_s`: the measured seconds of a step, None if none are known."""

    family: str
    sweep: tuple[object, ...]
    config: RunConfig
    job: Job
    layout: Layout
    cluster: Cluster
    step_s: float | None
    traits: Traits
    ran: bool = True

    @functools.cached_property
    def priced(self) -> PricedLayout:
        job, layout, cluster = self.job, self.layout, self.cluster
        model = self.traits.applied(cost_model_of(self.config, job, layout, cluster))
        shards = num_shards(self.config, layout, cluster)
        memory = memory_gib(job, layout, model, num_shards=shards)
        seconds = seconds_of_step(job, layout, model, cluster, num_shards=shards)
        return PricedLayout(layout, cluster, memory, MEMORY_SHARE * cluster.memory_gib, seconds)

    @property
    def ratio(self) -> float:
        """Return measured / predicted time of a step."""
        assert self.step_s is not None
        return self.step_s / self.priced.step_s

    @property
    def error(self) -> float:
        """Return how far the predicted rate is from the measured one, as a share of that."""
        return abs(self.ratio - 1)

    @property
    def is_in_range(self) -> bool:
        least, most = likely_range("cuda", "nothing")
        return least <= self.ratio <= most


def planned_row(
    *,
    family: str,
    sweep: tuple[object, ...],
    model: Mapping[str, Any],
    hosts: str,
    ranks_per_host: Sequence[int],
    precision: str,
    context: int,
    global_batch: int,
    layout: Layout,
    step_s: float | None,
    traits: Traits,
    ran: bool = True,
) -> PlannedRow:
    """Return a row with the inputs that `shardline plan` would have. `model`: its sizes, as rows name them."""
    shape = own_shape(
        "llama" if model["gated_mlp"] else "gpt2",
        **{size: model[size] for size in ("layers", "width", "heads", "kv_heads", "mlp_width", "vocab_size", "tied")},
        context=context,
    )
    used = PRECISIONS.get(precision, precision)
    config = _config(used, traits.is_compiled and layout.strategy != "zero3", traits.bf16_residual)
    job = Job(shape=shape, context=context, global_batch=global_batch, precision=used)  # type: ignore[arg-type]
    cluster = cluster_of(hypothetical_inventory(hosts), ranks_per_host, precision=used)
    return PlannedRow(family, sweep, config, job, layout, cluster, step_s, traits, ran)


@functools.cache
def _config(precision: str, compiled: bool, bf16_residual: bool) -> RunConfig:
    """Return the config of such a run, with all else its default."""
    train = {"compile": compiled, "residual": "bf16" if bf16_residual else "fp32"}
    return RunConfig.model_validate({"train": train, "parallel": {"precision": precision}})


# Rows of a file


def read_rows(path: Path) -> list[PlannedRow]:
    """Return the rows of a JSON list. Raises ValueError, with the row's number, for a row that cannot be read."""
    found = []
    for number, row in enumerate(json.loads(path.read_text())):
        try:
            found.append(_read(row))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: row {number} cannot be priced: {error!r}") from error
    return found


def _read(row: Mapping[str, Any]) -> PlannedRow:
    gpus, here = row["gpus"], min(row["gpus_per_host"] or row["gpus"], row["gpus"])
    ranks = [here] * (gpus // here) + ([gpus % here] if gpus % here else [])
    network = f",{row['network_per_host']}" if len(ranks) > 1 else ""
    tp, pp, cp = row["tp"], row["pp"], row.get("cp", 1)
    dp = max(1, gpus // (tp * pp * cp))
    layout = Layout(
        strategy=row["strategy"],
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        micro_batch=row["micro_batch"],
        accumulation=max(1, round(row["global_batch"] / dp / row["micro_batch"])),
        recompute=row["recompute"],
        offload=row.get("offload") or "none",
        stages_per_rank=row.get("stages_per_rank", 1),
        sequence_parallel=tp > 1 and row.get("sequence_parallel") is not False,
    )
    machine = (row["gpu"], gpus, here, network)
    return planned_row(
        family=f"{row['source']}, {row['program']}",
        sweep=(row["source"], row["program"], *row["model"].values(), *machine, row["context"], row["global_batch"]),
        model=row["model"],
        hosts=f"{len(ranks)}x{here}x{row['gpu']}{network}",
        ranks_per_host=ranks,
        precision=row["precision"],
        context=row["context"],
        global_batch=row["global_batch"],
        layout=layout,
        step_s=_step_s(row) if row.get("measured") else None,
        traits=traits_of(row["program"], row.get("kernel") or ""),
        ran=bool(row.get("measured")) or row.get("outcome") == "ran",
    )


def _step_s(row: Mapping[str, Any]) -> float:
    """Return the measured seconds of a step. Raises ValueError for a unit that is none of UNITS."""
    unit, sequences = row["unit"], row["global_batch"]
    if unit == "seconds a step":
        return float(row["measured"])
    per_gpu = row["measured"] * row["gpus"]
    in_a_step = {
        "tokens/s a GPU": sequences * row["context"] / per_gpu,
        "tokens/s": sequences * row["context"] / row["measured"],
        "sequences/s": sequences / row["measured"],
        "TFLOP/s a GPU": _published_flops(row) / 1e12 / per_gpu,
    }
    if unit not in in_a_step:
        raise ValueError(f"unit {unit!r} is none of {', '.join(UNITS)}")
    return float(in_a_step[unit])


def _published_flops(row: Mapping[str, Any]) -> float:
    """Return a step's operations as Narayanan et al. 2021, eq. 3, count them, recomputation included."""
    model, s = row["model"], row["context"]
    h, layers = model["width"], model["layers"]
    per_layer = 96 * row["global_batch"] * s * layers * h * h
    return float(per_layer * (1 + s / (6 * h) + model["vocab_size"] / (16 * layers * h)))


# The judge


def judged(rows: Sequence[PlannedRow]) -> dict[str, float]:
    """Return the figures of the prices of measured rows: errors, coverage of the printed ranges, regret of choices."""
    errors, regrets = [row.error for row in rows], [*regrets_of(rows)]
    return {
        "num_rows": len(rows),
        "median_error": median(errors),
        "p90_error": quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0],
        "worst_error": max(errors),
        "coverage_of_ranges": fmean(row.is_in_range for row in rows),
        "mean_regret_excess": fmean(regrets) if regrets else 0.0,
        "max_regret_excess": max(regrets, default=0.0),
        "num_sweeps": len(regrets),
    }


def by_family(rows: Sequence[PlannedRow]) -> dict[str, list[PlannedRow]]:
    found = defaultdict(list)
    for row in rows:
        found[row.family].append(row)
    return dict(sorted(found.items()))


def regrets_of(rows: Iterable[PlannedRow]) -> Iterable[float]:
    """Yield by how much the layout that a plan would choose of each sweep was slower than its fastest one."""
    sweeps = defaultdict(list)
    for row in rows:
        sweeps[row.sweep].append(row)
    for sweep in sweeps.values():
        measured = {id(row.priced): row.step_s for row in sweep if row.step_s is not None}
        if len({row.layout for row in sweep}) > 1:
            fitting = [row.priced for row in sweep if row.priced.fits] or [row.priced for row in sweep]
            chosen, *_ = best_first(fitting)
            yield measured[id(chosen)] / min(measured.values()) - 1


# Ranges


def spreads(rows: Sequence[PlannedRow]) -> dict[Measured, dict[str, list[float]]]:
    """Return measured / predicted times by family, as they would be corrected by what was measured on the machine.

    Of a similar job: by the median of what the same source ran on such GPUs in the same precision. Of this job: by
    that of the same model, context, machine, program and kind of layout, with other batches or numbers of GPUs.
    """
    similar = defaultdict(list)
    same = defaultdict(list)
    for row in rows:
        source, model, context, machine, _, program, *_ = row.sweep
        layout = row.layout
        similar[source, machine, program].append(row)
        kind = (layout.strategy, layout.tp, layout.pp, layout.recompute)
        same[source, model, context, machine, program, kind].append(row)
    return {
        "this job": _relative(same.values()),
        "a similar job": _relative(similar.values()),
        "nothing": {family: [row.ratio for row in each] for family, each in by_family(rows).items()},
    }


def _relative(groups: Iterable[Sequence[PlannedRow]]) -> dict[str, list[float]]:
    """Return each row's ratio over the median of its group's others, by family."""
    found = defaultdict(list)
    for group in groups:
        for row in group:
            if others := [other.ratio for other in group if other is not row]:
                found[row.family].append(row.ratio / median(others))
    return found


LEFT_OUT: dict[Measured, float] = {"this job": 0.1, "a similar job": 0.1, "nothing": 0.05}  # at either end of a range


def range_of(ratios: Iterable[float], measured: Measured) -> tuple[float, float]:
    found, left_out = sorted(ratios), LEFT_OUT[measured]
    return found[round(left_out * (len(found) - 1))], found[round((1 - left_out) * (len(found) - 1))]


def derived_ranges(rows: Sequence[PlannedRow]) -> dict[Measured, tuple[float, float]]:
    """Return the ranges that pricing.py has."""
    return {what: range_of(chain(*families.values()), what) for what, families in spreads(rows).items()}


def coverage_of_families(rows: Sequence[PlannedRow]) -> dict[Measured, float]:
    """Return the share of rows that lie within the range that all other families give."""
    found: dict[Measured, float] = {}
    for what, families in spreads(rows).items():
        within = []
        for family, ratios in families.items():
            least, most = range_of(chain(*(each for other, each in families.items() if other != family)), what)
            within += [least <= ratio <= most for ratio in ratios]
        found[what] = fmean(within)
    return found


def judged_memory(rows: Sequence[PlannedRow]) -> dict[str, float]:
    """Return how many layouts were rightly taken as fitting or not, and how many taken as fitting ran out."""
    outcomes = Counter((row.priced.fits, row.ran) for row in rows)
    taken = outcomes[True, True] + outcomes[True, False]
    return {
        "num_rows": len(rows),
        "judged_rightly": (outcomes[True, True] + outcomes[False, False]) / len(rows),
        "taken": taken,
        "ran_out_of_those_taken": outcomes[True, False] / taken if taken else 0.0,
    }

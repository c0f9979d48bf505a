"""Prices runs of other programs as `shardline plan` would price a run of ours, and judges the prices.

A row says what ran (model, machines, layout, precision, recomputation) and what was measured; it is priced by
`our_cost_model` (training/planner/price/) on hypothetical hosts, with no constants composed for its program:
only what the program says of itself (`Traits`: its residual stream, kernels and overlap) is taken as a config of ours
would say it. Rows come from a JSON file (`read_rows`) or are those of published.py (planner_vs_published.py). A family
is what one source measured; a sweep is several layouts of the same model, machines, program, context and global batch.
"""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from training.config.run import RunConfig
from training.planner.cluster import ATTENTION, MEMORY_SHARE, Cluster, cluster_of
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.planner.job import Job, Layout
from training.planner.model_shape import own_shape
from training.planner.price.cost_model import CostModel, TimeCosts
from training.planner.price.memory import memory_gib
from training.planner.price.pricing import PricedLayout, best_first, likely_range, our_step
from training.planner.price.step_time import step_s as seconds_of_step
from training.records.correction import Measured
from training.records.inventory import Inventory

PRECISIONS = {"mxfp8": "fp8"}  # a plan knows one kind of fp8
# How many seconds a step takes, from what a row measured: the unit, and the tokens, sequences and GPUs of a step.
UNITS = ("seconds a step", "tokens/s a GPU", "tokens/s", "sequences/s", "TFLOP/s a GPU")


# Rates of attention as shares of the rate of products, forward and backward over long contexts, by the first digit of
# the compute capability; cluster.py has those of torch. FlashAttention-3 and cuDNN: Shah et al. 2024, arXiv:2407.08608,
# figures 5 and 6 (575 and 520 of 791 TFLOP/s). Kernels of the first FlashAttention in Triton: on A100 half of the
# second's (Dao 2023, arXiv:2307.08691, figure 4), on H100 fitted to MosaicML's rows.
ATTENTION_BY_KERNEL = {
    "flash3": {"9": 0.73},
    "cudnn": {"9": 0.66, "10": 0.66},
    "triton": {"8": 0.38, "9": 0.25},
}
SCORE_BYTES = 5.0  # for each head and pair of tokens: Korthikanti et al. 2022, section 4.1


@dataclass(frozen=True)
class Traits:
    """A program says this of itself, as our config does; the defaults are what a plan takes of ours on GPUs.

    `gradient_bytes`: of a program that trains 16-bit weights, with fp32 copies in its optimizer; 0: fp32 weights.
    """

    bf16_residual: bool = False
    is_compiled: bool = True
    fuses_norms: bool = True
    fuses_all: bool = False  # kernels of its own for all that lies between products
    keeps_scores: bool = False  # attention without a fused kernel, all of whose scores are kept and none skipped
    kernel: str = ""  # of ATTENTION_BY_KERNEL; "": as torch's
    scatters_boundary: bool = False
    overlaps: bool = False  # sums of tp, gradients, and the weights that were updated, with computing
    gradient_bytes: float = 0.0
    counts_ends: bool = False  # as a layer each, where it cuts a pipeline's stages
    gathers_logits: bool = False  # so that each tp rank has all of them

    def of_row(self, kernel: str, *, fp32_gradients: bool) -> Traits:
        """Return the traits with what a row's `kernel` says in words; "" if it says nothing."""
        words = kernel.lower().replace("-", "").replace(" ", "")
        named = {"flash3": ("flash_attention3", "flashattention3", "fa3"), "cudnn": ("cudnn",), "triton": ("triton",)}
        found = next((name for name, begins in named.items() if any(each in words for each in begins)), self.kernel)
        is_fused = bool(found) or any(each in words for each in ("flash", "sdpa", "fa2"))
        is_eager = words in ("flash_attention2", "eager")
        return replace(
            self,
            kernel=found,
            is_compiled=self.is_compiled and not is_eager,
            fuses_norms=self.fuses_norms and not is_eager,
            keeps_scores=(self.keeps_scores or words in ("eager", "fused")) and not is_fused,
            gradient_bytes=4.0 if self.gradient_bytes and fp32_gradients else self.gradient_bytes,
        )

    def applied(self, model: CostModel, *, tp: int) -> CostModel:
        if self.keeps_scores:
            model = model.replaced(kept=replace(model.program.kept, scores=SCORE_BYTES), skips_masked=False)
        if self.overlaps:
            model = model.replaced(hides=TimeCosts.hides, hides_update=True, tp_exposed=0.5)
        if self.fuses_norms:
            model = model.replaced(norm_bytes=0.0)
        if self.fuses_all:
            model = model.replaced(passes=FUSED_PASSES)
        if grads := self.gradient_bytes:
            model = model.replaced(
                weight_bytes=2.0,
                gradient_bytes=grads,
                optimizer_bytes=12.0,
                cast_bytes=0.0,
                copy_bytes=0.0,
                gather_bytes=2.0,
                reduce_bytes=grads,
                accumulated_bytes=2 + 2 * grads,
                logit_bytes=LOGIT_BYTES * (tp if self.gathers_logits else 1),
                chunked_logits=False,
            )
        return model.replaced(scatters_boundary=self.scatters_boundary)

    def attends(self, cluster: Cluster, inventory: Inventory) -> Cluster:
        """Return the inventory's cluster with the rate of the program's attention."""
        capability = (inventory.hosts[0].devices[0].compute_capability or "").partition(".")[0]
        theirs, ours = ATTENTION_BY_KERNEL.get(self.kernel, {}), ATTENTION.get(capability, ATTENTION["8"])
        return replace(cluster, attention_tflops=cluster.attention_tflops * theirs.get(capability, ours) / ours)


FUSED_PASSES = 1.1  # bytes moved per byte kept: 22 h + 16 h for 34 h kept by Megatron's layer
LOGIT_BYTES = 14.0  # logits in 16 bits, then fp32, their softmax and its gradient
MEGATRON = Traits(bf16_residual=True, keeps_scores=True, scatters_boundary=True, fuses_all=True, gradient_bytes=2.0)
NVIDIA = replace(MEGATRON, keeps_scores=False, kernel="cudnn", overlaps=True, gradient_bytes=4.0)
# By how a program's name begins. Sources: Narayanan et al. 2021, 4.1 and 4.2; NeMo's and Megatron-Bridge's performance
# guides (tp_comm_overlap, overlap_grad_reduce, overlap_param_gather); MaxText's XLA flags for latency hiding;
# MosaicML's llm-foundry (attn_impl: triton); Hagemann et al. 2023, arXiv:2311.05610, and Aleph-Alpha/scaling on GitHub
# (16-bit weights and gradients; embedding and output layer are layers of a pipeline; logits are gathered).
TRAITS = {
    "megatron": MEGATRON,
    "megafa": replace(
        MEGATRON, keeps_scores=False, fuses_all=False, is_compiled=False, counts_ends=True, gathers_logits=True
    ),
    "nemo": NVIDIA,
    "bridge": NVIDIA,
    "maxtext": Traits(bf16_residual=True, overlaps=True, kernel="cudnn"),
    "mpt": Traits(bf16_residual=True, kernel="triton"),
}


WHOLE_SEQUENCES = ("megatron21", "megatron22")  # of Megatron-LM before sequence parallelism; megatron22s has it


def traits_of(program: str, kernel: str = "", *, fp32_gradients: bool = False) -> Traits:
    found = next((traits for name, traits in TRAITS.items() if program.startswith(name)), Traits())
    return found.of_row(kernel, fp32_gradients=fp32_gradients)


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
        ours = our_step(self.config, self.job, self.layout, self.cluster)
        step = replace(ours, model=self.traits.applied(ours.model, tp=self.layout.tp))
        usable_gib = MEMORY_SHARE * self.cluster.memory_gib
        return PricedLayout(self.layout, self.cluster, memory_gib(step), usable_gib, seconds_of_step(step))

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
    power: float = 1.0,
) -> PlannedRow:
    """Return a row with the inputs that `shardline plan` would have. `model`: its sizes, as rows name them.

    `power`: the share of their rate that GPUs of limited power reach, which an inventory would measure.
    """
    shape = own_shape(
        "llama" if model["gated_mlp"] else "gpt2",
        **{size: model[size] for size in ("layers", "width", "heads", "kv_heads", "mlp_width", "vocab_size", "tied")},
        context=context,
    )
    used = PRECISIONS.get(precision, precision)
    config = _config(used, traits.is_compiled and layout.strategy != "zero3", traits.bf16_residual)
    layout = replace(layout, counts_ends=traits.counts_ends)
    job = Job(shape=shape, context=context, global_batch=global_batch, precision=used)  # type: ignore[arg-type]
    inventory = hypothetical_inventory(hosts)
    cluster = traits.attends(cluster_of(inventory, ranks_per_host, precision=used), inventory)
    cluster = replace(cluster, matmul_tflops=power * cluster.matmul_tflops)
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
        sequence_parallel=tp > 1
        and row.get("sequence_parallel", row["program"].partition("_")[0] not in WHOLE_SEQUENCES),
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
        traits=traits_of(
            row["program"],
            row.get("kernel") or "",
            fp32_gradients=bool((row.get("other") or {}).get("fp32_grads")),
        ),
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
    errors, regrets = [row.error for row in rows], [*regrets_of(rows, lambda fitting: best_first(fitting)[0])]
    of_fastest = [*regrets_of(rows, lambda fitting: min(fitting, key=lambda each: each.step_s))]
    return {
        "num_rows": len(rows),
        "median_error": median(errors),
        "p90_error": p90(errors),
        "worst_error": max(errors),
        "coverage_of_ranges": fmean(row.is_in_range for row in rows),
        "mean_regret_excess": fmean(regrets) if regrets else 0.0,
        "max_regret_excess": max(regrets, default=0.0),
        "mean_regret_excess_of_fastest": fmean(of_fastest) if of_fastest else 0.0,
        "num_sweeps": len(regrets),
    }


def p90(errors: Sequence[float]) -> float:
    return quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0]


def by_family(rows: Sequence[PlannedRow]) -> dict[str, list[PlannedRow]]:
    found = defaultdict(list)
    for row in rows:
        found[row.family].append(row)
    return dict(sorted(found.items()))


def regrets_of(rows: Iterable[PlannedRow], choose: Callable[[Sequence[PricedLayout]], PricedLayout]) -> Iterable[float]:
    """Yield by how much the layout that is chosen of each sweep was slower than its fastest one."""
    sweeps = defaultdict(list)
    for row in rows:
        sweeps[row.sweep].append(row)
    for sweep in sweeps.values():
        measured = {id(row.priced): row.step_s for row in sweep if row.step_s is not None}
        if len({row.layout for row in sweep}) > 1:
            fitting = [row.priced for row in sweep if row.priced.fits] or [row.priced for row in sweep]
            yield measured[id(choose(fitting))] / min(measured.values()) - 1


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


LEFT_OUT: dict[Measured, float] = {"this job": 0.1, "a similar job": 0.1, "nothing": 0.06}  # at either end of a range


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

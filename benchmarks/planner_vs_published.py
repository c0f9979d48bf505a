"""Compares the plan's arithmetic with published measurements of throughput and memory, row by row.

    python -m benchmarks.planner_vs_published [--quick] [--parts] [--left-out] [--rows FILE] [--memory FILE]

The code that predicts our own runs (memory.py and step_time.py in training/planner) predicts runs of Megatron-LM,
DeepSpeed, torchtitan and MosaicML here, each with a cost model of that program. A few efficiencies were fitted to the
rows marked * in published.py; errors are those of all other rows. The last line is one JSON object:
`median_throughput_error`, `p90_throughput_error`, `median_memory_error`, `worst_error` (of both), `rows`, and figures
of the blind rows; `seconds_for_4096_gpus` (to plan llama-1b's run); `as_planned`: the same rows with no model composed
for their programs, priced as `shardline plan` prices ours; of it again, `median_error`, `p90_error`, `mean_regret` and
`max_regret` (time of the layout that a plan would choose, divided by that of the fastest one, where one source measured
several layouts of the same job on the same machines).

--rows FILE prices the rows of a JSON list instead, as a plan would: model sizes, machine, layout, precision, the
measured value and its unit. The last line is num_rows, num_unmeasured (not judged), median_error, p90_error,
worst_error, coverage_of_ranges, mean_regret_excess and max_regret_excess (0.05: the layout that a plan would choose was
5% slower than the fastest of a sweep), mean_regret_excess_of_fastest (if it chose the fastest prediction), and families
with the same of each. --memory FILE asks which of the layouts, with an outcome each, a plan would take: judged_rightly,
and ran_out_of_those_taken. Nothing is fitted on them.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

from benchmarks.support.published import SOURCES, Model, Row, models, rows
from benchmarks.support.rows_as_planned import (
    PlannedRow,
    by_family,
    coverage_of_families,
    derived_ranges,
    judged,
    judged_memory,
    p90,
    planned_row,
    read_rows,
    traits_of,
)
from flows.presets import load_config
from training.planner.cluster import Cluster, cluster_of
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.planner.job import Job, Layout
from training.planner.model_shape import own_shape
from training.planner.plan import make_plan
from training.planner.price.cost_model import SUSTAINED, CostModel, Kept, MemoryCosts, Program, TimeCosts
from training.planner.price.memory import memory_gib
from training.planner.price.step import Step
from training.planner.price.step_time import step_s
from training.records.plan import NOT_ALLOCATED, ModelShape

# GPU, network of a host as the sources say (A100S, A100I: assumed), and the share of the hypothetical host's rate of
# matrix products that whole steps sustain: fitted, one number for A100, one for H100, one for H100 limited to 500 W,
# one for H100 under NVIDIA's own programs, one for a B200 whose power was limited (torchao does not say to what).
A100, H100, H100_AT_500W, H100_OF_NVIDIA, B200_LIMITED = 0.95, 0.82, 0.72, 0.97, 0.33
MACHINES: dict[str, tuple[str, str, float]] = {
    "A100": ("A100-80GB-SXM", "8x200Gb", A100),  # Selene: Narayanan et al. 2021, section 5
    "A100S": ("A100-80GB-SXM", "4x400Gb", A100),
    "A100M": ("A100-80GB-SXM", "1600Gb", A100),
    "A100I": ("A100-80GB-SXM", "1600Gb", A100),
    "H100": ("H100-80GB-SXM", "8x400Gb", H100),
    "H100M": ("H100-80GB-SXM", "8x400Gb", H100),
    "H100T": ("H100-80GB-SXM", "8x400Gb", H100_AT_500W),  # Grand Teton, HBM2e
    "V100": ("V100-32GB-SXM", "10Gb", 1.0),
    "A100M40": ("A100-40GB-SXM", "1600Gb", A100),
    "A100T40": ("A100-40GB-SXM", "1600Gb", A100),  # network assumed
    "H100N": ("H100-80GB-SXM", "8x400Gb", H100_OF_NVIDIA),  # network assumed, as a DGX H100 has
    "H200T": ("H200-141GB-SXM", "8x400Gb", H100),
    "B200": ("B200-180GB-SXM", "8x400Gb", H100),  # one host
    # GB200, GB300: the up to 72 GPUs, in hosts of 4, that one NVLink network joins are one host here (64 are used).
    "B200N": ("B200-180GB-SXM", "8x400Gb", H100_OF_NVIDIA),
    "GB200": ("GB200-186GB", "64x400Gb", H100_OF_NVIDIA),
    "GB300": ("GB300-288GB", "64x800Gb", H100_OF_NVIDIA),
    "B200L": ("B200-180GB-SXM", "8x400Gb", B200_LIMITED),
}
POWER = {"H100T": H100_AT_500W / H100, "B200L": B200_LIMITED / H100}  # of GPUs whose power is limited
MEMORY_GB_PER_S = {"H100T": 0.88 * 2400}
FP8_GAIN = 1.5  # rate of a layer's products divided by that in bf16: fitted
ZERO3_NETWORK = 0.095  # share of the network's rate that DeepSpeed ZeRO-3 reached in 2021: fitted

# Bytes per parameter from the papers and the programs' sources: 2 of weights, 2 or 4 of gradients, 12 of fp32 weights
# and moments.
MEGATRON = CostModel(
    Program(
        kept=Kept(whole=10, split=8, kv=0, mlp=4, scores=5),  # Korthikanti et al. 2022, eq. 2
        weight_bytes=2,
        boundary_bytes=2,
        recomputes_scores_only=True,
        chunked_logits=False,
        reduce_bytes=2,
    ),
    MemoryCosts(
        gradient_bytes=2,
        optimizer_bytes=12,
        logit_bytes=14,
    ),
    TimeCosts(
        passes=1.1,  # fused kernels: 22 h + 16 h bytes moved for 34 h kept
        skips_masked=False,
        scatters_boundary=True,
        update_bytes=36,
    ),
)
LOCAL = MEGATRON.replaced(gradient_bytes=4, reduce_bytes=4, hides=0)  # --DDP-impl local: fp32 gradients, no overlap
TITAN = CostModel(
    Program(
        kept=Kept(whole=16, split=4, kv=4, mlp=8),
        boundary_bytes=2,
        products_kept=0.55,  # every other of a layer's seven products
        sequence_parallel=True,
        chunked_logits=False,
        gather_bytes=2,
    ),
    MemoryCosts(
        logit_bytes=14,  # 12 compiled: fitted
    ),
    TimeCosts(),
)
COMPILED = TITAN.replaced(passes=1.6, logit_bytes=12)
MPT = CostModel(
    Program(
        kept=Kept(whole=10, split=8, kv=0, mlp=4),
        boundary_bytes=2,
        chunked_logits=False,
        gather_bytes=2,
    ),
    MemoryCosts(
        logit_bytes=14,
    ),
    TimeCosts(
        passes=2.0,
    ),
)
NEMO = MEGATRON.replaced(  # Transformer Engine, fused attention, all communication overlapped
    kept=Kept(whole=10, split=8, kv=0, mlp=4),
    sequence_parallel=True,
    skips_masked=True,
    tp_exposed=0.5,
    hides_update=True,
)
COST_MODELS: dict[str, CostModel] = {
    "megatron21": MEGATRON,
    "megatron21l": LOCAL,
    "megatron22": LOCAL,
    "megatron22s": LOCAL.replaced(sequence_parallel=True),
    "megatron16": MEGATRON.replaced(bucket_bytes=1e9),  # DeepSpeed's default: 5e8 numbers
    "zero3": MEGATRON.replaced(gather_bytes=2),
    "titan": TITAN,
    "titanc": COMPILED,
    "titan8": COMPILED,
    "mpt": MPT,
    "mpt16": MPT.replaced(weight_bytes=2, gradient_bytes=2, optimizer_bytes=4, reduce_bytes=2),
    "mpth": MPT,
    "mpth8": MPT,
    "tinyl": COMPILED,
    "nemo": NEMO,
    "nemo8": NEMO,
    "maxtext": COMPILED.replaced(products_kept=0.25),  # only a layer's queries, keys and values
    "maxtext8": COMPILED.replaced(products_kept=0.25),
}
COST_MODELS |= dict.fromkeys(("titan8r", "titanmx", "titanmxr"), COST_MODELS["titan8"])
COST_MODELS |= dict.fromkeys(("bridge8", "bridgemx"), COST_MODELS["nemo8"])
COST_MODELS["titan8a"] = COST_MODELS["titan8"].replaced(tp_exposed=0.5)  # asynchronous tensor parallelism
IN_FP8 = {"titan8", "titan8a", "titan8r", "titanmx", "titanmxr", "mpth8", "nemo8", "maxtext8", "bridge8", "bridgemx"}


@dataclass(frozen=True)
class Predicted:
    rate: float
    gib: float
    seconds: Mapping[str, float]
    memory: Mapping[str, float]


@functools.cache
def predict(row: Row) -> Predicted:
    """Predict the row's rate, in its unit, and its memory in GiB, both with their parts."""
    shape, layout = shape_of(row.model, models()[row.model], row.context), layout_of(row)
    job = Job(shape=shape, context=row.context, global_batch=row.global_batch, precision="bf16")
    model, shards = COST_MODELS[row.program], min(8, row.dp) if row.strategy == "hsdp" else row.dp
    step = Step(job, layout, model, cluster_like(row), shards)
    seconds, memory = step_s(step), memory_gib(step)
    gib = sum(each for part, each in memory.items() if part not in NOT_ALLOCATED)
    return Predicted(_in_unit(row, sum(seconds.values()), shape), gib, seconds, memory)


def layout_of(row: Row) -> Layout:
    return Layout(
        strategy=row.strategy,  # type: ignore[arg-type]
        tp=row.tp,
        pp=row.pp,
        dp=row.dp,
        micro_batch=row.micro_batch,
        accumulation=row.global_batch // row.dp // row.micro_batch,
        recompute=row.recompute,  # type: ignore[arg-type]
        stages_per_rank=row.stages_per_rank,
    )


@functools.cache
def shape_of(name: str, model: Model, context: int) -> ModelShape:
    return own_shape(
        "llama" if model.is_gated else "gpt2",
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        kv_heads=model.kv_heads,
        mlp_width=model.mlp_width,
        vocab_size=model.words,
        context=context,
        tied=model.is_tied,
    )


def cluster_like(row: Row) -> Cluster:
    gpu, network, share = MACHINES[row.machines]
    per_host = min(64 if row.machines in {"GB200", "GB300"} else 8, row.gpus)
    hosts = row.gpus // per_host
    text = f"{hosts}x{per_host}x{gpu}" + (f",{network}" if hosts > 1 else "")
    precision = "fp16" if row.machines == "V100" else "bf16"
    inventory = hypothetical_inventory(text)
    found = cluster_of(inventory, [per_host] * hosts, precision=precision)
    found = traits_of(row.program).attends(found, inventory)
    ring = found.network
    return replace(
        found,
        matmul_tflops=share * found.matmul_tflops * (FP8_GAIN if row.program in IN_FP8 else 1),
        memory_gb_per_s=MEMORY_GB_PER_S.get(row.machines, found.memory_gb_per_s),
        network=replace(ring, gb_per_s=ring.gb_per_s * (ZERO3_NETWORK if row.program == "zero3" else 1)),
    )


def _in_unit(row: Row, seconds: float, shape: ModelShape) -> float:
    if row.unit == "s":
        return seconds
    if row.unit == "tok/s":
        return row.global_batch * row.context / seconds / row.gpus
    s, h, layers = row.context, shape.width, shape.layers  # Narayanan et al. 2021, eq. 3, recomputation included
    flops = 96 * row.global_batch * s * layers * h * h * (1 + s / (6 * h) + shape.vocab_size / (16 * layers * h))
    return flops / seconds / row.gpus / 1e12


def compared(row: Row) -> dict[str, Any]:
    found = predict(row)
    return {
        "source": row.source,
        "model": row.model,
        "gpus": row.gpus,
        "role": row.role,
        "unit": row.unit,
        "published": row.rate,
        "predicted": found.rate,
        "throughput_error": None if row.rate is None else found.rate / row.rate - 1,
        "published_gib": row.memory_gib,
        "predicted_gib": found.gib,
        "memory_error": None if row.memory_gib is None else found.gib / row.memory_gib - 1,
    }


def errors(table: list[dict[str, Any]], what: str, *roles: str) -> list[float]:
    return [abs(row[what]) for row in table if row["role"] in roles and row[what] is not None]


def summary(table: list[dict[str, Any]]) -> dict[str, float]:
    throughput = errors(table, "throughput_error", "held out", "blind")
    memory = errors(table, "memory_error", "held out", "blind")
    return {
        "median_throughput_error": median(throughput),
        "p90_throughput_error": quantiles(throughput, n=10, method="inclusive")[-1],
        "median_memory_error": median(memory),
        "worst_error": max(*throughput, *memory),
        "blind_median_throughput_error": median(errors(table, "throughput_error", "blind")),
        "blind_worst_throughput_error": max(errors(table, "throughput_error", "blind")),
        "held_out_throughput_rows": len(throughput),
        "held_out_memory_rows": len(memory),
    }


def time_ratio(row: Row) -> float:
    """Return measured / predicted time of a step."""
    assert row.rate is not None
    ratio = row.rate / predict(row).rate
    return ratio if row.unit == "s" else 1 / ratio


# As planned

# Families: who ran what. Rows of one family share a program, and mistakes.
FAMILIES = {
    "Megatron-LM and DeepSpeed, 2021 and 2022": ("N1", "N2", "K5"),
    "Alibaba PAI": ("PAI",),
    "torchtitan": ("TT", "TA", "TP", "TH"),
    "torchao": ("AO", "AB"),
    "MosaicML, A100": ("MA", "M4"),
    "MosaicML, H100": ("MH", "ML", "M8"),
    "IBM": ("IB",),
    "TinyLlama": ("TL",),
    "NVIDIA": ("D1", "D2", "D3", "D4", "D5", "DG", "NE", "NL", "B0", "B1", "B2"),
    "MaxText": ("DM",),
}
NO_SP = {"megatron21", "megatron21l", "megatron22"}
IN_MXFP8 = {"titanmx", "titanmxr", "bridgemx"}


def own_rows() -> list[PlannedRow]:
    """Return the published rows with a rate, as a plan would price them."""
    return [_as_planned(row) for row in rows() if row.rate is not None]


def _as_planned(row: Row) -> PlannedRow:
    gpu, network, _ = MACHINES[row.machines]
    cluster, model = cluster_like(row), models()[row.model]
    precision = "mxfp8" if row.program in IN_MXFP8 else "fp8" if row.program in IN_FP8 else "bf16"
    hosts = len(cluster.ranks_per_host)
    predicted = predict(row)
    rate_s = sum(predicted.seconds.values())
    assert row.rate is not None
    return planned_row(
        family=next(family for family, sources in FAMILIES.items() if row.source in sources),
        sweep=(row.source, row.model, row.context, row.machines, row.gpus, row.program, row.global_batch),
        model={
            "layers": model.layers,
            "width": model.width,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "mlp_width": model.mlp_width,
            "vocab_size": model.words,
            "gated_mlp": model.is_gated,
            "tied": model.is_tied,
        },
        hosts=f"{hosts}x{cluster.ranks_per_host[0]}x{gpu}" + (f",{network}" if hosts > 1 else ""),
        ranks_per_host=cluster.ranks_per_host,
        precision="fp16" if row.machines == "V100" else precision,
        context=row.context,
        global_batch=row.global_batch,
        layout=replace(layout_of(row), sequence_parallel=row.tp > 1 and row.program not in NO_SP),
        step_s=rate_s * time_ratio(row),
        traits=replace(traits_of(row.program), is_compiled=row.program != "titan", fuses_norms=row.program != "titan"),
        power=POWER.get(row.machines, 1.0),
    )


def print_judged(planned: Sequence[PlannedRow]) -> dict[str, Any]:
    """Print the figures of each family and of all; return them."""
    families = {family: judged(each) for family, each in by_family(planned).items()}
    found = judged(planned)
    for family, figures in {**families, "all": found}.items():
        print(f"{family:42}" + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    return {**found, "families": families}


def markdown() -> str:
    """Return the table of docs/plan-accuracy.md: errors by family, composed (without fitted rows) and as planned."""
    source_of = {source: family for family, sources in FAMILIES.items() for source in sources}
    composed, planned = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for row in rows():
        if row.rate is not None and row.role != "fitted":
            for name in (source_of[row.source], "all"):
                composed[name].append(abs(compared(row)["throughput_error"]))
    for each in own_rows():
        for name in (each.family, "all"):
            planned[name].append(each.error)
    lines = [
        "| family | rows, composed | median | nine of ten | rows, as planned | median | nine of ten |",
        "|---" * 7 + "|",
    ]
    for family in sorted(planned, key=lambda name: (name == "all", median(planned[name]))):
        figures = [
            f"{len(errors)} | {median(errors):.1%} | {p90(errors):.0%}"
            for errors in (composed[family], planned[family])
        ]
        lines.append(f"| {family} | {' | '.join(figures)} |")
    return "\n".join(lines)


def left_out() -> dict[str, Any]:
    """Return the errors of each family at the sustained share that fits all other families best, and those shares.

    It is the one constant of a plan's price that has no source of its own: the share of products' rate that whole steps
    sustain. As `coverage_of_families`, this tells how far off the price is on programs that nothing was fitted to.
    """
    errors_at: dict[float, dict[str, list[float]]] = {}
    for percent in range(80, 101):
        with patch.dict(SUSTAINED, cuda=percent / 100):
            errors_at[percent / 100] = {
                family: [row.error for row in each] for family, each in by_family(own_rows()).items()
            }
    shares: dict[str, float] = {}
    for family in errors_at[1.0]:
        others = {
            share: [error for other, each in found.items() if other != family for error in each]
            for share, found in errors_at.items()
        }
        shares[family] = min(others, key=lambda share: median(others[share]))
    errors = [error for family, share in shares.items() for error in errors_at[share][family]]
    medians = {family: median(errors_at[share][family]) for family, share in shares.items()}
    return {
        "median_error": median(errors),
        "p90_error": quantiles(errors, n=10, method="inclusive")[-1],
        "families": {family: {"share": share, "median_error": medians[family]} for family, share in shares.items()},
    }


def judge_files(row_file: Path | None, memory_file: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if row_file:
        given = read_rows(row_file)
        measured = [row for row in given if row.step_s is not None]
        found |= print_judged(measured) if measured else {"num_rows": 0}
        found["num_unmeasured"] = len(given) - len(measured)
        print(f"rows without a measured value, which are not judged: {found['num_unmeasured']}")
    if memory_file:
        memory = judged_memory(read_rows(memory_file))
        print("memory: " + ", ".join(f"{name} {value:.3g}" for name, value in memory.items()))
        found |= {"memory": memory} if row_file else memory
    return found


def seconds_for_gpus(number: int) -> float:
    config = load_config("llama-1b", ["train.global_batch=4096"])
    began = time.perf_counter()
    make_plan(config, hypothetical_inventory(f"{number // 8}x8xH100-80GB-SXM,8x400Gb"))
    return time.perf_counter() - began


def show(row: Row, one: dict[str, Any], *, parts: bool) -> None:
    mark = {"fitted": "*", "blind": "b"}.get(row.role, " ")
    rate = ""
    if row.rate is not None:
        rate = f"{row.rate:8.5g} {one['predicted']:8.5g} {row.unit:5} {one['throughput_error']:+6.1%}"
    gib = ""
    if row.memory_gib is not None:
        gib = f"{row.memory_gib:6.1f} {one['predicted_gib']:6.1f} GiB {one['memory_error']:+6.1%}"
    layout = f"{row.strategy} tp{row.tp} pp{row.pp} {row.micro_batch} x {row.context}"
    print(
        f"{mark} {row.source:3} {row.model:11}{row.gpus:5} {row.machines} {layout:24} {row.recompute:9} {rate:30}{gib}"
    )
    if parts:
        found = predict(row)
        print("      " + ", ".join(f"{part} {each:.3g} s" for part, each in found.seconds.items()))
        print("      " + ", ".join(f"{part} {each:.2f} GiB" for part, each in found.memory.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same rows, because all of them take a second")
    parser.add_argument("--parts", action="store_true", help="each row's seconds and GiB by part")
    parser.add_argument("--left-out", action="store_true", help="each family at the constant of the other families")
    parser.add_argument("--rows", type=Path, help="price these rows of JSON instead, as a plan would")
    parser.add_argument("--memory", type=Path, help="judge which of these layouts of JSON fit, as a plan would")
    parser.add_argument("--table", action="store_true", help="print the table of docs/plan-accuracy.md alone")
    args = parser.parse_args()
    if args.table:
        print(markdown())
        return
    if args.rows or args.memory:
        print(json.dumps(judge_files(args.rows, args.memory)))
        return
    if args.left_out:
        print(json.dumps(left_out(), indent=2))
        return
    table = []
    for row in rows():
        table.append(compared(row))
        show(row, table[-1], parts=args.parts)
    print("\npublished, then predicted; *: an efficiency was fitted to this row, b: blind row")
    for source, where in SOURCES.items():
        print(f"{source:3} {where}")
    print("\nas a plan would price the same rows")
    planned = own_rows()
    as_planned = print_judged(planned)
    as_planned |= {"ranges": derived_ranges(planned), "coverage_of_families_left_out": coverage_of_families(planned)}
    for what, (least, most) in as_planned["ranges"].items():
        held = as_planned["coverage_of_families_left_out"][what]
        print(f"{what} measured before: {least:.2f} to {most:.2f}, which holds {held:.0%} of families left out")
    found = summary(table) | {
        "median_error": as_planned["median_error"],
        "p90_error": as_planned["p90_error"],
        "mean_regret": 1 + as_planned["mean_regret_excess"],
        "max_regret": 1 + as_planned["max_regret_excess"],
        "sweeps": as_planned["num_sweeps"],
        "seconds_for_4096_gpus": seconds_for_gpus(4096),
    }
    print(", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    print(json.dumps({**found, "as_planned": as_planned, "rows": table}))


if __name__ == "__main__":
    main()

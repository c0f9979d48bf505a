"""Every way to lay a run out over ranks makes the update that one process makes on the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.device import LOOSER
from tests.support.layouts import LAYOUTS
from tests.support.ranks import losses, run_ranks
from tests.support.repository import REPO
from tests.support.tiny_shards import MakeRun
from training.checkpoint.safetensors_files import TensorFiles
from training.models.document_attention import CPU_CONTEXT
from training.records.plan import RunPlan
from training.strategies import STRATEGIES
from training.tracking.rows import read_rows

STEPS = 8
# fp32 sums are taken in another order: each step's relative error is about 1e-7, AdamW's division by the root of a
# small second moment magnifies it in the first steps. Measured over all layouts: weights 7e-6, losses 5e-7 at most.
WEIGHT_BOUND = 2e-5 * LOOSER
LOSS_BOUND = 2e-6 * LOOSER

QUICK = {"ddp", "fsdp", "pp"}
LONG = {
    "unlike x tp",
    "zero2 offload",
    "fsdp 4",
    "fsdp x pp interleaved",
    "zero1 4",
    "zero1 x tp",
    "zero1 x pp",
    "zero2 4",
    "pp 4",
    "dp x pp interleaved",
    "hsdp x tp",
    "sp x pp",
}
COMMON = {
    "model__dropout": 0.0,
    "model__layers": 4,
    "train__steps": STEPS,
    "train__clip_norm": 0.5,
    "checkpoint__every_steps": 100,
    "evaluation__samples_while_training": 4,
    "evaluation__prompts": ["", "丁"],
    "evaluation__temperature": 0.0,
}
# 8 sequences, one per micro-batch: 2 ranks accumulate 4 or 8 of them.
SMALL: dict[str, Any] = {"train__micro_batch": 1}
DATA: dict[str, dict[str, Any]] = {
    "stream": {},
    "documents": {"train__packing": "documents", "train__context": CPU_CONTEXT},
    # The epoch ends within a batch: some ranks' last sequences are empty.
    "uneven": {"train__packing": "padded", "train__max_epochs": 0.18},
    # Of each document 72 tokens alone, and the other 28 with those of another and 16 places of padding.
    "best-fit": {"train__packing": "best-fit", "train__context": 72, "train__max_epochs": 0.9},
}


def final(plan_path: Path) -> TensorFiles:
    return TensorFiles(max((plan_path.parent / "checkpoints").iterdir()), "model")


def assert_equal_training(
    expected: Path, got: Path, *, bound: float = WEIGHT_BOUND, loss_bound: float = LOSS_BOUND, of_norm: bool = False
) -> None:
    """`loss_bound`: of the first loss. `bound`: of each number, or with `of_norm` of the norm of each tensor."""
    one, many = losses(expected), losses(got)
    assert one.keys() == many.keys()
    assert max(abs(one[step] - many[step]) for step in one) < loss_bound * one[1]
    ours, theirs = final(expected), final(got)
    assert set(ours) == set(theirs)
    for name in ours:
        by = ours[name] - theirs[name]
        difference = (by.norm() / ours[name].norm() if of_norm else by.abs().max()).item()
        assert difference < bound, f"{name} differs by {difference}"
    assert of_norm or written(got) == written(expected)  # with such a bound texts may differ


def written(plan_path: Path) -> list[tuple[int, str, str]]:
    """The samples of each validation, where there are any."""
    plan = RunPlan.read(plan_path)
    evaluation = plan.config.evaluation
    if plan.config.objective == "masked" or not evaluation.every_steps or not evaluation.samples_while_training:
        return []
    rows = read_rows(plan_path.parent / "samples.jsonl")
    assert len({row["step"] for row in rows}) >= plan.steps // evaluation.every_steps
    assert all(row["text"] for row in rows if row["prompt"])
    return [(row["step"], row["prompt"], row["text"]) for row in rows]


@pytest.fixture(scope="module")
def alone(make_run: MakeRun) -> Callable[..., Path]:
    """The run of one process on whole batches: no accumulation, no reduction. Made once per config."""
    made: dict[str, Path] = {}

    def run(name: str, **overrides: Any) -> Path:
        if name not in made:
            single = {"parallel__strategy": "single", "train__micro_batch": 8}
            made[name] = make_run(f"alone-{name}", **COMMON, **(single | overrides))
            run_ranks(made[name])
        return made[name]

    return run


def test_every_strategy_has_a_layout() -> None:
    tested = {overrides.get("parallel__strategy", "ddp") for _, overrides in LAYOUTS.values()} | {"single"}
    assert tested == set(STRATEGIES)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[*[pytest.mark.slow] * (name not in QUICK), *[pytest.mark.long] * (name in LONG)])
        for name in LAYOUTS
    ],
)
def test_ranks_that_accumulate_and_clip_equal_one_process(
    layout: str, alone: Callable[..., Path], make_run: MakeRun
) -> None:
    ranks, overrides = LAYOUTS[layout]
    plan_path = make_run(layout, ranks=ranks, **COMMON, **SMALL, **overrides)
    run_ranks(plan_path)
    assert_equal_training(alone("llama"), plan_path)


@pytest.mark.parametrize("packing", ["documents", "uneven", "best-fit"])
@pytest.mark.parametrize(
    "layout",
    ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp x tp", "zero2", "unlike", "cp", "pp"))],
)
def test_document_masks_padding_and_an_uneven_last_batch(
    layout: str, packing: str, alone: Callable[..., Path], make_run: MakeRun
) -> None:
    ranks, overrides = LAYOUTS[layout]
    plan_path = make_run(f"{layout} {packing}", ranks=ranks, **COMMON, **SMALL, **DATA[packing], **overrides)
    run_ranks(plan_path)
    expected = alone(packing, **DATA[packing])
    assert_equal_training(expected, plan_path)
    if packing != "documents":
        assert len(losses(expected)) < STEPS, "the epoch ends first"


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("tp", marks=pytest.mark.slow),
        pytest.param("sp", marks=pytest.mark.slow),
        pytest.param("cp", marks=pytest.mark.slow),
        "pp",
        pytest.param("unlike", marks=pytest.mark.slow),
        pytest.param("tp x pp", marks=pytest.mark.long),
    ],
)
def test_other_architectures_have_tensor_and_pipeline_plans(
    layout: str, architecture: str, alone: Callable[..., Path], make_run: MakeRun
) -> None:
    model = {"model__architecture": architecture, "model__kv_heads": 0}
    ranks, overrides = LAYOUTS[layout]
    plan_path = make_run(f"{architecture} {layout}", ranks=ranks, **COMMON, **SMALL, **model, **overrides)
    run_ranks(plan_path)
    assert_equal_training(alone(architecture, **model), plan_path)


@pytest.mark.parametrize(
    "layout", ["pp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "tp", "unlike"))]
)
def test_an_untied_head_is_a_matrix_of_its_own(layout: str, alone: Callable[..., Path], make_run: MakeRun) -> None:
    ranks, overrides = LAYOUTS[layout]
    untied = {"model__tie_embeddings": False}
    plan_path = make_run(f"untied {layout}", ranks=ranks, **COMMON, **SMALL, **untied, **overrides)
    run_ranks(plan_path)
    assert_equal_training(alone("untied", **untied), plan_path)


@pytest.mark.parametrize(
    "layout",
    ["pp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fsdp x tp", "zero2", "unlike", "cp"))],
)
def test_a_z_loss_is_that_of_one_process(layout: str, alone: Callable[..., Path], make_run: MakeRun) -> None:
    ranks, overrides = LAYOUTS[layout]
    expected = alone("z-loss", train__z_loss=0.01)
    plan_path = make_run(f"{layout} z-loss", ranks=ranks, **COMMON, **SMALL, train__z_loss=0.01, **overrides)
    run_ranks(plan_path)
    assert_equal_training(expected, plan_path)
    rows = [read_rows(path.parent / "metrics.jsonl") for path in (expected, plan_path)]
    one, many = ([row["z_loss"] for row in each if "loss" in row] for each in rows)
    assert many == pytest.approx(one, rel=1e-5)
    assert all(each > 0 for each in one)
    assert losses(expected)[1] == pytest.approx(losses(alone("llama"))[1], rel=1e-6)  # still cross-entropy
    assert losses(expected)[STEPS] != losses(alone("llama"))[STEPS]


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize(
    "layout",
    [
        "single",
        pytest.param("fsdp", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("zero3", "tp", "pp")),
    ],
)
def test_activation_checkpointing_changes_nothing_but_memory(
    layout: str, kind: str, alone: Callable[..., Path], make_run: MakeRun
) -> None:
    ranks, overrides = LAYOUTS.get(layout, (1, {"parallel__strategy": "single"}))
    again = {"train__activation_checkpointing": kind}
    plan_path = make_run(f"{layout} {kind}", ranks=ranks, **COMMON, **SMALL, **again, **overrides)
    run_ranks(plan_path)
    assert_equal_training(alone("llama"), plan_path)


@pytest.mark.slow
def test_activation_checkpointing_repeats_the_dropout(make_run: MakeRun) -> None:
    runs = {}
    for kind in ("none", "full", "selective"):
        config = {**COMMON, "model__dropout": 0.2, "model__architecture": "gpt2", "model__kv_heads": 0}
        runs[kind] = make_run(
            f"dropout {kind}", parallel__strategy="single", train__activation_checkpointing=kind, **config
        )
        run_ranks(runs[kind])
    assert_equal_training(runs["none"], runs["full"])
    assert_equal_training(runs["none"], runs["selective"])


@pytest.mark.parametrize(
    ("architecture", "steps", "rate"),
    [pytest.param("gpt2", 80, 3e-3, marks=pytest.mark.slow), pytest.param("bert", 300, 1e-2, marks=pytest.mark.long)],
)
def test_other_architectures_learn_under_ddp(architecture: str, steps: int, rate: float, make_run: MakeRun) -> None:
    plan_path = make_run(
        architecture,
        ranks=2,
        model__architecture=architecture,
        model__kv_heads=0,
        model__dropout=0.0,
        train__steps=steps,
        train__learning_rate=rate,
        train__global_batch=32,
        train__micro_batch=16,
    )
    run_ranks(plan_path)
    logged = list(losses(plan_path).values())
    assert sum(logged[-50:]) / 50 < sum(logged[:20]) / 20 - 0.1


@pytest.mark.parametrize(
    ("strategy", "shares", "packing"),
    [
        ("ddp", (3, 1), "uneven"),
        pytest.param("ddp", (5, 3, 1), "best-fit", marks=pytest.mark.slow),
        *(
            pytest.param(name, (5, 3, 1), "uneven", marks=pytest.mark.slow)
            for name in ("ddp", "fsdp", "zero1", "zero2")
        ),
        *(
            pytest.param(name, (5, 3, 1), "stream", marks=pytest.mark.long)
            for name in ("fsdp", "hsdp", "zero2", "zero3", "fsdp x tp", "dp x pp")
        ),
    ],
)
def test_unequal_shares_make_the_update_of_one_process(
    strategy: str, shares: tuple[int, ...], packing: str, alone: Callable[..., Path], make_run: MakeRun
) -> None:
    """Two micro-batches each, of unequal sizes, and sequences of unequal lengths."""
    ranks, overrides = LAYOUTS[strategy]
    replicas, model_ranks = len(shares), ranks // 2 if " x " in strategy else 1
    batch = {"train__global_batch": 2 * sum(shares)}
    plan_path = make_run(
        f"shares {strategy} {replicas} {packing}",
        ranks=replicas * model_ranks,
        **COMMON,
        **DATA[packing],
        **overrides,
        **batch,
        train__micro_batch=1,
    )
    plan = RunPlan.read(plan_path)
    plan.model_copy(update={"micro_batches": shares, "accumulation": 2}).write(plan_path)
    run_ranks(plan_path)
    one = {"train__micro_batch": 2 * sum(shares)}
    expected = alone(f"{packing} {sum(shares)}", **DATA[packing], **batch, **one)
    assert_equal_training(expected, plan_path)


def test_replicas_of_unlike_shape_hold_the_same_bits(make_run: MakeRun) -> None:
    """They add up the gradient's norm in unlike orders; dropout is on, so that the norm's last bits are any."""
    ranks, overrides = LAYOUTS["unlike"]
    plan_path = make_run("same bits", ranks=ranks, **(COMMON | {"model__dropout": 0.1}), **SMALL, **overrides)
    run_ranks(plan_path, program="tests.programs.replicas_agree")


def test_ddp_settings_change_no_result(alone: Callable[..., Path], make_run: MakeRun) -> None:
    ddp_settings = {"parallel__bucket_mib": 1, "train__deterministic": True}
    plan_path = make_run("ddp-settings", ranks=2, **COMMON, train__micro_batch=4, **ddp_settings)
    run_ranks(plan_path)
    assert_equal_training(alone("llama"), plan_path)


ON_A_GPU_MACHINE = """
import sys, torch
torch.cuda.is_available = lambda: True
from pathlib import Path
from training.train import main
main(Path(sys.argv[1]))
"""


@pytest.mark.slow  # an interpreter of its own that imports DeepSpeed: 15 s
def test_zero_trains_a_cpu_plan_on_a_machine_that_has_a_gpu(make_run: MakeRun, tmp_path: Path) -> None:
    """DeepSpeed by itself takes the GPU that it sees; the plan's device counts."""
    plan_path = make_run("zero beside a GPU", ranks=1, **COMMON, parallel__strategy="zero2")
    assert RunPlan.read(plan_path).device_kind == "cpu"
    env = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    command = [sys.executable, "-c", ON_A_GPU_MACHINE, str(plan_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=env)
    assert done.returncode == 0, done.stderr
    assert max(losses(plan_path)) == STEPS

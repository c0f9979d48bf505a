"""Compressed gradients: less is sent, what is not sent now is sent later, and a resumed run keeps what was left."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import inventory, tiny_config
from tests.support.ranks import Ranks, losses, result, run_ranks
from tests.support.tiny_shards import MakeRun
from tests.training.strategies.test_strategies import assert_equal_training
from training.planner.plan import make_plan
from training.records.checkpoint import CheckpointManifest
from training.records.plan import RunPlan
from training.tracking.rows import read_rows

KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "topk": {"parallel__compression": "topk"},
    "powersgd": {"parallel__compression": "powersgd", "parallel__powersgd_rank": 2},
    "bf16": {"parallel__compression": "bf16"},
}
STEPS, SAVED = 8, 3
MIB = 2**20


@pytest.fixture(scope="module")
def trained(make_run: MakeRun) -> Callable[..., Path]:
    """8 steps on two ranks that accumulate two micro-batches and clip; made once per kind."""
    made: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in made:
            settings = {"train__steps": STEPS, "train__clip_norm": 0.5, "checkpoint__every_steps": SAVED}
            made[kind] = make_run(f"compression {kind}", ranks=2, parallel__strategy="ddp", **settings, **KINDS[kind])
            run_ranks(made[kind])
        return made[kind]

    return run


def sent_bytes(plan_path: Path) -> list[float]:
    rows = read_rows(plan_path.parent / "metrics.jsonl")
    return [row["communication_mib"] * MIB for row in rows if "communication_mib" in row]


def hashes(plan_path: Path) -> dict[str, str]:
    """Hashes of weights, moments and each rank's own state."""
    files = CheckpointManifest.read(plan_path.parent / f"checkpoints/{STEPS:08d}/manifest.json").files
    return {name: file.sha256 for name, file in files.items() if name.startswith(("model", "optimizer", "own"))}


def resumed_from_step_6(plan_path: Path, name: str) -> Path:
    """A copy of a run whose steps after the checkpoint before last are undone, and made again by new processes."""
    again = plan_path.parent.with_name(name)
    shutil.copytree(plan_path.parent, again)
    shutil.rmtree(again / f"checkpoints/{STEPS:08d}")
    (again / "result.json").unlink()
    run_ranks(again / "plan.json")
    return again / "plan.json"


def test_unsent_gradients_are_kept_and_all_ranks_get_the_same_average(make_run: MakeRun) -> None:
    run_ranks(make_run("averaged", ranks=2), program="tests.programs.compression_averages")


def test_every_step_says_what_it_sent(trained: Callable[[str], Path]) -> None:
    """On two ranks an all-reduce sends every number once: fp32 in 4 bytes; topk a tenth of them in 8 bytes each."""
    parameters = RunPlan.read(trained("topk")).shape.parameters
    sent = sent_bytes(trained("topk"))
    assert len(sent) == STEPS
    assert all(bytes_ == pytest.approx(0.8 * parameters, rel=1e-3) for bytes_ in sent)


@pytest.mark.parametrize("kind", ["topk", pytest.param("powersgd", marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_residuals_to_the_bit(kind: str, trained: Callable[[str], Path]) -> None:
    plan_path = trained(kind)
    again = resumed_from_step_6(plan_path, f"{kind} again")
    assert losses(again) == losses(plan_path)
    assert hashes(again) == hashes(plan_path)
    assert {"own-0.safetensors", "own-1.safetensors"} <= hashes(again).keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "share", "bound"), [("bf16", 0.5, 0.001), ("topk", 0.2, 0.1), ("powersgd", 0.15, 0.3)]
)
def test_less_is_sent_and_the_loss_falls(kind: str, share: float, bound: float, trained: Callable[[str], Path]) -> None:
    dense, compressed = losses(trained("none")), losses(trained(kind))
    assert sent_bytes(trained(kind))[-1] <= 1.001 * share * sent_bytes(trained("none"))[-1]
    assert compressed[1] == dense[1], "the first loss is from before any gradient"
    assert compressed[STEPS] < dense[STEPS] + bound
    assert compressed[STEPS] < compressed[1] - 0.1


@pytest.mark.slow
def test_compression_that_begins_later_sends_whole_gradients_before(
    trained: Callable[[str], Path], make_run: MakeRun
) -> None:
    settings = {"train__steps": STEPS, "train__clip_norm": 0.5, "parallel__compress_after_steps": SAVED + 1}
    plan_path = make_run("later", ranks=2, parallel__strategy="ddp", **settings, **KINDS["topk"])
    run_ranks(plan_path)
    sent, dense = sent_bytes(plan_path), sent_bytes(trained("none"))
    assert sent[: SAVED + 1] == dense[: SAVED + 1]
    assert max(sent[SAVED + 1 :]) < 0.3 * dense[-1]
    assert losses(plan_path)[SAVED + 2] == pytest.approx(losses(trained("none"))[SAVED + 2], rel=1e-6)


@pytest.mark.slow
def test_a_resume_on_another_mesh_drops_the_residuals_and_logs_it(
    trained: Callable[[str], Path], make_run: MakeRun
) -> None:
    plan_path = make_run("alone", train__steps=STEPS, parallel__strategy="single")
    shutil.copytree(trained("topk").parent / "checkpoints" / "00000006", plan_path.parent / "checkpoints" / "00000006")
    ranks = Ranks(plan_path)
    ranks.finish()
    assert "each rank's own state (compression, local-sgd) starts fresh" in ranks.log()
    assert result(plan_path).step == STEPS


@pytest.mark.slow
def test_the_size_of_buckets_leaves_compression_as_it_is(trained: Callable[[str], Path], make_run: MakeRun) -> None:
    settings = {"train__steps": STEPS, "train__clip_norm": 0.5, "train__micro_batch": 4}
    small = {"parallel__bucket_mib": 1}
    plan_path = make_run("small-buckets", ranks=2, parallel__strategy="ddp", **settings, **small, **KINDS["topk"])
    run_ranks(plan_path)
    reference = make_run("default-settings", ranks=2, parallel__strategy="ddp", **settings, **KINDS["topk"])
    run_ranks(reference)
    assert_equal_training(reference, plan_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"parallel__strategy": "fsdp"},
            "compression=topk is not there for parallel.strategy=fsdp .* ddp has them all",
        ),
        ({"parallel__pp": 2}, "compression=topk is not there for parallel.strategy=ddp with parallel.pp = 2"),
        ({"train__on_nonfinite": "skip"}, "set parallel.precision=fp32 or bf16, train.on_nonfinite=stop, and"),
        ({"train__on_spike": "skip"}, "and train.on_spike=continue or rewind"),
        ({"parallel__topk_ratio": 0.5}, "topk_ratio = 0.5 on 2 data-parallel ranks sends as much as no compression"),
    ],
)
def test_what_cannot_be_compressed_is_refused_with_the_cure(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(tiny_config(**{"parallel__strategy": "ddp", **KINDS["topk"], **overrides}), inventory(2))

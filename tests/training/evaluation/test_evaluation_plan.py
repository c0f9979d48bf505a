"""A run's plan yields that of its evaluation: the same ranks, and nothing that only training uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.configs import read_plan
from tests.support.tiny_run import tiny_run
from training.records.evaluation_plan import EvaluationPlan, read_evaluation_plan
from training.records.plan import RankPlan


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("runs") / "run")


def test_a_runs_plan_yields_the_evaluation_of_its_last_checkpoint(run_dir: Path, tmp_path: Path) -> None:
    run, plan = read_plan(run_dir), read_evaluation_plan(run_dir / "plan.json")
    assert (plan.model, plan.step, plan.strategy) == ("checkpoints/8", 8, "single")
    same = RankPlan.model_fields.keys() - {"activation_checkpointing"}
    assert {name: getattr(plan, name) for name in same} == {name: getattr(run, name) for name in same}
    plan.write(tmp_path / "plan.json")
    assert read_evaluation_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(("trained", "evaluated"), [("zero3", "fsdp"), ("hsdp", "fsdp"), ("zero2", "single")])
def test_a_model_that_training_sharded_is_sharded_and_other_ranks_hold_it_whole(
    trained: str, evaluated: str, run_dir: Path, tmp_path: Path
) -> None:
    ranks = {"mesh": {"pp": 1, "dp": 4, "tp": 1}, "ranks_per_host": (2, 2), "micro_batches": (3, 2, 2, 1)}
    shared = {"strategy": trained, "activation_checkpointing": "full", "offload": "optimizer"}
    read_plan(run_dir).model_copy(update=ranks | shared).write(tmp_path / "plan.json")
    (tmp_path / "result.json").write_bytes((run_dir / "result.json").read_bytes())
    plan = read_evaluation_plan(tmp_path / "plan.json")
    assert (plan.strategy, plan.offload, plan.activation_checkpointing) == (evaluated, "none", "none")
    assert plan.on_ranks(4) == plan
    two = plan.on_ranks(2)
    assert isinstance(two, EvaluationPlan)
    assert (two.strategy, two.world_size, two.dp, two.micro_batches) == ("single", 2, 2, (1, 1))

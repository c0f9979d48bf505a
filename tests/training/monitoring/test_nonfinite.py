"""A NaN on one rank stops all of them alike, or leaves one step out; the message says where it came from."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.planning.plan import plan_run
from tests.support.configs import inventory, tiny_config
from tests.support.ranks import Ranks
from tests.support.tiny_shards import VOCAB, MakeRun
from training.data.batch import MicroBatches
from training.data.loader import Loader
from training.monitoring.nonfinite import SKIPPED_IN_A_ROW, FiniteCheck, StepOutcome
from training.records.plan import RunPlan
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult
from training.runtime.errors import NonFiniteLoss
from training.strategies.spikes import Spikes

RARE = VOCAB - 1
BAD_STEP, BAD_RANK = 5, 1


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights were damaged: the embedding of one token is infinite."""
    folder = tmp_path_factory.mktemp("models") / "broken"
    torch.manual_seed(3)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", vocab_size=VOCAB, tie_word_embeddings=False, num_key_value_heads=2, **sizes)
    )
    with torch.no_grad():
        model.get_input_embeddings().weight[RARE] = math.inf
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plan_with(broken_model: Path, tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """plan_with("name", train__on_nonfinite="skip") -> plan.json of a run on two ranks.

    Its corpus has the damaged token at one place only, which is BAD_RANK's at BAD_STEP.
    """
    folder = tmp_path_factory.mktemp("nonfinite")
    shards = folder / "shards"
    shutil.copytree(tiny_shards, shards)

    def make(name: str, **overrides: object) -> Path:
        config = tiny_config(
            model__architecture="path",
            model__init="pretrained",
            model__path=str(broken_model),
            parallel__ranks=2,
            train__log_every_steps=100,
            evaluation__every_steps=0,
            **overrides,
        )
        manifest = TokenShards.read(shards / "manifest.json")
        plan = plan_run(config, inventory=inventory(2), run_id=name, shards=manifest, shards_dir=shards)
        plan.model_copy(update={"threads_per_rank": 1}).write(folder / name / "plan.json")
        return folder / name / "plan.json"

    plan = RunPlan.read(make("to-find-the-place"))
    place = int(Loader(plan, dp_rank=BAD_RANK, device=torch.device("cpu")).spans(BAD_STEP - 1)[2, 1]) + 3
    path = next((shards / "train").glob("*.bin"))
    tokens = np.fromfile(path, np.uint16)
    tokens[tokens == RARE] = RARE - 1
    tokens[place] = RARE
    tokens.tofile(path)
    (folder / "document").write_text(str(place // 100))  # the fixture's documents are 100 tokens long
    return make


def test_stop_names_step_rank_and_documents_and_keeps_the_checkpoint_before(plan_with: Callable[..., Path]) -> None:
    plan_path = plan_with("stop")
    ranks = Ranks(plan_path)
    assert ranks.wait(end_others=False) == [1, 1], "every rank ends by itself"
    errors = [line.partition("NonFiniteLoss: ")[2] for line in ranks.log().splitlines() if "NonFiniteLoss: " in line]
    assert len(errors) == 2
    assert len(set(errors)) == 1, "all ranks say the same"
    error = errors.pop()
    assert error.startswith(f"step {BAD_STEP} (loss nan on rank {BAD_RANK},")
    named = error.partition("documents ")[2].partition(" of the")[0].split(", ")
    assert (plan_path.parents[1] / "document").read_text() in named
    assert "train.on_nonfinite=skip" in error
    assert [path.name for path in (plan_path.parent / "checkpoints").glob("[0-9]*")] == ["00000003"]
    assert not (plan_path.parent / "result.json").exists()


def test_skip_leaves_the_step_out_counts_it_and_trains_on(plan_with: Callable[..., Path]) -> None:
    plan_path = plan_with("skip", train__on_nonfinite="skip", checkpoint__every_steps=100)
    ranks = Ranks(plan_path)
    ranks.finish()
    result = TrainResult.read(plan_path.parent / "result.json")
    assert (result.step, result.skipped_steps) == (8, 1)
    assert math.isfinite(result.loss)
    warnings = [line for line in ranks.log().splitlines() if "WARNING skipped the update of step" in line]
    assert len(warnings) == 1, "one rank warns"
    assert f"skipped the update of step {BAD_STEP} (loss nan on rank {BAD_RANK}," in warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_a_diverging_run_stops_under_other_strategies_too(strategy: str, make_run: MakeRun) -> None:
    plan_path = make_run(
        f"diverges-{strategy}",
        ranks=2,
        parallel__strategy=strategy,
        parallel__precision="fp16",
        train__learning_rate=10.0,
        train__steps=60,
        train__clip_norm=0.0,
        train__warmup_steps=0,
    )
    ranks = Ranks(plan_path)
    assert 1 in ranks.wait()
    assert "NonFiniteLoss: " in ranks.log()


def outcomes(plan: RunPlan, *, count: int, **changes: object) -> list[StepOutcome]:
    one = {"loss": 2.0, "grad_norm": math.inf, "loss_scale": 8.0, "skipped": True, "nonfinite_ranks": ()} | changes
    return [StepOutcome(step=step, **one) for step in range(1, count + 1)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fp16_plan(make_run: MakeRun) -> RunPlan:
    return RunPlan.read(make_run("fp16", ranks=2, parallel__precision="fp16", train__steps=30))


def finite_check(plan: RunPlan) -> FiniteCheck:
    batches, spikes = MicroBatches.of(plan), Spikes(plan.config.train)
    return FiniteCheck(plan, warns=True, skipped=0, micro_batches=batches, spikes=spikes)


def test_a_loss_scale_that_adapts_is_no_warning(fp16_plan: RunPlan, caplog: pytest.LogCaptureFixture) -> None:
    check = finite_check(fp16_plan)
    check.check(outcomes(fp16_plan, count=SKIPPED_IN_A_ROW - 1))
    check.check(outcomes(fp16_plan, count=1, grad_norm=1.0, skipped=False))
    check.check(outcomes(fp16_plan, count=SKIPPED_IN_A_ROW - 1))
    assert check.skipped == 2 * (SKIPPED_IN_A_ROW - 1)
    assert not caplog.records


def test_too_many_skipped_in_a_row_stop_the_run(fp16_plan: RunPlan) -> None:
    check = finite_check(fp16_plan)
    check.check(outcomes(fp16_plan, count=SKIPPED_IN_A_ROW - 1))
    with pytest.raises(NonFiniteLoss, match="20 steps in a row were skipped"):
        check.check(outcomes(fp16_plan, count=1))


def test_a_lost_loss_in_fp16_is_not_taken_for_adapting(fp16_plan: RunPlan) -> None:
    with pytest.raises(NonFiniteLoss, match=r"step 1 .loss inf on rank 1"):
        finite_check(fp16_plan).check(outcomes(fp16_plan, count=1, loss=math.inf, nonfinite_ranks=(1,)))

"""`model.size` chooses shape, tokens, batch and learning rate by published rules; what a person gives stays."""

from __future__ import annotations

import re

import pytest

from flows.presets import command_for_all_steps, load_config, with_overrides
from tests.support.configs import inventory, reasons
from training.config.model import ModelConfig
from training.config.run import RunConfig
from training.config.size_rule import choices
from training.config.train import TrainConfig
from training.planner.plan import make_plan


@pytest.mark.parametrize(
    ("size", "asked"), [("3.5M", 3.5e6), ("30M", 30e6), ("124M", 124e6), ("1.1B", 1.1e9), ("7B", 7e9)]
)
def test_the_model_has_the_size_that_was_asked_for_and_20_tokens_for_each_parameter(size: str, asked: float) -> None:
    config = load_config("pretrain", [f"model.size={size}", "train.context=1024"])

    plan = make_plan(config, inventory(8, kind="cuda", memory_gib=80))

    assert plan.shape.parameters == pytest.approx(asked, rel=0.07)
    tokens = config.train.steps * config.train.global_batch * config.train.context
    assert tokens == pytest.approx(20 * asked, rel=0.01)
    (reason,) = reasons(plan, f"model.size = {size}: ")
    chosen = [value for fields in choices(config.model_dump()).values() for value in fields.values() if value]
    assert len(chosen) == 8
    words = re.findall(r"[\d.,e-]+\b", reason)
    for value in chosen:
        assert (f"{value:,}" if isinstance(value, int) else f"{value:g}") in words


def test_at_gpt2s_vocabulary_124m_is_gpt2s_own_shape_and_the_rates_are_the_papers() -> None:
    config = load_config("gpt2-124m", ["model.size=124M"])

    assert (config.model.layers, config.model.width, config.model.heads) == (12, 768, 12)
    # DeepSeek-AI 2024, eq. 4, at C = 6 x 124e6 x 2.48e9: 0.00163, and 275,000 tokens: 256 sequences of 1,024
    assert (config.train.learning_rate, config.train.global_batch) == (0.0016, 256)


def test_what_a_person_gives_stays_in_any_order_and_the_plan_says_so() -> None:
    config = load_config("quickstart", ["train.steps=7", "model.size=3.5M", "model.heads=8"])

    assert (config.train.steps, config.model.heads, config.model.kv_heads) == (7, 8, 0)
    (reason,) = reasons(make_plan(config, inventory(2)), "model.size")
    assert "given instead: model.heads = 8 (the rule: 4), train.steps = 7" in reason


def test_another_size_chooses_anew_and_a_record_reads_back_as_it_was() -> None:
    first = load_config("quickstart", ["model.size=3.5M"])
    second = with_overrides(first, ["model.size=30M"])

    assert second == load_config("quickstart", ["model.size=30M"])
    assert with_overrides(second, []) == second
    assert " quickstart model.size=30M train.target_minutes=0.0" in command_for_all_steps(second)
    assert "train.steps" not in command_for_all_steps(second)


@pytest.mark.parametrize(
    ("preset", "size", "message"),
    [
        ("pretrain", "124", "model.size = '124' is not a number of parameters: write it with K, M or B"),
        ("pretrain", "100K", "no model of 100,000 parameters, the nearest has 311,296 with 4,096 rows of embeddings"),
        ("qwen3-0.6b", "1B", "the model at 'Qwen/Qwen3-0.6B-Base' has its own sizes: leave out model.size or"),
    ],
)
def test_a_size_that_cannot_be_had_is_refused(preset: str, size: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(preset, [f"model.size={size}"])


def test_layers_and_width_of_another_size_are_refused() -> None:
    whole = load_config("pretrain").model_dump()  # as a form writes it, with every default

    with pytest.raises(ValueError, match=r"model.layers = 4, model.width = 256 make about 4,194,304 "):
        RunConfig.model_validate(whole | {"model": whole["model"] | {"size": "124M"}})


def test_a_size_in_a_section_that_is_made_already_counts() -> None:
    config = RunConfig(model=ModelConfig(size="30M"), train=TrainConfig(context=1024))

    assert config == load_config("pretrain", ["model.size=30M", "train.context=1024", "name=run"]).model_copy(
        update={"preset": ""}
    )

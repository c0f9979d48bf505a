"""Strategies as they are written: what each changes of the config, and what is refused."""

from __future__ import annotations

import pytest

from flows.presets import with_overrides
from tasks.comparison.strategies import check_shared_overrides, read_strategies
from tests.support.configs import tiny_config
from training.config.run import RunConfig


def chosen(text: str, **config: object) -> dict[str, RunConfig]:
    """Name -> the config that it makes of the tiny one."""
    base = tiny_config(**config).model_dump(mode="json")
    return {
        strategy.name: with_overrides(RunConfig.model_validate(base).model_dump(mode="json"), strategy.overrides)
        for strategy in read_strategies([text], baseline=False)
    }


def test_words_put_together_with_plus_become_settings() -> None:
    configs = chosen("ddp,fsdp+tp2+full,pp2,zero3+parameters+mb4")
    assert list(configs) == ["ddp", "fsdp+tp2+full", "pp2", "zero3+parameters+mb4"]
    fsdp, pipeline, zero3 = (list(configs.values())[place] for place in (1, 2, 3))
    assert (fsdp.parallel.strategy, fsdp.parallel.tp, fsdp.train.activation_checkpointing) == ("fsdp", 2, "full")
    assert (pipeline.parallel.strategy, pipeline.parallel.pp) == ("ddp", 2)
    assert (zero3.parallel.offload, zero3.train.micro_batch) == ("parameters", 4)


def test_a_strategy_written_in_terms_ignores_the_configs_own_strategy() -> None:
    config = chosen("ddp", parallel__strategy="zero3", parallel__offload="parameters")["ddp"]
    assert (config.parallel.strategy, config.parallel.offload) == ("ddp", "auto")
    config = chosen("zero2", parallel__pp=2, parallel__pp_stages_per_rank=2)["zero2"]
    assert (config.parallel.pp, config.parallel.pp_stages_per_rank) == (0, 0)
    assert chosen("single,ddp", parallel__ranks=2)["single"].parallel.ranks == 0, (
        "one process, whatever the others have"
    )


def test_a_name_with_settings_is_one_strategy_up_to_the_next_name() -> None:
    text = "ddp,big=parallel.bucket_mib=50,train.micro_batch=4,profile.steps=[2,3],fsdp"
    configs = chosen(text, parallel__strategy="ddp")
    assert list(configs) == ["ddp", "big", "fsdp"]
    assert (configs["big"].parallel.bucket_mib, configs["big"].train.micro_batch) == (50, 4)
    assert configs["big"].profile.steps == (2, 3)


def test_the_run_on_one_device_comes_first_and_once() -> None:
    assert [strategy.name for strategy in read_strategies(["ddp", "zero2"])] == ["single", "ddp", "zero2"]
    assert [strategy.name for strategy in read_strategies(["ddp,single"])] == ["single", "ddp"]
    assert [strategy.name for strategy in read_strategies(["ddp"], baseline=False)] == ["ddp"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic", "'magic' .* is not a strategy: combine auto, single, ddp"),
        ("ddp+tpx", "'tpx' .* is not a strategy"),
        ("ddp+fsdp", "'ddp\\+fsdp' sets parallel.strategy twice: ddp and fsdp"),
        ("ddp,ddp", "ddp comes more than once"),
        ("fsdp+tp2,fsdp-tp2=parallel.tp=2", "fsdp-tp2 comes more than once"),
        ("mine=train.seed=2", "changes train.seed, which all compared strategies share"),
        ("mine=data.path=other", "changes data.path"),
        ("mine=fast", "'fast' is not an override"),
        ("a b", "its name may have up to 40 letters"),
        ("single", "there is nothing to compare"),
        ("", "there is nothing to compare"),
    ],
)
def test_what_is_no_strategy_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_strategies([text])


def test_what_each_strategy_says_for_itself_cannot_be_set_for_all() -> None:
    check_shared_overrides(["train.steps=5", "parallel.bucket_mib=5"])
    with pytest.raises(ValueError, match=r"parallel.tp=2 cannot be set for all"):
        check_shared_overrides(["train.steps=5", "parallel.tp=2"])


def test_compression_is_a_word() -> None:
    config = chosen("ddp+topk,ddp")
    assert (config["ddp+topk"].parallel.compression, config["ddp"].parallel.compression) == ("topk", "none")

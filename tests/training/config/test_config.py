"""The config refuses what cannot work, field by field and in combination, with the cure."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tests.support.configs import tiny_config
from training.config.run import RunConfig
from training.config.serving import ServeConfig, ServingConfig
from training.facts.strategies import STRATEGIES, Strategy

COMBINATIONS = [
    ({"model__width": 30}, "model.width = 30 is not divisible by model.heads = 4"),
    ({"model__heads": 32, "model__kv_heads": 32}, "head size"),
    ({"model__kv_heads": 3}, "model.heads = 4 is not divisible by model.kv_heads = 3"),
    ({"model__architecture": "path"}, "model.path is empty"),
    ({"model__init": "pretrained"}, "model.path is empty"),
    ({"data__tokenizer": {"kind": "pretrained"}}, "data.tokenizer.path is empty"),
    ({"data__tokenizer": {"kind": "bpe", "vocab_size": 100}}, "below 258"),
    ({"model__path": "somewhere"}, "would not be used: set model.init=pretrained"),
    ({"train__micro_batch": 9}, "train.micro_batch = 9 exceeds train.global_batch = 8"),
    ({"train__learning_rate": 1e-6}, "train.min_learning_rate"),
    ({"evaluation__every_steps": 0, "evaluation__early_stop_validations": 3}, "= 3 needs validations while training"),
    ({"launch__launcher": "kubernetes"}, "launch.launcher=kubernetes needs launch.image"),
    (
        {"launch__launcher": "kubernetes", "launch__image": "x"},
        "needs launch.kubernetes.volume_claim: the PersistentVolumeClaim that holds",
    ),
    (
        {
            "launch__launcher": "kubernetes",
            "launch__image": "x",
            "launch__min_hosts": 3,
            "launch__kubernetes": {"volume_claim": "runs", "nodes": 2},
        },
        "launch.min_hosts = 3 of launch.kubernetes.nodes = 2: lower it",
    ),
    (
        {
            "launch__launcher": "kubernetes",
            "launch__image": "x",
            "launch__kubernetes": {"volume_claim": "runs"},
            "checkpoint__memory_every_steps": 10,
        },
        "checkpoint.memory_every_steps = 10 keeps copies in the memory of hosts from one attempt to the next",
    ),
    ({"launch__kubernetes": {"gpus_per_node": 2, "slots": 3}}, "slots = 3 on 2 GPUs: each rank needs a GPU"),
    ({"launch__kubernetes": {"resources": {"nvidia.com/gpu": "8"}}}, "set launch.kubernetes.gpus_per_node instead"),
    ({"parallel__ranks": 3}, "train.global_batch = 8 cannot be split evenly over 3 data-parallel ranks"),
    ({"parallel__ranks": 3, "parallel__tp": 2}, r"parallel.ranks = 3 is not divisible by tp\*pp = 2"),
    ({"parallel__strategy": "single", "parallel__ranks": 2}, "single runs on 1 rank"),
    (
        {"parallel__strategy": "single", "parallel__tp": 2},
        "runs with parallel.strategy=ddp, fsdp, hsdp, zero1, not single",
    ),
    ({"parallel__strategy": "zero2", "parallel__tp": 2}, "parallel.strategy=ddp, fsdp, hsdp, zero1, not zero2"),
    ({"parallel__strategy": "hsdp", "parallel__pp": 2}, "pp = 2 runs with parallel.strategy=ddp, fsdp, zero1, not"),
    (
        {"parallel__strategy": "fsdp", "parallel__pp": 2, "parallel__offload": "parameters"},
        "offload=parameters is not there for parallel.strategy=fsdp with .* and pp = 2: set it to auto or none",
    ),
    (
        {"parallel__strategy": "fsdp", "parallel__stages": ((4,), (2, 2))},
        "with parallel.strategy=fsdp, pp=0, pp_stages_per_rank=0: stages of given sizes run with ddp",
    ),
    ({"parallel__pp_stages_per_rank": 2}, "pp_stages_per_rank = 2 needs a pipeline: set parallel.pp above 1"),
    (
        {"parallel__strategy": "ddp", "parallel__offload": "optimizer"},
        "offload=optimizer is not there for parallel.strategy=ddp with .* and pp = 0: set it to auto or none",
    ),
    (
        {"parallel__strategy": "zero2", "parallel__offload": "parameters"},
        "offload=parameters is not there for parallel.strategy=zero2 with .*: set it to auto or none or optimizer",
    ),
    (
        {"parallel__strategy": "ddp", "parallel__cp": 2, "parallel__pp": 2},
        "cp = 2 runs with .*ddp or fsdp, .*not with ddp and pp = 2: .*set parallel.cp to 1",
    ),
    (
        {"parallel__cp": 3, "train__context": 32},
        "context = 32 tokens cannot be split over parallel.cp = 3 ranks, .*two of 6 equal pieces: .*multiple of 6",
    ),
    ({"parallel__sequence_parallel": "on", "parallel__tp": 1}, "parallel.tp = 1 has none .*set parallel.tp above 1"),
    (
        {"parallel__sequence_parallel": "on", "parallel__tp": 2, "train__context": 33},
        "context = 33 tokens make no equal pieces for parallel.tp = 2 ranks: .*multiple of 2",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), COMBINATIONS)
def test_a_combination_that_cannot_work_names_the_numbers(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny_config(**overrides)


@pytest.mark.parametrize(
    ("strategy", "row", "offload"),
    [(name, row, offload) for name, row in STRATEGIES.items() for offload in ("none", *row.offloads)],
)
def test_muon_is_refused_by_name_where_gradients_are_flat_or_state_is_offloaded(
    strategy: str, row: Strategy, offload: str
) -> None:
    groups = {"parallel__group_ranks": 2} if row.in_groups else {}
    asked = {"train__optimizer": "muon", "parallel__strategy": strategy, "parallel__offload": offload, **groups}
    if strategy in {"zero2", "zero3"}:
        message = (
            f"muon does not run with parallel.strategy={strategy}, which cuts gradients into flat pieces.* use fsdp,"
        )
    elif offload != "none":
        message = f"parallel.offload={offload}, since its products would run on the host: set parallel.offload=none"
    else:
        tiny_config(**asked)
        return
    with pytest.raises(ValidationError, match=message):
        tiny_config(**asked)


@pytest.mark.parametrize("overrides", [{"train__steps": 0}, {"train__stpes": 5}, {"parallel__strategy": "magic"}])
def test_unknown_fields_and_values_out_of_bounds_are_errors(overrides: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        tiny_config(**overrides)


def all_fields(part: type[BaseModel], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, field in part.model_fields.items():
        found.append((f"{prefix}{name}", field))
        if isinstance(field.default, BaseModel):
            found += all_fields(type(field.default), f"{prefix}{name}.")
    return found


@pytest.mark.parametrize(
    ("name", "field"),
    [field for config in (RunConfig, ServeConfig) for field in all_fields(config)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_field_explains_itself_in_the_form(name: str, field: Any) -> None:
    assert field.description
    assert field.description.endswith(".")
    assert field.description[0].isupper()
    assert len(field.description.split()) > 2
    assert field.default_factory is None
    assert not field.is_required(), "a form needs a default to start from"


def test_the_form_names_a_field_with_its_unit_and_its_bounds() -> None:
    fields = ServingConfig.model_json_schema()["properties"]
    assert fields["timeout_s"]["title"] == "Timeout (s)"
    assert fields["max_new_tokens"]["title"] == "Max new tokens"
    assert fields["max_waiting"]["description"].endswith(" At least 0, at most 100,000.")


def test_a_config_survives_json() -> None:
    config = tiny_config()
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValidationError):
        config.train.steps = 5  # type: ignore[misc]

"""Every preset in prefect.yaml validates, and plans on small and large inventories."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from flows.presets import PRESETS_FILE, command_for_all_steps, load_config, presets
from tasks.data.sources import SkippedDocuments, find_sources
from tests.support.configs import inventory
from tests.training.models.test_sizes import CARDS
from training.config.run import RunConfig
from training.models.sizes import count_model
from training.planner.plan import make_plan

OF_SIZES = ["quickstart", "pretrain", "shakespeare-char", "gpt2-124m", "llama-1b"]
CONTINUED = ["qwen3-0.6b", "qwen3-8b"]


def test_these_are_the_presets() -> None:
    assert list(presets()) == [*OF_SIZES, *CONTINUED, "bert-base"]


@pytest.mark.parametrize("hosts", [(1,), (8,), (8, 8)], ids=["1x1", "1x8", "2x8"])
@pytest.mark.parametrize("preset", [*OF_SIZES, "bert-base"])
def test_presets_plan_on_gpus(preset: str, hosts: tuple[int, ...]) -> None:
    config = RunConfig.model_validate(presets()[preset])
    plan = make_plan(config, inventory(*hosts, kind="cuda", memory_gib=80))
    expected = 1 if config.parallel.strategy == "single" else min(sum(hosts), config.train.global_batch)
    assert plan.mesh == {"pp": 1, "dp": expected, "tp": 1}
    assert plan.dp * plan.micro_batch * plan.accumulation == config.train.global_batch
    assert plan.steps == config.train.steps


@pytest.mark.parametrize(
    ("preset", "card", "fewest"), [("qwen3-0.6b", "Qwen3-0.6B", (1,)), ("qwen3-8b", "Qwen3-8B", (8,))]
)
def test_continued_models_plan_where_they_fit(preset: str, card: str, fewest: tuple[int, ...]) -> None:
    """By the config.json of their cards: the weights are not needed for a plan."""
    _, model_type, fields, parameters, _ = next(each for each in CARDS if each[0] == card)
    config, settings = RunConfig.model_validate(presets()[preset]), AutoConfig.for_model(model_type, **fields)
    shape = count_model(settings, objective="causal")
    for hosts in ((1,), (8,), (8, 8)):
        machines = inventory(*hosts, kind="cuda", memory_gib=80)
        if hosts < fewest:
            with pytest.raises(ValueError, match="does not fit"):
                make_plan(config, machines, hf_config=settings.to_dict(), hf_shape=shape)
            continue
        plan = make_plan(config, machines, hf_config=settings.to_dict(), hf_shape=shape)
        assert plan.shape.parameters == parameters
        assert sum(plan.ranks_per_host) == sum(hosts)
        assert plan.dp * plan.micro_batch * plan.accumulation == config.train.global_batch


@pytest.mark.parametrize(("preset", "millions"), [("gpt2-124m", 124.4), ("bert-base", 109.5), ("llama-1b", 1126.3)])
def test_published_sizes(preset: str, millions: float) -> None:
    plan = make_plan(RunConfig.model_validate(presets()[preset]), inventory(1, kind="cuda", memory_gib=80))
    assert plan.shape.parameters / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize("deployment", yaml.safe_load(PRESETS_FILE.read_text())["deployments"], ids=lambda d: d["name"])
def test_entrypoints_are_modules_that_hold_the_flow(deployment: dict[str, str]) -> None:
    module, _, name = deployment["entrypoint"].rpartition(".")
    assert hasattr(importlib.import_module(module), name)


def test_a_preset_without_a_corpus_says_what_to_set() -> None:
    config = load_config("pretrain")
    with pytest.raises(ValueError, match=r"data\.path is empty: set data\.path=FILE_OR_FOLDER"):
        find_sources(config.data, SkippedDocuments("stop"))
    own = {"name", "preset"}
    assert config.model_dump(exclude=own) == RunConfig().model_dump(exclude=own), "all else as by default"


def test_overrides_reach_their_field() -> None:
    config = load_config("quickstart", ["train.steps=7", "data.path=my_texts", "evaluation.prompts=[a, b]"])
    assert (config.train.steps, config.data.path, config.evaluation.prompts) == (7, "my_texts", ("a", "b"))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "store.url=s3://key:hunter2@bucket",
            r"store\.url = 's3://\*\*\*@bucket': contains credentials, which would be",
        ),
        ("store=s3://key:hunter2@bucket", r"store = 's3://\*\*\*@bucket': Input should be"),
        (
            "launch.hosts=[{docker: http://key:hunter2@gpu1}]",
            r"launch\.hosts\.0\.docker = 'http://\*\*\*@gpu1': String",
        ),
        (
            "model.layers=https://example.org/x?token=hunter2",
            r"model\.layers = 'https://example\.org/x\?\*\*\*': Input",
        ),
    ],
)
def test_a_refused_value_is_shown_without_its_password(override: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as refused:
        load_config("quickstart", [override])
    assert "hunter2" not in str(refused.value)


def test_the_command_for_all_steps_means_the_same_config_without_minutes() -> None:
    changed = ["data.path=my texts", "train.steps=2000", "parallel.rebalance=on", 'evaluation.prompts=["a", "b c"]']
    config = load_config("quickstart", changed)
    assert config.train.target_minutes
    _, pretrain, preset, *overrides = shlex.split(command_for_all_steps(config))
    assert (pretrain, preset) == ("pretrain", "quickstart")
    assert load_config(preset, overrides) == load_config("quickstart", [*changed, "train.target_minutes=0"])
    named = load_config("quickstart", ["name=mine"])
    assert shlex.split(command_for_all_steps(named))[2:] == ["quickstart", "name=mine", "train.target_minutes=0.0"]
    assert command_for_all_steps(named.model_copy(update={"preset": ""})) == "", "its file is not known"


def test_a_name_made_of_digits_is_a_name() -> None:
    assert load_config("quickstart", ["name=2024", "data.path=1"]).name == "2024"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    for name in ("folder.yaml", "latin.yaml"):
        with pytest.raises(ValueError, match=f"{name} cannot be read as YAML"):
            load_config(str(tmp_path / name))


def test_a_yaml_file_is_a_preset_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ntrain: {steps: 3}\n")
    assert load_config(str(path)).train.steps == 3


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("nope", [], "no preset 'nope': choose quickstart"),
        ("quikstart", [], r"no preset 'quikstart' \(did you mean quickstart\?\): choose"),
        ("missing.yaml", [], "missing.yaml does not exist"),
        ("quickstart", ["train.steps=0"], "train.steps = 0: Input should be greater than or equal to 1"),
        ("quickstart", ["train.stpes=5"], r"train.stpes is not a field of the config \(did you mean train.steps\?\)"),
        ("quickstart", ["train.steps={a"], "the value is not YAML"),
        ("quickstart", ["steps"], "write section.field=value"),
        ("quickstart", ["name.x=1"], "name is a field, not a section"),
        ("quickstart", ["parallel.strategy=magic"], "Input should be 'auto', 'single', 'ddp'"),
    ],
)
def test_bad_input_is_named(preset: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(preset, overrides)

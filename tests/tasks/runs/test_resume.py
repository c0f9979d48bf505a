"""What a resumed run may change: every field is classified, exact is exact, and nothing changes unseen."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tasks.planning.plan import write_plan
from tasks.runs.folder import flattened, latest_config, read_plan
from tasks.runs.resume import TABLE, Change, accepted, changes, read_resumptions
from tasks.tracking.mlflow_run import TrackedRun
from tests.support.configs import inventory, tiny_config
from tests.support.mixture_shards import write_mixture
from training.config.run import RunConfig
from training.records.inventory import Inventory
from training.records.plan import RunPlan
from training.records.token_shards import TokenShards

MIXTURE = {
    "sources": [{"path": name, "weight": weight} for name, weight in (("a", 5), ("b", 2), ("c", 1))],
    "phases": [{"from_step": 60, "weights": {"c": 1}}],
}
CONFIGS = [RunConfig(), RunConfig.model_validate({"data": MIXTURE})]
FIELDS = sorted({name for config in CONFIGS for name, _ in flattened(config.model_dump(mode="json"))})
STEPS = 100
MINUTES = 0.014  # time for 78 of them


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_classified(field: str) -> None:
    assert any(fnmatchcase(field, pattern) for pattern, _, _ in TABLE)


def test_every_row_of_the_table_decides_about_a_field() -> None:
    deciding = {next(pattern for pattern, _, _ in TABLE if fnmatchcase(field, pattern)) for field in FIELDS}
    assert deciding == {pattern for pattern, _, _ in TABLE}


class Run:
    """A run that was planned and has a checkpoint of step `done`."""

    def __init__(self, home: Path, shards_dir: Path, *, done: int, machines: Inventory, **overrides: Any) -> None:
        self.config = tiny_config(train__steps=STEPS, **overrides)
        self.shards_dir, self.shards = shards_dir, TokenShards.read(shards_dir / "manifest.json")
        self.tracked = TrackedRun(run_id="run-1", mlflow_run_id="m1", experiment_id="0", begun_with=self.config)
        self.folder = home / "run-1"
        (self.folder / "checkpoints" / f"{done:08d}").mkdir(parents=True)
        self.replan(self.config, machines)

    def replan(self, config: RunConfig, machines: Inventory | None = None) -> RunPlan:
        return write_plan(
            config,
            run=self.tracked,
            inventory=machines or inventory(2),
            shards=self.shards,
            shards_dir=self.shards_dir,
            changes=changes(self.folder, config, begun_with=self.config),
        )

    def with_overrides(self, **overrides: Any) -> RunConfig:
        content = self.config.model_dump(mode="json")
        for key, value in overrides.items():
            section, _, field = key.partition("__")
            content[section][field] = value
        return RunConfig.model_validate(content)

    def changes(self, *, force: bool = True, **overrides: Any) -> dict[str, Change]:
        found = accepted(self.folder, self.with_overrides(**overrides), begun_with=self.config, force=force)
        return {change.field: change for change in found}


@pytest.fixture
def run(tmp_path: Path, tiny_shards: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))

    def make(*, done: int = 40, **overrides: Any) -> Run:
        shards = write_mixture(tmp_path / "mixture") if "data__sources" in overrides else tiny_shards
        return Run(tmp_path, shards, done=done, machines=inventory(2), **overrides)

    return make


def effects(found: dict[str, Change]) -> set[str]:
    return {change.effect for change in found.values()}


LATER = {"from_step": 60, "weights": {"a": 1}}
SHARES = {"data__path": "", "data__sources": MIXTURE["sources"], "train__schedule": "constant"}
EXTENSIONS = [
    ({"done": 0}, {"train__steps": 200, "train__learning_rate": 1.0}, "exact"),
    ({}, {"train__steps": 200}, "breaks"),
    ({}, {"train__steps": 200, "train__decay_steps": STEPS}, "exact"),
    ({}, {"train__decay_steps": STEPS}, "exact"),
    ({"train__schedule": "constant"}, {"train__steps": 200}, "exact"),
    ({"train__schedule": "wsd"}, {"train__steps": 200}, "exact"),
    ({"train__schedule": "wsd", "train__cooldown_steps": 80}, {"train__steps": 200}, "breaks"),
    ({"train__schedule": "constant"}, {"train__schedule": "wsd"}, "exact"),
    ({"train__schedule": "constant"}, {"train__learning_rate": 1e-3}, "breaks"),
    ({"train__schedule": "constant"}, {"train__min_learning_rate": 1e-6}, "exact"),
    ({"train__schedule": "constant"}, {"train__max_tokens": 60 * 128}, "exact"),
    ({"train__schedule": "constant"}, {"train__max_epochs": 50.0}, "exact"),
    ({}, {"train__max_tokens": 60 * 128}, "breaks"),
    ({"train__warmup_steps": 50}, {"train__decay_steps": 90}, "exact"),
    ({}, {"train__max_hours": 2.0}, "exact"),
    ({"train__target_minutes": MINUTES}, {"train__target_minutes": 0.0}, "breaks"),
    ({"train__target_minutes": MINUTES}, {"train__target_minutes": 2 * MINUTES}, "breaks"),
    ({"train__target_minutes": MINUTES, "train__schedule": "constant"}, {"train__target_minutes": 0.0}, "exact"),
    (SHARES, {"data__phases": [LATER]}, "exact"),
    (SHARES, {"data__phases": [LATER | {"from_step": 39}]}, "breaks"),
    (SHARES | {"data__phases": [LATER]}, {"data__phases": [LATER | {"from_step": 50}]}, "exact"),
    (SHARES | {"data__phases": [LATER]}, {"data__phases": []}, "exact"),
    (SHARES | {"data__phases": [{"from_share": 0.3, "weights": {"a": 1}}]}, {"train__steps": 200}, "breaks"),
    (SHARES | {"data__phases": [{"from_share": 0.9, "weights": {"a": 1}}]}, {"train__steps": 200}, "exact"),
]


@pytest.mark.parametrize(("begun", "overrides", "effect"), EXTENSIONS)
def test_a_length_a_rate_or_a_share_is_exact_if_the_steps_that_are_done_would_have_been_the_same(
    begun: dict[str, Any], overrides: dict[str, Any], effect: str, run: Any
) -> None:
    assert effects(run(**begun).changes(**overrides)) == {effect}


def test_a_weight_may_not_change_but_a_path_may(run: Any) -> None:
    made = run(data__path="", data__sources=MIXTURE["sources"])
    moved, heavier = ([dict(source) for source in MIXTURE["sources"]] for _ in range(2))
    moved[0] |= {"path": "elsewhere/a"}
    heavier[0] |= {"weight": 6}
    assert effects(made.changes(data__sources=moved)) == {"exact"}
    with pytest.raises(ValueError, match=r"data\.sources\.0\.weight 5.* -> 6.*would have had other shares"):
        made.changes(data__sources=heavier, force=False)
    with pytest.raises(ValueError, match=r"data\.sources\.2\.name .*cannot be changed"):
        made.changes(data__sources=moved[:2])


def test_a_longer_cosine_names_the_rates_that_differ_most_and_the_cure(run: Any) -> None:
    note = run().changes(train__steps=200)["train.steps"].note
    expected = (
        "step 40 had learning rate 0.00207, would have had 0.00275; train.decay_steps=100 keeps the decay as it was"
    )
    assert note == expected


def test_a_run_cannot_be_made_shorter_than_it_is(run: Any) -> None:
    with pytest.raises(ValueError, match="at step 40 already, by the new settings it would end at step 30: raise"):
        run().changes(train__steps=30)


def test_a_run_that_ended_within_a_batch_cannot_go_on_exactly(run: Any) -> None:
    """3,999 / 16 = 249 sequences an epoch: the 32nd batch of 8 had one only."""
    short = run(done=32, train__schedule="constant", train__max_epochs=1.0)
    found = short.changes(train__max_epochs=2.0)
    assert effects(found) == {"breaks"}
    assert "step 32 was the last" in found["train.max_epochs"].note


REFUSED = [
    ({"name": "other"}, "name 'tiny' -> 'other' .cannot be changed: the run is identified by it"),
    ({"data__column": "body"}, "data.column .*tokens would be others; a new run with model.init=pretrained"),
    ({"model__layers": 3}, r"model.layers 2 -> 3 \(cannot be changed: the checkpoint's weights would not fit\)"),
    ({"train__freeze": []}, "optimizer state for frozen parameters"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_cannot_go_on_is_refused_even_by_force(overrides: dict[str, Any], message: str, run: Any) -> None:
    begun = run(train__freeze=["*embed*"])
    content = begun.config.model_dump(mode="json")
    for key, value in overrides.items():
        section, _, field = key.partition("__")
        content |= {section: content[section] | {field: value} if field else value}
    with pytest.raises(ValueError, match=message):
        changes(begun.folder, RunConfig.model_validate(content), begun_with=begun.config)


def test_what_breaks_exactness_needs_force_and_is_listed(run: Any) -> None:
    begun, overrides = run(), {"train__seed": 7, "model__dropout": 0.5, "train__log_every_steps": 5}
    with pytest.raises(ValueError, match="--force") as error:
        begun.changes(force=False, **overrides)
    assert "train.seed 1337 -> 7 (breaks exactness: later steps have another order of data" in str(error.value)
    assert "model.dropout 0.1 -> 0.5 (breaks exactness" in str(error.value)
    assert "log_every_steps" not in str(error.value)
    assert len(begun.changes(force=True, **overrides)) == 3


def test_harmless_changes_need_no_force(run: Any) -> None:
    found = run().changes(
        force=False,
        checkpoint__every_steps=9,
        evaluation__every_steps=0,
        parallel__strategy="fsdp",
        train__micro_batch=1,
    )
    assert effects(found) == {"exact", "rounding"}


def test_the_earlier_plan_is_kept_and_the_change_remembered(run: Any) -> None:
    begun = run()
    first = read_plan(begun.folder)
    second = begun.replan(begun.with_overrides(checkpoint__every_steps=9))
    third = begun.replan(begun.with_overrides(checkpoint__every_steps=9, parallel__strategy="fsdp"))
    assert RunPlan.read(begun.folder / "plan-1.json") == first
    assert RunPlan.read(begun.folder / "plan-2.json") == second
    assert read_plan(begun.folder) == third
    assert latest_config(begun.folder, begun_with=begun.config) == third.config
    remembered = read_resumptions(begun.folder)
    assert [[change.field for change in each.changes] for each in remembered.resumptions] == [
        ["checkpoint.every_steps"],
        ["parallel.strategy"],
    ]
    assert [each.after_step for each in remembered.resumptions] == [40, 40]
    assert remembered.exact
    assert json.loads((begun.folder / "resume-overrides.json").read_text())["resumptions"][0]["changes"][0]["old"] == 3


def test_a_resume_without_changes_keeps_its_plan_whatever_machines_there_are(run: Any) -> None:
    begun = run()
    assert begun.replan(begun.config, inventory(1)) == read_plan(begun.folder)
    assert not list(begun.folder.glob("plan-*.json"))
    assert read_resumptions(begun.folder).resumptions == ()


AUTOMATIC = {"train__micro_batch": 0, "parallel__precision": "auto"}


def test_an_exact_change_keeps_ranks_threads_micro_batch_and_precision(run: Any) -> None:
    begun = run(**AUTOMATIC)
    first = read_plan(begun.folder)
    again = begun.replan(begun.with_overrides(checkpoint__every_steps=9), inventory(4))
    for what in ("mesh", "ranks_per_host", "micro_batches", "accumulation", "precision", "threads_per_rank"):
        assert getattr(again, what) == getattr(first, what), what
    assert again.config.parallel.ranks == 0, "what was left to the plan stays so"


def test_other_changes_take_the_machines_there_are_but_not_their_precision(run: Any) -> None:
    begun = run(**AUTOMATIC)
    assert read_plan(begun.folder).precision == "fp32"
    gpus = inventory(4, kind="cuda", memory_gib=80)
    again = begun.replan(begun.with_overrides(parallel__strategy="fsdp"), gpus)
    assert again.mesh["dp"] == 4
    assert again.precision == "fp32"


def test_changes_that_are_not_about_it_keep_the_strategy_that_was_chosen(run: Any) -> None:
    begun = run(parallel__strategy="auto", **AUTOMATIC)
    first = read_plan(begun.folder)
    first.model_copy(update={"strategy": "fsdp", "activation_checkpointing": "full"}).write(begun.folder / "plan.json")
    again = begun.replan(begun.with_overrides(train__seed=7), inventory(4))
    assert (again.strategy, again.activation_checkpointing, again.mesh["dp"]) == ("fsdp", "full", 4)
    assert again.config.parallel.strategy == "auto"
    anew = begun.replan(begun.with_overrides(train__seed=7, train__activation_checkpointing="none"), inventory(4))
    assert (anew.strategy, anew.activation_checkpointing) == ("ddp", "none")


def test_steps_that_fitted_the_minutes_stay_whatever_machines_there_are(run: Any) -> None:
    begun = run(train__target_minutes=MINUTES)
    steps = read_plan(begun.folder).steps
    assert 40 < steps < STEPS
    for overrides in ({"checkpoint__every_steps": 9}, {"parallel__strategy": "fsdp"}, {"train__seed": 7}):
        again = begun.replan(begun.with_overrides(**overrides), inventory(4))
        assert (again.steps, again.steps_in_time) == (steps, steps)
    assert "train.target_minutes" in again.reasons[0]
    assert begun.replan(begun.with_overrides(train__target_minutes=0.0)).steps == STEPS


def test_other_tokens_are_refused(run: Any) -> None:
    begun = run()
    begun.shards = begun.shards.model_copy(update={"fingerprint": "e" * 64})
    with pytest.raises(ValueError, match=r"not those that run-1 was planned with .*: the corpus has changed"):
        begun.replan(begun.with_overrides(data__path="elsewhere"))
    assert not list(begun.folder.glob("plan-*.json"))


def test_positions_that_are_weights_cannot_change_even_by_force(run: Any) -> None:
    begun = run(model__architecture="gpt2", model__kv_heads=0)
    with pytest.raises(ValueError, match=r"do not fit the model of the new settings \(parameters \d+ -> \d+\)"):
        begun.replan(begun.with_overrides(train__context=32))


def test_a_llama_takes_another_context_by_force(run: Any) -> None:
    begun = run()
    assert effects(begun.changes(train__context=32)) == {"breaks"}
    assert begun.replan(begun.with_overrides(train__context=32)).shape.context == 32


def test_other_prompts_are_answered_anew(run: Any) -> None:
    begun = run()
    report = begun.folder / "eval.json"
    report.write_text("{}")
    begun.replan(begun.with_overrides(checkpoint__every_steps=9))
    assert report.exists()
    begun.replan(begun.with_overrides(checkpoint__every_steps=9, evaluation__prompts=["a"]))
    assert not report.exists()


def test_a_run_that_a_head_without_torch_planned_by_the_bare_config_json_is_resumed(run: Any, tmp_path: Path) -> None:
    """It took a default that config.json omits for something else than the class does."""
    given = {"model_type": "olmoe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 300, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(given | experts))
    model = {"model__architecture": "path", "model__path": str(tmp_path), "model__kv_heads": 0}
    begun = run(**model)
    kept = read_plan(begun.folder)
    earlier = {"kv_heads": 4, "mlp_width": 128, "tied": True, "adds_loss": True}
    kept.model_copy(update={"shape": kept.shape.model_copy(update=earlier)}).write(begun.folder / "plan.json")
    again = begun.replan(begun.with_overrides(train__seed=7))
    assert (again.config.train.seed, again.shape) == (7, kept.shape)
    words = kept.shape.model_copy(update={"vocab_size": 299})
    kept.model_copy(update={"shape": words}).write(begun.folder / "plan.json")
    with pytest.raises(ValueError, match=r"do not fit the model of the new settings \(vocab_size 299 -> \d+\)"):
        begun.replan(begun.with_overrides(train__seed=8))

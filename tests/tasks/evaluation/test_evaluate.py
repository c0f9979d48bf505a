"""Evaluation from outside: bad tasks are refused before anything is trained, and a report reads as a table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.cli.command import main
from flows.presets import evaluate_config
from tasks.data.corpus import prepare_corpus
from tasks.evaluation.champion import per_token_of
from tasks.evaluation.checks import check_tasks
from tasks.evaluation.evaluate import evaluate, find_subject
from tasks.evaluation.report import metrics_of, table_of
from tests.support.configs import inventory, tiny_config
from tests.support.lm_eval_tasks import write_tasks
from tests.support.mlflow_store import Store
from tests.support.tiny_corpus import write_json_lines
from tests.support.tiny_run import TEXT, tiny_run
from training.config.data import DataConfig
from training.config.evaluation import EvaluationConfig
from training.config.serving import InferenceConfig
from training.planner.plan import make_plan
from training.records.results import EvalReport, SourceFigures, TaskScore


def test_tasks_that_could_only_fail_after_training_are_refused() -> None:
    wanted = {"evaluation__tasks": ["piqa"]}
    with pytest.raises(ValueError, match="train a causal model"):
        check_tasks(tiny_config(**wanted, model__architecture="bert", model__kv_heads=0))
    config = tiny_config(**wanted)
    docker = config.model_copy(update={"launch": config.launch.model_copy(update={"launcher": "docker"})})
    with pytest.raises(ValueError, match="evaluate tiny@champion --tasks"):
        check_tasks(docker)


@pytest.mark.slow
def test_an_unknown_task_dies_with_names_like_it_and_known_ones_pass(tmp_path: Path) -> None:
    files = [str(write_tasks(tmp_path / "tasks", continuations=["no"] * 9))]
    check_tasks(tiny_config(evaluation__task_files=files, evaluation__tasks=["endings"]))
    with pytest.raises(ValueError, match=r"has a task 'ending'; similar names are .*endings"):
        check_tasks(tiny_config(evaluation__task_files=files, evaluation__tasks=["ending"]))
    (tmp_path / "tasks" / "questions.jsonl").unlink()
    with pytest.raises(ValueError, match="endings cannot be loaded"):
        check_tasks(tiny_config(evaluation__task_files=files, evaluation__tasks=["endings"]))


@pytest.fixture
def homed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "home"))
    return tmp_path


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What the command prints, on stdout alone."""
    assert main(["evaluate", *arguments, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def plain(trained: Path) -> Path:
    """A Hugging Face folder that is of no run: weights, config and tokenizer."""
    folder = trained.parent / "plain"
    shutil.copytree(trained / "checkpoints" / "8", folder)
    (folder / "manifest.json").unlink()
    shutil.copytree(trained.parent / "shards-run" / "tokenizer", folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def alone(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> EvalReport:
    """The run's own held-out text on one rank, with a greedy sample."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SHARDLINE_HOME", str(tmp_path_factory.mktemp("home")))
        config = evaluate_config({}, GREEDY)
        subject = find_subject(str(trained))
        return evaluate(subject, data=config.data, evaluation=config.evaluation, inference=config.inference)


GREEDY = ("evaluation.temperature=0", "evaluation.prompts=['def ']", "evaluation.sample_tokens=8")
SAME = ("loss", "accuracy", "bits_per_byte", "tokens", "text_bytes")


@pytest.mark.long
def test_a_plain_hugging_face_folder_is_evaluated_on_given_text(
    plain: Path, alone: EvalReport, homed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert alone.tokens == 399
    (text := homed / "held-out.txt").write_bytes(TEXT.encode()[-400:])
    sharing = ("inference.parallel=data", "inference.degree=2")
    export = evaluated(capsys, str(plain), "--data", str(text), *sharing, "data.text_unit=file")
    # One stream of 400 bytes either way, but for the end token that closes a whole document.
    assert (export["tokens"], export["text_bytes"]) == (400, 400)
    assert export["loss"] == pytest.approx(alone.loss, rel=0.05)
    assert [source["source"] for source in export["sources"]] == ["held-out.txt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [*(pytest.param(name, marks=pytest.mark.long) for name in ("data", "tensor")), "pipeline"]
)
def test_two_ranks_have_the_figures_of_one_however_they_share_the_model(
    parallel: str, trained: Path, alone: EvalReport, homed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, one = str(trained / "checkpoints" / "8"), alone.model_dump(mode="json")
    two = evaluated(capsys, checkpoint, *GREEDY, f"inference.parallel={parallel}", "inference.degree=2")
    assert {name: two[name] for name in SAME} == pytest.approx({name: one[name] for name in SAME}, rel=1e-6)
    assert two["samples"] == one["samples"] != []


@pytest.mark.slow
def test_a_registered_versions_evaluation_is_an_mlflow_run_tied_to_its_model(
    store: Store, homed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    trained = store.registered("a", loss=5.5)
    printed = evaluated(capsys, f"{trained.name}/{trained.version}")
    client = MlflowClient(store.uri)
    run = client.get_run(printed["mlflow_run_id"])
    version = client.get_model_version(trained.name, str(trained.version))
    assert run.info.status == "FINISHED"
    assert run.data.metrics["eval/loss"] == printed["loss"]
    assert run.data.tags["mlflow.parentRunId"] == version.run_id
    assert run.inputs.model_inputs[0].model_id == version.tags["shardline.model_id"]
    model = client.get_logged_model(version.tags["shardline.model_id"])
    assert printed["loss"] in [metric.value for metric in model.metrics if metric.key == "eval/loss"]


@pytest.mark.slow
def test_a_model_is_measured_by_its_own_rule_for_special_tokens(trained: Path, homed: Path) -> None:
    """A champion whose training took markers for text, on the text of a run that takes them for tokens."""
    tokenizer = homed / "tokenizer"
    shutil.copytree(trained.parent / "shards-run" / "tokenizer", tokenizer)
    (tokenizer / "chat_template.jinja").write_text("{% for m in messages %}<|mask|>{{ m.content }}{% endfor %}")
    source = write_json_lines(homed / "chats.jsonl", [f"<|mask|>Hello {number}<|mask|>Yes." for number in range(60)])
    config = tiny_config(data__path=str(source), data__tokenizer={"kind": "pretrained", "path": str(tokenizer)})
    folder, shards = prepare_corpus(config.data, tokens_home=homed / "tokens")
    plan = make_plan(config, inventory(1), run_id="challenger", shards=shards, shards_dir=str(folder))
    subject = find_subject(str(trained))
    report = evaluate(
        subject,
        data=DataConfig(),
        evaluation=EvaluationConfig(prompts=()),
        inference=InferenceConfig(),
        held_out_of=plan,
    )
    tokens, documents = shards.tokens("validation"), shards.documents("validation")
    assert report.shards_fingerprint != plan.shards_fingerprint
    assert report.text_bytes == shards.text_bytes("validation")
    assert report.tokens == tokens - 1 + documents * 2 * (len("<|mask|>") - 1)
    own = report.model_copy(
        update={"tokens": tokens - 1, "sources": (report.sources[0].model_copy(update={"tokens": tokens - 1}),)}
    )
    compared = per_token_of(report, own)
    assert compared.loss * compared.tokens == pytest.approx(report.loss * report.tokens)
    assert compared.loss_by_source == pytest.approx({"chats.jsonl": compared.loss})


def test_what_cannot_be_evaluated_is_said_with_the_cure(
    trained: Path, plain: Path, homed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        ([str(plain)], "give --data PATH"),
        ([str(trained / "logs-of-nothing"), "--data", "x"], "is not the name of a model version"),
        ([str(trained.parent)], "neither a plan.json"),
        ([str(trained), "inference.degree=2"], "inference.parallel = none"),
        ([str(trained), "inference.parallel=tensor", "inference.degree=3"], "cannot be shared"),
    ):
        assert main(["evaluate", *arguments]) == 2
        assert message in capsys.readouterr().err


def report(**changes: Any) -> EvalReport:
    figures = {"perplexity": 7.4, "bits_per_byte": 1.5, "accuracy": 0.4}
    sources = [
        SourceFigures(source=name, loss=loss, tokens=tokens, text_bytes=3 * tokens, **figures)
        for name, loss, tokens in (("code", 1.5, 600), ("wiki (en)", 2.75, 400))
    ]
    score = TaskScore(task="endings", metric="acc", value=0.5, stderr=0.1, samples=9, higher_is_better=True)
    whole = {"step": 8, "checkpoint_sha256": "c", "shards_fingerprint": "a", "loss": 2.0, "tokens": 1000}
    rest = {"text_bytes": 3000, "sources": tuple(sources), "tasks": (score,), "samples": (), "seconds": 1.0}
    return EvalReport.model_validate({**figures, **whole, **rest, **changes})


def test_a_report_is_one_row_for_all_one_a_source_and_one_a_score() -> None:
    rows = table_of(report())
    assert [row["what"] for row in rows] == ["all held-out text", "source code", "source wiki (en)", "task endings"]
    assert rows[2]["figures"] == "loss 2.7500, perplexity 7.4, 1.5000 bits per byte, accuracy 40.00%"
    assert rows[3] == {"what": "task endings", "figures": "acc 0.5000 ± 0.1000 (higher is better)", "over": "9 samples"}


def test_metrics_have_names_that_mlflow_takes() -> None:
    metrics = metrics_of(report())
    assert metrics["eval/loss"] == 2.0
    assert metrics["eval/sources/wiki _en_/loss"] == 2.75
    assert metrics["eval/endings/acc"] == 0.5
    odd = [*report().sources, report().sources[0].model_copy(update={"source": "./a/../b"})]
    assert metrics_of(report(sources=tuple(odd)))["eval/sources/_/a/_/b/loss"] == 1.5
    masked = metrics_of(report(bits_per_byte=None, sources=()))
    assert masked.keys() == {"eval/loss", "eval/perplexity", "eval/accuracy", "eval/endings/acc"}

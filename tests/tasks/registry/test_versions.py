"""A finished run in the registry: version, aliases, verdict, lineage, and what MLflow itself makes of it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tasks.comparison.reproduce import find_original
from tasks.inference.onnx_generator import TextGenerator
from tasks.promotion.journal import history
from tasks.promotion.judge import note_verdict, terms_of
from tasks.promotion.register import register_model
from tasks.registry.logged_model import link_or_copy
from tasks.registry.models import aliases_of, lineage, resolve
from tests.support.configs import read_plan
from tests.support.mlflow_store import Store
from training.config.promotion import GatesConfig, RegistryConfig
from training.config.run import RunConfig
from training.records.results import EvalReport, ExportedModel, SourceFigures, TaskScore

GREEDY = {"new_tokens": 12, "temperature": 0.0}


def aliases(store: Store) -> dict[str, int]:
    return aliases_of(MlflowClient(store.uri), "tiny")


def versions(store: Store) -> list[int]:
    return sorted(int(version.version) for version in MlflowClient(store.uri).search_model_versions("name='tiny'"))


def test_the_first_version_becomes_champion(store: Store) -> None:
    model = store.registered("one", loss=3.0)
    assert (model.name, model.version, model.alias) == ("tiny", 1, "champion")
    assert "there is no champion yet" in model.verdict
    assert aliases(store) == {"champion": 1}


def test_a_better_run_takes_the_champions_place_and_a_worse_one_stays_challenger(store: Store) -> None:
    store.registered("one", loss=3.0)
    worse = store.registered("two", loss=3.5, checkpoint="d")
    assert (worse.version, worse.alias) == (2, "challenger")
    assert "0.5000 nats per token above" in worse.verdict
    assert aliases(store) == {"champion": 1, "challenger": 2}
    better = store.registered("three", loss=2.5, checkpoint="e")
    assert (better.version, better.alias) == (3, "champion")
    assert aliases(store) == {"champion": 3}
    verdict = MlflowClient(store.uri).get_model_version("tiny", "3").tags["shardline.verdict"]
    assert verdict == better.verdict


def test_registering_again_gives_the_same_version_and_moves_nothing(store: Store) -> None:
    one, two = store.finished_run("one", loss=3.0), store.finished_run("two", loss=2.5, checkpoint="d")
    first = register_model(one, tracking_uri=store.uri)
    assert register_model(one, tracking_uri=store.uri) == first
    register_model(two, tracking_uri=store.uri)
    again = register_model(one, tracking_uri=store.uri)
    assert (again.version, again.alias) == (1, "")  # no longer champion, and registering does not bring it back
    assert again.verdict == first.verdict
    assert versions(store) == [1, 2]
    assert aliases(store) == {"champion": 2}


def test_another_checkpoint_of_a_run_is_another_version(store: Store) -> None:
    run_dir = store.finished_run("one", loss=3.0)
    register_model(run_dir, tracking_uri=store.uri)
    for path in ("result.json", "eval.json", "export/export.json"):
        (run_dir / path).write_text((run_dir / path).read_text().replace("c" * 64, "d" * 64))
    (run_dir / "eval.json").write_text((run_dir / "eval.json").read_text().replace('"loss": 3.0', '"loss": 2.9'))
    assert register_model(run_dir, tracking_uri=store.uri).version == 2
    assert aliases(store) == {"champion": 2}


def test_a_registration_that_died_is_finished_by_the_next(store: Store) -> None:
    """The state after a kill between any two writes: the model begun, the version made, the alias set."""
    run_dir = store.finished_run("one", loss=3.0)
    register_model(run_dir, tracking_uri=store.uri)
    client = MlflowClient(store.uri)
    client.delete_model_version_tag("tiny", "1", "shardline.verdict")
    assert register_model(run_dir, tracking_uri=store.uri).alias == "champion"
    assert aliases(store) == {"champion": 1}

    client.delete_model_version_tag("tiny", "1", "shardline.verdict")
    client.delete_registered_model_alias("tiny", "champion")
    assert register_model(run_dir, tracking_uri=store.uri).alias == "champion"

    client.delete_registered_model("tiny")
    model = client.search_logged_models([store.experiment_id])[0]
    client.finalize_logged_model(model.model_id, "PENDING")
    assert register_model(run_dir, tracking_uri=store.uri).alias == "champion"
    assert [found.model_id for found in client.search_logged_models([store.experiment_id])] == [model.model_id]


def test_two_registrations_at_once_are_judged_one_after_the_other(store: Store) -> None:
    """Whichever is first, the best is champion in the end, and each move names the version that it replaced."""
    store.registered("one", loss=3.0)
    rivals = [store.finished_run(f"run-{loss}", loss=loss, checkpoint=each) for loss, each in ((2.5, "d"), (2.0, "e"))]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rival: register_model(rival, tracking_uri=store.uri), rivals))
    best = made[1].version
    assert aliases(store)["champion"] == best
    moves = history(MlflowClient(store.uri), "tiny")
    assert [move.version for move in moves][::-1] in ([1, best], [1, made[0].version, best])
    assert [move.replaces for move in moves] == [*[move.version for move in moves[1:]], None]


def test_other_data_cannot_be_compared_until_forced(store: Store) -> None:
    store.registered("one", loss=3.0)
    other = store.registered("two", loss=1.0, checkpoint="d", dataset="b")
    assert other.alias == "challenger"
    assert "shardline promote tiny --version 2 --force" in other.verdict
    client = MlflowClient(store.uri)
    note_verdict(client, "tiny", 2, "passed: asked for with --force", by="ann")
    verdict, _, card = client.get_model_version("tiny", "2").description.partition("\n\n---\n\n")
    assert verdict.startswith("Verdict: passed: asked for with --force (20")
    assert "by ann)" in verdict
    assert re.search(r"\| loss \| &emsp;not passed: .* other data .*--force", verdict)
    assert "| parity | &emsp;passed: the export is within its parity bounds" in verdict
    assert card.startswith("Loss 1.0000, ")
    assert "Verdict" not in card, "the new verdict takes the place of the old one"


def test_a_run_whose_parity_failed_is_not_promoted(store: Store) -> None:
    run_dir = store.finished_run("one", loss=3.0)
    record = ExportedModel.read(run_dir / "export" / "export.json")
    graphs = [graph.model_copy(update={"max_logit_difference": 1.0}) for graph in record.parity.graphs]
    failed = record.parity.model_copy(update={"graphs": tuple(graphs)})
    record.model_copy(update={"parity": failed}).write(run_dir / "export" / "export.json")
    model = register_model(run_dir, tracking_uri=store.uri)
    assert model.alias == "challenger"
    assert "the export is out of its parity bounds" in model.verdict


def test_mlflow_links_the_version_to_run_data_and_model(store: Store) -> None:
    run_dir = store.finished_run("one", loss=3.0)
    mlflow_run_id = read_plan(run_dir).mlflow_run_id
    register_model(run_dir, tracking_uri=store.uri)
    client = MlflowClient(store.uri)
    version, run = client.get_model_version("tiny", "1"), client.get_run(mlflow_run_id)
    assert version.run_id == mlflow_run_id
    model = client.get_logged_model(version.tags["shardline.model_id"])
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "tiny", "version": 1}]
    assert (model.source_run_id, model.status) == (mlflow_run_id, "READY")
    assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]
    assert [given.dataset.digest for given in run.inputs.dataset_inputs] == ["a" * 36]
    metrics = {metric.key: (metric.value, metric.dataset_digest) for metric in model.metrics}
    assert metrics["registered/val_loss"] == (3.0, "a" * 36)
    assert run.info.status == "RUNNING"  # the flow closes it, not the registration


def test_mlflows_pages_tell_what_a_version_scored_and_on_what_terms(store: Store) -> None:
    config = read_plan(store.exported).config
    registry = RegistryConfig(model_name="verse", licence="CC0-1.0", notes="Writes **verse**.")
    gates = GatesConfig(tasks={"rhymes": 0.5}, approval="tag")
    config = config.model_copy(update={"registry": registry, "gates": gates})
    run_dir = store.finished_run("one", loss=3.0, config=config)
    scores = {"stderr": None, "samples": 9, "higher_is_better": True}
    figures = {"perplexity": 12.2, "bits_per_byte": 3.6, "accuracy": 0.1, "tokens": 40, "text_bytes": 40}
    report = EvalReport.read(run_dir / "eval.json").model_copy(
        update={
            "sources": (SourceFigures(source="a/b.txt", loss=2.5, **figures),),
            "tasks": (TaskScore(task="rhymes", metric="acc", value=0.75, **scores),),
        }
    )
    report.write(run_dir / "eval.json")
    model = register_model(run_dir, tracking_uri=store.uri)
    assert (model.name, model.alias, model.verdict) == ("verse", "challenger", "")  # somebody must approve
    client = MlflowClient(store.uri)
    version = client.get_model_version("verse", "1")
    for sentence in (
        "Loss 3.0000, ",
        "| measured on | &emsp;399 held-out tokens |",
        "`shardline reproduce one`",
        "commit `000000000000`",
        "CC0-1.0",
        "**verse**",
        "| a/b.txt | &emsp;2.5000 |",
        "| rhymes | &emsp;acc | &emsp;0.7500 |",
    ):
        assert sentence in version.description
    assert len(version.tags) == 11, f"what people filter by, its card has the rest: {version.tags}"
    back = lineage("verse/1", tracking_uri=store.uri)
    assert (back["licence"], back["notes"]) == ("CC0-1.0", "Writes **verse**.")
    assert back["git_commit"] == "0" * 40
    assert terms_of(version, tracking_uri=store.uri).gates == gates
    logged = client.get_logged_model(version.tags["shardline.model_id"])
    metrics = {metric.key.removeprefix("registered/"): metric.value for metric in logged.metrics}
    assert metrics["source/a_b.txt/loss"] == 2.5
    assert metrics["task/rhymes/acc"] == 0.75
    assert metrics["parity/argmax_agreement"] == 1.0


def test_gates_that_a_resume_changed_are_in_force_until_the_version_is_judged(store: Store) -> None:
    plan = read_plan(store.exported)

    def gated(**gates: Any) -> RunConfig:
        return plan.config.model_copy(update={"gates": GatesConfig(**gates)})

    run_dir = store.finished_run("one", loss=3.0, config=gated(max_p95_ms=50))
    client, registered = MlflowClient(store.uri), register_model(run_dir, tracking_uri=store.uri)
    assert (registered.alias, registered.verdict) == ("challenger", "")
    for gates, alias in (({"approval": "tag"}, "challenger"), ({}, "champion")):
        latest = read_plan(run_dir).model_copy(update={"config": gated(**gates)})
        latest.write(run_dir / "plan.json")
        again = register_model(run_dir, tracking_uri=store.uri)
        assert (again.version, again.alias) == (registered.version, alias)
        version = client.get_model_version(again.name, str(again.version))
        assert terms_of(version, tracking_uri=store.uri).gates == GatesConfig(**gates)


def test_mlflow_loads_it_and_says_the_same_text(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    import pandas as pd

    store.registered("one", loss=3.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    loaded = mlflow.pyfunc.load_model("models:/tiny@champion")
    generator = TextGenerator(resolve("tiny", tracking_uri=store.uri).export_dir)
    prompts = ["def add(", "größer"]
    greedy = [generator.generate(prompt, **GREEDY) for prompt in prompts]
    assert loaded.predict(pd.DataFrame({"prompt": prompts}), params=GREEDY) == greedy
    assert loaded.predict([{"prompt": prompt} for prompt in prompts], params=GREEDY) == greedy
    sampled = {"new_tokens": 9, "temperature": 1.0, "top_k": 5, "seed": 7}
    assert loaded.predict([{"prompt": "x"}], params=sampled) == [generator.generate("x", **sampled)]
    assert [spec.name for spec in loaded.metadata.signature.params] == ["new_tokens", "temperature", "top_k", "seed"]
    assert loaded.input_example is not None
    refusals: list[tuple[object, dict[str, object], str]] = [
        (pd.DataFrame({"prompt": ["x", None]}), {}, "row 1 of the column prompt is nan, which is not text"),
        ([{"prompt": b"x"}], {}, "row 0 of the column prompt is b'x', which is not text"),
        ([{"prompt": ["x", "y"]}], {}, r"row 0 of the column prompt is \['x', 'y'\], which is not text"),
        ([{"prompt": "x"}], {"new_tokens": None}, "new_tokens has no value: leave it out"),
        ([{"prompt": "x"}], {"new_tokens": -1}, "new_tokens = -1, .*: none may be below 0"),
    ]
    for given, params, why in refusals:
        with pytest.raises(MlflowException, match=why):
            loaded.predict(given, params=params)


@pytest.mark.slow
def test_a_masked_model_is_registered_and_says_what_it_cannot_do(
    store: Store, exported_masked_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    run_dir = replace(store, exported=exported_masked_run).finished_run("bert", loss=3.0)
    model = register_model(run_dir, tracking_uri=store.uri)
    assert (model.version, model.alias) == (1, "champion")
    back = lineage("tiny", tracking_uri=store.uri)
    assert (back["config"]["model"]["architecture"], back["evaluation"]["bits_per_byte"]) == ("bert", None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    with pytest.raises(ValueError, match="is a masked model: it fills gaps"):
        mlflow.pyfunc.load_model("models:/tiny@champion").predict([{"prompt": "x"}])


def test_the_weights_are_linked_not_copied_on_their_way_to_the_registry(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = store.finished_run("one", loss=3.0)
    copied: list[str] = []
    log_artifacts = MlflowClient.log_model_artifacts

    def look(client: MlflowClient, model_id: str, local_dir: str) -> None:
        exported = {path.name: path for path in (run_dir / "export").iterdir()}
        sent = {path.name: path for path in (Path(local_dir) / "artifacts" / "export").iterdir()}
        assert sent.keys() == exported.keys()
        copied.extend(name for name, path in sent.items() if not path.samefile(exported[name]))
        log_artifacts(client, model_id, local_dir)

    monkeypatch.setattr(MlflowClient, "log_model_artifacts", look)
    register_model(run_dir, tracking_uri=store.uri)
    assert copied == ["export.json"]
    export = resolve("tiny", tracking_uri=store.uri).export_dir
    assert (export / "model.onnx").read_bytes() == (run_dir / "export" / "model.onnx").read_bytes()
    size = next(line for line in (export.parents[1] / "MLmodel").read_text().splitlines() if "model_size_bytes" in line)
    assert int(size.split()[1]) > sum(path.stat().st_size for path in export.iterdir())


def test_where_links_cannot_be_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_file_system(*paths: object, **options: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    (tmp_path / "a").write_text("weights")
    monkeypatch.setattr(os, "link", other_file_system)
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "weights"
    assert not (tmp_path / "b").samefile(tmp_path / "a")


def test_a_moved_home_has_its_models_and_a_missing_one_has_its_true_cause(
    champion: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = champion.folder.with_name(f"{champion.folder.name}-moved")
    champion.folder.rename(moved)
    monkeypatch.setenv("SHARDLINE_HOME", str(moved))
    uri = f"sqlite:///{moved}/mlflow.db"
    assert resolve("tiny", tracking_uri=uri).export_dir.is_relative_to(moved / "artifacts")
    client = MlflowClient(uri)
    run_id = client.get_model_version("tiny", "1").run_id
    client.delete_run(run_id)
    client._tracking_client.store._hard_delete_run(run_id)  # as `mlflow gc` does
    assert lineage("tiny", tracking_uri=uri)["run"]["status"] == "unknown: MLflow no longer has its run"
    with pytest.raises(ValueError, match=f"MLflow has no run of 'tiny@champion' any more: {run_id} was removed"):
        find_original("tiny@champion")
    (export,) = moved.glob("artifacts/models/*/artifacts/artifacts/export")
    shutil.rmtree(export)
    with pytest.raises(
        ValueError, match=r"tiny \(version 1\) has no files on this machine: .* `mlflow gc` or somebody"
    ):
        resolve("tiny", tracking_uri=uri)


def test_unfinished_runs_are_refused_with_what_is_missing(store: Store) -> None:
    run_dir = store.finished_run("one", loss=3.0)
    (run_dir / "eval.json").rename(store.folder / "eval.json")
    with pytest.raises(ValueError, match=r"has no eval\.json: finish it with `shardline resume one`"):
        register_model(run_dir, tracking_uri=store.uri)
    stale = (store.folder / "eval.json").read_text().replace("c" * 64, "d" * 64)
    (run_dir / "eval.json").write_text(stale)
    with pytest.raises(ValueError, match=r"eval\.json is of step 8"):
        register_model(run_dir, tracking_uri=store.uri)
    assert not Path("mlflow.db").exists()  # nothing went to MLflow's default store

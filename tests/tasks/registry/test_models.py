"""What the registry is asked: references, lineage, and errors that say what is there."""

from __future__ import annotations

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from safetensors.numpy import load_file, save_file

from tasks.promotion.register import register_model
from tasks.registry.models import _cached_folder, example_prompt, lineage, local_folder, resolve
from tasks.tracking.client import CLIENT_ENVIRONMENT, registry_client
from tasks.workspace.paths import keep_password_apart, tracking_uri
from tests.support.configs import read_plan
from tests.support.mlflow_store import Store
from training.config.credentials import without_url_credentials
from training.records.record import sha256_file
from training.records.results import ExportedModel


@pytest.mark.parametrize("ref", ["tiny", "tiny@champion", "tiny/1"])
def test_references_lead_to_the_files_where_they_are(store: Store, ref: str) -> None:
    run_dir = store.finished_run("one", loss=3.0)
    register_model(run_dir, tracking_uri=store.uri)
    model = resolve(ref, tracking_uri=store.uri)
    assert (model.name, model.version, model.aliases) == ("tiny", 1, ("champion",))
    assert model.export_dir.is_relative_to(store.folder / "artifacts")
    record = ExportedModel.read(model.export_dir / "export.json")
    assert {path.name for path in model.export_dir.iterdir()} == {*record.files, "export.json"}


@pytest.mark.parametrize(
    "ref",
    ["", "tiny@", "@champion", "tiny/x", "tiny/", "tiny/1@champion", "a/b/1", "a\n@champion", "a/１", "a@b\n"],
)
def test_references_that_name_nothing_are_refused(store: Store, ref: str) -> None:
    with pytest.raises(ValueError, match="NAME@champion or NAME/3"):
        resolve(ref, tracking_uri=store.uri)


def test_lineage_walks_back_to_everything_without_the_runs_folder(store: Store) -> None:
    run_dir = store.finished_run("one", loss=3.0, commit="c0ffee")
    plan = read_plan(run_dir)
    register_model(run_dir, tracking_uri=store.uri)
    run_dir.rename(store.folder / "away")
    back = lineage("tiny@champion", tracking_uri=store.uri)
    json.dumps(back)
    assert back["model"] == {"name": "tiny", "version": 1, "aliases": ["champion"]}
    assert back["run"] == {"run_id": "one", "mlflow_run_id": plan.mlflow_run_id, "status": "RUNNING"}
    assert back["git_commit"] == "c0ffee"
    assert back["config"] == plan.config.model_dump(mode="json")
    assert back["dataset"]["fingerprint"] == "a" * 64
    assert len(back["tokenizer"]["sha256"]) == 64
    assert back["checkpoint"] == {"path": "checkpoints/8", "sha256": "c" * 64, "step": 8}
    assert back["evaluation"]["loss"] == 3.0
    assert [graph["argmax_agreement"] for graph in back["parity"]["graphs"]] == [1.0, 1.0, 1.0]
    assert back["reproduce"] == "shardline reproduce one"


def test_a_file_that_is_not_the_one_that_was_registered_is_refused(store: Store) -> None:
    store.registered("one", loss=3.0)
    weights = resolve("tiny", tracking_uri=store.uri).export_dir / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"model\.safetensors is missing, or not the file that was registered"):
        resolve("tiny@champion", tracking_uri=store.uri)
    weights.write_bytes(whole)
    assert resolve("tiny@champion", tracking_uri=store.uri).export_dir == weights.parent


def test_an_export_with_other_tensors_than_its_model_is_neither_registered_nor_served(store: Store) -> None:
    run_dir, name = store.finished_run("one", loss=3.0), "model.layers.1.mlp.up_proj.weight"
    lose(run_dir / "export", name)
    with pytest.raises(ValueError, match=rf"export does not have the model's tensors: it lacks {name}: restore"):
        register_model(run_dir, tracking_uri=store.uri)
    store.registered("two", loss=3.0)
    lose(resolve("tiny", tracking_uri=store.uri).export_dir, name)
    with pytest.raises(ValueError, match=rf"it lacks {name}: restore"):
        resolve("tiny", tracking_uri=store.uri)


def lose(folder: Path, name: str) -> None:
    """Write an export again without one tensor; its record has the new file's hash."""
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    path.unlink()  # the registry's files are links to the run's
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, path, metadata={"format": "pt"})
    record = ExportedModel.read(folder / "export.json")
    files = record.files | {path.name: sha256_file(path)}
    record.model_copy(update={"files": files}).write(folder / "export.json")


@pytest.mark.slow
def test_an_mlflow_that_is_away_is_named_soon_in_one_line_and_without_the_password(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in CLIENT_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    began = time.monotonic()
    with pytest.raises(RuntimeError) as stopped:
        registry_client("http://ada:s%40crat@127.0.0.1:9")
    assert time.monotonic() - began < 12
    message = str(stopped.value)
    assert message.startswith("MLflow at http://***@127.0.0.1:9 does not answer (API request to http://***@127.0.0.1:9")
    assert message.endswith("start it, or unset MLFLOW_TRACKING_URI")
    assert not any(secret in message for secret in ("ada", "s%40crat", "s@crat"))
    assert stopped.value.__suppress_context__  # nor does a traceback quote it
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("uri", "printed"),
    [
        ("http://ada:pa@ss@mlflow:5000", "http://***@mlflow:5000"),
        ("postgresql://ada:secret@db/mlflow", "postgresql://***@db/mlflow"),
        ("https://token@mlflow", "https://***@mlflow"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("sqlite:////home/ada@work/mlflow.db", "sqlite:////home/ada@work/mlflow.db"),
        ("mlruns", "mlruns"),
    ],
)
def test_a_uri_is_shown_without_credentials(uri: str, printed: str) -> None:
    assert without_url_credentials(uri) == printed


def test_a_password_in_the_uri_reaches_the_server_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's errors quote the URI, and a flow's end up in Prefect's database, with their tracebacks."""
    authorizations: list[str] = []

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            authorizations.append(self.headers.get("authorization", ""))
            self.close_connection = True  # and no answer

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://ada:pa%40ss:word@127.0.0.1:{server.server_port}")
        for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
            monkeypatch.setenv(name, "another")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        keep_password_apart()
        with pytest.raises(MlflowException) as failure:
            MlflowClient(tracking_uri()).get_run("none")
        server.shutdown()
    assert f"127.0.0.1:{server.server_port}" in str(failure.value)
    assert "pa%40ss" not in str(failure.value)
    assert authorizations == [f"Basic {base64.b64encode(b'ada:pa@ss:word').decode()}"]


def test_a_version_whose_evaluation_cannot_be_read_has_no_example_of_a_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "eval.json").write_text('{"of": "another version"}')
    assert example_prompt(tmp_path) == ""
    assert "no example of a prompt: " in caplog.text
    assert "eval.json" in caplog.text


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a%2e%2e/..%2f..%2fevil"])
def test_a_registry_that_names_a_version_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    version = ModelVersion(name=name, version="1", creation_timestamp=0, source="s3://bucket/models/1")
    with pytest.raises(ValueError, match=r"https://registry names the file .*evil-1-"):
        _cached_folder(version, tracking_uri="https://registry", cache_dir=tmp_path / "models")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a/../../../evil", "%2e%2e/%2e%2e/evil"])
def test_artifacts_that_lead_elsewhere_are_not_downloaded(name: str, tmp_path: Path) -> None:
    """MLflow's own check, of which this sees that an upgrade keeps it."""

    class Artifacts(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            listed = {"files": [{"path": name, "is_dir": False, "file_size": 4}]}
            content = json.dumps(listed).encode() if "?" in self.path else b"evil"
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *given: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Artifacts) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        source = f"http://127.0.0.1:{server.server_port}/api/2.0/mlflow-artifacts/artifacts/m"
        version = ModelVersion(name="m", version="1", creation_timestamp=0, source=source)
        scratch = tmp_path / "a" / "b"
        scratch.mkdir(parents=True)
        with pytest.raises(MlflowException, match=r"[Ii]nvalid path"):
            local_folder(version, tracking_uri=f"sqlite:///{tmp_path}/x.db", scratch=scratch)
        server.shutdown()
    assert not list(tmp_path.rglob("evil"))

"""infra/compose.yaml's services for real, as processes: real Postgres, Prefect, MLflow, worker, server, with passwords.

A run is started as from Prefect's form and another from the command line; then everything that they left is searched
for secrets; then the stack is lost, and comes back from its backup.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import REPO
from tests.support.stack_processes import Stack, started

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

END_STATES = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
WORDS = ["the", "sea", "sky", "a", "ship", "sails", "under", "stars", "and", "winds", "carry", "songs"]
LAID_OUT = {".env", "secrets", "postgres", "prefect", "artifacts", "home", "corpora", "triton", "logs", "tmp"}
LAID_OUT |= {"prometheus", "grafana", "verses.yaml"}
CORPUS = "some texts; touch canary"
HOSTILE = ("$(touch canary)", "`touch canary`", "'; touch canary; '", "<script>alert(1)</script>", "{0.__class__} %s")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with started({"hf_token": "hf_planted_in_its_file_8b1d0c"}) as stack:
        write_corpus(stack)
        yield stack


def write_corpus(stack: Stack) -> None:
    rng = random.Random(5)
    corpus = stack.folder / "corpora" / CORPUS
    corpus.mkdir(exist_ok=True)
    for number in range(40):
        lines = [" ".join(rng.choices(WORDS, k=8)) for _ in range(12)]
        (corpus / f"{number:02d} $(touch canary).txt").write_text("\n".join(lines))


def config(stack: Stack, **changes: Any) -> dict[str, Any]:
    return {
        "name": "verses",
        "data": {"path": f"{stack.folder}/corpora/{CORPUS}", "tokenizer": {"kind": "bytes"}, "split": "documents"},
        "model": {"layers": 1, "width": 32, "heads": 2},
        "train": {"steps": 6, "context": 32, "global_batch": 8, "warmup_steps": 2, "log_every_steps": 1},
        "parallel": {"strategy": "ddp", "ranks": 2, "precision": "fp32"},
        "evaluation": {"every_steps": 3, "prompts": ["the ", *HOSTILE], "sample_tokens": 4},
        "registry": {"licence": HOSTILE[0], "notes": " ".join(HOSTILE)},
    } | changes


@pytest.fixture(scope="module")
def shown(stack: Stack) -> set[str]:
    """Command lines of all processes of this machine while two runs were made: one by the worker, one by the CLI."""
    seen: set[str] = set()
    state = _run_by_worker(stack, config(stack), seen)
    assert state["type"] == "COMPLETED", state
    failed = _run_by_worker(stack, config(stack, data={"path": f"{stack.folder}/triton"}), seen)
    assert failed["type"] == "FAILED"
    _run_by_cli(stack, seen)
    return seen


def _run_by_worker(stack: Stack, parameters: dict[str, Any], seen: set[str]) -> dict[str, Any]:
    begun = stack.submit(parameters)
    while True:
        seen |= _command_lines()
        state = stack.prefect(f"/flow_runs/{begun}")["state"]
        if state["type"] in END_STATES:
            return dict(state)
        time.sleep(0.1)


def _run_by_cli(stack: Stack, seen: set[str]) -> None:
    """With the password in MLflow's URI, as many do it."""
    path = stack.folder / "verses.yaml"  # JSON is YAML
    path.write_text(json.dumps(config(stack)))
    unset = ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_HOME")
    environment = {key: value for key, value in os.environ.items() if key not in unset} | {
        "SHARDLINE_HOME": f"{stack.folder}/home",
        "MLFLOW_TRACKING_URI": stack.url("mlflow").replace("//", f"//admin:{stack.secret('mlflow_admin_password')}@"),
        "PREFECT_API_URL": f"{stack.url('prefect')}/api",
        "PREFECT_API_AUTH_STRING": stack.secret("prefect_auth"),
        "HF_TOKEN": stack.secret("hf_token"),
    }
    with (stack.logs / "cli.log").open("wb") as log:
        command = [sys.executable, "-m", "flows.cli", "--verbose", "pretrain", str(path)]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=REPO)
        while process.poll() is None:
            seen |= _command_lines()
            time.sleep(0.1)
    assert process.returncode == 0, (stack.logs / "cli.log").read_text()


def _command_lines() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended
            continue
    return found


def _mlflow(stack: Stack, path: str, content: dict[str, Any] | None, *, user: str = "admin") -> tuple[int, Any]:
    password = {"admin": "mlflow_admin_password", "serving": "mlflow_serving_password"}[user]
    body = None if content is None else json.dumps(content).encode()
    credentials = f"{user}:{stack.secret(password)}"
    status, text = stack.ask("mlflow", f"/api/2.0/mlflow/{path}", credentials=credentials, body=body)
    return status, json.loads(text) if status == 200 else text


def test_without_credentials_nothing_answers_but_health(stack: Stack) -> None:
    search = b'{"max_results": 5}'
    for credentials in ("", "admin:admin", "shardline:", "admin:password1234"):
        for method in ("flows/filter", "deployments/filter", "work_pools/filter"):
            assert stack.ask("prefect", f"/api/{method}", credentials=credentials, body=b"{}")[0] == 401
        for path in ("/api/2.0/mlflow/experiments/search", "/ajax-api/2.0/mlflow/experiments/search"):
            assert stack.ask("mlflow", path, credentials=credentials, body=search)[0] == 401
        assert stack.ask("mlflow", "/", credentials=credentials)[0] == 401
    assert stack.ask("prefect", "/api/health")[0] == stack.ask("mlflow", "/health")[0] == 200
    assert stack.prefect("/deployments/filter", {})
    assert _mlflow(stack, "experiments/search", {"max_results": 5})[0] == 200


def test_mlflow_answers_under_its_own_names_only(stack: Stack) -> None:
    admin = f"admin:{stack.secret('mlflow_admin_password')}"
    for host, status in (("attacker.example", 403), (f"localhost:{stack.ports['mlflow']}", 200)):
        assert stack.ask("mlflow", "/", credentials=admin, host=host)[0] == status


def test_neither_server_can_open_the_others_database(stack: Stack) -> None:
    for user, database in (("prefect", "mlflow"), ("prefect", "mlflow_auth"), ("mlflow", "prefect")):
        environment = stack.in_postgres() | {"PGHOST": "127.0.0.1", "PGUSER": user}
        environment["PGPASSWORD"] = stack.secret(f"{user}_database_password")
        done = subprocess.run(
            ["psql", "-d", database, "-c", "select 1"], env=environment, capture_output=True, text=True
        )
        assert "permission denied for database" in done.stderr
        own = subprocess.run(["psql", "-d", user, "-c", "select 1"], env=environment, capture_output=True)
        assert own.returncode == 0


def test_a_run_by_the_worker_is_in_both_systems_and_its_model_is_served(stack: Stack, shown: set[str]) -> None:
    status, found = _mlflow(stack, "experiments/get-by-name?experiment_name=verses", None)
    experiment = found["experiment"]["experiment_id"]
    runs = _mlflow(stack, "runs/search", {"experiment_ids": [experiment]})[1]["runs"]
    assert sorted(run["info"]["status"] for run in runs) == ["FAILED", "FINISHED", "FINISHED"]
    version = {"name": "verses", "alias": "champion", "version": "1"}
    assert _mlflow(stack, "registered-models/alias", version, user="serving")[0] == 403, "it may only read"

    stack.start("serve")
    prompt = json.dumps({"prompt": "the ", "new_tokens": 4}).encode()
    assert stack.ask("serve", "/generate", body=prompt)[0] == 401
    status, answer = stack.ask("serve", "/generate", body=prompt, credentials=stack.secret("serve_tokens"))
    assert status == 200, answer
    stack.stop("serve")


def test_no_secret_is_in_command_lines_files_or_databases(stack: Stack, shown: set[str]) -> None:
    secrets = stack.secrets
    assert len(secrets) == 10
    places = {f"command line {line[:60]}": line.encode() for line in shown}
    for path in stack.folder.rglob("*"):
        inside = path.relative_to(stack.folder).parts[0]
        if path.is_file() and inside not in {"secrets", "postgres"}:
            places[str(path)] = path.read_bytes()
    for database in ("prefect", "mlflow", "mlflow_auth"):
        command = ["pg_dump", "--dbname", database]
        places[f"database {database}"] = subprocess.check_output(command, env=stack.in_postgres(), cwd="/")
    for log in ("postgres", "prefect", "mlflow", "worker", "serve", "cli"):
        assert places[f"{stack.logs}/{log}.log"] or log == "serve"
    leaks = [
        f"{name} is in {where}"
        for name, secret in secrets.items()
        for where, content in places.items()
        if secret.encode() in content
    ]
    assert leaks == []
    assert b"verses" in places["database prefect"], "the dump holds what runs leave"


def test_text_from_the_config_is_never_a_command_or_a_page(stack: Stack, shown: set[str]) -> None:
    for folder in (stack.folder, REPO, Path.cwd()):
        planted = [path for path in folder.rglob("canary") if path.is_file()]  # transformers has a folder of that name
        assert planted == []
    pages = [path for path in stack.folder.rglob("*.html") if "huggingface" not in path.parts]
    assert [path for path in pages if "<script>alert" in path.read_text()] == []
    notes = {path.name for path in stack.folder.glob("*") if path.name not in LAID_OUT}
    assert notes == set(), "what a run makes is in the home or an artifact"


def test_a_lost_stack_comes_back_from_its_backup(stack: Stack, shown: set[str], tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        _, experiment = _mlflow(stack, "experiments/get-by-name?experiment_name=verses", None)
        search = {"experiment_ids": [experiment["experiment"]["experiment_id"]]}
        runs = sorted(_mlflow(stack, "runs/search", search)[1]["runs"], key=lambda run: run["info"]["run_id"])
        finished = next(run["info"]["run_id"] for run in runs if run["info"]["status"] == "FINISHED")
        history = f"metrics/get-history?run_id={finished}&metric_key=loss"
        flow_runs = stack.prefect("/flow_runs/filter", {})
        model = _mlflow(stack, "registered-models/get?name=verses", None)[1]["registered_model"]
        versions = _mlflow(stack, "model-versions/search?filter=name%3D%27verses%27", None)[1]["model_versions"]
        for version in versions:
            version["tags"].sort(key=lambda tag: tag["key"])
        return {
            "runs": runs,
            "loss": _mlflow(stack, history, None)[1]["metrics"],
            "aliases": {alias["alias"]: alias["version"] for alias in model["aliases"]},
            "versions": sorted(versions, key=lambda version: int(version["version"])),
            "flow runs": sorted((run["id"], run["state_type"]) for run in flow_runs if "config" in run["parameters"]),
        }

    before, backup = state(), tmp_path / "backup"
    assert len(before["loss"]) == 6
    assert "champion" in before["aliases"]
    _script(stack, "backup.sh", str(backup), cwd=stack.folder)
    assert backup.stat().st_mode & 0o077 == 0

    stack.stop()
    shutil.rmtree(stack.folder)
    _script(stack, "restore.sh", "files", str(backup), str(stack.folder), cwd=tmp_path)
    stack.init()
    stack.start("postgres")
    _script(stack, "restore.sh", "databases", str(backup), cwd=stack.folder)
    stack.start("prefect", "mlflow", "worker", "serve")

    assert state() == before
    prompt = json.dumps({"prompt": "the ", "new_tokens": 4}).encode()
    assert stack.ask("serve", "/generate", body=prompt, credentials=stack.secret("serve_tokens"))[0] == 200
    write_corpus(stack)  # corpora are no part of a backup
    again = _run_by_worker(stack, config(stack), set())
    assert again["type"] == "COMPLETED", again


def test_a_damaged_backup_is_refused(stack: Stack, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    _script(stack, "backup.sh", str(backup), cwd=stack.folder)
    with (backup / "mlflow.dump").open("r+b") as file:
        file.seek(100)
        file.write(b"damage")
    done = _script(stack, "restore.sh", "files", str(backup), str(tmp_path / "new"), cwd=tmp_path, expect=1)
    assert "mlflow.dump: FAILED" in done.stdout + done.stderr


def _script(stack: Stack, name: str, *arguments: str, cwd: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    inside = [f"{key}={value}" for key, value in stack.in_postgres().items() if key.startswith("PG")]
    done = subprocess.run(
        [REPO / "infra" / name, *arguments],
        env={**os.environ, "IN_POSTGRES": f"env {' '.join(inside)}"},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done

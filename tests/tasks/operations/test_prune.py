"""Old runs make room; what a registered version is traced back to stays."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from flows.cli.command import main
from tasks.operations.prune import DAY_S, Pruning, prune
from tasks.promotion.register import register_model
from tasks.registry.models import lineage, resolve
from tasks.workspace.locks import owned
from tests.support.configs import read_plan
from tests.support.mlflow_store import Store
from training.records.token_shards import TokenShards

OLD = 40 * DAY_S


@pytest.fixture
def home(store: Store, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = store.folder / "runs"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("SHARDLINE_HOME", str(folder))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    return folder


@pytest.fixture
def make(store: Store, home: Path) -> Callable[..., Path]:
    def make_run(name: str, *, shards: str, **model: Any) -> Path:
        """A finished run on home/tokens/SHARDS, as long ago as all that the tests make."""
        folder = store.finished_run(name, loss=3.0)
        plan = json.loads((folder / "plan.json").read_bytes())
        tokens = home / "tokens" / shards
        if not tokens.exists():
            tokens.mkdir(parents=True)
            (tokens / "manifest.json").write_bytes((Path(plan["shards_dir"]) / "manifest.json").read_bytes())
        plan["shards_dir"] = str(tokens)
        plan["config"]["model"] |= model
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "lock").touch()
        (folder / "run.json").write_text(json.dumps({name: plan[name] for name in ("format", "mlflow_run_id")}))
        age(home)
        return folder

    return make_run


def age(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - OLD, time.time() - OLD))


def deleted(pruning: Pruning) -> set[str]:
    return {item.path for item in pruning.items if not item.kept}


def why(pruning: Pruning, path: str) -> str:
    (found,) = [item.why for item in pruning.items if item.path == path and item.kept]
    return found


def test_old_runs_go_and_what_a_version_needs_stays(store: Store, home: Path, make: Callable[..., Path]) -> None:
    base = make("base", shards="a")
    old = make("old", shards="b")
    champion = make("champion", shards="c")
    register_model(champion, tracking_uri=store.uri)
    plan = json.loads((champion / "plan.json").read_bytes())
    plan["config"]["model"]["path"] = str(base / "export")  # it was continued from there
    (champion / "plan.json").write_text(json.dumps(plan))
    before = champion / "checkpoints" / "00000000"
    before.mkdir()
    age(home)
    old_run = read_plan(old).mlflow_run_id
    everything = sorted(home.rglob("*"))

    first = prune(older_than_days=30, keep_newest=0, dry_run=True)
    assert sorted(home.rglob("*")) == everything
    assert MlflowClient(store.uri).get_run(old_run).info.lifecycle_stage == "active"

    done = prune(older_than_days=30, keep_newest=0, dry_run=False)
    expected = {"old", "tokens/b", "champion/checkpoints/00000000"}
    assert deleted(first) == deleted(done) == expected
    assert first.freed_bytes == done.freed_bytes > 0
    assert [path for path in everything if not path.exists()] == [
        path for path in everything if any(path.is_relative_to(home / name) for name in expected)
    ]
    assert why(done, "champion") == "tiny/1 was made of it"
    assert why(done, "base") == "champion was continued from it"
    assert why(done, "tokens/c") == "champion may need them"
    assert done.mlflow_runs == (old_run,)
    assert MlflowClient(store.uri).get_run(old_run).info.lifecycle_stage == "deleted"
    assert resolve("tiny@champion", tracking_uri=store.uri).version == 1
    assert lineage("tiny@champion", tracking_uri=store.uri)["run"]["run_id"] == "champion"
    assert deleted(prune(older_than_days=30, keep_newest=0, dry_run=False)) == set()


def test_the_shards_of_a_mixtures_sources_stay_with_it(home: Path, make: Callable[..., Path]) -> None:
    make("old", shards="web")
    make("young", shards="mixture")
    manifest = home / "tokens" / "mixture" / "manifest.json"
    content = TokenShards.read(manifest)
    shards = [
        shard.model_copy(update={"name": f"../web/{shard.name}", "part": 0}) if number == 0 else shard
        for number, shard in enumerate(content.shards)
    ]
    content.model_copy(update={"parts": ("web",), "shards": tuple(shards)}).write(manifest)
    age(home / "tokens" / "web")
    (home / "young" / "plan.json").touch()
    done = prune(older_than_days=30, keep_newest=1, dry_run=False)
    assert deleted(done) == {"old"}
    assert why(done, "tokens/web") == "young may need them"


def test_a_home_that_moved_keeps_the_shards_of_its_runs(
    home: Path, make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("newest", shards="web")
    moved = home.with_name("moved")
    home.rename(moved)
    monkeypatch.setenv("SHARDLINE_HOME", str(moved))
    done = prune(older_than_days=30, keep_newest=1, dry_run=False)
    assert deleted(done) == set()
    assert why(done, "tokens/web") == "newest may need them"


def test_young_runs_the_newest_and_those_at_work_stay(home: Path, make: Callable[..., Path]) -> None:
    for name in ("at work", "young", "newest", "old"):
        make(name, shards=name)
    os.utime(home / "newest" / "plan.json", (time.time() - 35 * DAY_S,) * 2)
    os.utime(home / "young" / "plan.json")
    with owned(home / "at work"):
        done = prune(older_than_days=30, keep_newest=2, dry_run=False)
    assert deleted(done) == {"old", "tokens/old"}
    assert why(done, "at work") == "a process works on it"
    assert why(done, "newest") == "one of the 2 newest"


def test_a_run_that_cannot_be_read_keeps_itself_and_all_shards(home: Path, make: Callable[..., Path]) -> None:
    make("broken", shards="a")
    (home / "broken" / "plan.json").write_text("{")
    age(home)
    done = prune(older_than_days=30, keep_newest=0, dry_run=False)
    assert deleted(done) == set()
    assert "its plan cannot be read" in why(done, "broken")


def test_what_a_killed_call_left_is_deleted(home: Path, make: Callable[..., Path]) -> None:
    make("old", shards="a")
    (home / "old").rename(home / ".pruned-old")
    prune(older_than_days=30, keep_newest=0, dry_run=False)
    assert not (home / ".pruned-old").exists()


def test_without_the_registry_nothing_is_deleted(
    home: Path, make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("old", shards="a")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RuntimeError, match="does not answer"):
        prune(older_than_days=30, keep_newest=0, dry_run=False)
    assert (home / "old" / "plan.json").exists()


def test_the_command_says_what_it_would_delete(
    home: Path, make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    make("old", shards="a")
    assert main(["prune", "--keep-newest", "0", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "40 days old" in out
    assert "would be freed" in out
    assert main(["prune", "--keep-newest", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mlflow_runs"]
    assert not (home / "old").exists()
    assert main(["prune", "--older-than-days", "-1"]) == 2
    assert "older_than_days = -1 is negative: give 0 or more" in capsys.readouterr().err


def test_a_copy_of_a_url_goes_when_no_kept_run_began_with_it(home: Path, make: Callable[..., Path]) -> None:
    for name in ("used", "unused"):
        (home / "copies" / name).mkdir(parents=True)
        (home / "copies" / name / "model.safetensors").write_bytes(b"weights")
    run = make("run", shards="a")
    plan = json.loads((run / "plan.json").read_bytes())
    plan["local_copies"] = {"s3://models/used": str(home / "copies" / "used")}
    (run / "plan.json").write_text(json.dumps(plan))
    age(home)
    done = prune(older_than_days=30, keep_newest=1, dry_run=False)
    assert deleted(done) == {"copies/unused"}
    assert why(done, "copies/used") == "run began with it"
    assert [path.name for path in (home / "copies").iterdir() if path.is_dir()] == ["used"]

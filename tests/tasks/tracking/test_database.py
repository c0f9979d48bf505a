"""The embedded MLflow's database is there whole or not at all, and one that is half made is named with its cure."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tasks.tracking.client import experiment_of, registry_client
from tests.support.repository import REPO
from tests.support.waiting import until

MAKE = "import sys; from tasks.tracking.database import make_database; make_database(sys.argv[1])"
EARLY = "451aebb31d03"  # MLflow's second migration: the next ones add what is there


def start(uri: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", MAKE, uri], cwd=REPO, text=True, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_makes_the_tables_leaves_none(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    killed = start(f"sqlite:///{file}")
    aside = tmp_path / ".mlflow.db.new"
    until(lambda: aside.exists() and aside.stat().st_size > 100_000, "some tables", process=killed)
    killed.kill()
    killed.communicate()
    assert not file.exists()
    others = [start(f"sqlite:///{file}") for _ in range(3)]
    for other in others:
        _, err = other.communicate(timeout=240)
        assert other.returncode == 0, err
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == ["mlflow.db"]
    assert registry_client(f"sqlite:///{file}").search_experiments()


@pytest.fixture
def half_made(empty_store: Path, tmp_path: Path) -> Path:
    """As a kill in the middle of a migration leaves it."""
    file = tmp_path / "mlflow.db"
    shutil.copy(empty_store, file)
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("drop table trace_info")
        database.execute("create table _alembic_tmp_tags (key text)")
        database.execute("update alembic_version set version_num = ?", (EARLY,))
    return file


def test_a_half_made_database_without_runs_is_to_be_deleted(half_made: Path) -> None:
    with pytest.raises(RuntimeError, match=f"half made, .* and it has no runs: delete {half_made}"):
        registry_client(f"sqlite:///{half_made}")


def test_one_with_runs_is_never_to_be_deleted(half_made: Path) -> None:
    with closing(sqlite3.connect(half_made)) as database, database:
        database.execute("insert into runs (run_uuid, experiment_id) values ('1', 0)")
    with pytest.raises(RuntimeError, match=f"restore {half_made} from a copy, or move it away") as caught:
        registry_client(f"sqlite:///{half_made}")
    assert "delete" not in str(caught.value).partition("): ")[2]


def test_a_file_that_is_no_database_is_not_to_be_started(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    file.write_text("these are not tables" * 100)
    with pytest.raises(RuntimeError, match=r"restore .* from a copy") as caught:
        registry_client(f"sqlite:///{file}")
    assert "start it" not in str(caught.value)


def test_a_store_elsewhere_is_started_or_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RuntimeError, match="start it, or unset MLFLOW_TRACKING_URI"):
        registry_client("http://127.0.0.1:9")


def test_first_runs_that_begin_an_experiment_at_once_are_all_of_it(embedded_home: Path) -> None:
    together = threading.Barrier(4)

    def begun(name: str) -> str:
        client = registry_client(f"sqlite:///{embedded_home}/mlflow.db")
        together.wait(60)
        return experiment_of(client, name)

    with ThreadPoolExecutor(4) as pool:
        for number in range(5):
            assert len(set(pool.map(begun, [f"verses {number}"] * 4))) == 1

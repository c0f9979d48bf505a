"""What a night is trained on: files whose content the champion and its forebears do not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.data.new_files import files_known_to, find_new_files
from tasks.promotion.register import register_model
from tasks.registry.models import resolve
from tests.support.mlflow_store import Store
from training.config.run import RunConfig
from training.records.plan import RunPlan


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "texts"
    (folder / "2026").mkdir(parents=True)
    (folder / "2026" / "may.txt").write_text("the sea\n" * 100)
    return folder


def config_of(corpus: Path) -> RunConfig:
    return RunConfig.model_validate({"name": "tiny", "data": {"path": str(corpus)}})


def trained_on(store: Store, path: str) -> RunConfig:
    config = RunPlan.read(store.exported / "plan.json").config
    return config.model_copy(update={"data": config.data.model_copy(update={"path": path})})


def test_without_a_champion_the_whole_folder_is_new(store: Store, corpus: Path) -> None:
    night = find_new_files(config_of(corpus), min_new_mib=0, tracking_uri=store.uri)
    assert night.config == config_of(corpus)
    assert "tiny has no champion yet: all 1 files are new" in night.why


def test_nights_go_on_from_the_champion_with_what_none_before_it_knew(store: Store, corpus: Path) -> None:
    register_model(store.finished_run("one", loss=3.0), tracking_uri=store.uri)
    champion = resolve("tiny@champion", tracking_uri=store.uri)
    first = find_new_files(config_of(corpus), min_new_mib=0, tracking_uri=store.uri)
    assert first.config is not None
    assert first.config.model.init == "pretrained"
    assert first.config.model.path == first.config.data.tokenizer.path == str(champion.export_dir)
    night = Path(first.config.data.path)
    assert [path.relative_to(night).as_posix() for path in night.rglob("*.txt")] == ["2026/may.txt"]
    assert (night / "2026" / "may.txt").read_text() == "the sea\n" * 100

    # That night's model becomes champion; by the next one a file was added, and one has moved.
    register_model(store.finished_run("two", loss=2.0, config=trained_on(store, str(night))), tracking_uri=store.uri)
    (corpus / "2026" / "may.txt").rename(corpus / "may.txt")
    assert find_new_files(config_of(corpus), min_new_mib=0, tracking_uri=store.uri).config is None
    (corpus / "june.txt").write_text("the sky\n" * 100)
    second = find_new_files(config_of(corpus), min_new_mib=0, tracking_uri=store.uri)
    assert second.config is not None
    assert [path.name for path in Path(second.config.data.path).rglob("*.txt")] == ["june.txt"]
    assert "1 of 2 files" in second.why
    assert "new to tiny/2" in second.why
    little = find_new_files(config_of(corpus), min_new_mib=1, tracking_uri=store.uri)
    assert little.config is None
    assert "under min_new_mib = 1" in little.why


def test_nothing_new_is_said_with_the_numbers(store: Store, corpus: Path) -> None:
    register_model(store.finished_run("one", loss=3.0), tracking_uri=store.uri)
    night = find_new_files(config_of(corpus), min_new_mib=0, tracking_uri=store.uri)
    assert night.config is not None
    register_model(
        store.finished_run("two", loss=2.0, config=trained_on(store, night.config.data.path)), tracking_uri=store.uri
    )
    again = find_new_files(config_of(corpus), min_new_mib=0, tracking_uri=store.uri)
    assert again.why == f"nothing new: tiny/2 knows all 1 files of {corpus}"
    assert files_known_to(resolve("tiny@champion", tracking_uri=store.uri))

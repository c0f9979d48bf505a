"""What a night is trained on: files whose content the champion and its forebears do not know."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from tasks.data.corpus import prepare_corpus
from tasks.data.night import NightlyRun, find_new_text, known_to
from tasks.planning.plan import plan_run
from tasks.promotion.register import register_model
from tasks.registry.models import resolve
from tasks.tracking.client import registry_client
from tasks.workspace.paths import home
from tests.support.configs import inventory, read_plan
from tests.support.mlflow_store import Store
from training.config.run import RunConfig
from training.records.plan import RunPlan
from training.records.token_shards import TokenShards
from training.records.train_result import TrainResult
from training.shards.sources import held_out_sources

pytestmark = pytest.mark.slow

TRAIN = {"steps": 10_000, "max_epochs": 1, "context": 16, "global_batch": 4}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "runs"))
    folder = tmp_path / "texts"
    (folder / "2026").mkdir(parents=True)
    (folder / "2026" / "may.txt").write_text("the sea\n" * 100)
    return folder


def config_of(corpus: Path) -> RunConfig:
    return RunConfig.model_validate({"name": "tiny", "data": {"path": str(corpus), "processes": 1}, "train": TRAIN})


def night_of(
    config: RunConfig, store: Store, *, min_new_mib: float = 0, replay: float = 0.25, max_slices: int = 50
) -> NightlyRun:
    return find_new_text(config, min_new_mib=min_new_mib, replay=replay, max_slices=max_slices, tracking_uri=store.uri)


def plan_of(config: RunConfig) -> RunPlan:
    folder, shards = prepare_corpus(config.data, tokens_home=home() / "tokens")
    return plan_run(config, inventory=inventory(1), shards=shards, shards_dir=folder)


def trained(store: Store, name: str, config: RunConfig) -> None:
    """Registers a model that was trained on the night's text, and is champion now."""
    folder, shards = prepare_corpus(config.data, tokens_home=home() / "tokens")
    run = store.finished_run(name, loss=2.0, config=config)
    plan = read_plan(run)
    plan.model_copy(update={"shards_dir": str(folder), "shards_fingerprint": shards.fingerprint}).write(
        run / "plan.json"
    )
    version = register_model(run, tracking_uri=store.uri)
    client = registry_client(store.uri)
    client.set_registered_model_alias("tiny", "champion", str(version.version))


def test_without_a_champion_the_whole_folder_is_new(store: Store, corpus: Path) -> None:
    night = night_of(config_of(corpus), store)
    assert night.config == config_of(corpus)
    assert "tiny has no champion yet: new to it is all of 1 file" in night.why


def test_nights_go_on_from_the_champion_with_what_none_before_it_knew(store: Store, corpus: Path) -> None:
    store.registered("one", loss=3.0)
    champion = resolve("tiny@champion", tracking_uri=store.uri)
    first = night_of(config_of(corpus), store)
    assert first.config is not None
    assert first.config.model.init == "pretrained"
    assert first.config.model.path == first.config.data.tokenizer.path == str(champion.export_dir)
    night = Path(first.config.data.sources[0].path)
    assert [path.relative_to(night).as_posix() for path in night.rglob("*.txt")] == ["2026/may.txt"]
    assert (night / "2026" / "may.txt").read_text() == "the sea\n" * 100

    # That night's model becomes champion; by the next one a file was added, and one has moved.
    trained(store, "two", first.config)
    (corpus / "2026" / "may.txt").rename(corpus / "may.txt")
    assert night_of(config_of(corpus), store).config is None
    (corpus / "june.txt").write_text("the sky\n" * 100)
    second = night_of(config_of(corpus), store)
    assert second.config is not None
    new, *older = second.config.data.sources
    assert [path.name for path in Path(new.path).rglob("*.txt")] == ["june.txt"]
    assert [source.name for source in older] == [first.config.data.sources[0].name, "first"]
    assert f"new to tiny/2: 1 of 2 files in {corpus}" in second.why
    little = night_of(config_of(corpus), store, min_new_mib=1)
    assert little.config is None
    assert "less than min_new_mib = 1, so they wait" in little.why


@pytest.mark.parametrize("replay", [0.0, 0.25, 0.5])
def test_older_slices_are_the_share_that_is_asked_for(store: Store, corpus: Path, replay: float) -> None:
    store.registered("one", loss=3.0)
    night = night_of(config_of(corpus), store, replay=replay)
    assert night.config is not None
    plan = plan_of(night.config)
    new, first = plan.sources
    assert first.epochs * first.tokens / (new.epochs * new.tokens + first.epochs * first.tokens) == pytest.approx(
        replay, abs=0.02
    )
    assert new.epochs == pytest.approx(1, abs=0.05)
    held_out = held_out_sources(TokenShards.read(Path(plan.shards_dir) / "manifest.json"))
    assert held_out is not None
    assert set(held_out.names) == {new.name, "first"}, "what is not replayed is still compared"
    assert f"{replay:.0%} of the tokens are from 1 older slice" in night.why


def test_a_file_that_grew_counts_from_where_it_had_ended(store: Store, corpus: Path) -> None:
    store.registered("one", loss=3.0)
    first = night_of(config_of(corpus), store)
    assert first.config is not None
    trained(store, "two", first.config)
    file = corpus / "2026" / "may.txt"
    file.write_text(file.read_text() + "the moon\n" * 50)
    second = night_of(config_of(corpus), store)
    assert second.config is not None
    (tail,) = Path(second.config.data.sources[0].path).rglob("*.txt")
    assert tail.read_text() == "the moon\n" * 50
    assert ": 1 of 1 file in" in second.why
    assert "1 of them with text added at the end" in second.why

    trained(store, "three", second.config)
    assert night_of(config_of(corpus), store).config is None, "the whole file is known now"
    file.write_text("another text\n" * 100)
    third = night_of(config_of(corpus), store)
    assert third.config is not None
    (whole,) = Path(third.config.data.sources[0].path).rglob("*.txt")
    assert whole.read_text() == "another text\n" * 100, "it did not grow, it is another text"


def test_the_optimizer_goes_on_from_the_champions_checkpoint(store: Store, corpus: Path) -> None:
    run_dir = store.finished_run("one", loss=3.0)
    register_model(run_dir, tracking_uri=store.uri)
    checkpoint = run_dir / TrainResult.read(run_dir / "result.json").checkpoint
    night = night_of(config_of(corpus), store)
    assert night.config is not None
    assert night.config.train.optimizer_path == (str(checkpoint) if (checkpoint / "manifest.json").exists() else "")
    shutil.rmtree(checkpoint)
    without = night_of(config_of(corpus), store)
    assert without.config is not None
    assert without.config.train.optimizer_path == ""


def test_of_many_slices_the_first_and_a_fixed_choice_are_kept(store: Store, corpus: Path) -> None:
    config = config_of(corpus)
    store.registered("one", loss=3.0)
    kept: list[set[str]] = []
    for number in range(5):
        (corpus / f"{number}.txt").write_text(f"text of night {number}\n" * 60)
        night = night_of(config, store, max_slices=3)
        assert night.config is not None
        kept.append({source.name for source in night.config.data.sources[1:]})
        trained(store, f"night-{number}", night.config)
    assert [len(names) for names in kept] == [1, 2, 3, 3, 3]
    assert all("first" in names for names in kept)
    gone = [earlier - later for earlier, later in itertools.pairwise(kept)]
    assert not any(names & later for number, names in enumerate(gone) for later in kept[number + 1 :])


def test_a_slice_that_is_gone_is_said_and_left_out(store: Store, corpus: Path) -> None:
    run = store.finished_run("one", loss=3.0)
    register_model(run, tracking_uri=store.uri)
    shards = Path(read_plan(run).shards_dir)
    aside = shards.rename(shards.with_name("aside"))
    try:
        night = night_of(config_of(corpus), store)
    finally:
        aside.rename(shards)
    assert night.config is not None
    assert not night.config.data.sources
    assert night.config.data.path
    assert night.why.endswith("nothing older is replayed (not on this machine any more: first)")


def test_nothing_new_is_said_with_the_numbers(store: Store, corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.registered("one", loss=3.0)
    night = night_of(config_of(corpus), store)
    assert night.config is not None
    trained(store, "two", night.config)
    (corpus / "new.docx").write_bytes(b"PK\x03\x04" + b"\0" * 50)
    again = night_of(config_of(corpus), store)
    assert again.why == f"nothing new: tiny/2 knows the 1 file of {corpus}"
    assert "the night leaves out 1 file (.docx, such as new.docx): " in caplog.text
    assert known_to(resolve("tiny@champion", tracking_uri=store.uri))

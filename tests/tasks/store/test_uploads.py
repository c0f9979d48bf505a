"""A run on a store: copied while it goes on, whole or not at all, and brought to a machine that has nothing."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.store import uploads
from tasks.store.runs import RunOnStore, fetch_run, run_of_url
from tasks.store.transfer import download, upload
from tasks.store.uploads import Uploads, check_store
from tests.support.manifests import write_checkpoint_manifest
from tests.support.s3_server import BUCKET, SECRET, S3Server, s3_server, seen_anew
from tests.support.waiting import until
from training.checkpoint.retention import keep, prune
from training.config.run import RunConfig
from training.records.checkpoint import WrittenFile, checkpoint_folder, damage, finished_checkpoints
from training.shards.format import MANIFEST
from training.tracking.progress import Progress


@pytest.fixture(scope="module")
def served() -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(served: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    monkeypatch.setattr(uploads, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(uploads, "LONGEST_PAUSE_S", 0.5)
    return seen_anew(served, monkeypatch)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def run_dir(home: Path) -> Path:
    """A run's folder with its records, and no checkpoint yet."""
    folder = home / "verses-1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"run": 1}')
    (folder / "plan.json").write_text('{"plan": 1}')
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "owner.json").write_text('{"process": "this machine"}')
    return folder


@pytest.fixture
def shards(home: Path) -> Path:
    """A shard folder that the store has already."""
    folder = home / "tokens" / "0123456789abcdef"
    folder.mkdir(parents=True)
    return folder


def config_of(url: str, **checkpoint: Any) -> RunConfig:
    return RunConfig.model_validate({"store": {"url": url}, "checkpoint": checkpoint})


def checkpoint(run_dir: Path, step: int, *, val_loss: float | None = None, size: int = 3000) -> Path:
    """Writes a checkpoint as ranks do: beside, then renamed."""
    folder = checkpoint_folder(run_dir, step)
    aside = folder.with_name(f".{folder.name}.part")
    aside.mkdir(parents=True)
    files = {}
    for name in ("model.safetensors", "optimizer.safetensors"):
        content = f"{name} {step} ".encode() * (size // 16)
        (aside / name).write_bytes(content)
        files[name] = WrittenFile(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    write_checkpoint_manifest(aside, step=step, val_loss=val_loss, files=files)
    aside.rename(folder)
    return folder


@pytest.fixture(autouse=True)
def no_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards have tests of their own."""
    monkeypatch.setattr(uploads, "upload_shards", lambda store, folder: None)


def steps_on(s3: S3Server, url: str) -> list[int]:
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    return sorted(int(key.split("/")[-2]) for key in s3.keys(prefix) if key.endswith(f"/{MANIFEST}"))


def test_an_empty_machine_goes_on_from_the_newest_checkpoint(
    s3: S3Server, url: str, run_dir: Path, shards: Path, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Uploads(config_of(url), run_dir, shards):
        checkpoint(run_dir, 10)
        until(lambda: steps_on(s3, url) == [10], "the first checkpoint is on the store")
        (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 20}\n')
        expected = checkpoint(run_dir, 20)
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "elsewhere"))
    assert fetch_run(f"{url}/runs/verses-1") == "verses-1"
    there = tmp_path / "elsewhere" / "verses-1"
    assert [path.name for path in finished_checkpoints(there)] == ["00000020"]
    assert damage(there / "checkpoints" / "00000020") is None
    for path in expected.iterdir():
        assert (there / "checkpoints" / "00000020" / path.name).read_bytes() == path.read_bytes()
    for name in ("run.json", "plan.json", "metrics.jsonl"):
        assert (there / name).read_bytes() == (run_dir / name).read_bytes()
    assert not (there / "owner.json").exists(), "who works on it is of the other machine"
    assert fetch_run(f"{url}/runs/verses-1/") == "verses-1", "the second time there is nothing to bring"


@pytest.mark.slow
def test_the_store_keeps_what_the_config_keeps_also_after_the_machine_is_lost(
    s3: S3Server, url: str, run_dir: Path, shards: Path
) -> None:
    config = config_of(url, keep_last=2, keep_best=True, keep_every_steps=40)
    losses = {10: 3.0, 20: 2.0, 30: 2.5, 40: 2.6, 50: 2.7}
    with Uploads(config, run_dir, shards):
        for step, loss in losses.items():
            checkpoint(run_dir, step, val_loss=loss)
            until(lambda step=step: step in steps_on(s3, url), f"step {step} is on the store")  # type: ignore[misc]
            prune(run_dir, config)
    assert steps_on(s3, url) == [20, 40, 50]
    assert [int(path.name) for path in finished_checkpoints(run_dir)] == [20, 40, 50]
    shutil.rmtree(run_dir / "checkpoints")  # another machine, which brings only the newest
    assert RunOnStore(f"{url}/runs/verses-1", run_dir).fetch() == checkpoint_folder(run_dir, 50)
    with Uploads(config, run_dir, shards):
        checkpoint(run_dir, 60, val_loss=2.8)
        checkpoint(run_dir, 70, val_loss=2.9)
    assert steps_on(s3, url) == [20, 40, 60, 70]
    keys = s3.keys(url.removeprefix(f"s3://{BUCKET}/"))
    assert not [key for key in keys if "/00000050/" in key or "/00000010/" in key], "no file is left of the others"


def test_a_checkpoint_that_somebody_keeps_stays_on_the_store(
    s3: S3Server, url: str, run_dir: Path, shards: Path
) -> None:
    with Uploads(config_of(url, keep_last=1), run_dir, shards):
        keep(checkpoint(run_dir, 10), why="a test")
        until(lambda: steps_on(s3, url) == [10], "it is on the store")
        checkpoint(run_dir, 20)
        until(lambda: 20 in steps_on(s3, url), "so is the next")
        checkpoint(run_dir, 30)
    assert steps_on(s3, url) == [10, 30]


def test_what_was_copied_in_part_or_is_damaged_is_never_brought(
    s3: S3Server, url: str, run_dir: Path, shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Uploads(config_of(url, keep_last=5), run_dir, shards):
        for step in (10, 20):
            checkpoint(run_dir, step)
    prefix = f"{url.removeprefix(f's3://{BUCKET}/')}/runs/verses-1/checkpoints"
    s3.put(f"{prefix}/00000030/model.safetensors", b"the rest was never copied")
    s3.put(f"{prefix}/00000020/model.safetensors", b"x" * 2997)
    shutil.rmtree(run_dir / "checkpoints")
    brought = RunOnStore(f"{url}/runs/verses-1", run_dir).fetch()
    assert brought == checkpoint_folder(run_dir, 10)
    assert "00000020 is incomplete" in caplog.text
    s3.put(f"{prefix}/00000010/model.safetensors", b"x")
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(RuntimeError, match="none of the 2 checkpoints"):
        RunOnStore(f"{url}/runs/verses-1", run_dir).fetch()


@pytest.mark.parametrize(("before", "after"), [(b'"tokens": 20', b'"tokens": 21'), (b'"step": 20', b'"step": 30')])
def test_a_checkpoint_whose_manifest_was_changed_on_the_store_is_not_brought_and_stops_no_upload(
    before: bytes,
    after: bytes,
    s3: S3Server,
    url: str,
    run_dir: Path,
    shards: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Uploads(config_of(url, keep_last=5), run_dir, shards):
        checkpoint(run_dir, 10)
        manifest = (checkpoint(run_dir, 20) / MANIFEST).read_bytes()
    prefix = f"{url.removeprefix(f's3://{BUCKET}/')}/runs/verses-1/checkpoints"
    s3.put(f"{prefix}/00000020/{MANIFEST}", manifest.replace(before, after))
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path / "elsewhere"))
    fetch_run(f"{url}/runs/verses-1")
    there = tmp_path / "elsewhere" / "verses-1"
    assert [path.name for path in finished_checkpoints(there)] == ["00000010"]
    assert f"00000020/{MANIFEST} was changed after it was written" in caplog.text
    RunOnStore(f"{url}/runs/verses-1", there).prune(config_of(url, keep_last=5))
    assert steps_on(s3, url) == [10, 20], "it counts as incomplete"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["away", "500", "full", "denied"])
def test_a_store_that_fails_delays_the_copy_and_is_said(
    fault: Any, s3: S3Server, url: str, run_dir: Path, shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), Uploads(config_of(url), run_dir, shards) as kept:
        checkpoint(run_dir, 10)
        until(lambda: steps_on(s3, url) == [10], "the first checkpoint is on the store")
        s3.faults.kind, s3.faults.count = fault, -1
        checkpoint(run_dir, 20)
        until(lambda: "could not copy to" in caplog.text, "the log says that the store fails")
        assert steps_on(s3, url) == [10]
        s3.faults.count = 0
        until(lambda: 20 in steps_on(s3, url), "the second checkpoint is on the store")
    assert "accepts copies again, after" in caplog.text
    assert not kept.behind
    assert caplog.text.count("could not copy to") == 1, "once, not at every try"


def test_a_run_ends_although_the_store_is_away_and_says_what_it_lacks(
    s3: S3Server,
    url: str,
    run_dir: Path,
    shards: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(uploads, "END_PATIENCE_S", 1.0)
    s3.faults.kind, s3.faults.count = "away", -1
    with Uploads(config_of(url), run_dir, shards) as kept:
        checkpoint(run_dir, 10)
    assert "nothing could be copied" in kept.behind
    assert "`shardline resume verses-1` here copies it" in caplog.text
    s3.faults.count = 0
    monkeypatch.setattr(uploads, "END_PATIENCE_S", 60.0)
    with Uploads(config_of(url), run_dir, shards) as kept:
        pass
    assert steps_on(s3, url) == [10]


def test_a_run_of_results_is_brought_with_them_only_if_its_checkpoint_is_there(
    s3: S3Server, url: str, run_dir: Path, shards: Path
) -> None:
    prefix = f"{url.removeprefix(f's3://{BUCKET}/')}/runs/verses-1/"
    with Uploads(config_of(url), run_dir, shards):
        checkpoint(run_dir, 10)
        (run_dir / "result.json").write_text('{"checkpoint": "checkpoints/00000010"}')
    assert f"{prefix}result.json" in s3.keys(prefix)
    (run_dir / "result.json").unlink()  # it is trained longer
    with Uploads(config_of(url), run_dir, shards):
        checkpoint(run_dir, 20)
        until(lambda: 20 in steps_on(s3, url), "the checkpoint is on the store")
        assert f"{prefix}result.json" not in s3.keys(prefix)


@pytest.mark.slow
def test_a_store_that_refuses_ends_the_run_before_it_begins(s3: S3Server, url: str, home: Path) -> None:
    check_store(config_of(url), "verses-1")
    with pytest.raises(ValueError, match=r"store\.url = s3://no-such-bucket/x refuses a file"):
        check_store(config_of("s3://no-such-bucket/x"), "verses-1")
    s3.faults.kind, s3.faults.count = "denied", -1
    with pytest.raises(ValueError, match="check the bucket's name and the credentials") as refused:
        check_store(config_of(url), "verses-1")
    assert SECRET not in str(refused.value)
    s3.faults.kind = "away"
    check_store(config_of(url), "verses-1")  # a run may begin


def test_a_run_that_is_not_there_is_an_error_with_its_url(s3: S3Server, url: str, home: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no run at s3://.*: it has no run.json"):
        fetch_run(f"{url}/runs/verses-9")
    with pytest.raises(ValueError, match=r"is not a run on a store: give store\.url/runs/RUN"):
        run_of_url("s3://bucket")
    with pytest.raises(ValueError, match="contains credentials") as refused:
        run_of_url("s3://key:secret@bucket/runs/verses-1")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("store", ["s3", "file"])
def test_copies_count_the_bytes_that_are_done(store: str, s3: S3Server, url: str, tmp_path: Path) -> None:
    source, there = tmp_path / "source", f"file://{tmp_path}/there" if store == "file" else f"{url}/there"
    source.write_bytes(b"x" * 3_000_000)
    progress = Progress(None)
    upload(source, there, progress)
    assert progress.done == pytest.approx(3.0)
    download(there, tmp_path / "back", progress)
    assert progress.done == pytest.approx(6.0)
    assert (tmp_path / "back").read_bytes() == source.read_bytes()

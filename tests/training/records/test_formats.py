"""What another version of Shardline wrote is refused in one sentence, or made anew."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.manifests import write_checkpoint_manifest, write_manifest
from training.facts.formats import FORMATS, Kind
from training.records.checkpoint import CheckpointManifest, newest_intact
from training.records.correction import Measurements
from training.records.record import OtherFormat, Record
from training.records.results import EngineReport, ExportedModel, ParityReport
from training.records.text_encoding import NOTHING_SPECIAL
from training.records.token_shards import TokenShards


def export(folder: Path) -> None:
    parity = ParityReport(reload_logit_difference=0, reload_logit_difference_bound=0, graphs=())
    ExportedModel(
        step=1,
        checkpoint_sha256="0" * 64,
        objective="causal",
        context=8,
        end_id=0,
        end_ids=(0,),
        text_encoding=NOTHING_SPECIAL,
        files={},
        tensors={},
        parity=parity,
        skipped={},
    ).write(folder / "export.json")


WRITTEN: dict[Kind, tuple[Callable[[Path], object], type[Record], str, str]] = {
    "records": (
        lambda folder: Measurements().write(folder / "kept.json"),
        Measurements,
        "kept.json",
        "start a new run",
    ),
    "shards": (
        lambda folder: write_manifest(folder, [], vocab_size=2, end_id=0),
        TokenShards,
        "manifest.json",
        "tokenize again",
    ),
    "checkpoints": (
        lambda folder: write_checkpoint_manifest(folder, step=1),
        CheckpointManifest,
        "manifest.json",
        "start a new run from its weights with model.init=pretrained",
    ),
    "exports": (export, ExportedModel, "export.json", "train again"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_another_format_is_refused_with_its_number_and_the_cure(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, record, name, cure = WRITTEN[kind]
    with monkeypatch.context() as other:
        other.setitem(FORMATS, kind, FORMATS[kind]._replace(number=99))
        write(tmp_path)
    path, ours = tmp_path / name, FORMATS[kind].number
    said = (
        f"{path} was written by another version of Shardline (in format 99; this one reads format {ours} of {kind}): "
    )
    for read in (record.read, record.fields):
        with pytest.raises(OtherFormat) as refused:
            read(path)
        assert str(refused.value).startswith(said)
        assert cure in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", FORMATS)
def test_this_format_is_read_and_stands_first(kind: Kind, tmp_path: Path) -> None:
    write, record, name, _ = WRITTEN[kind]
    write(tmp_path)
    content = (tmp_path / name).read_bytes()
    assert re.match(rb'\{\n  "format": \d+,\n  "', content)
    assert record.read(tmp_path / name).content() == content
    assert EngineReport.FORMAT == "exports"


def test_checkpoints_of_another_format_are_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run would silently go back to an older one."""
    folders = [tmp_path / name for name in ("00000001", "00000002")]
    write_checkpoint_manifest(folders[0], step=1)
    monkeypatch.setitem(FORMATS, "checkpoints", FORMATS["checkpoints"]._replace(number=99))
    write_checkpoint_manifest(folders[1], step=2)
    monkeypatch.undo()
    with pytest.raises(OtherFormat, match=r"00000002/manifest\.json was written by another version"):
        newest_intact(folders)


def test_a_cache_of_another_format_is_made_anew_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kept.json"
    assert Measurements.read_or_none(path, otherwise="measuring again") is None
    assert not caplog.text, "there was none"
    path.write_text('{"measurements": []}')
    assert Measurements.read_or_none(path, otherwise="measuring again") is None
    (said,) = caplog.messages
    assert said.startswith(f"measuring again: {path} was written by another version of Shardline (without a format's")
    Measurements().write(path)
    assert Measurements.read_or_none(path, otherwise="measuring again") == Measurements()

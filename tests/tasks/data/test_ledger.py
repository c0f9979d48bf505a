"""What a tokenizer cannot express is counted, and the sample that one is trained on comes from the whole corpus."""

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tasks.data import corpus
from tests.support import text_cases
from tests.support.text_cases import FOREIGN, HELLOS, json_lines, write_languages
from tests.support.tiny_corpus import estimated, prepare, write_files
from training.config.data import DataConfig
from training.records.token_shards import TokenShards
from training.shards.format import SPLITS


def with_tokenizer(tmp_path: Path, texts: list[str], make: Callable[[Path], Path]) -> TokenShards:
    source = tmp_path / "a.jsonl"
    source.write_text(json_lines(texts))
    tokenizer = make(tmp_path / "tokenizer")
    return prepare(tmp_path, source, kind="pretrained", tokenizer={"path": str(tokenizer)})[1]


@pytest.mark.parametrize(
    ("make", "lost_each", "unknown_each"),
    [
        # v and f of "naïve café", ï, é, six letters of Cyrillic, two of Chinese
        (text_cases.characters_without_unknown, 12, 0),
        (text_cases.unigram, 12, 4),
        (text_cases.word_piece, len("naïvecaféПривет山中"), 4),
        (text_cases.byte_fallback, 0, 0),
    ],
)
def test_characters_that_a_tokenizer_cannot_express_are_counted(
    tmp_path: Path, make: Callable[[Path], Path], lost_each: int, unknown_each: int
) -> None:
    shards = with_tokenizer(tmp_path, FOREIGN, make)
    assert shards.characters == sum(map(len, FOREIGN))
    assert shards.lost_characters == len(FOREIGN) * lost_each
    assert shards.unknown_tokens == len(FOREIGN) * unknown_each
    (warning, *_) = [*shards.ledger_warnings(), ""]
    assert ("of the characters" in warning) == (lost_each > 0)
    tokenizer = {"kind": "pretrained", "path": str(tmp_path / "tokenizer")}
    before = estimated({"path": str(tmp_path / "a.jsonl"), "tokenizer": tokenizer})
    assert [line for line in before.lines() if "of the characters" in line] == [warning] * (lost_each > 0)


def test_the_loss_per_byte_is_without_the_lost_bytes(tmp_path: Path) -> None:
    shards = with_tokenizer(tmp_path, FOREIGN, text_cases.characters_without_unknown)
    lost = len("vïféПривет山中".encode())
    assert sum(map(shards.text_bytes, SPLITS)) == sum(len(text.encode()) - lost for text in FOREIGN)
    stretches = [stretch for shard in shards.shards for stretch in shard.stretches or ()]
    assert sum(stretch.text_bytes for stretch in stretches) == shards.text_bytes("validation")


def test_nothing_is_said_where_nothing_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = with_tokenizer(tmp_path, HELLOS, text_cases.unigram)
    assert (shards.lost_characters, shards.unknown_tokens, shards.ledger_lines()) == (0, 0, [])
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


# The sample of a tokenizer


@pytest.mark.parametrize(("packed", "shard_mib"), [(False, 1), (True, 8)])
def test_a_tokenizer_learns_from_all_over_the_corpus(
    tmp_path: Path, packed: bool, shard_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case with fewer words in each file, and as much less of them in the sample: BPEs learn long words slowly."""
    monkeypatch.setattr(corpus, "_sample_bytes", lambda data, num_corpora: 2**18)
    root = write_languages(tmp_path / "languages", words=3_000)
    chinese = (root / "zh" / "00.txt").read_text()[:2000]
    english = (root / "en" / "00.txt").read_text()[:2000]
    if packed:
        for path in root.rglob("*.txt"):
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
            path.unlink()
    options = {"vocab_size": 600, "sample_mib": 1}
    folder, _ = prepare(tmp_path, root, kind="bpe", tokenizer=options, shard_mib=shard_mib)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    per_token = {text[:1]: len(text) / len(tokenizer.encode(text).ids) for text in (chinese, english)}
    assert per_token[chinese[:1]] > 1.2  # 0.33 where the first text is taken
    assert per_token[english[:1]] > 2
    assert prepare(tmp_path, root, kind="bpe", tokenizer=options, shard_mib=shard_mib)[0] == folder


@pytest.mark.parametrize("options", [{"split": "tail", "validation_fraction": 0.8}, {"validation_path": "valid"}])
def test_the_sample_of_a_tokenizer_is_training_text(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six chunks one is drawn. Most are held out, and have another script."""
    monkeypatch.setattr("tasks.data.sample.READ_FACTOR", 1)
    english = "whenever the river was wandering near the houses "
    (tmp_path / "corpus" / "valid").mkdir(parents=True)
    (tmp_path / "corpus" / "a.txt").write_text(english * 21_000)
    for number in range(5):
        (tmp_path / "corpus" / "valid" / f"{number}.txt").write_text("山水之间有人家" * 50_000)
    tokenizer = {"vocab_size": 280, "sample_mib": 1}
    folder, _ = prepare(
        tmp_path, tmp_path / "corpus", kind="bpe", tokenizer=tokenizer, shard_mib=1, processes=1, **options
    )
    learned = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    assert len(learned.encode(english).ids) < len(english) / 1.5


def test_small_losses_are_said_and_are_no_warning(tmp_path: Path) -> None:
    shards = with_tokenizer(tmp_path, [*HELLOS * 4, FOREIGN[0]], text_cases.characters_without_unknown)
    assert 0 < shards.lost_characters / shards.characters < 0.001
    (line,) = shards.ledger_lines()
    assert f"({shards.lost_characters:,} of {shards.characters:,}) are lost" in line
    assert not shards.ledger_warnings()


def test_a_document_that_is_cut_is_one_in_each_split_and_not_two(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("wander " * 200)
    shards = prepare(tmp_path, source, kind="bytes")[1]
    assert shards.text_line() == (
        "text: 0.0 MB; 1,260 tokens of 1 document to train on, 141 tokens of 1 document held out"
    )


# Text that could not be read, in bytes and files


TEXT = b"wander " * 4300
PACKED = gzip.compress(random.Random(0).randbytes(30_000), 1)
BROKEN = {
    "invalid.txt": TEXT + b"\xff",
    "nul.txt": TEXT + b"\0",
    "other.jsonl": b'{"body": "' + TEXT + b'"}\n',
    "other.csv": b"body\n" + TEXT + b"\n",
    "cut.jsonl": b'{"text": "' + TEXT + b"\n",
    "open.csv": b'text\n"' + TEXT + b"\n",
    "cut.jsonl.gz": PACKED[: len(PACKED) // 2] + b"\0" * (len(PACKED) // 2),
    "cut.parquet": b"PAR1" + TEXT,
    "array.json": b'[{"body": "' + TEXT + b'"}]',
}


def with_broken_files(tmp_path: Path, *kinds: str, readable: int) -> tuple[DataConfig, TokenShards]:
    """The ledger of broken files, of some 30 kB each, beside so many bytes that can be read."""
    good = {f"good{number:02d}.txt": b"%06d " % number * (readable // 7 // 40) for number in range(40)}
    folder = write_files(tmp_path / "corpus", good | {kind: BROKEN[kind] for kind in kinds})
    fields = {"path": str(folder), "tokenizer": {"kind": "bytes"}, "on_error": "skip"}
    data = DataConfig.model_validate(fields)
    return data, corpus.prepare_corpus(data, tokens_home=tmp_path / "tokens")[1]


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_as_much_as_its_bytes(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    data, shards = with_broken_files(tmp_path, kind, readable=10_000)
    size = (tmp_path / "corpus" / kind).stat().st_size
    assert shards.skipped_files == 1
    assert shards.skipped_bytes == pytest.approx(size, rel=0.01)
    assert [file.name for file in shards.largest_skipped] == [kind]
    (warning,) = shards.ledger_warnings()
    share = shards.skipped_bytes / (size + 40 * 7 * 35)
    assert f"in 1 file, 0.0 MB, {share:.2%} of the bytes (data.on_error=skip): {kind} " in warning
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [warning]
    assert warning in [*estimated(data.model_dump()).lines()]


def test_the_largest_broken_files_are_named_and_the_others_counted(tmp_path: Path) -> None:
    _, shards = with_broken_files(tmp_path, *BROKEN, readable=90_000)
    (warning,) = shards.ledger_warnings()
    sizes = {kind: (tmp_path / "corpus" / kind).stat().st_size for kind in BROKEN}
    assert f"in 9 files, {sum(sizes.values()) / 1e6:,.1f} MB, 7" in warning
    assert "% of the bytes (data.on_error=skip): " in warning
    named = warning.partition("skip): ")[2].partition("; the first: ")[0]
    assert re.fullmatch(r"(?:[\w.]+ \(0\.0 MB\), ){5}4 more", named)


@pytest.mark.parametrize("kind", ["cut.jsonl", "open.csv", "invalid.txt"])
def test_below_a_hundredth_of_the_bytes_it_is_no_warning(tmp_path: Path, kind: str) -> None:
    _, shards = with_broken_files(tmp_path, kind, readable=6_000_000)
    assert not shards.ledger_warnings()
    (line,) = shards.ledger_lines()
    assert "in 1 file, 0.0 MB, 0.5" in line


def test_rows_of_a_file_that_is_cut_between_chunks_are_of_one_file(tmp_path: Path) -> None:
    rows = [{"text": "wander " * 40} if n % 3 else {"body": "rivers " * 40} for n in range(9000)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shards = prepare(tmp_path, source, kind="bytes", shard_mib=1, on_error="skip", processes=1)[1]
    lost = sum(len(json.dumps(row)) + 1 for row in rows if "body" in row)
    assert (shards.skipped, shards.skipped_files, shards.skipped_bytes) == (3000, 1, lost)
    assert "33.3" in shards.ledger_warnings()[0]


def test_a_column_that_parquet_lacks_loses_all_of_its_bytes_once(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json_lines(HELLOS * 30))
    table = pyarrow.table({"body": [str(n) * 400 for n in range(8000)]})
    pyarrow.parquet.write_table(table, folder / "b.parquet", row_group_size=1000, compression="none")
    shards = prepare(tmp_path, folder, kind="bytes", shard_mib=1, on_error="skip", processes=1)[1]
    assert shards.skipped == 8000
    assert shards.skipped_bytes == pytest.approx((folder / "b.parquet").stat().st_size, rel=0.01)

import hashlib
from pathlib import Path

import numpy as np
import pytest

from tests.support.manifests import write_manifest
from training.records.record import sha256_file
from training.records.token_shards import FinishedChunk, Shard
from training.shards.format import (
    discard_damaged,
    finished_chunk,
    read_manifest,
    token_dtype,
    verify_hashes,
    write_marker,
    write_shard,
)
from training.shards.stream import TokenStream


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Train: documents [0..4], [5..6] in shard 0, [7..11] over shards 1 and 2, the last shard ends at 12."""
    shards = [
        write_shard(tmp_path, split="train", index=0, tokens=np.arange(7, dtype="uint16"), ends=[5, 7], text_bytes=20),
        write_shard(tmp_path, split="train", index=1, tokens=np.arange(7, 10, dtype="uint16"), ends=[], text_bytes=9),
        write_shard(
            tmp_path, split="train", index=2, tokens=np.arange(10, 13, dtype="uint16"), ends=[2, 3], text_bytes=9
        ),
        write_shard(tmp_path, split="validation", index=1, tokens=np.array([7, 9], "uint16"), ends=[2], text_bytes=4),
    ]
    finish(tmp_path, shards)
    return tmp_path


def finish(folder: Path, shards: list[Shard]) -> None:
    (folder / "tokenizer").mkdir(exist_ok=True)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    sha256 = sha256_file(folder / "tokenizer" / "tokenizer.json")
    write_manifest(folder, shards, vocab_size=257, end_id=256, tokenizer="bytes", tokenizer_sha256=sha256)


def test_tokens_read_across_shards_are_those_written(folder: Path) -> None:
    stream = TokenStream(folder, "train")
    assert len(stream) == 13
    for start in range(14):
        for stop in range(start, 14):
            assert stream.read(start, stop).tolist() == list(range(start, stop))
    assert stream.read(3, 9).dtype == np.uint16
    assert TokenStream(folder, "validation").read(0, 2).tolist() == [7, 9]


def test_each_token_knows_its_document(folder: Path) -> None:
    stream = TokenStream(folder, "train")
    documents = [0] * 5 + [1] * 2 + [2] * 5 + [3]
    for start in range(14):
        for stop in range(start, 14):
            assert stream.document_ids(start, stop).tolist() == documents[start:stop]


def test_documents_begin_and_end_where_their_tokens_do(folder: Path) -> None:
    assert TokenStream(folder, "train").document_bounds().tolist() == [0, 5, 7, 12, 13]
    assert TokenStream(folder, "validation").document_bounds().tolist() == [0, 2]


def test_tokens_after_the_last_listed_end_are_a_document(tmp_path: Path) -> None:
    tokens = np.arange(5, dtype="uint16")
    finish(tmp_path, [write_shard(tmp_path, split="train", index=0, tokens=tokens, ends=[3], text_bytes=5)])
    stream = TokenStream(tmp_path, "train")
    assert stream.document_bounds().tolist() == [0, 3, 5]
    assert stream.document_ids(0, 5).tolist() == [0, 0, 0, 1, 1]


def test_the_files_are_flat_little_endian_tokens(folder: Path) -> None:
    assert (folder / "train" / "00001.bin").read_bytes() == bytes([7, 0, 8, 0, 9, 0])
    assert np.load(folder / "train" / "00002.docs.npy").tolist() == [2, 3]
    shard = read_manifest(folder).shards[1]
    content = (folder / "train" / "00001.bin").read_bytes() + (folder / "train" / "00001.docs.npy").read_bytes()
    assert shard.sha256 == hashlib.sha256(content).hexdigest()


def test_a_folder_without_manifest_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no manifest\.json.*run `shardline pretrain`"):
        TokenStream(tmp_path, "train")


def test_a_cut_shard_is_named_with_both_sizes(folder: Path) -> None:
    path = folder / "train" / "00000.bin"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"train/00000\.bin has 11 bytes, its manifest says 14 .*delete"):
        TokenStream(folder, "validation")


@pytest.mark.parametrize("name", ["train/00002.bin", "train/00002.docs.npy"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=name):
        TokenStream(folder, "train")


@pytest.mark.parametrize("name", ["train/00002.bin", "train/00002.docs.npy"])
def test_a_flipped_bit_is_found_by_the_hashes(folder: Path, name: str) -> None:
    verify_hashes(folder)
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    read_manifest(folder)  # the sizes still agree
    with pytest.raises(ValueError, match=r"train/00002.* is not the file that was written"):
        verify_hashes(folder)


def test_another_tokenizer_is_found_by_its_hash(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(ValueError, match="is not the tokenizer that made these tokens"):
        verify_hashes(folder)


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink()
    read_manifest(folder)  # training needs no tokenizer
    with pytest.raises(ValueError, match=r"tokenizer/tokenizer\.json is missing; delete"):
        verify_hashes(folder)


def test_what_is_damaged_is_deleted_and_nothing_else(folder: Path) -> None:
    for index in range(3):
        write_marker(folder, index, FinishedChunk(shards=()))
    before = {path for path in folder.rglob("*") if path.is_file()}
    assert discard_damaged(folder) == []
    (folder / "train" / "00001.bin").write_bytes(b"123456")
    (damage,) = discard_damaged(folder)
    assert "train/00001.bin or .docs.npy is not the file that was written" in damage
    gone = {str(path.relative_to(folder)) for path in before if not path.exists()}
    assert gone == {"00001.done.json", "train/00001.bin", "train/00001.docs.npy"}


def test_a_marker_counts_only_while_its_shards_are_whole(folder: Path) -> None:
    shards = read_manifest(folder).shards
    assert finished_chunk(folder, 0) is None
    write_marker(folder, 0, FinishedChunk(shards=shards[:1]))
    assert finished_chunk(folder, 0) == FinishedChunk(shards=shards[:1])
    (folder / "train" / "00000.bin").write_bytes(b"other")
    assert finished_chunk(folder, 0) is None


def test_wide_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    assert token_dtype(65_536) == "uint16"
    assert token_dtype(65_537) == "uint32"
    tokens = np.array([70_000], dtype="uint32")
    write_shard(tmp_path, split="train", index=0, tokens=tokens, ends=[1], text_bytes=1)
    assert (tmp_path / "train" / "00000.bin").read_bytes() == (70_000).to_bytes(4, "little")

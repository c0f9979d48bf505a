"""Token shards on a store: found instead of made again, and read through a bounded cache, also while it is away."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.data.corpus import prepare_corpus
from tasks.store.shards import find_shards, upload_shards
from tests.support.numbered_corpus import CPU, plan_of
from tests.support.s3_server import BUCKET, S3Server, s3_server, seen_anew
from training.config.data import DataConfig
from training.config.store import StoreConfig
from training.data.loader import Loader
from training.records.plan import RunPlan
from training.records.token_shards import TokenShards
from training.shards.remote import REMOTE, RemoteShards, block_cache
from training.shards.stream import TokenStream
from training.store import blocks
from training.store.blocks import BlockCache

STORE = StoreConfig(url=f"s3://{BUCKET}/kept")
DOCUMENTS, STEPS = 3000, 40


@pytest.fixture(scope="module")
def served() -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(served: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    block_cache.cache_clear()
    return seen_anew(served, monkeypatch)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    draw = np.random.default_rng(7)
    words = ["ships", "sing", "of", "storms", "and", "no", "one", "hears", "them", "at", "night"]
    lines = [" ".join(draw.choice(words, draw.integers(3, 30))) for _ in range(DOCUMENTS)]
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(lines))
    return path


def prepare(home: Path, corpus: Path, store: StoreConfig = STORE, **data: Any) -> tuple[Path, TokenShards]:
    fields = {"path": str(corpus), "text_unit": "line", "tokenizer": {"kind": "bytes"}, "processes": 1} | data
    return prepare_corpus(DataConfig.model_validate(fields), tokens_home=home / "tokens", store=store)


def batches(shards: Path, *, packing: str = "stream") -> list[torch.Tensor]:
    loader = Loader(plan(shards, packing=packing), dp_rank=0, device=CPU)
    try:
        return [loader.share(step).batches[0].inputs.clone() for step in range(STEPS)]
    finally:
        loader.close()


def plan(shards: Path, *, packing: str = "stream") -> RunPlan:
    return plan_of(shards, train__steps=STEPS, train__global_batch=8, train__packing=packing)


@pytest.mark.parametrize("packing", ["stream", "documents", "padded", "best-fit"])
def test_another_machine_trains_on_the_same_batches_without_making_a_token(
    packing: str, s3: S3Server, corpus: Path, tmp_path: Path
) -> None:
    made, _ = prepare(tmp_path / "here", corpus, store=StoreConfig())
    upload_shards(STORE, made)
    found, manifest = prepare(tmp_path / "there", corpus)
    assert (found / REMOTE).exists()
    assert not list(found.rglob("*.bin")), "no token was made or copied"
    assert manifest == TokenShards.read(made / "manifest.json")
    for expected, got in zip(batches(made, packing=packing), batches(found, packing=packing), strict=True):
        assert torch.equal(expected, got)
    held_out = TokenStream(made, "validation"), TokenStream(found, "validation")
    assert np.array_equal(*(stream.read(0, len(stream)) for stream in held_out))
    assert prepare(tmp_path / "there", corpus) == (found, manifest), "the second call looks nowhere"


def test_a_mixture_is_found_with_all_its_sources(s3: S3Server, corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("one more line of text, and then another\n" * 400)
    sources = [{"path": str(corpus), "weight": 3}, {"path": str(other), "weight": 1}]
    made, _ = prepare(tmp_path / "here", corpus, store=StoreConfig(), path="", sources=sources)
    upload_shards(STORE, made)
    found, _ = prepare(tmp_path / "there", corpus, path="", sources=sources)
    assert not list(found.parent.rglob("*.bin"))
    here, there = TokenStream(made, "train"), TokenStream(found, "train")
    assert (here.is_remote, there.is_remote) == (False, True)
    assert np.array_equal(here.read(0, len(here)), there.read(0, len(there)))


def test_shards_that_were_copied_in_part_are_not_found(s3: S3Server, corpus: Path, tmp_path: Path) -> None:
    store = StoreConfig(url=f"s3://{BUCKET}/half")
    made, manifest = prepare(tmp_path / "here", corpus, store=StoreConfig())
    for name in ("tokenizer/tokenizer.json", f"{manifest.shards[0].name}.bin"):
        s3.put(f"half/tokens/{made.name}/{name}", (made / name).read_bytes())
    assert not find_shards(store, tmp_path / "there" / made.name)
    upload_shards(store, made)
    assert find_shards(store, tmp_path / "there" / made.name)


@pytest.mark.slow
def test_the_cache_stays_within_its_bound_and_the_batches_are_the_same(
    s3: S3Server, corpus: Path, tmp_path: Path
) -> None:
    made, _ = prepare(tmp_path / "here", corpus, store=StoreConfig())
    upload_shards(STORE, made)
    found, _ = prepare(tmp_path / "there", corpus)
    remote = RemoteShards.read(found / REMOTE)
    limit = 10 * blocks.BLOCK_BYTES
    assert sum(path.stat().st_size for path in made.rglob("*.bin")) > 3 * limit, "or nothing has to make room"
    remote.model_copy(update={"cache_gib": limit / 2**30}).write(found / REMOTE)
    for expected, got in zip(batches(made), batches(found), strict=True):
        assert torch.equal(expected, got)
        assert sum(path.stat().st_size for path in Path(remote.cache).iterdir()) <= limit + 17 * blocks.BLOCK_BYTES


def test_a_store_that_is_away_for_a_while_costs_no_batch(
    s3: S3Server, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = prepare(tmp_path / "here", corpus, store=StoreConfig())
    upload_shards(STORE, made)
    found, _ = prepare(tmp_path / "there", corpus)
    loader = Loader(plan(found), dp_rank=0, device=CPU)
    expected = batches(made)
    assert torch.equal(loader.share(0).batches[0].inputs, expected[0])
    cache = block_cache(found)
    _settle(cache)
    s3.faults.kind, s3.faults.count = "away", -1
    waited_s = cache.waited_s
    for step in range(1, STEPS):
        assert torch.equal(loader.share(step).batches[0].inputs, expected[step])
    assert cache.waited_s == waited_s, "all that the next steps need was there already"
    loader.close()


def test_a_read_waits_for_a_store_that_comes_back(
    s3: S3Server, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = prepare(tmp_path / "here", corpus, store=StoreConfig())
    upload_shards(STORE, made)
    found, _ = prepare(tmp_path / "there", corpus)
    stream = TokenStream(found, "train")
    s3.faults.kind, s3.faults.count = "500", 5
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(stream.read(0, len(stream)), TokenStream(made, "train").read(0, len(stream)))
    assert "cannot be read" in caplog.text
    assert block_cache(found).waited_s > 0


def test_a_block_that_is_not_what_was_written_is_never_used(s3: S3Server, corpus: Path, tmp_path: Path) -> None:
    made, manifest = prepare(tmp_path / "here", corpus, store=StoreConfig())
    store = StoreConfig(url=f"s3://{BUCKET}/damaged")
    upload_shards(store, made)
    found, _ = prepare(tmp_path / "there", corpus, store=store)
    stream, whole = TokenStream(found, "train"), TokenStream(made, "train")
    expected = whole.read(0, len(whole))
    assert np.array_equal(stream.read(0, len(stream)), expected)

    cut = sorted(Path(RemoteShards.read(found / REMOTE).cache).glob("train-*.bin.*"))[0]
    cut.write_bytes(cut.read_bytes()[:100])  # as after a crash
    block_cache.cache_clear()
    again = TokenStream(found, "train")
    assert np.array_equal(again.read(0, len(again)), expected), "the cut block was fetched again"

    name = f"{next(shard.name for shard in manifest.shards if shard.split == 'train')}.bin"
    content = bytearray((made / name).read_bytes())
    content[5] ^= 1
    s3.put(f"damaged/tokens/{found.name}/{name}", bytes(content))
    shutil.rmtree(cut.parent)
    block_cache.cache_clear()
    with pytest.raises(ValueError, match="block 0 is damaged"):
        TokenStream(found, "train").read(0, 10)


def _settle(cache: BlockCache) -> None:
    """Waits until nothing more is fetched."""
    fetched = -1
    while fetched != cache.fetched_bytes:
        fetched = cache.fetched_bytes
        time.sleep(1.0)

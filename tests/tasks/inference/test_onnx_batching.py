"""Texts that are made together are those that are made alone; one that ends, hangs up or fails leaves the others be."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.inference.onnx_batching import BatchedGenerator
from tasks.inference.onnx_generator import TextGenerator

PROMPTS = ["", "x", "def add(a", "0123456789" * 4, "größer, 中文", "0123456789abcdef", "q" * 31, "r" * 32]  # context 32
ENDLESS = {"new_tokens": 10**9, "stop_at_end": False}


@pytest.fixture
def generator(exported_run: Path) -> Iterator[BatchedGenerator]:
    generator = BatchedGenerator(exported_run / "export", rows=4, threads=1)
    yield generator
    generator.close()


@pytest.mark.parametrize("chunk_tokens", [8, 128])
def test_texts_made_together_are_those_made_alone(exported_run: Path, chunk_tokens: int) -> None:
    generator = BatchedGenerator(exported_run / "export", rows=4, chunk_tokens=chunk_tokens, threads=1)
    alone = TextGenerator(exported_run / "export", threads=1)
    several = [
        (prompt, {"new_tokens": 10 * number, "temperature": temperature, "seed": number, "stop_at_end": number < 4})
        for temperature in (0, 1.0)
        for number, prompt in enumerate(PROMPTS)
    ]
    expected = [alone.generate(prompt, **sampling) for prompt, sampling in several]
    with ThreadPoolExecutor(len(several)) as pool:

        def whole(request: tuple[str, dict[str, Any]]) -> str:
            return generator.generate(request[0], **request[1])

        def pieces(request: tuple[str, dict[str, Any]]) -> str:
            return "".join(generator.stream(request[0], **request[1]))

        assert list(pool.map(whole, several)) == expected
        assert list(pool.map(pieces, several)) == expected
    generator.close()


def test_int8_rounds_each_text_by_itself(exported_run: Path) -> None:
    """One scale for all texts of a step would make each depend on the others."""
    alone = TextGenerator(exported_run / "export", precision="int8", threads=1)
    together = BatchedGenerator(exported_run / "export", precision="int8", rows=4, threads=1)
    prompts, sampling = PROMPTS * 2, {"new_tokens": 20, "temperature": 0, "stop_at_end": False}
    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(lambda prompt: together.generate(prompt, **sampling), prompts))
    assert texts == [alone.generate(prompt, **sampling) for prompt in prompts]
    together.close()


def test_an_export_without_batch_onnx_is_stepped_row_by_row(
    generator: BatchedGenerator, exported_run: Path, tmp_path: Path
) -> None:
    earlier = shutil.copytree(exported_run / "export", tmp_path / "export", ignore=shutil.ignore_patterns("batch*"))
    both = BatchedGenerator(earlier, rows=2, threads=1), generator
    with ThreadPoolExecutor(4) as pool:
        texts = [list(pool.map(each.generate, PROMPTS[:4])) for each in both]
    assert texts[0] == texts[1]
    both[0].close()


def test_the_beginning_that_two_prompts_share_is_read_once(
    generator: BatchedGenerator, monkeypatch: pytest.MonkeyPatch, exported_run: Path
) -> None:
    read, lengths = generator._cache.read, []

    def counted(row: int, ids: list[int], start: int) -> np.ndarray:
        lengths.append(len(ids))
        return read(row, ids, start)

    monkeypatch.setattr(generator._cache, "read", counted)
    alone = TextGenerator(exported_run / "export", threads=1)
    running = generator.stream("0123456789abcdefgh", new_tokens=13, stop_at_end=False)  # it does not fill the context
    next(running)
    for prompt in ("0123456789abcdefXY", "0123456789abcdefXZ", "unlike"):
        text = generator.generate(prompt, new_tokens=5, temperature=0)
        assert text == alone.generate(prompt, new_tokens=5, temperature=0)
    assert lengths == [18, 2, 1, 6]


def test_one_that_is_closed_makes_room(generator: BatchedGenerator) -> None:
    streams = [generator.stream("x", **ENDLESS) for _ in range(generator.concurrent)]
    waiting = generator.stream("def add(a", new_tokens=5, stop_at_end=False)
    for stream in streams:
        next(stream)
    streams[0].close()
    assert len(waiting.read()) > 0
    assert (waiting.new_tokens, waiting.finish_reason) == (5, "length")
    assert list(streams[0]) == []
    never_begun = generator.stream("x", **ENDLESS)
    never_begun.close()
    assert never_begun.read() == ""
    next(streams[1])


def test_a_failed_step_ends_its_texts_and_the_next_ones_are_made(
    generator: BatchedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = generator.stream("x", **ENDLESS)
    next(stream)

    def fail(*_: np.ndarray) -> None:
        monkeypatch.undo()
        raise MemoryError("2 GiB more")

    monkeypatch.setattr(generator._cache, "step", fail)
    with pytest.raises(RuntimeError, match="MemoryError: 2 GiB more"):
        list(stream)
    assert generator.generate("x", new_tokens=3, stop_at_end=False)


def test_those_under_way_learn_that_it_was_closed(generator: BatchedGenerator) -> None:
    stream = generator.stream("x", **ENDLESS)
    next(stream)
    generator.close()
    with pytest.raises(RuntimeError, match="this model was closed"):
        list(stream)
    with pytest.raises(RuntimeError, match="this model was closed"):
        generator.stream("x")

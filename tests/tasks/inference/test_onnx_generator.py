"""Text from the exported folder: what transformers gives, in whole characters, the same every time."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tasks.data.corpus import prepare_corpus
from tasks.evaluation.checks import check_prompts
from tasks.inference.onnx_generator import (
    CopiedCache,
    InPlaceCache,
    Sampling,
    TextGenerator,
    TextStream,
    choose_token,
)
from training.config.data import DataConfig, TokenizerConfig

PROMPT = "def add(a"


@pytest.fixture(scope="module")
def generator(exported_run: Path) -> TextGenerator:
    return TextGenerator(exported_run / "export", threads=1)


class Scripted(TextGenerator):
    """Says the given tokens one after another, whatever comes before; all the rest is the real thing."""

    def __init__(self, export: Path, script: list[int]) -> None:
        super().__init__(export, threads=1)
        self.script = iter(script)
        self.seen: list[list[int]] = []

    def _logits(self, cache: InPlaceCache | CopiedCache, seen: list[int], read: int) -> np.ndarray:
        assert read in (0, len(seen) - 1)
        self.seen.append(list(seen))
        logits = np.zeros_like(super()._logits(cache, seen, read))
        logits[next(self.script)] = 1.0
        return logits


def test_greedy_text_is_what_transformers_generates(generator: TextGenerator, exported_run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(exported_run / "export")
    tokenizer = AutoTokenizer.from_pretrained(exported_run / "export")
    given = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**given, do_sample=False, max_new_tokens=20)[0, given["input_ids"].shape[1] :]
    text = generator.generate(PROMPT, new_tokens=20, temperature=0)
    assert text
    assert text == tokenizer.decode(ids, skip_special_tokens=True)
    assert generator.generate(PROMPT, new_tokens=20, temperature=1e-320) == text, "no division by it overflows"


def test_equal_seeds_give_equal_text_and_others_do_not(generator: TextGenerator) -> None:
    first, again, other = (generator.generate(PROMPT, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_pieces_add_up_to_the_text(generator: TextGenerator) -> None:
    pieces = list(generator.stream(PROMPT, new_tokens=100, temperature=1.0, top_k=0, seed=3))
    assert len(pieces) > 10
    assert "".join(pieces) == generator.generate(PROMPT, new_tokens=100, temperature=1.0, top_k=0, seed=3)


@pytest.mark.parametrize("prompt", ["x = ", "größer, 中"])
def test_characters_of_several_tokens_come_whole(exported_run: Path, prompt: str) -> None:
    text = "aé中文😀z"
    scripted = Scripted(exported_run / "export", list(text.encode()))
    assert list(scripted.stream(prompt, new_tokens=len(text.encode()), temperature=0)) == list(text)


@pytest.mark.parametrize(
    "content",
    [b"ab\xe4\xb8", b"\x80\x80\x80\x80\x80a", b"\xff\xfe\xe4\xb8\xad!", b"\xf0\x9f\x98", b"\xe4" * 9 + "中".encode()],
)
def test_bytes_that_are_no_text_become_replacement_characters(exported_run: Path, content: bytes) -> None:
    scripted = Scripted(exported_run / "export", list(content))
    assert scripted.generate("x", new_tokens=len(content), temperature=0) == content.decode(errors="replace")


def test_generation_ends_with_the_document(exported_run: Path) -> None:
    script = [*b"ab", 256, *b"cd"]
    assert Scripted(exported_run / "export", script).generate("x", new_tokens=5, temperature=0) == "ab"
    turn = Scripted(exported_run / "export", script)
    turn.end_ids = (256, ord("b"))  # as an instruct model has it: the end of a turn beside that of a document
    assert turn.generate("x", new_tokens=5, temperature=0) == "a"
    goes_on = Scripted(exported_run / "export", script)
    assert goes_on.generate("x", new_tokens=5, temperature=0, stop_at_end=False) == "abcd"


def test_a_full_context_goes_on_from_its_last_half(exported_run: Path) -> None:
    scripted = Scripted(exported_run / "export", list(b"ABCDE"))
    assert scripted.generate("0123456789" * 3, new_tokens=5, temperature=0) == "ABCDE"
    assert [len(ids) for ids in scripted.seen] == [30, 31, 32, 16, 17]
    assert bytes(scripted.seen[-1]) == b"7890123456789ABCD"


def test_a_prompt_beyond_the_context_is_cut_from_the_left(generator: TextGenerator) -> None:
    long = "x" * 100 + "0123456789" * 4
    assert generator.generate(long, temperature=0) == generator.generate(long[-32:], temperature=0) != ""


def test_an_empty_prompt_starts_a_document(exported_run: Path) -> None:
    scripted = Scripted(exported_run / "export", list(b"a"))
    assert scripted.generate("", new_tokens=1, temperature=0) == "a"
    assert scripted.seen == [[256]]


def test_sampling_follows_the_distribution_of_the_likeliest() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32))
    random = np.random.default_rng(0)
    counts = Counter(choose_token(logits, Sampling(temperature=1.0, top_k=2), random=random) for _ in range(4000))
    assert set(counts) == {2, 3}
    assert counts[3] / 4000 == pytest.approx(4 / 7, abs=0.03)
    counts = Counter(choose_token(logits, Sampling(temperature=0.5, top_k=0), random=random) for _ in range(4000))
    assert counts[0] / 4000 == pytest.approx(1 / 30, abs=0.02)
    counts = Counter(choose_token(logits, Sampling(temperature=1, top_p=0.65), random=random) for _ in range(4000))
    assert set(counts) == {2, 3}  # 0.4 alone is less than 0.65
    assert counts[3] / 4000 == pytest.approx(4 / 7, abs=0.03)


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_a_temperature_that_is_no_number_of_its_own_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature = .*: none may be below 0 or infinite"):
        Sampling(temperature=temperature)


def test_text_ends_before_a_stop_text_and_none_of_it_is_shown(exported_run: Path) -> None:
    script = [*b"one two twelve", 256]

    def stream(*stop: str) -> TextStream:
        return Scripted(exported_run / "export", script).stream("x", temperature=0, stop=stop)

    for stop, text in {"twe": "one two ", "o tw": "one tw", "elves": "one two twelve", " ": "one"}.items():
        stopped = stream(stop)
        pieces = list(stopped)
        assert ("".join(pieces), stopped.finish_reason) == (text, "stop")
        assert stopped.prompt_tokens == 1
    assert "".join(stream("lve", "two")) == "one "
    cut = Scripted(exported_run / "export", script).stream("x", new_tokens=5, temperature=0)
    assert ("".join(cut), cut.finish_reason, cut.new_tokens) == ("one t", "length", 5)


def test_numbers_below_zero_are_refused(generator: TextGenerator) -> None:
    for name, value in itertools.product(("new_tokens", "temperature", "top_k", "seed"), (-1,)):
        with pytest.raises(ValueError, match=f"{name} = -1"):
            generator.stream("x", **{name: value})  # type: ignore[arg-type]  # at the call, before any piece


def test_a_masked_model_has_nothing_to_continue(exported_run: Path, tmp_path: Path) -> None:
    record = json.loads((exported_run / "export" / "export.json").read_text())
    (tmp_path / "export.json").write_text(json.dumps({**record, "objective": "masked"}))
    with pytest.raises(ValueError, match="nothing to continue"):
        TextGenerator(tmp_path)


def test_a_folder_without_an_export_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no export\.json"):
        TextGenerator(tmp_path)


def test_no_torch_is_loaded(exported_run: Path) -> None:
    code = (
        "import sys; from tasks.inference.onnx_generator import TextGenerator; "
        f"TextGenerator({str(exported_run / 'export')!r}).generate('x', new_tokens=1); "
        "print({'torch', 'transformers', 'mlflow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_characters_that_the_tokenizer_does_not_know_are_named_before_any_training(tmp_path: Path) -> None:
    (tmp_path / "verse.txt").write_text("so much depends upon a red wheel barrow\n" * 20)
    data = DataConfig(path=str(tmp_path / "verse.txt"), tokenizer=TokenizerConfig(kind="characters"), split="tail")
    folder, shards = prepare_corpus(data, tokens_home=tmp_path / "tokens")
    check_prompts(folder / "tokenizer", shards.text_encoding, ["so much", ""])
    with pytest.raises(ValueError, match=r"evaluation.prompts: the prompt '赤 wheel!' has characters .*: '!赤'"):
        check_prompts(folder / "tokenizer", shards.text_encoding, ["so", "赤 wheel!"])

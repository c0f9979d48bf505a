"""Where no config names prompts, samples continue the text's own words; Python's are for the standard library."""

from pathlib import Path

import pytest

from tests.support.tiny_corpus import POEM, prepare, write_json_lines
from training.config.run import RunConfig
from training.shards.prompts import OF_STDLIB, sample_prompts

STORIES = [f"\n  Story {number} of the fox\nwho went over an extraordinarily long road." for number in range(60)]


def prompts_of(shards_dir: Path) -> tuple[str, ...]:
    return sample_prompts(RunConfig.model_validate({"data": {"path": "any"}}), shards_dir)


def test_prompts_are_the_first_words_of_held_out_documents(tmp_path: Path) -> None:
    corpus = write_json_lines(tmp_path / "stories.jsonl", STORIES)
    folder, shards = prepare(tmp_path, corpus, split="documents")
    config = RunConfig.model_validate({"data": {"path": str(corpus)}})
    prompts = sample_prompts(config, folder)
    assert len(prompts) == 3
    held_out = {" ".join(text.split()[:4]) for text in STORIES}
    assert set(prompts) <= held_out, shards.split_rule


def test_a_config_names_its_prompts_and_the_standard_library_gets_python(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"data": {"path": "stdlib"}})
    corpus = write_json_lines(tmp_path / "stories.jsonl", STORIES)
    assert sample_prompts(config, prepare(tmp_path, corpus)[0]) == OF_STDLIB
    letters = prepare(tmp_path, corpus, kind="characters")[0]
    assert sample_prompts(config, letters) == ("def ",), "its tokenizer has no letter c or p"
    chosen = {"data": {"path": "stdlib"}, "evaluation": {"prompts": ["Once"]}}
    assert sample_prompts(RunConfig.model_validate(chosen), tmp_path) == ("Once",)


@pytest.mark.parametrize(
    "text",
    ["Whoever reads this reads a text without any line end or a second document. " * 40, POEM * 40],
)
def test_held_out_text_that_begins_within_a_word_or_has_no_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.txt").write_text(text)
    folder, _ = prepare(tmp_path, tmp_path / "one.txt", kind="characters")
    (prompt,) = prompts_of(folder)
    assert 0 < len(prompt) <= 32
    assert prompt in text
    if " " in text:
        assert set(prompt.split()) <= set(text.split()), "whole words"


def test_a_mixture_gives_words_of_each_source(tmp_path: Path) -> None:
    sources = []
    for word in ("alpha", "beta"):
        texts = [f"{word} {number} tells of itself" for number in range(40)]
        sources.append({"path": str(write_json_lines(tmp_path / f"{word}.jsonl", texts))})
    folder, _ = prepare(tmp_path, "", sources=sources, split="documents")
    assert [prompt.split()[0] for prompt in prompts_of(folder)] == ["alpha", "beta"]


def test_documents_that_begin_with_the_end_token_give_words_too(tmp_path: Path) -> None:
    corpus = write_json_lines(tmp_path / "stories.jsonl", STORIES)
    folder, shards = prepare(tmp_path, corpus, split="documents", tokenizer={"bos": "yes"})
    assert shards.text_encoding.bos
    assert len(prompts_of(folder)) == 3

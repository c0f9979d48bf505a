"""A stranger's tokenizer: tokenizer.json says which tokens a text has, whatever its class and its other files say."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from tests.support.strangers_tokenizers import BY_THREES, END, STRANGERS, split_by, written
from tests.support.tokenizer_cases import CHATML
from training.tokenizer.chat_template import ChatTemplate
from training.tokenizer.pretrained import SAMPLES, open_pretrained, save

COMMON = ("GPT2Tokenizer", "LlamaTokenizer", "BertTokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "T5Tokenizer")


def all_classes() -> list[str]:
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    return sorted({name for name in TOKENIZER_MAPPING_NAMES.values() if name} | {"NoSuchTokenizer"})


def ids_of(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in SAMPLES]


def check_same(folder: Path, made: Tokenizer) -> None:
    """The door, what is saved of it, and what transformers reads of that, have the tokens of tokenizer.json."""
    from transformers import AutoTokenizer

    opened = open_pretrained(str(folder))
    assert ids_of(opened.tokenizer) == ids_of(made)
    assert opened.tokenizer.get_vocab() == made.get_vocab()
    save(opened.tokenizer, opened.config, folder / "saved")
    assert ids_of(Tokenizer.from_file(str(folder / "saved" / "tokenizer.json"))) == ids_of(made)
    theirs = AutoTokenizer.from_pretrained(folder / "saved")
    assert [theirs(text, add_special_tokens=False).input_ids for text in SAMPLES] == ids_of(made)
    assert theirs.get_vocab() == made.get_vocab()
    assert theirs.eos_token == END


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("tokenizer_class", COMMON)
def test_the_tokens_are_those_of_tokenizer_json_under_any_class(
    tmp_path: Path, kind: str, tokenizer_class: str
) -> None:
    made = STRANGERS[kind]()
    check_same(written(tmp_path / "given", made, tokenizer_class=tokenizer_class), made)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer_class", all_classes())
def test_no_class_of_the_release_changes_the_tokens(tmp_path: Path, tokenizer_class: str) -> None:
    for number, make in enumerate(STRANGERS.values()):
        made = make()
        check_same(written(tmp_path / str(number), made, tokenizer_class=tokenizer_class), made)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"add_bos_token": True}, "add_bos_token=true"),
        ({"add_eos_token": True}, "add_eos_token=true"),
        ({"add_prefix_space": True}, "add_prefix_space=true"),
        ({"do_lower_case": True}, "do_lower_case=true"),
        ({"split_special_tokens": True}, "split_special_tokens=true"),
        ({"fix_mistral_regex": True, "legacy": True, "clean_up_tokenization_spaces": True}, "fix_mistral_regex=true"),
        ({"added_tokens_decoder": {"7": {"content": END, "special": True}}}, f"'{END}' has ID 7, not 0"),
        ({"added_tokens_decoder": {"0": {"content": END, "lstrip": True}}}, f"'{END}' has lstrip=true"),
        ({"model_max_length": 16, "add_bos_token": False, "add_prefix_space": False, "legacy": False}, ""),
    ],
)
def test_what_other_files_say_otherwise_is_said_and_not_followed(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    made = split_by(BY_THREES)
    folder = written(tmp_path / "given", made, tokenizer_class="GPT2Tokenizer", **config)
    check_same(folder, made)
    notes = open_pretrained(str(folder)).notes
    assert [said in note for level, note in notes if level == logging.WARNING] == ([True] if said else [])
    assert ["GPT2Tokenizer would make other tokens" in note for level, note in notes if level == logging.INFO] == [True]


@pytest.mark.parametrize("before", [(), (END,)])
def test_what_stands_before_a_text_is_what_tokenizer_json_puts_there(tmp_path: Path, before: tuple[str, ...]) -> None:
    from transformers import AutoTokenizer

    made = split_by(BY_THREES)
    made.post_processor = processors.TemplateProcessing(single=[*before, "$A"], special_tokens=[(END, 0)])
    folder = written(tmp_path / "given", made, tokenizer_class="LlamaTokenizer", add_bos_token=not before)
    opened = open_pretrained(str(folder))
    save(opened.tokenizer, opened.config, tmp_path / "saved")
    expected = [0] * len(before) + made.encode("a b", add_special_tokens=False).ids
    assert opened.tokenizer.encode("a b").ids == expected
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("a b").input_ids == expected


def test_names_come_from_the_files_and_from_the_class_only_where_the_tokenizer_has_them(tmp_path: Path) -> None:
    made = split_by(BY_THREES)
    size = made.get_vocab_size()
    by_class = open_pretrained(str(written(tmp_path / "gpt2", made, tokenizer_class="GPT2Tokenizer")))
    assert by_class.names == dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
    no_names = open_pretrained(str(written(tmp_path / "llama", made, tokenizer_class="T5Tokenizer")))
    assert (no_names.names, no_names.tokenizer.get_vocab_size()) == ({"eos_token": END}, size)  # no <unk>, no <pad>
    folder = written(tmp_path / "map", made, tokenizer_class="PreTrainedTokenizerFast")
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "[PAD]", "lstrip": False}}))
    mapped = open_pretrained(str(folder))
    assert mapped.names == {"eos_token": END, "pad_token": "[PAD]"}
    assert mapped.tokenizer.token_to_id("[PAD]") == size


def test_tokens_that_only_the_other_files_name_are_added_with_their_ids(tmp_path: Path) -> None:
    made = split_by(BY_THREES)
    size = made.get_vocab_size()
    listed = {str(size): {"content": "<a>", "special": True}, str(size + 1): {"content": "<b>", "special": False}}
    config = {"additional_special_tokens": ["<c>"], "pad_token": "<d>"}
    opened = open_pretrained(str(written(tmp_path / "listed", made, added_tokens_decoder=listed, **config)))
    added = {number - size: each for number, each in opened.tokenizer.get_added_tokens_decoder().items() if number}
    assert {number: (each.content, each.special) for number, each in added.items()} == {
        0: ("<a>", True),
        1: ("<b>", False),
        2: ("<d>", True),
        3: ("<c>", True),
    }
    folder = written(tmp_path / "older", made)
    (folder / "added_tokens.json").write_text(json.dumps({"<a>": size}))
    assert open_pretrained(str(folder)).tokenizer.token_to_id("<a>") == size
    (folder / "added_tokens.json").write_text(json.dumps({"<a>": size + 5}))
    with pytest.raises(ValueError, match=rf"the token '<a>' the ID {size + 5}; .* would give it {size}: add it there"):
        open_pretrained(str(folder))


def test_flags_are_tokenizer_jsons(tmp_path: Path) -> None:
    """RoBERTa's mask takes the space before it; a file beside that says nothing of it changes nothing."""
    made = split_by(BY_THREES)
    made.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    opened = open_pretrained(str(written(tmp_path, made, tokenizer_class="RobertaTokenizer", mask_token="<mask>")))
    assert opened.tokenizer.encode("a <mask> b").tokens == made.encode("a <mask> b").tokens
    assert opened.names["mask_token"] == "<mask>"


@pytest.mark.parametrize("several", [False, True])
def test_the_chat_template_is_kept_whatever_file_it_is_in(tmp_path: Path, several: bool) -> None:
    from transformers import AutoTokenizer

    made = split_by(BY_THREES)
    folder = written(tmp_path / "given", made)
    (folder / "chat_template.jinja").write_text(CHATML)
    if several:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    opened = open_pretrained(str(folder))
    save(opened.tokenizer, opened.config, tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert opened.chat_template == ChatTemplate.of_folder(tmp_path / "saved").source == CHATML
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template
    assert theirs == ({"default": CHATML, "rag": "{{ documents }}"} if several else CHATML)


def test_without_tokenizer_json_it_is_made_by_its_class_and_said(tmp_path: Path) -> None:
    made = json.loads(split_by(BY_THREES).to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(made["vocab"]))
    merges = made["merges"]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{one} {other}\n" for one, other in merges))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    opened = open_pretrained(str(tmp_path))
    assert "has no tokenizer.json: its tokens are those of transformers' GPT2Tokenizer" in opened.notes[0][1]
    assert opened.tokenizer.decode(opened.tokenizer.encode("Hello 2026").ids) == "Hello 2026"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    with pytest.raises(ValueError, match=r"it has no tokenizer\.json, and transformers has only a slow tokenizer"):
        open_pretrained(str(tmp_path))

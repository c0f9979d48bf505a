"""Tokenizers of all kinds that people bring, by name, and texts that hold their special tokens."""

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.support.text_cases import (
    HELLOS,
    as_sentencepiece,
    byte_fallback,
    characters_without_unknown,
    letters_and_bytes,
    unigram,
    word_piece,
    words_without_unknown,
    write_tokenizer,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n" for text in HELLOS]


def _byte_level(*special_tokens: str, add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(HELLOS, trainer)
    return tokenizer


def chatml(folder: Path, *, template: str = CHATML) -> Path:
    """Three special tokens, of which the chat template writes two."""
    tokenizer = _byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return write_tokenizer(folder, tokenizer, eos_token="<|im_end|>", chat_template=template)


def byte_level_with_space(folder: Path) -> Path:
    """As RoBERTa has it: a space before each text."""
    return write_tokenizer(folder, _byte_level("</s>", add_prefix_space=True), eos_token="</s>")


def llama(folder: Path) -> Path:
    """As Llama 2 and Mistral have it: a space and `<s>` before each text; the template writes `<s>` and `</s>`."""
    tokenizer = letters_and_bytes("<unk>", "<s>", "</s>")
    as_sentencepiece(tokenizer)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return write_tokenizer(folder, tokenizer, chat_template=template, **specials)


def sentencepiece_over_words(folder: Path) -> Path:
    """A BPE that knows no words: its tokens reach over spaces and lines."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    as_sentencepiece(tokenizer)
    own = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=len(own) + 200, special_tokens=own, show_progress=False)
    tokenizer.train_from_iterator(["".join(HELLOS)], trainer)
    return write_tokenizer(folder, tokenizer, eos_token="</s>", unk_token="<unk>")


TOKENIZERS: dict[str, Callable[[Path], Path]] = {
    each.__name__: each
    for each in (
        unigram,
        characters_without_unknown,
        word_piece,
        byte_fallback,
        words_without_unknown,
        chatml,
        byte_level_with_space,
        llama,
    )
}

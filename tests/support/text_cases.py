"""Small corpora and tokenizers of situations that people have reported about programs that prepare text."""

import io
import json
import os
import random
import tarfile
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

STORIES = [f"Story {i}. Once there was a fox who counted to {i * 7} and slept.\n" for i in range(40)]
HELLOS = [f"Text number {i} says hello to the world, and the world says hello back.\n" for i in range(200)]
FOREIGN = [f"{text}naïve café Привет {i} 山中" for i, text in enumerate(HELLOS)]


def json_lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def parquet_of(texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), buffer)
    return buffer.getvalue()


def write_texts(folder: Path, *, start: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(STORIES, start):
        (folder / f"{number}.txt").write_text(text)
    return folder


def write_tar(path: Path, mode: str, *, format: int = tarfile.DEFAULT_FORMAT) -> Path:
    with tarfile.open(path, mode, format=format) as archive:  # type: ignore[call-overload]
        for number, text in enumerate(STORIES):
            entry = tarfile.TarInfo(f"{number:06d}.txt")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def write_zip(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for number, text in enumerate(STORIES):
            archive.writestr(f"{number}.txt", text)
    return path


def talk(*, closed: bool) -> list[str]:
    """Rows of a talk in which a quotation opens; it is closed two rows later, or never as CSV would have it."""
    rows = [f"Line {i} of a talk." for i in range(40)]
    if closed:
        rows[3:6] = ['"I opened the door.', "It was raining.", 'Nobody came."']
    else:
        rows[3], rows[25] = '"Stop,', 'he said "no" twice.'
    return rows


def write_table(path: Path, rows: list[str], *, delimiter: str) -> Path:
    lines = (f"{number}{delimiter}{row}\n" for number, row in enumerate(rows))
    path.write_text(f"id{delimiter}text\n" + "".join(lines))
    return path


def write_articles(folder: Path) -> Path:
    """A pretty-printed object in each file."""
    folder.mkdir()
    for number, text in enumerate(STORIES):
        (folder / f"{number:04d}.json").write_text(json.dumps({"id": number, "text": text}, indent=2))
    return folder


def write_odd_name(folder: Path) -> Path:
    """A file whose name is Latin-1."""
    write_texts(folder)
    with open(os.fsencode(folder) + b"/caf\xe9.txt", "wb") as file:
        file.write(b"A name from an old archive.\n")
    return folder


def write_languages(folder: Path, *, words: int = 12_000) -> Path:
    """Two languages in folders of their own: 30 files of English words, then 30 of Chinese ones."""
    rng = random.Random(0)
    stems = ["the", "and", "of", "to", "in", "was", "his", "her", "with", "for", "that"]
    english = [stem + ending for stem in stems for ending in ("", "re", "ly", "ing")]
    chinese = [chr(0x4E00 + rng.randrange(600)) + chr(0x4E00 + rng.randrange(600)) for _ in range(80)]
    for language, vocabulary, space in (("en", english, " "), ("zh", chinese, "")):
        (folder / language).mkdir(parents=True)
        for number in range(30):
            (folder / language / f"{number:02d}.txt").write_text(space.join(rng.choices(vocabulary, k=words)))
    return folder


# Tokenizers


def write_tokenizer(folder: Path, tokenizer: Tokenizer, **config: str) -> Path:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return folder


def unigram(folder: Path) -> Path:
    """As T5, XLM-R and ALBERT have it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(HELLOS, trainer)
    return write_tokenizer(folder, tokenizer, eos_token="</s>", unk_token="<unk>")


def characters_without_unknown(folder: Path) -> Path:
    """A BPE of characters, for which those that it does not know vanish."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], show_progress=False)
    tokenizer.train_from_iterator(HELLOS, trainer)
    return write_tokenizer(folder, tokenizer, eos_token="</s>")


def word_piece(folder: Path) -> Path:
    """As BERT has it: one unknown letter makes its whole word unknown."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(HELLOS, trainer)
    return write_tokenizer(folder, tokenizer, sep_token="[SEP]", unk_token="[UNK]")


def letters_and_bytes(*special_tokens: str) -> Tokenizer:
    """A BPE of the letters of HELLOS, and of bytes for all others."""
    alphabet = sorted({character for text in HELLOS for character in text} | {"▁"})
    tokens = [*special_tokens, *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))


def as_sentencepiece(tokenizer: Tokenizer) -> None:
    """Spaces are letters, and one stands before each text."""
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def byte_fallback(folder: Path) -> Path:
    """As Llama 2 has it: bytes stand for characters that are not in the vocabulary."""
    tokenizer = letters_and_bytes("<unk>", "</s>")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return write_tokenizer(folder, tokenizer, eos_token="</s>", unk_token="<unk>")


def words_without_unknown(folder: Path) -> Path:
    """A vocabulary of words, and no token for others: `tokenizers` raises an Exception for them."""
    words = sorted({word for text in HELLOS for word in text.split()} | {"</s>"})
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return write_tokenizer(folder, tokenizer, eos_token="</s>")

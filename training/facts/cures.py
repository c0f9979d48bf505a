"""The cures that errors and warnings on text, tokenizers and models end in: one table, each of them tried by a test."""

from __future__ import annotations

from enum import StrEnum


class Cure(StrEnum):
    """A cure for an error. tests/tasks/data/test_cures.py, and the files that it names, make each error, follow its
    cure, and find that it helps.

    FILE and COPY stand for names that the error has named, or that the person chooses.
    """

    # Files that are no text
    UNPACK = "unpack it into a folder, and give that"
    SAVE_AS_TEXT = "save it as text with Word or LibreOffice (`soffice --convert-to txt:Text FILE`), and give that"
    PDF = "save its text with `pdftotext FILE`, and give that"
    DECOMPRESS = "decompress it, and give that"
    TOKENIZED = "it is tokenized already: give the text that it was made from"
    # Which files are read
    EXCLUDE = "leave out with 'data.exclude=[{patterns}]'"
    INCLUDE = "'data.include=[{patterns}]' reads it as text"
    SKIP = "set data.on_error=skip"
    DEDUPLICATE = "data.deduplicate=exact counts each text once"
    VALIDATION_PATH = "data.validation_path={path} holds"
    # How they are read
    ENCODING = "set data.encoding={encoding}"
    ENCODING_OF_FILES = "set 'data.encoding={encodings}'"
    OTHER_ENCODING = "if it has another encoding, name that one, for example data.encoding=cp1252"
    COLUMN = "set data.column to one of them that holds text, {names}"
    JSON_FIELD = "set data.json_field={field}"
    JSON_FIELDS = "set data.json_field to one of its lists, {names}"
    DELIMITER = "set data.table.delimiter={delimiter}"
    QUOTED = "set data.table.quoting=csv"
    NOT_QUOTED = "set data.table.quoting=none"
    ABOVE_HEADER = "take the lines before it away: tail -n +{line} FILE > COPY"
    LINE_ENDS = "end them with LF: tr '\\r' '\\n' < FILE > COPY"
    PANDAS = "write an object per line, with to_json(FILE, orient='records', lines=True)"
    MEND = (
        "give data.encoding the encoding of that file, or, if the text itself is so, mend it, for example with the "
        "library ftfy"
    )
    # How they are split
    TAIL = "set data.split=tail"
    # Tokenizers and models
    TRAIN_TOKENIZER = "train one on this text with data.tokenizer.kind=bpe"
    END_TOKEN = "set eos_token in its tokenizer_config.json"
    NO_BOS = "data.tokenizer.bos=no"
    ITS_TOKENIZER = "data.tokenizer.kind=pretrained data.tokenizer.path={path}"
    VOCAB_SIZE = "set data.tokenizer.vocab_size to {size}, or to 0 for any size"
    DOWNLOAD = "download it, and give the copy"
    GIT_LFS = "run `git lfs pull` in {folder}"
    SAFETENSORS = "load it with transformers once and call save_pretrained(FOLDER), then give that folder"
    UNQUANTIZED = "give the model that they were made of"
    DEQUANTIZE = (
        "or load this one with transformers, from_pretrained(…, quantization_config={config}(dequantize=True)), call "
        "save_pretrained(FOLDER) and give that folder"
    )
    MERGE = "merge it with peft (merge_and_unload), call save_pretrained(FOLDER) and give that folder"
    ROWS = (
        "take the tokens without a row out of the tokenizer's files, or give them rows: load the model with "
        "transformers, call resize_token_embeddings({tokens}) and save_pretrained(FOLDER), and give that folder, with "
        "the tokenizer's files in it"
    )

    def __call__(self, **fields: object) -> str:
        """Return the cure with the names and values of this case."""
        text = str(self)
        for name, value in fields.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text

"""The data section of the config: where text comes from, and how it becomes tokens."""

from __future__ import annotations

import codecs
import itertools
import math
import re
from collections import Counter
from pathlib import PurePath
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from training.config.section import Section

# Tokens of a vocabulary before the corpus is tokenized, where the config does not tell their number.
ASSUMED_VOCAB = {"bpe": 4096, "bytes": 257, "characters": 128, "pretrained": 50_257}


class TokenizerConfig(Section):
    """The tokenizer that turns text into tokens."""

    kind: Literal["bpe", "pretrained", "characters", "bytes"] = "bpe"
    """The kind of tokenizer. bpe: a byte-level BPE is trained on the corpus. pretrained: a tokenizer is loaded from
    `path`. characters: each character of the corpus is a token. bytes: each UTF-8 byte is a token.
    """
    path: str = ""
    """Folder, URL or Hugging Face hub name of a pretrained tokenizer. It is used only with kind=pretrained."""
    vocab_size: int = Field(0, ge=0, le=2_000_000)
    """Number of tokens in the vocabulary of a trained BPE; 0 means 4096. With kind=pretrained, the number that the
    tokenizer must have; 0 accepts any.
    """
    sample_mib: int = Field(64, ge=1, le=10_000)
    """Amount of training text, in MiB, that a BPE tokenizer is trained on."""

    special_tokens_in_text: Literal["none", "template", "all"] = "template"
    """The special tokens that are special where a text holds them, such as `<|im_start|>`; all others are text like any
    other. template: those that the tokenizer's chat template writes, none without a template. all: every one, as code
    with fill-in-the-middle markers needs it. The rule holds for training, evaluation, samples and prompts alike.
    """
    bos: Literal["auto", "yes", "no"] = "auto"
    """Whether each document and each prompt begins with the tokenizer's beginning-of-sequence token. auto: where a
    pretrained model is continued, as its tokenizer does it; otherwise no.
    """

    @field_validator("bos", mode="before")
    @classmethod
    def read_yaml(cls, value: Any) -> Any:
        """Take the true and false that YAML makes of yes and no."""
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value

    @property
    def bpe_size(self) -> int:
        return self.vocab_size or ASSUMED_VOCAB["bpe"]

    @model_validator(mode="after")
    def check(self) -> TokenizerConfig:
        if self.kind == "pretrained" and not self.path:
            raise ValueError("data.tokenizer.path is empty: set it to a tokenizer's folder or hub name")
        if self.kind == "bpe" and self.bpe_size < 258:
            raise ValueError(
                f"data.tokenizer.vocab_size = {self.vocab_size} is below 258 (256 bytes + 2 special tokens): "
                "raise it, or use data.tokenizer.kind=bytes"
            )
        return self


class TableConfig(Section):
    """How .csv and .tsv files are written."""

    delimiter: str = Field("", max_length=1)
    """Character between two fields. Empty means a comma in .csv files, a tab in .tsv files."""
    quoting: Literal["auto", "csv", "none"] = "auto"
    """Meaning of double quotes. csv: a field that begins with one ends at the next one, and may hold delimiters and
    line ends. none: quotes are part of the text. auto: csv in .csv files, none in .tsv files.
    """
    escape: str = Field("", max_length=1)
    """Character that takes the meaning from the one after it, for example a backslash. Empty means none: inside quotes,
    a quote is written twice.
    """

    @field_validator("delimiter", "escape", mode="before")
    @classmethod
    def read_tab(cls, character: Any) -> Any:
        r"""Take `\t`, which is how a tab is written in a command."""
        return "\t" if character == r"\t" else character


SHARDS = "shards:"
Encodings = str | dict[str, str]


class SourceConfig(Section):
    """One of several corpora, and how much of the training text comes from it."""

    path: str = Field(min_length=1)
    """The corpus, as in the data section's `path`; or `shards:FOLDER`, the token shards of a run before, which had the
    same tokenizer.
    """
    name: str = Field("", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")
    """Name of the source in plans, metrics and reports; empty means the last part of `path`."""
    weight: float | None = Field(None, ge=0)
    """Share of the tokens seen, relative to the other weights: 3 is three times as many as 1, and of 0 only the
    held-out text is used. Without it `epochs` counts.
    """
    epochs: float | None = Field(None, ge=0)
    """Number of times that the run sees this source; of 0 only the held-out text is used. It is 1 if neither this nor
    `weight` is given.
    """
    column: str | None = None
    """This source's own data.column."""
    json_field: str | None = None
    """This source's own data.json_field."""
    table: TableConfig | None = None
    """This source's own data.table."""
    include: tuple[str, ...] | None = None
    """This source's own data.include."""
    exclude: tuple[str, ...] | None = None
    """This source's own data.exclude."""
    validation_path: str | None = None
    """This source's own data.validation_path."""
    where: str | None = None
    """This source's own data.where."""
    text_unit: Literal["file", "line", "paragraph"] | None = None
    """This source's own data.text_unit."""
    encoding: str | dict[str, str] | None = None
    """This source's own data.encoding."""
    hub_config: str | None = None
    """This source's own data.hub_config."""
    hub_revision: str | None = None
    """This source's own data.hub_revision."""
    hub_split: str | None = None
    """This source's own data.hub_split."""

    @property
    def seen(self) -> bool:
        """Whether the run trains on it, and does not only validate with it."""
        return (1.0 if self.weight is None else self.weight) > 0 and (1.0 if self.epochs is None else self.epochs) > 0

    @property
    def label(self) -> str:
        """`name`, or what `path` gives as one."""
        place = self.path.removeprefix("hub:").removeprefix(SHARDS)
        last = re.sub(r"[^\w.-]+", "-", PurePath(place).name, flags=re.ASCII).strip("-._")
        return self.name or last.partition(".")[0][:64] or "text"

    @field_validator("encoding")
    @classmethod
    def check_encoding(cls, given: Encodings | None) -> Encodings | None:
        return None if given is None else known_encodings(given)

    @model_validator(mode="after")
    def check(self) -> SourceConfig:
        if self.weight is not None and self.epochs is not None:
            raise ValueError(
                f"data.sources: {self.label} has weight = {self.weight:g} and epochs = {self.epochs:g}, and each says "
                "how much of it is seen: leave one out"
            )
        return self


class PhaseConfig(Section):
    """Other weights of the sources from some step on: the last part of training on better text, for example."""

    from_step: int | None = Field(None, ge=1)
    """Number of steps before this phase."""
    from_share: float | None = Field(None, gt=0, lt=1)
    """Share of the run's steps before this phase: 0.9 is its last tenth."""
    weights: dict[str, float]
    """Weight of each source, by name; a source without one is not seen in this phase."""

    @model_validator(mode="after")
    def check(self) -> PhaseConfig:
        if (self.from_step is None) == (self.from_share is None):
            raise ValueError("data.phases: a phase begins at from_step or at from_share: give one of them")
        bad = [name for name, weight in self.weights.items() if weight < 0 or not math.isfinite(weight)]
        if bad or not any(self.weights.values()):
            raise ValueError(
                f"data.phases: weights {self.weights} are not all at least 0 with one above it: change them"
            )
        return self

    def first_step(self, steps: int) -> int:
        """Number of steps before this phase, in a run of so many."""
        return self.from_step if self.from_step is not None else round((self.from_share or 0) * steps)


def known_encodings(given: Encodings) -> Encodings:
    """Return the names that Python has for encodings of text. Raises ValueError for one that it has not."""
    if isinstance(given, str):
        return known_encoding(given)
    return {pattern: known_encoding(name) for pattern, name in given.items()}


def known_encoding(name: str) -> str:
    """The name that Python has for an encoding of text. Raises ValueError if there is none."""
    try:
        "text".encode(name)
    except LookupError:
        raise ValueError(
            f"data.encoding={name} is no encoding that Python knows: give utf-8, gb18030, utf-16, latin-1 or "
            "another one of docs.python.org/3/library/codecs.html"
        ) from None
    return codecs.lookup(name).name


class EngineConfig(Section):
    """The engine that tokenizes the corpus: processes of this machine, or a cluster."""

    kind: Literal["local", "dask", "ray"] = "local"
    """What tokenizes the corpus. local: processes on this machine. dask, ray: a cluster, whose workers have Shardline
    installed and see the corpus and SHARDLINE_HOME under the same paths. All of them give the same tokens.
    """
    address: str = ""
    """Address of the cluster, such as tcp://head:8786 (Dask) or ray://head:10001 (Ray). Empty starts a cluster on this
    machine and ends it when the work is done.
    """

    @model_validator(mode="after")
    def check(self) -> EngineConfig:
        if self.address and self.kind == "local":
            raise ValueError(
                f"data.engine.address = {self.address} is a cluster's, data.engine.kind = local this machine: "
                "set data.engine.kind to dask or ray, or leave the address empty"
            )
        return self


class DataConfig(Section):
    """The corpus: where text comes from, and which part of it is held out."""

    path: str = ""
    """The corpus: `stdlib` (the standard library of this Python), a file or a folder (.txt .md .py .jsonl .csv .parquet
    …), a URL of one (s3:// gs:// az:// https:// hf://), or `hub:OWNER/NAME` for a Hugging Face dataset.
    """
    sources: tuple[SourceConfig, ...] = ()
    """Several corpora, used instead of `path`, and how much of the training text comes from each (a mixture)."""
    phases: tuple[PhaseConfig, ...] = ()
    """Changes of the sources' weights during training. Until the first phase begins, each source has its own weight."""
    include: tuple[str, ...] = ()
    """Read only the files whose path below the folder one of these patterns matches, such as `*.jsonl` or `en/*`. `*`
    stands for any characters, `/` too. A pattern that names a suffix (`*.dat`) also has such files read as text. Empty
    reads all files of a known suffix.
    """
    exclude: tuple[str, ...] = ()
    """Leave out the files whose path below the folder one of these patterns matches."""
    validation_path: str = ""
    """File, folder or URL of a ready-made validation part, also by its path below `path`. All of it is held out, and
    everything else is trained on; `split` and `validation_fraction` do not apply. For its files, `include` and
    `exclude` mean the path below it.
    """
    column: str = "text"
    """Name of the column or JSON key that holds the text. Text inside an object or a struct is named by its path:
    `content.text`.
    """
    json_field: str = ""
    """Name of the list that holds the rows, where a .json file is one object: `data` for {"data": [{"text": …}]}."""
    table: TableConfig = TableConfig()
    """How .csv and .tsv files are written."""
    where: str = ""
    """Keep only the rows of JSON, CSV or parquet files for which this expression over their columns is true, in Jinja's
    syntax: `metadata.score > 0.6 and lang == 'en'`. A column whose name is no plain word is named by a text: `'my
    score'|column > 0.6`. Empty keeps all rows.
    """
    text_unit: Literal["file", "line", "paragraph"] = "file"
    """What counts as one document in a plain-text file: the whole file, each line, or each paragraph."""
    encoding: str | dict[str, str] = "utf-8"
    """Encoding of text, JSON and CSV files that are not UTF-8, or of the lines in them that are not, by its name in
    Python: gb18030, utf-16, cp1252. What is UTF-8 is read as UTF-8. Or several, by patterns of files' names, of which
    the first that matches counts: `{"old/*": "cp1252", "*.sjis": "shift_jis"}`. It does not apply to parquet files and
    Hugging Face data sets.
    """
    hub_config: str = ""
    """Configuration name of a Hugging Face dataset; empty means its default."""
    hub_revision: str = ""
    """Commit or tag of a Hugging Face dataset; empty means its newest commit."""
    hub_split: str = "train"
    """Split of a Hugging Face dataset to read."""
    streaming: bool = False
    """Read a Hugging Face dataset as a stream instead of downloading it whole."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer that turns text into tokens."""
    split: Literal["auto", "documents", "tail", "all"] = "auto"
    """How the held-out validation text is chosen. documents: whole documents, by a hash of their name or position.
    tail: the last characters of the corpus. auto: documents if there are at least 20, else tail. all: everything is
    held out, for evaluation without training.
    """
    validation_fraction: float = Field(0.1, gt=0.0, lt=0.9)
    """Fraction of the documents (of the characters, with split=tail) that is held out for validation."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do with a document that cannot be read. stop: fail and say where it is. skip: leave it out
    and count it.
    """
    deduplicate: Literal["off", "exact"] = "off"
    """Whether to leave out a document whose text repeats an earlier document of any file. exact: only if every
    character is equal; this takes about 100 bytes of memory per document. The log has the number of documents left out.
    """
    shard_mib: int = Field(8, ge=1, le=4096)
    """Amount of text, in MiB, in one token shard."""
    processes: int = Field(0, ge=0, le=512)
    """Number of processes or threads on this machine that tokenize the corpus; 0 means one per core. It does not apply
    to a cluster with an address, which has its own number of workers.
    """
    engine: EngineConfig = EngineConfig()
    """Who tokenizes the corpus: this machine, or a cluster."""

    @field_validator("encoding")
    @classmethod
    def check_encoding(cls, given: Encodings) -> Encodings:
        return known_encodings(given)

    @field_validator("include", "exclude", mode="before")
    @classmethod
    def one_pattern(cls, patterns: Any) -> Any:
        return (patterns,) if isinstance(patterns, str) else patterns

    @model_validator(mode="after")
    def check_mixture(self) -> DataConfig:
        if self.path and self.sources:
            raise ValueError(
                f"data.path = {self.path} and data.sources ({len(self.sources)} of them) both name the corpus: "
                "give data.path= (empty), or make it one of data.sources"
            )
        if self.sources and self.validation_path:
            raise ValueError(
                f"data.validation_path = {self.validation_path} is one part for several sources: give it to the source "
                "that it belongs to, as data.sources[…].validation_path"
            )
        if self.sources and not any(source.seen for source in self.sources):
            raise ValueError("data.sources: all have weight or epochs 0, which leaves nothing to train on: raise one")
        names = [source.label for source in self.sources]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"data.sources: several are called {twice[0]}: give each of them a `name` of its own")
        if self.phases:
            self._check_phases(names)
        return self

    def _check_phases(self, names: list[str]) -> None:
        if by_epochs := [source.label for source in self.sources if source.weight is None]:
            raise ValueError(
                f"data.phases change weights, and {by_epochs[0]} has none: give every one of data.sources a weight"
            )
        for phase in self.phases:
            if unknown := sorted(set(phase.weights) - set(names)):
                raise ValueError(
                    f"data.phases: {unknown[0]} is none of data.sources ({', '.join(names) or 'there are none'}): "
                    "mend the name"
                )
        for earlier, later in itertools.pairwise(self.phases):
            begins = [
                (earlier.from_step, later.from_step),
                (earlier.from_share, later.from_share),
            ]
            if not any(a is not None and b is not None and a < b for a, b in begins):
                raise ValueError(
                    "data.phases must follow each other, all by from_step or all by from_share: sort them, and give "
                    "all of them in one unit"
                )

    @property
    def given(self) -> bool:
        """Whether a corpus is named at all."""
        return bool(self.path or self.sources)

    @property
    def described(self) -> str:
        """`path`, or the names of the sources in a sentence: `code, wiki and books`."""
        *others, last = [source.label for source in self.sources] or [self.path]
        return f"{', '.join(others)} and {last}" if others else last

    def of_source(self, source: SourceConfig) -> DataConfig:
        """The same settings for one source alone, with those of its own."""
        own = {name: value for name, value in source if name not in {"name", "weight", "epochs"} and value is not None}
        changes: dict[str, Any] = own | {"sources": (), "phases": ()}
        return self.model_copy(update=changes)

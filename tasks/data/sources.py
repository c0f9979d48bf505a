"""Finds the files of a corpus, each with its size and hash, in an order that never changes."""

from __future__ import annotations

import codecs
import io
import logging
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, Literal

from tasks.data.remote import RemoteFile, find_files
from tasks.data.row_filter import RowFilter
from tasks.hardware.machine import usable_cores
from training.config.data import SHARDS, DataConfig
from training.records.record import sha256_file
from training.records.token_shards import SourceFile
from training.shards.format import read_manifest
from training.store.urls import check_url, is_url

log = logging.getLogger(__name__)

Format = Literal["text", "json", "csv", "tsv", "parquet", "hub"]

TEXT_SUFFIXES = """
    .txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .css .scss .py .pyi .ipynb .js .mjs .jsx .ts .tsx
    .vue .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .java .kt .scala .go .rs .swift .rb .php .pl .pm .lua .r .jl
    .hs .ml .mli .ex .exs .erl .clj .lisp .el .scm .f .f90 .pas .cs .fs .vb .sql .sh .bash .zsh .fish .ps1 .bat
    .yaml .yml .toml .ini .cfg .conf .cmake .mk .dockerfile .proto .graphql .log .srt .vtt .po .bib
"""
FORMATS: dict[str, Format] = {
    **dict.fromkeys(TEXT_SUFFIXES.split(), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
EXAMPLES_KEPT = 10
RECODED_BYTES = 2**16


class SkippedDocuments:
    """The documents that a reader leaves out.

    Unreadable documents are counted, with some of their places, or the first one raises an error. Documents that repeat
    the text of an earlier one (data.deduplicate) are given by their numbers, which count all readable documents from 0.
    """

    def __init__(
        self,
        on_error: Literal["stop", "skip"],
        *,
        repeated: Collection[int] = (),
        digests: list[bytes] | None = None,
    ) -> None:
        """`digests`: if given, it collects the first 16 bytes of the sha256 of each document's text."""
        self.on_error = on_error
        self.count = 0
        self.examples: list[tuple[object, str]] = []  # place and problem
        self.num_repeated = 0
        self.num_filtered = 0
        self.digests = digests
        self._repeated = frozenset(repeated)
        self._number = 0

    def is_repeated(self, text_sha256: Callable[[], bytes]) -> bool:
        """Whether the next document is one of the repeated ones, which are counted."""
        if self.digests is not None:
            self.digests.append(text_sha256()[:16])
        repeated = self._number in self._repeated
        self._number += 1
        self.num_repeated += repeated
        return repeated

    def skip_or_raise(self, place: object, problem: str) -> None:
        """Count the document, or raise ValueError unless data.on_error=skip.

        `place` becomes text only if it is shown.
        """
        if self.on_error == "stop":
            raise ValueError(
                f"{place}: {problem}; correct it, or set data.on_error=skip to leave such documents out and count them"
            )
        self.count += 1
        if len(self.examples) < EXAMPLES_KEPT:
            self.examples.append((place, problem))


@dataclass(frozen=True)
class Source:
    """One file, or one split of a hub data set. `record.name` is relative to `data.path`, the same on every machine.

    `remote`: the place of a file behind a URL; `path` is then its name.
    """

    path: Path
    format: Format
    compression: str
    record: SourceFile
    encoding: str = "utf-8"
    remote: RemoteFile | None = None

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def suffix(self) -> str:
        """Return `.jsonl` for `a.jsonl.gz`."""
        return _suffixes(self.path)[0]

    @property
    def can_seek(self) -> bool:
        """Whether `open` gives the file's own bytes, so that any part can be read without the bytes before it."""
        return not self.compression and self.encoding == "utf-8" and self.format != "hub"

    def open(self, *, wanted_bytes: int | None = None) -> io.BufferedReader:
        """Open the decompressed text as UTF-8; reading raises OSError, with the place, for bytes of another encoding.

        It uses pyarrow: Python has no zstd before 3.14, and fsspec's zstd reads a truncated file without an error.
        """
        file = self.open_bytes(wanted_bytes=wanted_bytes)
        if self.compression:
            import pyarrow

            packed = pyarrow.PythonFile(file, mode="r")
            file = io.BufferedReader(pyarrow.CompressedInputStream(packed, self.compression))
        return file if self.encoding == "utf-8" else io.BufferedReader(_Recoded(file, self.encoding))

    def open_bytes(self, *, wanted_bytes: int | None = None) -> io.BufferedReader:
        """Open the file as it is. `wanted_bytes`: how many bytes will be read, if not all."""
        return self.remote.open(wanted_bytes=wanted_bytes) if self.remote else self.path.open("rb")


class _Recoded(io.RawIOBase):
    """The bytes of a file of another encoding, as UTF-8."""

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self.file, self.encoding, self.decoder = file, encoding, codecs.getincrementaldecoder(encoding)()
        self.left, self.position = b"", 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        block = b" "
        while block and not self.left:
            block = self.file.read(RECODED_BYTES)
            try:
                self.left = self.decoder.decode(block, final=not block).encode(errors="surrogatepass")
            except UnicodeDecodeError as error:
                stop = f"{self.position + len(block):,}"
                raise OSError(f"not {self.encoding} between bytes {self.position:,} and {stop}") from error
            self.position += len(block)
        part = self.left[: len(buffer)]
        buffer[: len(part)], self.left = part, self.left[len(part) :]
        return len(part)

    def close(self) -> None:
        self.file.close()
        super().close()


def find_sources(data: DataConfig, skipped: SkippedDocuments) -> list[Source]:
    """Return the files of `data.path`, sorted by name. Raises ValueError if there are none or one cannot be read."""
    check_path(data.path)
    if data.path.startswith("hub:"):
        return [_hub_source(data)]
    if data.path == "stdlib":
        return _hashed(_stdlib_files(skipped), skipped, encoding="utf-8")
    if is_url(data.path):
        return _remote_sources(data)
    path = Path(data.path).expanduser().absolute()  # a worker may have another working directory
    files = _folder_files(path, skipped) if path.is_dir() else [(path.name, path)]
    return _hashed(files, skipped, encoding=data.encoding)


def check_paths(data: DataConfig) -> None:
    """Raise ValueError if no corpus is given, a file or folder does not exist, or `where` is no expression."""
    for each in [data.of_source(source) for source in data.sources] or [data]:
        check_path(each.path)
        if each.where:
            RowFilter(each.where)


def check_path(path: str) -> None:
    """Raise ValueError if `path` is empty, or if no such file or folder exists."""
    if not path:
        raise ValueError(
            "data.path is empty: set data.path=FILE_OR_FOLDER, data.path=stdlib or data.path=hub:OWNER/NAME"
        )
    if path.startswith("hub:") or path == "stdlib":
        return
    if is_url(path):
        check_url(path, field="data.path")
        return
    if path.startswith(SHARDS):
        read_manifest(Path(path.removeprefix(SHARDS)).expanduser())
        return
    place = Path(path).expanduser()
    if not place.exists():
        raise ValueError(f"data.path={path} does not exist (looked for {place.absolute()}): correct the path")
    if not place.is_dir() and not place.is_file():
        raise ValueError(f"data.path={path} is neither a file nor a folder: give one of them")


def _hashed(files: list[tuple[str, Path]], skipped: SkippedDocuments, *, encoding: str) -> list[Source]:
    sources = []
    pool = ThreadPoolExecutor(usable_cores())  # hashing releases the interpreter lock
    try:
        for name, path, record in [(name, path, pool.submit(_record, name, path)) for name, path in files]:
            suffix, compression = _suffixes(path)
            try:
                sources.append(Source(path, FORMATS.get(suffix, "text"), compression, record.result(), encoding))
            except OSError as error:
                skipped.skip_or_raise(name, f"cannot be read ({error.strerror})")
    finally:  # after an error or Ctrl-C, do not hash the rest, which may be a terabyte
        pool.shutdown(cancel_futures=True)
    return sources


def _remote_sources(data: DataConfig) -> list[Source]:
    """Return the files at a URL, with the store's own hashes if it has them: then no file is read."""
    found = find_files(data.path)
    if len(found) > 1 or found[0].name != PurePath(data.path).name:
        known = [file for file in found if _suffixes(Path(file.name))[0] in FORMATS]
        if not known:
            kinds = Counter(Path(file.name).suffix or "no suffix" for file in found)
            raise _no_texts(data.path, kinds)
        found = known
    with ThreadPoolExecutor(usable_cores()) as pool:
        hashes = list(pool.map(lambda file: file.sha256, found))
    sources = []
    for file, sha256 in zip(found, hashes, strict=True):
        path = Path(file.name)
        suffix, compression = _suffixes(path)
        record = SourceFile(name=file.name, num_bytes=file.num_bytes, sha256=sha256)
        sources.append(Source(path, FORMATS.get(suffix, "text"), compression, record, data.encoding, file))
    return sources


def _record(name: str, path: Path) -> SourceFile:
    return SourceFile(name=name, num_bytes=path.stat().st_size, sha256=sha256_file(path))


def _suffixes(path: Path) -> tuple[str, str]:
    """Return suffix and compression: `.jsonl` and `gzip` for `a.jsonl.gz`."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSIONS:
        return Path(path.stem).suffix.lower(), COMPRESSIONS[suffix]
    return suffix, ""


def _stdlib_files(skipped: SkippedDocuments) -> list[tuple[str, Path]]:
    """Return the .py files of the standard library, without the few that declare another encoding than UTF-8."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [(name, path) for name, path in _walk(root, skipped, leave_out=NOT_STDLIB) if path.suffix == ".py"]
    if not files:
        raise ValueError(f"no .py files in {root}: this Python has no library of source files; set data.path=FOLDER")
    return [(name, path) for name, path in files if _is_utf8(path)]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _folder_files(root: Path, skipped: SkippedDocuments) -> list[tuple[str, Path]]:
    files, others = [], Counter[str]()
    for name, path in _walk(root, skipped):
        suffix, _ = _suffixes(path)
        if suffix in FORMATS:
            files.append((name, path))
        else:
            others[path.suffix or "no suffix"] += 1
    if not files:
        raise _no_texts(str(root), others)
    if others:
        log.info("%s: left out %d files whose suffix is not a text file's: %s", root, others.total(), _kinds(others))
    return files


def _kinds(suffixes: Counter[str]) -> str:
    return ", ".join(f"{suffix} ({count})" for suffix, count in suffixes.most_common(8))


def _no_texts(root: str, others: Counter[str]) -> ValueError:
    return ValueError(
        f"{root} holds no text, JSON lines, CSV or parquet files{f', only {_kinds(others)}' if others else ''}: "
        "set data.path to another folder, or to one file, which is read as text whatever its suffix"
    )


def _walk(root: Path, skipped: SkippedDocuments, *, leave_out: Collection[str] = ()) -> list[tuple[str, Path]]:
    """Return (relative name, path) of all files below, without hidden ones, sorted by name."""

    def unreadable(error: OSError) -> None:
        skipped.skip_or_raise(Path(error.filename).relative_to(root).as_posix(), f"cannot be read ({error.strerror})")

    def files() -> Iterator[tuple[str, Path]]:
        for parent, folders, names in os.walk(root, onerror=unreadable):
            folders[:] = [folder for folder in folders if not folder.startswith(".") and folder not in leave_out]
            for path in (Path(parent, name) for name in names if not name.startswith(".")):
                yield path.relative_to(root).as_posix(), path

    return sorted(files())


def _hub_source(data: DataConfig) -> Source:
    """Return a hub data set, pinned to a commit, which serves as content hash. A given commit needs no network."""
    name = data.path.removeprefix("hub:")
    is_commit = re.fullmatch(r"[0-9a-f]{40}", data.hub_revision)
    commit = data.hub_revision if is_commit else _commit_on_hub(name, data.hub_revision)
    part = "/".join(filter(None, (data.hub_config, data.hub_split)))
    return Source(Path(name), "hub", "", SourceFile(name=f"{name}/{part}", num_bytes=0, sha256=commit))


def _commit_on_hub(name: str, revision: str) -> str:
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(name, revision=revision or None).sha or ""
    except Exception as error:  # the library's own errors, or those of httpx, which newer versions rename
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise ValueError(
            f"data.path=hub:{name}: no answer from the hub ({reason}); check the name OWNER/NAME and the network, log "
            "in for a private set, or download it and set data.path=FOLDER"
        ) from error

"""Finds the files of a corpus, each with its size and hash, in an order that never changes."""

from __future__ import annotations

import codecs
import fnmatch
import glob
import heapq
import io
import logging
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal, Protocol

from tasks.data.contents import UNPACK, problem_of_bytes
from tasks.data.decompression import COMPRESSIONS, unpacked
from tasks.data.remote import RemoteFile, as_value_errors, find_files
from tasks.data.row_filter import RowFilter
from tasks.hardware.machine import usable_cores
from training.config.data import SHARDS, DataConfig
from training.records.record import sha256_file
from training.records.token_shards import LeftOut, SourceFile
from training.shards.format import read_manifest
from training.store.urls import check_url, is_url

log = logging.getLogger(__name__)

Format = Literal["text", "json", "csv", "tsv", "parquet", "arrow", "hub"]

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
    ".arrow": "arrow",
}
ARCHIVES = frozenset({".tar", ".tgz", ".tbz2", ".txz", ".tzst", ".zip", ".7z", ".rar"})
HIDDEN = (".", "~$")  # the latter are lock files of Microsoft Office
CACHES = "*cache-*.arrow"  # results of map and filter, which datasets keeps in a saved folder that it has loaded
# Files that `save_to_disk` of the library datasets writes beside .arrow files; they hold no text.
OF_DATASETS = frozenset({"dataset_info.json", "dataset_dict.json", "state.json"})
# Words in the names of files and folders that are a ready-made split.
TRAIN_NAMES = frozenset({"train", "training"})
HELD_OUT_NAMES = frozenset({"valid", "validation", "val", "dev", "eval", "test"})
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
EXAMPLES_KEPT = 10
RECODED_BYTES = 2**16
HEAD_BYTES = 2**12
LISTING_THREADS = max(16, usable_cores())  # on network disks and stores they mostly wait
KINDS_SHOWN = 6  # of the files that are left out


class InFile(Protocol):
    """A place in a file: the file's name, and the bytes of what begins there."""

    @property
    def file(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...


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
        self.bytes_by_file = Counter[str]()  # of what could not be read
        self.examples: list[tuple[str | InFile, str]] = []  # place and problem
        self.num_repeated = 0
        self.num_filtered = 0
        self.num_nuls = 0  # NUL characters in documents that are kept
        self.left_out: list[LeftOut] = []
        self.hints: list[str] = []
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

    def counts(self) -> dict[str, Any]:
        """Return what a ledger has of them, by its fields' names."""
        return {
            "repeated": self.num_repeated,
            "filtered": self.num_filtered,
            "skipped": self.count,
            "skipped_bytes": self.bytes_by_file.total(),
            "skipped_files": len(self.bytes_by_file),
            "nul_characters": self.num_nuls,
        }

    def skip_or_raise(
        self,
        place: str | InFile,
        problem: str,
        *,
        documents: int = 1,
        num_bytes: int | None = None,
        is_whole_file: bool = False,
    ) -> None:
        """Count the documents that are lost to the problem, or raise ValueError unless data.on_error=skip.

        `place`, a file's name or a place in it, becomes text only if it is shown. `num_bytes`: of the file, that are
        lost; None: those of the place. `is_whole_file`: nothing of the file can be read.
        """
        if self.on_error == "stop":
            cure = "; correct it, or set data.on_error=skip to leave such documents out and count them"
            raise ValueError(f"{place}: {problem}{'' if is_whole_file else cure}")
        self.count += documents
        file, size = (place, 0) if isinstance(place, str) else (place.file, place.size_bytes)
        self.bytes_by_file[file] += size if num_bytes is None else num_bytes
        if len(self.examples) < EXAMPLES_KEPT:
            self.examples.append((place, problem))


@dataclass(frozen=True)
class Source:
    """One file, or one split of a hub data set. `record.name` is relative to `data.path`, the same on every machine;
    bytes of a file's name that are not UTF-8 are written as \\xe9.

    `remote`: the place of a file behind a URL; `path` is then its name. `held_out`: a file of data.validation_path.
    `problem`: what the file is and the cure, if its first bytes say that it is no text; None: it was not looked at.
    """

    path: Path
    format: Format
    compression: str
    record: SourceFile
    encoding: str = "utf-8"
    remote: RemoteFile | None = None
    held_out: bool = False
    problem: str | None = None

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
        """Open the decompressed text as UTF-8; reading raises OSError, with the place, for bytes that do not fit."""
        file = self.open_unpacked(wanted_bytes=wanted_bytes)
        return file if self.encoding == "utf-8" else io.BufferedReader(_Recoded(file, self.encoding))

    def open_unpacked(self, *, wanted_bytes: int | None = None) -> io.BufferedReader:
        """Open the decompressed bytes; reading raises OSError if they break off."""
        file = self.open_bytes(wanted_bytes=wanted_bytes)
        return unpacked(file, self.compression) if self.compression else file

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


def find_sources(data: DataConfig, skipped: SkippedDocuments, *, hashed: bool = True) -> list[Source]:
    """Return the files of `data.path`, sorted by name, then those of `data.validation_path`.

    What is not read goes to `skipped.left_out`. Without `hashed` the hashes are empty, which takes no time. Raises
    ValueError if there are none or one cannot be read.
    """
    if data.validation_path:
        data = data.model_copy(update={"validation_path": _validation_place(data)})
    sources = _find(data, skipped, hashed=hashed)
    if not data.validation_path:
        return sources
    own = data.model_copy(update={"path": data.validation_path})
    held_out = _find(own, skipped, hashed=hashed, field="data.validation_path")
    places = {_place(source) for source in held_out}
    train = [source for source in sources if _place(source) not in places]
    if not train:
        raise ValueError(
            f"data.validation_path={data.validation_path} has all files of data.path={data.path}: give a part of them"
        )
    return train + [_as_held_out(source, data.validation_path) for source in held_out]


def _validation_place(data: DataConfig) -> str:
    """Return data.validation_path, or that path below data.path. Raises ValueError if both exist."""
    given = data.validation_path
    if is_url(given) or given == "stdlib" or given.startswith("hub:") or Path(given).expanduser().is_absolute():
        return given
    if is_url(data.path):
        return given if Path(given).exists() else f"{data.path.rstrip('/')}/{given}"
    inside = Path(data.path).expanduser() / given
    if not inside.exists():
        return given
    if Path(given).exists() and not inside.samefile(given):
        raise ValueError(
            f"data.validation_path={given} is here ({Path(given).absolute()}) and below data.path ({inside}): give the "
            "absolute path of one"
        )
    return str(inside)


def _as_held_out(source: Source, path: str) -> Source:
    """Return a held-out file under a name that no file of the corpus has."""
    folder = printable(PurePath(path).name)
    name = source.name if source.name == folder else f"{folder}/{source.name}"
    return replace(source, held_out=True, record=source.record.model_copy(update={"name": name}))


def _place(source: Source) -> str:
    return source.remote.url if source.remote else os.path.realpath(source.path)


def _find(data: DataConfig, skipped: SkippedDocuments, *, hashed: bool, field: str = "data.path") -> list[Source]:
    """Return the files of `data.path`, which the config's `field` names, without those below data.validation_path."""
    check_path(data.path, field=field)
    if data.path.startswith("hub:"):
        return [_hub_source(data)]
    if data.path == "stdlib":
        return _recorded(_stdlib_files(skipped), skipped, encoding="utf-8", hashed=hashed)
    if is_url(data.path):
        return _remote_sources(data, skipped, hashed=hashed, field=field)
    path = Path(data.path).expanduser().absolute()  # a worker may have another working directory
    files = _folder_files(path, data, skipped) if path.is_dir() else [(printable(path.name), path)]
    return _recorded(files, skipped, encoding=data.encoding, hashed=hashed)


def check_paths(data: DataConfig) -> None:
    """Raise ValueError if no corpus is given, a file or folder does not exist, or `where` is no expression."""
    for each in [data.of_source(source) for source in data.sources] or [data]:
        check_path(each.path)
        if each.validation_path:
            check_path(_validation_place(each), field="data.validation_path")
        if each.where:
            RowFilter(each.where)


def check_path(path: str, *, field: str = "data.path") -> None:
    """Raise ValueError if `path`, which the config's `field` names, is empty, or if no such file or folder exists."""
    if not path:
        raise ValueError(
            "data.path is empty: set data.path=FILE_OR_FOLDER, data.path=stdlib or data.path=hub:OWNER/NAME"
        )
    if path.startswith("hub:") or path == "stdlib":
        return
    if is_url(path):
        check_url(path, field=field)
        return
    if path.startswith(SHARDS):
        read_manifest(Path(path.removeprefix(SHARDS)).expanduser())
        return
    place = Path(path).expanduser()
    if not place.exists():
        raise ValueError(f"{field}={path} does not exist (looked for {place.absolute()}): correct the path")
    if not place.is_dir() and not place.is_file():
        raise ValueError(f"{field}={path} is neither a file nor a folder: give one of them")


def _recorded(files: list[tuple[str, Path]], skipped: SkippedDocuments, *, encoding: str, hashed: bool) -> list[Source]:
    sources = []
    pool = ThreadPoolExecutor(LISTING_THREADS)  # hashing releases the interpreter lock
    try:
        submitted = [(name, path, pool.submit(_source, name, path, encoding, hashed)) for name, path in files]
        for name, path, source in submitted:
            try:
                sources.append(source.result())
            except OSError as error:
                size = path.stat().st_size if path.exists() else 0
                skipped.skip_or_raise(name, f"cannot be read ({error.strerror})", num_bytes=size)
    finally:  # after an error or Ctrl-C, do not hash the rest, which may be a terabyte
        pool.shutdown(cancel_futures=True)
    return sources


def _source(name: str, path: Path, encoding: str, hashed: bool) -> Source:
    """Read a file's hash and its first bytes."""
    suffix, compression = _suffixes(path)
    record = SourceFile(name=name, num_bytes=path.stat().st_size, sha256=sha256_file(path) if hashed else "")
    source = Source(path, FORMATS.get(suffix, "text"), compression, record, encoding)
    return replace(source, problem=content_problem(source))


def check_contents(sources: Sequence[Source], skipped: SkippedDocuments) -> None:
    """Raise ValueError, unless data.on_error=skip, for archives beside the sources and for files that are no text."""
    if skipped.on_error == "skip":
        return
    for left_out in skipped.left_out:
        if left_out.refused:
            raise ValueError(f"{left_out.example} is an archive: {left_out.why}")
    cure = "; or set data.on_error=skip to leave such files out and count them" if len(sources) > 1 else ""
    for source in sources:
        if not source.remote and (problem := content_problem(source)):
            raise ValueError(f"{source.name} {problem}{cure}")


def content_problem(source: Source) -> str:
    """Return what the file is and the cure, if its first bytes say that it is not what its reader reads."""
    if source.problem is not None or source.format == "hub":
        return source.problem or ""
    try:
        with source.open_unpacked(wanted_bytes=HEAD_BYTES) as file:
            head = file.read(HEAD_BYTES)
    except OSError:  # its reader reports it
        return ""
    wanted = {"parquet": "parquet", "arrow": "an Arrow file"}.get(source.format, "")
    return problem_of_bytes(head, encoding=source.encoding, wanted=wanted)


def _remote_sources(data: DataConfig, skipped: SkippedDocuments, *, hashed: bool, field: str) -> list[Source]:
    """Return the files at a URL, with the store's own hashes if it has them: then no file is read."""
    found = find_files(data.path, field=field)
    if data.validation_path not in ("", data.path):
        found = [file for file in found if not f"{file.url}/".startswith(f"{data.validation_path.rstrip('/')}/")]
    if not found:
        return []
    if len(found) > 1 or found[0].name != PurePath(data.path).name:
        by_name = {file.name: file for file in found}
        sizes = {name: file.num_bytes for name, file in by_name.items()}
        kept = _chosen(data.path, sizes, data, skipped, head=lambda name: _head(by_name[name].open()))
        found = [by_name[name] for name in kept]
    with as_value_errors(f"{field}={data.path}"), ThreadPoolExecutor(LISTING_THREADS) as pool:
        hashes = list(pool.map(lambda file: file.sha256 if hashed else "", found))
    sources = []
    for file, sha256 in zip(found, hashes, strict=True):
        path = Path(file.name)
        suffix, compression = _suffixes(path)
        record = SourceFile(name=file.name, num_bytes=file.num_bytes, sha256=sha256)
        sources.append(Source(path, FORMATS.get(suffix, "text"), compression, record, data.encoding, file))
    return sources


def _suffixes(path: Path) -> tuple[str, str]:
    """Return suffix and compression: `.jsonl` and `gzip` for `a.jsonl.gz`."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSIONS:
        return Path(path.stem).suffix.lower(), COMPRESSIONS[suffix].name
    return suffix, ""


def _stdlib_files(skipped: SkippedDocuments) -> list[tuple[str, Path]]:
    """Return the .py files of the standard library, without the few that declare another encoding than UTF-8."""
    root = Path(sysconfig.get_path("stdlib"))
    found = _walk(root, skipped, leave_out=NOT_STDLIB, follow_links=False)
    files = [(name, path) for name, path in found if path.suffix == ".py"]
    if not files:
        raise ValueError(f"no .py files in {root}: this Python has no library of source files; set data.path=FOLDER")
    return [(name, path) for name, path in files if _is_utf8(path)]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _folder_files(root: Path, data: DataConfig, skipped: SkippedDocuments) -> list[tuple[str, Path]]:
    paths = dict(_walk(root, skipped))
    if data.validation_path not in ("", data.path) and not is_url(data.validation_path):
        apart = os.path.realpath(Path(data.validation_path).expanduser())
        kept = {name: path for name, path in paths.items() if not Path(os.path.realpath(path)).is_relative_to(apart)}
        if paths and not kept:
            return []
        paths = kept
    sizes = {name: path.stat().st_size if path.is_file() else 0 for name, path in paths.items()}
    chosen = _chosen(str(root), sizes, data, skipped, head=lambda name: _head(paths[name].open("rb")))
    return [(name, paths[name]) for name in chosen]


def _chosen(
    root: str, sizes: dict[str, int], data: DataConfig, skipped: SkippedDocuments, *, head: Callable[[str], bytes]
) -> list[str]:
    """Return the names of the files that are read; tell `skipped` about the others, and how they can be read.

    `sizes`: of all files, by name. `head` gives the first bytes of one.
    """
    include, exclude = _Patterns(data.include), _Patterns(data.exclude)
    asked = [name for name in sizes if (not data.include or include.match(name)) and not exclude.match(name)]
    if sizes and not asked:
        raise ValueError(
            f"data.include={', '.join(data.include) or '*'} and data.exclude={', '.join(data.exclude) or '(none)'} "
            f"leave none of the {len(sizes)} files of {root}, such as {min(sizes)}: change them"
        )
    beside_arrow = {str(PurePath(name).parent) for name in asked if name.endswith(".arrow")}
    beside_arrow |= {str(PurePath(folder).parent) for folder in beside_arrow}
    others: dict[str, list[str]] = {}
    kept = []
    for name in asked:
        path = PurePath(name)
        if str(path.parent) in beside_arrow and (path.name in OF_DATASETS or fnmatch.fnmatchcase(name, CACHES)):
            continue
        if _suffixes(Path(name))[0] in FORMATS or include.name_suffix(path):
            kept.append(name)
        else:
            others.setdefault("".join(path.suffixes[-2:]) if _is_archive(name) else path.suffix, []).append(name)
    if not kept:
        raise _no_texts(root, others, head)
    if len(asked) < len(sizes):
        unasked = sorted(sizes.keys() - {*asked})
        by_glob = _left_out("data.include, data.exclude", unasked, sizes, "not asked for")
        skipped.left_out.append(by_glob.model_copy(update={"asked": True, "refused": False}))
    by_size = sorted(
        others.items(), key=lambda each: (not _is_archive(each[1][0]), -sum(map(sizes.__getitem__, each[1])))
    )
    for suffix, names in by_size[:KINDS_SHOWN]:
        skipped.left_out.append(_left_out(suffix or "no suffix", names, sizes, _why_left_out(suffix, names, head)))
    if rest := [name for _, names in by_size[KINDS_SHOWN:] for name in names]:
        kinds = f"{len(by_size) - KINDS_SHOWN} other suffixes"
        skipped.left_out.append(_left_out(kinds, rest, sizes, "their suffixes are no text files'"))
    skipped.hints += _split_hints(kept, data)
    return kept


class _Patterns:
    """Patterns of file names, in which `*` stands for any characters, `/` too. There may be as many names as files."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.globs = [each for each in patterns if glob.has_magic(each)]
        self.names = {*patterns} - {*self.globs}

    def match(self, name: str) -> bool:
        return name in self.names or any(fnmatch.fnmatchcase(name, each) for each in self.globs)

    def name_suffix(self, path: PurePath) -> bool:
        """Whether a pattern names the suffix of a file, which is then read as text whatever the suffix is."""
        suffix = path.suffix or path.name  # a file without one is named by its whole name
        matching = (PurePath(each) for each in self.globs if fnmatch.fnmatchcase(str(path), each))
        return str(path) in self.names or any((each.suffix or each.name) == suffix for each in matching)


def _is_archive(name: str) -> bool:
    return bool({_suffixes(Path(name))[0], PurePath(name).suffix.lower()} & ARCHIVES)


def _left_out(kind: str, names: list[str], sizes: dict[str, int], why: str) -> LeftOut:
    num_bytes = sum(sizes[name] for name in names)
    refused = any(map(_is_archive, names))
    return LeftOut(kind=kind, files=len(names), num_bytes=num_bytes, example=names[0], why=why, refused=refused)


def _why_left_out(suffix: str, names: list[str], head: Callable[[str], bytes]) -> str:
    """Return what files of a suffix are, by some of them, or how they can be read."""
    if _is_archive(names[0]):
        return f"{UNPACK}, or name it in data.exclude"
    looked_at = () if suffix in COMPRESSIONS else dict.fromkeys((names[0], names[len(names) // 2], names[-1]))
    for name in looked_at:  # a compressed file's first bytes say nothing of its text
        try:
            problem = problem_of_bytes(head(name))
        except OSError as error:
            problem = f"cannot be read ({error.strerror or error})"
        if problem:
            return f"{'it' if name == names[0] else name} {problem}"
    one = PurePath(names[0])
    pattern = f"*{suffix}" if suffix else f"*/{one.name}" if len(one.parts) > 1 else one.name
    return f'its suffix is no text file\'s; \'data.include=["*","{pattern}"]\' reads it as text'


def _head(file: BinaryIO) -> bytes:
    with file:
        return file.read(HEAD_BYTES)


def _split_hints(kept: Collection[str], data: DataConfig) -> list[str]:
    """Say which files seem to be a ready-made validation or test part, and would be trained on.

    A folder is named only if all that is read of it seems to be held out. The manifest has these lines, so paths are
    relative to data.path.
    """
    if data.validation_path or data.split == "all":
        return []
    words = {name: set(re.split(r"[^a-z]+", name.lower())) for name in kept}
    held_out = sorted(name for name, own in words.items() if own & HELD_OUT_NAMES and not own & TRAIN_NAMES)
    if not held_out or not any(own & TRAIN_NAMES for own in words.values()):
        return []
    mixed = {str(parent) for name in words.keys() - set(held_out) for parent in PurePath(name).parents}
    places = dict.fromkeys(_largest_apart(name, mixed) for name in held_out)
    first, *others = places
    left_out = [glob.escape(place) + ("" if place in words else "/*") for place in others or places]
    globs = ",".join(f'"{each}"' for each in left_out[:KINDS_SHOWN]) + (",…" if left_out[KINDS_SHOWN:] else "")
    return [
        f"the corpus seems to be split already: {len(held_out)} of its {len(kept)} files, such as {held_out[0]}, are "
        f"not named as training text, and are trained on; data.validation_path={first} holds "
        f"{'out that part' if others else 'them out'}, 'data.exclude=[{globs}]' leaves "
        f"{'the others' if others else 'them'} out"
    ]


def _largest_apart(name: str, mixed: Collection[str]) -> str:
    """Return the largest folder around a file, or the file, that has no file of the `mixed` folders' other kind."""
    around = [str(parent) for parent in PurePath(name).parents if str(parent) not in mixed]
    return around[-1] if around else name


def _no_texts(root: str, others: dict[str, list[str]], head: Callable[[str], bytes]) -> ValueError:
    kinds = sorted(others.items(), key=lambda each: -len(each[1]))
    only = ", ".join(f"{suffix or 'no suffix'} ({len(names)})" for suffix, names in kinds[:8])
    reasons = "".join(f"; {names[0]}: {_why_left_out(suffix, names, head)}" for suffix, names in kinds[:3])
    return ValueError(
        f"{root} holds no text, JSON lines, CSV or parquet files{f', only {only}' if only else ''}{reasons}: "
        "set data.path to another folder"
    )


def printable(name: str) -> str:
    """Return a file's name as text that every record can hold: bytes that are not UTF-8 are written as \\xe9."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _walk(
    root: Path, skipped: SkippedDocuments, *, leave_out: Collection[str] = (), follow_links: bool = True
) -> list[tuple[str, Path]]:
    """Return (relative name, path) of all files below, without hidden ones, sorted by name.

    Links to folders are followed after all other folders, so that text that lies in the corpus already is not read
    again; a link back to a folder that contains the corpus is not followed.
    """
    seen: set[str] = set()
    links: list[Path] = []

    def unreadable(error: OSError) -> None:
        name = printable(Path(error.filename).relative_to(root).as_posix())
        skipped.skip_or_raise(name, f"cannot be read ({error.strerror})")

    def files(start: Path) -> Iterator[tuple[str, Path]]:
        for parent, folders, names in os.walk(start, onerror=unreadable):
            folders[:] = [folder for folder in folders if not folder.startswith(".") and folder not in leave_out]
            for link in (Path(parent, folder) for folder in folders if Path(parent, folder).is_symlink()):
                heapq.heappush(links, link)
            folders[:] = [folder for folder in folders if os.path.realpath(Path(parent, folder)) not in seen]
            seen.add(os.path.realpath(parent))
            for path in (Path(parent, name) for name in names if not name.startswith(HIDDEN)):
                name = printable(path.relative_to(root).as_posix())
                if path.exists() and not path.is_file():  # reading a pipe would wait for ever
                    skipped.skip_or_raise(name, "neither a file nor a folder")
                else:
                    yield name, path

    found = list(files(root))
    while follow_links and links:
        link = heapq.heappop(links)
        target = os.path.realpath(link)
        if target not in seen and not Path(os.path.realpath(root)).is_relative_to(target):
            found += files(link)
    return sorted(found)


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

"""Finds the files of a corpus, each with its size and hash, in an order that never changes."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import hashlib
import heapq
import io
import itertools
import logging
import os
import re
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal, Protocol

from tasks.data.contents import Format, Kind, format_of_name, recognize, settings_in, suffix_of
from tasks.data.decompression import COMPRESSIONS, compression_of, unpacked
from tasks.data.encodings import BadLines, GarbledText, Recoded, encoding_of, how_to_read
from tasks.data.remote import RemoteFile, find_files
from tasks.data.row_filter import RowFilter
from tasks.hardware.machine import usable_cores
from tasks.store.transfer import as_value_errors
from training.config.data import SHARDS, DataConfig
from training.facts.cures import Cure
from training.records.record import sha256_file
from training.records.token_shards import LeftOut, SourceFile
from training.records.words import counted
from training.shards.format import read_manifest
from training.store.urls import check_url, is_url

log = logging.getLogger(__name__)

HIDDEN = (".", "~$")  # the latter are lock files of Microsoft Office
CACHES = "*cache-*.arrow"  # results of map and filter, which datasets keeps in a saved folder that it has loaded
SETTINGS_BYTES = 2**20  # of a file of JSON that may be one object of settings
LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})  # their names say that each line is an object
# Words in the names of files and folders that are a ready-made split.
TRAIN_NAMES = frozenset({"train", "training"})
HELD_OUT_NAMES = frozenset({"valid", "validation", "val", "dev", "eval", "test"})
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
EXAMPLES_KEPT = 10
HEAD_BYTES = 2**12
ENDS_BYTES = 2**16  # of a file that is not hashed
LONGEST_HEAD = 2**18  # of .json, whose first line may be a long one of an object of several lines
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
        self.garbled = GarbledText()
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
            "garbled": self.garbled.count,
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
            cure = f"; correct it, or {Cure.SKIP} to leave such documents out and count them"
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

    `encoding`: of the file, or only of its lines that are `mixed` into UTF-8. `remote`: the place of a file behind a
    URL; `path` is then its name. `held_out`: a file of data.validation_path. `problem`: what the file is and the cure,
    if its first bytes say that it is no text. `is_known`: its name or its bytes say how it is read.
    """

    path: Path
    format: Format
    compression: str
    record: SourceFile
    encoding: str = "utf-8"
    remote: RemoteFile | None = None
    held_out: bool = False
    problem: str = ""
    is_known: bool = True
    mixed: BadLines | None = None

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def suffix(self) -> str:
        """Return `.jsonl` for `a.jsonl.gz`."""
        return suffix_of(self.path.name)

    @property
    def can_seek(self) -> bool:
        """Whether `open` gives the file's own bytes, so that any part can be read without the bytes before it."""
        return not self.compression and self.encoding == "utf-8" and self.format != "hub"

    def open(self, *, wanted_bytes: int | None = None) -> io.BufferedReader:
        """Open the decompressed text as UTF-8; reading raises OSError, with the place, for bytes that do not fit."""
        file = self.open_unpacked(wanted_bytes=wanted_bytes)
        if self.encoding == "utf-8":
            return file
        return io.BufferedReader(Recoded(file, self.encoding, by_line=self.mixed is not None))

    def open_unpacked(self, *, wanted_bytes: int | None = None) -> io.BufferedReader:
        """Open the decompressed bytes; reading raises OSError if they break off."""
        file = self.open_bytes(wanted_bytes=wanted_bytes)
        return unpacked(file, self.compression) if self.compression else file

    def open_bytes(self, *, wanted_bytes: int | None = None) -> io.BufferedReader:
        """Open the file as it is. `wanted_bytes`: how many bytes will be read, if not all."""
        return self.remote.open(wanted_bytes=wanted_bytes) if self.remote else self.path.open("rb")

    def start(self) -> bytes:
        """Return the first bytes of the text, by which it is recognized."""
        size = LONGEST_HEAD if self.suffix == ".json" else HEAD_BYTES
        with self.open(wanted_bytes=size) as file:
            return file.read(size)


def find_sources(data: DataConfig, skipped: SkippedDocuments, *, hashed: bool = True) -> list[Source]:
    """Return the files of `data.path`, sorted by name, then those of `data.validation_path`.

    What is not read goes to `skipped.left_out`. Without `hashed` the hashes are empty, which takes no time. Raises
    ValueError if there are none or one cannot be read.
    """
    if not data.validation_path:
        sources = _find(data, skipped, hashed=hashed)
        return sources if data.path == "stdlib" else _once(sources, data, skipped)
    data = data.model_copy(update={"validation_path": _validation_place(data)})
    sources = _find(data, skipped, hashed=hashed)
    own = data.model_copy(update={"path": data.validation_path})
    found = _find(own, skipped, hashed=hashed, field="data.validation_path")
    places = {_place(source) for source in found}
    held_out = [_as_held_out(source, data.validation_path) for source in found]
    apart = [source for source in sources if _place(source) not in places]
    once = _once([*held_out, *apart], data, skipped)  # what is held out is not trained on in a copy either
    train = [source for source in once if not source.held_out]
    if not train:
        raise ValueError(
            f"data.validation_path={data.validation_path} has all files of data.path={data.path}: give a part of them"
        )
    return train + [source for source in once if source.held_out]


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
        return _hashed(_stdlib_files(skipped), skipped, hashed=hashed)
    if is_url(data.path):
        files = _remote_files(data, field=field)
        is_one = len(files) == 1 and files[0].name == PurePath(data.path.partition("?")[0]).name
        found = [_remote_source(file) for file in files]
    else:
        path = Path(data.path).expanduser().absolute()  # a worker may have another working directory
        is_one = not path.is_dir()
        found = [_local_source(printable(path.name), path)] if is_one else _folder_files(path, data, skipped)
    if not found:
        return []
    kept = _looked_at(found, data) if is_one else _chosen(data.path, found, data, skipped)
    skipped.hints += [
        f"{source.name} is UTF-8 but for {source.mixed}, which are read as {source.encoding}"
        for source in kept
        if source.mixed
    ]
    with as_value_errors(f"{field}={data.path}") if is_url(data.path) else contextlib.nullcontext():
        return _hashed(kept, skipped, hashed=hashed)


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


def _local_source(name: str, path: Path) -> Source:
    num_bytes = path.stat().st_size if path.is_file() else 0
    return Source(path, "text", "", SourceFile(name=name, num_bytes=num_bytes, sha256=""))


def _remote_source(file: RemoteFile) -> Source:
    record = SourceFile(name=file.name, num_bytes=file.num_bytes, sha256="")
    return Source(Path(file.name), "text", "", record, remote=file)


def _remote_files(data: DataConfig, *, field: str) -> list[RemoteFile]:
    found = find_files(data.path, field=field)
    if data.validation_path in ("", data.path):
        return found
    apart = f"{data.validation_path.rstrip('/')}/"
    return [file for file in found if not f"{file.url}/".startswith(apart)]


def _hashed(sources: list[Source], skipped: SkippedDocuments, *, hashed: bool) -> list[Source]:
    """Return the sources with their hashes: the store's own, if it has them, so that no file is read."""

    def with_hash(source: Source) -> Source:
        if source.remote:
            sha256 = source.remote.sha256 if hashed or source.remote.identity else ""
        else:
            source.path.stat()
            sha256 = sha256_file(source.path) if hashed else ""
        return replace(source, record=source.record.model_copy(update={"sha256": sha256}))

    made = []
    pool = ThreadPoolExecutor(LISTING_THREADS)  # hashing releases the interpreter lock
    try:
        for source, done in [(source, pool.submit(with_hash, source)) for source in sources]:
            try:
                made.append(done.result())
            except OSError as error:
                if source.remote:
                    raise
                size = source.record.num_bytes
                skipped.skip_or_raise(source.name, f"cannot be read ({error.strerror})", num_bytes=size)
    finally:  # after an error or Ctrl-C, do not hash the rest, which may be a terabyte
        pool.shutdown(cancel_futures=True)
    return made


def _looked_at(sources: Sequence[Source], data: DataConfig) -> list[Source]:
    """Return the sources as their bytes say what they are."""
    with ThreadPoolExecutor(LISTING_THREADS) as pool:
        return list(pool.map(lambda source: _recognized(source, data), sources))


def _recognized(source: Source, data: DataConfig) -> Source:
    """Return a source as its first bytes say what it is, or as its name says if it cannot be opened."""
    by_name = format_of_name(source.name)
    source = replace(source, format=by_name or "text", is_known=by_name is not None)
    wanted = encoding_of(data.encoding, source.name)

    def members() -> list[str]:
        with contextlib.suppress(zipfile.BadZipFile), source.open_bytes() as file, zipfile.ZipFile(file) as archive:
            return archive.namelist()
        return []

    def kind() -> Kind:
        packed = bool(source.compression)
        return recognize(source.start(), source.name, encoding=wanted, is_compressed=packed, members=members)

    try:
        with source.open_bytes(wanted_bytes=HEAD_BYTES) as file:
            source = replace(source, compression=compression_of(file.peek(HEAD_BYTES)))
        found = kind()
        if wanted != "utf-8" and not found.problem and found.format not in ("parquet", "arrow"):
            with source.open_unpacked() as file:
                encoding, mixed = how_to_read(file, wanted)
            source = replace(source, encoding=encoding, mixed=mixed)
            found = kind()
    except OSError as error:  # the reader of a file that is known reports it
        return source if source.is_known else replace(source, problem=f"cannot be read ({error.strerror or error})")
    return replace(source, format=found.format, problem=found.problem, is_known=source.is_known or found.by_bytes)


def check_contents(sources: Sequence[Source], skipped: SkippedDocuments) -> None:
    """Raise ValueError, unless data.on_error=skip, for what must not be left out unasked, and for files that are no
    text.
    """
    if skipped.on_error == "skip":
        return
    for left_out in skipped.left_out:
        if left_out.refused:
            raise ValueError(f"{left_out.example}: {left_out.why}")
    cure = f"; or {Cure.SKIP} to leave such files out and count them" if len(sources) > 1 else ""
    for source in sources:
        if source.problem:
            raise ValueError(f"{source.name} {source.problem}{cure}")


def _once(sources: list[Source], data: DataConfig, skipped: SkippedDocuments) -> list[Source]:
    """Return the sources without files that are there twice: links, copies of many documents, compressed copies.

    Files of one document each may be equal, as documents may (data.deduplicate); that is said.
    """
    firsts: dict[str, Source] = {}
    kept, copies, equal = [], list[tuple[Source, Source]](), list[tuple[Source, Source]]()
    for source, keys in zip(sources, _text_keys(sources), strict=True):
        found = next(((key, firsts[key]) for key in keys if key in firsts), None)
        if found and not source.held_out and not (found[0] == keys[-1] and _is_one_document(source, data)):
            copies.append((source, found[1]))
            continue
        if found:
            equal.append((source, found[1]))
        kept.append(source)
        firsts |= dict.fromkeys(keys, source)
    if copies:
        why = f"it has the text of {copies[0][1].name}, which counts once"
        skipped.left_out.append(_left_out("copies", [copy for copy, _ in copies], why))
    if equal and data.deduplicate == "off":
        copy, first = equal[0]
        skipped.hints.append(
            f"{counted(len(equal), 'file')} {'has' if len(equal) == 1 else 'have'} the text of another one, such as "
            f"{copy.name} that of {first.name}; {Cure.DEDUPLICATE}"
        )
    return kept


def _is_one_document(source: Source, data: DataConfig) -> bool:
    return source.format == "json objects" or (source.format == "text" and data.text_unit == "file")


def _text_keys(sources: Sequence[Source]) -> list[list[str]]:
    """Return by what files with the same text are known: their place on disk, beside a compressed file of the same name
    a hash of the unpacked bytes, and last a hash of their bytes. Of files that are not hashed, their ends are.
    """
    sizes = Counter(source.record.num_bytes for source in sources)
    by_name: dict[str, list[int]] = {}
    keys: list[list[str]] = []
    for number, source in enumerate(sources):
        record = source.record
        own = record.sha256 or (_hash_of_ends(source) if sizes[record.num_bytes] > 1 else "")
        keys.append([_place_on_disk(source), own or source.name] if record.num_bytes else [source.name])
        by_name.setdefault(_unpacked_name(source), []).append(number)
    for numbers in by_name.values():
        if len(numbers) == 1 or not any(sources[number].compression for number in numbers):
            continue
        starts = {number: _hash_of_text(sources[number], ENDS_BYTES) for number in numbers}
        same = Counter(starts.values())
        for number, start in starts.items():
            if start and same[start] > 1:
                is_hashed = bool(sources[number].record.sha256)
                keys[number].insert(0, _hash_of_text(sources[number], None) if is_hashed else start)
    return keys


def _unpacked_name(source: Source) -> str:
    path = PurePath(source.name)
    return path.stem if path.suffix.lower() in COMPRESSIONS else path.name


def _place_on_disk(source: Source) -> str:
    """Return what links to a file, hard ones too, have in common with it."""
    with contextlib.suppress(OSError):
        if not source.remote:
            status = source.path.stat()
            return f"{status.st_dev}:{status.st_ino}"
    return source.name


def _hash_of_ends(source: Source) -> str:
    """Return a hash of a file's size and both its ends; empty if it is not here, or cannot be read."""
    if source.remote or source.format == "hub":
        return ""
    size = source.record.num_bytes
    with contextlib.suppress(OSError), source.path.open("rb") as file:
        start = file.read(ENDS_BYTES)
        file.seek(max(0, size - ENDS_BYTES))
        return hashlib.sha256(b"%d %b%b" % (size, start, file.read(ENDS_BYTES))).hexdigest()
    return ""


def _hash_of_text(source: Source, num_bytes: int | None) -> str:
    """Return a hash of the unpacked bytes, or of the first of them; empty if they cannot be read."""
    with contextlib.suppress(OSError), source.open_unpacked(wanted_bytes=num_bytes) as file:
        if num_bytes is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        return hashlib.sha256(file.read(num_bytes)).hexdigest()
    return ""


def _stdlib_files(skipped: SkippedDocuments) -> list[Source]:
    """Return the .py files of the standard library, without the few that declare another encoding than UTF-8."""
    root = Path(sysconfig.get_path("stdlib"))
    found = _walk(root, skipped, leave_out=NOT_STDLIB, follow_links=False)
    files = [(name, path) for name, path in found if path.suffix == ".py"]
    if not files:
        raise ValueError(f"no .py files in {root}: this Python has no library of source files; set data.path=FOLDER")
    return [_local_source(name, path) for name, path in files if _is_utf8(path)]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _folder_files(root: Path, data: DataConfig, skipped: SkippedDocuments) -> list[Source]:
    found = _walk(root, skipped)
    if data.validation_path not in ("", data.path) and not is_url(data.validation_path):
        apart = os.path.realpath(Path(data.validation_path).expanduser())
        found = [(name, path) for name, path in found if not Path(os.path.realpath(path)).is_relative_to(apart)]
    elif not found:
        raise _no_texts(str(root), {}, data)
    return [_local_source(name, path) for name, path in found]


def _chosen(root: str, found: list[Source], data: DataConfig, skipped: SkippedDocuments) -> list[Source]:
    """Return the files that are read; tell `skipped` about the others, and how they can be read."""
    include, exclude = _Patterns(data.include), _Patterns(data.exclude)
    asked = [
        source
        for source in found
        if (not data.include or include.match(source.name)) and not exclude.match(source.name)
    ]
    if not asked:
        raise ValueError(
            f"data.include={', '.join(data.include) or '*'} and data.exclude={', '.join(data.exclude) or '(none)'} "
            f"leave none of the {len(found)} files of {root}, such as {found[0].name}: change them"
        )
    others: dict[tuple[str, str], list[Source]] = {}
    kept = []
    for source in _looked_at(asked, data):
        if fnmatch.fnmatchcase(source.name, CACHES):
            continue
        if source.is_known or include.name_suffix(PurePath(source.name)):
            kept.append(source)
        else:
            suffixes = PurePath(source.name).suffixes[-2 if _is_archive(source) else -1 :]
            others.setdefault(("".join(suffixes) or "no suffix", source.problem), []).append(source)
    if not kept:
        raise _no_texts(root, others, data)
    if len(asked) < len(found):
        kept_names = {source.name for source in asked}
        unasked = [source for source in found if source.name not in kept_names]
        by_glob = _left_out("data.include, data.exclude", unasked, "not asked for")
        skipped.left_out.append(by_glob.model_copy(update={"asked": True}))
    kept = _without_settings(kept, data, skipped)
    by_size = sorted(others.items(), key=lambda each: (not _is_archive(each[1][0]), -_num_bytes(each[1])))
    for (kind, _), sources in by_size[:KINDS_SHOWN]:
        refused, why = _is_archive(sources[0]), _why_left_out(sources, data)
        if refused:
            why += f", or {Cure.EXCLUDE(patterns=_patterns(data.exclude, _globs_of(sources)))}"
        skipped.left_out.append(_left_out(kind, sources, why).model_copy(update={"refused": refused}))
    if rest := [source for _, sources in by_size[KINDS_SHOWN:] for source in sources]:
        kinds = f"{len(by_size) - KINDS_SHOWN} other kinds"
        skipped.left_out.append(_left_out(kinds, rest, "neither their names nor their first bytes are a text's"))
    skipped.hints += _split_hints([source.name for source in kept], data)
    return kept


def _without_settings(kept: list[Source], data: DataConfig, skipped: SkippedDocuments) -> list[Source]:
    """Return the files without objects of JSON that hold no text, such as package.json, where there are other files.

    If those have more bytes than the others, the text may be in them, under another key: that is refused.
    """
    with ThreadPoolExecutor(LISTING_THREADS) as pool:
        found = list(pool.map(lambda source: _settings_in(source, data), kept))
    settings = [source for source, keys in zip(kept, found, strict=True) if keys is not None]
    rest = [source for source, keys in zip(kept, found, strict=True) if keys is None]
    if not settings or not rest:
        return kept
    texts = sorted({key for keys in found if keys for key in keys})[:KINDS_SHOWN]
    patterns = dict.fromkeys(f"*{glob.escape(PurePath(source.name).name)}" for source in settings)
    why = f"an object without the key {data.column!r}, as settings are"
    if refused := _num_bytes(settings) > _num_bytes(rest):
        why += f"; {Cure.EXCLUDE(patterns=_patterns(data.exclude, patterns))}"
        why += f", or, if it is a document, {Cure.COLUMN(names=', '.join(map(repr, texts)))}" if texts else ""
    left_out = _left_out(f"JSON without {data.column!r}", settings, why)
    skipped.left_out.append(left_out.model_copy(update={"refused": refused}))
    return rest


def _settings_in(source: Source, data: DataConfig) -> list[str] | None:
    """Return the keys of a file's texts if it is one object of JSON without the text that is read; otherwise None."""
    if source.format not in ("json lines", "json objects") or source.suffix in LINES_SUFFIXES:
        return None
    if source.problem or source.record.num_bytes > SETTINGS_BYTES:
        return None
    with contextlib.suppress(OSError), source.open(wanted_bytes=SETTINGS_BYTES) as file:
        return settings_in(file.read(SETTINGS_BYTES), data.column, data.json_field)
    return None


class _Patterns:
    """Patterns of file names, in which `*` stands for any characters, `/` too. There may be as many names as files."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.globs = [each for each in patterns if glob.has_magic(each)]
        self.names = {*patterns} - {*self.globs}

    def match(self, name: str) -> bool:
        return name in self.names or any(fnmatch.fnmatchcase(name, each) for each in self.globs)

    def name_suffix(self, path: PurePath) -> bool:
        """Whether a glob names a file's suffix, or a part of the name of one without: it is then read as text."""
        matching = [PurePath(each) for each in self.globs if fnmatch.fnmatchcase(str(path), each)]
        if path.suffix:
            of_it = any(each.suffix == path.suffix for each in matching)
        else:
            of_it = any(not each.suffix and each.name.strip("*?") for each in matching)
        return of_it or str(path) in self.names


def _is_archive(source: Source) -> bool:
    return source.problem.endswith(Cure.UNPACK)


def _num_bytes(sources: Iterable[Source]) -> int:
    return sum(source.record.num_bytes for source in sources)


def _left_out(kind: str, sources: Sequence[Source], why: str) -> LeftOut:
    example = sources[0].name
    return LeftOut(kind=kind, files=len(sources), num_bytes=_num_bytes(sources), example=example, why=why)


def _why_left_out(sources: Sequence[Source], data: DataConfig) -> str:
    """Return what files of one kind are, or how they can be read."""
    if sources[0].problem:
        return f"it {sources[0].problem}"
    patterns = _patterns(data.include or ("*",), _globs_of(sources))
    return f"its name is no text file's; {Cure.INCLUDE(patterns=patterns)}"


def _globs_of(sources: Sequence[Source]) -> list[str]:
    """Return patterns of the files' suffix; of what their names begin with, if they have none."""
    path = PurePath(sources[0].name)
    if path.suffix:
        return [f"*{glob.escape(path.suffix)}"]
    names = sorted({PurePath(source.name).name for source in sources})
    same = itertools.takewhile(lambda each: each[0] == each[1], zip(names[0], names[-1], strict=False))
    start = "".join(letter for letter, _ in same)
    return [f"*{glob.escape(start)}*"] if start else [f"*{glob.escape(name)}" for name in names]


def _patterns(given: Iterable[str], more: Iterable[str]) -> str:
    return ",".join(f'"{each}"' for each in dict.fromkeys([*given, *more]))


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


def _no_texts(root: str, others: dict[tuple[str, str], list[Source]], data: DataConfig) -> ValueError:
    kinds = sorted(others.items(), key=lambda each: -len(each[1]))
    only = ", ".join(f"{kind} ({len(sources)})" for (kind, _), sources in kinds[:8])
    reasons = "".join(f"; {sources[0].name}: {_why_left_out(sources, data)}" for _, sources in kinds[:3])
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

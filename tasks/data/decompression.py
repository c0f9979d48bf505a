"""Decompresses files: .gz, .bz2, .zst and .xz.

pyarrow does it fastest. It knows no xz, takes the zeros with which tapes and some object stores fill up a gzip file for
damage, and refuses zstd windows above 128 MiB (`zstd --long=31`); Python's own modules read these.
"""

from __future__ import annotations

import gzip
import io
import lzma
import sys
from typing import NamedTuple, Protocol

BUFFER_BYTES = 2**18
LONGEST_ARROW_WINDOW = 27  # log2 of bytes
LONGEST_WINDOW = 31


class Compression(NamedTuple):
    name: str
    starts: bytes


COMPRESSIONS = {
    ".gz": Compression("gzip", b"\x1f\x8b\x08"),
    ".bz2": Compression("bz2", b"BZh"),
    ".zst": Compression("zstd", b"\x28\xb5\x2f\xfd"),
    ".xz": Compression("xz", b"\xfd7zXZ\0"),
}


def compression_of(head: bytes) -> str:
    """Return the name of the compression that a file's first bytes show; empty if there is none."""
    if head.startswith(b"BZh") and head[4:10] not in (b"1AY&SY", b"\x17rE8P\x90"):  # a text may begin with BZh
        return ""
    return next((each.name for each in COMPRESSIONS.values() if head.startswith(each.starts)), "")


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


def unpacked(file: io.BufferedReader, compression: str) -> io.BufferedReader:
    """Return a file's decompressed bytes; reading raises OSError where they are damaged or break off."""
    if compression == "xz":
        return _checked(lzma.LZMAFile(file))
    # pyarrow refuses the padding. Only a local file is looked at: not every server gives a file's end alone.
    if compression == "gzip" and isinstance(file.raw, io.FileIO) and _is_padded(file):
        return _checked(gzip.GzipFile(fileobj=file))
    if compression == "zstd" and _window_log(file) > LONGEST_ARROW_WINDOW:
        return _checked(_long_zstd(file))
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), compression))


def _is_padded(file: io.BufferedReader) -> bool:
    """Whether zeros follow the last member; the eight bytes at its own end are never all zero unless it is empty."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 8))
    end = file.read(8)
    file.seek(0)
    return len(end) == 8 and not any(end)


def _window_log(file: io.BufferedReader) -> int:
    """Return log2 of the bytes that the first frame's header asks a reader to keep (RFC 8878, 3.1.1.1)."""
    head = file.read(18)
    file.seek(0)
    if len(head) < 7 or not head.startswith(COMPRESSIONS[".zst"].starts):
        return 0
    if head[4] & 0x20:  # a single segment: all of its content is kept
        return int.from_bytes(head[5 : 5 + 2 ** (head[4] >> 6)], "little").bit_length()
    return 10 + (head[5] >> 3)


def _long_zstd(file: io.BufferedReader) -> Readable:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    longest = {int(zstd.DecompressionParameter.window_log_max): LONGEST_WINDOW}
    opened: Readable = zstd.ZstdFile(file, options=longest)
    return opened


def _checked(file: Readable) -> io.BufferedReader:
    return io.BufferedReader(_Checked(file), BUFFER_BYTES)


class _Checked(io.RawIOBase):
    """A decompressed file that raises OSError, as a file on disk does; each module has errors of its own."""

    def __init__(self, file: Readable) -> None:
        self.file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            part = self.file.read(len(buffer))
        except OSError:
            raise
        except Exception as error:  # EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError
            raise OSError(f"Truncated or damaged compressed stream: {error}") from error
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self.file.close()
        super().close()

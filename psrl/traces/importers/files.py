"""Bytes of recorded files, plain or compressed, in bounded memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from psrl.core.errors import TraceError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
CHUNK_BYTES = 1 << 20
# One JSON value takes several times its text in memory while it is parsed.
MAX_VALUE_BYTES = 256 << 20


class ByteStream(Protocol):
    """What both files and decompressors offer."""

    def read(self, size: int, /) -> bytes: ...


@contextmanager
def open_bytes(path: Path) -> Iterator[ByteStream]:
    """The content of a file; gzip and zstd are recognised by their first bytes.

    Raises:
        TraceError: if the file cannot be read or decompressed, also while it is read.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
            file.seek(0)
            kind = next((k for magic, k in MAGIC.items() if start.startswith(magic)), None)
            yield pa.CompressedInputStream(file, kind) if kind else file
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(
            f"{path}: cannot be read ({reason})", "check the path; was the file cut off?"
        ) from None


def read_start(path: Path, num_bytes: int) -> bytes:
    """The first bytes of the decompressed content, without a byte order mark."""
    with open_bytes(path) as stream:
        return stream.read(num_bytes).removeprefix(BYTE_ORDER_MARK)


def read_bytes(path: Path) -> bytes:
    """The whole content.

    Raises:
        TraceError: if it cannot be read, is blank or larger than `MAX_VALUE_BYTES`.
    """
    chunks: list[bytes] = []
    size = 0
    with open_bytes(path) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            _check_size(size, f"{path}: the file")
    data = b"".join(chunks).removeprefix(BYTE_ORDER_MARK)
    if not data.strip():
        raise TraceError(f"{path}: the file is empty", "was the recording cut off?")
    return data


def read_lines(path: Path, keep_blank: bool = False) -> Iterator[tuple[str, bytes]]:
    """Place and bytes of each line, one at a time; blank ones only if asked for.

    Raises:
        TraceError: if the file cannot be read, has only blank lines, or one is longer than
            `MAX_VALUE_BYTES`.
    """
    empty = True
    for number, line in enumerate(_lines(path), start=1):
        text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        blank = not text.strip()
        empty &= blank
        if keep_blank or not blank:
            yield f"{path} line {number}", text
    if empty:
        raise TraceError(f"{path}: the file is empty", "was the recording cut off?")


def _lines(path: Path) -> Iterator[bytes]:
    parts: list[bytes] = []  # of a line that began in an earlier chunk
    size = number = 0
    with open_bytes(path) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            first, *more = chunk.split(b"\n")
            parts.append(first)
            size += len(first)
            _check_size(size, f"{path} line {number + 1} and what follows is not read: the line")
            if more:
                yield b"".join(parts)
                yield from more[:-1]
                number += len(more)
                parts, size = [more[-1]], len(more[-1])
    yield b"".join(parts)


def _check_size(size: int, subject: str) -> None:
    if size > MAX_VALUE_BYTES:
        raise TraceError(
            f"{subject} has more than {MAX_VALUE_BYTES >> 20} MiB",
            "write one record per line, or split the file",
        )

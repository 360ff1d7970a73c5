"""Read JSON with errors that name the file, the record, the field and the numbers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from psrl.core.errors import TraceError
from psrl.core.sample import IntArray

SKIP_HINT = "fix the record, or leave malformed records out with --skip-bad"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 1e15  # sums of squares stay finite


@dataclass
class BadRecords:
    """Stops at the first malformed record, or collects the messages of those left out."""

    skip: bool
    messages: list[str] = field(default_factory=list)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        try:
            yield
        except TraceError as error:
            if not self.skip:
                raise
            self.messages.append(error.message)


@dataclass(frozen=True)
class Record:
    """A JSON object and where it stands; every access checks the type and the range."""

    where: str
    values: dict[str, Any]

    @classmethod
    def of(cls, value: Any, where: str) -> "Record":
        if not isinstance(value, dict):
            raise TraceError(f"{where}: expected a JSON object, found {kind_of(value)}", SKIP_HINT)
        return cls(where, value)

    def error(self, name: str, problem: str, hint: str = SKIP_HINT) -> TraceError:
        return TraceError(f"{self.where}: field '{name}' {problem}", hint)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        if name not in self.values:
            raise self.error(name, f"is missing; the record has {list(self.values)[:12]}")
        return self.values[name]

    def integer(self, name: str, minimum: int) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(name, f"must be a whole number, found {kind_of(value)}")
        if not minimum <= value <= MAX_INTEGER:
            raise self.error(name, f"is {_short(value)}, outside [{minimum}, {MAX_INTEGER}]")
        return value

    def number(self, name: str, minimum: float = -MAX_NUMBER) -> float:
        """A finite number; NaN when the field is missing or null."""
        if not self.has(name):
            return nan
        value = self.values[name]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, f"must be a number, found {kind_of(value)}")
        if not minimum <= value <= MAX_NUMBER:  # NaN is outside too
            raise self.error(name, f"is {_short(value)}, outside [{minimum:g}, {MAX_NUMBER:g}]")
        return float(value)

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, found {kind_of(value)}")
        check_text(value, f"{self.where}: field '{name}'")
        return value

    def label(self, name: str) -> str:
        """A string or whole number, as a string."""
        value = self.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(self.integer(name, -MAX_INTEGER))
        return self.text(name)

    def items(self, name: str) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list):
            raise self.error(name, f"must be a list, found {kind_of(value)}")
        return value

    def integers(self, name: str) -> IntArray:
        """[n] whole numbers; unsigned 64-bit hashes keep their bits."""
        values = self.items(name)
        if not values:
            return np.empty(0, np.int64)
        try:
            array = np.array(values)
        except (ValueError, OverflowError):
            array = np.array(None)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            odd = next((i for i, v in enumerate(values) if type(v) is not int), 0)
            problem = f"must hold whole numbers of 64 bits, entry {odd} is {kind_of(values[odd])}"
            raise self.error(name, problem)
        return array.astype(np.int64)


def kind_of(value: Any) -> str:
    """A short description of a JSON value for an error message."""
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else _short(value)
    name = "string" if isinstance(value, str) else "list" if isinstance(value, list) else "object"
    return f"{name} {_short(value)}"


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a whole number of more than 30 digits"
    text = ascii(value)
    return text if len(text) <= 40 else text[:37] + "..."


def check_text(text: str, where: str) -> None:
    """Refuse text that UTF-8 cannot hold: no tokenizer or Parquet file would take it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TraceError(
            f"{where} has half a surrogate pair ({text[error.start]!a}) at character {error.start}",
            SKIP_HINT,
        ) from None


def parse_json(data: bytes, where: str) -> Any:
    """The JSON value of UTF-8 bytes.

    Raises:
        TraceError: with the byte or column of the first fault.
    """
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        fault = f"invalid UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start})"
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno} of {len(data)} bytes"
        fault = f"not JSON ({error.msg.lower()} at {place}); the record may be cut off"
    except (ValueError, RecursionError) as error:
        fault = f"not usable JSON ({error})"
    raise TraceError(f"{where}: {fault}", SKIP_HINT)


def read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})", "check the path") from None
    if not data.strip():
        raise TraceError(f"{path}: the file is empty", "was the recording cut off?")
    return data


def read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Place and bytes of each line that is not blank, one at a time.

    Raises:
        TraceError: if the file cannot be read or has no such line.
    """
    empty = True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                if text.strip():
                    empty = False
                    yield f"{path} line {number}", text
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})", "check the path") from None
    if empty:
        raise TraceError(f"{path}: the file is empty", "was the recording cut off?")

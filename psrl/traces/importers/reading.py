"""Read JSON with errors that name the file, the record, the field and the numbers."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from psrl.core.errors import TraceError
from psrl.core.samples.sample import FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]
SKIP_HINT = "fix the record, or leave malformed records out with --skip-bad"
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


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put the place before the message of an error that does not know it."""
    try:
        yield
    except TraceError as error:
        raise TraceError(f"{where}: {error.message}", error.hint) from None


Raw = TypeVar("Raw")
Parsed = TypeVar("Parsed")


def parse_each(
    paths: list[Path],
    limit: int | None,
    bad: BadRecords,
    places: Callable[[Path], Iterator[tuple[str, Raw]]],
    parse: Callable[[str, Raw], Parsed],
) -> Iterator[Parsed]:
    """Parse the records of all files, at most `limit` sound ones.

    Args:
        places: place and raw content of each record of a file.
        parse: gets both; raises TraceError for a malformed record.
    """
    count = 0
    for path in paths:
        with bad.skipping():
            for where, raw in places(path):
                if count == limit:
                    return
                with bad.skipping():
                    parsed = parse(where, raw)
                    count += 1
                    yield parsed


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

    def flag(self, name: str) -> bool:
        """Whether the field is there and true."""
        return self.values.get(name) is True

    def child(self, name: str) -> "Record":
        """The object in a field."""
        return Record.of(self.get(name), f"{self.where} {name}")

    def children(self, name: str, what: str) -> list["Record"]:
        """The objects in a list field; `what` is one of them in an error message."""
        return [
            Record.of(value, f"{self.where} {what} {position}")
            for position, value in enumerate(self.items(name))
        ]

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

    def token_ids(self, name: str) -> IntArray:
        """[n] token ids."""
        ids = self.integers(name)
        if ids.min(initial=0) < 0:
            raise self.error(name, f"holds the negative token id {int(ids.min())}")
        return ids

    def numbers(self, name: str) -> FloatArray:
        """[n] finite numbers."""
        values = self.items(name)
        numbers = np.array(
            [v if type(v) in (int, float) and abs(v) <= MAX_NUMBER else nan for v in values],
            np.float64,
        )
        odd = np.flatnonzero(np.isnan(numbers))
        if len(odd):
            found = kind_of(values[int(odd[0])])
            raise self.error(name, f"must hold finite numbers, entry {int(odd[0])} is {found}")
        return numbers

    def mask(self, name: str, length: int) -> BoolArray:
        """[length] which tokens are trained: zeros and ones, or booleans."""
        values = self.items(name)
        if len(values) != length:
            raise self.error(name, f"has {len(values)} entries for {length} tokens")
        flags = np.array([v if type(v) in (bool, int, float) else -1 for v in values], np.float64)
        odd = np.flatnonzero((flags != 0) & (flags != 1))
        if len(odd):
            found = kind_of(values[int(odd[0])])
            raise self.error(name, f"must hold 0 and 1, entry {int(odd[0])} is {found}")
        return flags.astype(np.bool_)


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


def parse_record(where: str, line: bytes) -> Record:
    """The JSON object of one line."""
    return Record.of(parse_json(line, where), where)


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

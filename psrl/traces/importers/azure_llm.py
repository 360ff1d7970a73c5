"""Azure LLM inference traces: CSV of arrival times and lengths, without any content.

Which requests share a prefix cannot be known: every request gets symbols of its own.
"""

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from psrl.core.errors import TraceError
from psrl.traces.recording import Recording

from .assemble import assemble
from .files import read_lines
from .formats import FileHead, Importer
from .options import ImportOptions
from .reading import MAX_INTEGER, SKIP_HINT, BadRecords, parse_each
from .samples import RecordedSample

COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]

Row = tuple[float, int, int]


def recognise(head: FileHead) -> str | None:
    if head.start.split("\n", 1)[0].strip().split(",") == COLUMNS:
        return f"a CSV file with the columns {', '.join(COLUMNS)}"
    return None


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read requests: each is a trajectory and a semantic group of its own.

    Raises:
        TraceError: at the first malformed row, unless `options.skip_bad`.
    """
    bad = BadRecords(options.skip_bad)
    rows = list(parse_each(paths, options.limit, bad, _rows, _parse))
    start_s = min((time_s for time_s, _, _ in rows), default=0.0)
    samples = [
        RecordedSample(
            symbols=np.array([2 * number, 2 * number + 1], np.int64),
            loss_spans=((num_context, num_context + num_generated),),
            group_id=str(number),
            trajectory_id=str(number),
            arrival_s=time_s - start_s,
        )
        for number, (time_s, num_context, num_generated) in enumerate(rows)
    ]
    lengths = np.array([row[1:] for row in rows], np.int64).reshape(-1)
    notes = ["lengths only: sharing between requests is unknown, none is assumed"]
    return assemble(samples, lengths, paths, options, bad, notes)


AZURE_LLM = Importer(f"CSV with the columns {', '.join(COLUMNS)}", recognise, read)


def _rows(path: Path) -> Iterator[tuple[str, bytes]]:
    lines = read_lines(path)
    where, header = next(lines)
    if header.decode("utf-8", "replace").strip().split(",") != COLUMNS:
        raise TraceError(
            f"{where}: the columns are {header[:80]!r}, expected {','.join(COLUMNS)}",
            "choose another format",
        )
    yield from lines


def _parse(where: str, line: bytes) -> Row:
    try:
        fields = next(csv.reader([line.decode("utf-8").strip()]))
    except (UnicodeDecodeError, csv.Error, StopIteration) as error:
        raise TraceError(f"{where}: not a CSV row ({error})", SKIP_HINT) from None
    if len(fields) != len(COLUMNS):
        raise TraceError(f"{where}: {len(fields)} fields, expected {len(COLUMNS)}", SKIP_HINT)
    return _time_s(where, fields[0]), _tokens(where, fields, 1), _tokens(where, fields, 2)


def _time_s(where: str, text: str) -> float:
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise TraceError(
            f"{where}: field '{COLUMNS[0]}' is {text[:40]!a}, no date and time", SKIP_HINT
        ) from None


def _tokens(where: str, fields: list[str], column: int) -> int:
    text = fields[column]
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0
    if not 1 <= value <= MAX_INTEGER:
        raise TraceError(
            f"{where}: field '{COLUMNS[column]}' is {text[:40]!a}, "
            f"expected a whole number of at least 1",
            SKIP_HINT,
        )
    return value

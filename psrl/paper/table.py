"""Published numbers beside ours: rows, verdicts, and the table as Markdown, CSV and JSON."""

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from psrl.analysis.tables import write_csv
from psrl.analysis.units import number
from psrl.core.errors import ConfigError
from psrl.core.run.run_directory import finite

_COLUMNS = (
    "id", "workload", "mode", "gpus", "system", "metric", "value", "unit", "kind", "source",
)  # fmt: skip
VERDICTS = ("within 10 %", "within 25 %", "off", "not simulated")
SOURCES = {"S": "press summary", "A": "abstract", "Q": "machine-written summary", "D": "derived"}


@dataclass(frozen=True)
class Published:
    """One number of the paper, as second-hand sources give it; empty fields were not given."""

    id: str
    what: str
    value: float
    unit: str
    source: str

    @classmethod
    def quotient(cls, name: str, what: str, above: "Published", below: "Published") -> "Published":
        """A ratio of two rows."""
        return cls(name, what, above.value / below.value, "x", f"{above.id} / {below.id}")


@dataclass(frozen=True)
class Row:
    """A published number and ours.

    Attributes:
        kind: "ratio", "absolute" or "input" (our workload was made to match it).
        factors: of a speed-up: cuts, placement, sharing.
        note: the assumption made, and why we differ.
        missing: why there is no number of ours; empty if there is.
    """

    published: Published
    kind: str
    ours: float | None
    factors: dict[str, float] | None
    note: str
    missing: str

    @property
    def ratio(self) -> float | None:
        """Ours over published; infinite where ours divides by an idle worker's time."""
        if self.ours is None or math.isnan(self.ours):
            return None
        return self.ours / self.published.value

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`; a factor counts alike above and below."""
        if self.ratio is None:
            return "not simulated"
        factor = max(self.ratio, 1.0 / self.ratio) if self.ratio > 0 else math.inf
        if factor <= 1.10:
            return "within 10 %"
        return "within 25 %" if factor <= 1.25 else "off"


def read_published(path: Path) -> list[Published]:
    """Read the published numbers.

    Raises:
        ConfigError: if the file or a column is missing, or a value is no number.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
    except OSError:
        raise ConfigError(
            f"cannot read {path}", "pass --scenarios DIR with published.csv"
        ) from None
    rows = []
    for line_number, line in enumerate(lines, 2):
        if set(line) != set(_COLUMNS):
            raise ConfigError(f"{path}:{line_number}: columns must be {', '.join(_COLUMNS)}")
        try:
            value = float(line["value"])
        except (TypeError, ValueError):
            raise ConfigError(
                f"{path}:{line_number}: value {line['value']!r} is no number"
            ) from None
        rows.append(Published(line["id"], _what(line), value, line["unit"], line["source"]))
    if len({row.id for row in rows}) != len(rows):
        raise ConfigError(f"{path}: two rows have the same id")
    return rows


def _what(line: dict[str, str]) -> str:
    gpus = f"{int(line['gpus']):,} GPUs" if line["gpus"] else ""
    where = [line["workload"], line["mode"], gpus, line["system"]]
    named = " ".join(part for part in where if part and part != "all")
    return f"{named}: {line['metric'].replace('_', ' ')}".removeprefix(": ")


def rows_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """One row per number; base units of the published row."""
    return pd.DataFrame(
        [
            {
                "id": row.published.id,
                "what": row.published.what,
                "unit": row.published.unit,
                "kind": row.kind,
                "published": row.published.value,
                "ours": math.nan if row.ours is None else row.ours,
                "ratio": math.nan if row.ratio is None else row.ratio,
                "verdict": row.verdict,
                **{
                    name: math.nan if row.factors is None else row.factors[name]
                    for name in ("cuts", "placement", "sharing")
                },
                "note": row.note,
                "missing": row.missing,
                "source": row.published.source,
            }
            for row in rows
        ]
    )


def tally(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Rows per kind and verdict."""
    return {
        kind: {v: sum(r.kind == kind and r.verdict == v for r in rows) for v in VERDICTS}
        for kind in ("ratio", "absolute", "input")
    }


def write_tables(
    rows: Sequence[Row], sections: str, statements: Sequence[str], directory: Path
) -> dict[str, Any]:
    """Write table.md, table.csv and table.json; returns the tally and a sentence about it."""
    frame, counts = rows_frame(rows), tally(rows)
    text = "\n".join(_sentence(kind, counts[kind]) for kind in counts)
    write_csv(frame, directory / "table.csv")
    records = {"rows": frame.to_dict("records"), "tally": counts, "assumptions": list(statements)}
    table_json = json.dumps(finite(records), indent=1, sort_keys=True, allow_nan=False)
    (directory / "table.json").write_text(table_json + "\n", encoding="utf-8")
    markdown = _markdown(rows, sections, statements, text)
    (directory / "table.md").write_text(markdown, encoding="utf-8")
    return {"tally": counts, "text": text}


_KIND_NAMES = {
    "ratio": "ratios (the target)",
    "absolute": "absolute times, rates and sizes",
    "input": "inputs (our workloads were made to match)",
}


def _sentence(kind: str, counts: dict[str, int]) -> str:
    parts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"{sum(counts.values())} {_KIND_NAMES[kind]}: {parts or 'none'}"


def _markdown(rows: Sequence[Row], sections: str, statements: Sequence[str], summary: str) -> str:
    of_kind = {kind: [r for r in rows if r.kind == kind] for kind in _KIND_NAMES}
    parts = [
        "# The paper's numbers beside ours",
        "psRL: *Efficient Training for Agentic AI via Training-Time Prefix Sharing* "
        "(arXiv 2608.25683v1) published no code, traces or sample counts, and we know its numbers "
        "from the abstract and press summaries only. This page is made by `psrl reproduce`: one "
        "set of assumptions for all rows, nothing tuned per row. A number within 25 % is "
        "agreement under these assumptions, not evidence that they are the paper's.",
        "\n".join(f"- {line}" for line in summary.splitlines()),
        "![Ours over published, per row](images/paper_ratios.png)",
        "## Assumptions",
        "\n".join(f"{i}. {text}" for i, text in enumerate(statements, 1)),
        "## Ratios",
        "Speed-ups are products cuts x placement x sharing: the gain of equally fine micro-batches "
        "without any sharing, of where samples are trained, and of computing shared tokens once. "
        "Quotients of published rows stand below the published ratios; their unknown GPU cancels.",
        _table(of_kind["ratio"], with_factors=True),
        "## Absolute numbers",
        "Secondary: the GPU type is not published, and the published times correspond to about 7 "
        "TFLOP/s per GPU in veRL's update, which no roofline gives.",
        _table(of_kind["absolute"], with_factors=False),
        "## Inputs",
        _table(of_kind["input"], with_factors=False),
        "## Where we disagree, and why",
        _disagreements(rows),
        sections,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _disagreements(rows: Sequence[Row]) -> str:
    """Rows off by more than 25 %, those with the same reason together."""
    by_note: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict == "off" and row.ours is not None:
            values = f"{number(row.published.value)} published, {number(row.ours)} ours"
            by_note.setdefault(row.note, []).append(f"`{row.published.id}` ({values})")
    lines = [f"- {', '.join(names)}. {note}".rstrip() for note, names in by_note.items()]
    return "\n".join(lines) or "No row is off."


def _table(rows: Sequence[Row], with_factors: bool) -> str:
    header = ["row", "what", "published", "ours", "ours / published", "verdict"]
    if with_factors:
        header.insert(4, "cuts x placement x sharing")
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        p = row.published
        ours = "-" if row.ours is None else number(row.ours)
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        verdict = row.missing or ("as made" if row.kind == "input" else row.verdict)
        unit = "" if p.unit in ("x", "ratio") else f" {p.unit}"
        cells = [f"`{p.id}`", p.what, f"{number(p.value)}{unit}", ours, ratio, verdict]
        if with_factors:
            cells.insert(4, _product(row.factors))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _product(factors: dict[str, float] | None) -> str:
    if factors is None:
        return ""
    return " x ".join(f"{factors[name]:.2f}" for name in ("cuts", "placement", "sharing"))

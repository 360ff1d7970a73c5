"""One picture of a reproduction: ours over published, a dot per row on a logarithmic axis."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from psrl.analysis.figures.style import FAINT, INK, save_figure, style

from .table import Row, rows_frame

_COLOURS = {"within 10 %": "#009e73", "within 25 %": "#e69f00", "off": "#d55e00"}
_TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_ROW_IN = 0.19


def write_ratio_figure(rows: Sequence[Row], directory: Path) -> Path:
    """Write paper_ratios.png, .svg and .csv; ratios and absolute numbers in columns of their own.

    Rows without a number of ours, with none or an infinite one, and inputs are left out.
    """
    shown = {kind: _of_kind(rows, kind) for kind in ("ratio", "absolute")}
    most = max(1, *(len(found) for found in shown.values()))
    with style():
        figure = Figure(figsize=(11.0, 1.2 + _ROW_IN * most))
        titles = {"ratio": "Ratios", "absolute": "Absolute times, rates and sizes"}
        for axes, (kind, found) in zip(figure.subplots(1, 2), shown.items(), strict=True):
            _draw(axes, found)
            axes.set_title(titles[kind])
            axes.set_ylim(most - 0.4, -0.6)
    frame = rows_frame([row for found in shown.values() for row in found])
    columns = ["id", "what", "kind", "published", "ours", "ratio", "verdict"]
    return save_figure(figure, frame[columns] if len(frame) else frame, directory, "paper_ratios")


def _of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    found = [row for row in rows if row.kind == kind and 0.0 < (row.ratio or 0.0) < math.inf]
    return sorted(found, key=lambda row: row.ratio or 0.0, reverse=True)


def _draw(axes, rows: Sequence[Row]) -> None:  # type: ignore[no-untyped-def]
    axes.set_xscale("log")
    axes.axvspan(1 / 1.25, 1.25, color="#f3f3f3", zorder=0)
    axes.axvspan(1 / 1.10, 1.10, color="#e2e2e2", zorder=0)
    axes.axvline(1.0, color=FAINT, linewidth=0.8)
    for place, row in enumerate(rows):
        ratio, colour = row.ratio or 1.0, _COLOURS[row.verdict]
        axes.plot([1.0, ratio], [place, place], color=colour, linewidth=1.2)
        axes.plot(ratio, place, "o", color=colour, markersize=4.5)
        right = ratio >= 1.0
        axes.annotate(
            f"{ratio:.2f}",
            (ratio, place),
            xytext=(5 if right else -5, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            fontsize=6.5,
            color=INK,
        )
    axes.set_yticks(range(len(rows)), [row.published.id for row in rows], fontsize=7)
    lowest = min([0.5, *(row.ratio or 1.0 for row in rows)])
    highest = max([2.0, *(row.ratio or 1.0 for row in rows)])
    axes.set_xlim(lowest / 1.6, highest * 1.6)
    axes.set_xticks([t for t in _TICKS if lowest / 1.6 <= t <= highest * 1.6])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ours / published (bands: 10 %, 25 %)")
    axes.grid(axis="y", visible=False)

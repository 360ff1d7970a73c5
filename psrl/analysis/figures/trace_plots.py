"""Figures of `psrl trace stats`: how much is shared, how deep, by how many and in which shape."""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from psrl.analysis.units import percent, tokens_unit

from .style import FAINT, INK, WIDTH_IN, save_figure, style

_LEVELS = {
    "within_trajectory": "within a trajectory",
    "within_group": "within a group",
    "overall": "overall",
}
_LEVEL_COLOURS = {
    "within a trajectory": "#56b4e9",
    "within a group": "#0072b2",
    "overall": "#e69f00",
}

MIN_BINS = 6


def save_trace_plots(result: dict[str, Any], directory: Path) -> list[Path]:
    """Write the four figures, each as PNG and SVG beside a CSV with its numbers.

    Args:
        result: what `psrl trace stats --json` prints; tree figures show the recorded mode.
        directory: where to write.

    Returns:
        Paths of the PNGs.
    """
    mode = result["sampling_mode"]
    tree = result["modes"][mode]
    figures = {
        "match_rate": (match_rate_table(result["modes"]), match_rate),
        "tokens_by_depth": (depth_table(tree), tokens_by_depth),
        "tokens_by_readers": (readers_table(tree), tokens_by_readers),
        "branching": (branching_table(tree), branching),
    }
    return [
        save_figure(draw(data, mode), data, directory, name)
        for name, (data, draw) in figures.items()
    ]


def match_rate_table(modes: dict[str, Any]) -> pd.DataFrame:
    """One row per sampling mode and level."""
    rows = [
        (mode, name, stats[level]["prefix_match_rate"], stats[level]["speedup_bound_tokens"])
        for mode, stats in modes.items()
        for level, name in _LEVELS.items()
    ]
    return pd.DataFrame(rows, columns=["mode", "level", "prefix_match_rate", "token_bound"])


def depth_table(stats: dict[str, Any]) -> pd.DataFrame:
    """Tokens by depth, in powers of two: logical, and unique within a group and overall."""
    logical = stats["overall"]["logical_tokens_by_depth"]
    starts = [0, *(2**k for k in range(len(logical) - 1))]
    return pd.DataFrame(
        {
            "depth_from": starts,
            "depth_below": [*starts[1:], 2 ** (len(logical) - 1)],
            "logical_tokens": logical,
            "unique_within_group": stats["within_group"]["unique_tokens_by_depth"],
            "unique_overall": stats["overall"]["unique_tokens_by_depth"],
        }
    )


def readers_table(stats: dict[str, Any]) -> pd.DataFrame:
    """Unique tokens by the number of samples that contain them, in powers of two."""
    return _by_power(stats, "unique_tokens_by_readers", "readers", "unique_tokens")


def branching_table(stats: dict[str, Any]) -> pd.DataFrame:
    """Forks of the tree by their number of branches, in powers of two."""
    table = _by_power(stats, "forks_by_branches", "branches", "forks")
    return table[table["branches_from"] > 1].reset_index(drop=True)


def match_rate(data: pd.DataFrame, mode: str) -> Figure:
    """Bars of match rates, a group per sampling mode; the recorded mode is named."""
    modes = list(dict.fromkeys(data["mode"]))
    with style():
        fig = Figure(figsize=(WIDTH_IN, 0.75 * len(modes) + 1.2))
        ax = fig.subplots()
        for offset, (level, colour) in enumerate(_LEVEL_COLOURS.items()):
            mine = data[data["level"] == level].set_index("mode").loc[modes]
            rows = [row + 0.26 * (offset - 1) for row in range(len(modes))]
            ax.barh(rows, 100 * mine["prefix_match_rate"], 0.24, color=colour, label=level)
            for row, rate, bound in zip(
                rows, mine["prefix_match_rate"], mine["token_bound"], strict=True
            ):
                text = f"{percent(rate)}, at most {bound:.1f}x"
                ax.annotate(
                    text,
                    (100 * rate, row),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
        ax.set_ylim(len(modes) - 0.5, -0.5)
        ax.set_yticks(range(len(modes)), [f"{m} (recorded)" if m == mode else m for m in modes])
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False, axis="y")
        ax.set_xlim(0, 125)
        ax.set_xticks(range(0, 101, 20))
        ax.set_xlabel("tokens that another sample has computed already (%)")
        ax.set_title("prefix match rate, and the bound it sets on a speed-up")
        fig.legend(loc="outside lower center", ncols=3)
    return fig


def tokens_by_depth(data: pd.DataFrame, mode: str) -> Figure:
    """Logical beside unique tokens at each depth: where the sharing is."""
    columns = {
        "logical_tokens": ("logical", "#bbbbbb"),
        "unique_within_group": ("unique within a group", _LEVEL_COLOURS["within a group"]),
        "unique_overall": ("unique overall", _LEVEL_COLOURS["overall"]),
    }
    unit = tokens_unit(float(data["logical_tokens"].max()))
    # The first bins are a few tokens wide: start where a bin is tall enough to be seen.
    visible = data["logical_tokens"].cummax() > 0.02 * data["logical_tokens"].max()
    data = data[visible]
    with style():
        fig = Figure(figsize=(WIDTH_IN, 3.2))
        ax = fig.subplots()
        for offset, (column, (label, colour)) in enumerate(columns.items()):
            at = [row + 0.28 * (offset - 1) for row in range(len(data))]
            ax.bar(at, data[column] / unit.scale, 0.27, color=colour, label=label)
        _power_axis(ax, data, "depth", "position of the token in its sample")
        ax.set_ylabel(unit.name)
        ax.set_title(f"tokens by depth, mode {mode}")
        fig.legend(loc="outside lower center", ncols=3)
    return fig


def tokens_by_readers(data: pd.DataFrame, mode: str) -> Figure:
    """Unique tokens by how many samples read them."""
    total = max(1, int(data["unique_tokens"].sum()))
    unit = tokens_unit(float(data["unique_tokens"].max()))
    with style():
        fig = Figure(figsize=(WIDTH_IN, 2.9))
        ax = fig.subplots()
        bars = ax.bar(range(len(data)), data["unique_tokens"] / unit.scale, 0.7, color="#0072b2")
        shares = [_share(tokens / total) for tokens in data["unique_tokens"]]
        ax.bar_label(bars, shares, fontsize=8, color=INK, padding=2)
        ax.margins(y=0.15)
        _power_axis(ax, data, "readers", "samples that contain the token")
        ax.set_ylabel(unit.name)
        ax.set_title(f"unique tokens by readers, mode {mode}")
    return fig


def branching(data: pd.DataFrame, mode: str) -> Figure:
    """Forks of the tree by their number of branches."""
    with style():
        fig = Figure(figsize=(WIDTH_IN, 2.9))
        ax = fig.subplots()
        bars = ax.bar(range(len(data)), data["forks"], 0.7, color="#009e73")
        ax.bar_label(bars, [f"{n:,}" for n in data["forks"]], fontsize=8, color=INK, padding=2)
        ax.margins(y=0.15)
        if not len(data):
            ax.text(0.5, 0.5, "no forks", transform=ax.transAxes, ha="center", color=FAINT)
        _power_axis(ax, data, "branches", "branches that leave the fork")
        ax.set_ylabel("forks")
        ax.set_title(f"branching of the overall tree, mode {mode}")
    return fig


def _by_power(stats: dict[str, Any], key: str, of: str, counted: str) -> pd.DataFrame:
    counts = stats["overall"][key]
    starts = [2**k for k in range(len(counts))]
    columns = {f"{of}_from": starts, f"{of}_below": [2 * x for x in starts], counted: counts}
    return pd.DataFrame(columns)


def _power_axis(ax: Any, data: pd.DataFrame, of: str, label: str) -> None:
    """Bins named by their first and last value."""
    names = []
    for start, end in zip(data[f"{of}_from"], data[f"{of}_below"], strict=True):
        names.append(
            _short(start) if end - start == 1 else f"{_short(start)} to\n{_short(end - 1)}"
        )
    ax.set_xticks(range(len(data)), names, fontsize=7.5)
    # A few bars must not fill the figure.
    ax.set_xlim(-0.6, max(len(data), MIN_BINS) - 0.4)
    ax.grid(visible=False, axis="x")
    ax.set_xlabel(label)


def _share(part: float) -> str:
    """A percentage that tells little from nothing."""
    if not part:
        return "0"
    return percent(part) if part >= 0.0005 else "<0.1 %"


def _short(value: int) -> str:
    """A bin edge in at most four signs: 512, 1k, 64k, 2M."""
    for scale, sign in ((2**20, "M"), (2**10, "k")):
        if value + 1 >= scale:
            return f"{(value + 1) // scale}{sign}"
    return str(value)

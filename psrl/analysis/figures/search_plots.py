"""Figures of what `psrl plan` searched: placements step by step, and set-ups."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from psrl.analysis.units import Unit, bytes_unit, time_unit

from .style import INK, WIDTH_IN, style

_LINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_RED = "#d55e00"
# Set-ups that are named beside the picture.
_MAX_NAMES = 16


def gap_over_steps(data: pd.DataFrame) -> Figure:
    """How far the most loaded rank is above the proven bound, after some steps of local search.

    Args:
        data: `plan_series.progress_table`.
    """
    names = list(dict.fromkeys(data["program"]))[: len(_LINE_COLOURS)]
    with style():
        fig = Figure(figsize=(WIDTH_IN, 3.4))
        ax = fig.subplots()
        for name, colour in zip(names, _LINE_COLOURS, strict=False):
            mine = data[data["program"] == name]
            gap = 100.0 * mine["gap"].clip(lower=0.0)
            ax.plot(mine["steps"], gap, "o-", color=colour, drawstyle="steps-post", label=name)
            ax.annotate(
                f"{gap.iloc[-1]:.2f} %",
                (mine["steps"].iloc[-1], gap.iloc[-1]),
                xytext=(6, 4),
                textcoords="offset points",
                fontsize=8,
            )
        ax.set_xscale("symlog", linthresh=1.0)
        ax.set_xlim(0, 2.5 * max(1.0, float(data["steps"].max())))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        ax.set_ylim(0, max(0.15, 112.0 * float(data["gap"].max())))
        ax.set_xlabel("steps of local search (0: the first placement; log scale)")
        ax.set_ylabel("above the proven bound (%)")
        ax.set_title("gap of the placement: work of the most loaded rank")
        fig.legend(loc="outside lower center", ncols=2)
    return fig


def time_memory(data: pd.DataFrame, limit_bytes: float) -> Figure:
    """Set-ups of a search by time and memory; those that no other beats in both are named.

    Args:
        data: `plan_series.layout_table`.
        limit_bytes: memory of the device.
    """
    time = time_unit(float(data["makespan_s"].max()))
    memory = bytes_unit(float(max(data["peak_memory_bytes"].max(), limit_bytes)))
    front = data[data["on_front"]].sort_values("makespan_s")
    with style():
        fig = Figure(figsize=(WIDTH_IN, 4.4))
        ax = fig.subplots()
        rest = data[~data["on_front"]]
        ax.plot(*_points(rest, time, memory), "o", color="#bbbbbb", markersize=4, label="beaten")
        ax.plot(
            *_points(front, time, memory),
            "o-",
            color=_RED,
            markersize=6,
            drawstyle="steps-post",
            label="fastest for its memory",
        )
        ax.axhline(limit_bytes / memory.scale, color=INK, linestyle="--", label="device memory")
        names = []
        for number, entry in enumerate(front.to_dict("records"), 1):
            names.append(f"{number}: {_layout_name(entry)}")
            ax.annotate(
                str(number),
                (entry["makespan_s"] / time.scale, entry["peak_memory_bytes"] / memory.scale),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                fontweight="bold",
            )
        shown = names if len(names) <= _MAX_NAMES else [*names[: _MAX_NAMES - 1], "..."]
        ax.text(1.02, 1.0, "\n".join(shown), transform=ax.transAxes, va="top", fontsize=7.5)
        ax.set_ylim(0, 1.08 * limit_bytes / memory.scale)
        ax.margins(x=0.06)
        ax.set_xlabel(f"predicted time ({time.name})")
        ax.set_ylabel(f"peak memory of a device ({memory.name})")
        ax.set_title(f"{len(data)} set-ups, {len(front)} of them fastest for their memory")
        fig.legend(loc="outside lower center", ncols=3)
    return fig


def _points(data: pd.DataFrame, time: Unit, memory: Unit) -> tuple[list[float], list[float]]:
    times_s, sizes = data["makespan_s"] / time.scale, data["peak_memory_bytes"] / memory.scale
    return times_s.tolist(), sizes.tolist()


def _layout_name(entry: dict[Any, Any]) -> str:
    sizes = " ".join(
        f"{name}{entry[name]}"
        for name in ("TP", "PP", "DP", "EP")
        if name != "EP" or entry[name] > 1
    )
    recompute = ", recompute" if entry["recompute"] == "full" else ""
    return f"{sizes}{recompute}, {entry['max_tokens_per_micro_batch']:,} tokens"

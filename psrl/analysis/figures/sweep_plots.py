"""Figures of a sweep: how policies scale with devices, and what a prefix-match rate is worth."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from psrl.analysis.units import tokens_unit

from .style import FAINT, INK, WIDTH_IN, policy_colour, save_figure, style

_RATES = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999)
_MARKERS = "osD^vP*X<>"


def write_sweep_figures(table: pd.DataFrame, directory: Path) -> dict[str, Path]:
    """Draw what the sweep varies: scaling for several device counts, prefix_rate for traces.

    Args:
        table: rows of `psrl sweep`; docs/metrics.md has the columns.

    Returns:
        Paths of the PNGs by name.
    """
    ran = table[table["makespan_s"].notna()]
    drawn = {}
    for _, mine in ran.groupby("trace", sort=False):
        if mine["num_devices"].nunique() > 1:
            name = "scaling" if ran["trace"].nunique() == 1 else f"scaling_{mine['trace'].iloc[0]}"
            drawn[name] = save_figure(scaling(mine), mine, directory, name)
    gains = ran[ran["speedup"].notna()]
    if gains["trace"].nunique() > 1:
        fewest = gains[gains["num_devices"] == gains["num_devices"].min()]
        drawn["prefix_rate"] = save_figure(prefix_rate(fewest), fewest, directory, "prefix_rate")
    return drawn


def scaling(table: pd.DataFrame) -> Figure:
    """Logical tokens per second over devices, and per device relative to the fewest.

    Args:
        table: rows of one trace.
    """
    policies = list(dict.fromkeys(table["policy"]))
    counts = sorted(table["num_devices"].unique())
    unit = tokens_unit(float(table["logical_tokens_per_s"].max()))
    with style():
        fig = Figure(figsize=(WIDTH_IN, 3.6))
        whole, share = fig.subplots(1, 2)
        for policy, marker in zip(policies, _MARKERS, strict=False):
            mine = table[table["policy"] == policy].sort_values("num_devices")
            devices = mine["num_devices"].to_numpy(np.float64)
            rate = mine["logical_tokens_per_s"].to_numpy() / unit.scale
            drawn = {"color": policy_colour(policy), "marker": marker, "markersize": 5}
            whole.plot(devices, rate, **drawn)
            whole.plot(devices, rate[0] * devices / devices[0], ":", color=FAINT, linewidth=0.9)
            share.plot(devices, 100 * rate / devices / (rate[0] / devices[0]), **drawn)
        whole.set_yscale("log")
        whole.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        whole.yaxis.set_minor_locator(NullLocator())
        whole.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        whole.set_ylabel(f"{unit.name} per second (logical, log scale)")
        whole.set_title("throughput of one iteration")
        share.axhline(100, color=FAINT, linestyle=":", linewidth=0.9)
        share.set_ylim(0, max(115.0, share.get_ylim()[1]))
        share.set_ylabel(f"per device, of that on {counts[0]:,} devices (%)")
        share.set_title("efficiency")
        for ax in (whole, share):
            _device_axis(ax, counts)
        handles = [
            Line2D([], [], color=policy_colour(p), marker=m, markersize=5, label=p)
            for p, m in zip(policies, _MARKERS, strict=False)
        ]
        handles.append(Line2D([], [], color=FAINT, linestyle=":", label="in proportion"))
        fig.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)))
    return fig


def _device_axis(ax: Axes, counts: list[int]) -> None:
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(counts))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.set_xlabel("devices (log scale)")


def prefix_rate(table: pd.DataFrame) -> Figure:
    """Speed-up over the baseline against the prefix-match rate, under the bound of sharing all.

    The rate's axis is logarithmic in 1 / (1 - rate), logical over unique tokens.

    Args:
        table: rows of several traces on equal devices.
    """
    policies = list(dict.fromkeys(table["policy"]))
    bound = table.groupby("prefix_match_rate")["speedup_bound"].max()
    ratio = 1 / (1 - bound.index.to_numpy(np.float64))
    low, high = 0.9 * float(ratio.min()), 1.1 * float(ratio.max())
    with style():
        fig = Figure(figsize=(WIDTH_IN, 4.0))
        ax = fig.subplots()
        ax.plot(ratio, bound.to_numpy(), color=INK, linestyle="--", linewidth=1.2)
        for policy, marker in zip(policies, _MARKERS, strict=False):
            mine = table[table["policy"] == policy].sort_values("prefix_match_rate")
            ax.plot(
                1 / (1 - mine["prefix_match_rate"]),
                mine["speedup"],
                color=policy_colour(policy),
                marker=marker,
                markersize=5,
                linewidth=1.0,
            )
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(low, high)
        ticks = [1 / (1 - rate) for rate in _RATES if low <= 1 / (1 - rate) <= high]
        ax.xaxis.set_major_locator(FixedLocator(ticks))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{100 - 100 / ratio:.3g}"))
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.set_xlabel("prefix match rate (%, log scale of logical over unique tokens)")
        ax.set_ylabel("speed-up over the baseline (x, log scale)")
        handles = [
            Line2D([], [], color=policy_colour(p), marker=m, markersize=5, label=p)
            for p, m in zip(policies, _MARKERS, strict=False)
        ]
        handles.append(
            Line2D(
                [],
                [],
                color=INK,
                linestyle="--",
                label="bound: the shared work on devices never idle",
            )
        )
        fig.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    return fig

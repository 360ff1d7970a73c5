"""One function per figure: numbers in (see `series`), Figure out."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from psrl.analysis.report.comparison import FACTORS
from psrl.analysis.units import Unit, bytes_unit, percent, time_unit, times, tokens_unit

from .policy_axes import label_bar, log_axis, policy_panels, policy_rows
from .style import (
    FACTOR_COLOURS,
    FAINT,
    INK,
    OP_COLOURS,
    WIDTH_IN,
    policy_colour,
    style,
)

_BAR = 0.62


def gain(data: pd.DataFrame, baseline: str) -> Figure:
    """Bars of speed-up over the baseline, a panel per part of the iteration, each with its bound.

    Args:
        data: `series.gain_series`.
        baseline: named on the axis.
    """
    parts = list(dict.fromkeys(data["part"]))
    policies = list(dict.fromkeys(data["policy"]))
    largest = float(np.nanmax(data[["speedup", "speedup_bound"]].to_numpy()))
    with style():
        fig, axes = policy_panels(len(parts), len(policies), legend=True)
        for ax, part in zip(axes, parts, strict=True):
            mine = data[data["part"] == part]
            policy_rows(ax, policies)
            ax.set_xlim(0, largest * 1.06)
            ax.axvline(1.0, color=FAINT, linewidth=0.8, zorder=0.5)
            for row, (policy, speedup, bound) in enumerate(
                mine[["policy", "speedup", "speedup_bound"]].itertuples(index=False)
            ):
                bar = ax.barh(row, speedup, _BAR, color=policy_colour(policy))
                label_bar(ax, bar, times(speedup), (bound,))
                ax.plot([bound] * 2, [row - 0.42, row + 0.42], color=INK)
            ax.set_title(part)
            ax.set_xlabel(f"speed-up over {baseline} (x)")
        handles = [
            Line2D([], [], color=INK, label="bound: the work of this row on devices never idle")
        ]
        fig.legend(handles=handles, loc="outside lower center")
    return fig


def rungs(data: pd.DataFrame) -> Figure:
    """From dense steps to psRL: a bar per rung that starts where the one above it ends.

    Args:
        data: `ladder.ladder`.
    """
    names = data["rung"].tolist()
    largest = float(data["speedup_bound"].max())
    with style():
        fig, (ax,) = policy_panels(1, len(names), legend=True)
        policy_rows(ax, names)
        start = 1.0
        for row, (policy, factor, speedup, bound) in enumerate(
            data[["policy", "factor", "speedup", "speedup_bound"]].itertuples(index=False)
        ):
            # The shared rung is computed from the policy's work, not a run of its own.
            is_run = row != len(names) - 2
            low, width = min(start, speedup), abs(speedup - start)
            colour = policy_colour(policy)
            ax.barh(row, width, _BAR, left=low, color=colour, alpha=1.0 if is_run else 0.5)
            ax.plot(speedup, row, marker="D", markersize=4, color=INK, zorder=3)
            ax.plot([bound] * 2, [row - 0.42, row + 0.42], color=INK)
            step = "" if row == 0 else f"x {factor:.2f} = "
            ax.annotate(
                f"{step}{times(speedup)} of {times(bound)}",
                (max(start, bound), row),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
            start = speedup
        log_axis(ax, 1.0, largest)
        ax.set_xlim(right=1.9 * largest)
        ax.set_xlabel("speed-up over dense training of the samples as recorded (x, log scale)")
        handles = [
            Line2D([], [], color=INK, marker="D", linestyle="", markersize=4, label="speed-up"),
            Line2D([], [], color=INK, label="bound: the work of the rung on devices never idle"),
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


def factors(data: pd.DataFrame, baseline: str) -> Figure:
    """Where the speed-up comes from: cuts, then placement, then sharing, on a log axis.

    Each bar starts where the one above it ends, so that the diamond is their product.

    Args:
        data: `series.factors_series`.
    """
    groups = list(dict.fromkeys(data["phases"]))
    policies = list(dict.fromkeys(data["policy"]))
    with style():
        fig, axes = policy_panels(len(groups), len(policies), row_in=0.62, legend=True)
        low, high = 1.0, 1.0
        for ax, group in zip(axes, groups, strict=True):
            policy_rows(ax, policies)
            for row, policy in enumerate(policies):
                entry = data[(data["phases"] == group) & (data["policy"] == policy)].iloc[0]
                start = 1.0
                for step, factor in enumerate(FACTORS):
                    end = start * float(entry[factor])
                    y = row + 0.27 * (step - 1)
                    ax.barh(y, end - start, 0.25, left=start, color=FACTOR_COLOURS[factor])
                    ax.annotate(
                        times(float(entry[factor])),
                        (max(start, end), y),
                        xytext=(4 if step < 2 else 8, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=7.5,
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                    )
                    low, high = min(low, end), max(high, end)
                    start = end
                ax.plot(start, row + 0.27, marker="D", markersize=5, color=INK, zorder=3)
            ax.axvline(1.0, color=FAINT, linewidth=0.8)
            ax.set_title(group)
            ax.set_xlabel(f"time of {baseline} / time (x, log scale)")
        for ax in axes:
            log_axis(ax, low, high)
        handles: list[Patch | Line2D] = [
            Patch(color=FACTOR_COLOURS[f], label=f"{f} (x)") for f in FACTORS
        ]
        handles.append(Line2D([], [], color=INK, marker="D", linestyle="", label="speed-up"))
        fig.legend(handles=handles, loc="outside lower center", ncols=4)
    return fig


def memory_over_time(data: pd.DataFrame, phase: str, limit_bytes: float) -> Figure:
    """Bytes on the fullest device of each policy; right, its cached keys and values.

    Every policy's phase fills the axis, so that the course of a short one can be seen.

    Args:
        data: `series.memory_series`.
        phase: named in the titles.
        limit_bytes: memory of the device.
    """
    policies = list(dict.fromkeys(data["policy"]))
    end_s = data.groupby("policy")["time_s"].max()
    with style():
        fig = Figure(figsize=(WIDTH_IN, 1.05 * len(policies) + 0.9))
        axes = fig.subplots(len(policies), 2, sharex=True, sharey="col", squeeze=False)
        for column, view in enumerate(dict.fromkeys(data["view"])):
            mine = data[data["view"] == view]
            limit = limit_bytes if view == "all memory" else math.nan
            largest = float(np.nanmax([mine["bytes"].max(), limit, 1.0]))
            unit = bytes_unit(largest)
            for row, policy in enumerate(policies):
                ax, part = axes[row, column], mine[mine["policy"] == policy]
                colour = policy_colour(policy)
                at, size = 100.0 * part["time_s"] / end_s[policy], part["bytes"] / unit.scale
                ax.fill_between(at, size, step="post", color=colour, alpha=0.35, linewidth=0)
                ax.step(at, size, where="post", color=colour, linewidth=0.9)
                if not math.isnan(limit):
                    static = part["static_bytes"] / unit.scale
                    ax.fill_between(at, static, step="post", color="#d5d5d5", linewidth=0)
                    ax.axhline(limit / unit.scale, color=INK, linewidth=1.2, linestyle="--")
                ax.set_ylim(0, 1.12 * largest / unit.scale)
                ax.yaxis.set_major_locator(MaxNLocator(3))
                took = time_unit(end_s[policy]).text(end_s[policy])
                ax.set_title(f"{policy} ({took})" if column == 0 else "")
                where = f"rank {part['rank'].iloc[0]}, stage {part['stage'].iloc[0]}"
                peak = f"peak {unit.text(part['bytes'].max())} ({where})"
                peak = peak if part["bytes"].any() else "nothing cached"
                ax.set_title(peak, loc="right", fontweight="normal", fontsize=8)
                if row == len(policies) - 1:
                    ax.set_xlabel(f"share of the {phase} phase (%)")
            label = "memory" if view == "all memory" else "cached K/V"
            axes[len(policies) // 2, column].set_ylabel(f"{label} ({unit.name})")
        axes[0, 0].set_xlim(0, 100)
        handles = [
            Line2D([], [], color=INK, linestyle="--", label="memory of the device"),
            Patch(color="#d5d5d5", label="weights, gradients, optimizer"),
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


def worker_times(data: pd.DataFrame, phase: str) -> Figure:
    """Dots of rank times with their spread and mean; right, the share of idle device time.

    Args:
        data: `series.worker_series`.
        phase: named on the axis.
    """
    policies = list(dict.fromkeys(data["policy"]))
    time = time_unit(data["worker_time_s"].max())
    with style():
        fig, (spread, idle) = policy_panels(2, len(policies), widths=(2.0, 1.0), legend=True)
        idle.set_xlim(0, max(5.0, 130 * data["bubble_fraction"].max()))
        for row, policy in enumerate(policies):
            mine = data[data["policy"] == policy]
            worked = mine["worker_time_s"] / time.scale
            colour = policy_colour(policy)
            spread.plot([worked.min(), worked.max()], [row] * 2, color=colour, linewidth=2)
            spread.plot(worked, [row] * len(worked), "o", color=colour, markersize=4, alpha=0.6)
            spread.plot(worked.mean(), row, "|", color=INK, markersize=13, markeredgewidth=1.5)
            spread.annotate(
                f"max / min {times(worked.max() / worked.min())}"
                if worked.min()
                else "a rank idles",
                (worked.max(), row),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
            share = float(mine["bubble_fraction"].iloc[0])
            label_bar(idle, idle.barh(row, 100 * share, _BAR, color=colour), percent(share))
        policy_rows(spread, policies)
        policy_rows(idle, policies)
        spread.set_xlim(0, 1.3 * data["worker_time_s"].max() / time.scale)
        spread.set_xlabel(f"time a rank works in the {phase} phase ({time.name})")
        spread.set_title("ranks")
        idle.set_xlabel("share of device time (%)")
        idle.set_title("bubbles")
        handles = [
            Line2D([], [], color=FAINT, marker="o", linestyle="", label="one rank"),
            Line2D([], [], color=INK, marker="|", linestyle="", markersize=10, label="mean"),
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


def timeline(data: pd.DataFrame, phase: str) -> Figure:
    """Gantt charts: a panel per policy on one time axis, a line per (rank, stage).

    A policy that ends early is shown once more on its own axis, where its ops can be told apart.

    Args:
        data: `series.timeline_series`.
        phase: named on the axis.
    """
    longest = float(data["end_s"].max())
    time = time_unit(longest)
    charts = []
    for policy, mine in data.groupby("policy", sort=False):
        end = float(mine["end_s"].max())
        charts.append((mine, str(policy), longest, end))
        if end < 0.6 * longest:
            charts.append((mine, f"{policy}, enlarged", end, end))
    with style():
        heights = [len(mine[["rank", "stage"]].drop_duplicates()) for mine, *_ in charts]
        fig = Figure(figsize=(WIDTH_IN, 0.24 * sum(heights) + 0.55 * len(charts) + 0.7))
        axes = fig.subplots(len(charts), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[
            :, 0
        ]
        for ax, (mine, title, span, end) in zip(axes, charts, strict=True):
            _gantt(ax, mine, span, time)
            ax.set_title(title)
            ax.set_title(f"ends at {time.text(end)}", loc="right", weight="normal")
        axes[-1].set_xlabel(f"time in the {phase} phase ({time.name})")
        present = [op for op in OP_COLOURS if op in set(data["op"])]
        handles = [Patch(color=OP_COLOURS[op], label=op.replace("_", " ")) for op in present]
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig


def _gantt(ax: Axes, ops: pd.DataFrame, span_s: float, time: Unit) -> None:
    """One box per op; its edge is thinner than the box, however short the op is."""
    lines = sorted(set(zip(ops["rank"], ops["stage"], strict=True)))
    row_of = {line: row for row, line in enumerate(lines)}
    rows = [row_of[line] for line in zip(ops["rank"], ops["stage"], strict=True)]
    start, end = ops["start_s"] / time.scale, ops["end_s"] / time.scale
    corners = [
        [(a, y - 0.42), (a, y + 0.42), (z, y + 0.42), (z, y - 0.42)]
        for a, z, y in zip(start, end, rows, strict=True)
    ]
    width_pt = 72 * WIDTH_IN * (ops["end_s"] - ops["start_s"]) / span_s
    ax.add_collection(
        PolyCollection(
            corners,
            facecolors=[OP_COLOURS[op] for op in ops["op"]],
            edgecolors="white",
            linewidths=np.minimum(0.4, 0.1 * width_pt),
        )
    )
    ax.set_xlim(0, 1.005 * span_s / time.scale)
    ax.set_ylim(len(lines) - 0.4, -0.6)
    ax.set_yticks(range(len(lines)), [f"rank {rank}, stage {stage}" for rank, stage in lines])
    ax.tick_params(axis="y", labelsize=7.5, length=0)
    ax.grid(visible=False, axis="y")


def tokens(data: pd.DataFrame) -> Figure:
    """Bars of tokens computed per phase, beside the logical and the unique tokens.

    Args:
        data: `series.token_series`.
    """
    groups = list(dict.fromkeys(data["phases"]))
    policies = list(dict.fromkeys(data["policy"]))
    counts = ["executed_tokens", "logical_tokens"]
    unit = tokens_unit(float(data[counts].to_numpy().max()))
    largest = float(data[counts].to_numpy().max()) / unit.scale
    with style():
        fig, axes = policy_panels(len(groups), len(policies), legend=True)
        for ax, group in zip(axes, groups, strict=True):
            mine = data[data["phases"] == group]
            policy_rows(ax, policies)
            ax.set_xlim(0, 1.08 * largest)
            marks = [mine[n].iloc[0] / unit.scale for n in ("logical_tokens", "unique_tokens")]
            for mark, dashes in zip(marks, ("solid", "--"), strict=True):
                ax.axvline(mark, color=INK, linestyle=dashes, linewidth=1.2)
            executed_tokens = mine["executed_tokens"].tolist()
            labels = unit.column(executed_tokens)
            for row, (policy, executed, label) in enumerate(
                zip(mine["policy"], executed_tokens, labels, strict=True)
            ):
                bar = ax.barh(row, executed / unit.scale, _BAR, color=policy_colour(policy))
                label_bar(ax, bar, label, marks)
            ax.set_title(group)
            ax.set_xlabel(f"computed ({unit.name})")
            ax.xaxis.set_major_locator(MaxNLocator(4))
        handles = [
            Line2D([], [], color=INK, label="logical tokens (no sharing)"),
            Line2D([], [], color=INK, linestyle="--", label="unique tokens (all shared)"),
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


def predicted_vs_measured(data: pd.DataFrame) -> Figure:
    """Simulated beside executed time of each phase, with the relative error.

    Args:
        data: `series.predicted_series`.
    """
    policies = list(dict.fromkeys(data["policy"]))
    phases = list(dict.fromkeys(data["phase"]))
    largest = data[["predicted_s", "measured_s"]].to_numpy().max()
    time = time_unit(float(largest))
    with style():
        fig, axes = policy_panels(len(phases), len(policies), row_in=0.5, legend=True)
        for ax, phase in zip(axes, phases, strict=True):
            policy_rows(ax, policies)
            for policy, _, predicted, measured, error in data[data["phase"] == phase].itertuples(
                index=False
            ):
                row, colour = policies.index(policy), policy_colour(policy)
                ax.barh(
                    row - 0.19,
                    predicted / time.scale,
                    0.34,
                    facecolor="white",
                    edgecolor=colour,
                    linewidth=1.2,
                )
                ax.barh(row + 0.19, measured / time.scale, 0.36, color=colour)
                ax.annotate(
                    f"{100 * error:+.1f} %",
                    (max(predicted, measured) / time.scale, row),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            ax.set_xlim(0, 1.3 * largest / time.scale)
            ax.set_title(phase)
            ax.set_xlabel(f"time ({time.name})")
            ax.xaxis.set_major_locator(MaxNLocator(4))
        handles = [
            Patch(facecolor="white", edgecolor=INK, label="simulated"),
            Patch(color=INK, label="executed"),
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig

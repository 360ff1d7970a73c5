"""Further figures of a comparison, each with the numbers behind it."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from psrl.analysis.report.comparison import Comparison
from psrl.analysis.units import number, time_unit, tokens_unit

from .policy_axes import label_bar, policy_panels, policy_rows
from .series import worker_times
from .style import INK, OP_COLOURS, PHASE_COLOURS, WIDTH_IN, policy_colour, style

_BAR = 0.62


def iteration_series(comparison: Comparison) -> pd.DataFrame:
    """Time of each phase per policy, the rollout first where the trace knows its times."""
    rows = []
    for policy in comparison.policies:
        metrics = comparison.metrics[policy]
        if "iteration" in metrics:
            rows.append((policy, "rollout", float(metrics["iteration"]["rollout_s"])))
        rows += [(policy, p, comparison.makespan_s(policy, (p,))) for p in comparison.phases]
    return pd.DataFrame(rows, columns=["policy", "phase", "makespan_s"])


def iteration_stack(data: pd.DataFrame) -> Figure:
    """A bar per policy, its phases one behind the other.

    Args:
        data: `iteration_series`.
    """
    policies = list(dict.fromkeys(data["policy"]))
    phases = list(dict.fromkeys(data["phase"]))
    totals = data.groupby("policy")["makespan_s"].sum()
    time = time_unit(totals.max())
    longest = float(totals.max()) / time.scale
    with style():
        fig, (ax,) = policy_panels(1, len(policies), legend=True)
        policy_rows(ax, policies)
        for row, policy in enumerate(policies):
            left = 0.0
            mine = data[data["policy"] == policy]
            for phase, lasts_s in zip(mine["phase"], mine["makespan_s"], strict=True):
                width = lasts_s / time.scale
                ax.barh(row, width, _BAR, left=left, color=PHASE_COLOURS[phase], edgecolor="white")
                if width > 0.06 * longest:
                    ax.annotate(
                        number(width), (left + width / 2, row), ha="center", va="center", fontsize=8
                    )
                left += width
            ax.annotate(
                time.text(totals[policy]),
                (left, row),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                fontweight="bold",
            )
        ax.set_xlim(0, 1.15 * longest)
        ax.set_xlabel(f"time of one iteration ({time.name})")
        handles = [Patch(color=PHASE_COLOURS[p], label=p) for p in phases]
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig


def throughput_series(comparison: Comparison) -> pd.DataFrame:
    """Tokens per second of all devices over all phases, before and after deduplication."""
    names = ("logical_tokens_per_s", "unique_tokens_per_s")
    return pd.DataFrame(
        [
            {"policy": p} | {n: float(comparison.metrics[p][n]) for n in names}
            for p in comparison.policies
        ]
    )


def throughput(data: pd.DataFrame) -> Figure:
    """Bars of logical and of unique tokens per second.

    Args:
        data: `throughput_series`.
    """
    policies = data["policy"].tolist()
    with style():
        fig, axes = policy_panels(2, len(policies))
        for ax, kind in zip(axes, ("logical", "unique"), strict=True):
            rates = data[f"{kind}_tokens_per_s"]
            unit = tokens_unit(float(rates.max()))
            policy_rows(ax, policies)
            ax.set_xlim(0, 1.2 * float(rates.max()) / unit.scale)
            labels = unit.column(rates.tolist())
            for row, (policy, rate, label) in enumerate(zip(policies, rates, labels, strict=True)):
                bar = ax.barh(row, rate / unit.scale, _BAR, color=policy_colour(policy))
                label_bar(ax, bar, label)
            ax.set_title(f"{kind} tokens")
            ax.set_xlabel(f"{unit.name} per second, all devices")
            ax.xaxis.set_major_locator(MaxNLocator(5))
    return fig


def micro_batch_series(comparison: Comparison) -> pd.DataFrame:
    """Durations of the main phase's ops, in order, on the last stage of the slowest rank."""
    num_ranks = comparison.setup.parallel.data_parallel_size
    parts = []
    for policy in comparison.policies:
        events = comparison.events(policy)
        events = events.where((events.phase == comparison.main_phase) & (events.micro_batch >= 0))
        slowest = int(worker_times(events, num_ranks).to_numpy().argmax())
        mine = (events.rank == slowest) & (events.stage == events.stage.max())
        events = events.where(np.flatnonzero(mine))
        events = events.where(np.argsort(events.start_s, kind="stable"))
        parts.append(
            pd.DataFrame(
                {
                    "policy": policy,
                    "rank": slowest,
                    "position": np.arange(len(events)),
                    "op": events.op,
                    "micro_batch": events.micro_batch,
                    "duration_s": events.end_s - events.start_s,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def micro_batch_times(data: pd.DataFrame, phase: str) -> Figure:
    """A panel per policy: one line per op, as long as the op takes.

    Args:
        data: `micro_batch_series`.
        phase: named on the axis.
    """
    policies = list(dict.fromkeys(data["policy"]))
    time = time_unit(float(data["duration_s"].max()))
    ops = [op for op in OP_COLOURS if op in set(data["op"])]
    with style():
        fig = Figure(figsize=(WIDTH_IN, 1.15 * len(policies) + 0.8))
        axes = fig.subplots(len(policies), 1, sharey=True, squeeze=False)[:, 0]
        for ax, policy in zip(axes, policies, strict=True):
            mine = data[data["policy"] == policy]
            width = min(6.0, 0.7 * 72 * WIDTH_IN / max(1, len(mine)))
            for op in ops:
                part = mine[mine["op"] == op]
                ax.vlines(
                    part["position"],
                    0,
                    part["duration_s"] / time.scale,
                    color=OP_COLOURS[op],
                    linewidth=width,
                )
            spread = [
                f"{op} {number(lasts.max() / lasts.mean())}x"
                for op in ops
                if len(lasts := mine[mine["op"] == op]["duration_s"])
            ]
            ax.set_title(f"{policy}: rank {mine['rank'].iloc[0]}, {len(mine):,} ops")
            ax.set_title(
                f"largest over mean: {', '.join(spread)}", loc="right", fontweight="normal"
            )
            ax.set_xlim(-0.5, len(mine) - 0.5)
            ax.set_ylim(bottom=0)
            ax.grid(visible=False, axis="x")
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            ax.yaxis.set_major_locator(MaxNLocator(3))
        largest = float(data["duration_s"].max()) / time.scale
        axes[0].set_ylim(0, 1.08 * largest)
        axes[len(policies) // 2].set_ylabel(f"time ({time.name})", color=INK)
        axes[-1].set_xlabel(f"ops of the {phase} phase on the slowest rank's last stage, in order")
        handles = [Patch(color=OP_COLOURS[op], label=op) for op in ops]
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig

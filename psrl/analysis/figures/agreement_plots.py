"""Cached bytes op by op, simulated and executed."""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from psrl.analysis.units import bytes_unit

from .style import INK, WIDTH_IN, policy_colour, save_figure, style


def kv_curve_figure(data: pd.DataFrame) -> Figure:
    """A panel per phase: the executed bytes as an area, the simulated ones as a line on it.

    Args:
        data: `simulated_vs_measured.kv_curves`.
    """
    phases = list(dict.fromkeys(data["phase"]))
    largest = float(data[["measured_bytes", "simulated_bytes"]].to_numpy().max())
    unit = bytes_unit(largest)
    with style():
        fig = Figure(figsize=(WIDTH_IN, 2.6))
        axes = fig.subplots(1, len(phases), sharey=True, squeeze=False)[0]
        for ax, phase in zip(axes, phases, strict=True):
            mine = data[data["phase"] == phase]
            at = mine["position"].to_numpy()
            measured, simulated = (
                mine[f"{kind}_bytes"].to_numpy() / unit.scale for kind in ("measured", "simulated")
            )
            ax.fill_between(at, measured, step="mid", color=policy_colour("psrl"), alpha=0.35, lw=0)
            ax.step(at, simulated, where="mid", color=INK, linewidth=1.2)
            same = bool((measured == simulated).all())
            ax.set_title(phase)
            ax.set_title(
                "equal, byte by byte" if same else f"{(measured != simulated).sum()} ops differ",
                loc="right",
                fontweight="normal",
            )
            where = f"rank {mine['rank'].iloc[0]}, stage {mine['stage'].iloc[0]}"
            ax.set_xlabel(f"op ({where})")
            ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes[0].set_ylim(0, max(1.1 * largest / unit.scale, 1e-3))
        axes[0].set_ylabel(f"cached K/V, dK/dV ({unit.name})")
        handles = [
            Patch(color=policy_colour("psrl"), alpha=0.35, label="executed"),
            Line2D([], [], color=INK, label="simulated"),
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


def write_kv_curves(data: pd.DataFrame, directory: Path) -> Path:
    """Write kv_curve.png, .svg and .csv; returns the PNG's path."""
    return save_figure(kv_curve_figure(data), data, directory, "kv_curve")

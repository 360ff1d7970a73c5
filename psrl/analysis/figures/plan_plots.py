"""Figures of `psrl plan`: who works how long, what is computed twice, where the tree is cut."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from psrl.analysis.units import percent, time_unit, tokens_unit
from psrl.core.plan.plan import Plan
from psrl.core.samples.sample import FloatArray, SampleBatch

from .plan_series import layout_table, program_name, progress_table, rank_table, tree_table
from .search_plots import gap_over_steps, time_memory
from .style import INK, WIDTH_IN, save_figure, style

_BLUE, _RED = "#0072b2", "#d55e00"
# Programs drawn one under the other; a plan of more shows the first ones.
_MAX_PROGRAMS = 4
# Neighbouring ranks are told apart; what several ranks compute stands out in one dark colour.
_RANK_COLOURS = ("#9ecae9", "#f2cf5b", "#88d27a", "#ffbf79", "#d6a5c9", "#83bcb6", "#c5b0a0")
_COPY_COLOURS = ("#8a4a4a", "#5a1f1f", "#1a0505")
_ROWS = 500


def save_plan_plots(
    plan: Plan,
    batch: SampleBatch,
    explanation: list[dict[str, Any]],
    layouts: list[dict[str, Any]],
    progress: list[dict[str, Any]],
    directory: Path,
) -> list[Path]:
    """Write the figures of a plan, each as PNG and SVG beside a CSV with its numbers.

    Args:
        batch: the iteration that the plan was made for.
        explanation: `ProgramReport.as_json()` of every program.
        layouts: the set-ups of a search, as in `psrl plan --search --json`; empty without one.
        progress: program, steps and gap of the search for a placement; empty without one.

    Returns:
        Paths of the PNGs.
    """
    ranks = rank_table(explanation)
    # Updates take most of an iteration; without one, the first program is as good as any.
    shown = next((i for i, p in enumerate(plan.programs) if p.is_update), 0)
    tree = tree_table(plan, batch, shown)
    paths = [
        save_figure(worker_times(ranks), ranks, directory, "worker_times"),
        save_figure(duplicated_tokens(ranks), ranks, directory, "duplicated_tokens"),
        save_figure(tree_cut(tree, program_name(explanation[shown])), tree, directory, "tree_cut"),
    ]
    if progress:
        gaps = progress_table(progress, explanation)
        paths.append(save_figure(gap_over_steps(gaps), gaps, directory, "gap_over_steps"))
    if layouts:
        searched = layout_table(layouts)
        limit = plan.cluster.device.memory_bytes
        paths.append(save_figure(time_memory(searched, limit), searched, directory, "layouts"))
    return paths


def worker_times(data: pd.DataFrame) -> Figure:
    """Predicted time of each rank, a panel per program, with the mean.

    Args:
        data: `plan_series.rank_table`.
    """
    time = time_unit(float(data["time_s"].max()))
    with style():
        fig, panels = _program_panels(data)
        for ax, name, mine in panels:
            worked = mine["time_s"].to_numpy() / time.scale
            _bars(ax, worked, _BLUE)
            mean = float(worked.mean())
            ax.axhline(mean, color=INK, linewidth=1.2, linestyle="--")
            ax.set_title(name)
            spread = f"max / mean {float(worked.max()) / mean:.3f}" if mean else "no work"
            ax.set_title(spread, loc="right", fontweight="normal")
            ax.set_ylabel(f"time ({time.name})")
        handles = [Line2D([], [], color=INK, linestyle="--", label="mean of the ranks")]
        fig.legend(handles=handles, loc="outside lower center")
    return fig


def duplicated_tokens(data: pd.DataFrame) -> Figure:
    """Tokens that each rank computes; on top its share of those that several ranks compute.

    Args:
        data: `plan_series.rank_table`.
    """
    unit = tokens_unit(float(data["num_tokens"].max()))
    with style():
        fig, panels = _program_panels(data)
        for ax, name, mine in panels:
            total = mine["num_tokens"].to_numpy() / unit.scale
            twice = mine["duplicated_tokens"].to_numpy() / unit.scale
            _bars(ax, total - twice, "#a9c9e0")
            _bars(ax, twice, _RED, total - twice)
            once = float((total - twice).sum())
            share = percent(float(twice.sum()) / once) if once else "-"
            ax.set_title(name)
            ax.set_title(f"{share} computed beyond one copy", loc="right", fontweight="normal")
            ax.set_ylabel(unit.name)
        handles = [
            Patch(color=_RED, label="computed by other ranks too (beyond one copy)"),
            Patch(color="#a9c9e0", label="computed once"),
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


def _program_panels(data: pd.DataFrame) -> tuple[Figure, list[tuple[Axes, str, pd.DataFrame]]]:
    names = list(dict.fromkeys(data["program"]))
    shown = names[:_MAX_PROGRAMS]
    fig = Figure(figsize=(WIDTH_IN, 1.75 * len(shown) + 0.8))
    axes = fig.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    axes[-1].set_xlabel(
        "data-parallel rank"
        + (f"  (first {len(shown)} of {len(names)} programs)" if len(names) > len(shown) else "")
    )
    for ax in axes:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        ax.yaxis.set_major_locator(MaxNLocator(4))
        ax.grid(visible=False, axis="x")
    parts = [
        (ax, name, data[data["program"] == name]) for ax, name in zip(axes, shown, strict=True)
    ]
    return fig, parts


def _bars(ax: Axes, height: FloatArray, colour: str, bottom: FloatArray | float = 0.0) -> None:
    """Bars of all ranks; of many ranks, without gaps."""
    width = 0.8 if len(height) <= 100 else 1.0
    ax.bar(np.arange(len(height)), height, width, bottom=bottom, color=colour)
    ax.set_xlim(-0.6, len(height) - 0.4)


def tree_cut(data: pd.DataFrame, name: str) -> Figure:
    """The prefix tree from the top down: tokens of one rank in its colour, shared ones dark.

    A column is a leaf, in depth-first order, so neighbours share the top of their columns.

    Args:
        data: `plan_series.tree_table`.
        name: of the program.
    """
    deepest = int((data["start_depth"] + data["num_tokens"]).max()) if len(data) else 1
    unit = tokens_unit(float(deepest))
    num_leaves = int(data["leaf"].max()) + 1 if len(data) else 1
    cells = _tree_cells(data, deepest)
    colours = [to_rgb(c) for c in ("white", *_RANK_COLOURS, *_COPY_COLOURS)]
    # Every other node of a path is a little darker, so that nodes of one rank can be told apart.
    colours += [(0.88 * red, 0.88 * green, 0.88 * blue) for red, green, blue in colours]
    with style():
        fig = Figure(figsize=(WIDTH_IN, 4.2))
        ax = fig.subplots()
        ax.imshow(
            cells,
            cmap=ListedColormap(colours),
            vmin=-0.5,
            vmax=len(colours) - 0.5,
            aspect="auto",
            interpolation="nearest",
            extent=(0.0, num_leaves, deepest / unit.scale, 0.0),
        )
        ax.grid(visible=False)
        ax.set_title(f"prefix tree of {name}")
        shown = data[["node", "num_tokens", "copies"]].drop_duplicates("node")
        twice = int(((shown["copies"] - 1) * shown["num_tokens"]).sum())
        ax.set_title(
            f"{twice:,} tokens beyond one copy" if twice else "no token is computed twice",
            loc="right",
            fontweight="normal",
        )
        ax.set_xlabel("leaves of the tree, depth first")
        ax.set_ylabel(f"depth ({unit.name})")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        _tree_legend(fig, data["copies"].to_numpy())
    return fig


def _tree_cells(data: pd.DataFrame, deepest: int) -> "np.ndarray[Any, Any]":
    """[_ROWS, leaves shown] colour of the node that a leaf's path has at a depth; 0 below it."""
    shown, column = np.unique(data["leaf"], return_inverse=True)
    cells = np.zeros((_ROWS, max(1, len(shown))), np.int8)
    top = np.floor(data["start_depth"] / deepest * _ROWS).astype(int)
    end = np.ceil((data["start_depth"] + data["num_tokens"]) / deepest * _ROWS).astype(int)
    own = 1 + data["rank"] % len(_RANK_COLOURS)
    several = 1 + len(_RANK_COLOURS) + _copy_class(data["copies"].to_numpy())
    is_darker = data.groupby("leaf").cumcount() % 2
    num_colours = 1 + len(_RANK_COLOURS) + len(_COPY_COLOURS)
    colour = np.where(data["copies"] > 1, several, own) + num_colours * is_darker
    for leaf, first, last, value in zip(column, top, end, colour, strict=True):
        cells[first:last, leaf] = value
    return cells


def _copy_class(copies: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """0 for two ranks, 1 up to eight, 2 for more."""
    return np.searchsorted([2, 8], copies)


def _tree_legend(fig: Figure, copies: "np.ndarray[Any, Any]") -> None:
    handles = [Patch(color=_RANK_COLOURS[0], label="on one rank (other colours: other ranks)")]
    labels = ("on 2 ranks", "on 3 to 8", "on more")
    for number in np.unique(_copy_class(copies[copies > 1])).tolist():
        handles.append(Patch(color=_COPY_COLOURS[number], label=labels[number]))
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))

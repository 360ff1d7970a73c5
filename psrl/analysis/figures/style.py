"""One look for all figures, and how they are saved with the numbers behind them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from psrl.analysis.tables import write_csv

WIDTH_IN = 9.0
INK = "#333333"
FAINT = "#8a8a8a"

# Tell-apart colours for colour-blind readers (Okabe and Ito, Tol); vermilion only for psrl.
POLICY_COLOURS = {
    "verl": "#777777",
    "merged_dense": "#332288",
    "vllm_ps": "#56b4e9",
    "sglang_ps": "#0072b2",
    "sharing_agnostic": "#cc79a7",
    "prefix_match_first": "#882255",
    "balance_first": "#aa8800",
    "first_fit": "#44aa99",
    "dfs_cut": "#117733",
    "quick": "#aa4499",
    "psrl": "#d55e00",
    "optimal": "#222222",
}
FACTOR_COLOURS = {"cuts": "#0072b2", "placement": "#e69f00", "sharing": "#009e73"}
OP_COLOURS = {
    "forward": "#56b4e9",
    "backward": "#e69f00",
    "recompute": "#cc79a7",
    "gradient_reduction": "#555555",
    "optimizer_step": "#222222",
}
PHASE_COLOURS = {
    "rollout": "#d5d5d5",
    "log_old_prob": "#9ad0f0",
    "reference": "#56b4e9",
    "update": "#e69f00",
}
_UNKNOWN_POLICY = "#999933"

_RC: dict[Any, Any] = {
    "font.size": 9.0,
    "font.family": ["DejaVu Sans"],
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": "#bbbbbb",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 150,
    "svg.hashsalt": "psrl",
}


@contextmanager
def style() -> Iterator[None]:
    """Draw and save with the style sheet, whatever the caller's settings are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        yield


def policy_colour(policy: str) -> str:
    """The fixed colour of a policy; one colour for all policies that psRL does not know."""
    return POLICY_COLOURS.get(policy, _UNKNOWN_POLICY)


def save_figure(fig: Figure, data: pd.DataFrame, directory: Path, name: str) -> Path:
    """Write name.png, name.svg and name.csv; equal inputs give equal bytes.

    Returns:
        Path of the PNG.
    """
    directory.mkdir(parents=True, exist_ok=True)
    png = directory / f"{name}.png"
    with style():
        fig.savefig(png, format="png", metadata={"Software": None})
        fig.set_layout_engine("none")  # the layout is done; doing it again doubles the time
        fig.savefig(
            directory / f"{name}.svg", format="svg", metadata={"Date": None, "Creator": None}
        )
    write_csv(data, directory / f"{name}.csv")
    return png

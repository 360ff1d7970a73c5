"""Building blocks of the figures that have a row per policy."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .style import INK, WIDTH_IN

_LOG_TICKS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.0, 16.0, 32.0, 64.0)


def policy_panels(
    num_panels: int,
    num_rows: int,
    row_in: float = 0.36,
    widths: tuple[float, ...] | None = None,
    legend: bool = False,
) -> tuple[Figure, list[Axes]]:
    """Panels side by side that share the policies on the y axis."""
    height = row_in * num_rows + 1.0 + (0.25 if legend else 0.0)
    fig = Figure(figsize=(WIDTH_IN, height))
    axes = fig.subplots(1, num_panels, sharey=True, squeeze=False, width_ratios=widths)[0]
    return fig, list(axes)


def policy_rows(ax: Axes, policies: list[str]) -> None:
    """Policies down the y axis, the first on top."""
    ax.set_ylim(len(policies) - 0.5, -0.5)
    ax.set_yticks(range(len(policies)), policies)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    for label in ax.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == "psrl" else "normal")


def label_bar(ax: Axes, bars: BarContainer, text: str, marks: Sequence[float] = ()) -> None:
    """The number at a bar's end: behind it, or inside where a mark stands in the way."""
    bar = bars.patches[0]
    value, colour = bar.get_width(), bar.get_facecolor()
    left, right = ax.get_xlim()
    room = 0.2 * (right - left)
    blocked = value + room > right or any(value - 0.01 * room < m < value + room for m in marks)
    inside = blocked and value > room
    red, green, blue = to_rgb(colour)
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.6
    ax.annotate(
        text,
        (value, bar.get_y() + bar.get_height() / 2),
        xytext=(-4 if inside else 4, 0),
        textcoords="offset points",
        ha="right" if inside else "left",
        va="center",
        fontsize=8,
        color="white" if inside and is_dark else INK,
        bbox={"facecolor": colour if inside else "white", "edgecolor": "none", "pad": 1.0},
    )


def log_axis(ax: Axes, low: float, high: float) -> None:
    """A log x axis around [low, high] with room for labels at the right."""
    ax.set_xscale("log")
    ax.set_xlim(low / 1.12, high * 1.45)
    ticks = [t for t in _LOG_TICKS if low / 1.12 <= t <= high * 1.45]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))

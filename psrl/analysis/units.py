"""Numbers for people: one unit per column or axis, few digits, no ten-digit counts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True)
class Unit:
    """A display unit: `value / scale` is shown with `name` behind it."""

    scale: float
    name: str

    def text(self, value: float) -> str:
        """The value with three significant digits and the unit, e.g. `41.2 GiB`."""
        return f"{number(value / self.scale)} {self.name}".strip()

    def column(self, values: Sequence[float]) -> list[str]:
        """Values without the unit, all with the decimals that the smallest one needs."""
        scaled = [value / self.scale for value in values]
        smallest = min((v for v in scaled if v > 0 and math.isfinite(v)), default=1.0)
        decimals = min(2, max(0, 2 - math.floor(math.log10(smallest))))
        return ["-" if math.isnan(v) else f"{v:,.{decimals}f}" for v in scaled]


def number(value: float) -> str:
    """Three significant digits, thousands separators above a thousand, `-` for no number."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995 or size == 0:
        return f"{value:.2f}"
    return f"{value:.3g}"


def time_unit(largest_s: float) -> Unit:
    """Unit in which times up to `largest_s` seconds read well."""
    if largest_s >= 1.0:
        return Unit(1.0, "s")
    return Unit(1e-3, "ms")


def bytes_unit(largest_bytes: float) -> Unit:
    """Unit in which sizes up to `largest_bytes` read well."""
    if largest_bytes >= 0.1 * _GIB:
        return Unit(_GIB, "GiB")
    return Unit(2**20, "MiB") if largest_bytes >= 0.1 * 2**20 else Unit(2**10, "KiB")


def tokens_unit(largest_tokens: float) -> Unit:
    """Unit in which token counts up to `largest_tokens` fit on an axis."""
    if largest_tokens >= 1e9:
        return Unit(1e9, "billion tokens")
    if largest_tokens >= 1e6:
        return Unit(1e6, "million tokens")
    return Unit(1e3, "thousand tokens") if largest_tokens >= 1e4 else Unit(1.0, "tokens")


def times(ratio: float) -> str:
    """A ratio as a factor, e.g. `2.52x`."""
    if not math.isfinite(ratio):
        return number(ratio)
    return f"{ratio:.2f}x" if abs(ratio) < 9.995 else f"{number(ratio)}x"


def percent(share: float) -> str:
    """A share of one as per cent, e.g. `8.1 %`."""
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"

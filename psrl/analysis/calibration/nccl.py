"""All-reduce curves from nccl-tests logs."""

import re
from pathlib import Path

import pandas as pd

from psrl.core.cost.calibration import Curve
from psrl.core.errors import ConfigError

from .tables import read_table

COLUMNS = ("num_ranks", "nbytes", "seconds")

# size (B), count (elements), type, redop, time (us) of the out-of-place run.
_ROW = re.compile(r"\s(\d+)\s+(\d+)\s+float\s+sum\s+([\d.]+)")


def parse_nccl_log(text: str) -> Curve:
    """Out-of-place times of an `all_reduce_perf` log; the fastest of repeated sizes.

    Raises:
        ConfigError: if the text has no such row.
    """
    seconds: dict[int, float] = {}
    for match in _ROW.finditer(text):
        nbytes, time_s = int(match[1]), float(match[3]) * 1e-6
        seconds[nbytes] = min(time_s, seconds.get(nbytes, time_s))
    if not seconds:
        raise ConfigError("no row `size count float sum time` of an nccl-tests log")
    sizes = sorted(seconds)
    return Curve(nbytes=tuple(map(float, sizes)), seconds=tuple(seconds[n] for n in sizes))


def curves_to_table(curves: dict[str, Curve]) -> pd.DataFrame:
    """One row per number of ranks and size."""
    rows = [
        (int(name), int(nbytes), time_s)
        for name, curve in curves.items()
        for nbytes, time_s in zip(curve.nbytes, curve.seconds, strict=True)
    ]
    return pd.DataFrame(sorted(rows), columns=list(COLUMNS))


def read_curves(path: Path) -> dict[str, Curve]:
    """Curves by number of ranks.

    Raises:
        ConfigError: if the table is malformed.
    """
    table = read_table(path, COLUMNS).sort_values(["num_ranks", "nbytes"])
    return {
        str(num_ranks): Curve(
            nbytes=tuple(rows["nbytes"].astype(float)), seconds=tuple(rows["seconds"])
        )
        for num_ranks, rows in table.groupby("num_ranks")
    }

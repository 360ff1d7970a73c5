"""Reads the CSV tables of public measurements (examples/calibration)."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from psrl.core.errors import ConfigError


def read_table(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Read a CSV that has at least these columns and one row.

    Raises:
        ConfigError: if it is missing, is no such table, or has an empty cell.
    """
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path} ({type(error).__name__})",
            "run from the repository root, or pass the folder of the tables with --data",
        ) from None
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise ConfigError(f"{path}: column(s) {', '.join(missing)} are missing")
    chosen = table[list(columns)]
    if chosen.empty or chosen.isna().to_numpy().any():
        raise ConfigError(
            f"{path}: {int(chosen.isna().to_numpy().sum())} empty cells in {len(chosen)} rows"
        )
    return chosen

"""Advantages of single tokens, from a file that goes with a trace."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from psrl.core.errors import ConfigError
from psrl.core.samples.sample import FloatArray

from .inputs import LossTokens

_SCHEMA = pa.schema([("sample", pa.int64()), ("token", pa.int64()), ("advantage", pa.float64())])


def read_token_advantages(path: Path, loss_tokens: LossTokens) -> FloatArray:
    """[number of loss tokens] advantages of a Parquet file with a row per trained token.

    Columns: sample (in the iteration), token (position in the sample), advantage. Rows may have
    any order.

    Raises:
        ConfigError: if the file cannot be read, lacks a column, has rows for other tokens than
            the trained ones, or numbers that are not finite.
    """
    try:
        table = pq.read_table(path, columns=_SCHEMA.names).cast(_SCHEMA)
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ConfigError(
            f"{path} cannot be read as token advantages: {str(error).splitlines()[0]}",
            f"write a Parquet file with the columns {', '.join(_SCHEMA.names)}",
        ) from None
    sample, token, advantage = (table[name].to_numpy() for name in _SCHEMA.names)
    order = np.lexsort((token, sample))
    wanted = np.stack([loss_tokens.sample, loss_tokens.token])
    found = np.stack([sample[order], token[order]])
    if found.shape != wanted.shape or (found != wanted).any():
        raise ConfigError(
            f"{path} has {found.shape[1]} rows of other tokens than the {wanted.shape[1]} trained "
            f"ones{_first_difference(found, wanted)}",
            "write one row per trained token; logprobs.parquet of an execution lists them",
        )
    values: FloatArray = advantage[order]
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ConfigError(
            f"{path}: token {int(wanted[1, bad])} of sample {int(wanted[0, bad])} has advantage "
            f"{values[bad]}"
        )
    return values


def _first_difference(found: np.ndarray, wanted: np.ndarray) -> str:
    common = min(found.shape[1], wanted.shape[1])
    differs = np.flatnonzero((found[:, :common] != wanted[:, :common]).any(axis=0))
    if not len(differs):
        return ""
    at = int(differs[0])
    return (
        f"; the first is token {found[1, at]} of sample {found[0, at]} where token "
        f"{wanted[1, at]} of sample {wanted[0, at]} is trained"
    )

"""Calibration from kernel and collective times measured on H200 (aiconfigurator's tables)."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from psrl.core.cost.calibration import (
    Calibration,
    Coefficients,
    Curve,
    Domain,
    ErrorRow,
    Identification,
)
from psrl.core.cost.layer_time import LayerShape, LayerTime
from psrl.core.cost.presets import DEVICES
from psrl.core.samples.sample import FloatArray, IntArray

from .errors import cross_validate, error_table, folds_of
from .least_squares import Candidate, Predict, fit_coefficients
from .tables import read_table

GEMM_COLUMNS = ("m", "n", "k", "seconds")
ATTENTION_COLUMNS = ("batch_size", "seq_length", "num_heads", "head_dim", "seconds")
COLLECTIVE_COLUMNS = ("collective", "num_ranks", "nbytes", "seconds")
SOURCES = ("H200 GEMM, prefill attention and NCCL tables (ai-dynamo/aiconfigurator)",)

_DEVICE = DEVICES["h200-141"]
_BASE = Coefficients.of_device(_DEVICE)
_GEMM = (
    Candidate("gemm_efficiency", _BASE.gemm_efficiency, 0.3, 1.0),
    Candidate("gemm_tail_tiles", 10.0, 0.0, 500.0),
)
_ATTENTION = (
    Candidate("attention_efficiency", _BASE.attention_efficiency, 0.05, 1.0),
    Candidate("attention_half_keys", 500.0, 0.0, 5000.0),
)
# Smaller products and prompts are bound by memory and launches, which the form has elsewhere.
_MIN_ROWS, _MIN_WIDTH = 256, 1024
_WIDTHS = (1024, 2048, 4096, 8192, 16384)
_HEADS = (8, 16, 32, 64)
_HEAD_DIM = 128


def reduce_gemm(table: pd.DataFrame) -> pd.DataFrame:
    """bf16 products [m, k] x [k, n]: m a power of two, a few widths; medians in seconds."""
    rows = table[
        (table["gemm_dtype"] == "bfloat16")
        & (table["m"] >= _MIN_ROWS)
        & (np.log2(table["m"]) % 1 == 0)
        & table["n"].isin(_WIDTHS)
        & table["k"].isin(_WIDTHS)
    ]
    return _medians(rows, ["m", "n", "k"])


def reduce_attention(table: pd.DataFrame) -> pd.DataFrame:
    """bf16 causal prefill with 128-wide heads and no cached prefix; medians in seconds."""
    rows = table[
        (table["attn_dtype"] == "bfloat16")
        & (table["kv_cache_dtype"] == "bfloat16")
        & (table["window_size"] == 0)
        & (table["step"] == 0)
        & (table["head_dim"] == _HEAD_DIM)
        & table["num_heads"].isin(_HEADS)
        & (table["batch_size"] * table["isl"] >= _MIN_WIDTH)
        & (table["isl"] >= _MIN_ROWS)
    ].rename(columns={"isl": "seq_length"})
    return _medians(rows, ["batch_size", "seq_length", "num_heads", "head_dim"])


def reduce_collectives(table: pd.DataFrame) -> pd.DataFrame:
    """16-bit collectives, every second power of two of the size in bytes."""
    rows = table[(table["nccl_dtype"] == "half") & (np.log2(table["message_size"]) % 2 == 0)]
    names = {"op_name": "collective", "num_gpus": "num_ranks", "message_size": "nbytes"}
    return _medians(rows.rename(columns=names), ["collective", "num_ranks", "nbytes"])


def _medians(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    seconds = rows.groupby(keys)["latency"].median() / 1e3
    return seconds.rename("seconds").reset_index()


def _layer_time(values: Mapping[str, float], width: FloatArray | float = 1.0) -> LayerTime:
    """The form with only its attention width filled in: projections and head are not asked."""
    shape = LayerShape(1, (), (), width, 1, 1, 1, _DEVICE.dtype_bytes)
    return LayerTime(_BASE.model_copy(update=dict(values)), _DEVICE, shape)


def _predict_gemm(table: pd.DataFrame) -> Predict:
    m, n, k = (table[name].to_numpy(np.float64) for name in ("m", "n", "k"))
    return lambda values: np.asarray(_layer_time(values).product_s(m, n, k))


def _predict_attention(table: pd.DataFrame) -> Predict:
    batch, seq, heads, dim = (
        table[name].to_numpy(np.float64)
        for name in ("batch_size", "seq_length", "num_heads", "head_dim")
    )
    num_tokens, pairs = batch * seq, batch * seq * (seq + 1) / 2
    return lambda values: np.asarray(
        _layer_time(values, heads * dim).attention_s(num_tokens, pairs)
    )


def _held_out_s(
    table: pd.DataFrame, make: Callable[[pd.DataFrame], Predict], candidates: tuple[Candidate, ...]
) -> FloatArray:
    def fit_and_predict(known: IntArray, unseen: IntArray) -> FloatArray:
        seen = table.iloc[known]
        fit = fit_coefficients(make(seen), seen["seconds"].to_numpy(np.float64), candidates)
        return make(table.iloc[unseen])(fit.values)

    return cross_validate(fit_and_predict, folds_of(len(table), 5))


def calibrate_h200(folder: Path) -> Calibration:
    """Fit GEMM and attention; all-reduce curves are taken as they are, the rest is pinned.

    Raises:
        ConfigError: if a table is missing or malformed.
    """
    gemm = read_table(folder / "gemm.csv", GEMM_COLUMNS)
    attention = read_table(folder / "attention.csv", ATTENTION_COLUMNS)
    collectives = read_table(folder / "collectives.csv", COLLECTIVE_COLUMNS)
    values: dict[str, float] = {}
    identification: dict[str, Identification] = {}
    errors: list[ErrorRow] = []
    for table, make, candidates, size, kind in (
        (gemm, _predict_gemm, _GEMM, "m", "GEMM"),
        (attention, _predict_attention, _ATTENTION, "seq_length", "attention"),
    ):
        measured_s = table["seconds"].to_numpy(np.float64)
        fit = fit_coefficients(make(table), measured_s, candidates)
        values |= fit.values
        identification |= fit.identification
        held_out = _held_out_s(table, make, candidates)
        sizes = np.char.add(f"{kind} {size} ", table[size].astype(str).to_numpy(np.str_))
        groups = {"": np.full(len(table), kind), " ": sizes}
        errors += error_table(groups, held_out, measured_s)
    return Calibration(
        sources=SOURCES,
        coefficients=_BASE.model_copy(update=values),
        identification=identification | _pinned(values),
        all_reduce=_all_reduce(collectives),
        domain=_domain(gemm, attention),
        errors=tuple(errors),
    )


def _pinned(values: Mapping[str, float]) -> dict[str, Identification]:
    reason = "kernel tables do not show it: data-sheet assumption"
    names = (
        *("host_layer_s", "head_passes", "replicated_passes", "sharded_passes", "step_s"),
        *("weight_passes", "accumulation_bytes_per_parameter"),
    )
    return {
        name: Identification(status="pinned", num_rows=0, reason=reason)
        for name in names
        if name not in values
    }


def _all_reduce(collectives: pd.DataFrame) -> dict[str, Curve]:
    rows = collectives[collectives["collective"] == "all_reduce"].sort_values("nbytes")
    return {
        str(num_ranks): Curve(
            nbytes=tuple(curve["nbytes"].astype(float)), seconds=tuple(curve["seconds"])
        )
        for num_ranks, curve in rows.groupby("num_ranks")
    }


def _domain(gemm: pd.DataFrame, attention: pd.DataFrame) -> Domain:
    keys = attention["seq_length"].to_numpy(np.float64) / 2
    columns = {"num_tokens": gemm["m"], "hidden_size": gemm["k"]}
    ranges = {name: (float(c.min()), float(c.max())) for name, c in columns.items()}
    ranges["keys_per_query"] = float(keys.min()), float(keys.max())
    ranges["tensor_model_parallel_size"] = 1.0, 8.0
    return Domain(
        device=_DEVICE.name, dtype_bytes=_DEVICE.dtype_bytes, attention="flash", ranges=ranges
    )

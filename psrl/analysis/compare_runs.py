"""Do two executed runs of the same trace have the same logprobs, loss and gradients?"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from psrl.core.errors import ConfigError
from psrl.core.run.relative_error import relative_error
from psrl.core.run.run_directory import read_json, read_manifest
from psrl.core.samples.sample import FloatArray

TOLERANCE = 5e-6
WORST_PARAMETER = "gradient of "
_LOGPROBS = ("old_logprob", "ref_logprob", "logprob")


def exactness(run_a: Path, run_b: Path, tolerance: float = TOLERANCE) -> list[dict[str, Any]]:
    """Largest relative differences of two executed runs, run_b being the reference.

    Logprobs and loss: |a - b| / max(1, |b|), for both may be near zero; loss per optimizer step
    if there are several. Gradients: L2 norm of the difference over the norm of b, over all
    parameters together and for the worst one, there as `relative_error` with the gradient of the
    whole model for the size of what was summed. A logprob that is NaN in both runs is unknown and
    left out; any other value that is not finite differs by infinity.

    Returns:
        Dictionaries with quantity, largest_relative_difference and tolerance; that of the worst
        parameter is infinite, for a gradient that should be zero is nothing but rounding.

    Raises:
        ConfigError: if a file is missing or unreadable, the traces differ, or the runs do not
            hold the same samples, tokens and parameters.
    """
    hashes = [_trace_hash(run) for run in (run_a, run_b)]
    if hashes[0] != hashes[1]:
        raise ConfigError(
            f"{run_a} and {run_b} ran different traces ({hashes[0]}, {hashes[1]})",
            "execute both plans with the same --trace",
        )
    found = _logprob_differences(run_a, run_b)
    loss_a, loss_b = _loss(run_a), _loss(run_b)
    if len(loss_a) != len(loss_b):
        raise ConfigError(f"{run_a} took {len(loss_a)} optimizer steps, {run_b} {len(loss_b)}")
    found["loss"] = _largest(loss_a, loss_b)
    found |= _gradient_differences(run_a, run_b)
    return [
        {
            "quantity": name,
            "largest_relative_difference": difference,
            "tolerance": math.inf if name.startswith(WORST_PARAMETER) else tolerance,
        }
        for name, difference in found.items()
    ]


def _trace_hash(run: Path) -> str:
    manifest = read_manifest(run)
    if "trace_hash" not in manifest:
        raise ConfigError(
            f"{run / 'manifest.json'}: no trace_hash", "is this a run of `psrl execute`?"
        )
    return str(manifest["trace_hash"])


def _loss(run: Path) -> FloatArray:
    path = run / "metrics.json"
    metrics = read_json(path)
    if "loss" not in metrics:
        raise ConfigError(f"{path}: no loss", "is this a run of `psrl execute` with an update?")
    return np.atleast_1d(np.array(metrics["loss"], np.float64))


def _logprob_differences(run_a: Path, run_b: Path) -> dict[str, float]:
    tables = [_read_logprobs(run / "logprobs.parquet") for run in (run_a, run_b)]
    a, b = tables
    if len(a["sample"]) != len(b["sample"]):
        raise ConfigError(
            f"{run_a} has {len(a['sample']):,} logprobs, {run_b} has {len(b['sample']):,}"
        )
    for key in ("sample", "token"):
        if not np.array_equal(a[key], b[key]):
            first = int(np.argmax(a[key] != b[key]))
            raise ConfigError(
                f"{run_a} and {run_b} hold logprobs of different tokens: in order, row {first} "
                f"has {key} {a[key][first]} and {b[key][first]}"
            )
    found = {}
    for name in _LOGPROBS:
        known = ~(np.isnan(a[name]) & np.isnan(b[name]))
        if known.any():
            found[name] = _largest(a[name][known], b[name][known])
    return found


def _read_logprobs(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Columns ordered by (sample, token)."""
    try:
        table = pq.read_table(path)
        columns = {name: table[name].to_numpy() for name in ("sample", "token", *_LOGPROBS)}
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing", "is this a run of `psrl execute`?") from None
    except (OSError, KeyError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: not a table of logprobs ({error})") from None
    order = np.lexsort((columns["token"], columns["sample"]))
    return {name: column[order] for name, column in columns.items()}


def _largest(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    if not len(a):
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    return float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(b))))


def _gradient_differences(run_a: Path, run_b: Path) -> dict[str, float]:
    """Relative L2 difference of all parameters, and of the worst one (named in the key)."""
    paths = [run / "gradients.safetensors" for run in (run_a, run_b)]
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} is missing", "execute with gradients saved")
    squares: dict[str, tuple[float, float, float]] = {}
    try:
        with safe_open(paths[0], "numpy") as a, safe_open(paths[1], "numpy") as b:
            names_a, names_b = set(a.keys()), set(b.keys())
            if names_a != names_b:
                odd = sorted(names_a ^ names_b)
                raise ConfigError(
                    f"{paths[0]} and {paths[1]} hold different parameters: {len(odd)} are only in "
                    f"one of them, e.g. {odd[0]}"
                )
            for name in sorted(names_a):
                ours, reference = a.get_tensor(name), b.get_tensor(name)
                if ours.shape != reference.shape:
                    raise ConfigError(
                        f"gradient {name} has shape {ours.shape} in {run_a} and "
                        f"{reference.shape} in {run_b}"
                    )
                epsilon = float(np.finfo(reference.dtype).eps)
                reference = reference.astype(np.float64)
                difference = ours.astype(np.float64) - reference
                squares[name] = (
                    float(np.sum(difference**2)),
                    float(np.sum(reference**2)),
                    epsilon,
                )
    except (OSError, SafetensorError, TypeError, ValueError) as error:  # bfloat16, integers
        raise ConfigError(f"cannot read {paths[0]} or {paths[1]} ({error})") from None
    total = math.sqrt(sum(square for _, square, _ in squares.values()))
    difference = math.sqrt(sum(square for square, *_ in squares.values()))
    by_parameter = {
        name: relative_error(math.sqrt(apart), math.sqrt(square), size=total, epsilon=epsilon)
        for name, (apart, square, epsilon) in squares.items()
    }
    found = {"gradients": relative_error(difference, total)}
    if by_parameter:
        worst = max(by_parameter, key=lambda name: by_parameter[name])
        found[f"{WORST_PARAMETER}{worst}"] = by_parameter[worst]
    return found

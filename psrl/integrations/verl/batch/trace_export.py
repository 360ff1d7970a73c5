"""Writes veRL's training batches as psRL traces, one directory per RL iteration.

Beside the trace lies `tokens.parquet` with what a trace holds no column for: advantage and
logprobs of every trained token. `psrl execute --token-advantages` reads it.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from psrl.core.samples.sample import FloatArray, IntArray, SampleBatch
from psrl.core.samples.trace import Trace, batch_hash, write_trace

from .samples import WholeSamples, response_values

TOKENS_FILE = "tokens.parquet"
_PREFIX = "iteration_"
_TOKEN_FIELDS = {
    "advantage": "advantages",
    "old_logprob": "old_log_probs",
    "ref_logprob": "ref_log_prob",
    "rollout_logprob": "rollout_log_probs",
}
_REWARD_FIELDS = ("token_level_scores", "rm_scores", "token_level_rewards")


class TraceExport:
    """Collects the mini-batches of an iteration in the order in which they are trained.

    Args:
        directory: gets `iteration_000000`, `iteration_000001`, ...; numbers go on after those
            that are there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._batches: list[SampleBatch] = []
        self._tokens: list[dict[str, FloatArray]] = []
        self._seen: set[str] = set()
        self._num_left_out = 0

    def add(self, samples: WholeSamples, data: Mapping[str, Any]) -> None:
        """Record a mini-batch; one that was trained before in this iteration is known already."""
        tokens = {
            column: samples.of_response(data, name).double().cpu().numpy()
            for column, name in _TOKEN_FIELDS.items()
            if name in data
        }
        batch = _recorded(samples, data, tokens.get("advantage"), len(self._batches))
        digest = batch_hash(replace(batch, mini_batch=np.zeros_like(batch.mini_batch)))
        if digest in self._seen:
            return
        self._seen.add(digest)
        self._batches.append(batch)
        self._tokens.append(tokens)
        self._num_left_out += samples.num_rows - len(samples.kept)

    def finish(self) -> Trace | None:
        """Write what was recorded since the last call; None if that is nothing."""
        if not any(batch.num_samples for batch in self._batches):
            return None
        numbers = [
            int(p.name.removeprefix(_PREFIX)) for p in self._directory.glob(_PREFIX + "*[0-9]")
        ]
        path = self._directory / f"{_PREFIX}{max(numbers, default=-1) + 1:06d}"
        batch = _concatenate(self._batches)
        notes = ["one trajectory per sample: veRL's workers do not know the sessions"]
        if self._num_left_out:
            notes.append(f"{self._num_left_out} samples without a trained token left out")

        def write_tokens(directory: Path) -> None:
            pq.write_table(self._token_table(batch), directory / TOKENS_FILE, compression="zstd")

        trace = write_trace(
            path,
            [batch],
            source="veRL training batch",
            licence="private",
            sampling_mode="recorded",
            notes="; ".join(notes),
            write_more=write_tokens,
        )
        self.__init__(self._directory)  # type: ignore[misc]
        return trace

    def _token_table(self, batch: SampleBatch) -> pa.Table:
        count = np.diff(batch.loss_spans, axis=1)[:, 0]
        span_sample = np.repeat(np.arange(batch.num_samples), np.diff(batch.loss_span_offsets))
        before = np.cumsum(count) - count
        start = np.repeat(batch.loss_spans[:, 0] - before, count)
        columns: dict[str, Any] = {
            "sample": np.repeat(span_sample, count),
            "token": np.arange(int(count.sum())) + start,
        }
        for column in _TOKEN_FIELDS:
            if any(column in tokens for tokens in self._tokens):
                columns[column] = np.concatenate([tokens[column] for tokens in self._tokens])
        return pa.table(columns)


def _recorded(
    samples: WholeSamples, data: Mapping[str, Any], advantage: FloatArray | None, mini_batch: int
) -> SampleBatch:
    batch, owner = samples.batch, samples.loss_tokens.sample
    changed: dict[str, Any] = {"mini_batch": np.full(batch.num_samples, mini_batch)}
    if advantage is not None:
        changed["advantage"] = _sums(owner, advantage, batch.num_samples) / _sums(
            owner, np.ones(len(owner)), batch.num_samples
        )
    rewards = [name for name in _REWARD_FIELDS if name in data]
    if rewards:
        values = response_values(data, rewards[0]).double().cpu().numpy()
        row = np.repeat(np.arange(samples.num_rows), np.diff(samples.response_offsets))
        changed["reward"] = _sums(row, values, samples.num_rows)[samples.kept]
    return replace(batch, **changed)


def _sums(owner: IntArray, values: FloatArray, count: int) -> FloatArray:
    return np.bincount(owner, weights=values, minlength=count).astype(np.float64)


def _concatenate(batches: list[SampleBatch]) -> SampleBatch:
    columns: dict[str, Any] = {}
    for f in fields(SampleBatch):
        parts = [getattr(batch, f.name) for batch in batches]
        if f.name.endswith("_offsets"):
            lengths = np.concatenate([np.diff(part) for part in parts])
            columns[f.name] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        elif f.name != "symbol_num_tokens":
            columns[f.name] = np.concatenate(parts)
    count = len(columns["symbol_offsets"]) - 1
    names = [f"{g}/{i}" for i, g in enumerate(columns["group_id"].tolist())]
    columns["trajectory_id"] = np.array(names, np.str_).reshape(count)
    return SampleBatch(symbol_num_tokens=None, **columns)

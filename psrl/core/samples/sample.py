"""Training samples of one RL iteration, as flat arrays of symbols.

A symbol is `(id, num_tokens)`: one token in a token-level trace, one block of tokens in a
block-hash trace. Two equal ids are equal tokens; positions are token depths in the sample.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from psrl.core.errors import TraceError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
StrArray = npt.NDArray[np.str_]


@dataclass(frozen=True)
class SampleBatch:
    """All samples of one RL iteration (S samples, N symbol occurrences, L loss spans).

    Attributes:
        symbols: [N] symbol ids of all samples, one sample after the other.
        symbol_offsets: [S + 1] sample s owns `symbols[offsets[s]:offsets[s + 1]]`.
        symbol_num_tokens: [number of distinct ids] tokens of each block id; None when every
            symbol is one token.
        loss_spans: [L, 2] token ranges `[start, end)` that are trained, ascending per sample.
            Token t is predicted from the hidden state at t - 1, so start >= 1.
        loss_span_offsets: [S + 1] rows of `loss_spans` per sample.
        group_id: [S] semantic group (all samples of one task).
        trajectory_id: [S] episode of the sample.
        agent_step: [S] agent turn of the sample inside its trajectory.
        mini_batch: [S] optimizer step that trains the sample.
        advantage: [S] scalar advantage of every trained token of the sample.
        reward: [S] reward of the trajectory; NaN when unknown.
        arrival_s, generate_s, environment_s: [S] rollout timing; NaN when unknown.
    """

    symbols: IntArray
    symbol_offsets: IntArray
    symbol_num_tokens: IntArray | None
    loss_spans: IntArray
    loss_span_offsets: IntArray
    group_id: StrArray
    trajectory_id: StrArray
    agent_step: IntArray
    mini_batch: IntArray
    advantage: FloatArray
    reward: FloatArray
    arrival_s: FloatArray
    generate_s: FloatArray
    environment_s: FloatArray

    @property
    def num_samples(self) -> int:
        return len(self.symbol_offsets) - 1

    @cached_property
    def occurrence_tokens(self) -> IntArray:
        """[N] tokens of each symbol occurrence."""
        if self.symbol_num_tokens is None:
            return np.ones(len(self.symbols), np.int64)
        return self.symbol_num_tokens[self.symbols]

    @cached_property
    def token_offsets(self) -> IntArray:
        """[S + 1] tokens before each sample, in the concatenation of all samples."""
        if self.symbol_num_tokens is None:
            return self.symbol_offsets
        ends = np.concatenate([[0], np.cumsum(self.occurrence_tokens)])
        return ends[self.symbol_offsets]

    @cached_property
    def num_tokens(self) -> IntArray:
        """[S] tokens of each sample."""
        return np.diff(self.token_offsets)

    @property
    def logical_tokens(self) -> int:
        """Tokens of all samples, shared ones counted once per sample."""
        return int(self.token_offsets[-1])

    @property
    def loss_tokens(self) -> int:
        """Trained tokens of all samples: the denominator of a token-mean loss."""
        return int((self.loss_spans[:, 1] - self.loss_spans[:, 0]).sum())

    def sample_symbols(self, sample: int) -> IntArray:
        """Symbol ids of one sample."""
        return self.symbols[self.symbol_offsets[sample] : self.symbol_offsets[sample + 1]]

    def sample_loss_spans(self, sample: int) -> IntArray:
        """[k, 2] trained token ranges of one sample."""
        return self.loss_spans[self.loss_span_offsets[sample] : self.loss_span_offsets[sample + 1]]

    def select(self, samples: npt.ArrayLike) -> "SampleBatch":
        """The batch made of the given sample indices, in that order; symbol ids are kept."""
        index = np.asarray(samples, np.int64)
        columns = {
            f.name: getattr(self, f.name)[index]
            for f in fields(self)
            if f.name not in _RAGGED_FIELDS
        }
        symbol_rows, symbol_offsets = ragged_take(self.symbol_offsets, index)
        span_rows, span_offsets = ragged_take(self.loss_span_offsets, index)
        return replace(
            self,
            symbols=self.symbols[symbol_rows],
            symbol_offsets=symbol_offsets,
            loss_spans=self.loss_spans[span_rows],
            loss_span_offsets=span_offsets,
            **columns,
        )

    def validate(self, where: str = "batch") -> None:
        """Check every array against the others.

        Raises:
            TraceError: naming the sample and the numbers of the first violation.
        """
        count = self.num_samples
        for name in ("symbol_offsets", "loss_span_offsets"):
            offsets, total = (
                getattr(self, name),
                len(self.symbols if name == "symbol_offsets" else self.loss_spans),
            )
            if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != total:
                raise TraceError(f"{where}: {name} does not cover its {total} entries")
            if (np.diff(offsets) < 0).any():
                raise TraceError(f"{where}: {name} decreases")
        for f in fields(self):
            if f.name in _RAGGED_FIELDS:
                continue
            length = len(getattr(self, f.name))
            if length != count:
                raise TraceError(f"{where}: {f.name} has {length} rows for {count} samples")
        if len(self.symbols) and int(self.symbols.min()) < 0:
            raise TraceError(f"{where}: symbol id {int(self.symbols.min())} is negative")
        if self.symbol_num_tokens is not None:
            known = len(self.symbol_num_tokens)
            if len(self.symbols) and int(self.symbols.max()) >= known:
                raise TraceError(
                    f"{where}: symbol id {int(self.symbols.max())} but only {known} block lengths"
                )
            if (self.symbol_num_tokens < 1).any():
                raise TraceError(f"{where}: a block has fewer than one token")
        if not np.isfinite(self.advantage).all():
            bad = int(np.flatnonzero(~np.isfinite(self.advantage))[0])
            raise TraceError(f"{where}: sample {bad} has advantage {self.advantage[bad]}")
        self._validate_loss_spans(where)

    def _validate_loss_spans(self, where: str) -> None:
        owner = np.repeat(np.arange(self.num_samples), np.diff(self.loss_span_offsets))
        start, end = self.loss_spans[:, 0], self.loss_spans[:, 1]
        follows = np.flatnonzero(owner[1:] == owner[:-1])
        bad = np.flatnonzero((start < 1) | (end <= start) | (end > self.num_tokens[owner]))
        overlap = follows[start[1:][follows] < end[:-1][follows]]
        if len(bad):
            row, sample = int(bad[0]), int(owner[bad[0]])
            raise TraceError(
                f"{where}: sample {sample} has loss span [{start[row]}, {end[row]}) "
                f"but {self.num_tokens[sample]} tokens",
                "a span lies inside [1, num_tokens]: the first token has no predecessor",
            )
        if len(overlap):
            row = int(overlap[0])
            raise TraceError(f"{where}: sample {int(owner[row])} has overlapping loss spans")


_RAGGED_FIELDS = frozenset(
    {"symbols", "symbol_offsets", "symbol_num_tokens", "loss_spans", "loss_span_offsets"}
)


def ragged_take(offsets: IntArray, index: IntArray) -> tuple[IntArray, IntArray]:
    """Rows and new offsets of the chosen entries of a ragged array.

    Example: offsets [0, 2, 5], index [1] gives rows [2, 3, 4] and offsets [0, 3].
    """
    lengths = offsets[index + 1] - offsets[index]
    new_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = np.arange(new_offsets[-1]) + np.repeat(offsets[index] - new_offsets[:-1], lengths)
    return rows, new_offsets


def make_batch(
    symbols: list[npt.ArrayLike],
    loss_spans: list[list[tuple[int, int]]],
    *,
    symbol_num_tokens: IntArray | None = None,
    group_id: list[str] | None = None,
    trajectory_id: list[str] | None = None,
    agent_step: npt.ArrayLike | None = None,
    mini_batch: npt.ArrayLike | None = None,
    advantage: npt.ArrayLike | None = None,
    reward: npt.ArrayLike | None = None,
    arrival_s: npt.ArrayLike | None = None,
    generate_s: npt.ArrayLike | None = None,
    environment_s: npt.ArrayLike | None = None,
) -> SampleBatch:
    """Build a validated batch from one symbol array and one span list per sample.

    Missing columns get neutral values: own group and trajectory per sample, step and mini-batch
    0, advantage 1, NaN for what is unknown.
    """
    count = len(symbols)
    arrays = [np.asarray(s, np.int64) for s in symbols]
    own = np.array([str(i) for i in range(count)], np.str_)

    def ints(value: npt.ArrayLike | None) -> IntArray:
        return np.zeros(count, np.int64) if value is None else np.asarray(value, np.int64)

    def floats(value: npt.ArrayLike | None, default: float) -> FloatArray:
        return np.full(count, default) if value is None else np.asarray(value, np.float64)

    batch = SampleBatch(
        symbols=np.concatenate([*arrays, np.empty(0, np.int64)]),
        symbol_offsets=np.cumsum([0, *(len(a) for a in arrays)]).astype(np.int64),
        symbol_num_tokens=symbol_num_tokens,
        loss_spans=np.array([s for spans in loss_spans for s in spans], np.int64).reshape(-1, 2),
        loss_span_offsets=np.cumsum([0, *(len(s) for s in loss_spans)]).astype(np.int64),
        group_id=own if group_id is None else np.array(group_id, np.str_).reshape(count),
        trajectory_id=own if trajectory_id is None else np.array(trajectory_id, np.str_),
        agent_step=ints(agent_step),
        mini_batch=ints(mini_batch),
        advantage=floats(advantage, 1.0),
        reward=floats(reward, np.nan),
        arrival_s=floats(arrival_s, np.nan),
        generate_s=floats(generate_s, np.nan),
        environment_s=floats(environment_s, np.nan),
    )
    batch.validate()
    return batch

"""Training batches as traces; needs no veRL."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from psrl.backend.train.inputs import LossTokens
from psrl.backend.train.token_advantages import read_token_advantages
from psrl.core.samples.trace import open_trace
from psrl.integrations.verl.batch.samples import whole_samples
from psrl.integrations.verl.batch.trace_export import TraceExport
from tests.integrations.verl.batches import fields, ragged

PROMPT = np.array([3, 4, 5])


def mini_batch(first: int) -> dict[str, Any]:
    """Two samples of a group, one of them trained in part, and a padding sample."""
    responses = [np.array([first, 7, 8]), np.array([first, 9]), np.array([1, 1])]
    masks = [np.array([1, 0, 1]), np.array([1, 1]), np.array([0, 0])]
    data = fields([PROMPT] * 3, responses, masks)
    data["advantages"] = ragged([[2.0, 0.0, 4.0], [-1.0, -1.0], [0.0, 0.0]], torch.float32)
    data["old_log_probs"] = ragged([[-1.0, 0.0, -2.0], [-3.0, -4.0], [0.0, 0.0]], torch.float32)
    data["rm_scores"] = ragged([[0.0, 0.0, 1.0], [0.0, 0.5], [9.0, 0.0]], torch.float32)
    return data


def add(export: TraceExport, first: int) -> None:
    data = mini_batch(first)
    export.add(whole_samples(data, ["task"] * 3), data)


def test_iteration_holds_what_was_trained(tmp_path: Path) -> None:
    export = TraceExport(tmp_path / "traces")
    for first in (10, 20, 10, 20):  # two mini-batches, two epochs
        add(export, first)
    assert export.finish() is not None
    trace = open_trace(tmp_path / "traces" / "iteration_000000")
    batch = trace.iteration(0)
    assert batch.mini_batch.tolist() == [0, 0, 1, 1]
    assert batch.sample_symbols(2).tolist() == [3, 4, 5, 20, 7, 8]
    assert batch.sample_loss_spans(2).tolist() == [[3, 4], [5, 6]]
    assert batch.advantage.tolist() == [3.0, -1.0, 3.0, -1.0]
    assert batch.reward.tolist() == [1.0, 0.5, 1.0, 0.5]
    assert set(batch.group_id.tolist()) == {"task"}
    assert len(set(batch.trajectory_id.tolist())) == 4
    assert "2 samples without a trained token left out" in trace.header.notes
    table = pq.read_table(trace.path / "tokens.parquet")
    assert table["old_logprob"].to_pylist()[:4] == [-1.0, -2.0, -3.0, -4.0]
    advantages = read_token_advantages(trace.path / "tokens.parquet", LossTokens(batch))
    assert advantages.tolist() == [2.0, 4.0, -1.0, -1.0] * 2


def test_iterations_are_numbered_on(tmp_path: Path) -> None:
    for _ in range(2):
        export = TraceExport(tmp_path)
        add(export, 1)
        export.finish()
        assert export.finish() is None, "nothing new was trained"
        add(export, 2)
        export.finish()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [f"iteration_{i:06d}" for i in range(4)]


def test_nothing_stays_behind_when_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = TraceExport(tmp_path)
    add(export, 1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="disk full"):
        export.finish()
    assert not list(tmp_path.glob("iteration_??????"))

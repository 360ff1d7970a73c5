"""Tensors of a rank's program: token ids, positions, and the loss edges of each micro-batch."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from psrl.backend.model.moe import rows_to_exchange, token_multiplicity
from psrl.core.plan.bytes_over_ops import HEAD_CHUNK_TOKENS
from psrl.core.plan.packing import LossEdges, PackedMicroBatch, loss_edges, pack_rank
from psrl.core.plan.plan import Program
from psrl.core.plan.schedule import Op, stage_ops
from psrl.core.samples.sample import FloatArray, IntArray, SampleBatch

from .kv_store import buffer_rows
from .tokens import TokenIds, packed_token_ids


class LossTokens:
    """All trained tokens of a batch, numbered sample by sample: the index of logprob arrays.

    Attributes:
        sample, token: [number of loss tokens] what each number stands for.
        advantage: [number of loss tokens] of each; that of its sample, unless it is replaced.
    """

    def __init__(self, batch: SampleBatch) -> None:
        count = np.diff(batch.loss_spans, axis=1)[:, 0]
        before = np.cumsum(count) - count
        span_sample = np.repeat(np.arange(batch.num_samples), np.diff(batch.loss_span_offsets))
        self.sample: IntArray = np.repeat(span_sample, count)
        self.token: IntArray = np.arange(int(count.sum())) + np.repeat(
            batch.loss_spans[:, 0] - before, count
        )
        self.advantage: FloatArray = batch.advantage[self.sample]
        self._token_offsets = batch.token_offsets
        self._span_start = self._token_offsets[span_sample] + batch.loss_spans[:, 0]
        self._before = before

    def __len__(self) -> int:
        return len(self.sample)

    def number(self, sample: IntArray, token: IntArray) -> IntArray:
        """Numbers of trained (sample, token) pairs."""
        position = self._token_offsets[sample] + token
        span = np.searchsorted(self._span_start, position, side="right") - 1
        return self._before[span] + position - self._span_start[span]


@dataclass(frozen=True)
class HeadChunk:
    """Edges `[edge_start, edge_end)`, whose hidden states are the distinct rows of one chunk."""

    num_rows: int
    edge_start: int
    edge_end: int


@dataclass(frozen=True)
class EdgeInputs:
    """E loss edges of a micro-batch over R distinct hidden states, sorted by hidden state.

    Several edges may leave one row: branches of the tree, or samples that share a trained token.

    Attributes:
        rows: [R] distinct rows of the micro-batch, ascending.
        chunk_row: [E] row of each edge inside its chunk.
        target: [E] predicted token id.
        advantage: [E] advantage of the edge's sample at this token.
        number: [E] index in `LossTokens`.
        chunks: cut the rows into runs of at most `HEAD_CHUNK_TOKENS`.
    """

    rows: Tensor
    chunk_row: Tensor
    target: Tensor
    advantage: Tensor
    number: IntArray
    chunks: tuple[HeadChunk, ...]


@dataclass(frozen=True)
class MicroBatchInputs:
    """One packed micro-batch as tensors.

    Attributes:
        token_ids, position_ids: [T] in packed order.
        multiplicity: [T] samples of the rank through each token, in float64.
        num_rows: rows to fill up to, at least T and 1.
        edges: None if the micro-batch has no loss edge.
    """

    packed: PackedMicroBatch
    token_ids: Tensor
    position_ids: Tensor
    multiplicity: Tensor
    num_rows: int
    edges: EdgeInputs | None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, which exist as long as the program."""
        found = [self.token_ids, self.position_ids, self.multiplicity]
        e = self.edges
        return found if e is None else [*found, e.rows, e.chunk_row, e.target, e.advantage]


@dataclass(frozen=True)
class RankProgram:
    """What one stage of one rank needs to run a program.

    Attributes:
        index: number of the program in the plan.
        program: the rank's rows of it.
        ops: of the stage.
        micro_batches: by number; only the last stage has their loss edges.
        numbers, number_sample: loss-token numbers of all ranks together, and their samples; their
            counts normalise the loss.
        num_loss_tokens: of the whole batch.
        logical_tokens: tokens of all samples of all ranks.
        buffer_rows: rows of the key/value buffer.
    """

    index: int
    program: Program
    ops: tuple[Op, ...]
    micro_batches: dict[int, MicroBatchInputs]
    numbers: IntArray
    number_sample: IntArray
    num_loss_tokens: int
    logical_tokens: int
    buffer_rows: int


def prepare_rank_program(
    index: int,
    program: Program,
    rank: int,
    batch: SampleBatch,
    token_ids: TokenIds,
    loss_tokens: LossTokens,
    device: torch.device | str = "cpu",
    chunk_rows: int = HEAD_CHUNK_TOKENS,
    stage: int = 0,
    num_stages: int = 1,
    coupled_ranks: int = 1,
) -> RankProgram:
    """Pack one rank's micro-batches and move their inputs to the device.

    Args:
        rank: data-parallel rank.
        chunk_rows: hidden states whose logits exist at a time.
        coupled_ranks: see `psrl.backend.model.moe.rows_to_exchange`.
    """
    sample = program.assignments.sample
    tree = program.tree(batch)
    tree.validate()
    samples = batch.select(sample)
    mine = program.on_rank(rank)
    ops = stage_ops(mine.ops(), num_stages, stage)
    edges = loss_edges(program, rank, tree, samples) if stage == num_stages - 1 else None
    micro_batches = {}
    num_rows = rows_to_exchange(program, rank, coupled_ranks)
    for packed in pack_rank(mine, tree):
        ids = packed_token_ids(token_ids, packed, tree, sample)
        micro_batches[packed.index] = MicroBatchInputs(
            packed,
            torch.from_numpy(ids).to(device),
            torch.from_numpy(packed.position_ids).to(device),
            torch.from_numpy(token_multiplicity(program, rank, tree, packed)).double().to(device),
            num_rows[packed.index],
            None
            if edges is None
            else edge_inputs(
                edges.of(packed.index), sample, token_ids, loss_tokens, device, chunk_rows
            ),
        )
    numbers = np.flatnonzero(np.isin(loss_tokens.sample, sample)).astype(np.int64)
    return RankProgram(
        index=index,
        program=mine,
        ops=tuple(ops),
        micro_batches=micro_batches,
        numbers=numbers,
        number_sample=loss_tokens.sample[numbers],
        num_loss_tokens=len(loss_tokens),
        logical_tokens=samples.logical_tokens,
        buffer_rows=buffer_rows(mine, ops),
    )


def edge_inputs(
    edges: LossEdges,
    sample: IntArray,
    token_ids: TokenIds,
    loss_tokens: LossTokens,
    device: torch.device | str = "cpu",
    chunk_rows: int = HEAD_CHUNK_TOKENS,
) -> EdgeInputs | None:
    """Edges of one micro-batch, sorted and cut into chunks; None if there are none.

    Args:
        sample: index in the batch of each sample of the program.
    """
    if not len(edges.sample):
        return None
    order = np.argsort(edges.row, kind="stable")
    rows, edge_row = np.unique(edges.row[order], return_inverse=True)
    owner, token = sample[edges.sample[order]], edges.token[order]
    number = loss_tokens.number(owner, token)
    starts = np.arange(0, len(rows), chunk_rows)
    cuts = np.searchsorted(edge_row, np.append(starts, len(rows))).tolist()
    chunks = tuple(
        HeadChunk(min(chunk_rows, len(rows) - int(start)), a, z)
        for start, (a, z) in zip(starts, pairwise(cuts), strict=True)
    )
    return EdgeInputs(
        rows=torch.from_numpy(rows).to(device),
        chunk_row=torch.from_numpy(edge_row % chunk_rows).to(device),
        target=torch.from_numpy(token_ids.of_samples(owner, token)).to(device),
        advantage=torch.from_numpy(loss_tokens.advantage[number]).to(device),
        number=number,
        chunks=chunks,
    )

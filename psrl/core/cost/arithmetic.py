"""What a phase must compute, as counts, FLOPs and least time: the bounds of a speed-up."""

from dataclasses import dataclass

import numpy as np

from psrl.core.plan.packing import visible_pairs
from psrl.core.samples.sample import SampleBatch
from psrl.core.tree.loss_rows import loss_rows, union_of
from psrl.core.tree.prefix_tree import PrefixTree, build_prefix_tree

from .cluster import ModelSpec, ParallelConfig
from .cost_model import CostModel

# Amount at which a cost model's time grows by its slope alone.
_LARGE = 1e9
# FlashAttention's backward does five matrix products where its forward does two.
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Work:
    """Amounts that arithmetic is proportional to.

    Attributes:
        num_tokens: tokens that pass through the layers.
        pairs: visible (query, key) pairs, a token and itself included.
        head_tokens: hidden states whose logits are computed.
    """

    num_tokens: int
    pairs: int
    head_tokens: int


def dense_work(batch: SampleBatch) -> Work:
    """Every sample alone."""
    lengths = batch.num_tokens
    pairs = int(visible_pairs(np.zeros_like(lengths), lengths).sum())
    return Work(batch.logical_tokens, pairs, batch.loss_tokens)


def shared_work(tree: PrefixTree, batch: SampleBatch) -> Work:
    """Every token of a prefix tree of the batch once."""
    rows = loss_rows(tree, batch)
    union = union_of(rows.start, rows.end)
    return Work(
        tree.unique_tokens,
        int(visible_pairs(tree.start_depth, tree.num_tokens).sum()),
        int((union.end - union.start).sum()),
    )


def phase_work(batch: SampleBatch, phase: str, shares: bool) -> Work:
    """What one phase must compute.

    An update shares inside a mini-batch only: the weights change between two of them.
    """
    if not shares:
        return dense_work(batch)
    key = batch.mini_batch if phase == "update" else None
    return shared_work(build_prefix_tree(batch, key), batch)


def model_flops(model: ModelSpec, work: Work, phase: str) -> float:
    """FLOPs of a phase, whatever is computed again not counted.

    Forward: 2 per weight of the layers and token, 2 per weight of the head and predicted position,
    4 per pair, layer and attention channel. A backward has twice the products of the weights, and
    five for the two of attention.
    """
    update = phase == "update"
    weights = 2.0 * model.num_layers * model.active_layer_parameters * work.num_tokens
    weights += 2.0 * model.hidden_size * model.vocab_size * work.head_tokens
    attention = 4.0 * model.num_layers * model.attention_width * work.pairs
    return weights * (3.0 if update else 1.0) + attention * (
        1.0 + _ATTENTION_BACKWARD if update else 1.0
    )


def least_time_s(cost: CostModel, parallel: ParallelConfig, work: Work, phase: str) -> float:
    """Time of a phase if all devices did nothing but its arithmetic, evenly, without a pause.

    The cost model's slopes without its fixed parts: no plan of this work is faster.
    """
    amounts = (float(work.num_tokens), float(work.pairs), float(work.head_tokens))
    repeats = phase == "update" and parallel.recompute == "full"

    def op_s(stage: int, which: int, amount: float) -> float:
        """Forward, backward and recomputation of one large micro-batch of one amount."""
        columns = [amount if which == i else 0.0 for i in range(3)]
        time_s = float(cost.stage_forward_s(stage, *columns))
        if phase == "update":
            time_s += float(cost.stage_backward_s(stage, *columns))
        if repeats:
            time_s += float(cost.stage_forward_s(stage, columns[0], columns[1], 0.0))
        return time_s

    num_stages = parallel.pipeline_model_parallel_size
    device_s = sum(
        amount * (op_s(stage, which, 2 * _LARGE) - op_s(stage, which, _LARGE)) / _LARGE
        for stage in range(num_stages)
        for which, amount in enumerate(amounts)
    )
    return device_s / (num_stages * parallel.data_parallel_size)

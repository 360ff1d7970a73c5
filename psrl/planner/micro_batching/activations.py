"""What each micro-batch keeps for its backward: all activations, layer inputs, or nothing.

`keep` takes most memory. `recompute` (layer by layer, in the backward) and `drop` (the whole
forward again, just before the backward) cost one more forward of the layers; a dropped micro-batch
holds least while it waits, but all its activations when it runs again.

For a given order of ops the choice is a knapsack with one memory limit per op: solved as an
integer program, which also proves how little work any choice must repeat.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, eye_array, hstack, vstack

from psrl.core.cost.cost_model import CostModel
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.plan.bytes_over_ops import (
    MemoryState,
    block_table,
    fullest_stages,
    micro_batch_bytes,
    stage_bytes,
)
from psrl.core.plan.op_table import BACKWARD, FORWARD, op_table, stage_order
from psrl.core.plan.plan import Program
from psrl.core.samples.sample import FloatArray, IntArray, StrArray
from psrl.core.tree.prefix_tree import PrefixTree

# Branch-and-bound nodes: a limit of work, so that plans do not depend on the machine.
_MAX_NODES = 50
# Repeated work need not be proven closer than this.
_TOLERANCE = 1e-3
_NUM_BISECTIONS = 24
_ACTIVATIONS = MemoryState._fields.index("activation_bytes")


@dataclass(frozen=True, eq=False)
class ActivationBytes:
    """Bytes on the fullest stages during each op, by what each micro-batch keeps.

    Rows are the forwards and backwards of every rank in step, on the `fullest_stages`.

    Attributes:
        fixed: [T] weights, caches and logits.
        keep, recompute, drop: [T, M] what micro-batch m adds in that mode.
        backward_row: [G, M] rows of the micro-batch's own backwards.
    """

    fixed: FloatArray
    keep: FloatArray
    recompute: FloatArray
    drop: FloatArray
    backward_row: IntArray

    def usage(self, activation: StrArray) -> FloatArray:
        """[T] bytes with a choice for every micro-batch."""
        is_recompute, is_drop = activation == "recompute", activation == "drop"
        mode = np.where(is_drop, self.drop, np.where(is_recompute, self.recompute, self.keep))
        total: FloatArray = self.fixed + mode.sum(axis=1)
        return total

    @cached_property
    def lowest_conceivable_bytes(self) -> float:
        """No choice has a smaller peak: each op with the leanest choice for it alone."""
        return float((self.fixed + np.minimum(self.recompute, self.drop).sum(axis=1)).max())


@dataclass(frozen=True, eq=False)
class ActivationChoice:
    """A choice, and how good it is.

    Attributes:
        activation: [M] keep | recompute | drop.
        repeated_s: work of the forwards that run twice, on the slowest stage.
        bound_s: no choice that fits repeats less.
    """

    activation: StrArray
    repeated_s: float
    bound_s: float


def activation_bytes(
    programs: list[Program], tree: PrefixTree, memory: MemoryModel
) -> ActivationBytes:
    """The memory side of the choice for ranks that run in step.

    Args:
        programs: one per rank, with equal op lists; what they keep does not matter.
        tree: the tree of the program of all ranks.
    """
    num_stages = memory.parallel.pipeline_model_parallel_size
    parts = [
        _bytes_on_stage(program, tree, memory, stage)
        for program in programs
        for stage in fullest_stages(num_stages)
    ]
    shift = np.cumsum([0, *(len(p.fixed) for p in parts)])
    return ActivationBytes(
        fixed=np.concatenate([p.fixed for p in parts]),
        keep=np.concatenate([p.keep for p in parts]),
        recompute=np.concatenate([p.recompute for p in parts]),
        drop=np.concatenate([p.drop for p in parts]),
        backward_row=np.concatenate(
            [p.backward_row + at for p, at in zip(parts, shift, strict=False)]
        ),
    )


def _bytes_on_stage(
    program: Program, tree: PrefixTree, memory: MemoryModel, stage: int
) -> ActivationBytes:
    num_stages = memory.parallel.pipeline_model_parallel_size
    table = program.micro_batches
    kept = replace(
        program,
        micro_batches=replace(table, activation=np.full(len(table), "keep")),
        schedule=program.schedule.rows(program.schedule.op != "recompute"),
    )
    ops = op_table(kept)
    order = stage_order(ops, program.is_update, num_stages, stage)
    states = stage_bytes(kept, memory, ops, block_table(kept, ops, tree), order, stage)
    sizes = micro_batch_bytes(table, memory, stage)
    at = np.empty((2, len(table)), np.int64)
    at[ops.kind[order], ops.row[order]] = np.arange(len(order))
    when = np.arange(len(order))[:, None]
    runs_forward, runs_backward = when == at[FORWARD], when == at[BACKWARD]
    waits = (at[FORWARD] <= when) & (when <= at[BACKWARD])
    return ActivationBytes(
        fixed=(states.sum(axis=1) - states[:, _ACTIVATIONS]).astype(np.float64),
        keep=waits * sizes.keep,
        recompute=waits * sizes.recompute + (runs_forward | runs_backward) * sizes.layer,
        drop=np.where(runs_backward, sizes.keep, waits * sizes.drop + runs_forward * sizes.layer),
        backward_row=at[BACKWARD][None, :],
    )


def layer_forward_s(programs: list[Program], cost: CostModel, num_stages: int) -> FloatArray:
    """[M] what running the layers of each micro-batch again takes, on the slowest rank in step."""
    each = []
    for program in programs:
        table = program.micro_batches
        tokens, pairs = table.num_tokens.astype(np.float64), table.pairs.astype(np.float64)
        seconds = cost.stage_forward_s(num_stages - 1, tokens, pairs, np.zeros_like(tokens))
        each.append(np.broadcast_to(np.asarray(seconds, np.float64), tokens.shape))
    longest: FloatArray = np.max(each, axis=0)
    return longest


def least_repeated(
    sizes: ActivationBytes, again_s: FloatArray, limit_bytes: float
) -> ActivationChoice | None:
    """The choice that fits and repeats least work; None if none was found.

    Args:
        again_s: [M] cost of not keeping a micro-batch.
        limit_bytes: memory of a device.
    """
    count = len(again_s)
    mode_max = np.maximum(np.maximum(sizes.keep, sizes.recompute), sizes.drop)
    tight = sizes.fixed + mode_max.sum(axis=1) > limit_bytes
    if not tight.any():
        return ActivationChoice(np.full(count, "keep", "<U9"), 0.0, 0.0)
    unit = 2.0**20
    keep = sizes.keep[tight]
    saved = np.hstack([sizes.recompute[tight] - keep, sizes.drop[tight] - keep]) / unit
    room = (limit_bytes - sizes.fixed[tight] - keep.sum(axis=1)) / unit
    one_of = hstack([eye_array(count), eye_array(count)])
    scale = float(again_s.mean()) or 1.0
    found = milp(
        np.tile(again_s, 2) / scale,
        integrality=np.ones(2 * count),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(
            vstack([csr_array(saved), one_of]), -np.inf, np.concatenate([room, np.ones(count)])
        ),
        options={"node_limit": _MAX_NODES, "mip_rel_gap": _TOLERANCE},
    )
    if found.x is None:
        return None
    chosen = found.x.reshape(2, count) > 0.5
    activation = np.where(chosen[0], "recompute", np.where(chosen[1], "drop", "keep"))
    bound = max(0.0, float(found.mip_dual_bound))
    repeated_s = float(again_s[chosen.any(axis=0)].sum())
    return ActivationChoice(activation, repeated_s, min(bound * scale, repeated_s))


def lowest_peak(sizes: ActivationBytes) -> StrArray:
    """The choice of recompute or drop with the smallest peak, where either costs the same.

    Dropping a micro-batch adds bytes only at its own backward. So for a limit, start with all
    dropped and recompute those whose own backward exceeds it, until none does: what is recomputed
    then has to be. The smallest limit that works is found by bisection.
    """
    search = _LimitSearch(sizes)
    best = np.full(sizes.keep.shape[1], "drop", "<U9")
    low, high = sizes.lowest_conceivable_bytes, float(search.all_dropped.max())
    for _ in range(_NUM_BISECTIONS):
        if high <= low * (1.0 + _TOLERANCE / 10):
            break
        middle = (low + high) / 2
        found = search.below(middle)
        if found is None:
            low = middle
        else:
            best, high = found
    return best


class _LimitSearch:
    """As many dropped micro-batches as a limit allows.

    Attributes:
        all_dropped: [T] bytes if every micro-batch is dropped.
    """

    def __init__(self, sizes: ActivationBytes) -> None:
        self.all_dropped: FloatArray = sizes.fixed + sizes.drop.sum(axis=1)
        # [M, T]: only the micro-batches that change are added up.
        self._change = np.ascontiguousarray((sizes.recompute - sizes.drop).T)
        self._backward_row = sizes.backward_row

    def below(self, limit_bytes: float) -> tuple[StrArray, float] | None:
        """A choice within the limit and its peak, or None."""
        usage = self.all_dropped.copy()
        is_dropped = np.full(len(self._change), True)
        while (over := usage > limit_bytes).any():
            must_change = over[self._backward_row].any(axis=0) & is_dropped
            if not must_change.any():
                return None
            is_dropped &= ~must_change
            usage += self._change[must_change].sum(axis=0)
        return np.where(is_dropped, "drop", "recompute").astype("<U9"), float(usage.max())

"""Random batches, and complete programs that compute them: shared by the tests of many parts.

Everything follows from the generator's seed. The defaults make small, nasty cases: a vocabulary
of three tokens gives one-token nodes, duplicate samples and samples that end inside others, and
micro-batches are cut at any token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from psrl.core.cost.calibrated_cost_model import choose_cost_model
from psrl.core.plan.packing import LossEdges, loss_edges, rows_of_nodes, visible_pairs
from psrl.core.plan.plan import Plan, Program
from psrl.core.plan.schedule import Op, eager_backward_order, fill_counts, forward_needs, interleave
from psrl.core.plan.tables import Assignments, Blocks, MicroBatches, Schedule, Segments
from psrl.core.samples.sample import IntArray, SampleBatch, StrArray, make_batch
from psrl.core.tree.prefix_tree import PrefixTree


@dataclass(frozen=True)
class RandomProgram:
    """A valid program, with what it was made from.

    Attributes:
        batch: all samples.
        samples: the same in the order of `program.assignments`, which `tree` refers to.
        num_ranks: data-parallel ranks; one without tokens has no micro-batches.
    """

    batch: SampleBatch
    samples: SampleBatch
    tree: PrefixTree
    program: Program
    num_ranks: int

    def edges(self, rank: int) -> LossEdges:
        """Loss edges of one rank."""
        return loss_edges(self.program, rank, self.tree, self.samples)


def random_batch(
    rng: np.random.Generator,
    *,
    num_samples: int = 6,
    num_groups: int = 2,
    max_new_tokens: int = 8,
    vocab_size: int = 3,
    duplicates: float = 0.15,
    ending_inside: float = 0.15,
) -> SampleBatch:
    """Samples that grow from earlier ones of their group.

    Args:
        max_new_tokens: a sample adds 1 to this many tokens to a prefix of an earlier sample.
        duplicates: probability that a sample repeats an earlier one.
        ending_inside: probability that it is a prefix of an earlier one.
    """
    tokens: list[IntArray] = []
    groups: list[int] = []
    for _ in range(num_samples):
        group = int(rng.integers(num_groups))
        earlier = [t for t, g in zip(tokens, groups, strict=True) if g == group]
        new = rng.integers(vocab_size, size=rng.integers(1, max_new_tokens + 1))
        kind = rng.random()
        if not earlier:
            tokens.append(new)
        else:
            base = earlier[rng.integers(len(earlier))]
            if kind < duplicates:
                tokens.append(base)
            elif kind < duplicates + ending_inside:
                tokens.append(base[: rng.integers(1, len(base) + 1)])
            else:
                tokens.append(np.concatenate([base[: rng.integers(len(base) + 1)], new]))
        groups.append(group)
    return make_batch(
        list(tokens),
        [_random_spans(rng, len(t)) for t in tokens],
        group_id=[f"task{g}" for g in groups],
        advantage=rng.normal(size=num_samples),
        reward=rng.normal(size=num_samples),
    )


def _random_spans(rng: np.random.Generator, num_tokens: int) -> list[tuple[int, int]]:
    """Up to two trained ranges; none in a sample of one token."""
    if num_tokens < 2:
        return []
    bounds = np.unique(rng.integers(1, num_tokens + 1, size=4)).tolist()
    return list(zip(bounds[::2], bounds[1::2], strict=False))


def random_program(
    rng: np.random.Generator,
    batch: SampleBatch | None = None,
    *,
    num_ranks: int = 1,
    min_micro_batches: int = 1,
    max_micro_batches: int = 6,
    is_update: bool = True,
    random_order: bool = True,
    activations: Sequence[str] = ("keep",),
    max_block_tokens: int | None = None,
    num_share_keys: int = 1,
    granularity_tokens: int = 1,
) -> RandomProgram:
    """A program with random assignments, random cuts and a valid schedule.

    Args:
        batch: what to compute; None for a `random_batch`.
        min_micro_batches, max_micro_batches: each rank gets as many, cut at random tokens; if it
            has fewer tokens, one of each.
        is_update: with backward ops; otherwise forward only.
        random_order: a random valid order of backwards and number of forwards before each;
            otherwise eager backwards and as many forwards as the forced peak holds.
        activations: values that a micro-batch's `activation` is drawn from; without backwards
            keep stands for drop.
        max_block_tokens: cut cached runs into blocks of 1 to this many rows.
        num_share_keys: samples share inside a random one of this many sets.
        granularity_tokens: share prefixes in whole blocks of this many tokens.
    """
    batch = random_batch(rng) if batch is None else batch
    count = batch.num_samples
    assignments = Assignments(
        rank=rng.permutation(np.arange(count) % num_ranks),
        sample=rng.permutation(count),
        share_key=rng.integers(num_share_keys, size=count),
    )
    program = Program(
        phases=("update",) if is_update else ("log_old_prob", "reference"),
        is_update=is_update,
        mini_batch=0 if is_update else -1,
        granularity_tokens=granularity_tokens,
        assignments=assignments,
        segments=Segments.empty(),
        micro_batches=MicroBatches.empty(),
        schedule=Schedule.empty(),
        blocks=Blocks.empty(),
    )
    tree = program.tree(batch)
    samples = batch.select(assignments.sample)
    segments = [
        _random_segments(rng, rank, assignments, tree, (min_micro_batches, max_micro_batches))
        for rank in range(num_ranks)
    ]
    program = replace(program, segments=Segments.concatenate(segments))
    micro_batches, schedules, blocks = [], [], []
    for rank in range(num_ranks):
        table = _micro_batches(rng, program, rank, tree, samples, activations)
        last_reader, readers = _readers(program.on_rank(rank), tree, table)
        micro_batches.append(table)
        schedules.append(_schedule(rng, rank, table, readers, is_update, random_order))
        blocks.append(_blocks(rng, rank, last_reader, is_update, max_block_tokens))
    program = replace(
        program,
        micro_batches=MicroBatches.concatenate(micro_batches),
        schedule=Schedule.concatenate(schedules),
        blocks=Blocks.concatenate(blocks),
    )
    return RandomProgram(batch, samples, tree, program, num_ranks)


def _random_segments(
    rng: np.random.Generator,
    rank: int,
    assignments: Assignments,
    tree: PrefixTree,
    num_micro_batches: tuple[int, int],
) -> Segments:
    mine = np.flatnonzero(assignments.rank == rank)
    needed = sorted({v for s in mine for v in tree.path(int(tree.sample_node[s]))})
    nodes = np.array(needed, np.int64)
    bounds = np.concatenate([[0], np.cumsum(tree.num_tokens[nodes])])
    total = int(bounds[-1])
    fewest, most = (min(n, total) for n in num_micro_batches)
    num_cuts = int(rng.integers(fewest - 1, most)) if total else 0
    cuts = np.sort(rng.permutation(np.arange(1, total))[:num_cuts])
    edges = np.unique(np.concatenate([bounds, cuts]))
    start = edges[:-1]
    which = np.searchsorted(bounds, start, side="right") - 1
    return Segments(
        rank=np.full(len(start), rank),
        micro_batch=np.searchsorted(cuts, start, side="right"),
        node=nodes[which],
        start_depth=tree.start_depth[nodes[which]] + start - bounds[which],
        num_tokens=np.diff(edges),
    )


def _micro_batches(
    rng: np.random.Generator,
    program: Program,
    rank: int,
    tree: PrefixTree,
    samples: SampleBatch,
    activations: Sequence[str],
) -> MicroBatches:
    segments = program.on_rank(rank).segments
    count = int(segments.micro_batch.max()) + 1 if len(segments) else 0
    num_tokens, pairs, head_tokens = (np.zeros(count, np.int64) for _ in range(3))
    np.add.at(num_tokens, segments.micro_batch, segments.num_tokens)
    np.add.at(pairs, segments.micro_batch, visible_pairs(segments.start_depth, segments.num_tokens))
    edges = loss_edges(program, rank, tree, samples)
    hidden = np.unique(np.stack([edges.micro_batch, edges.row]), axis=1)
    np.add.at(head_tokens, hidden[0], 1)
    forward_s = 1e-6 * num_tokens + 1e-9 * pairs + 2e-7 * head_tokens
    return MicroBatches(
        rank=np.full(count, rank),
        micro_batch=np.arange(count),
        activation=_activations(rng, program.is_update, activations, count),
        num_tokens=num_tokens,
        pairs=pairs,
        head_tokens=head_tokens,
        forward_s=forward_s,
        backward_s=2.0 * forward_s,
    )


def _activations(
    rng: np.random.Generator, is_update: bool, activations: Sequence[str], count: int
) -> StrArray:
    """Nothing is dropped where nothing runs again."""
    drawn = rng.choice(np.array(activations, np.str_), count)
    return drawn if is_update else np.where(drawn == "drop", "keep", drawn)


def _readers(
    program: Program, tree: PrefixTree, micro_batches: MicroBatches
) -> tuple[list[IntArray], list[set[int]]]:
    """Per micro-batch: last reader of each row (-1 for none), and all readers."""
    last_reader = [np.full(n, -1) for n in micro_batches.num_tokens.tolist()]
    readers: list[set[int]] = [set() for _ in last_reader]
    node_rows = rows_of_nodes(program)
    segments = program.segments
    for reader, node, depth in zip(
        segments.micro_batch.tolist(),
        segments.node.tolist(),
        segments.start_depth.tolist(),
        strict=True,
    ):
        for rows in [p for v in tree.path(node) for p in node_rows[v]]:
            count = min(rows.end_depth, depth) - rows.start_depth
            if count > 0 and rows.micro_batch != reader:
                last_reader[rows.micro_batch][rows.row : rows.row + count] = reader
                readers[rows.micro_batch].add(reader)
    return last_reader, readers


def _schedule(
    rng: np.random.Generator,
    rank: int,
    micro_batches: MicroBatches,
    readers: list[set[int]],
    is_update: bool,
    random_order: bool,
) -> Schedule:
    forward_order = micro_batches.micro_batch.tolist()
    dropped = frozenset(np.flatnonzero(micro_batches.activation == "drop").tolist())
    if not is_update:
        ops = [Op("forward", m) for m in forward_order]
    elif random_order:
        backward_order = _random_backward_order(rng, readers)
        needs = forward_needs(forward_order, backward_order)
        counts = [int(rng.integers(need, len(forward_order) + 1)) for need in needs]
        counts = np.maximum.accumulate(counts).tolist() if counts else []
        ops = interleave(forward_order, backward_order, counts, dropped)
    else:
        backward_order = eager_backward_order(forward_order, readers)
        size = micro_batches.num_tokens.tolist()
        counts = fill_counts(forward_order, backward_order, size.__getitem__)
        ops = interleave(forward_order, backward_order, counts, dropped)
    return Schedule(
        rank=np.full(len(ops), rank),
        op=np.array([op.kind for op in ops], np.str_),
        micro_batch=np.array([op.micro_batch for op in ops], np.int64),
    )


def _random_backward_order(rng: np.random.Generator, readers: list[set[int]]) -> list[int]:
    order: list[int] = []
    waiting = list(range(len(readers)))
    while waiting:
        ready = [m for m in waiting if readers[m] <= set(order)]
        order.append(ready[rng.integers(len(ready))])
        waiting.remove(order[-1])
    return order


def _blocks(
    rng: np.random.Generator,
    rank: int,
    last_reader: list[IntArray],
    is_update: bool,
    max_block_tokens: int | None,
) -> Blocks:
    """One block per maximal run of rows that a later micro-batch reads, or several."""
    rows: list[tuple[int, int, int, int]] = []
    for owner, reader in enumerate(last_reader):
        is_read = np.concatenate([[False], reader >= 0, [False]])
        edges = np.flatnonzero(np.diff(is_read))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            while start < end:
                most = end - start
                if max_block_tokens is not None:
                    most = min(most, int(rng.integers(1, max_block_tokens + 1)))
                release = owner if is_update else int(reader[start : start + most].max())
                rows.append((owner, start, most, release))
                start += most
    table = np.array(rows, np.int64).reshape(-1, 4)
    return Blocks(
        rank=np.full(len(rows), rank),
        block=np.arange(len(rows)),
        micro_batch=table[:, 0],
        start_row=table[:, 1],
        num_tokens=table[:, 2],
        allocated_tokens=table[:, 2],
        release_op=np.full(len(rows), "backward" if is_update else "forward"),
        release_micro_batch=table[:, 3],
    )


def with_times(plan: Plan) -> Plan:
    """The plan with the times of its micro-batches that the cost model gives, one by one."""
    cost = choose_cost_model(plan.model, plan.cluster, plan.parallel, plan.calibration)
    programs = []
    for program in plan.programs:
        table, forward_s, backward_s = program.micro_batches, [], []
        for row in range(len(table)):
            size = [float(getattr(table, n)[row]) for n in ("num_tokens", "pairs", "head_tokens")]
            again = table.activation[row] == "recompute"
            forward_s.append(cost.forward_s(*size))
            layers_s = cost.forward_s(size[0], size[1], 0.0) if again else 0.0
            backward_s.append(cost.backward_s(*size) + layers_s)
        times = {"forward_s": np.array(forward_s), "backward_s": np.array(backward_s)}
        programs.append(replace(program, micro_batches=replace(table, **times)))
    return replace(plan, programs=tuple(programs))

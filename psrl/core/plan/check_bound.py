"""The check of `check_plan` on the lower bound that a plan states: by its certificate.

Plain loops over the prefix tree in which all samples share; docs/plan-format.md has the proofs.
A rank *holds* a node if one of its samples passes through it or ends at its end.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from psrl.core.cost.calibrated_cost_model import choose_cost_model
from psrl.core.cost.unit_costs import UnitCosts, unit_costs
from psrl.core.errors import PlanError
from psrl.core.samples.sample import FloatArray, SampleBatch
from psrl.core.tree.loss_rows import LossRows, loss_rows
from psrl.core.tree.prefix_tree import PrefixTree, build_prefix_tree

from .bound import Bound
from .packing import visible_pairs
from .plan import Plan, Program

# Sums of the same times in another order differ by less.
_ROUNDING = 1e-9
_MAX_PLACED_SAMPLES = 12
# Costs of leaf configurations count in cells of the limit, rounded down.
_NUM_CELLS = 2000


def check_bounds(plan: Plan, batch: SampleBatch, trees: Sequence[PrefixTree]) -> None:
    """Rule 14: the lower bound is what the programs' certificates prove, and no plan is below it.

    Args:
        trees: of each program, where all samples share.
    """
    stated = plan.predicted.get("lower_bound_s")
    cost = choose_cost_model(plan.model, plan.cluster, plan.parallel, plan.calibration)
    step_s = cost.gradient_reduction_s() + cost.optimizer_step_s()
    limit_s = work_s = all_steps_s = 0.0
    for index, (program, tree) in enumerate(zip(plan.programs, trees, strict=True)):
        if program.bound is None:
            if stated is None:
                continue
            raise PlanError(f"rule 14: program {index} has no bound behind predicted.lower_bound_s")
        unit = unit_costs(
            cost, len(program.phases), program.is_update, plan.parallel.recompute == "full"
        )
        rows = loss_rows(tree, batch.select(program.assignments.sample))
        if not is_proven(BoundClaim(program.bound, tree, rows, unit, plan.num_ranks)):
            raise PlanError(
                f"rule 14: program {index}: its certificate ({program.bound.kind}) does not prove "
                f"that some rank has {program.bound.limit_s!r} s of work"
            )
        limit_s += program.bound.limit_s
        work_s += _most_work_s(program, unit, plan.num_ranks)
        all_steps_s += step_s if program.is_update else 0.0
    if stated is None:
        return
    _compare("lower_bound_s", stated, limit_s + all_steps_s)
    gap = work_s / limit_s - 1.0 if limit_s else 0.0
    _compare("placement_gap", plan.predicted.get("placement_gap", math.nan), gap, 1.0)
    makespan_s = plan.predicted.get("makespan_s", math.nan)
    if not (gap >= -_ROUNDING and makespan_s >= (limit_s + all_steps_s) * (1.0 - _ROUNDING)):
        raise PlanError(
            f"rule 14: {makespan_s!r} s, with {work_s!r} s of work on the most loaded ranks, are "
            f"below the proven {limit_s + all_steps_s!r} s and {limit_s!r} s",
            "no plan can be: please report it with the trace and the cluster file",
        )


def _most_work_s(program: Program, unit: UnitCosts, num_ranks: int) -> float:
    """Work of the most loaded rank, as its micro-batches state it."""
    table = program.micro_batches
    seconds = unit.token_s * table.num_tokens + unit.pair_s * table.pairs
    seconds = seconds + unit.head_s * table.head_tokens
    return float(np.bincount(table.rank, seconds, num_ranks).max())


def _compare(name: str, stated: float, found: float, scale: float = 0.0) -> None:
    # Written so that NaN is wrong too.
    if not abs(stated - found) <= _ROUNDING * max(found, scale):
        raise PlanError(f"rule 14: predicted.{name} is {stated!r}, proven is {found!r}")


def tree_of_all(program: Program, samples: SampleBatch, tree: PrefixTree) -> PrefixTree:
    """The prefix tree in which all samples of a program share.

    Args:
        tree: the program's own.
    """
    key = program.assignments.share_key
    shares_all = program.granularity_tokens == 1 and not (key != key[:1]).any()
    return tree if shares_all else build_prefix_tree(samples)


class BoundClaim(NamedTuple):
    """A bound, and what it is about."""

    bound: Bound
    tree: PrefixTree
    rows: LossRows
    unit: UnitCosts
    num_ranks: int


def is_proven(claim: BoundClaim) -> bool:
    """Whether the certificate proves that some rank has at least `limit_s` of work."""
    bound, tree, rows, unit, num_ranks = claim
    if bound.limit_s == 0.0:
        return True
    if bound.kind == "average work":
        distinct = rows.of(np.full(len(tree.sample_node), True))
        total_s = float(_token_s(tree, unit).sum())
        total_s += unit.head_s * int((distinct.end - distinct.start).sum())
        return num_ranks * bound.limit_s <= total_s
    if bound.kind == "longest sample":
        tokens = tree.end_depth[tree.sample_node]
        num_rows = np.bincount(rows.sample, rows.end - rows.start, len(tokens))
        alone_s = unit.token_s * tokens + unit.pair_s * visible_pairs(0 * tokens, tokens)
        return bound.limit_s <= float((alone_s + unit.head_s * num_rows).max(initial=0.0))
    if bound.kind == "enumeration":
        return _all_placements_exceed(claim)
    nodes = _node_costs(tree, rows, unit)
    copies = _copies(tree, nodes, num_ranks, bound.limit_s)
    if copies is None or copies[0] > num_ranks:
        return True
    if bound.kind == "forced copies":
        paid_s = sum(k * must for k, must in zip(copies, nodes.must_s, strict=True))
        return paid_s + sum(nodes.once_s) > num_ranks * bound.limit_s
    if bound.kind == "group configurations":
        return _groups_exceed(claim, nodes, copies)
    return _leaves_exceed(claim, nodes, copies)


class _NodeCosts(NamedTuple):
    """[V] seconds that every rank holding the node pays; [V] seconds that some rank pays which
    holds the node's parent."""

    must_s: list[float]
    once_s: list[float]


def _node_costs(tree: PrefixTree, rows: LossRows, unit: UnitCosts) -> _NodeCosts:
    """Rows that all samples through a node predict are certain on every rank that holds it, rows
    of one sample wherever it is. What holds without some samples holds with them: of samples with
    the same end and rows one counts, of those without rows only those that end at a leaf."""
    end, subtree_end = tree.sample_node.tolist(), tree.subtree_end.tolist()
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    columns = (rows.sample.tolist(), rows.start.tolist(), rows.end.tolist())
    for sample, start, stop in zip(*columns, strict=True):
        spans[sample].append((start, stop))
    through, seen = [0] * tree.num_nodes, set()
    events: list[tuple[int, int]] = []
    for sample, node in enumerate(end):
        key = (node, tuple(sorted(spans[sample])))
        if key in seen or (not spans[sample] and subtree_end[node] > node + 1):
            continue
        seen.add(key)
        through[node] += 1
        for start, stop in spans[sample]:
            events += [(start, sample), (stop, sample)]
    parent = tree.parent.tolist()
    for node in range(tree.num_nodes - 1, 0, -1):
        through[parent[node]] += through[node]
    must_s, once_s = _token_s(tree, unit).tolist(), [0.0] * tree.num_nodes
    first_token, open_now, node, before = tree.token_start.tolist(), set[int](), 0, 0
    for at, sample in sorted(events):
        if open_now and at > before:
            while first_token[node + 1] <= before:
                node += 1
            seconds, last = unit.head_s * (at - before), node
            is_certain = len(open_now) == through[node]
            if not is_certain and len(open_now) == 1:
                last = end[next(iter(open_now))]
                is_certain = subtree_end[last] == last + 1 and through[last] == 1
            (must_s if is_certain else once_s)[last] += seconds
        open_now ^= {sample}
        before = at
    return _NodeCosts(must_s, once_s)


def _copies(
    tree: PrefixTree, nodes: _NodeCosts, num_ranks: int, limit_s: float
) -> list[float] | None:
    """[V] least number of ranks that hold each node within the limit; None if one is too many."""
    parent, path_s = tree.parent.tolist(), list(nodes.must_s)
    for node in range(1, tree.num_nodes):
        path_s[node] += path_s[parent[node]]
    if max(path_s) > limit_s:
        return None
    copies, below_s = [1.0] * tree.num_nodes, [0.0] * tree.num_nodes
    for node in range(tree.num_nodes - 1, -1, -1):
        if below_s[node] > 0.0:
            room_s = limit_s - path_s[node]
            most = num_ranks + 1
            needed = math.ceil(below_s[node] / room_s - _ROUNDING) if room_s > 0.0 else most
            copies[node] = max(copies[node], min(needed, most))
        if node:
            above = parent[node]
            copies[above] = max(copies[above], copies[node])
            below_s[above] += below_s[node] + copies[node] * nodes.must_s[node] + nodes.once_s[node]
    return copies


def _groups_exceed(claim: BoundClaim, nodes: _NodeCosts, copies: list[float]) -> bool:
    """Whether the groups are worth more, at the given prices, than what all ranks can hold."""
    bound, tree = claim.bound, claim.tree
    end, num_children = tree.subtree_end.tolist(), _num_children(tree)
    must_s, once_s = np.array(nodes.must_s), np.array(nodes.once_s)
    forced_s = np.array(copies) * must_s + once_s
    trunk = _chain_end(0, num_children)
    open_s, inner_s, needed, loose_s = [], [], [], 0.0
    root = trunk + 1
    while root < tree.num_nodes:
        chain, below = slice(root, _chain_end(root, num_children) + 1), end[root]
        inside = slice(chain.stop, below)
        open_s.append(float(must_s[chain].sum()))
        inner_s.append(float((must_s + once_s)[inside].sum()))
        needed.append(float(forced_s[inside].sum()))
        loose_s += float(once_s[chain].sum())
        root = below
    if len(bound.prices) == len(open_s) + 1:
        open_s, inner_s, needed = [*open_s, 0.0], [*inner_s, loose_s], [*needed, loose_s]
    if len(bound.prices) != len(open_s) or min(bound.prices, default=0.0) < 0.0:
        return False
    price, opens, inner = np.array(bound.prices), np.array(open_s), np.array(inner_s)
    # A group without work below its root counts as one thing, which some rank holds.
    is_one = inner <= _ROUNDING * bound.limit_s
    amount, inner = np.where(is_one, 1.0, inner), np.where(is_one, 0.0, inner)
    room_s = bound.limit_s - float(must_s[: trunk + 1].sum())
    all_worth = float(price @ np.where(is_one, 1.0, np.array(needed)))
    return not _some_set_is_worth(
        all_worth / claim.num_ranks, room_s, price * amount, price * ~is_one, opens, inner
    )


def _some_set_is_worth(
    most: float,
    room_s: float,
    worth: FloatArray,
    price: FloatArray,
    opens: FloatArray,
    inner: FloatArray,
) -> bool:
    """Whether a rank may hold more than `most`: any set of whole groups that fits, and a part of
    one more group. The best rank holds no two parts: the dearer one would take the other's room."""
    whole_s = opens + inner
    order = np.argsort(whole_s, kind="stable").tolist()
    pending: list[tuple[int, float, float, list[int]]] = [(0, room_s, 0.0, [])]
    while pending:
        place, left_s, held, chosen = pending.pop()
        part = price * np.clip(left_s - opens, 0.0, inner)
        part[chosen] = 0.0
        if held + float(part.max(initial=0.0)) >= most:
            return True
        for later in range(place, len(order)):
            group = order[later]
            if whole_s[group] > left_s * (1.0 + _ROUNDING):
                break
            rest = (later + 1, left_s - whole_s[group], held + worth[group], [*chosen, group])
            pending.append(rest)
    return False


def _leaves_exceed(claim: BoundClaim, nodes: _NodeCosts, copies: list[float]) -> bool:
    """Whether the nodes are worth more, at the given prices, than what all ranks can hold.

    A rank holds sets of nodes that are closed towards the root. In pre-order a node is held and
    the search goes on below it, or its whole subtree is skipped.
    """
    bound, tree = claim.bound, claim.tree
    if len(bound.nodes) != len(bound.prices) or not bound.prices or min(bound.prices) < 0.0:
        return False
    price = dict(zip(bound.nodes, bound.prices, strict=True))
    if len(price) < len(bound.nodes) or min(price) < 0 or max(price) >= tree.num_nodes:
        return False
    end, parent, num_children = tree.subtree_end.tolist(), tree.parent, _num_children(tree)
    own_s = list(nodes.must_s)
    for node in range(1, tree.num_nodes):
        above = int(parent[node])
        if num_children[above] == 1:
            # Nothing below can be held without the chain, so that its end may pay for all of it.
            own_s[node] += own_s[above]
            own_s[above] = 0.0
    per_s = _NUM_CELLS / bound.limit_s * (1.0 - _ROUNDING)
    worth = {0: np.zeros(_NUM_CELLS + 1)}
    for node in range(tree.num_nodes):
        here, used = worth.pop(node), int(own_s[node] * per_s)
        _keep_best(worth, end[node], here)
        if used <= _NUM_CELLS:
            held = np.full(_NUM_CELLS + 1, -np.inf)
            held[used:] = here[: _NUM_CELLS + 1 - used] + price.get(node, 0.0)
            _keep_best(worth, node + 1, held)
    dearest = float(worth[tree.num_nodes].max())
    return sum(p * copies[node] for node, p in price.items()) > claim.num_ranks * dearest


def _keep_best(worth: dict[int, FloatArray], node: int, row: FloatArray) -> None:
    worth[node] = np.maximum(worth[node], row) if node in worth else row


def _all_placements_exceed(claim: BoundClaim) -> bool:
    """Whether no ranks within the limit hold all of the named samples.

    Sets of samples within the limit are joined, one more for each rank, until all are held.
    """
    bound, tree, unit = claim.bound, claim.tree, claim.unit
    count = len(bound.samples)
    if len(set(bound.samples)) != count or not 0 < count <= _MAX_PLACED_SAMPLES:
        return False
    if min(bound.samples) < 0 or max(bound.samples) >= len(tree.sample_node):
        return False
    node_s = _token_s(tree, unit).tolist()
    holders: dict[int, int] = defaultdict(int)
    edges: dict[int, int] = defaultdict(int)
    for bit, sample in enumerate(bound.samples):
        for node in tree.path(int(tree.sample_node[sample])):
            holders[node] |= 1 << bit
        mine = claim.rows.sample == sample
        for start, stop in zip(claim.rows.start[mine], claim.rows.end[mine], strict=True):
            edges[int(start)] += 1 << bit
            edges[int(stop)] -= 1 << bit
    part_s: dict[int, float] = defaultdict(float)
    for node, who in holders.items():
        part_s[who] += node_s[node]
    who, before = 0, 0
    for at in sorted(edges):
        part_s[who] += unit.head_s * (at - before) if who else 0.0
        who, before = who + edges[at], at
    every = np.arange(1 << count)
    cost_s = np.zeros(len(every))
    for who, seconds in part_s.items():
        cost_s[(every & who) != 0] += seconds
    fits = cost_s < bound.limit_s
    grows = np.array([fits[every | 1 << bit] & (every >> bit & 1 == 0) for bit in range(count)])
    largest = every[fits & ~grows.any(axis=0)]
    held = np.zeros(1, np.int64)
    for _ in range(min(claim.num_ranks, count)):
        held = np.unique(held[:, None] | largest)
    return bool(not len(held) or held[-1] != every[-1])


def _token_s(tree: PrefixTree, unit: UnitCosts) -> FloatArray:
    pairs = visible_pairs(tree.start_depth, tree.num_tokens)
    seconds: FloatArray = unit.token_s * tree.num_tokens + unit.pair_s * pairs
    return seconds


def _num_children(tree: PrefixTree) -> list[int]:
    counts: list[int] = np.bincount(tree.parent[1:], minlength=tree.num_nodes).tolist()
    return counts


def _chain_end(node: int, num_children: list[int]) -> int:
    """The first node at or below this one that is no only child's parent."""
    while num_children[node] == 1:
        node += 1
    return node

"""Which ops decide a rank's time: the longest path through its graph of dependences.

Nodes are (stage, op). An op waits for the op before it on its stage, and for the message of its
micro-batch from the neighbouring stage.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import networkx as nx

from psrl.core.plan.schedule import Op


class StageOp(NamedTuple):
    """An op on a pipeline stage."""

    stage: int
    op: Op


class CriticalPath(NamedTuple):
    """The ops that decide the time, in order, and where the time goes."""

    steps: tuple[StageOp, ...]
    op_s: dict[str, float]
    message_s: float

    @property
    def time_s(self) -> float:
        return sum(self.op_s.values()) + self.message_s


def op_graph(
    ops_by_stage: Sequence[Sequence[Op]],
    duration_s: Callable[[int, Op], float],
    message_s: Callable[[int], float],
) -> "nx.DiGraph[StageOp]":
    """Dependences of ops; an edge carries `after_s`, from the start of one to that of the other."""
    graph: nx.DiGraph[StageOp] = nx.DiGraph()
    for stage, ops in enumerate(ops_by_stage):
        nodes = [StageOp(stage, op) for op in ops]
        graph.add_nodes_from(nodes)
        for node, after in pairwise(nodes):
            graph.add_edge(node, after, after_s=duration_s(stage, node.op), message_s=0.0)
    for node in list(graph):
        step = {"forward": 1, "backward": -1, "recompute": 0}[node.op.kind]
        receiver = StageOp(node.stage + step, node.op)
        if step and receiver in graph:
            message = message_s(node.op.micro_batch)
            after_s = duration_s(node.stage, node.op) + message
            graph.add_edge(node, receiver, after_s=after_s, message_s=message)
    return graph


def critical_path(
    ops_by_stage: Sequence[Sequence[Op]],
    duration_s: Callable[[int, Op], float],
    message_s: Callable[[int], float],
) -> CriticalPath:
    """The longest path, with unlimited sends in flight."""
    graph = op_graph(ops_by_stage, duration_s, message_s)
    if not graph:
        return CriticalPath((), {}, 0.0)
    sink = StageOp(-1, Op("forward", -1))
    last = [node for node in graph if not graph.out_degree(node)]
    for node in last:
        graph.add_edge(node, sink, after_s=duration_s(node.stage, node.op), message_s=0.0)
    path = nx.dag_longest_path(graph, weight="after_s")[:-1]
    op_s: dict[str, float] = {}
    for stage, op in path:
        op_s[op.kind] = op_s.get(op.kind, 0.0) + duration_s(stage, op)
    messages = sum(graph[a][b]["message_s"] for a, b in pairwise(path))
    return CriticalPath(tuple(path), op_s, messages)

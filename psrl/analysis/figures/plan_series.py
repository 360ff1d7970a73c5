"""Numbers behind the figures of a plan, as tables."""

from typing import Any

import numpy as np
import pandas as pd

from psrl.core.plan.plan import Plan
from psrl.core.samples.sample import SampleBatch
from psrl.core.tree.rank_nodes import nodes_of_ranks

# Columns of the picture of a tree: a larger one shows every n-th leaf.
MAX_LEAVES = 1200


def rank_table(explanation: list[dict[str, Any]]) -> pd.DataFrame:
    """One row per program and rank: time, tokens, and which of them other ranks compute too.

    Args:
        explanation: `ProgramReport.as_json()` of every program.
    """
    columns = ("rank", "time_s", "num_tokens", "duplicated_tokens", "num_micro_batches")
    rows = [
        {"program": program_name(report)} | {name: rank[name] for name in columns}
        for report in explanation
        for rank in report["ranks"]
    ]
    return pd.DataFrame(rows)


def program_name(report: dict[str, Any]) -> str:
    """Phases, and the optimizer step of an update."""
    phases = " + ".join(phase.replace("_", " ") for phase in report["phases"])
    step = report["mini_batch"]
    return phases if step < 0 else f"{phases}, mini-batch {step}"


def tree_table(plan: Plan, batch: SampleBatch, program: int) -> pd.DataFrame:
    """Nodes on the paths of the leaves, in depth-first order: one row per leaf and node.

    Of more than `MAX_LEAVES` leaves, evenly spread ones. `copies` is the number of ranks that
    compute the node, `rank` the rank of the leaf.
    """
    chosen = plan.programs[program]
    tree = chosen.tree(batch)
    ranks, nodes = nodes_of_ranks(tree, chosen.assignments.rank)
    copies = np.bincount(nodes, minlength=tree.num_nodes)
    # The last rank of a node; a leaf of several ranks (equal samples) has no better one.
    rank_of = np.zeros(tree.num_nodes, np.int64)
    rank_of[nodes] = ranks
    leaves = np.flatnonzero(tree.subtree_end == np.arange(tree.num_nodes) + 1)
    leaves = leaves[leaves > 0]
    number = np.arange(len(leaves))
    if len(leaves) > MAX_LEAVES:
        number = np.linspace(0, len(leaves) - 1, MAX_LEAVES).round().astype(np.int64)
    leaves = leaves[number]
    paths = [tree.path(leaf) for leaf in leaves.tolist()]
    node = np.array([v for path in paths for v in path], np.int64)
    length = [len(path) for path in paths]
    return pd.DataFrame(
        {
            "leaf": np.repeat(number, length),
            "rank": np.repeat(rank_of[leaves], length),
            "node": node,
            "start_depth": tree.start_depth[node],
            "num_tokens": tree.num_tokens[node],
            "copies": copies[node],
        }
    )


def layout_table(layouts: list[dict[str, Any]]) -> pd.DataFrame:
    """One row per set-up of a search that was planned.

    Args:
        layouts: what `psrl plan --search --json` prints under that name.
    """
    short = {
        "TP": "tensor_model_parallel_size",
        "PP": "pipeline_model_parallel_size",
        "DP": "data_parallel_size",
        "EP": "expert_model_parallel_size",
    }
    same = ("recompute", "max_tokens_per_micro_batch", "makespan_s", "peak_memory_bytes")
    rows = [
        {name: layout[key] for name, key in short.items()}
        | {name: layout[name] for name in (*same, "on_front")}
        for layout in layouts
        if not layout["reason"]
    ]
    return pd.DataFrame(rows)


def progress_table(
    progress: list[dict[str, Any]], explanation: list[dict[str, Any]]
) -> pd.DataFrame:
    """Gap after some search steps, one row per program and number of steps.

    Args:
        progress: program (an index), steps and gap.
        explanation: as for `rank_table`.
    """
    rows = [(program_name(explanation[p["program"]]), p["steps"], p["gap"]) for p in progress]
    return pd.DataFrame(rows, columns=["program", "steps", "gap"])

"""How much the samples of a batch share, in which shape, and what sharing can gain at most."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from psrl.core.cost.arithmetic import Work, dense_work, model_flops, shared_work
from psrl.core.cost.cluster import ModelSpec
from psrl.core.errors import TraceError
from psrl.core.samples.sample import FloatArray, IntArray, SampleBatch
from psrl.core.tree.prefix_tree import PrefixTree, build_prefix_tree

from .blocks import tree_blocks
from .grouping import codes_by_appearance, trajectory_codes
from .modes import MODES, derive

LEVELS = ("within_trajectory", "within_group", "within_mini_batch", "overall")


def sharing_stats(batch: SampleBatch, model: ModelSpec | None = None) -> dict[str, Any]:
    """Sizes, prefix match rates and tree shapes of a batch.

    Keys in `LEVELS` say who may share with whom; each holds `unique_tokens`,
    `prefix_match_rate`, the upper bounds of a speed-up by tokens, logical / unique =
    1 / (1 - rate), by visible (query, key) pairs and, with a model, by its FLOPs, and the shape
    of the tree (docs/trace-format.md). `unique_tokens` and `prefix_match_rate` at the top are those
    of `overall`.
    """
    lengths = batch.num_tokens
    tree = build_prefix_tree(batch)
    # Node for symbol, every share key sees the same tree, and the batch is much shorter.
    blocks = tree_blocks(batch, tree)
    trajectories = trajectory_codes(batch)
    keys: dict[str, npt.ArrayLike] = {
        "within_trajectory": trajectories,
        "within_group": codes_by_appearance(batch.group_id),
        "within_mini_batch": batch.mini_batch,
    }
    trees = {name: build_prefix_tree(blocks, share_key=key) for name, key in keys.items()}
    trees["overall"] = tree
    empty = not batch.num_samples
    return {
        "num_samples": batch.num_samples,
        "num_groups": len(np.unique(batch.group_id)),
        "num_trajectories": len(np.unique(trajectories)),
        "num_mini_batches": len(np.unique(batch.mini_batch)),
        "logical_tokens": batch.logical_tokens,
        "unique_tokens": tree.unique_tokens,
        "loss_tokens": batch.loss_tokens,
        "prefix_match_rate": tree.prefix_match_rate,
        "sample_tokens_min": 0 if empty else int(lengths.min()),
        "sample_tokens_median": 0.0 if empty else float(np.median(lengths)),
        "sample_tokens_p90": 0.0 if empty else float(np.quantile(lengths, 0.9)),
        "sample_tokens_max": 0 if empty else int(lengths.max()),
        **{name: _level(trees[name], blocks, model) for name in LEVELS},
    }


def mode_stats(
    batch: SampleBatch, recorded: str, model: ModelSpec | None = None
) -> dict[str, dict[str, Any]]:
    """`sharing_stats` of every sampling mode that the samples allow.

    Tree modes are left out where no two episodes have a model call in common: they are then the
    same as step and traj.

    Args:
        recorded: sampling mode of the batch.
    """
    stats = {recorded: sharing_stats(batch, model)}
    if recorded not in MODES:
        return stats
    # Some block-hash traces do not show which samples continue which: no other mode then.
    with suppress(TraceError):
        step = derive(batch, "step", recorded)
        if recorded in ("traj", "tree"):
            stats["step"] = sharing_stats(step, model)
        tree_step = derive(step, "tree_step")
        branching = recorded.startswith("tree") or tree_step.num_samples < step.num_samples
        others = {"traj": step, "tree": step} if branching else {"traj": step}
        for mode, calls in others.items():
            if mode not in stats:
                stats[mode] = sharing_stats(derive(calls, mode), model)
        if branching and "tree_step" not in stats:
            stats["tree_step"] = sharing_stats(tree_step, model)
    return stats


def total_stats(parts: Sequence[dict[str, Any]], model: ModelSpec | None = None) -> dict[str, Any]:
    """`sharing_stats` of several iterations together, which share nothing with each other.

    Groups, trajectories and mini-batches count once per iteration. Quantiles of sample lengths
    and mean depths cannot be added up and are left out, unless there is only one iteration.
    """
    if len(parts) == 1:
        return parts[0]
    levels = {name: _total_level([part[name] for part in parts], model) for name in LEVELS}
    return {
        **{name: sum(part[name] for part in parts) for name in _TOTALS},
        "prefix_match_rate": levels["overall"]["prefix_match_rate"],
        "sample_tokens_min": min(part["sample_tokens_min"] for part in parts),
        "sample_tokens_max": max(part["sample_tokens_max"] for part in parts),
        **levels,
    }


_TOTALS = (
    "num_samples",
    "num_groups",
    "num_trajectories",
    "num_mini_batches",
    "logical_tokens",
    "unique_tokens",
    "loss_tokens",
)
_AMOUNTS = ("tokens", "pairs", "head_tokens")
_COUNTS = (
    "logical_tokens",
    "unique_tokens",
    "logical_pairs",
    "unique_pairs",
    "logical_head_tokens",
    "unique_head_tokens",
    "num_nodes",
    "num_leaves",
    "num_forks",
)
_HISTOGRAMS = (
    "logical_tokens_by_depth",
    "unique_tokens_by_depth",
    "unique_tokens_by_readers",
    "forks_by_branches",
)


def _level(tree: PrefixTree, batch: SampleBatch, model: ModelSpec | None) -> dict[str, Any]:
    dense, shared = dense_work(batch), shared_work(tree, batch)
    counts = {
        "logical_tokens": dense.num_tokens,
        "unique_tokens": shared.num_tokens,
        "logical_pairs": dense.pairs,
        "unique_pairs": shared.pairs,
        "logical_head_tokens": dense.head_tokens,
        "unique_head_tokens": shared.head_tokens,
    }
    return {**counts, **_bounds(counts, model), **_shape(tree)}


def _total_level(parts: list[dict[str, Any]], model: ModelSpec | None) -> dict[str, Any]:
    counts = {name: sum(part[name] for part in parts) for name in _COUNTS}
    histograms = {
        name: [sum(bins) for bins in zip_longest(*(p[name] for p in parts), fillvalue=0)]
        for name in _HISTOGRAMS
    }
    return {
        **counts,
        **_bounds(counts, model),
        **histograms,
        "max_branches": max(part["max_branches"] for part in parts),
    }


def _bounds(counts: dict[str, int], model: ModelSpec | None) -> dict[str, float]:
    """Match rate and upper bounds of the speed-up of one level."""
    logical, unique = counts["logical_tokens"], counts["unique_tokens"]
    bounds = {
        "prefix_match_rate": 1.0 - unique / logical if logical else 0.0,
        "speedup_bound_tokens": _ratio(logical, unique),
        "speedup_bound_pairs": _ratio(counts["logical_pairs"], counts["unique_pairs"]),
    }
    if model is not None:
        flops = [
            model_flops(model, Work(*(counts[f"{kind}_{name}"] for name in _AMOUNTS)), "reference")
            for kind in ("logical", "unique")
        ]
        bounds["speedup_bound_flops"] = _ratio(*flops)
    return bounds


def _shape(tree: PrefixTree) -> dict[str, Any]:
    """Depths, readers and branches of a tree; histograms are lists over powers of two."""
    tokens, readers = tree.num_tokens[1:], tree.samples_through[1:]
    # Depth of a token counts from 0, so that the tokens of a node average to this.
    depth = tree.start_depth[1:] + (tokens - 1) / 2
    branches = np.bincount(tree.parent[1:], minlength=tree.num_nodes)
    inner = branches[1:][branches[1:] > 0]
    return {
        "mean_depth_unique": _mean(depth, tokens),
        "mean_depth_logical": _mean(depth, tokens * readers),
        "num_nodes": tree.num_nodes - 1,
        "num_leaves": int((branches[1:] == 0).sum()),
        "num_forks": int((inner > 1).sum()),
        "mean_branches_of_forks": _mean(inner, inner > 1),
        "max_branches": int(inner.max(initial=0)),
        "unique_tokens_by_depth": _by_depth(tree, np.ones_like(readers)),
        "logical_tokens_by_depth": _by_depth(tree, readers),
        "unique_tokens_by_readers": _by_power(readers, tokens),
        "forks_by_branches": _by_power(inner[inner > 1], np.ones_like(inner[inner > 1])),
    }


def _by_depth(tree: PrefixTree, weight: IntArray) -> list[int]:
    """Weighted tokens whose depth is 0, 1, 2..3, 4..7, ...; a node may cover several bins."""
    deepest = int(tree.end_depth.max(initial=0))
    edges = np.array([0, *(2**k for k in range(deepest.bit_length()) if 2**k < deepest), deepest])
    below = np.minimum(np.maximum(edges[:, None] - tree.start_depth[1:], 0), tree.num_tokens[1:])
    return [int(x) for x in np.diff(below @ weight)]


def _by_power(values: IntArray, weight: IntArray) -> list[int]:
    """Weight of the values 1, 2..3, 4..7, ..."""
    power = np.frexp(values.astype(np.float64))[1] - 1
    return np.bincount(power, weights=weight).astype(np.int64).tolist() if len(values) else []


def _mean(values: IntArray | FloatArray, weight: npt.NDArray[Any]) -> float:
    total = float(weight.sum())
    return float((values * weight).sum() / total) if total else 0.0


def _ratio(separate: float, shared: float) -> float:
    return separate / shared if shared else 1.0

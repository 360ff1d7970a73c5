"""How much the samples of a batch share, and what sharing can gain at most."""

from typing import Any

import numpy as np
import numpy.typing as npt

from psrl.core.prefix_tree import PrefixTree, build_prefix_tree
from psrl.core.sample import IntArray, SampleBatch

from .grouping import codes_by_appearance, trajectory_codes


def sharing_stats(batch: SampleBatch) -> dict[str, Any]:
    """Sizes and prefix match rates of a batch.

    Keys `within_trajectory`, `within_group`, `within_mini_batch` and `overall` say who may share
    with whom; each holds `unique_tokens`, `prefix_match_rate`, and the upper bounds of a speed-up
    by tokens, logical / unique = 1 / (1 - rate), and by visible (query, key) pairs.
    `unique_tokens` and `prefix_match_rate` at the top are those of `overall`.
    """
    lengths = batch.num_tokens
    pairs = sum_of_pairs(np.zeros(1, np.int64), lengths)
    levels: dict[str, npt.ArrayLike | None] = {
        "within_trajectory": trajectory_codes(batch),
        "within_group": codes_by_appearance(batch.group_id),
        "within_mini_batch": batch.mini_batch,
        "overall": None,
    }
    trees = {name: build_prefix_tree(batch, share_key=key) for name, key in levels.items()}
    empty = not batch.num_samples
    return {
        "num_samples": batch.num_samples,
        "num_groups": len(np.unique(batch.group_id)),
        "num_trajectories": len(np.unique(trajectory_codes(batch))),
        "num_mini_batches": len(np.unique(batch.mini_batch)),
        "logical_tokens": batch.logical_tokens,
        "unique_tokens": trees["overall"].unique_tokens,
        "loss_tokens": batch.loss_tokens,
        "prefix_match_rate": trees["overall"].prefix_match_rate,
        "sample_tokens_min": 0 if empty else int(lengths.min()),
        "sample_tokens_median": 0.0 if empty else float(np.median(lengths)),
        "sample_tokens_p90": 0.0 if empty else float(np.quantile(lengths, 0.9)),
        "sample_tokens_max": 0 if empty else int(lengths.max()),
        **{name: _level(tree, pairs) for name, tree in trees.items()},
    }


def sum_of_pairs(start_depth: IntArray, num_tokens: IntArray) -> int:
    """Visible (query, key) pairs of runs of tokens: each token sees its path and itself."""
    return int((num_tokens * start_depth + num_tokens * (num_tokens + 1) // 2).sum())


def _level(tree: PrefixTree, separate_pairs: int) -> dict[str, float]:
    tree_pairs = sum_of_pairs(tree.start_depth, tree.num_tokens)
    return {
        "unique_tokens": tree.unique_tokens,
        "prefix_match_rate": tree.prefix_match_rate,
        "speedup_bound_tokens": _ratio(tree.logical_tokens, tree.unique_tokens),
        "speedup_bound_pairs": _ratio(separate_pairs, tree_pairs),
    }


def _ratio(separate: int, shared: int) -> float:
    return separate / shared if shared else 1.0

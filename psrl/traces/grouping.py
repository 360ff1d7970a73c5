"""Codes and ranks of samples by group, trajectory and order of appearance."""

import numpy as np

from psrl.core.samples.sample import IntArray, SampleBatch, StrArray


def codes_by_appearance(labels: StrArray | IntArray) -> IntArray:
    """[S] dense code of each label; the label that appears first has code 0."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    code = np.empty(len(first), np.int64)
    code[np.argsort(first)] = np.arange(len(first))
    return code[inverse]


def rank_within(codes: IntArray) -> IntArray:
    """[S] how many earlier entries have the same code."""
    order = np.argsort(codes, kind="stable")
    in_order = codes[order]
    first = np.searchsorted(in_order, in_order, side="left")
    rank = np.empty(len(codes), np.int64)
    rank[order] = np.arange(len(codes)) - first
    return rank


def trajectory_codes(batch: SampleBatch) -> IntArray:
    """[S] dense code of (group, trajectory), by appearance: episodes never span two groups."""
    group = codes_by_appearance(batch.group_id)
    trajectory = codes_by_appearance(batch.trajectory_id)
    return codes_by_appearance(group * (int(trajectory.max(initial=0)) + 1) + trajectory)

"""Group-relative advantages of recorded rewards."""

import numpy as np

from psrl.core.samples.sample import FloatArray, StrArray

from .grouping import codes_by_appearance

EPSILON = 1e-6


def grpo_advantages(group_id: StrArray, reward: FloatArray) -> FloatArray:
    """GRPO advantage `(reward - mean) / (std + 1e-6)` of each trajectory within its group.

    The standard deviation divides by n - 1, as `torch.std` does in the common trainers. Groups
    whose rewards are all equal, and so groups of one, get 0. A group with an unknown reward has
    no mean: all its trajectories get 1.

    Args:
        group_id: [T] semantic group of each trajectory.
        reward: [T] reward of each trajectory; NaN when unknown.
    """
    codes = codes_by_appearance(group_id)
    advantage = np.zeros(len(reward))
    for code in range(int(codes.max(initial=-1)) + 1):
        members = np.flatnonzero(codes == code)
        rewards = reward[members]
        if np.isnan(rewards).any():
            advantage[members] = 1.0
        elif (rewards != rewards[0]).any():
            std = rewards.std(ddof=1)
            advantage[members] = (rewards - rewards.mean()) / (std + EPSILON)
    return advantage

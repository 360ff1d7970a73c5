"""Samples that continue each other, merged where nothing that is trained changes.

A merged sample has the symbols of the last of a chain of samples, each the beginning of the next,
and trains what all of them train: every token once, in the context and with the advantage that it
had before. That is what a trainer without prefix sharing does to step samples.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from psrl.core.samples.sample import FloatArray, IntArray, SampleBatch, ragged_take
from psrl.core.tree.prefix_tree import build_prefix_tree

from .grouping import codes_by_appearance, trajectory_codes

WHOLE_EPISODES = ("traj", "tree")
"""Sampling modes whose samples are merged already."""
REASONS = ("rewritten", "trained_again", "other_mini_batch", "branched")
"""Why a step is not appended to the one before it; see `MergedSteps`."""


@dataclass(frozen=True)
class MergedSteps:
    """Step samples merged exactly, and why the others were not.

    A step here is a sample with an earlier one in its trajectory. Each of `num_steps` is counted
    under one of the four reasons, or was appended to the sample that it continues.

    Attributes:
        batch: one sample per chain; `advantage` is that of its last member.
        span_advantage: [L] advantage of the tokens of each loss span of `batch`; says more than
            `batch.advantage` where the steps of a chain have different ones.
        rewritten: steps whose symbols do not begin with the step before.
        trained_again: steps that train a token which the step before trains too: the merged
            sample would train it once.
        other_mini_batch: steps that another optimizer step trains, with other weights.
        branched: steps that begin with the step before, as another one that was appended does.
    """

    batch: SampleBatch
    span_advantage: FloatArray
    num_steps: int
    rewritten: int
    trained_again: int
    other_mini_batch: int
    branched: int

    @property
    def merges(self) -> bool:
        """Whether any step was appended."""
        return self.appended > 0

    @property
    def appended(self) -> int:
        """Steps that became part of the sample that they continue."""
        apart = self.rewritten + self.trained_again + self.other_mini_batch + self.branched
        return self.num_steps - apart

    def counts(self) -> dict[str, int]:
        """Samples after merging, and the steps by what became of them."""
        names = ("num_steps", "appended", *REASONS)
        return {"num_merged_samples": self.batch.num_samples} | {n: getattr(self, n) for n in names}

    def token_advantages(self) -> tuple[IntArray, IntArray, FloatArray]:
        """(sample, token, advantage) of every trained token: the file that an execution reads."""
        spans = self.batch.loss_spans
        lengths = spans[:, 1] - spans[:, 0]
        sample = np.repeat(np.arange(self.batch.num_samples), np.diff(self.batch.loss_span_offsets))
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return (
            np.repeat(sample, lengths),
            np.repeat(spans[:, 0], lengths) + within,
            np.repeat(self.span_advantage, lengths),
        )


def merge_steps(batch: SampleBatch, sampling_mode: str) -> MergedSteps:
    """Merge the samples of each trajectory, or of each group of branching episodes.

    Args:
        sampling_mode: of the batch; samples of "tree_step" may continue one of another
            trajectory, for they hold a call that several share once.
    """
    branching = sampling_mode.startswith("tree")
    owner = codes_by_appearance(batch.group_id) if branching else trajectory_codes(batch)
    next_call = continuations(batch, owner)
    merged, members = join(batch, next_call)
    span_rows, _ = ragged_take(batch.loss_span_offsets, members)
    per_span = np.repeat(batch.advantage, np.diff(batch.loss_span_offsets))
    previous = _previous_step(batch)
    reasons = dict.fromkeys(REASONS, 0)
    appended = set(next_call.values())
    for step in set(previous) - appended:
        reasons[_reason(batch, previous[step], step)] += 1
    return MergedSteps(
        batch=merged,
        span_advantage=per_span[span_rows],
        # With shared calls left out, a trajectory's first sample may continue another's.
        num_steps=len(set(previous) | appended),
        **reasons,
    )


def continuations(
    batch: SampleBatch, owner: IntArray, equal_advantage: bool = False
) -> dict[int, int]:
    """A sample that may be appended to each sample; every sample is appended at most once.

    Where several qualify, one of the same trajectory comes first.

    Args:
        owner: [S] samples of different owners are never merged, nor those of different
            mini-batches.
        equal_advantage: also demand one advantage, as a sample of a trace has.
    """
    key = codes_by_appearance(owner * (int(batch.mini_batch.max(initial=0)) + 1) + batch.mini_batch)
    tree = build_prefix_tree(batch, key)
    ending: defaultdict[int, list[int]] = defaultdict(list)
    for sample, node in enumerate(tree.sample_node.tolist()):
        ending[node].append(sample)
    pairs = []
    for sample, node in enumerate(tree.parent[tree.sample_node].tolist()):
        while node > 0 and node not in ending:
            node = int(tree.parent[node])
        pairs += [(before, sample) for before in ending.get(node, ()) if node > 0]
    trajectory, node_of = trajectory_codes(batch).tolist(), tree.sample_node.tolist()
    # Nodes are in pre-order: what a sample was appended to is known before what it is appended by.
    pairs.sort(key=lambda pair: (node_of[pair[0]], trajectory[pair[0]] != trajectory[pair[1]]))
    until = [_trained_until(batch, sample) for sample in range(batch.num_samples)]
    next_call: dict[int, int] = {}
    taken: set[int] = set()
    for before, after in pairs:
        free = before not in next_call and after not in taken
        same = not equal_advantage or batch.advantage[before] == batch.advantage[after]
        if free and same and _trained_from(batch, after) >= until[before]:
            next_call[before] = after
            taken.add(after)
            until[after] = max(until[after], until[before])
    return next_call


def join(batch: SampleBatch, next_call: dict[int, int]) -> tuple[SampleBatch, IntArray]:
    """Append samples to those that they continue.

    A merged sample has the symbols of its last call, the agent step and arrival of its first,
    and the summed times of all.

    Returns:
        The merged samples by the position of their first call, and [S] the samples chain by chain.
    """
    chains = _chains(batch.num_samples, next_call)
    members = np.concatenate([*chains, np.empty(0, np.int64)]).astype(np.int64)
    first = np.array([c[0] for c in chains], np.int64)
    span_rows, _ = ragged_take(batch.loss_span_offsets, members)
    num_spans = [int(np.diff(batch.loss_span_offsets)[c].sum()) for c in chains]
    merged = replace(
        batch.select([c[-1] for c in chains]),
        loss_spans=batch.loss_spans[span_rows],
        loss_span_offsets=np.cumsum([0, *num_spans]).astype(np.int64),
        agent_step=batch.agent_step[first],
        arrival_s=batch.arrival_s[first],
        generate_s=np.array([batch.generate_s[c].sum() for c in chains], np.float64),
        environment_s=np.array([batch.environment_s[c].sum() for c in chains], np.float64),
    )
    return merged, members


def _chains(num_samples: int, next_call: dict[int, int]) -> list[list[int]]:
    """Samples that become one each, by the position of their first call in the batch."""
    continuing = set(next_call.values())
    chains = []
    for start in range(num_samples):
        if start not in continuing:
            chain = [start]
            while chain[-1] in next_call:
                chain.append(next_call[chain[-1]])
            chains.append(chain)
    return chains


def _previous_step(batch: SampleBatch) -> dict[int, int]:
    """The sample before each sample of a trajectory, by agent step."""
    codes = trajectory_codes(batch)
    order = np.lexsort((batch.agent_step, codes))
    same: npt.NDArray[np.bool_] = codes[order[1:]] == codes[order[:-1]]
    return dict(zip(order[1:][same].tolist(), order[:-1][same].tolist(), strict=True))


def _reason(batch: SampleBatch, before: int, after: int) -> str:
    """Why a step was not appended to the one before it."""
    history = batch.sample_symbols(before)
    if not np.array_equal(history, batch.sample_symbols(after)[: len(history)]):
        return "rewritten"
    if batch.mini_batch[before] != batch.mini_batch[after]:
        return "other_mini_batch"
    again = _trained_from(batch, after) < _trained_until(batch, before)
    return "trained_again" if again else "branched"


def _trained_from(batch: SampleBatch, sample: int) -> int:
    return int(batch.sample_loss_spans(sample)[:, 0].min(initial=np.iinfo(np.int64).max))


def _trained_until(batch: SampleBatch, sample: int) -> int:
    return int(batch.sample_loss_spans(sample)[:, 1].max(initial=0))

"""veRL's balancing: Karmarkar-Karp partitions by a workload that does not know about sharing.

Follows veRL 0.9's `seqlen_balancing`: ranks get equal numbers of samples; micro-batches are
partitions of a rank's samples into equally many sets on every rank, each within a token budget.
"""

import heapq

import numpy as np

from psrl.core.samples.sample import IntArray

_LINEAR_WORKLOAD = 24576


def workload(num_tokens: IntArray) -> IntArray:
    """Work of a sample of L tokens in veRL's units: 24576 L + L^2."""
    return _LINEAR_WORKLOAD * num_tokens + num_tokens**2


def karmarkar_karp(weights: IntArray, num_sets: int, equal_size: bool = False) -> IntArray:
    """Set of each item, by the largest differencing method.

    Partial partitions are merged two at a time, those with the largest spread first; the
    heaviest set of one joins the lightest of the other.

    Args:
        equal_size: set sizes differ by at most one.
    """
    count = len(weights)
    order = np.argsort(weights, kind="stable")
    if equal_size:
        # The lightest tuple may be short, so that all others are full.
        first = count % num_sets or num_sets
        starts = [order[:first], *order[first:].reshape(-1, num_sets)] if count else []
    else:
        starts = [order[i : i + 1] for i in range(count)]
    # A set is a number: below `count` an item, above it the union of two sets. A partial
    # partition holds its non-empty sets, heaviest first.
    joined: list[tuple[IntArray, IntArray, IntArray]] = []
    next_set = count
    heap: list[tuple[int, int, IntArray, IntArray]] = []
    for serial, items in enumerate(starts):
        sums = weights[items[::-1]]
        heap.append((-_spread(sums, num_sets), -serial, sums, items[::-1]))
    heapq.heapify(heap)
    serial = len(starts)
    while len(heap) > 1:
        _, _, sums, names = heapq.heappop(heap)
        _, _, other_sums, other_names = heapq.heappop(heap)
        size = min(num_sets, len(sums) + len(other_sums))
        total = np.zeros(size, np.int64)
        total[: len(sums)] = sums
        total[size - len(other_sums) :] += other_sums[::-1]
        both = len(sums) + len(other_sums) - size
        union = np.arange(next_set, next_set + both)
        next_set += both
        apart = len(sums) - both
        joined.append((union, names[apart:], other_names[::-1][:both]))
        names = np.concatenate([names[:apart], union, other_names[::-1][both:]])
        descending = np.argsort(-total, kind="stable")
        total, names = total[descending], names[descending]
        heapq.heappush(heap, (-_spread(total, num_sets), -serial, total, names))
        serial += 1
    set_of = np.full(next_set, -1)
    if heap:
        names = heap[0][3]
        set_of[names] = np.arange(len(names))
    for union, left, right in reversed(joined):
        set_of[left] = set_of[right] = set_of[union]
    return set_of[:count]


def _spread(descending: IntArray, num_sets: int) -> int:
    """Heaviest minus lightest set; sets that are not listed are empty."""
    lightest = int(descending[-1]) if len(descending) == num_sets else 0
    return int(descending[0]) - lightest


def verl_ranks(num_tokens: IntArray, num_ranks: int) -> IntArray:
    """[S] data-parallel rank of each sample."""
    return karmarkar_karp(workload(num_tokens), num_ranks, equal_size=True)


def verl_micro_batches(
    num_tokens: IntArray, rank: IntArray, num_ranks: int, max_tokens: int
) -> list[list[IntArray]]:
    """Sample sets of each rank's micro-batches, in order of execution.

    The number of sets is the same on every rank (fewer only where a rank lacks samples): the
    largest rank's tokens over the budget, raised until every set fits. A sample above the budget
    has a set of its own.
    """
    mine = [np.flatnonzero((rank == r) & (num_tokens <= max_tokens)) for r in range(num_ranks)]
    alone = [np.flatnonzero((rank == r) & (num_tokens > max_tokens)) for r in range(num_ranks)]
    tokens = max((int(num_tokens[samples].sum()) for samples in mine), default=0)
    num_sets = max(1, -(-tokens // max_tokens))
    parts = [_split(num_tokens, samples, num_sets) for samples in mine]
    while any(_is_over(num_tokens, sets, max_tokens) for sets in parts):
        num_sets += max(1, num_sets // 64)
        parts = [_split(num_tokens, samples, num_sets) for samples in mine]
    ordered = []
    for sets, long_samples in zip(parts, alone, strict=True):
        sets = sets + [long_samples[i : i + 1] for i in range(len(long_samples))]
        sets.sort(key=lambda samples: (-int(workload(num_tokens[samples]).sum()), int(samples[0])))
        # Small micro-batches at both ends shorten the fill and drain of the pipeline.
        ordered.append(sets[::2][::-1] + sets[1::2])
    return ordered


def _split(num_tokens: IntArray, samples: IntArray, num_sets: int) -> list[IntArray]:
    which = karmarkar_karp(workload(num_tokens[samples]), num_sets)
    sets = [samples[which == i] for i in range(num_sets)]
    return [s for s in sets if len(s)]


def _is_over(num_tokens: IntArray, sets: list[IntArray], max_tokens: int) -> bool:
    return any(int(num_tokens[s].sum()) > max_tokens for s in sets)

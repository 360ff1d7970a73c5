"""Replace symbols by anonymous blocks: the same sharing, without token ids or text."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from psrl.core.samples.sample import IntArray, SampleBatch
from psrl.core.tree.prefix_tree import PrefixTree, build_prefix_tree

from .grouping import codes_by_appearance


def to_blocks(batch: SampleBatch) -> SampleBatch:
    """The batch with one opaque symbol per prefix-tree node.

    Two samples have as many leading tokens in common as before, so every prefix tree of the
    result, whatever its share key, has the same shape. Symbols are numbered by first use in
    sample order. Loss spans are token offsets and stay.
    """
    return to_blocks_all([batch])[0]


def to_blocks_all(batches: Sequence[SampleBatch]) -> tuple[SampleBatch, ...]:
    """`to_blocks` of every iteration, with one symbol table for all.

    Iterations get separate symbols: weights change between them, so nothing is shared.
    """
    parts = [tree_blocks(batch, build_prefix_tree(batch)) for batch in batches]
    lengths = [part.symbol_num_tokens for part in parts]
    table = np.concatenate([*(x for x in lengths if x is not None), np.empty(0, np.int64)])
    starts = np.cumsum([0, *(0 if x is None else len(x) for x in lengths)])[:-1].tolist()
    return tuple(
        replace(part, symbols=part.symbols + start, symbol_num_tokens=table)
        for part, start in zip(parts, starts, strict=True)
    )


def tree_blocks(batch: SampleBatch, tree: PrefixTree) -> SampleBatch:
    """The batch with the nodes of its own prefix tree as symbols.

    Args:
        batch: any batch.
        tree: `build_prefix_tree(batch)`, without a share key.
    """
    # Climb from all ends at once: the k-th round finds the k-th last node of every path.
    rounds: list[tuple[IntArray, IntArray]] = []
    sample, node = np.arange(batch.num_samples), tree.sample_node
    while len(node):
        below = node > 0
        sample, node = sample[below], node[below]
        rounds.append((sample, node))
        node = tree.parent[node]
    num_symbols = np.zeros(batch.num_samples, np.int64)
    for climbing, _ in rounds:
        num_symbols[climbing] += 1
    offsets = np.concatenate([[0], np.cumsum(num_symbols)]).astype(np.int64)
    nodes = np.empty(offsets[-1], np.int64)
    for height, (climbing, reached) in enumerate(rounds):
        nodes[offsets[climbing + 1] - 1 - height] = reached
    symbols = codes_by_appearance(nodes)
    table = np.empty(int(symbols.max(initial=-1)) + 1, np.int64)
    table[symbols] = tree.num_tokens[nodes]
    return replace(batch, symbols=symbols, symbol_offsets=offsets, symbol_num_tokens=table)


def compact_symbols(batches: Sequence[SampleBatch]) -> tuple[SampleBatch, ...]:
    """Batches of one block table, with the unused blocks removed from it.

    Token-level batches are returned as they are.
    """
    if not batches or batches[0].symbol_num_tokens is None:
        return tuple(batches)
    used, symbols = np.unique(np.concatenate([b.symbols for b in batches]), return_inverse=True)
    table = batches[0].symbol_num_tokens[used]
    cuts = np.cumsum([len(b.symbols) for b in batches])[:-1]
    return tuple(
        replace(batch, symbols=part, symbol_num_tokens=table)
        for batch, part in zip(batches, np.split(symbols, cuts), strict=True)
    )

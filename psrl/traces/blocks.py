"""Replace symbols by anonymous blocks: the same sharing, without token ids or text."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from psrl.core.prefix_tree import build_prefix_tree
from psrl.core.sample import IntArray, SampleBatch


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
    num_tokens: list[int] = []
    renamed = [_as_nodes(batch, num_tokens) for batch in batches]
    table = np.array(num_tokens, np.int64)
    return tuple(
        replace(batch, symbols=symbols, symbol_offsets=offsets, symbol_num_tokens=table)
        for batch, (symbols, offsets) in zip(batches, renamed, strict=True)
    )


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


def _as_nodes(batch: SampleBatch, num_tokens: list[int]) -> tuple[IntArray, IntArray]:
    """Node symbols and their offsets per sample; appends the tokens of each new symbol."""
    tree = build_prefix_tree(batch)
    node_tokens = tree.num_tokens.tolist()
    symbol_of: dict[int, int] = {}
    symbols: list[int] = []
    offsets = [0]
    for end in tree.sample_node.tolist():
        for node in tree.path(end):
            if node not in symbol_of:
                symbol_of[node] = len(num_tokens)
                num_tokens.append(node_tokens[node])
            symbols.append(symbol_of[node])
        offsets.append(len(symbols))
    return np.array(symbols, np.int64), np.array(offsets, np.int64)

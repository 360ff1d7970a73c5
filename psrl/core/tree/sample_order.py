"""Sort the samples of a batch and count the symbols that neighbours have in common.

Both are the work of building a prefix tree, and recorded samples make it short: an agent's call
mostly extends the call before. Such a chain needs one check per sample that it is one; only its
longest sample is sorted and compared with others.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from psrl.core.samples.sample import IntArray, SampleBatch

_HEAD = 4  # symbols compared for all neighbours at once; more only where those are equal
_PIECE = 2**17  # symbols converted at a time, so that they stay in the cache


def sort_samples(batch: SampleBatch, keys: IntArray) -> tuple[IntArray, IntArray]:
    """Samples by (key, symbols), a prefix before its extensions; equal samples keep order.

    Returns:
        order: [S] samples as sorted.
        common: [S] symbols that each has in common with the one before it; 0 for the first, and
            where the key changes.
    """
    by_key = np.argsort(keys, kind="stable")
    num_symbols = np.diff(batch.symbol_offsets)[by_key]
    longest, width, chain_start, is_new_key = _chains(batch, by_key, keys)
    ranked, common = _rank(longest, width, is_new_key)
    first = _first_extension(common, ranked, is_new_key, num_symbols.tolist(), chain_start)
    # Samples with the same first extension are prefixes of it.
    by_symbols = np.lexsort((num_symbols, first))
    first, num_symbols = first[by_symbols], num_symbols[by_symbols]
    before = np.minimum(num_symbols[:-1], num_symbols[1:])
    changes = np.flatnonzero(first[1:] != first[:-1])
    if len(changes):
        between = np.minimum.reduceat(common[: first[-1] + 1], first[changes] + 1)
        before[changes] = np.minimum(before[changes], between)
    return by_key[by_symbols], np.concatenate([[0], before])[: len(by_key)].astype(np.int64)


def _chains(
    batch: SampleBatch, by_key: IntArray, keys: IntArray
) -> tuple[list[bytes], str, list[int], list[bool]]:
    """Cut the samples, in key order, into runs of which each extends the one before.

    Returns:
        longest: bytes of the last sample of each chain; they compare like the symbols.
        width: dtype of these symbols, in native byte order.
        chain_start: position of the first sample of each chain, and the number of samples.
        is_new_key: whether the chain is the first one of its key.
    """
    wide = bool(len(batch.symbols)) and int(batch.symbols.max()) >= 2**32
    width = "u8" if wide else "u4"
    longest: list[bytes] = []
    chain_start: list[int] = []
    is_new_key: list[bool] = []
    key_before = None
    sorted_keys = keys[by_key].tolist()
    for position, (text, key) in enumerate(
        zip(_sample_bytes(batch, by_key, width), sorted_keys, strict=True)
    ):
        if key == key_before and text.startswith(longest[-1]):
            longest[-1] = text
        else:
            longest.append(text)
            chain_start.append(position)
            is_new_key.append(key != key_before)
            key_before = key
    return longest, width, [*chain_start, len(by_key)], is_new_key


def _sample_bytes(batch: SampleBatch, by_key: IntArray, width: str) -> Iterator[bytes]:
    """Symbols of each sample as big-endian bytes, which compare like the numbers."""
    offsets = batch.symbol_offsets
    in_order = bool((np.diff(by_key) == 1).all())
    if not in_order:
        for sample in by_key.tolist():
            yield batch.symbols[offsets[sample] : offsets[sample + 1]].astype(">" + width).tobytes()
        return
    cuts = np.searchsorted(offsets, np.arange(_PIECE, int(offsets[-1]), _PIECE)).tolist()
    for first, last in pairwise([0, *cuts, batch.num_samples]):
        start = offsets[first]
        piece = batch.symbols[start : offsets[last]].astype(">" + width)
        bounds = (offsets[first : last + 1] - start).tolist()
        for a, z in pairwise(bounds):
            yield piece[a:z].tobytes()


def _rank(longest: list[bytes], width: str, is_new_key: list[bool]) -> tuple[list[int], IntArray]:
    """Chains by (key, symbols of the longest sample), and symbols in common with the one before."""
    ranked: list[int] = []
    cuts = [chain for chain, is_new in enumerate(is_new_key) if is_new]
    for start, end in pairwise([*cuts, len(longest)]):
        ranked += sorted(range(start, end), key=longest.__getitem__)
    # Chains and ranks of a key are the same numbers, so its first chain and first rank are one.
    common = _common_heads([longest[chain] for chain in ranked], width)
    common[is_new_key] = 0
    # Equality does not depend on byte order, and comparing native numbers is faster.
    for rank in np.flatnonzero(common == _HEAD).tolist():
        pair = (np.frombuffer(longest[chain], width) for chain in ranked[rank - 1 : rank + 1])
        before, symbols = pair
        matched = min(len(symbols), len(before))
        differs = symbols[:matched] != before[:matched]
        first = int(differs.argmax())
        common[rank] = first if differs[first] else matched
    return ranked, common


def _common_heads(texts: list[bytes], width: str) -> IntArray:
    """Symbols that each text has in common with the one before it, at most `_HEAD`."""
    size = np.dtype(width).itemsize
    length = _HEAD * size
    heads = np.frombuffer(b"".join([t[:length].ljust(length, b"\0") for t in texts]), width)
    num_symbols = np.array([len(t) for t in texts], np.int64) // size
    before, after = heads.reshape(-1, _HEAD)[:-1], heads.reshape(-1, _HEAD)[1:]
    differs = np.full((len(texts), _HEAD + 1), True)
    differs[1:, :_HEAD] = before != after
    # Padding may equal a symbol, so the shorter text limits the match.
    matched: IntArray = np.minimum(differs.argmax(axis=1), num_symbols)
    matched[1:] = np.minimum(matched[1:], num_symbols[:-1])
    return matched


def _first_extension(
    common: IntArray,
    ranked: list[int],
    is_new_key: list[bool],
    num_symbols: list[int],
    chain_start: list[int],
) -> IntArray:
    """[S] first rank whose longest sample starts with the whole of each sample, in key order."""
    extension = [0] * len(num_symbols)
    # Runs of ranks up to the current one that share a prefix, the longest prefix last.
    open_left: list[int] = []
    open_depth: list[int] = []
    for rank, (chain, matched) in enumerate(zip(ranked, common.tolist(), strict=True)):
        if is_new_key[rank]:
            open_left, open_depth = [rank], [0]
        left = rank
        while open_depth[-1] > matched:
            left = open_left.pop()
            open_depth.pop()
        if open_depth[-1] < matched:
            open_left.append(left if left < rank else rank - 1)
            open_depth.append(matched)
        for position in range(chain_start[chain], chain_start[chain + 1]):
            run = bisect_left(open_depth, num_symbols[position])
            extension[position] = open_left[run] if run < len(open_left) else rank
    return np.array(extension, np.int64)

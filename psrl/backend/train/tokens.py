"""Token ids of samples: those of a token-level trace, or pseudo ids for block hashes.

Block-hash traces say which blocks are equal, not what they contain. Equal blocks get equal
tokens; the first token of block b is `b % vocab_size`, so that two different blocks differ at
once while their ids are below the vocabulary size, and the others are a hash of (b, offset).
"""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from psrl.core.errors import BackendError
from psrl.core.plan.packing import PackedMicroBatch
from psrl.core.samples.sample import IntArray, SampleBatch
from psrl.core.tree.prefix_tree import PrefixTree


class TokenIds:
    """Token ids of a batch at positions in the concatenation of its samples.

    Args:
        reduce_modulo: map the ids of a token-level trace into the vocabulary by `% vocab_size`.

    Raises:
        BackendError: if a token-level trace has ids outside the vocabulary.
    """

    def __init__(self, batch: SampleBatch, vocab_size: int, reduce_modulo: bool = False) -> None:
        self.batch = batch
        self.vocab_size = vocab_size
        if batch.symbol_num_tokens is None and not reduce_modulo and len(batch.symbols):
            largest = int(batch.symbols.max())
            if largest >= vocab_size:
                raise BackendError(
                    f"the trace has token id {largest}, the model's vocabulary {vocab_size}",
                    f"use a model with vocab_size > {largest}, or reduce the ids modulo "
                    "vocab_size (keeps the sharing, changes the text)",
                )

    @cached_property
    def _occurrence_start(self) -> IntArray:
        """[N] position of each symbol occurrence's first token."""
        tokens = self.batch.occurrence_tokens
        return np.cumsum(tokens) - tokens

    def at(self, positions: IntArray) -> IntArray:
        """[n] token ids at positions in the concatenation of all samples."""
        if self.batch.symbol_num_tokens is None:
            return self.batch.symbols[positions] % self.vocab_size
        occurrence = np.searchsorted(self._occurrence_start, positions, side="right") - 1
        block = self.batch.symbols[occurrence]
        offset = positions - self._occurrence_start[occurrence]
        hashed = (_mix(block, offset) % np.uint64(self.vocab_size)).astype(np.int64)
        return np.where(offset == 0, block % self.vocab_size, hashed)

    def of_samples(self, sample: IntArray | int, token: IntArray) -> IntArray:
        """Token ids of (sample, token position) pairs."""
        return self.at(self.batch.token_offsets[sample] + token)


def expand_tokens(
    batch: SampleBatch, sample: int, vocab_size: int, reduce_modulo: bool = False
) -> IntArray:
    """[tokens of the sample] token ids; see `TokenIds`."""
    token_ids = TokenIds(batch, vocab_size, reduce_modulo)
    return token_ids.of_samples(sample, np.arange(batch.num_tokens[sample]))


def packed_token_ids(
    token_ids: TokenIds, packed: PackedMicroBatch, tree: PrefixTree, sample: IntArray
) -> IntArray:
    """[T] token ids of a packed micro-batch.

    Args:
        sample: index in the batch of each of the tree's samples.
    """
    carrier = sample[tree.representative[packed.node]]
    return token_ids.of_samples(np.repeat(carrier, packed.num_tokens), packed.position_ids)


def _mix(block: IntArray, offset: IntArray) -> npt.NDArray[np.uint64]:
    """Hash of (block, offset): the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = block.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + offset.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

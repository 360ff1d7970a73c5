"""Requests whose prompts are recorded as hashes of token blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import nan

import numpy as np

from psrl.core.samples.sample import IntArray

from .reading import Record
from .samples import RecordedSample


@dataclass(frozen=True)
class HashedRequest:
    """One model call.

    Attributes:
        scope: equal hashes are equal blocks only within one scope.
        hash_ids: [n] blocks of the prompt.
        block_tokens: tokens of each of them but the last.
        last_tokens: tokens of the last one.
        tail_tokens: prompt tokens after the last block, which nothing is known about.
        output_tokens: tokens of the response.
    """

    scope: int
    hash_ids: IntArray
    block_tokens: int
    last_tokens: int
    tail_tokens: int
    output_tokens: int
    group_id: str
    trajectory_id: str
    agent_step: int
    arrival_s: float = nan
    generate_s: float = nan
    environment_s: float = nan

    @property
    def input_tokens(self) -> int:
        whole = max(len(self.hash_ids) - 1, 0) * self.block_tokens
        return whole + self.last_tokens + self.tail_tokens


def block_lengths(
    record: Record, num_hashes: int, length_field: str, block_tokens: int
) -> tuple[int, int]:
    """Tokens of the last hashed block, and of the unhashed tail after it.

    Some recorders hash only whole blocks (the rest of the prompt is a tail), some hash the rest
    as a shorter last block. The number of hashes tells which.

    Raises:
        TraceError: if the number of hashes fits neither.
    """
    input_tokens = record.integer(length_field, 1)
    whole, rest = divmod(input_tokens, block_tokens)
    if num_hashes == whole:
        return (block_tokens if whole else 0), rest
    if rest and num_hashes == whole + 1:
        return rest, 0
    raise record.error(
        "hash_ids",
        f"has {num_hashes} hashes, but '{length_field}' = {input_tokens} tokens are {whole} "
        f"blocks of {block_tokens} and a rest of {rest}",
        "if the blocks have another size, give it with --block-tokens; else fix the record or "
        "leave it out with --skip-bad",
    )


def samples_of(requests: Sequence[HashedRequest]) -> tuple[list[RecordedSample], IntArray]:
    """Step samples and the symbol table of hashed requests.

    A symbol is a (scope, hash, length): blocks of different lengths cannot be equal tokens. The
    unhashed tail and the response are fresh symbols, never shared with another request.
    """
    hashed, num_tokens = _hashed_symbols(requests)
    lengths = num_tokens.tolist()
    samples: list[RecordedSample] = []
    for request, symbols in zip(requests, hashed, strict=True):
        fresh = [t for t in (request.tail_tokens, request.output_tokens) if t]
        new = np.arange(len(lengths), len(lengths) + len(fresh))
        lengths += fresh
        start = request.input_tokens
        samples.append(
            RecordedSample(
                symbols=np.concatenate([symbols, new]),
                loss_spans=((start, start + request.output_tokens),),
                group_id=request.group_id,
                trajectory_id=request.trajectory_id,
                agent_step=request.agent_step,
                arrival_s=request.arrival_s,
                generate_s=request.generate_s,
                environment_s=request.environment_s,
            )
        )
    return samples, np.array(lengths, np.int64)


def _hashed_symbols(requests: Sequence[HashedRequest]) -> tuple[list[IntArray], IntArray]:
    """Symbols of the hashed blocks of each request, and tokens per symbol."""
    counts = [len(r.hash_ids) for r in requests]
    offsets = np.cumsum([0, *counts])
    hashes = np.concatenate([*(r.hash_ids for r in requests), np.empty(0, np.int64)])
    scopes = np.repeat([r.scope for r in requests], counts).astype(np.int64)
    lengths = np.repeat([r.block_tokens for r in requests], counts).astype(np.int64)
    for request, end in zip(requests, offsets[1:].tolist(), strict=True):
        if len(request.hash_ids):
            lengths[end - 1] = request.last_tokens
    # Dense codes keep the combined keys far below 2^63 whatever the hashes are.
    codes = np.unique(hashes, return_inverse=True)[1]
    for column in (scopes, lengths):
        codes = codes * (int(column.max(initial=0)) + 1) + column
        codes = np.unique(codes, return_inverse=True)[1]
    num_tokens = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    num_tokens[codes] = lengths
    return [codes[a:z] for a, z in pairwise(offsets.tolist())], num_tokens

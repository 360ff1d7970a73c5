"""Mooncake request traces: JSONL with `timestamp` (ms), lengths and `hash_ids` of the prompt.

Equal hashes in different requests are equal blocks with equal prefixes.
"""

from pathlib import Path
from typing import Any

from psrl.traces.recording import Recording

from .assemble import assemble
from .hashed import HashedRequest, block_lengths, samples_of
from .options import ImportOptions
from .reading import BadRecords, Record, parse_json, read_lines

MARKS = "JSON lines with 'input_length' and 'hash_ids'"
DEFAULT_BLOCK_TOKENS = 512


def recognise(value: Any) -> str | None:
    """Why the first JSON value of a file is a request, or None."""
    if isinstance(value, dict) and "input_length" in value and "hash_ids" in value:
        return "JSON lines with 'input_length' and 'hash_ids'"
    return None


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read requests: each is a trajectory and a semantic group of its own.

    Raises:
        TraceError: at the first malformed request, unless `options.skip_bad`.
    """
    bad = BadRecords(options.skip_bad)
    block_tokens = options.block_tokens or DEFAULT_BLOCK_TOKENS
    requests: list[HashedRequest] = []
    for path in paths:
        with bad.skipping():
            for where, line in read_lines(path):
                if len(requests) == options.limit:
                    break
                with bad.skipping():
                    record = Record.of(parse_json(line, where), where)
                    requests.append(_request(record, str(len(requests)), block_tokens))
    samples, num_tokens = samples_of(requests)
    notes = [
        f"blocks of {block_tokens} tokens; responses are fresh symbols",
        "rewards are not recorded, advantage is 1",
    ]
    return assemble(samples, num_tokens, paths, options, bad, notes)


def _request(record: Record, name: str, block_tokens: int) -> HashedRequest:
    hash_ids = record.integers("hash_ids")
    last_tokens, tail_tokens = block_lengths(record, len(hash_ids), "input_length", block_tokens)
    return HashedRequest(
        scope=0,
        hash_ids=hash_ids,
        block_tokens=block_tokens,
        last_tokens=last_tokens,
        tail_tokens=tail_tokens,
        output_tokens=record.integer("output_length", 1),
        group_id=name,
        trajectory_id=name,
        agent_step=0,
        arrival_s=record.number("timestamp", 0) / 1000,
    )

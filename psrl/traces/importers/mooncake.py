"""Mooncake request traces: JSONL with `timestamp` (ms), lengths and `hash_ids` of the prompt.

Equal hashes in different requests are equal blocks with equal prefixes.
"""

from dataclasses import replace
from pathlib import Path

from psrl.traces.recording import Recording

from .assemble import assemble
from .files import read_lines
from .formats import FileHead, Importer
from .hashed import HashedRequest, block_lengths, samples_of
from .options import ImportOptions
from .reading import BadRecords, Record, parse_each, parse_json

DEFAULT_BLOCK_TOKENS = 512


def recognise(head: FileHead) -> str | None:
    return head.reason("JSON lines", "input_length", "hash_ids")


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read requests: each is a trajectory and a semantic group of its own.

    Raises:
        TraceError: at the first malformed request, unless `options.skip_bad`.
    """
    bad = BadRecords(options.skip_bad)
    block_tokens = options.block_tokens or DEFAULT_BLOCK_TOKENS

    def parse(where: str, line: bytes) -> HashedRequest:
        return _request(Record.of(parse_json(line, where), where), block_tokens)

    requests = list(parse_each(paths, options.limit, bad, read_lines, parse))
    requests = [replace(r, group_id=str(i), trajectory_id=str(i)) for i, r in enumerate(requests)]
    samples, num_tokens = samples_of(requests)
    notes = [f"blocks of {block_tokens} tokens; responses are fresh symbols"]
    return assemble(samples, num_tokens, paths, options, bad, notes)


MOONCAKE = Importer(
    "JSON lines with 'input_length' and 'hash_ids'",
    recognise,
    read,
    takes=frozenset({"block_tokens"}),
)


def _request(record: Record, block_tokens: int) -> HashedRequest:
    hash_ids = record.integers("hash_ids")
    last_tokens, tail_tokens = block_lengths(record, len(hash_ids), "input_length", block_tokens)
    return HashedRequest(
        scope=0,
        hash_ids=hash_ids,
        block_tokens=block_tokens,
        last_tokens=last_tokens,
        tail_tokens=tail_tokens,
        output_tokens=record.integer("output_length", 1),
        group_id="",
        trajectory_id="",
        agent_step=0,
        arrival_s=record.number("timestamp", 0) / 1000,
    )

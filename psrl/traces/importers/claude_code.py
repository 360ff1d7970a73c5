"""Claude Code sessions as recorded by kv-cache-tester: one JSON file per session.

A file holds `block_size`, `hash_id_scope` and `requests`; a request holds `in` and `out` tokens,
`hash_ids` of the prompt's blocks and times. A request of type `subagent` nests its own requests,
whose `t` counts from the start of the subagent.
"""

from collections.abc import Iterator
from pathlib import Path

from psrl.core.errors import TraceError
from psrl.traces.recording import Recording

from .assemble import assemble
from .files import read_bytes
from .formats import FileHead, Importer
from .hashed import HashedRequest, block_lengths, samples_of
from .options import ImportOptions
from .reading import BadRecords, Record, parse_json


def recognise(head: FileHead) -> str | None:
    return head.reason("one JSON object", "block_size", "requests")


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read sessions: each is a semantic group, its main agent and every subagent a trajectory.

    Raises:
        TraceError: at the first malformed session or request, unless `options.skip_bad`.
    """
    bad = BadRecords(options.skip_bad)
    requests: list[HashedRequest] = []
    read_from: dict[str, Path] = {}
    for path in paths:
        if len(read_from) == options.limit:
            break
        with bad.skipping():
            session = Record.of(parse_json(read_bytes(path), str(path)), str(path))
            name = session.text("id")
            if name in read_from:
                raise TraceError(
                    f"{path}: session id '{name}' was read from {read_from[name]} already",
                    "give each session once",
                )
            requests += _session_requests(session, name, len(read_from), options, bad)
            read_from[name] = path
    samples, num_tokens = samples_of(requests)
    notes = [
        "responses and prompt tokens after the last hashed block are fresh symbols",
    ]
    return assemble(samples, num_tokens, paths, options, bad, notes)


CLAUDE_CODE = Importer(
    "a JSON object per file with 'block_size' and 'requests'",
    recognise,
    read,
    takes=frozenset({"block_tokens"}),
)


def _session_requests(
    session: Record, name: str, index: int, options: ImportOptions, bad: BadRecords
) -> list[HashedRequest]:
    block_tokens = session.integer("block_size", 1)
    if options.block_tokens not in (None, block_tokens):
        raise session.error(
            "block_size",
            f"is {block_tokens}, but block_tokens {options.block_tokens} was asked for",
            "leave --block-tokens out: sessions carry their own block size",
        )
    scope = session.text("hash_id_scope") if session.has("hash_id_scope") else "local"
    if scope not in ("local", "global"):
        raise session.error("hash_id_scope", f"is '{scope}', known are 'local' and 'global'")
    requests: list[HashedRequest] = []
    for record, trajectory, step, start_s in _walk(session, name, 0.0, bad):
        with bad.skipping():
            hash_ids = record.integers("hash_ids")
            last_tokens, tail_tokens = block_lengths(record, len(hash_ids), "in", block_tokens)
            requests.append(
                HashedRequest(
                    scope=0 if scope == "global" else index + 1,
                    hash_ids=hash_ids,
                    block_tokens=block_tokens,
                    last_tokens=last_tokens,
                    tail_tokens=tail_tokens,
                    output_tokens=record.integer("out", 1),
                    group_id=name,
                    trajectory_id=trajectory,
                    agent_step=step,
                    arrival_s=start_s + record.number("t", 0),
                    generate_s=record.number("api_time", 0),
                    environment_s=record.number("think_time", 0),
                )
            )
    return requests


def _walk(
    parent: Record, trajectory: str, start_s: float, bad: BadRecords
) -> Iterator[tuple[Record, str, int, float]]:
    """Model calls below a session or subagent: record, trajectory, agent step, time origin."""
    step = num_subagents = 0
    for position, value in enumerate(parent.items("requests")):
        with bad.skipping():
            record = Record.of(value, f"{parent.where} request {position}")
            if "requests" in record.values:
                num_subagents += 1
                name = f"{trajectory}/subagent_{num_subagents}"
                yield from _walk(record, name, start_s + record.number("t", 0), bad)
                continue
            yield record, trajectory, step, start_s
        step += 1

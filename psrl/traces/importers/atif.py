"""Agent Trajectory Interchange Format (ATIF): a JSON object per trajectory.

`steps` are system, user and agent messages in order; an agent step may hold tool calls, the
`observation` that followed, and since version 1.3 token ids in `metrics`.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np

from psrl.core.errors import ConfigError, TraceError
from psrl.traces.chat_template import Message, ToolCall, dump_json, render
from psrl.traces.recording import Recording

from .assemble import assemble
from .episodes import CHAT_MODES, TextEpisode, import_episodes
from .files import read_bytes, read_lines
from .formats import FileHead, Importer
from .messages import CHAT_NOTE, content_of, group_of
from .options import ImportOptions
from .reading import BadRecords, Record, parse_each, parse_json, parse_record
from .samples import RecordedSample

TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids")
SOURCES = ("system", "user", "agent")


def recognise(head: FileHead) -> str | None:
    version = head.value.get("schema_version") if isinstance(head.value, dict) else None
    if isinstance(version, str) and version.startswith("ATIF-v1."):
        return f"a JSON object with the schema version {version[:20]}"
    return None


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read trajectories: a hash of the first user message is the group.

    Token ids are used where every agent step has both prompt and completion ids, in all files;
    else the text is tokenised. Subagent trajectories inside a file are trajectories of its group.

    Raises:
        TraceError: at the first malformed trajectory, unless `options.skip_bad`.
        ConfigError: if another mode than step is asked of token ids.
    """
    if not _all_have_tokens(paths):
        notes = [CHAT_NOTE, "prompt and completion token ids are not recorded for every call"]
        return import_episodes(paths, options, _places, _text_episodes, notes)
    if options.mode not in (None, "step"):
        raise ConfigError(
            f"mode {options.mode} needs text, but these files hold token ids", "use mode step"
        )
    bad = BadRecords(options.skip_bad)
    numbers = count()

    def parse(where: str, data: bytes) -> list[RecordedSample]:
        return _token_samples(where, data, numbers)

    parsed = parse_each(paths, options.limit, bad, _places, parse)
    samples = [sample for trajectories in parsed for sample in trajectories]
    return assemble(samples, None, paths, options, bad, ["token ids as recorded"])


ATIF = Importer(
    "a JSON object with 'schema_version' ATIF-v1.x and 'steps'", recognise, read, CHAT_MODES
)


def _places(path: Path) -> Iterator[tuple[str, bytes]]:
    """Every line, or the whole file where the first line is no JSON by itself."""
    where, first = next(read_lines(path))
    try:
        parse_json(first, where)
    except TraceError:
        yield str(path), read_bytes(path)
    else:
        yield from read_lines(path)


def _trajectories(where: str, data: bytes) -> list[Record]:
    """A trajectory and those of its subagents, parents first."""
    found: list[Record] = []
    stack = [parse_record(where, data)]
    while stack:
        record = stack.pop()
        found.append(record)
        if record.has("subagent_trajectories"):
            stack += record.children("subagent_trajectories", "subagent")[::-1]
    return found


def _all_have_tokens(paths: list[Path]) -> bool:
    """Whether every call of every sound record has token ids; False without any call."""
    some = False
    for path in paths:
        for where, data in _places(path):
            with suppress(TraceError):  # reading it again reports what is wrong
                for step in (s for r in _trajectories(where, data) for s in _agent_steps(r)):
                    if not (
                        step.has("metrics") and all(map(step.child("metrics").has, TOKEN_FIELDS))
                    ):
                        return False
                    some = True
    return some


def _agent_steps(record: Record) -> list[Record]:
    """The model's calls in this trajectory; copied context was trained where it came from."""
    return [
        step
        for step in record.children("steps", "step")
        if step.values.get("source") == "agent" and not step.flag("is_copied_context")
    ]


def _token_samples(where: str, data: bytes, numbers: Iterator[int]) -> list[RecordedSample]:
    records = _trajectories(where, data)
    group = group_of(_messages(records[0]))
    samples = []
    for record in records:
        trajectory = str(next(numbers))
        for number, step in enumerate(_agent_steps(record)):
            prompt, response = (step.child("metrics").token_ids(name) for name in TOKEN_FIELDS)
            end = len(prompt) + len(response)
            samples.append(
                RecordedSample(
                    symbols=np.concatenate([prompt, response]),
                    loss_spans=((len(prompt), end),) if len(prompt) and len(response) else (),
                    group_id=group,
                    trajectory_id=trajectory,
                    agent_step=number,
                    reward=_reward(record, records[0]),
                )
            )
    return samples


def _text_episodes(where: str, data: bytes) -> list[TextEpisode]:
    records = _trajectories(where, data)
    group = group_of(_messages(records[0]))
    episodes = []
    for record in records:
        agent = record.child("agent")
        tools = agent.items("tool_definitions") if agent.has("tool_definitions") else []
        for position, tool in enumerate(tools):
            Record.of(tool, f"{record.where} tool {position}")
        turns = render(_messages(record), tools)
        episodes.append(TextEpisode(record.where, group, _reward(record, records[0]), turns))
    return episodes


def _reward(record: Record, root: Record) -> float:
    """`extra.reward`, which the format does not define but harnesses write; else the root's."""
    extra = record.child("extra") if record.has("extra") else record
    return extra.number("reward") if extra.has("reward") or record is root else _reward(root, root)


def _messages(record: Record) -> list[Message]:
    return [m for step in record.children("steps", "step") for m in _step_messages(step)]


def _step_messages(step: Record) -> list[Message]:
    source = step.text("source")
    if source not in SOURCES:
        raise step.error("source", f"is {source!a}, known are {', '.join(SOURCES)}")
    text = content_of(step, "message")
    if source == "system":
        messages = [Message("system", text)]
    elif source == "user":
        messages = [Message("user", text)]
    else:
        calls = step.children("tool_calls", "tool call") if step.has("tool_calls") else []
        messages = [
            Message(
                "assistant",
                text,
                tuple(
                    ToolCall(c.text("function_name"), dump_json(c.get("arguments"))) for c in calls
                ),
                reasoning=step.text("reasoning_content") if step.has("reasoning_content") else "",
                is_trained=not step.flag("is_copied_context"),
            )
        ]
    if step.has("observation"):
        results = step.child("observation").children("results", "result")
        messages += [Message("tool", content_of(r)) for r in results if r.has("content")]
    return messages

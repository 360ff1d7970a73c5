"""Recorded conversations: OpenAI-style messages as JSON lines, and tau-bench result files.

JSON lines: `{"messages": [...], "tools": [...], "group": ..., "reward": ...}`, the last three
optional. tau-bench: a JSON list of `{"task_id", "trial", "reward", "info", "traj"}`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from psrl.core.errors import TraceError
from psrl.traces.chat_template import ROLES, Message, ToolCall, dump_json, render
from psrl.traces.recording import Recording

from .episodes import CHAT_MODES, TextEpisode, import_episodes
from .files import read_bytes, read_lines
from .formats import FileHead, Importer
from .options import ImportOptions
from .reading import Record, parse_json
from .samples import text_digest

CHAT_NOTE = "Qwen2.5 chat format"


def recognise(head: FileHead) -> str | None:
    return head.reason("JSON lines", "messages")


def recognise_tau_bench(head: FileHead) -> str | None:
    value = head.value
    if isinstance(value, list) and value and isinstance(value[0], dict) and "traj" in value[0]:
        return "a JSON list of objects with 'traj'"
    return None


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read JSON lines; the group is `group`, else a hash of the first user message."""
    return import_episodes(paths, options, read_lines, _jsonl_episode, [CHAT_NOTE])


def read_tau_bench(paths: list[Path], options: ImportOptions) -> Recording:
    """Read tau-bench results; the group is the task, with the file name if there are several."""

    def episodes(path: Path) -> Iterator[tuple[str, Any]]:
        values = parse_json(read_bytes(path), str(path))
        if not isinstance(values, list):
            raise TraceError(f"{path}: expected a JSON list of episodes", "choose another format")
        prefix = f"{path.stem}/" if len(paths) > 1 else ""
        for position, value in enumerate(values):
            yield f"{path} episode {position}", (prefix, value)

    return import_episodes(paths, options, episodes, _tau_bench_episode, [CHAT_NOTE])


MESSAGES = Importer("JSON lines with 'messages'", recognise, read, CHAT_MODES)
TAU_BENCH = Importer(
    "a JSON list of objects with 'task_id' and 'traj'",
    recognise_tau_bench,
    read_tau_bench,
    CHAT_MODES,
)


def group_of(messages: list[Message]) -> str:
    """Group name of a conversation that has none: a hash of its first user message."""
    return text_digest(next((m.content for m in messages if m.role == "user"), ""))


def _jsonl_episode(where: str, line: bytes) -> TextEpisode:
    record = Record.of(parse_json(line, where), where)
    messages = parse_messages(record, "messages")
    tools = record.items("tools") if record.has("tools") else []
    for position, tool in enumerate(tools):
        Record.of(tool, f"{where} tool {position}")
    group = record.label("group") if record.has("group") else group_of(messages)
    return TextEpisode(where, group, record.number("reward"), render(messages, tools))


def _tau_bench_episode(where: str, raw: tuple[str, Any]) -> TextEpisode:
    prefix, value = raw
    record = Record.of(value, where)
    group = prefix + record.label("task_id")
    return TextEpisode(
        where, group, record.number("reward"), render(parse_messages(record, "traj"))
    )


def parse_messages(record: Record, name: str) -> list[Message]:
    """The messages in a list field.

    Raises:
        TraceError: at the first one that cannot be replayed.
    """
    return [_message(message) for message in record.children(name, "message")]


def _message(record: Record) -> Message:
    role = next((r for r in ROLES if r == record.text("role")), None)
    if role is None:
        raise record.error("role", f"is {record.text('role')!a}, known are {', '.join(ROLES)}")
    calls: tuple[ToolCall, ...] = ()
    if record.has("tool_calls"):
        if role != "assistant":
            raise record.error("tool_calls", f"stands in a message of role '{role}'")
        calls = tuple(_tool_call(call) for call in record.children("tool_calls", "tool call"))
    reasoning = record.text("reasoning_content") if record.has("reasoning_content") else ""
    if not record.has("content") and not calls:
        raise record.error("content", "is missing in a message without tool calls")
    return Message(
        role,
        content_of(record) if record.has("content") else "",
        calls,
        reasoning=reasoning if role == "assistant" else "",
        is_trained=not record.flag("is_demo"),
        is_summary=record.flag("is_summary") or record.flag("isCompactSummary"),
    )


def content_of(record: Record, name: str = "content") -> str:
    """Text of a message: a string, or a list of text parts.

    Raises:
        TraceError: if a part is no text.
    """
    if not isinstance(record.get(name), list):
        return record.text(name)
    texts: list[str] = []
    for part in record.children(name, "content part"):
        if part.text("type") != "text":
            raise part.error("type", f"is {part.text('type')!a}; only 'text' can be replayed")
        texts.append(part.text("text"))
    return "".join(texts)


def _tool_call(record: Record) -> ToolCall:
    function = record
    if record.has("function"):
        function = record.child("function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # the model wrote broken JSON: keep what it wrote
            return ToolCall(function.text("name"), function.text("arguments"))
    return ToolCall(function.text("name"), dump_json(arguments))

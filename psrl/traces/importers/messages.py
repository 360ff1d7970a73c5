"""Recorded conversations: OpenAI-style messages as JSON lines, and tau-bench result files.

JSON lines: `{"messages": [...], "tools": [...], "group": ..., "reward": ...}`, the last three
optional. tau-bench: a JSON list of `{"task_id", "trial", "reward", "info", "traj"}`.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from psrl.core.errors import ConfigError, TraceError
from psrl.core.sample import IntArray
from psrl.traces.advantages import grpo_advantages
from psrl.traces.chat_template import (
    ROLES,
    Message,
    ToolCall,
    Turn,
    dump_json,
    render,
    turns_text,
)
from psrl.traces.recording import Recording
from psrl.traces.tokenizer import Tokenizer, load_tokenizer

from .assemble import StepSample, assemble
from .options import ImportOptions
from .reading import SKIP_HINT, BadRecords, Record, check_text, parse_json, read_bytes, read_lines

MARKS = "JSON lines with 'messages'"
TAU_BENCH_MARKS = "a JSON list of objects with 'task_id' and 'traj'"

Raw = TypeVar("Raw")


@dataclass(frozen=True)
class Episode:
    """A conversation; `calls` holds the tokens of each model call and how many are its prompt."""

    group: str
    reward: float
    calls: tuple[tuple[IntArray, int], ...]


def recognise(value: Any) -> str | None:
    """Why the first JSON value of a file is a conversation, or None."""
    if isinstance(value, dict) and "messages" in value:
        return "JSON lines with 'messages'"
    return None


def recognise_tau_bench(value: Any) -> str | None:
    """Why the first JSON value of a file is a tau-bench result, or None."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "traj" in value[0]:
        return "a JSON list of objects with 'traj'"
    return None


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read JSON lines; the group is `group`, else a hash of the first user message.

    Raises:
        TraceError: at the first malformed line, unless `options.skip_bad`.
        ConfigError: if the tokenizer cannot be loaded.
    """
    return _read(paths, options, read_lines, _jsonl_episode)


def read_tau_bench(paths: list[Path], options: ImportOptions) -> Recording:
    """Read tau-bench results; the group is the task, with the file name if there are several.

    Raises:
        TraceError: at the first malformed episode, unless `options.skip_bad`.
        ConfigError: if the tokenizer cannot be loaded.
    """

    def episodes(path: Path) -> Iterator[tuple[str, Any]]:
        values = parse_json(read_bytes(path), str(path))
        if not isinstance(values, list):
            raise TraceError(f"{path}: expected a JSON list of episodes", "choose another format")
        prefix = f"{path.stem}/" if len(paths) > 1 else ""
        for position, value in enumerate(values):
            yield f"{path} episode {position}", (prefix, value)

    return _read(paths, options, episodes, _tau_bench_episode)


def _read(
    paths: list[Path],
    options: ImportOptions,
    places: Callable[[Path], Iterator[tuple[str, Raw]]],
    parse: Callable[[str, Raw, Tokenizer], Episode],
) -> Recording:
    if options.block_tokens is not None:
        raise ConfigError(
            f"block_tokens {options.block_tokens} has no meaning for recorded text",
            "leave --block-tokens out",
        )
    tokenizer = load_tokenizer(options.tokenizer)
    bad = BadRecords(options.skip_bad)
    episodes: list[Episode] = []
    for path in paths:
        with bad.skipping():
            for where, raw in places(path):
                if len(episodes) == options.limit:
                    break
                with bad.skipping():
                    episodes.append(parse(where, raw, tokenizer))
    notes = [f"Qwen2.5 chat format, tokenizer {tokenizer.name}"]
    num_unknown = sum(np.isnan(e.reward) for e in episodes)
    if num_unknown:
        notes.append(
            f"{num_unknown} of {len(episodes)} trajectories have no reward: "
            "advantage is 1 in their groups"
        )
    return assemble(_step_samples(episodes), None, paths, options, bad, notes)


def _step_samples(episodes: list[Episode]) -> list[StepSample]:
    groups = np.array([e.group for e in episodes], np.str_)
    rewards = np.array([e.reward for e in episodes], np.float64)
    advantages = grpo_advantages(groups, rewards).tolist()
    seen: Counter[str] = Counter()
    samples: list[StepSample] = []
    for episode, advantage in zip(episodes, advantages, strict=True):
        trajectory = f"{episode.group}/{seen[episode.group]}"
        seen[episode.group] += 1
        samples += [
            StepSample(
                symbols=tokens,
                response=(start, len(tokens)),
                group_id=episode.group,
                trajectory_id=trajectory,
                agent_step=step,
                advantage=advantage,
                reward=episode.reward,
            )
            for step, (tokens, start) in enumerate(episode.calls)
        ]
    return samples


def _jsonl_episode(where: str, line: bytes, tokenizer: Tokenizer) -> Episode:
    record = Record.of(parse_json(line, where), where)
    messages = _messages(record, "messages")
    tools = record.items("tools") if record.has("tools") else []
    for position, tool in enumerate(tools):
        Record.of(tool, f"{where} tool {position}")
    if record.has("group"):
        group = record.label("group")
    else:
        first = next((m.content for m in messages if m.role == "user"), "")
        group = hashlib.sha256(first.encode()).hexdigest()[:12]
    return _episode(where, group, record.number("reward"), render(messages, tools), tokenizer)


def _tau_bench_episode(where: str, raw: tuple[str, Any], tokenizer: Tokenizer) -> Episode:
    prefix, value = raw
    record = Record.of(value, where)
    group = prefix + record.label("task_id")
    turns = render(_messages(record, "traj"))
    return _episode(where, group, record.number("reward"), turns, tokenizer)


def _episode(
    where: str, group: str, reward: float, turns: list[Turn], tokenizer: Tokenizer
) -> Episode:
    check_text(turns_text(turns), f"{where}: the conversation")
    try:
        calls = tuple(_calls(turns, tokenizer))
    except TraceError as error:
        raise TraceError(f"{where}: {error.message}", error.hint) from None
    if not calls:
        raise TraceError(f"{where}: no message of role 'assistant', nothing to train", SKIP_HINT)
    return Episode(group, reward, calls)


def _calls(turns: list[Turn], tokenizer: Tokenizer) -> Iterator[tuple[IntArray, int]]:
    """Tokens of each model call, and how many of them are its prompt."""
    history = np.empty(0, np.int64)
    for turn in turns:
        prompt = np.concatenate([history, tokenizer.encode(turn.before)])
        history = np.concatenate([prompt, tokenizer.encode(turn.response)])
        if turn.response:
            yield history, len(prompt)
        history = np.concatenate([history, tokenizer.encode(turn.after)])


def _messages(record: Record, name: str) -> list[Message]:
    return [
        _message(Record.of(value, f"{record.where} message {position}"))
        for position, value in enumerate(record.items(name))
    ]


def _message(record: Record) -> Message:
    role = next((r for r in ROLES if r == record.text("role")), None)
    if role is None:
        raise record.error("role", f"is {record.text('role')!a}, known are {', '.join(ROLES)}")
    calls: tuple[ToolCall, ...] = ()
    if record.has("tool_calls"):
        if role != "assistant":
            raise record.error("tool_calls", f"stands in a message of role '{role}'")
        calls = tuple(
            _tool_call(Record.of(call, f"{record.where} tool call {position}"))
            for position, call in enumerate(record.items("tool_calls"))
        )
    if not record.has("content"):
        if not calls:
            raise record.error("content", "is missing in a message without tool calls")
        return Message(role, "", calls)
    return Message(role, _content(record), calls)


def _content(record: Record) -> str:
    if not isinstance(record.get("content"), list):
        return record.text("content")
    texts: list[str] = []
    for position, value in enumerate(record.items("content")):
        part = Record.of(value, f"{record.where} content part {position}")
        if part.text("type") != "text":
            raise part.error("type", f"is {part.text('type')!a}; only 'text' can be replayed")
        texts.append(part.text("text"))
    return "".join(texts)


def _tool_call(record: Record) -> ToolCall:
    function = record
    if record.has("function"):
        function = Record.of(record.get("function"), f"{record.where} function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # the model wrote broken JSON: keep what it wrote
            return ToolCall(function.text("name"), function.text("arguments"))
    return ToolCall(function.text("name"), dump_json(arguments))

"""FireAct results: one JSON object per file, from question number to its episode.

An episode holds `traj` (messages), `prompt` (messages before them), `reward` and the answers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from psrl.core.errors import TraceError
from psrl.traces.chat_template import render
from psrl.traces.recording import Recording

from .episodes import CHAT_MODES, TextEpisode, import_episodes
from .files import read_bytes
from .formats import FileHead, Importer
from .messages import CHAT_NOTE, parse_messages
from .options import ImportOptions
from .reading import Record, parse_json


def recognise(head: FileHead) -> str | None:
    if isinstance(head.value, dict) and head.value:
        first = next(iter(head.value.values()))
        if isinstance(first, dict) and "traj" in first and "em" in first:
            return "a JSON object whose values have 'traj' and 'em'"
    return None


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read episodes: the question's number is the semantic group, `f1` the reward."""
    return import_episodes(paths, options, _places, _episode, [CHAT_NOTE, "reward is 'f1'"])


FIREACT = Importer(
    "a JSON object per file whose values have 'traj' and 'em'", recognise, read, CHAT_MODES
)


def _places(path: Path) -> Iterator[tuple[str, tuple[str, Any]]]:
    values = parse_json(read_bytes(path), str(path))
    if not isinstance(values, dict):
        raise TraceError(f"{path}: expected a JSON object of episodes", "choose another format")
    for name, value in values.items():
        yield f"{path} episode {ascii(name)[:40]}", (name, value)


def _episode(where: str, raw: tuple[str, Any]) -> TextEpisode:
    name, value = raw
    record = Record.of(value, where)
    before = parse_messages(record, "prompt") if record.has("prompt") else []
    turns = render([*before, *parse_messages(record, "traj")])
    return TextEpisode(where, name, record.number("f1"), turns)

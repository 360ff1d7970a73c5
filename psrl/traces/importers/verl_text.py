"""veRL rollout dumps (`trainer.rollout_data_dir`): JSON lines of decoded text.

A line holds `input`, `output`, `score`, `step`, and in newer versions `uid`, the key
`{sample}_{rollout}_{output}`. Token ids, masks and special tokens are lost.
"""

import re
from pathlib import Path

from psrl.traces.chat_template import Turn
from psrl.traces.recording import Recording

from .episodes import TextEpisode, import_episodes
from .files import read_lines
from .formats import FileHead, Importer
from .options import ImportOptions
from .reading import MAX_INTEGER, parse_record
from .samples import text_digest

KEY = re.compile(r"(.+)_(\d+)_(\d+)")


def recognise(head: FileHead) -> str | None:
    return head.reason("JSON lines", "input", "output", "score")


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read samples: the group is the sample part of `uid`, else a hash of `input`.

    `score` is the reward and `step` the RL iteration.
    """
    notes = [
        "decoded text without special tokens, so token borders are approximate",
        "the whole output is trained: masks of tool results are not recorded",
    ]
    return import_episodes(paths, options, read_lines, _sample, notes, None)


VERL_TEXT = Importer(
    "JSON lines with 'input', 'output' and 'score' (veRL rollout_data_dir)",
    recognise,
    read,
    ("recorded",),
)


def split_key(key: str) -> tuple[str, str, int]:
    """Group, trajectory and agent step of a veRL key; one without its form is a group."""
    match = KEY.fullmatch(key)
    if match is None or int(match[3]) > MAX_INTEGER:
        return key, "", 0
    return match[1], f"{match[1]}_{match[2]}", int(match[3])


def _sample(where: str, line: bytes) -> TextEpisode:
    record = parse_record(where, line)
    prompt, response = record.text("input"), record.text("output")
    group, trajectory, step = text_digest(prompt), "", 0
    if record.has("uid"):
        group, trajectory, step = split_key(record.label("uid"))
    return TextEpisode(
        where,
        group,
        record.number("score"),
        [Turn((prompt,), (response,))],
        trajectory=trajectory,
        first_step=step,
        iteration=record.integer("step", 0) if record.has("step") else None,
    )

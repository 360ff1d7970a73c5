"""AReaL rollout dumps: JSON lines of decoded text, one file per task.

A line holds `task_id`, `sample_idx`, `prompt`, `completion`, `reward`, `seqlen` and, for several
turns, `segments` of `role` (prompt, gen, context) and `text`.
"""

from pathlib import Path

from psrl.traces.chat_template import Turn
from psrl.traces.recording import Recording

from .episodes import TextEpisode, import_episodes
from .files import read_lines
from .formats import FileHead, Importer
from .options import ImportOptions
from .reading import Record, parse_record

ROLES = ("prompt", "gen", "context")


def recognise(head: FileHead) -> str | None:
    return head.reason("JSON lines", "task_id", "prompt", "completion", "seqlen")


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read samples: `task_id` is the group, a line is a trajectory and one sample."""
    notes = ["decoded text, so token borders are approximate; policy versions are not kept"]
    return import_episodes(paths, options, read_lines, _sample, notes, "traj")


AREAL = Importer(
    "JSON lines with 'task_id', 'prompt', 'completion' and 'seqlen'", recognise, read, ("traj",)
)


def _sample(where: str, line: bytes) -> TextEpisode:
    record = parse_record(where, line)
    group = record.label("task_id")
    if record.has("segments"):
        turns = [_turn(segment) for segment in record.children("segments", "segment")]
    else:
        turns = [Turn((record.text("prompt"),), (record.text("completion"),))]
    return TextEpisode(where, group, record.number("reward"), turns, is_one_sample=True)


def _turn(segment: Record) -> Turn:
    role = segment.text("role")
    if role not in ROLES:
        raise segment.error("role", f"is {role!a}, known are {', '.join(ROLES)}")
    text = segment.text("text")
    return Turn((), (text,)) if role == "gen" else Turn((text,))

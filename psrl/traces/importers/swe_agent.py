"""SWE-agent trajectories: one `.traj` file (JSON) per run of an instance.

`history` is the conversation at the end of the run; `trajectory` the steps, with
`execution_time` and, in some versions, the messages of each model call (`query` or `messages`).
"""

from collections.abc import Iterator
from pathlib import Path

from psrl.core.errors import TraceError
from psrl.traces.chat_template import Message, render
from psrl.traces.recording import Recording

from .episodes import CHAT_MODES, CallTimes, TextEpisode, import_episodes
from .files import read_bytes
from .formats import FileHead, Importer
from .messages import CHAT_NOTE, parse_messages
from .options import ImportOptions
from .reading import SKIP_HINT, Record, parse_json

QUERY_FIELDS = ("query", "messages")


def recognise(head: FileHead) -> str | None:
    if head.has("history", "info"):
        return head.reason("one JSON object", "history", "info")
    return head.reason("one JSON object", "trajectory", "info")


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read runs: the file's name is the instance and the semantic group, a file is a trajectory."""
    notes = [CHAT_NOTE, "tool schemas are not recorded"]
    return import_episodes(paths, options, _places, _episode, notes)


SWE_AGENT = Importer(
    "a JSON object per file with 'info' and 'history' or 'trajectory' (.traj)",
    recognise,
    read,
    CHAT_MODES,
)


def _places(path: Path) -> Iterator[tuple[str, Path]]:
    yield str(path), path


def _episode(where: str, path: Path) -> TextEpisode:
    record = Record.of(parse_json(read_bytes(path), where), where)
    steps = record.children("trajectory", "step") if record.has("trajectory") else []
    group = path.name.split(".traj")[0]
    field = next((name for name in QUERY_FIELDS if steps and all(s.has(name) for s in steps)), None)
    if field is not None:
        separate = [
            render([*parse_messages(step, field), Message("assistant", step.text("response"))])
            for step in steps
        ]
        return TextEpisode(where, group, float("nan"), separate=separate, times=_times(steps))
    if not record.has("history"):
        raise TraceError(
            f"{where}: neither 'history' nor the messages of each step are recorded", SKIP_HINT
        )
    messages = parse_messages(record, "history")
    calls = [m for m in messages if m.role == "assistant" and m.is_trained]
    times = _times(steps) if len(steps) == len(calls) else []
    return TextEpisode(where, group, float("nan"), render(messages), times=times)


def _times(steps: list[Record]) -> list[CallTimes]:
    """The tool of a step runs between its call and the next one."""
    ran_s = [step.number("execution_time", 0) for step in steps]
    return [CallTimes(environment_s=t) for t in [float("nan"), *ran_s[:-1]]]

"""ReAct WebShop logs: text, episodes between lines of dashes.

An episode starts with its number and the action `reset`; then `Action: ...` is what the model
wrote and `Observation: ...`, up to the next action, what the shop answered.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from psrl.core.errors import TraceError
from psrl.traces.chat_template import Turn
from psrl.traces.recording import Recording

from .episodes import TextEpisode, import_episodes
from .files import read_lines
from .formats import FileHead, Importer
from .options import ImportOptions
from .reading import SKIP_HINT

SEPARATOR = re.compile(rb"-{17}")
ACTION = re.compile(r"^Action: (.*)$", re.MULTILINE)
SCORE = re.compile(r"Your score \(min 0\.0, max 1\.0\): ([0-9.]+)\s*$")
# Running averages that the log prints after an episode.
TRAILER = re.compile(r"\n\d+ [\d.]+ [\d.]+ [\d.]+\n-{13}\s*$")


def recognise(head: FileHead) -> str | None:
    lines = head.start.split("\n")[:4]
    if SEPARATOR.fullmatch(lines[0].strip().encode()) and "Action: reset" in (
        x.strip() for x in lines
    ):
        return "a text log that starts with a line of dashes and 'Action: reset'"
    return None


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read episodes: the instruction's number is the semantic group, the score the reward.

    An episode that bought nothing has no score and the reward 0, as in the log's own averages.
    """
    prompt = options.prompt_text()
    notes = ["an action line is one response", "the 6400-character window of the run is ignored"]
    notes.append("with the given prompt" if prompt else "the few-shot prompt is not in the log")

    def parse(where: str, data: bytes) -> TextEpisode:
        try:
            return _episode(where, data.decode("utf-8"), prompt)
        except UnicodeDecodeError as error:
            raise TraceError(
                f"{where}: invalid UTF-8, {error.start} bytes into the episode", SKIP_HINT
            ) from None

    return import_episodes(paths, options, _places, parse, notes)


REACT_WEBSHOP = Importer(
    "a text log that starts with a line of dashes and 'Action: reset'",
    recognise,
    read,
    takes=frozenset({"prompt_file"}),
)


def _places(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each episode and the line where it starts."""
    start, lines = "", list[bytes]()
    for where, line in read_lines(path, keep_blank=True):
        if SEPARATOR.fullmatch(line.strip()):
            if start:
                yield start, b"\n".join(lines)
            start, lines = where, []
        else:
            lines.append(line.rstrip(b"\r"))
    if not start:
        raise TraceError(f"{path}: no line of dashes, so no episode", "choose another format")
    yield start, b"\n".join(lines)


def _episode(where: str, text: str, prompt: str) -> TextEpisode:
    number, _, rest = TRAILER.sub("", text).strip("\n").partition("\n")
    actions = list(ACTION.finditer(rest))
    if not number.isdigit() or not actions or actions[0][1] != "reset":
        raise TraceError(
            f"{where}: an episode starts with its number and 'Action: reset', found {text[:60]!a}",
            SKIP_HINT,
        )
    ends = [match.start() for match in actions[1:]] + [len(rest)]
    said = [rest[m.end() : end].strip("\n") for m, end in zip(actions, ends, strict=True)]
    observations = [reply.removeprefix("Observation: ") for reply in said]
    turns = [Turn((f"{prompt}{observations[0]}\n\nAction:",))]
    for action, observation in zip(actions[1:], observations[1:], strict=True):
        after = f"\nObservation: {observation}\n\nAction:"
        turns.append(Turn((), (f" {action[1]}\n",), (after.removeprefix("\n"),)))
    score = SCORE.search(observations[-1])
    return TextEpisode(where, number, float(score[1]) if score else 0.0, turns)

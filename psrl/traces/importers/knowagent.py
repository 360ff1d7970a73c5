"""KnowAgent rollouts as JSON lines: ALFWorld (`name`, `traj`) and HotpotQA (`question`, `prompt`).

Both hold one text per episode. In ALFWorld lines that start with `>` were written by the model;
in HotpotQA what stands between observations.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from psrl.core.errors import TraceError
from psrl.traces.chat_template import Turn
from psrl.traces.recording import Recording

from .episodes import TextEpisode, import_episodes
from .files import read_lines
from .formats import FileHead, Importer
from .options import ImportOptions
from .reading import SKIP_HINT, Record, parse_record
from .samples import text_digest

OBSERVATION = re.compile(r"^Observation \d+: ?", re.MULTILINE)
FIRST_STEP = re.compile(r"^(?:ActionPath|Thought|Action) 1:", re.MULTILINE)
NEXT_STEP = re.compile(r"\n(?=(?:ActionPath|Thought|Action) \d+:)")


def recognise_alfworld(head: FileHead) -> str | None:
    return head.reason("JSON lines", "name", "result", "traj")


def recognise_hotpotqa(head: FileHead) -> str | None:
    return head.reason("JSON lines", "question", "answer", "prompt", "halted")


def read_alfworld(paths: list[Path], options: ImportOptions) -> Recording:
    """Read episodes: the game (`name`) is the semantic group, success the reward.

    Filtered copies of a rollout file are common: a line that occurs twice counts once.
    """
    prompt = options.prompt_text()
    notes = ["consecutive lines of the model are one response"]
    notes.append("with the given prompt" if prompt else "the few-shot prompt is not in the log")
    seen: set[bytes] = set()
    num_repeated = 0

    def places(path: Path) -> Iterator[tuple[str, bytes]]:
        nonlocal num_repeated
        for where, line in read_lines(path):
            digest = sha256(line.strip()).digest()
            if digest in seen:
                num_repeated += 1
            else:
                seen.add(digest)
                yield where, line

    def parse(where: str, line: bytes) -> TextEpisode:
        record = parse_record(where, line)
        turns = _alfworld_turns(prompt, record.text("traj"))
        return TextEpisode(where, record.text("name"), _reward(record, "result"), turns)

    recording = import_episodes(paths, options, places, parse, notes)
    repeated = f"{num_repeated} lines that occur more than once count once"
    return replace(recording, notes=f"{recording.notes}; {repeated}") if num_repeated else recording


def read_hotpotqa(paths: list[Path], options: ImportOptions) -> Recording:
    """Read episodes: the question is the semantic group, `reward` the reward."""
    notes = ["what stands between two observations is one response"]

    def parse(where: str, line: bytes) -> TextEpisode:
        record = parse_record(where, line)
        turns = _hotpotqa_turns(record)
        group = text_digest(record.text("question"))
        return TextEpisode(where, group, record.number("reward"), turns)

    return import_episodes(paths, options, read_lines, parse, notes)


KNOWAGENT_ALFWORLD = Importer(
    "JSON lines with 'name', 'result' and 'traj'",
    recognise_alfworld,
    read_alfworld,
    takes=frozenset({"prompt_file"}),
)
KNOWAGENT_HOTPOTQA = Importer(
    "JSON lines with 'question', 'answer', 'prompt' and 'halted'",
    recognise_hotpotqa,
    read_hotpotqa,
)


def _reward(record: Record, name: str) -> float:
    value = record.values.get(name)
    return float(value) if isinstance(value, bool) else record.number(name)


def _alfworld_turns(prompt: str, text: str) -> list[Turn]:
    turns: list[Turn] = []
    context, response = prompt, ""
    for line in text.splitlines(keepends=True):
        if line.startswith(">"):
            response += line
            continue
        if response:
            turns.append(Turn((context,), (response,)))
            context, response = "", ""
        context += line
    return [*turns, Turn((context,), (response,) if response else ())]


def _hotpotqa_turns(record: Record) -> list[Turn]:
    text = record.text("prompt")
    start = text.rfind(f"Question: {record.text('question')}")
    first = FIRST_STEP.search(text, max(start, 0))
    if start < 0 or first is None:
        raise TraceError(
            f"{record.where}: field 'prompt' does not hold the question and a first step", SKIP_HINT
        )
    turns: list[Turn] = []
    before, position = text[: first.start()], first.start()
    while position < len(text):
        observation = OBSERVATION.search(text, position)
        end = observation.start() if observation else len(text)
        turns.append(Turn((before,), (text[position:end],)))
        following = NEXT_STEP.search(text, end)
        position = following.end() if following else len(text)
        before = text[end:position]
    return [*turns, Turn((before,))] if before else turns

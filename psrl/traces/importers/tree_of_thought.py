"""Tree-of-thought logs: a JSON list of breadth-first searches, one per puzzle.

An element holds `steps`; step t holds the puzzle `x`, the kept texts `ys`, and `new_ys`, each one
of them with a further thought. `ys` and `infos` of the element are the final texts and results.
"""

from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from psrl.core.errors import TraceError
from psrl.traces.recording import Recording
from psrl.traces.tokenizer import Tokenizer, load_tokenizer

from .assemble import assemble
from .files import read_bytes
from .formats import FileHead, Importer
from .options import ImportOptions
from .reading import BadRecords, Record, check_text, kind_of, parse_each, parse_json
from .samples import RecordedSample, text_digest
from .tree_paths import TREE_MODES, TreeNode, encode, text_node, tree_samples


def recognise(head: FileHead) -> str | None:
    value = head.value
    if isinstance(value, list) and value and isinstance(value[0], dict):
        steps = value[0].get("steps")
        if (
            isinstance(steps, list)
            and steps
            and isinstance(steps[0], dict)
            and "new_ys" in steps[0]
        ):
            return "a JSON list of objects with 'steps' that hold 'new_ys'"
    return None


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read searches: the puzzle is the semantic group, a search is a trajectory.

    Raises:
        TraceError: at the first malformed search, unless `options.skip_bad`.
        ConfigError: if the tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    mode = options.mode or TREE_MODES[0]
    prompt = options.prompt_text()
    bad = BadRecords(options.skip_bad)
    seen: dict[str, int] = {}

    def parse(where: str, value: Any) -> list[RecordedSample]:
        return _search(Record.of(value, where), tokenizer, prompt, mode, seen)

    searches = parse_each(paths, options.limit, bad, _places, parse)
    samples = [sample for search in searches for sample in search]
    notes = [
        f"tokenizer {tokenizer.name}",
        "a thought is taken as one response; calls that proposed several at once, calls that "
        "valued them and the prompts around the puzzle are not in the log",
    ]
    return assemble(samples, None, paths, options, bad, notes, mode)


TREE_OF_THOUGHT = Importer(
    "a JSON list of objects with 'steps' that hold 'new_ys'",
    recognise,
    read,
    TREE_MODES,
    frozenset({"prompt_file"}),
)


def _places(path: Path) -> Iterator[tuple[str, Any]]:
    values = parse_json(read_bytes(path), str(path))
    if not isinstance(values, list):
        raise TraceError(f"{path}: expected a JSON list of searches", "choose another format")
    for position, value in enumerate(values):
        yield f"{path} search {position}", value


def _search(
    record: Record, tokenizer: Tokenizer, prompt: str, mode: str, seen: dict[str, int]
) -> list[RecordedSample]:
    steps = record.children("steps", "step")
    if not steps:
        raise record.error("steps", "is empty")
    puzzle = steps[0].text("x")
    root = encode(tokenizer, [f"{prompt}{puzzle}\n"], record.where)
    nodes = [text_node(-1, (root, False))]
    index = {"": 0}
    for step in steps:
        known = [text for text in _texts(step, "ys") if text in index]
        for text in _texts(step, "new_ys"):
            parent = max((y for y in known if text.startswith(y)), key=len, default=None)
            if parent is None:
                raise step.error("new_ys", f"has {text[:60]!a}, which continues none of 'ys'")
            if text not in index and len(text) > len(parent):
                thought = encode(tokenizer, [text[len(parent) :]], step.where)
                index[text] = len(nodes)
                nodes.append(text_node(index[parent], (thought, True)))
    return _samples(record, puzzle, nodes, mode, seen)


def _samples(
    record: Record, puzzle: str, nodes: list[TreeNode], mode: str, seen: dict[str, int]
) -> list[RecordedSample]:
    group = text_digest(puzzle)
    template = RecordedSample(
        symbols=np.empty(0, np.int64),
        loss_spans=(),
        group_id=group,
        trajectory_id=f"{group}/{seen.get(group, 0)}",
        reward=_reward(record),
    )
    samples = tree_samples(nodes, mode, template)
    seen[group] = seen.get(group, 0) + 1
    return samples


def _reward(record: Record) -> float:
    """Best result `r` of the search; NaN if none is recorded."""
    infos = record.children("infos", "info") if record.has("infos") else []
    return max((info.number("r") for info in infos if info.has("r")), default=nan)


def _texts(record: Record, name: str) -> list[str]:
    texts = record.items(name)
    for text in texts:
        if not isinstance(text, str):
            raise record.error(name, f"must hold strings, found {kind_of(text)}")
        check_text(text, f"{record.where}: field '{name}'")
    return texts

"""prime-rl / verifiers traces: JSON lines of message graphs with token ids, already a tree.

A line is an episode with `traces`, or one trace. A trace holds `nodes`; a node adds `token_ids`
to those of its `parent`, `mask` tells which of them were sampled, and `advantages` holds one
number per sampled token.
"""

import re
from collections.abc import Iterator
from math import nan
from pathlib import Path

import numpy as np

from psrl.core.samples.sample import FloatArray
from psrl.traces.recording import Recording

from .assemble import assemble
from .files import read_lines
from .formats import FileHead, Importer
from .options import ImportOptions
from .reading import BadRecords, BoolArray, Record, parse_each, parse_record
from .samples import RecordedSample, text_digest
from .tree_paths import TREE_MODES, TreeNode, tree_samples

STEP_IN_PATH = re.compile(r"step_(\d{1,9})$")


def recognise(head: FileHead) -> str | None:
    if head.has("nodes", "task"):
        return head.reason("JSON lines", "nodes", "task")
    return head.reason("JSON lines", "traces", "task")


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read traces: the group is the episode's, else the task; a trace is a trajectory.

    The RL iteration is the number in a folder `step_N` above the file.

    Raises:
        TraceError: at the first malformed line, unless `options.skip_bad`.
    """
    bad = BadRecords(options.skip_bad)
    mode = options.mode or TREE_MODES[0]

    def parse(where: str, raw: tuple[int | None, bytes]) -> list[RecordedSample]:
        return _episode(parse_record(where, raw[1]), raw[0], mode)

    episodes = parse_each(paths, options.limit, bad, _places, parse)
    samples = [sample for episode in episodes for sample in episode]
    notes = ["token ids as recorded; advantages are means over the trained tokens of a sample"]
    return assemble(samples, None, paths, options, bad, notes, mode)


VERIFIERS = Importer("JSON lines with 'traces' or 'nodes'", recognise, read, TREE_MODES)


def _places(path: Path) -> Iterator[tuple[str, tuple[int | None, bytes]]]:
    matches = (STEP_IN_PATH.match(parent.name) for parent in path.parents)
    iteration = next((int(match[1]) for match in matches if match), None)
    for where, line in read_lines(path):
        yield where, (iteration, line)


def _episode(record: Record, iteration: int | None, mode: str) -> list[RecordedSample]:
    traces = record.children("traces", "trace") if record.has("traces") else [record]
    samples: list[RecordedSample] = []
    for trace in traces:
        template = RecordedSample(
            symbols=np.empty(0, np.int64),
            loss_spans=(),
            group_id=_group(record, trace),
            trajectory_id=trace.label("id"),
            reward=_reward(trace),
            iteration=iteration,
        )
        nodes = [_node(node, index) for index, node in enumerate(trace.children("nodes", "node"))]
        samples += tree_samples(nodes, mode, template)
    return samples


def _group(episode: Record, trace: Record) -> str:
    if isinstance(episode.values.get("group"), str | int):
        return episode.label("group")
    task = trace.values.get("task") or episode.values.get("task")
    if isinstance(task, dict):
        task = next((task[n] for n in ("key", "hash") if isinstance(task.get(n), str)), task)
    return task if isinstance(task, str) and len(task) <= 40 else text_digest(ascii(task))


def _reward(trace: Record) -> float:
    """Sum of the weighted rewards; NaN when none was scored."""
    if not trace.has("rewards"):
        return nan
    rewards = trace.child("rewards")
    parts: list[float] = []
    for name in filter(rewards.has, rewards.values):
        if isinstance(rewards.get(name), dict):
            scored = rewards.child(name)
            weight = scored.number("weight") if scored.has("weight") else 1.0
            parts.append(scored.number("score") * weight)
        else:
            parts.append(rewards.number(name))
    return sum(parts) if parts else nan


def _node(node: Record, index: int) -> TreeNode:
    parent = node.integer("parent", -1) if node.has("parent") else -1
    if parent >= index:
        raise node.error("parent", f"is {parent}, but only {index} nodes stand before it")
    tokens = node.token_ids("token_ids") if node.has("token_ids") else np.empty(0, np.int64)
    trained = np.zeros(len(tokens), np.bool_)
    if node.has("mask"):
        trained = node.mask("mask", len(tokens))
    return TreeNode(parent, tokens, trained, _advantages(node, trained))


def _advantages(node: Record, trained: BoolArray) -> FloatArray:
    """[n] advantage of each token; NaN without any."""
    advantage = np.full(len(trained), nan)
    if node.has("advantages"):
        values = node.numbers("advantages")
        if len(values) != int(trained.sum()):
            raise node.error(
                "advantages", f"has {len(values)} entries for {int(trained.sum())} sampled tokens"
            )
        advantage[trained] = values
    return advantage

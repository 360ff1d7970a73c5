"""ToolBench answers found by depth-first search: one JSON file per question.

`tree.tree` is the root; a node holds `node_type` (Thought, Action, Action Input), `description`,
`observation` and `children`. `answer_generation` may hold the messages before the root.
"""

from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from psrl.traces.chat_template import Message, Turn, render
from psrl.traces.recording import Recording
from psrl.traces.tokenizer import Tokenizer, load_tokenizer

from .assemble import assemble
from .files import read_bytes
from .formats import FileHead, Importer
from .options import ImportOptions
from .reading import BadRecords, Record, parse_each, parse_json
from .samples import RecordedSample
from .tree_paths import TREE_MODES, TreeNode, encode, text_node, tree_samples

NODE_TYPES = ("Thought", "Action", "Action Input", "Final Answer", "Reflection")


def recognise(head: FileHead) -> str | None:
    if (
        head.has("tree", "win")
        and isinstance(head.value["tree"], dict)
        and "tree" in head.value["tree"]
    ):
        return "one JSON object with 'win' and 'tree'"
    return None


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read search trees: the file's name is the semantic group, a file is a trajectory.

    Raises:
        TraceError: at the first malformed file, unless `options.skip_bad`.
        ConfigError: if the tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    mode = options.mode or TREE_MODES[0]
    prompt = options.prompt_text()
    bad = BadRecords(options.skip_bad)
    seen: dict[str, int] = {}

    def parse(where: str, path: Path) -> list[RecordedSample]:
        record = Record.of(parse_json(read_bytes(path), where), where)
        nodes = _Tree(tokenizer).read(record, prompt)
        group = path.name.split(".")[0]
        template = RecordedSample(
            symbols=np.empty(0, np.int64),
            loss_spans=(),
            group_id=group,
            trajectory_id=f"{group}/{seen.get(group, 0)}",
            reward=float(record.get("win")) if isinstance(record.get("win"), bool) else nan,
        )
        samples = tree_samples(nodes, mode, template)
        seen[group] = seen.get(group, 0) + 1
        return samples

    answers = parse_each(paths, options.limit, bad, _places, parse)
    samples = [sample for answer in answers for sample in answer]
    notes = [
        f"tokenizer {tokenizer.name}",
        "a response is the text from one observation to the next; prompts that asked for a "
        "different answer than before are not in the recording",
    ]
    return assemble(samples, None, paths, options, bad, notes, mode)


TOOLBENCH = Importer(
    "a JSON object per file with 'win' and 'tree'",
    recognise,
    read,
    TREE_MODES,
    frozenset({"prompt_file"}),
)


def _places(path: Path) -> Iterator[tuple[str, Path]]:
    yield str(path), path


class _Tree:
    """Collects the nodes of one search, a response with its observation as one node."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.nodes: list[TreeNode] = []

    def read(self, record: Record, prompt: str) -> list[TreeNode]:
        turns = render(_prompt(record, prompt))
        tokens = [encode(self.tokenizer, turn.before, record.where) for turn in turns]
        self.nodes.append(text_node(-1, *((t, False) for t in tokens)))
        tree = record.child("tree")
        stack = [(child, 0) for child in _children(tree.child("tree"))[::-1]]
        while stack:
            first, parent = stack.pop()
            call, last = self._call(first)
            self.nodes.append(self._node(call, last, parent))
            index = len(self.nodes) - 1
            stack += [(child, index) for child in _children(last)[::-1]]
        return self.nodes

    def _call(self, first: Record) -> tuple[str, Record]:
        """Text from a node to the next observation, branch or end, and the node there."""
        text, node = _text(first), first
        while not _observation(node) and len(_children(node)) == 1:
            node = _children(node)[0]
            text += _text(node)
        return text, node

    def _node(self, call: str, last: Record, parent: int) -> TreeNode:
        answer = render([Message("assistant", call)])[1]
        parts = [(answer.before, False), (answer.response, True), (answer.after, False)]
        if _observation(last):
            reply: Turn = render([Message("tool", _observation(last))])[1]
            parts.append((reply.before, False))
        pieces = ((encode(self.tokenizer, p, last.where), trained) for p, trained in parts)
        return text_node(parent, *pieces)


def _prompt(record: Record, prompt: str) -> list[Message]:
    """Messages before the root: those of the recorded answer, else the question alone."""
    answer = record.child("answer_generation") if record.has("answer_generation") else record
    messages: list[Message] = []
    chains: list[Any] = answer.items("train_messages") if answer.has("train_messages") else []
    if chains and isinstance(chains[0], list):
        first = Record(answer.where, {"messages": chains[0]})
        for message in first.children("messages", "message"):
            role = message.text("role")
            if role not in ("system", "user"):
                break
            messages.append(
                Message("system" if role == "system" else "user", message.text("content"))
            )
    elif answer.has("query"):
        messages.append(Message("user", answer.text("query")))
    if prompt:
        messages.insert(0, Message("system", prompt))
    return messages


def _children(node: Record) -> list[Record]:
    return node.children("children", "child") if node.has("children") else []


def _observation(node: Record) -> str:
    return node.text("observation") if node.has("observation") else ""


def _text(node: Record) -> str:
    kind = node.text("node_type")
    if kind not in NODE_TYPES:
        raise node.error("node_type", f"is {kind!a}, known are {', '.join(NODE_TYPES)}")
    return f"{kind}: {node.text('description')}\n"

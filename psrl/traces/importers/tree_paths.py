"""Samples of a recorded tree of thoughts or messages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from psrl.core.samples.sample import FloatArray, IntArray
from psrl.traces.chat_template import Piece
from psrl.traces.tokenizer import Tokenizer

from .reading import BoolArray, located
from .samples import RecordedSample, spans_of

TREE_MODES = ("tree", "tree_step")


@dataclass(frozen=True)
class TreeNode:
    """Tokens that one node adds to its parent's path.

    Attributes:
        parent: index of an earlier node; -1 for a root.
        tokens: [n] token ids.
        trained: [n] which of them the model wrote.
        advantage: [n] of each token; NaN where none is recorded.
    """

    parent: int
    tokens: IntArray
    trained: BoolArray
    advantage: FloatArray


def encode(tokenizer: Tokenizer, pieces: Sequence[Piece], where: str) -> IntArray:
    """Token ids of text; errors name `where`."""
    with located(where):
        return tokenizer.encode(pieces)


def text_node(parent: int, *parts: tuple[IntArray, bool]) -> TreeNode:
    """A node of pieces of tokens, each trained or not; no advantage is recorded."""
    tokens = np.concatenate([np.empty(0, np.int64), *(t for t, _ in parts)]).astype(np.int64)
    trained = np.repeat([flag for _, flag in parts], [len(t) for t, _ in parts]).astype(np.bool_)
    return TreeNode(parent, tokens, trained, np.full(len(tokens), np.nan))


def tree_samples(
    nodes: Sequence[TreeNode], mode: str, template: RecordedSample
) -> list[RecordedSample]:
    """Samples of a tree, in the order of the nodes at which they end.

    tree: every path from a root to a leaf; a node is trained in the first path through it.
    tree_step: every node with trained tokens, after the path to it.

    Args:
        nodes: parents before children.
        mode: "tree" or "tree_step".
        template: group, trajectory, reward and iteration of all samples.
    """
    parents = {node.parent for node in nodes}
    written = [bool(node.trained.any()) for node in nodes]
    trained_before: set[int] = set()
    samples: list[RecordedSample] = []
    for end in range(len(nodes)):
        if end in parents if mode == "tree" else not written[end]:
            continue
        path = _path(nodes, end)
        new = [i for i in path if written[i] and i not in trained_before]
        if mode == "tree_step":
            new = [end]
        elif not new:
            continue
        trained_before.update(new)
        tokens = np.concatenate([nodes[i].tokens for i in path])
        starts = dict(
            zip(path, np.cumsum([0, *(len(nodes[i].tokens) for i in path)]), strict=False)
        )
        # A span per node keeps the border between responses without context between them.
        spans = tuple(s for i in new for s in spans_of(nodes[i].trained, int(starts[i])))
        advantage = np.concatenate([nodes[i].advantage[nodes[i].trained] for i in new])
        sample = replace(
            template,
            symbols=tokens,
            loss_spans=spans,
            agent_step=sum(written[i] for i in path[: path.index(new[0])]),
            advantage=float(advantage.mean()),
        )
        samples.append(sample)
    return samples


def _path(nodes: Sequence[TreeNode], end: int) -> list[int]:
    path = [end]
    while nodes[path[-1]].parent >= 0:
        path.append(nodes[path[-1]].parent)
    return path[::-1]

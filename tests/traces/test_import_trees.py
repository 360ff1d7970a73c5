"""Importers of recorded trees: each response is trained once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import TraceError
from psrl.core.samples.sample import SampleBatch
from psrl.traces.importers import ImportOptions, import_recording
from psrl.traces.importers.samples import RecordedSample
from psrl.traces.importers.tree_paths import TreeNode, tree_samples


def symbols(batch: SampleBatch) -> list[list[int]]:
    return [batch.sample_symbols(s).tolist() for s in range(batch.num_samples)]


def spans(batch: SampleBatch) -> list[list[list[int]]]:
    return [batch.sample_loss_spans(s).tolist() for s in range(batch.num_samples)]


@pytest.fixture
def read(fixtures: Path, byte_tokenizer: str) -> Any:
    def read_file(name: str, mode: str | None = None) -> SampleBatch:
        options = ImportOptions(tokenizer=byte_tokenizer, mode=mode)
        recording = import_recording([fixtures / name], None, options)
        assert recording.sampling_mode == (mode or "tree")
        return recording.batches[0]

    return read_file


def trained_texts(batch: SampleBatch) -> list[list[str]]:
    """Trained ranges as text; the token ids are bytes of plain letters."""
    letters = byte_letters()
    return [
        ["".join(letters[i] for i in row[start:end]) for start, end in ranges]
        for row, ranges in zip(symbols(batch), spans(batch), strict=True)
    ]


def byte_letters() -> dict[int, str]:
    tokenizers = pytest.importorskip("tokenizers")
    letters = dict(enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())))
    special = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    shown = {i: {"\u0120": " ", "\u010a": "\n"}.get(c, c) for i, c in letters.items()}
    return shown | {256 + i: text for i, text in enumerate(special)}


def test_tree_of_thought(read: Any) -> None:
    batch = read("game24.json")
    assert trained_texts(batch) == [
        ["4 + 5 = 9\n", "9 + 6 = 15\n"],
        ["9 - 6 = 3\n"],  # its first thought was trained in the path before
        ["10 - 4 = 6\n", "6 * 6 = 36\n"],
        ["1 * 2 = 2\n"],
    ]
    puzzles = ["4 5 6 10\n"] * 3 + ["1 2 3 4\n"]
    paths = ["4 + 5 = 9\n9 + 6 = 15\n", "4 + 5 = 9\n9 - 6 = 3\n", "10 - 4 = 6\n6 * 6 = 36\n"]
    paths.append("1 * 2 = 2\n")
    whole = [puzzle + path for puzzle, path in zip(puzzles, paths, strict=True)]
    assert batch.num_tokens.tolist() == [len(text) for text in whole]
    assert batch.agent_step.tolist() == [0, 1, 0, 0]
    assert batch.reward.tolist() == [0, 0, 0, 1]
    first, second = dict.fromkeys(batch.group_id.tolist())
    assert batch.group_id.tolist() == [first] * 3 + [second]
    assert len(set(batch.trajectory_id.tolist())) == 2


def test_tree_of_thought_steps(read: Any) -> None:
    batch = read("game24.json", "tree_step")
    assert trained_texts(batch) == [
        ["4 + 5 = 9\n"],
        ["10 - 4 = 6\n"],
        ["9 + 6 = 15\n"],
        ["9 - 6 = 3\n"],
        ["6 * 6 = 36\n"],
        ["1 * 2 = 2\n"],
    ]
    assert batch.loss_tokens == read("game24.json").loss_tokens


def test_a_thought_that_continues_nothing_is_an_error(tmp_path: Path, byte_tokenizer: str) -> None:
    path = tmp_path / "t.json"
    step = {"x": "q", "ys": [""], "new_ys": ["a"]}
    path.write_text(json.dumps([{"steps": [step, {**step, "ys": ["a"], "new_ys": ["b"]}]}]))
    with pytest.raises(
        TraceError, match="search 0 step 1: field 'new_ys' has 'b', which continues"
    ):
        import_recording([path], None, ImportOptions(tokenizer=byte_tokenizer))


def test_toolbench(read: Any) -> None:
    batch = read("toolbench.json")
    ask = 'Thought: Ask.\nAction: weather\nAction Input: {"city": "A"}\n<|im_end|>'
    known = (
        'Thought: Known.\nAction: Finish\nAction Input: {"return_type": "give_answer"}\n<|im_end|>'
    )
    other = 'Action: weather\nAction Input: {"city": "B"}\n<|im_end|>'
    assert trained_texts(batch) == [[ask, known], [other], ["Thought: Give up.\n<|im_end|>"]]
    assert batch.agent_step.tolist() == [0, 1, 0]
    assert batch.reward.tolist() == [1, 1, 1]
    assert set(batch.group_id.tolist()) == {"toolbench"}
    steps = read("toolbench.json", "tree_step")
    assert trained_texts(steps) == [[ask], [known], [other], ["Thought: Give up.\n<|im_end|>"]]
    letters = byte_letters()
    prompt = "".join(letters[i] for i in symbols(steps)[0][: spans(steps)[0][0][0]])
    assert prompt == (
        "<|im_start|>system\nYou are AutoGPT.<|im_end|>\n<|im_start|>user\nWeather in A?\nBegin!"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_verifiers_nodes(read: Any) -> None:
    batch = read("traces.jsonl")
    assert symbols(batch) == [
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
        [1, 2, 3, 4, 5, 6, 10, 11],
        [1, 2, 3, 4, 7],
    ]
    assert spans(batch) == [[[4, 6], [7, 9]], [[7, 8]], [[4, 5]]]
    assert batch.advantage[:2].tolist() == [0.75, -1.0]
    assert batch.reward[:2].tolist() == [2.5, 2.5]
    assert batch.group_id.tolist() == ["g1"] * 3
    assert batch.trajectory_id.tolist() == ["t1", "t1", "t2"]
    steps = read("traces.jsonl", "tree_step")
    assert spans(steps) == [[[4, 6]], [[7, 9]], [[7, 8]], [[4, 5]]]
    assert steps.advantage[:3].tolist() == [0.5, 1.0, -1.0]


def test_verifiers_step_folders_are_iterations(fixtures: Path, tmp_path: Path) -> None:
    for step in (10, 2):
        folder = tmp_path / "rollouts" / f"step_{step}" / "train" / "all"
        folder.mkdir(parents=True)
        trace = {"id": f"t{step}", "task": {}, "nodes": [{"parent": None, "token_ids": [step, 1]}]}
        trace["nodes"][0]["mask"] = [False, True]
        (folder / "traces.jsonl").write_text(json.dumps(trace))
    recording = import_recording([tmp_path / "rollouts"], None, ImportOptions())
    assert [symbols(b) for b in recording.batches] == [[[2, 1]], [[10, 1]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parent": 1}, "node 0: field 'parent' is 1, but only 0 nodes"),
        ({"parent": -2}, "field 'parent' is -2"),
        ({"mask": [True]}, "field 'mask' has 1 entries for 2 tokens"),
        ({"mask": [0, 2]}, "must hold 0 and 1, entry 1 is 2"),
        ({"mask": [0, float("nan")]}, "must hold 0 and 1, entry 1 is nan"),
        ({"token_ids": [1, -4]}, "negative token id -4"),
        ({"advantages": [1, 2]}, "has 2 entries for 1 sampled tokens"),
        ({"advantages": [float("inf")]}, "must hold finite numbers, entry 0 is inf"),
    ],
)
def test_verifiers_fields(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "traces.jsonl"
    node = {"parent": None, "token_ids": [1, 2], "mask": [False, True], **change}
    path.write_text(json.dumps({"id": "t", "task": {}, "nodes": [node]}))
    with pytest.raises(TraceError, match=message):
        import_recording([path], None, ImportOptions())


TEMPLATE = RecordedSample(np.empty(0, np.int64), (), "g", "t")


@given(st.data())
def test_every_trained_token_of_a_random_tree_is_trained_once(data: st.DataObject) -> None:
    nodes: list[TreeNode] = []
    for index in range(data.draw(st.integers(1, 8))):
        trained = data.draw(st.lists(st.booleans(), min_size=1, max_size=3))
        if index == 0:
            trained[0] = False  # the first token of a sample cannot be trained
        ids = np.arange(len(trained)) + 10 * index
        parent = data.draw(st.integers(0, index - 1)) if index else -1
        flags = np.array(trained, np.bool_)
        nodes.append(TreeNode(parent, ids, flags, np.full(len(trained), float(index))))
    expected = sorted(t for n in nodes for t in n.tokens[n.trained].tolist())
    for mode in ("tree", "tree_step"):
        found = [
            token
            for sample in tree_samples(nodes, mode, TEMPLATE)
            for start, end in sample.loss_spans
            for token in sample.symbols[start:end].tolist()
        ]
        assert sorted(found) == expected

"""Importers of recorded text: logs, chats and decoded rollouts."""

import json
from pathlib import Path
from typing import Any

import pytest

from psrl.core.errors import ConfigError, TraceError
from psrl.core.samples.sample import SampleBatch
from psrl.traces.importers import ImportOptions, import_recording
from psrl.traces.modes import derive
from psrl.traces.recording import Recording
from psrl.traces.stats import sharing_stats


@pytest.fixture
def read(fixtures: Path, byte_tokenizer: str) -> Any:
    """Reads a fixture with a vocabulary of bytes."""

    def read_file(name: str, **options: Any) -> Recording:
        made = ImportOptions(tokenizer=byte_tokenizer, **options)
        return import_recording([fixtures / name], None, made)

    return read_file


@pytest.fixture
def texts(byte_tokenizer: str) -> Any:
    """Texts of samples: the prompt of each, and what is trained."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(byte_tokenizer)

    def decode(batch: SampleBatch) -> list[tuple[str, list[str]]]:
        found = []
        for sample in range(batch.num_samples):
            ids = batch.sample_symbols(sample).tolist()
            spans = batch.sample_loss_spans(sample).tolist()
            parts = [ids[: spans[0][0]], *(ids[start:end] for start, end in spans)]
            prompt, *trained = (tokenizer.decode(p, skip_special_tokens=False) for p in parts)
            found.append((prompt, trained))
        return found

    return decode


def test_webshop_log(read: Any, texts: Any, tmp_path: Path) -> None:
    (batch,) = read("webshop.log").batches
    assert batch.group_id.tolist() == ["0", "0", "0", "1"]
    assert batch.agent_step.tolist() == [0, 1, 2, 0]
    assert batch.reward.tolist() == [0.5, 0.5, 0.5, 0]  # an episode without a score bought nothing
    found = texts(batch)
    assert [trained for _, trained in found] == [
        [" search[red mug]\n"],
        [" think[B01 is red.]\n"],
        [" click[Buy Now]\n"],
        [" search[blue mug]\n"],
    ]
    start = "\nWebshop \nInstruction:  \nred mug \n[Search] \n\nAction:"
    assert found[0][0] == start
    assert found[2][0] == (
        start + " search[red mug]\nObservation: \n[B01] \nRed Mug \n\nAction:"
        " think[B01 is red.]\nObservation: OK.\n\nAction:"
    )
    assert derive(batch, "traj").num_samples == 2
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Webshop example")
    (with_prompt,) = read("webshop.log", prompt_file=prompt).batches
    assert texts(with_prompt)[0][0] == "Webshop example" + start


def test_webshop_errors(tmp_path: Path, byte_tokenizer: str) -> None:
    path = tmp_path / "x.log"
    dashes = "-" * 17
    path.write_bytes(f"{dashes}\nx\nAction: reset\n".encode())
    options = ImportOptions(tokenizer=byte_tokenizer)
    with pytest.raises(TraceError, match=r"line 1: an episode starts with its number.*found 'x"):
        import_recording([path], None, options)
    path.write_bytes(f"{dashes}\n0\nAction: reset\n\xff".encode("latin1"))
    with pytest.raises(TraceError, match=r"line 1: invalid UTF-8, 16 bytes into the episode"):
        import_recording([path], None, options)
    path.write_text("hello\n")
    with pytest.raises(TraceError, match="no line of dashes"):
        import_recording([path], "react_webshop", options)


def test_alfworld(read: Any, texts: Any) -> None:
    recording = read("alfworld.jsonl")
    (batch,) = recording.batches
    assert batch.trajectory_id.tolist() == ["pick-Mug-1/0"] * 2 + ["pick-Mug-1/1"] * 2
    assert batch.reward.tolist() == [1, 1, 0, 0]
    assert "1 lines that occur more than once" in recording.notes
    first, second, _, last = texts(batch)
    assert first == (
        "You are in a room.\nYour task is to: find a mug.\n",
        ["> Think: Look on the desk.\n> go to desk 1\n"],
    )
    assert second[0] == first[0] + first[1][0] + "On the desk 1, you see a mug 1.\n"
    assert second[1] == ["> take mug 1 from desk 1\n"]
    assert last == (second[0], ["> Think: done"])


def test_hotpotqa_keeps_the_example_episodes_in_the_prompt(read: Any, texts: Any) -> None:
    (batch,) = read("hotpotqa.jsonl").batches
    few_shot = (
        "Question: Who?\nThought 1: Easy.\nAction 1: Finish[me]\n"
        "Observation 1: Answer is CORRECT\n\n"
    )
    first, second, third = texts(batch)
    assert first == (
        few_shot + "Question: Where?\n",
        ["ActionPath 1: Start\nThought 1: Look.\nAction 1: Search[x]\n"],
    )
    assert second[0] == first[0] + first[1][0] + "Observation 1: x is there.\n"
    assert second[1] == [
        "ActionPath 2: Start->Search[x]\nThought 2: Known.\nAction 2: Finish[there]\n"
    ]
    assert third[0] == few_shot + "Question: When?\n"
    assert batch.group_id[0] == batch.group_id[1] != batch.group_id[2]


def test_hotpotqa_needs_its_question_in_the_prompt(tmp_path: Path, byte_tokenizer: str) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text(
        '{"question": "Where?", "answer": "", "prompt": "Action 1: x", "halted": false}'
    )
    with pytest.raises(TraceError, match="line 1: field 'prompt' does not hold the question"):
        import_recording([path], None, ImportOptions(tokenizer=byte_tokenizer))


def test_fireact(read: Any, texts: Any) -> None:
    (batch,) = read("fireact.json").batches
    assert batch.group_id.tolist() == ["6238", "77", "77"]
    assert batch.reward.tolist() == [1, 0.5, 0.5]
    assert [trained for _, trained in texts(batch)] == [
        ["Thought: a.\nAction: finish[a]<|im_end|>"],
        ["Action: search[b]<|im_end|>"],
        ["Action: finish[c]<|im_end|>"],
    ]


def test_swe_agent_history(read: Any, texts: Any) -> None:
    (batch,) = read("run.traj").batches
    assert batch.group_id.tolist() == ["run", "run"]
    found = texts(batch)
    # The demonstration was not written by the model in this run.
    assert [trained for _, trained in found] == [
        ["List.\n```\nls\n```<|im_end|>"],
        ["Done.\n```\nsubmit\n```<|im_end|>"],
    ]
    assert "shown<|im_end|>" in found[0][0]
    assert batch.environment_s.tolist() == pytest.approx([float("nan"), 0.25], nan_ok=True)


def test_swe_agent_recorded_queries_show_rewrites(
    tmp_path: Path, byte_tokenizer: str, texts: Any
) -> None:
    path = tmp_path / "astropy-1.traj"
    user = {"role": "user", "content": "u"}
    steps = [
        {"query": [user, {"role": "user", "content": "long"}], "response": "a"},
        {"query": [user, {"role": "user", "content": "elided"}], "response": "b"},
    ]
    path.write_text(json.dumps({"trajectory": steps, "info": {}}))
    (batch,) = import_recording([path], None, ImportOptions(tokenizer=byte_tokenizer)).batches
    assert [trained for _, trained in texts(batch)] == [["a<|im_end|>"], ["b<|im_end|>"]]
    assert "long" not in texts(batch)[1][0]
    assert batch.group_id.tolist() == ["astropy-1"] * 2
    assert derive(batch, "traj").num_samples == 2


def test_verl_text(read: Any, texts: Any) -> None:
    recording = read("verl.jsonl")
    assert [b.group_id.tolist() for b in recording.batches] == [["u-1"] * 3, ["u-2"]]
    batch = recording.batches[0]
    assert batch.trajectory_id.tolist() == ["u-1_0", "u-1_1", "u-1_1"]
    assert batch.agent_step.tolist() == [0, 0, 1]
    assert recording.sampling_mode == "step"
    assert texts(batch)[0] == ("user\nq\nassistant\n", ["a"])
    with pytest.raises(ConfigError, match="2 iterations of its own"):
        read("verl.jsonl", groups_per_iteration=1)


def test_verl_text_without_uid_groups_by_input(tmp_path: Path, byte_tokenizer: str) -> None:
    path = tmp_path / "1.jsonl"
    rows = [{"input": i, "output": "o", "score": s} for i, s in (("p", 1), ("q", 0), ("p", 0))]
    path.write_text("\n".join(map(json.dumps, rows)))
    recording = import_recording([path], None, ImportOptions(tokenizer=byte_tokenizer))
    (batch,) = recording.batches
    first, second, third = batch.group_id.tolist()
    assert first == third != second
    assert (batch.advantage[0] > 0, batch.advantage[1], batch.advantage[2] < 0) == (True, 0, True)
    assert recording.sampling_mode == "traj"


def test_areal_segments_are_one_sample(read: Any, texts: Any) -> None:
    recording = read("areal.jsonl")
    (batch,) = recording.batches
    assert recording.sampling_mode == "traj"
    assert batch.trajectory_id.tolist() == ["5/0", "5/1"]
    assert texts(batch) == [("q", ["ab", "c"]), ("q", ["xy"])]
    assert batch.num_tokens.tolist() == [len("qab[tool]c"), len("qxy")]


def test_atif_text_with_reasoning_tools_and_subagents(
    fixtures: Path, tmp_path: Path, byte_tokenizer: str, texts: Any
) -> None:
    trajectory = json.loads((fixtures / "atif.json").read_text())
    del trajectory["steps"][3]["metrics"]  # one call without token ids: all is read as text
    path = tmp_path / "atif.json"
    path.write_text(json.dumps(trajectory))
    recording = import_recording([path], None, ImportOptions(tokenizer=byte_tokenizer))
    (batch,) = recording.batches
    assert "token ids are not recorded for every call" in recording.notes
    assert [trained for _, trained in texts(batch)] == [
        [
            "<think>\nUse the tool.\n</think>\n\n<tool_call>\n"
            '{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
        ],
        ["3.<|im_end|>"],
        ["Ok.<|im_end|>"],
    ]
    assert "<tool_response>\n3\n</tool_response>" in texts(batch)[1][0]
    assert len(set(batch.group_id.tolist())) == 1
    assert batch.reward.tolist() == [1, 1, 1]  # the subagent has its parent's


def test_step_rt_leaves_thinking_out_of_later_prompts(read: Any, texts: Any) -> None:
    whole = texts(read("thinking.jsonl").batches[0])
    recording = read("thinking.jsonl", mode="step_rt")
    assert recording.sampling_mode == "step_rt"
    assert "thinking of 2 responses" in recording.notes
    short = texts(recording.batches[0])
    # Every response keeps its own thinking.
    assert [trained for _, trained in short] == [trained for _, trained in whole]
    assert short[0][1] == ["<think>\nhm\n</think>\n\na<|im_end|>"]
    assert short[1][1] == ["<think>\nok\n</think>\n\nb<|im_end|>"]
    assert short[0][0] == whole[0][0]
    for (prompt, _), (full, _) in zip(short[1:], whole[1:], strict=True):
        thinking = full.replace("<think>\nhm\n</think>\n\n", "")
        assert prompt == thinking.replace("<think>\nok\n</think>\n\n", "")
        assert prompt != full


def test_step_s_uses_recorded_summaries_only(read: Any, texts: Any) -> None:
    whole = texts(read("thinking.jsonl").batches[0])
    recording = read("thinking.jsonl", mode="step_s")
    short = texts(recording.batches[0])
    assert short[:2] == whole[:2]
    assert short[2][0] == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nSo far: a, b.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert recording.sampling_mode == "step_s"
    with pytest.raises(TraceError, match="no message in 3 conversations is marked as a summary"):
        read("conversations.jsonl", mode="step_s")


def test_modes_that_a_format_does_not_offer(read: Any) -> None:
    with pytest.raises(ConfigError, match="mode 'step_rt' cannot be taken from react_webshop") as e:
        read("webshop.log", mode="step_rt")
    assert "modes of this format are step" in e.value.hint
    with pytest.raises(ConfigError, match="prompt_file p has no meaning for messages"):
        read("conversations.jsonl", prompt_file=Path("p"))


def test_prompts_of_one_task_are_shared_token_by_token(read: Any) -> None:
    """What one episode's call repeats of the call before is always a common prefix."""
    for name in ("webshop.log", "alfworld.jsonl", "hotpotqa.jsonl", "fireact.json", "run.traj"):
        (batch,) = read(name).batches
        merged = derive(batch, "traj")
        assert merged.num_samples == len(set(batch.trajectory_id.tolist())), name
        unique = sharing_stats(batch)["within_trajectory"]["unique_tokens"]
        assert unique == merged.logical_tokens, name

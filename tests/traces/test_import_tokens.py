"""Importers of token-level dumps: ids, masks, advantages and iterations as recorded."""

import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psrl.core.errors import ConfigError, PsrlError, TraceError
from psrl.core.samples.sample import SampleBatch
from psrl.traces.importers import ImportOptions, detect_format, import_recording
from psrl.traces.recording import Recording


def read(path: Path, **options: Any) -> Recording:
    return import_recording([path], None, ImportOptions(**options))


def rows(batch: SampleBatch) -> list[tuple[list[int], list[list[int]]]]:
    """Token ids and loss spans of each sample."""
    return [
        (batch.sample_symbols(s).tolist(), batch.sample_loss_spans(s).tolist())
        for s in range(batch.num_samples)
    ]


def test_azure_lengths_never_share(fixtures: Path) -> None:
    recording = read(fixtures / "azure.csv")
    (batch,) = recording.batches
    assert len(set(batch.symbols.tolist())) == len(batch.symbols) == 6
    assert batch.num_tokens.tolist() == [4818, 3188, 137]
    assert batch.loss_spans.tolist() == [[4808, 4818], [3180, 3188], [110, 137]]
    assert batch.arrival_s.tolist() == pytest.approx([0.5, 4.814579, 0])  # the last came first
    assert "sharing between requests is unknown" in recording.notes


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:15:46,0,1", "line 2: field 'ContextTokens' is '0'"),
        ("2023-11-16 18:15:46,1,-1", "line 2: field 'GeneratedTokens' is '-1'"),
        ("2023-11-16 18:15:46,nan,1", "field 'ContextTokens' is 'nan'"),
        ("2023-11-16 18:15:46,99999999999,1", "field 'ContextTokens' is '99999999999'"),
        ("yesterday,1,1", "line 2: field 'TIMESTAMP' is 'yesterday'"),
        ("2023-11-16 18:15:46,1", "line 2: 2 fields, expected 3"),
    ],
)
def test_azure_fields(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "a.csv"
    good = "2023-11-16 18:15:46+00:00,7,8"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\r\n{row}\r\n{good}\r\n")
    with pytest.raises(TraceError, match=message):
        read(path)
    recording = read(path, skip_bad=True)
    assert recording.batches[0].num_tokens.tolist() == [15]
    assert len(recording.skipped) == 1


def test_azure_needs_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("time,in,out\n1,2,3\n")
    with pytest.raises(TraceError, match="line 1: the columns are b'time,in,out'"):
        import_recording([path], "azure_llm", ImportOptions())


def test_nemo_rl(fixtures: Path) -> None:
    recording = read(fixtures / "train_data_step3.jsonl")
    (batch,) = recording.batches
    # Padding is cut off, and the sample without loss is left out.
    assert rows(batch) == [([1, 2, 3, 4, 5], [[2, 3], [4, 5]]), ([1, 2, 9], [[2, 3]])]
    assert batch.advantage.tolist() == [0.5, -0.5]
    assert batch.reward.tolist() == [1, 0]
    assert batch.group_id[0] == batch.group_id[1]
    assert recording.sampling_mode == "traj"
    assert "1 samples without a trained token left out" in recording.notes


def test_nemo_rl_says_when_token_advantages_differ(tmp_path: Path) -> None:
    path = tmp_path / "train_data_step1.jsonl"
    row = {"token_ids": [1, 2, 3], "token_loss_mask": [0, 1, 1], "advantages": [9, 1, 2]}
    path.write_text(json.dumps(row))
    recording = read(path)
    assert recording.batches[0].advantage.tolist() == [1.5]
    assert "differ between the tokens of 1 samples" in recording.notes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [1, 2.5]}, "entry 1 is 2.5"),
        ({"token_ids": [1, -2]}, "negative token id -2"),
        ({"token_ids": [1, 2**64]}, "must hold whole numbers of 64 bits"),
        ({"token_loss_mask": [1]}, "has 1 entries for 2 tokens"),
        ({"input_lengths": 3}, "'input_lengths' is 3, of 2 tokens"),
        ({"advantages": [1]}, "'advantages' has 1 entries for 2 tokens"),
        ({"advantages": "high"}, "'advantages' must be a number"),
        ({"rewards": [1]}, "'rewards' must be a number"),
    ],
)
def test_nemo_rl_fields(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "train_data_step1.jsonl"
    path.write_text(json.dumps({"token_ids": [1, 2], "token_loss_mask": [0, 1], **change}))
    with pytest.raises(TraceError, match=message):
        read(path)


def test_agent_lightning(fixtures: Path) -> None:
    recording = read(fixtures / "triplets.jsonl")
    (batch,) = recording.batches
    assert rows(batch) == [
        ([1, 2, 3], [[2, 3]]),
        ([1, 2, 3, 4, 5, 6], [[4, 6]]),
        ([1, 2, 7], [[2, 3]]),
    ]
    assert batch.trajectory_id.tolist() == ["r1", "r1", "r2"]
    assert batch.agent_step.tolist() == [0, 1, 0]
    assert batch.reward.tolist() == [1, 1, 0.25]
    assert set(batch.group_id.tolist()) == {"d1"}
    assert recording.sampling_mode == "step"


def test_atif_token_ids(fixtures: Path) -> None:
    recording = read(fixtures / "atif.json")
    (batch,) = recording.batches
    assert rows(batch) == [
        ([1, 2, 3], [[2, 3]]),
        ([1, 2, 3, 4, 5, 6], [[4, 6]]),
        ([9, 8], [[1, 2]]),
    ]
    assert batch.trajectory_id.tolist() == ["0", "0", "1"]
    with pytest.raises(ConfigError, match="mode step_rt needs text"):
        read(fixtures / "atif.json", mode="step_rt")


def test_atif_lines(fixtures: Path, tmp_path: Path) -> None:
    value = json.loads((fixtures / "atif.json").read_text())
    path = tmp_path / "many.jsonl"
    path.write_text(f"{json.dumps(value)}\n{{broken\n{json.dumps(value)}\n")
    recording = read(path, skip_bad=True)
    assert recording.batches[0].num_samples == 6
    assert len(recording.skipped) == 1


def test_verl_transfer_queue(fixtures: Path) -> None:
    recording = read(fixtures / "tq_batch.pt")
    (batch,) = recording.batches
    # The fourth sample only fills the batch.
    assert rows(batch) == [
        ([1, 2, 3, 4, 5], [[2, 3], [4, 5]]),
        ([1, 2, 6, 7], [[2, 4]]),
        ([1, 2, 3, 4, 5, 8, 9], [[6, 7]]),
    ]
    assert batch.group_id.tolist() == ["u-1"] * 3
    assert batch.trajectory_id.tolist() == ["u-1_0", "u-1_1", "u-1_0"]
    assert batch.agent_step.tolist() == [0, 0, 1]
    assert batch.reward.tolist() == [1, 0.5, 1]  # bfloat16 sums of the response
    assert recording.sampling_mode == "step"


@pytest.mark.parametrize("name", ["data_proto.pkl", "data_proto_numpy.pkl"])
def test_verl_data_proto(fixtures: Path, name: str) -> None:
    recording = read(fixtures / name)
    (batch,) = recording.batches
    # Padding on both sides is cut off.
    assert rows(batch) == [([1, 2, 3, 4], [[2, 4]]), ([9, 1, 2, 6], [[3, 4]])]
    assert batch.group_id.tolist() == ["task-a", "task-b"]
    assert batch.advantage.tolist() == [0.5, -0.5]
    assert batch.reward.tolist() == [1, 0.25]
    assert recording.sampling_mode == "traj"


@pytest.mark.parametrize(
    "name", ["real_tq_batch.pt", "real_data_proto.pkl", "real_data_proto_numpy.pkl"]
)
def test_dumps_of_the_real_verl_and_tensordict(fixtures: Path, name: str) -> None:
    recording = read(fixtures / name)
    (batch,) = recording.batches
    nested = name == "real_tq_batch.pt"
    assert rows(batch) == [
        ([11, 12, 13, 21, 22, 23, 24], [[3, 5], [6, 7]] if nested else [[3, 7]]),
        ([11, 12, 13, 21, 25], [[3, 5]]),
        ([11, 12, 13, 31, 32, 33], [[3, 6]]),
    ]
    assert batch.group_id.tolist() == ["a", "a", "b"]
    assert batch.reward.tolist() == ([1, 0, 0.5] if nested else [1, 0, 0])
    if not nested:
        assert batch.advantage.tolist() == [1, -1, 0]


def test_slime(fixtures: Path) -> None:
    recording = read(fixtures / "rollout_12.pt")
    (batch,) = recording.batches
    assert rows(batch) == [
        ([1, 2, 3, 4], [[2, 4]]),
        ([1, 2, 5, 6, 7], [[2, 3], [4, 5]]),
        ([1, 2, 5, 8], [[3, 4]]),
    ]
    assert batch.trajectory_id.tolist() == ["0/0", "0/s", "0/s"]
    assert batch.agent_step.tolist() == [0, 0, 1]
    assert batch.environment_s[1] == 0.5
    assert "1 samples without a trained token left out" in recording.notes


def test_rollout_ids_are_iterations(tmp_path: Path) -> None:
    for rollout in (10, 9):
        sample = {"tokens": [1, rollout], "response_length": 1, "group_index": 0, "reward": 1.0}
        saved = {"rollout_id": rollout, "samples": [sample, sample]}
        (tmp_path / f"rollout_{rollout}.pkl").write_bytes(pickle.dumps(saved))
    recording = import_recording([tmp_path], None, ImportOptions())
    assert [rows(b)[0][0] for b in recording.batches] == [[1, 9], [1, 10]]
    # The same group in two iterations has two sets of trajectories and of advantages.
    assert [b.trajectory_id.tolist() for b in recording.batches] == [["0/0", "0/1"]] * 2


def complaint(path: Path) -> str:
    """The message of the error for the user, else the source of a valid recording."""
    try:
        recording = read(path)
    except PsrlError as error:
        return error.message
    recording.batches[0].validate()
    return recording.source


values = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3)
)
odd = values | st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=2), values)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    field=st.sampled_from(
        [
            "tokens",
            "response_length",
            "loss_mask",
            "group_index",
            "reward",
            "session_id",
            "non_generation_time",
        ]
    ),
    value=odd,
)
def test_any_slime_field(tmp_path: Path, field: str, value: Any) -> None:
    sample = {"tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1, 1], "group_index": 0}
    path = tmp_path / "r.pkl"
    path.write_bytes(pickle.dumps({"rollout_id": 0, "samples": [{**sample, field: value}]}))
    assert path.name in complaint(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    field=st.sampled_from(
        [
            "input_ids",
            "responses",
            "attention_mask",
            "response_mask",
            "advantages",
            "token_level_scores",
        ]
    ),
    shape=st.tuples(st.integers(0, 3), st.integers(0, 5)),
    number=st.sampled_from([0, 1, -1, np.nan, np.inf, 1e300]),
)
def test_any_data_proto_field(
    tmp_path: Path, field: str, shape: tuple[int, int], number: float
) -> None:
    tensors = {"input_ids": np.ones((2, 4)), "responses": np.ones((2, 2))}
    tensors[field] = np.full(shape, number)
    encoded = {
        name: ("float64" if name == field else "int64", array.shape, _raw(array, name == field))
        for name, array in tensors.items()
    }
    path = tmp_path / "d.pkl"
    path.write_bytes(pickle.dumps(_data_proto((((2,), None, encoded), {}, {}))))
    assert path.name in complaint(path)


def _raw(array: Any, as_float: bool) -> bytes:
    return bytes(array.astype("f8" if as_float else "i8").tobytes())


class _Stored:
    """Pickles under the name of verl's class."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __getstate__(self) -> Any:
        return self.state


def _data_proto(state: Any) -> Any:
    return _renamed(_Stored, "verl.protocol", "DataProto")(state)


def _renamed(cls: type, module: str, name: str) -> type:
    for part in ("verl", module):
        sys.modules.setdefault(part, types.ModuleType(part))
    cls.__module__, cls.__qualname__, cls.__name__ = module, name, name
    setattr(sys.modules[module], name, cls)
    return cls


def test_formats_of_dumps_are_recognised(fixtures: Path) -> None:
    found = {p.name: detect_format(p)[0] for p in sorted(fixtures.iterdir()) if p.suffix != ".py"}
    assert found == {
        "alfworld.jsonl": "knowagent_alfworld",
        "areal.jsonl": "areal",
        "atif.json": "atif",
        "azure.csv": "azure_llm",
        "conversations.jsonl": "messages",
        "data_proto.pkl": "verl_data_proto",
        "data_proto_numpy.pkl": "verl_data_proto",
        "fireact.json": "fireact",
        "game24.json": "tree_of_thought",
        "hotpotqa.jsonl": "knowagent_hotpotqa",
        "real_data_proto.pkl": "verl_data_proto",
        "real_data_proto_numpy.pkl": "verl_data_proto",
        "real_tq_batch.pt": "verl_transfer_queue",
        "requests.jsonl": "mooncake",
        "rollout_12.pt": "slime",
        "run.traj": "swe_agent",
        "session.json": "claude_code",
        "tau_bench.json": "tau_bench",
        "thinking.jsonl": "messages",
        "toolbench.json": "toolbench",
        "tq_batch.pt": "verl_transfer_queue",
        "traces.jsonl": "verifiers",
        "train_data_step3.jsonl": "nemo_rl",
        "triplets.jsonl": "agent_lightning",
        "verl.jsonl": "verl_text",
        "webshop.log": "react_webshop",
    }

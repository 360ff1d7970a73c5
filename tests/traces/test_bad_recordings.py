"""Malformed recordings: an error that names the place and the numbers, never a traceback."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psrl.core.errors import PsrlError, TraceError
from psrl.traces.importers import IMPORTERS, ImportOptions, import_recording
from psrl.traces.recording import Recording

NAMES = {
    "claude_code": "session.json",
    "mooncake": "requests.jsonl",
    "messages": "conversations.jsonl",
    "tau_bench": "tau_bench.json",
    "agent_lightning": "triplets.jsonl",
    "areal": "areal.jsonl",
    "atif": "atif.json",
    "fireact": "fireact.json",
    "knowagent_alfworld": "alfworld.jsonl",
    "knowagent_hotpotqa": "hotpotqa.jsonl",
    "nemo_rl": "train_data_step3.jsonl",
    "swe_agent": "run.traj",
    "toolbench": "toolbench.json",
    "tree_of_thought": "game24.json",
    "verifiers": "traces.jsonl",
    "verl_text": "verl.jsonl",
}
OTHERS = {
    "azure_llm": "azure.csv",
    "react_webshop": "webshop.log",
    "slime": "rollout_12.pt",
    "verl_data_proto": "data_proto.pkl",
    "verl_transfer_queue": "tq_batch.pt",
}
GOOD_REQUEST = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
GOOD_CALL = {"t": 0, "in": 130, "out": 1, "hash_ids": [1, 2]}
USER, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def read(path: Path, format: str | None, tokenizer: str, skip_bad: bool = False) -> Recording:
    options = ImportOptions(tokenizer=tokenizer, skip_bad=skip_bad)
    return import_recording([path], format, options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_length": "600"}, "line 2: field 'input_length' must be a whole number, found str"),
        ({"input_length": 600.0}, "must be a whole number, found 600.0"),
        ({"input_length": True}, "must be a whole number, found True"),
        ({"input_length": -5}, r"is -5, outside \[1, "),
        ({"input_length": 10**40}, "is a whole number of more than 30 digits, outside"),
        ({"input_length": float("nan")}, "must be a whole number, found nan"),
        ({"input_length": 2000}, "'hash_ids' has 2 hashes, but 'input_length' = 2000 tokens are 3"),
        ({"output_length": 0}, "'output_length' is 0, outside"),
        ({"output_length": None}, "'output_length' must be a whole number, found null"),
        ({"hash_ids": {"a": 1}}, "'hash_ids' must be a list, found object"),
        ({"hash_ids": [1, "x"]}, "64 bits, entry 1 is string 'x'"),
        ({"hash_ids": [1, 2.5]}, r"64 bits, entry 1 is 2\.5"),
        ({"hash_ids": [1, [2]]}, "64 bits, entry 1 is list"),
        ({"hash_ids": []}, "has 0 hashes"),
        ({"timestamp": float("inf")}, "'timestamp' is inf, outside"),
        ({"timestamp": -1}, "'timestamp' is -1, outside"),
        ({"timestamp": "now"}, "'timestamp' must be a number"),
    ],
)
def test_mooncake_fields(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "r.jsonl"
    bad = {**GOOD_REQUEST, **change}
    path.write_text("\n".join(map(json.dumps, (GOOD_REQUEST, bad, GOOD_REQUEST))))
    with pytest.raises(TraceError, match=message) as caught:
        read(path, "mooncake", "qwen")
    assert str(path) in caught.value.message
    assert caught.value.hint
    recording = read(path, "mooncake", "qwen", skip_bad=True)
    assert recording.batches[0].num_samples == 2
    assert recording.skipped == (caught.value.message,)
    assert "1 malformed records were left out" in recording.notes


def test_missing_field_lists_the_fields_there_are(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"input_length": 3, "output_length": 1}')
    with pytest.raises(TraceError, match=r"line 1: field 'hash_ids' is missing.*'input_length'"):
        read(path, "mooncake", "qwen")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"input_length": 60', "line 2: not JSON .*may be cut off"),
        (b'{"a": "\xff"}', r"line 2: invalid UTF-8 \(byte 0xff at offset 7\)"),
        (b"[" * 100_000, "line 2: not usable JSON"),
        (b"1" * 5000, "line 2: not usable JSON"),
        (b"[1]", "line 2: expected a JSON object, found list"),
    ],
)
def test_damaged_lines(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "r.jsonl"
    good = json.dumps(GOOD_REQUEST).encode()
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\n" + line)
    with pytest.raises(TraceError, match=message):
        read(path, None, "qwen")
    assert read(path, None, "qwen", skip_bad=True).batches[0].num_samples == 1


def test_every_format_is_fuzzed() -> None:
    assert NAMES.keys() | OTHERS.keys() == IMPORTERS.keys()


@pytest.mark.parametrize("format", [*NAMES, "azure_llm", "react_webshop"])
@pytest.mark.parametrize("content", [b"", b" \n\n", b"\xef\xbb\xbf"])
def test_empty_files(tmp_path: Path, byte_tokenizer: str, format: str, content: bytes) -> None:
    path = tmp_path / "empty"
    path.write_bytes(content)
    for skip_bad in (False, True):
        with pytest.raises(TraceError, match="the file is empty"):
            read(path, format, byte_tokenizer, skip_bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "field 'block_size' is 0"),
        ({"id": None}, "field 'id' must be a string, found null"),
        ({"hash_id_scope": "cosmic"}, "'hash_id_scope' is 'cosmic', known are"),
        ({"requests": 3}, "field 'requests' must be a list, found 3"),
        ({"requests": []}, "no sample in 1 files"),
        ({"requests": [GOOD_CALL, 5]}, "request 1: expected a JSON object, found 5"),
        ({"requests": [{**GOOD_CALL, "in": 300}]}, "request 0: .*2 hashes.*4 blocks of 64"),
        ({"requests": [{**GOOD_CALL, "api_time": -1}]}, "'api_time' is -1"),
        (
            {"requests": [GOOD_CALL, {"t": 1, "requests": [{"in": 5}]}]},
            "request 1 request 0: field 'hash_ids' is missing",
        ),
    ],
)
def test_session_fields(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"id": "s", "block_size": 64, "requests": [GOOD_CALL], **change}))
    with pytest.raises(TraceError, match=message):
        read(path, "claude_code", "qwen")


def test_a_bad_request_does_not_shift_the_steps_after_it(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    calls = [GOOD_CALL, {**GOOD_CALL, "out": -1}, GOOD_CALL]
    path.write_text(json.dumps({"id": "s", "block_size": 64, "requests": calls}))
    recording = read(path, None, "qwen", skip_bad=True)
    assert recording.batches[0].agent_step.tolist() == [0, 2]
    assert len(recording.skipped) == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [USER]}, "line 1: no response of the model"),
        ({"messages": []}, "line 1: no response of the model"),
        ({"messages": "hi"}, "field 'messages' must be a list, found string 'hi'"),
        ({"messages": [USER, {"role": "judge"}]}, "message 1: field 'role' is 'judge', known are"),
        ({"messages": [{"role": "assistant"}]}, "'content' is missing in a message without"),
        ({"messages": [{**USER, "tool_calls": []}]}, "stands in a message of role 'user'"),
        (
            {"messages": [{**REPLY, "tool_calls": [{}]}]},
            "tool call 0: field 'arguments' is missing",
        ),
        ({"messages": [{**USER, "content": [{"type": "image"}]}]}, "only 'text' can be replayed"),
        ({"messages": [{**USER, "content": "\ud800"}, REPLY]}, "half a surrogate pair"),
        ({"messages": [USER, REPLY], "reward": "high"}, "'reward' must be a number"),
        ({"messages": [USER, REPLY], "reward": 1e300}, r"'reward' is 1e\+300, outside"),
        ({"messages": [USER, REPLY], "group": 1.5}, "'group' must be a string, found 1.5"),
        ({"messages": [USER, REPLY], "tools": [1]}, "tool 0: expected a JSON object"),
        ({"messages": [USER, REPLY], "tools": [{"x": "\udfff"}]}, "conversation has half a surr"),
        ({"messages": [{**USER, "content": " " * 200_000}, REPLY]}, "line 1: .*blanks in a row"),
    ],
)
def test_conversation_fields(
    tmp_path: Path, byte_tokenizer: str, record: dict[str, Any], message: str
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(TraceError, match=message):
        read(path, None, byte_tokenizer)
    with pytest.raises(TraceError, match="no sample in 1 files, 1 records left out; the first: "):
        read(path, None, byte_tokenizer, skip_bad=True)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.text(st.sampled_from("\ud800\x00a"), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in items:
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += places(inner)
    return found


def survives(path: Path, format: str, tokenizer: str) -> None:
    """Either a valid recording or an error for the user; never anything else."""
    for skip_bad in (False, True):
        for name in (format, None):
            try:
                recording = read(path, name, tokenizer, skip_bad)
            except PsrlError:
                continue
            for batch in recording.batches:
                batch.validate()


ODD_NUMBERS = [float("nan"), float("inf"), -1, -0.5, 0, 2**31, 2**63, -(2**63), 10**40, 1e308]


def damage(value: Any, data: st.DataObject) -> None:
    """Change one place: wrong type, missing or extra field, odd number, duplicate entry."""
    found = places(value)
    kind = data.draw(st.sampled_from(["replace", "delete", "extra", "number", "duplicate"]))
    if kind == "extra":
        objects = [c[k] for c, k in found if isinstance(c[k], dict)]
        if objects:
            data.draw(st.sampled_from(objects))[data.draw(st.text(max_size=5))] = None
        return
    if kind == "number":
        found = [(c, k) for c, k in found if type(c[k]) in (int, float)] or found
    if kind == "duplicate":
        found = [(c, k) for c, k in found if isinstance(c, list)] or found
    container, key = data.draw(st.sampled_from(found))
    if kind == "delete":
        del container[key]
    elif kind == "duplicate" and isinstance(container, list):
        container.insert(data.draw(st.integers(0, len(container))), container[key])
    else:
        odd = st.sampled_from(ODD_NUMBERS) if kind == "number" else json_values
        container[key] = data.draw(odd)


@pytest.mark.slow
@pytest.mark.parametrize("format", NAMES)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damaged_record(
    fixtures: Path, tmp_path: Path, byte_tokenizer: str, format: str, data: st.DataObject
) -> None:
    text = (fixtures / NAMES[format]).read_text()
    is_lines = NAMES[format].endswith(".jsonl")
    value = [json.loads(x) for x in text.splitlines() if x] if is_lines else json.loads(text)
    value = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 2))):
        damage(value, data)
    path = tmp_path / "changed"
    dump: Callable[[Any], str] = json.dumps
    path.write_text("\n".join(map(dump, value)) if is_lines else dump(value))
    survives(path, format, byte_tokenizer)


PICKLED: dict[str, Any] = {
    "slime": {
        "rollout_id": 12,
        "samples": [
            {"group_index": 0, "tokens": [1, 2, 3], "response_length": 2, "reward": 1.0}
            | {"loss_mask": [1, 0], "session_id": "s", "status": "completed"},
            {"group_index": 0, "tokens": [1, 5], "response_length": 1, "reward": 0.0},
        ],
    },
    "verl_transfer_queue": {
        "tensordict": {"input_ids": [[1, 2, 3], [1, 4]], "responses": [[3], [4]]},
        "tags": [{"is_padding": False}, {}],
        "keys": ["u_0_0", "u_1_0"],
        "global_steps": 7,
    },
}


@pytest.mark.parametrize("format", PICKLED)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damaged_pickled_record(
    tmp_path: Path, byte_tokenizer: str, format: str, data: st.DataObject
) -> None:
    value = copy.deepcopy(PICKLED[format])
    damage(value, data)
    if data.draw(st.booleans()):
        tensors = value.get("tensordict")
        if isinstance(tensors, dict) and isinstance(tensors.get("input_ids"), list):
            tensors["input_ids"] = np.array([[1, 2, 3], [1, 4, 0]])
    path = tmp_path / "changed.pkl"
    path.write_bytes(pickle.dumps(value))
    survives(path, format, byte_tokenizer)


@pytest.mark.parametrize("format", [*NAMES, *OTHERS])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damaged_bytes(
    fixtures: Path, tmp_path: Path, byte_tokenizer: str, format: str, data: st.DataObject
) -> None:
    content = (fixtures / (NAMES | OTHERS)[format]).read_bytes()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.sampled_from([start, start + 1, len(content)]))
    path = tmp_path / "damaged"
    # 0xff is nowhere valid in UTF-8.
    new = data.draw(st.binary(max_size=3) | st.just(b"\xff"))
    path.write_bytes(content[:start] + new + content[end:])
    survives(path, format, byte_tokenizer)

"""Importers on small hand-made recordings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psrl.core.errors import ConfigError, TraceError
from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import open_trace, write_trace
from psrl.traces.blocks import to_blocks_all
from psrl.traces.importers import ImportOptions, detect_format, import_recording
from psrl.traces.modes import derive
from psrl.traces.stats import sharing_stats


def tokens_of(batch: SampleBatch) -> list[list[int]]:
    """Tokens per symbol of each sample."""
    assert batch.symbol_num_tokens is not None
    table = batch.symbol_num_tokens
    return [table[batch.sample_symbols(s)].tolist() for s in range(batch.num_samples)]


def test_claude_code_session(fixtures: Path) -> None:
    recording = import_recording([fixtures / "session.json"], None, ImportOptions())
    (batch,) = recording.batches
    assert recording.sampling_mode == "step"
    assert recording.source == "session.json"
    # 10 tokens are two blocks of 4 and a tail of 2; 12 tokens are three blocks without a tail.
    assert tokens_of(batch) == [[4, 4, 2, 3], [4, 4, 4, 2], [4, 1, 1], [4, 4, 1, 1], [4, 1, 1]]
    assert batch.loss_spans.tolist() == [[10, 13], [12, 14], [5, 6], [9, 10], [5, 6]]
    assert set(batch.group_id.tolist()) == {"tiny"}
    assert batch.trajectory_id.tolist() == [
        "tiny",
        "tiny",
        "tiny/subagent_1",
        "tiny/subagent_1",
        "tiny",
    ]
    assert batch.agent_step.tolist() == [0, 1, 0, 1, 2]
    assert batch.arrival_s.tolist() == [0, 9, 20, 22, 30]
    np.testing.assert_equal(batch.generate_s[:2], [1.5, np.nan])
    np.testing.assert_equal(batch.environment_s[:2], [np.nan, 7.5])
    assert np.isnan(batch.reward).all()
    # Shared: blocks 1 and 2 (8 tokens), block 7 and, after the subagent, block 1 (4 tokens each).
    assert sharing_stats(batch)["unique_tokens"] == batch.logical_tokens - 8 - 4 - 4


def test_claude_code_hashes_are_local_unless_global(fixtures: Path, tmp_path: Path) -> None:
    session = json.loads((fixtures / "session.json").read_text())
    paths = []
    for name, scope in (("a", "local"), ("b", "local"), ("c", "global"), ("d", "global")):
        text = json.dumps({**session, "id": name, "hash_id_scope": scope})
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(text)
    local = import_recording(paths[:2], "claude_code", ImportOptions()).batches[0]
    shared = import_recording(paths[2:], "claude_code", ImportOptions()).batches[0]
    assert not set(local.sample_symbols(0)) & set(local.sample_symbols(5))
    assert (shared.sample_symbols(0) == shared.sample_symbols(5)).tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_claude_code_refuses_the_same_session_twice(fixtures: Path) -> None:
    path = fixtures / "session.json"
    with pytest.raises(TraceError, match="session id 'tiny' was read from"):
        import_recording([path, path], None, ImportOptions())


def test_claude_code_nested_subagents_count_time_from_their_own_start(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    call = {"t": 1, "in": 5, "out": 1, "hash_ids": [1]}
    inner = {"t": 10, "requests": [call]}
    requests = [{"t": 100, "requests": [call, inner, call]}]
    path.write_text(json.dumps({"id": "x", "block_size": 4, "requests": requests}))
    (batch,) = import_recording([path], None, ImportOptions()).batches
    assert batch.arrival_s.tolist() == [101, 111, 101]
    assert batch.trajectory_id.tolist() == [
        "x/subagent_1",
        "x/subagent_1/subagent_1",
        "x/subagent_1",
    ]


def test_claude_code_partial_last_block_is_shared_only_at_equal_length(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    requests = [{"in": n, "out": 1, "hash_ids": [1, 2]} for n in (6, 6, 7)]
    path.write_text(json.dumps({"id": "x", "block_size": 4, "requests": requests}))
    (batch,) = import_recording([path], None, ImportOptions()).batches
    assert tokens_of(batch) == [[4, 2, 1], [4, 2, 1], [4, 3, 1]]
    first, second, third = (batch.sample_symbols(s).tolist() for s in range(3))
    assert first[:2] == second[:2]
    assert third[0] == first[0]
    assert third[1] != first[1]


def test_mooncake_requests(fixtures: Path) -> None:
    (batch,) = import_recording([fixtures / "requests.jsonl"], None, ImportOptions()).batches
    assert tokens_of(batch) == [[512, 488, 5], [512, 512, 76, 6], [512, 7]]
    # Block 1 has 488 tokens in the first request and 512 in the second: different symbols.
    assert sharing_stats(batch)["unique_tokens"] == batch.logical_tokens - 2 * 512
    assert batch.arrival_s.tolist() == [0.0, 0.25, 4.0]
    assert len(set(batch.group_id.tolist())) == len(set(batch.trajectory_id.tolist())) == 3
    assert batch.loss_spans.tolist() == [[1000, 1005], [1100, 1106], [512, 519]]


def test_mooncake_block_size_is_an_option(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"input_length": 20, "output_length": 1, "hash_ids": [-3, 18446744073709]}')
    (batch,) = import_recording([path], None, ImportOptions(block_tokens=16)).batches
    assert tokens_of(batch) == [[16, 4, 1]]
    with pytest.raises(
        TraceError, match=r"has 2 hashes.*20 tokens are 0 blocks of 512.*rest of 20"
    ):
        import_recording([path], None, ImportOptions())


def test_conversations(fixtures: Path, byte_tokenizer: str) -> None:
    options = ImportOptions(tokenizer=byte_tokenizer)
    recording = import_recording([fixtures / "conversations.jsonl"], None, options)
    (batch,) = recording.batches
    assert batch.symbol_num_tokens is None
    assert batch.group_id.tolist() == ["sum"] * 3 + ["7"] * 2
    assert batch.trajectory_id.tolist() == ["sum/0", "sum/0", "sum/1", "7/0", "7/0"]
    assert batch.agent_step.tolist() == [0, 1, 0, 0, 1]
    assert batch.reward.tolist() == [1, 1, 0, 1, 1]
    high = 0.5 / (np.sqrt(0.5) + 1e-6)
    assert batch.advantage.tolist() == pytest.approx([high, high, -high, 0, 0])
    trained = [text_of(batch, s, byte_tokenizer) for s in range(5)]
    assert trained == [
        "4<|im_end|>",
        "\nYes.<|im_end|>",
        "5<|im_end|>",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {broken}\n</tool_call><|im_end|>',
        "3<|im_end|>",
    ]
    assert text_of(batch, 1, byte_tokenizer, whole=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n\nYes.<|im_end|>"
    )
    # The next call starts with this one, so one merged sample holds both responses.
    assert derive(batch, "traj").num_samples == 3


def text_of(batch: SampleBatch, sample: int, tokenizer_path: str, whole: bool = False) -> str:
    """The trained or whole text of a sample, decoded by the library itself."""
    tokenizers = pytest.importorskip("tokenizers")
    ((start, end),) = batch.sample_loss_spans(sample).tolist()
    tokenizer = tokenizers.Tokenizer.from_file(tokenizer_path)
    ids = batch.sample_symbols(sample)[0 if whole else start : end].tolist()
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text


def test_group_is_the_first_user_message_where_none_is_given(
    tmp_path: Path, byte_tokenizer: str
) -> None:
    path = tmp_path / "c.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in (("x", "1"), ("y", "2"), ("x", "3"))
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    recording = import_recording([path], None, ImportOptions(tokenizer=byte_tokenizer))
    (batch,) = recording.batches
    first, second, third = batch.group_id.tolist()
    assert first == third != second
    assert batch.advantage.tolist() == [1, 1, 1]
    assert "3 of 3 trajectories have no reward" in recording.notes


def test_tau_bench(fixtures: Path, byte_tokenizer: str, tmp_path: Path) -> None:
    options = ImportOptions(tokenizer=byte_tokenizer)
    (batch,) = import_recording([fixtures / "tau_bench.json"], None, options).batches
    assert batch.group_id.tolist() == ["0", "0", "0", "1"]
    assert batch.trajectory_id.tolist() == ["0/0", "0/0", "0/1", "1/0"]
    assert (batch.advantage > 0).tolist() == [True, True, False, False]
    assert batch.advantage[3] == 0
    other = tmp_path / "retail.json"
    other.write_bytes((fixtures / "tau_bench.json").read_bytes())
    (both,) = import_recording([fixtures / "tau_bench.json", other], None, options).batches
    assert set(both.group_id.tolist()) == {"tau_bench/0", "tau_bench/1", "retail/0", "retail/1"}


def test_iterations_and_mini_batches_hold_whole_groups(fixtures: Path, tmp_path: Path) -> None:
    lines = [
        json.dumps({"input_length": 512, "output_length": 1, "hash_ids": [i % 2]}) for i in range(5)
    ]
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(lines))
    options = ImportOptions(groups_per_iteration=3, num_mini_batches=2, licence="CC0-1.0")
    recording = import_recording([path], None, options)
    assert [b.group_id.tolist() for b in recording.batches] == [["0", "1", "2"], ["3", "4"]]
    assert [b.mini_batch.tolist() for b in recording.batches] == [[0, 1, 0], [0, 1]]
    written = write_trace(
        tmp_path / "trace",
        recording.batches,
        source=recording.source,
        licence=recording.licence,
        sampling_mode=recording.sampling_mode,
        notes=recording.notes,
    )
    assert [b.num_samples for b in open_trace(written.path)] == [3, 2]
    assert open_trace(written.path).header.licence == "CC0-1.0"
    blocks = write_trace(
        tmp_path / "blocks",
        to_blocks_all(recording.batches),
        source="",
        licence="",
        sampling_mode="step",
    )
    assert sharing_stats(blocks.iteration(0))["unique_tokens"] == 2 * 512 + 3
    too_many = ImportOptions(groups_per_iteration=3, num_mini_batches=4)
    with pytest.raises(TraceError, match="3 semantic groups per iteration cannot fill 4"):
        import_recording([path], None, too_many)


def test_limit_counts_episodes(fixtures: Path, byte_tokenizer: str) -> None:
    options = ImportOptions(tokenizer=byte_tokenizer, limit=2)
    (batch,) = import_recording([fixtures / "conversations.jsonl"], None, options).batches
    assert len(set(batch.trajectory_id.tolist())) == 2
    one = ImportOptions(limit=1)
    requests = import_recording([fixtures / "requests.jsonl"], None, one).batches[0]
    assert requests.num_samples == 1
    assert import_recording([fixtures / "session.json"], None, one).batches[0].num_samples == 5


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("session.json", "claude_code"),
        ("requests.jsonl", "mooncake"),
        ("conversations.jsonl", "messages"),
        ("tau_bench.json", "tau_bench"),
    ],
)
def test_detection(fixtures: Path, name: str, format: str) -> None:
    found, reason = detect_format(fixtures / name)
    assert found == format
    assert reason


def write(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_detection_errors(fixtures: Path, tmp_path: Path) -> None:
    unknown = write(tmp_path / "u.json", {"prompt": "x", "completion": "y"})
    with pytest.raises(TraceError, match=r"unknown format.*\['prompt', 'completion'\]") as caught:
        detect_format(unknown)
    for name in ("claude_code", "mooncake", "messages", "tau_bench"):
        assert name in caught.value.hint
    both = {"messages": [], "hash_ids": [], "input_length": 1}
    with pytest.raises(TraceError, match=r"fits several formats: messages.*mooncake"):
        detect_format(write(tmp_path / "b.json", both))
    with pytest.raises(TraceError, match="Did you mean 'mooncake'"):
        import_recording([unknown], "moncake", ImportOptions())
    with pytest.raises(
        TraceError, match=r"several formats: session\.json is claude_code, requests"
    ):
        import_recording(
            [fixtures / "session.json", fixtures / "requests.jsonl"], None, ImportOptions()
        )
    with pytest.raises(TraceError, match="no such file"):
        detect_format(tmp_path / "absent")
    with pytest.raises(TraceError, match="no file to import"):
        import_recording([], None, ImportOptions())
    with pytest.raises(TraceError, match=r"unknown format, .*text\.txt line 1: not JSON"):
        detect_format(write(tmp_path / "text.txt", "hello\nworld"))


def test_folders_are_read_in_name_order(fixtures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    with pytest.raises(TraceError, match=r"no \*\.json, \*\.jsonl"):
        detect_format(folder)
    session = json.loads((fixtures / "session.json").read_text())
    for name in ("b", "a"):
        write(folder / f"{name}.json", {**session, "id": name})
    (batch,) = import_recording([folder], None, ImportOptions()).batches
    assert list(dict.fromkeys(batch.group_id.tolist())) == ["a", "b"]
    write(folder / "trace.json", {})
    with pytest.raises(TraceError, match="is a psRL trace already"):
        detect_format(folder)


def test_options_that_do_not_fit(fixtures: Path) -> None:
    with pytest.raises(ConfigError, match="limit is 0"):
        ImportOptions(limit=0)
    with pytest.raises(ConfigError, match="block_tokens 16 has no meaning for messages"):
        import_recording([fixtures / "conversations.jsonl"], None, ImportOptions(block_tokens=16))
    with pytest.raises(TraceError, match="is 4, but block_tokens 64 was asked for"):
        import_recording([fixtures / "session.json"], None, ImportOptions(block_tokens=64))

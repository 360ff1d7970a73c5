"""The committed demo traces, and the script that makes them."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from psrl.core.samples.trace import open_trace
from psrl.traces.stats import sharing_stats

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "traces"


@pytest.mark.parametrize("name", ["tau_bench_airline", "claude_code"])
def test_demo_trace_is_whole_and_its_source_states_its_figures(name: str) -> None:
    trace = open_trace(EXAMPLES / name)
    assert trace.header.symbol_kind == "block"
    (batch,) = trace
    stats = sharing_stats(batch)
    source = (EXAMPLES / name / "SOURCE.md").read_text()
    assert trace.header.licence in source
    for label, value in (
        ("samples", stats["num_samples"]),
        ("logical tokens", stats["logical_tokens"]),
        ("trained tokens", stats["loss_tokens"]),
        ("unique tokens, shared by all", stats["unique_tokens"]),
    ):
        assert re.search(rf"^\| {label} \| {value}\b", source, re.MULTILINE)
    # Most of the tokens are shared: that is what the demo is for.
    assert stats["within_group"]["prefix_match_rate"] > 0.9


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_demo", EXAMPLES / "make_demo_traces.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_script_writes_no_text_of_the_recording(
    fixtures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("tiktoken")
    pytest.importorskip("dashscope")
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    (sessions / "one.json").write_bytes((fixtures / "session.json").read_bytes())
    script = load_script()
    monkeypatch.setattr(script, "HERE", tmp_path)
    arguments = ["make_demo_traces.py", str(fixtures / "tau_bench.json"), str(sessions)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert script.main() == 0
    names = ("tau_bench_airline", "claude_code")
    assert all(name in capsys.readouterr().out for name in names[:1])
    written = b"".join(p.read_bytes() for name in names for p in (tmp_path / name).iterdir())
    for conversation in json.loads((fixtures / "tau_bench.json").read_text()):
        for message in conversation["traj"]:
            assert (message["content"] or "renew").encode() not in written
    (batch,) = open_trace(tmp_path / "tau_bench_airline")
    assert set(batch.symbols.tolist()) == set(range(int(batch.symbols.max()) + 1))
    monkeypatch.setattr(sys, "argv", [*arguments[:2], str(tmp_path / "absent")])
    assert script.main() == 2
    assert "no such file" in capsys.readouterr().err

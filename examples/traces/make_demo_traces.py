"""Make the demo traces beside this file from the public recordings they are derived from.

    python examples/traces/make_demo_traces.py gpt-4o-airline.json SESSION_FOLDER

The first argument is a tau-bench result file, the second a folder of Claude Code sessions as
recorded by kv-cache-tester. Each demo trace is in block form: lengths and sharing are exact, no
text, token id or hash of the recording is left in it.
"""

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.core.errors import PsrlError
from psrl.core.samples.trace import write_trace
from psrl.traces.blocks import to_blocks_all
from psrl.traces.importers import ImportOptions, import_recording
from psrl.traces.stats import sharing_stats

HERE = Path(__file__).resolve().parent
MAX_BYTES = 2_000_000


@dataclass(frozen=True)
class Demo:
    """One demo trace and where its recording is published."""

    name: str
    format: str
    repository: str
    commit: str
    licence: str
    recording: str


TAU_BENCH = Demo(
    name="tau_bench_airline",
    format="tau_bench",
    repository="sierra-research/tau-bench",
    commit="59a200c6d575d595120f1cb70fea53cef0632f6b",
    licence="MIT",
    recording="historical_trajectories/gpt-4o-airline.json: gpt-4o on airline tasks, 4 trials each",
)
CLAUDE_CODE = Demo(
    name="claude_code",
    format="claude_code",
    repository="callanjfox/kv-cache-tester",
    commit="94f6046dfd9c0c8bc0cdb24a5aa6579bac8669bf",
    licence="Apache-2.0",
    recording="traces/: real Claude Code sessions, anonymised by the source to block hashes",
)

SOURCE_TEXT = """# {name}

Made by `examples/traces/make_demo_traces.py`; do not edit.

- Source: GitHub repository `{repository}`, commit `{commit}`
- Recording: {recording}
- Files read, which may hold a subset of the recording: {files}
- Licence of the source: {licence}
- Read as: {notes}
- Done to it: imported in sampling mode "step", one sample per model call; then every node of the
  prefix tree replaced by one anonymous block that has only a length. Lengths, sharing, loss
  spans, groups, rewards and times are exact. No text, no token ids and no hashes are included.

| | |
|---|---|
| samples | {num_samples} |
| semantic groups | {num_groups} |
| trajectories | {num_trajectories} |
| logical tokens | {logical_tokens} |
| trained tokens | {loss_tokens} |
| unique tokens, shared within a trajectory | {within_trajectory} |
| unique tokens, shared within a group | {within_group} |
| unique tokens, shared by all | {overall} |
"""


def make_demo(demo: Demo, recording_path: Path) -> int:
    """Write one demo trace and its SOURCE.md; returns their size in bytes."""
    options = ImportOptions(source=f"{demo.repository} at {demo.commit[:12]}", licence=demo.licence)
    recording = import_recording([recording_path], demo.format, options)
    directory = HERE / demo.name
    shutil.rmtree(directory, ignore_errors=True)
    write_trace(
        directory,
        to_blocks_all(recording.batches),
        source=recording.source,
        licence=recording.licence,
        sampling_mode=recording.sampling_mode,
        notes=recording.notes + "; anonymised to block form",
    )
    stats = sharing_stats(recording.batches[0])
    is_folder = recording_path.is_dir()
    files = sorted(recording_path.glob("*.json")) if is_folder else [recording_path]
    text = SOURCE_TEXT.format(
        **vars(demo),
        **{name: _figure(value) for name, value in stats.items()},
        files=", ".join(file.name for file in files),
        notes=recording.notes,
    )
    (directory / "SOURCE.md").write_text(text, encoding="utf-8")
    return sum(file.stat().st_size for file in directory.iterdir())


def _figure(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['unique_tokens']} (match rate {value['prefix_match_rate']:.4f})"
    return str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tau_bench_json", type=Path, help="tau-bench result file")
    parser.add_argument("session_folder", type=Path, help="folder of Claude Code sessions")
    arguments = parser.parse_args()
    total_bytes = 0
    try:
        for demo, path in (
            (TAU_BENCH, arguments.tau_bench_json),
            (CLAUDE_CODE, arguments.session_folder),
        ):
            num_bytes = make_demo(demo, path)
            print(f"{demo.name}: {num_bytes} bytes")
            total_bytes += num_bytes
    except PsrlError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    if total_bytes > MAX_BYTES:
        print(f"demo traces have {total_bytes} bytes, over {MAX_BYTES}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

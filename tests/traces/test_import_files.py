"""Which files are read: compressed ones, folders, huge lines, formats of other packages."""

import gzip
import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from psrl.cli import main
from psrl.core.errors import ConfigError, ExitCode, TraceError
from psrl.core.samples.trace import open_trace
from psrl.traces.importers import (
    IMPORTERS,
    ImportOptions,
    all_importers,
    choose_format,
    detect_format,
    files,
    import_recording,
)

REQUEST = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    "name",
    ["session.json", "conversations.jsonl", "webshop.log", "azure.csv", "tq_batch.pt", "atif.json"],
)
def test_compressed_files_read_like_plain_ones(
    fixtures: Path, tmp_path: Path, byte_tokenizer: str, name: str
) -> None:
    data = (fixtures / name).read_bytes()
    options = ImportOptions(tokenizer=byte_tokenizer)
    (plain,) = import_recording([fixtures / name], None, options).batches
    for suffix, packed in ((".gz", gzip.compress(data)), (".zst", zstd(data))):
        folder = tmp_path / suffix[1:]
        folder.mkdir()
        (folder / (name + suffix)).write_bytes(packed)
        (batch,) = import_recording([folder], None, options).batches
        assert batch.symbols.tolist() == plain.symbols.tolist()
        assert batch.loss_spans.tolist() == plain.loss_spans.tolist()


@pytest.mark.parametrize("packed", [gzip.compress, zstd])
def test_damaged_compressed_files(tmp_path: Path, packed: object) -> None:
    lines = "".join(json.dumps({**REQUEST, "timestamp": t}) + "\n" for t in range(5000))
    assert callable(packed)
    data = packed(lines.encode())
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(TraceError, match=r"r\.jsonl\.gz: cannot be read \(") as caught:
        import_recording([path], "mooncake", ImportOptions())
    assert "cut off" in caught.value.hint
    path.write_bytes(data[:4] + bytes(len(data) - 4))
    with pytest.raises(TraceError, match=r"r\.jsonl\.gz: cannot be read"):
        detect_format(path)


def test_lines_are_cut_at_newlines_wherever_chunks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\xef\xbb\xbfab\n\n  \ncdefg\r\n\nh")
    expected = [(f"{path} line {n}", x) for n, x in ((1, b"ab"), (4, b"cdefg\r"), (6, b"h"))]
    for size in (4, 5, 7, 1000):
        monkeypatch.setattr(files, "CHUNK_BYTES", size)
        assert list(files.read_lines(path)) == expected


def test_values_have_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_VALUE_BYTES", 1 << 20)
    monkeypatch.setattr(files, "CHUNK_BYTES", 1 << 16)
    path = tmp_path / "long.jsonl"
    good = json.dumps(REQUEST)
    path.write_text(f"{good}\n{' ' * (2 << 20)}\n{good}\n")
    with pytest.raises(TraceError, match=r"line 2 .* not read: the line has more than 1 MiB"):
        import_recording([path], None, ImportOptions())
    recording = import_recording([path], None, ImportOptions(skip_bad=True))
    assert recording.batches[0].num_samples == 1
    assert "line 2 and what follows is not read" in recording.skipped[0]
    whole = tmp_path / "whole.json"
    whole.write_text("{\n" + " " * (2 << 20) + "}")
    with pytest.raises(TraceError, match=r"whole\.json: the file has more than 1 MiB"):
        detect_format(whole)


@pytest.mark.slow
def test_a_line_of_100_mb(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    row = {"token_ids": [7] * 50, "token_loss_mask": [0] + [1] * 49, "content": "x" * 100_000_000}
    path.write_text(json.dumps(row))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (batch,) = import_recording([path], None, ImportOptions()).batches
    assert batch.logical_tokens == 50
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 1 << 20
    path.write_bytes(b'{"token_ids": [' + b"1" * 100_000_000)
    with pytest.raises(TraceError, match=r"not usable JSON|not JSON"):
        import_recording([path], "nemo_rl", ImportOptions())


def test_mixed_folders_say_what_each_file_is(fixtures: Path, tmp_path: Path) -> None:
    for name in ("session.json", "requests.jsonl"):
        shutil.copy(fixtures / name, tmp_path / name)
    (tmp_path / "x.json").write_text('{"a": 1}')
    (tmp_path / "notes.txt").write_text("not read from a folder")
    with pytest.raises(TraceError) as caught:
        choose_format([tmp_path], skip_bad=False)
    assert caught.value.message == (
        "files of several formats: requests.jsonl is mooncake, session.json is claude_code, "
        "x.json is not recognised"
    )
    assert "--format" in caught.value.hint
    options = ImportOptions(skip_bad=True)
    recording = import_recording([tmp_path], "mooncake", options)
    assert recording.batches[0].num_samples == 3
    assert {"session.json", "x.json"} == {
        name for name in ("session.json", "x.json") if name in " ".join(recording.skipped)
    }


def test_one_unknown_file_among_others_is_named(fixtures: Path, tmp_path: Path) -> None:
    shutil.copy(fixtures / "requests.jsonl", tmp_path / "a.jsonl")
    (tmp_path / "b.json").write_text('{"a": 1}')
    with pytest.raises(TraceError, match=r"b\.json: unknown format.*\['a'\]"):
        choose_format([tmp_path], skip_bad=False)
    assert choose_format([tmp_path], skip_bad=True)[0] == "mooncake"


def test_folders_are_read_to_the_bottom(fixtures: Path, tmp_path: Path) -> None:
    for folder in ("2", "1"):
        (tmp_path / folder).mkdir()
        shutil.copy(fixtures / "requests.jsonl", tmp_path / folder / "r.jsonl")
    assert import_recording([tmp_path], None, ImportOptions()).batches[0].num_samples == 6


PACKAGE = """
import numpy as np
from psrl.traces.importers import Importer
from psrl.traces.importers.assemble import assemble
from psrl.traces.importers.reading import BadRecords
from psrl.traces.importers.samples import RecordedSample


def recognise(head):
    return "starts with !tokens" if head.start.startswith("!tokens") else None


def read(paths, options):
    samples = [
        RecordedSample(np.arange(4), ((2, 4),), group_id="g", trajectory_id=path.stem)
        for path in paths
    ]
    return assemble(samples, None, paths, options, BadRecords(options.skip_bad), [])


IMPORTER = Importer("text that starts with !tokens", recognise, read)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages are installed in."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    all_importers.cache_clear()
    yield folder
    all_importers.cache_clear()


def install(site: Path, name: str, module: str, code: str) -> None:
    (site / f"{module}.py").write_text(code)
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[psrl.importers]\n{name} = {module}:IMPORTER\n")


def test_a_package_adds_a_format(site: Path, tmp_path: Path) -> None:
    install(site, "my_format", "third_party_good", PACKAGE)
    path = tmp_path / "x.log"
    path.write_text("!tokens\n")
    assert detect_format(path) == ("my_format", "starts with !tokens")
    (batch,) = import_recording([path], None, ImportOptions()).batches
    assert batch.loss_spans.tolist() == [[2, 4]]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("mooncake", PACKAGE, "the format name is in use"),
        ("other", "IMPORTER = 3", "is a int, not an Importer"),
        ("other", "import not_there", "cannot be loaded"),
    ],
)
def test_bad_packages_are_named(site: Path, name: str, code: str, message: str) -> None:
    module = f"third_party_bad_{abs(hash(code + name))}"
    install(site, name, module, code)
    with pytest.raises(ConfigError, match=message) as caught:
        all_importers()
    assert module in caught.value.message


def test_every_importer_describes_itself() -> None:
    for name, importer in IMPORTERS.items():
        assert importer.marks
        assert importer.modes, name


def test_the_command_takes_every_option(fixtures: Path, tmp_path: Path) -> None:
    common = ["trace", "import", "--out"]
    blocks = tmp_path / "blocks"
    dumps = str(fixtures / "train_data_step3.jsonl")
    assert main([*common, str(blocks), dumps, "--hashes-only"]) == ExitCode.OK
    trace = open_trace(blocks)
    assert trace.header.symbol_kind == "block"
    assert trace.header.sampling_mode == "traj"
    nodes = str(fixtures / "traces.jsonl")
    steps = tmp_path / "steps"
    assert main([*common, str(steps), nodes, "--mode", "tree_step"]) == ExitCode.OK
    assert open_trace(steps).header.sampling_mode == "tree_step"
    requests = str(fixtures / "requests.jsonl")
    wrong = [*common, str(tmp_path / "x"), requests, "--block-tokens", "16"]
    assert main(wrong) == ExitCode.BAD_INPUT


def test_blocks_of_several_iterations_have_one_table(
    fixtures: Path, tmp_path: Path, byte_tokenizer: str
) -> None:
    out = tmp_path / "trace"
    command = ["trace", "import", str(fixtures / "verl.jsonl"), "--out", str(out)]
    assert main([*command, "--tokenizer", byte_tokenizer, "--hashes-only"]) == ExitCode.OK
    trace = open_trace(out)
    assert trace.num_iterations == 2
    assert trace.header.symbol_kind == "block"

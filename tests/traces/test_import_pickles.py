"""Pickled recordings: data is read, nothing is executed."""

import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.core.errors import TraceError
from psrl.traces.importers import ImportOptions, detect_format, import_recording
from psrl.traces.importers.pickles import load_pickled, load_pickled_bytes
from psrl.traces.importers.tensors import Jagged, Storage, StoredTensor


class Malicious:
    """Runs a command when it is unpickled the normal way."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def attacks(marker: Path) -> dict[str, bytes]:
    """Pickles that create `marker` when loaded by pickle.loads."""
    touch = f"open({str(marker)!r}, 'w').close()"
    command = f"{sys.executable} -c \"open('{marker}','w').close()\""
    inner = pickle.dumps(Malicious(exec, touch))
    return {
        "os.system": pickle.dumps(Malicious(os.system, command)),
        "exec": pickle.dumps(Malicious(exec, touch)),
        "protocol 2": pickle.dumps(Malicious(exec, touch), protocol=2),
        "popen": pickle.dumps(Malicious(subprocess.check_call, command.split(" ", 2)[:1])),
        "nested loads": pickle.dumps(Malicious(pickle.loads, inner)),
        "in a list": pickle.dumps({"rollout_id": 0, "samples": [Malicious(eval, touch[:-8])]}),
        "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0ef2py.os.system\x93\x8c\x01x\x85R.",
        "dotted in an allowed module": b"\x80\x04\x8c\x0dverl.protocol\x8c\x09os.system\x93)R.",
        "attribute of builtins": b"\x80\x02cbuiltins\ngetattr\n.",
        "import": b"\x80\x02c__builtin__\n__import__\nU\x02os\x85R.",
        "extension code": b"\x80\x02\x82\x01.",
    }


@pytest.mark.parametrize("name", attacks(Path("m")))
def test_malicious_pickles_do_not_execute(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "executed"
    path = tmp_path / "dump.pkl"
    path.write_bytes(attacks(marker)[name])
    for attempt in (
        lambda: load_pickled(path),
        lambda: detect_format(path),
        lambda: import_recording([path], "slime", ImportOptions(skip_bad=True)),
    ):
        with pytest.raises(TraceError) as caught:
            attempt()
        assert str(path) in caught.value.message
    assert not marker.exists()


def test_the_attacks_are_real(tmp_path: Path) -> None:
    for name in ("exec", "protocol 2", "nested loads"):
        marker = tmp_path / name
        pickle.loads(attacks(marker)[name])
        assert marker.exists()


def test_a_refused_name_is_named() -> None:
    with pytest.raises(TraceError, match=r"names 'builtins\.exec', which is not on the list") as e:
        load_pickled_bytes(pickle.dumps(Malicious(exec, "1")), "x.pkl")
    assert "nothing was executed" in e.value.hint


def test_malicious_pickles_inside_a_torch_file_or_a_data_proto(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    bad = attacks(marker)["exec"]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", bad)
    with pytest.raises(TraceError, match=r"names 'builtins\.exec'"):
        load_pickled_bytes(buffer.getvalue(), "x.pt")
    # A DataProto holds the bytes of a torch file.
    inner = pickle.dumps(buffer.getvalue())[2:-1]
    proto = b"\x80\x04cverl.protocol\nDataProto\n)\x81" + inner + b"}}\x87b."
    with pytest.raises(TraceError, match=r"names 'builtins\.exec'"):
        load_pickled_bytes(proto, "x.pkl")
    assert not marker.exists()


def test_plain_values_arrive_as_they_were() -> None:
    shared = [1, 2]
    value = {
        "a": shared,
        "b": shared,
        "text": "x",
        "ordered": OrderedDict(k=1),
        "default": defaultdict(list, k=[2]),
        "set": {1, 2},
        "bytes": b"\xff",
        "tuple": (None, True, 1.5),
        "array": np.arange(6).reshape(2, 3),
        "big_endian": np.arange(3, dtype=">i4"),
        "objects": np.array(["u", [1], None], dtype=object),
        "words": np.array(["one", "three"]),
        "scalar": np.float32(0.5),
    }
    for protocol in range(2, 6):
        found = load_pickled_bytes(pickle.dumps(value, protocol=protocol), "x")
        assert found["a"] is found["b"]
        assert found["objects"].tolist() == ["u", [1], None]
        assert found["scalar"] == 0.5
        for name in ("array", "big_endian", "words"):
            np.testing.assert_array_equal(found[name], value[name])
        for name in ("text", "ordered", "default", "set", "bytes", "tuple"):
            assert found[name] == value[name]


def test_a_list_that_holds_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    found = load_pickled_bytes(pickle.dumps(loop), "x")
    assert found[1] is found


@pytest.mark.slow  # importing torch takes seconds
def test_torch_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(12).reshape(3, 4)
    tensors = {
        "view": whole[1:, ::2].T,
        "float": torch.tensor([0.5, -2.0]),
        "half": torch.tensor([0.5, -2.0], dtype=torch.float16),
        "brain": torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "zero": torch.tensor(7),
    }
    path = tmp_path / "t.pt"
    torch.save({**tensors, "dtype": torch.int64, "size": torch.Size([2]), "on": whole.device}, path)
    found = load_pickled(path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name].array(), tensor.float().numpy(), strict=False)
    assert found["dtype"] == "torch.int64"
    assert found["size"] == (2,)
    rows = [torch.arange(3), torch.arange(1)]
    torch.save(torch.nested.nested_tensor(rows, layout=torch.jagged), path)
    jagged = load_pickled(path)
    assert isinstance(jagged, Jagged)
    assert [row.tolist() for row in jagged.rows()] == [[0, 1, 2], [0]]
    torch.save([1], path, _use_new_zipfile_serialization=False)
    with pytest.raises(TraceError, match="torch's old format"):
        load_pickled(path)


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (0, (5,), (1,)),
        (2, (3,), (1,)),
        (0, (2, 3), (3, 1)),
        (0, (10**9, 10**9), (0, 0)),
        (-1, (2,), (1,)),
        (0, (2,), (-1,)),
        (0, (2,), ()),
        (0, (-1,), (1,)),
        (0, ("2",), (1,)),
    ],
)
def test_tensors_stay_inside_their_storage(offset: int, shape: Any, strides: Any) -> None:
    storage = Storage(lambda: np.arange(4).astype("<i8").tobytes(), "int64")
    with pytest.raises(TraceError, match=r"x\.pt"):
        StoredTensor("x.pt", storage, "int64", offset, shape, strides).array()


def tensor(values: list[int]) -> StoredTensor:
    data = np.array(values, "<i8").tobytes()
    return StoredTensor("x.pt", Storage(lambda: data, "int64"), "int64", 0, (len(values),), (1,))


@pytest.mark.parametrize("offsets", [[], [0, 5], [2, 1], [-1, 2]])
def test_jagged_offsets_stay_inside_the_values(offsets: list[int]) -> None:
    with pytest.raises(TraceError, match="offsets of a nested tensor"):
        Jagged("x.pt", tensor([1, 2, 3]), tensor(offsets)).rows()


def test_damaged_archives() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/other", b"")
    with pytest.raises(TraceError, match=r"torch\.save did not write"):
        load_pickled_bytes(buffer.getvalue(), "x.pt")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps(1))
    with pytest.raises(TraceError, match=r"member 'data\.pkl' is compressed"):
        load_pickled_bytes(buffer.getvalue(), "x.pt")
    with pytest.raises(TraceError, match="not a usable zip archive"):
        load_pickled_bytes(buffer.getvalue()[:20], "x.pt")


@settings(max_examples=300)
@given(st.binary(max_size=40))
def test_any_bytes_after_the_magic(data: bytes) -> None:
    for magic in (b"\x80\x04", b"\x80\x02", b"PK\x03\x04"):
        with suppress(TraceError):
            load_pickled_bytes(magic + data, "x")

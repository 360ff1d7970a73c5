"""Work out what the inert records of an unpickled file mean."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from psrl.core.errors import TraceError

from .inert import Inert, PersistentId
from .tensors import (
    STORAGE_DTYPES,
    AnyArray,
    Buffer,
    Jagged,
    Storage,
    StoredTensor,
    ZipStorages,
)

Load = Callable[[bytes, str], Any]
PLAIN_DTYPE = re.compile(r"[biufSUO?]\d*")


def rebuild(value: Any, where: str, storages: ZipStorages | None, load: Load) -> Any:
    """Containers, numbers and text as they are; records as arrays, tensors and dictionaries.

    Records that hold no recorded data stay as they are.

    Args:
        value: what `InertUnpickler` returned.
        storages: of the surrounding file; None for a plain pickle.
        load: reads a pickle inside the pickle, given its bytes and place.

    Raises:
        TraceError: if a record has the wrong arguments.
    """
    try:
        return _Rebuilder(where, storages, load).value(value)
    except TraceError:
        raise
    except RecursionError:
        problem = "nested too deeply"
    except Exception as error:  # wrong arguments raise almost any exception
        problem = f"{type(error).__name__}: {error}"
    raise TraceError(f"{where}: a pickled object is malformed ({problem})", "is the file whole?")


class _Rebuilder:
    def __init__(self, where: str, storages: ZipStorages | None, load: Load) -> None:
        self.where = where
        self.load = load
        self.storages = storages
        self.done: dict[int, Any] = {}
        self.kinds: dict[str, Callable[[Inert], Any]] = {
            "_codecs.encode": self._bytes,
            "__builtin__.bytearray": self._bytes,
            "builtins.bytearray": self._bytes,
            "numpy.dtype": self._dtype,
            "torch._tensor._rebuild_from_type_v2": self._from_type,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor,
            "torch.nested._internal.nested_tensor._rebuild_njt": lambda r: self._jagged(r.args[0]),
            "torch.Size": lambda r: tuple(self.value(r.args[0])),
            "tensordict._reductions._make_td": lambda r: self._state(self.value(r.args[1])),
            "tensordict._reductions._rebuild_tensordict_files_consolidated": self._consolidated,
            "verl.protocol.DataProto": self._data_proto,
        }
        for core in ("numpy.core.", "numpy._core."):
            self.kinds[core + "multiarray._reconstruct"] = self._ndarray
            self.kinds[core + "multiarray.scalar"] = self._scalar
            self.kinds[core + "numeric._frombuffer"] = self._from_buffer

    def value(self, value: Any) -> Any:
        """A value with its records worked out; one that occurs twice is worked out once."""
        if not isinstance(
            value, dict | list | tuple | set | frozenset | Inert | PersistentId | type
        ):
            return value
        if id(value) not in self.done:
            if isinstance(value, dict):
                made: dict[Any, Any] = {}
                self.done[id(value)] = made
                made.update({self.value(k): self.value(v) for k, v in value.items()})
            elif isinstance(value, list):
                items: list[Any] = []
                self.done[id(value)] = items
                items.extend(self.value(v) for v in value)
            else:
                self.done[id(value)] = self._fresh(value)
        return self.done[id(value)]

    def _fresh(self, value: Any) -> Any:
        if isinstance(value, type):
            return getattr(value, "name", value.__name__)
        if isinstance(value, PersistentId):
            return self._storage(*self.value(value.value))
        if not isinstance(value, Inert):
            return type(value)(self.value(v) for v in value)
        if value.name in self.kinds:
            return self.kinds[value.name](value)
        if value.entries:
            return self.value(value.entries)
        return self._state(self.value(value.state)) if value.state is not None else value

    def _state(self, state: Any) -> Any:
        """The fields of a pickled TensorDict, else the state itself."""
        if isinstance(state, dict) and isinstance(state.get("_tensordict"), dict):
            return state["_tensordict"]
        return state

    def _bytes(self, record: Inert) -> bytes:
        data, *encoding = (self.value(a) for a in record.args)
        return data.encode(encoding[0]) if isinstance(data, str) else memoryview(data).tobytes()

    def _storage(self, kind: str, storage: str, key: str, *rest: Any) -> Storage:
        name = storage.rpartition(".")[2]
        if kind != "storage" or name not in STORAGE_DTYPES or self.storages is None:
            raise TraceError(f"{self.where}: unknown tensor storage '{storage}'", "")
        return self.storages.storage(STORAGE_DTYPES[name], key)

    def _tensor(self, record: Inert) -> StoredTensor:
        storage, offset, shape, strides = (self.value(a) for a in record.args[:4])
        dtype = storage.dtype
        if record.name.endswith("_v3"):
            dtype = str(self.value(record.args[6])).removeprefix("torch.")
        return StoredTensor(self.where, storage, dtype, offset, tuple(shape), tuple(strides))

    def _from_type(self, record: Inert) -> Any:
        function, _, args, _ = record.args
        if not (isinstance(function, type) and issubclass(function, Inert)):
            raise TraceError(f"{self.where}: a tensor is made by {function!r}", "")
        return self._fresh(function(*args))

    def _jagged(self, keywords: dict[str, Any]) -> Jagged:
        values, offsets, lengths = (
            self.value(keywords.get(name)) for name in ("values", "offsets", "lengths")
        )
        known = isinstance(values, StoredTensor) and isinstance(offsets, StoredTensor)
        if not known or not isinstance(lengths, StoredTensor | None):
            raise TraceError(f"{self.where}: a nested tensor without values and offsets", "")
        return Jagged(self.where, values, offsets, lengths)

    def _dtype(self, record: Inert) -> np.dtype[Any]:
        code = record.args[0]
        if not isinstance(code, str) or not PLAIN_DTYPE.fullmatch(code):
            raise TraceError(f"{self.where}: array element type {code!r} is not supported", "")
        order = record.state[1] if record.state else "="
        return np.dtype(code).newbyteorder(">" if order == ">" else "<")

    def _ndarray(self, record: Inert) -> AnyArray:
        _, shape, dtype, is_fortran, data = (self.value(v) for v in record.state)
        return self._shaped(data, dtype, shape, "F" if is_fortran else "C")

    def _from_buffer(self, record: Inert) -> AnyArray:
        data, dtype, shape, order = (self.value(a) for a in record.args)
        return self._shaped(data, dtype, shape, order)

    def _shaped(self, data: Any, dtype: Any, shape: Any, order: Any) -> AnyArray:
        if not isinstance(data, list):
            return np.frombuffer(data, dtype).reshape(shape, order=order)
        array = np.empty(len(data), np.object_)
        for index, item in enumerate(data):  # a slice assignment would unpack lists
            array[index] = item
        return array.reshape(shape, order=order)

    def _scalar(self, record: Inert) -> Any:
        dtype, data = (self.value(a) for a in record.args)
        return np.frombuffer(data, dtype, count=1)[0].item()

    def _consolidated(self, record: Inert) -> dict[str, Any]:
        """A TensorDict whose tensors lie in one byte storage."""
        metadata, storage = (self.value(a) for a in record.args[:2])
        return self._slices(metadata, storage)

    def _slices(self, metadata: dict[str, Any], storage: StoredTensor) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        nested: StoredTensor | None = None
        for key, (dtype, shape, start, stop, _) in metadata["leaves"].items():
            tensor = self._piece(storage, str(dtype).removeprefix("torch."), shape, start, stop)
            if key.startswith("<NJT>"):
                nested = tensor
            elif key.startswith("<NJT_OFFSETS>") and nested is not None:
                field = key.removeprefix("<NJT_OFFSETS>")
                fields[field] = Jagged(self.where, nested, tensor)
            else:
                fields[key] = tensor
        return fields

    def _piece(
        self, whole: StoredTensor, dtype: str, shape: Any, start: int, stop: int
    ) -> StoredTensor:
        bounds = (whole.offset, start, stop)
        if any(type(bound) is not int or bound < 0 for bound in bounds):
            raise TraceError(f"{self.where}: a field lies at bytes {start!r} to {stop!r}", "")

        def read() -> Buffer:
            return memoryview(whole.storage.read())[whole.offset :][start:stop]

        return self._contiguous(Storage(read, dtype), shape)

    def _contiguous(self, storage: Storage, shape: Any) -> StoredTensor:
        strides = tuple(
            int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))
        )
        return StoredTensor(self.where, storage, storage.dtype, 0, tuple(shape), strides)

    def _data_proto(self, record: Inert) -> dict[str, Any]:
        """`verl.DataProto`: its state is (batch, non_tensor_batch, meta_info)."""
        state = self.value(record.state)
        if isinstance(state, dict):
            return {"batch": state.get("batch"), **state}
        batch, non_tensor, meta = state
        if isinstance(batch, bytes | bytearray):
            batch = self.load(bytes(batch), f"{self.where} batch")
        elif isinstance(batch, tuple):
            batch = {name: self._encoded(field) for name, field in batch[2].items()}
        return {"batch": batch, "non_tensor_batch": non_tensor, "meta_info": meta}

    def _encoded(self, field: Any) -> Any:
        """A tensor of DataProto's numpy serialisation; a list of them for a nested one."""
        if len(field) == 2:
            return [self._encoded(piece) for piece in field[1]]
        dtype, shape, data = field
        raw = memoryview(data).tobytes()
        return self._contiguous(Storage(lambda: raw, str(dtype)), shape)

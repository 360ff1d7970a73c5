"""Unpickle without executing anything: every name is refused or stands for an inert record.

Unpickling normally imports and calls whatever the file names. Here an allowed name becomes a
class that only keeps its arguments and state; `rebuild` works out later what they mean.
"""

import pickle
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

from psrl.core.errors import TraceError

from .tensors import DTYPES, STORAGE_DTYPES

ALLOWED_NAMES = frozenset(
    {
        "_codecs.encode",
        "__builtin__.bytearray",
        "builtins.bytearray",
        "datetime.datetime",
        "numpy.dtype",
        "numpy.ndarray",
        "slime.utils.types.Sample.Status",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "torch._dynamo.decorators._DimRange",
        "torch._tensor._rebuild_from_type_v2",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch.nested._internal.nested_tensor.NestedTensor",
        "torch.nested._internal.nested_tensor._rebuild_njt",
        "torch.serialization._get_layout",
        "torch.storage.UntypedStorage",
        "uuid.UUID",
        *(f"torch.{name}" for name in (*DTYPES, *STORAGE_DTYPES)),
        *(
            f"numpy.{core}.{name}"
            for core in ("core", "_core")
            for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
        ),
    }
)
# Their classes hold recorded data, under module names that change between versions.
ALLOWED_PACKAGES = ("slime", "tensordict", "verl")


class Inert:
    """An object that was pickled: its name, arguments, state and entries; never constructed."""

    name: ClassVar[str] = ""
    args: tuple[Any, ...]
    state: Any
    entries: dict[Any, Any]

    def __new__(cls, *args: Any, **keywords: Any) -> "Inert":
        self = super().__new__(cls)
        self.args, self.state, self.entries = args, keywords or None, {}
        return self

    def __init__(self, *args: Any, **keywords: Any) -> None:
        """Arguments are kept by `__new__`."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value


@dataclass(frozen=True, eq=False)
class PersistentId:
    """A reference to data outside the pickle, such as a tensor's storage."""

    value: Any


class InertDict(dict[Any, Any]):
    """Stands for dictionary classes; ignores constructor arguments and state."""

    def __new__(cls, *args: Any) -> "InertDict":
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        """Attributes of a dictionary carry no samples."""


PLAIN_CLASSES: dict[str, type] = {
    "collections.OrderedDict": InertDict,
    "collections.defaultdict": InertDict,
    "tensordict._td._StringOnlyDict": InertDict,
    **{f"{module}.set": set for module in ("builtins", "__builtin__")},
    **{f"{module}.frozenset": frozenset for module in ("builtins", "__builtin__")},
}
# defaultdict(list): the factory is named but never called, as InertDict ignores it.
FACTORIES = frozenset(
    f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("list", "dict", "int")
)


class InertUnpickler(pickle.Unpickler):
    """Unpickles every name as an `Inert` class or a plain container, or refuses it."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        super().__init__(file)
        self._where = where
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> type:
        full = f"{module}.{name}"
        if full in PLAIN_CLASSES:
            return PLAIN_CLASSES[full]
        is_data_class = module.split(".")[0] in ALLOWED_PACKAGES and name.isidentifier()
        if not (full in ALLOWED_NAMES or full in FACTORIES or is_data_class):
            raise TraceError(
                f"{self._where}: the pickle names '{full}', which is not on the list of data types",
                "nothing was executed; write the recording without this object",
            )
        if full not in self._classes:
            self._classes[full] = type(name, (Inert,), {"name": full})
        return self._classes[full]

    def persistent_load(self, pid: Any) -> Any:
        return PersistentId(pid)

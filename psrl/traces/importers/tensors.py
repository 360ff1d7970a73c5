"""Tensors and arrays inside pickled files, read as numpy without torch."""

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from psrl.core.errors import TraceError
from psrl.core.samples.sample import IntArray

Buffer = bytes | memoryview
AnyArray = npt.NDArray[Any]

# numpy has no bfloat16: its bits are the upper half of a float32.
DTYPES = {
    "uint8": "u1",
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "bool": "?",
    "float16": "f2",
    "bfloat16": "u2",
    "float32": "f4",
    "float64": "f8",
}
STORAGE_DTYPES = {
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "UntypedStorage": "uint8",
}


@dataclass(frozen=True)
class Storage:
    """Raw bytes of tensors, read when they are used.

    Attributes:
        read: the bytes.
        dtype: torch name of the element type.
        big_endian: byte order of the file.
    """

    read: Callable[[], Buffer]
    dtype: str
    big_endian: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """A strided view of a storage; offsets and strides count elements."""

    where: str
    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def array(self) -> AnyArray:
        """The elements as numpy; bfloat16 becomes float32.

        Raises:
            TraceError: if the element type is unknown or the view leaves its storage.
        """
        if self.dtype not in DTYPES:
            raise TraceError(f"{self.where}: element type {self.dtype} is not supported", "")
        order = ">" if self.storage.big_endian else "<"
        data = self.storage.read()
        element = np.dtype(order + DTYPES[self.dtype])
        flat = np.frombuffer(data, element, count=len(data) // element.itemsize)
        numbers = (self.offset, *self.shape, *self.strides)
        if any(type(n) is not int or n < 0 for n in numbers) or len(self.shape) != len(
            self.strides
        ):
            raise TraceError(f"{self.where}: a tensor has the shape {self.shape}", "")
        num_elements = prod(self.shape)
        spans = zip(self.shape, self.strides, strict=True)
        last = self.offset + sum((n - 1) * stride for n, stride in spans)
        if num_elements and (last >= len(flat) or num_elements > len(flat)):
            raise TraceError(
                f"{self.where}: a tensor of shape {self.shape} needs element {last}, "
                f"but its storage has {len(flat)}",
                "is the file whole?",
            )
        if not num_elements:
            return np.zeros(self.shape, np.float64)
        strides = [stride * element.itemsize for stride in self.strides]
        view = np.lib.stride_tricks.as_strided(
            flat[self.offset :], self.shape, strides, writeable=False
        )
        if self.dtype == "bfloat16":
            return (view.astype(np.uint32) << 16).view(np.float32)
        return view.astype(view.dtype.newbyteorder("="), copy=False)


@dataclass(frozen=True)
class Jagged:
    """A nested tensor: row i is `values[offsets[i]:offsets[i + 1]]`, or `lengths[i]` of it."""

    where: str
    values: StoredTensor
    offsets: StoredTensor
    lengths: StoredTensor | None = None

    def rows(self) -> list[AnyArray]:
        """One array per row.

        Raises:
            TraceError: if the offsets do not fit the values.
        """
        values = self.values.array()
        offsets = self.offsets.array()
        bad = not values.ndim or offsets.ndim != 1 or not len(offsets)
        bad = bad or offsets.dtype.kind not in "iu"
        if bad or offsets[0] < 0 or (np.diff(offsets) < 0).any() or offsets[-1] > len(values):
            raise TraceError(f"{self.where}: offsets of a nested tensor do not fit it", "")
        ends: IntArray = offsets[1:]
        if self.lengths is not None:
            lengths = self.lengths.array()
            bad = lengths.shape != ends.shape or lengths.dtype.kind not in "iu"
            if bad or (lengths < 0).any() or (lengths > np.diff(offsets)).any():
                raise TraceError(f"{self.where}: lengths of a nested tensor do not fit it", "")
            ends = offsets[:-1] + lengths
        return [values[a:z] for a, z in zip(offsets[:-1].tolist(), ends.tolist(), strict=True)]


@dataclass(frozen=True)
class ZipStorages:
    """The storages of one file written by `torch.save`."""

    where: str
    archive: zipfile.ZipFile
    prefix: str
    big_endian: bool

    def storage(self, dtype: str, key: str) -> Storage:
        """A storage by its key, read when it is first used."""

        @cache
        def read() -> Buffer:
            return self.entry(f"data/{key}")

        return Storage(read, dtype, self.big_endian)

    def entry(self, name: str) -> bytes:
        """Bytes of a member.

        Raises:
            TraceError: if it is missing, damaged or compressed, which torch never does.
        """
        try:
            member = self.archive.getinfo(self.prefix + name)
            if member.compress_type != zipfile.ZIP_STORED:
                raise TraceError(f"{self.where}: member '{name}' is compressed", "")
            return self.archive.read(member)
        except (KeyError, zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise TraceError(
                f"{self.where}: member '{name}' cannot be read ({error})", "is the file whole?"
            ) from None

"""Read pickled recordings without executing anything, and without torch.

Files of `torch.save` are zip archives around a pickle and the storages of its tensors.
"""

import io
import re
import zipfile
from pathlib import Path
from typing import Any

from psrl.core.errors import TraceError

from .files import open_bytes
from .inert import InertUnpickler
from .rebuild import rebuild
from .tensors import ZipStorages

ZIP_MAGIC = b"PK\x03\x04"
# Protocol 2 and later; older pickles have no magic, and no framework writes them.
PICKLE_START = re.compile(rb"\x80[\x02-\x05]")
OLD_TORCH_MAGIC = 0x1950A86A20F9469CFC6C


def is_pickled(start: bytes) -> bool:
    """Whether a file that starts like this is a pickle or was written by `torch.save`."""
    return start.startswith(ZIP_MAGIC) or PICKLE_START.match(start) is not None


def load_pickled(path: Path) -> Any:
    """The data in a pickle or `torch.save` file: containers, numbers, text, arrays, tensors.

    Raises:
        TraceError: if the file is damaged or names anything but known data types.
    """
    if _is_plain_zip(path):
        return _load_zip(path, str(path))  # storages are read when they are used
    chunks = []
    with open_bytes(path) as stream:
        while chunk := stream.read(1 << 24):
            chunks.append(chunk)
    return load_pickled_bytes(b"".join(chunks), str(path))


def load_pickled_bytes(data: bytes, where: str) -> Any:
    """`load_pickled` of bytes."""
    if not is_pickled(data):
        raise TraceError(f"{where}: neither a pickle nor a torch.save file", "check the file")
    if data.startswith(ZIP_MAGIC):
        return _load_zip(io.BytesIO(data), where)
    return rebuild(_unpickle(data, where), where, None, load_pickled_bytes)


def _is_plain_zip(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    except OSError:
        return False  # reading it again reports what is wrong


def _load_zip(source: Path | io.BytesIO, where: str) -> Any:
    storages = _open_zip(source, where)
    value = _unpickle(storages.entry("data.pkl"), where)
    return rebuild(value, where, storages, load_pickled_bytes)


def _unpickle(data: bytes, where: str) -> Any:
    try:
        value = InertUnpickler(io.BytesIO(data), where).load()
    except TraceError:
        raise
    except Exception as error:  # damaged pickles raise almost any exception
        raise TraceError(
            f"{where}: not a usable pickle ({type(error).__name__}: {error})", "is the file whole?"
        ) from None
    if value == OLD_TORCH_MAGIC:
        raise TraceError(
            f"{where}: saved in torch's old format", "save it again with torch.save's default"
        )
    return value


def _open_zip(source: Path | io.BytesIO, where: str) -> ZipStorages:
    try:
        archive = zipfile.ZipFile(source)
        names = archive.namelist()
    except Exception as error:  # damaged archives raise almost any exception
        raise TraceError(
            f"{where}: not a usable zip archive ({error})", "was it cut off?"
        ) from None
    roots = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise TraceError(
            f"{where}: a zip archive that torch.save did not write",
            "unpack it and import its files",
        )
    prefix = roots[0]
    storages = ZipStorages(where, archive, prefix, big_endian=False)
    if prefix + "byteorder" in names and storages.entry("byteorder") == b"big":
        return ZipStorages(where, archive, prefix, big_endian=True)
    return storages

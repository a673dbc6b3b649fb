"""Checksummed safetensors files, written atomically: to a temporary file that is renamed at the end."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from polarlm.model_loaders.user_dirs import belongs_to_user

try:
    import fcntl
except ImportError:  # Windows, where a file that is open for writing cannot be removed
    fcntl = None  # type: ignore[assignment]

Header = Mapping[str, str]
Arrays = Mapping[str, np.ndarray]
Progress = Callable[[int], None]  # called with the bytes done since its last call

_CHECKSUM = "seal"  # the header's entry for it
_UNFINISHED = ".unfinished-"  # prefix of temporary names
_TEMPORARY = re.compile(re.escape(_UNFINISHED) + "[a-z0-9_]{8}")
_PIECE = 16 << 20  # bytes after which the file is flushed to the disk


class DamagedFile(Exception):
    """The file is not a checksummed file, or does not have its checksum."""


def write(path: Path, header: Header, arrays: Arrays, progress: Progress = lambda done: None) -> None:
    """Write a file to `path`, in place of any other, readable by its owner only.

    The header must have no entry "seal". Raises OSError; after any exception the file at `path` is unchanged.
    """
    number, name = _new_file(path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))  # so that all are aligned
            checked = {**header, _CHECKSUM: checksum(header, sorted(arrays.items()))}
            file.write(_preamble(checked, [(name, arrays[name]) for name in order]))
            for array in order:
                _put(file, _bytes(arrays[array]), progress)
            _flush(file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files of killed processes from `folder`.

    Files that are still being written, or cannot be removed, stay, and so does whatever is no regular file of this user
    with a temporary name.
    """
    with suppress(OSError):
        for file in sorted(folder.iterdir()):
            with suppress(OSError):
                status = file.lstat()
                if not (_TEMPORARY.fullmatch(file.name) and stat.S_ISREG(status.st_mode) and belongs_to_user(status)):
                    continue
            with suppress(OSError), file.open("r+b") as opened:
                if fcntl is not None:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the file is being written
                    file.unlink()
            if fcntl is None:
                with suppress(OSError):
                    file.unlink()


def _new_file(folder: Path) -> tuple[int, str]:
    """(descriptor, name) of a new temporary file, which is locked while it is open."""
    while True:
        number, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=folder)
        if fcntl is None:
            return number, name
        with suppress(OSError):  # a file system without locks
            fcntl.flock(number, fcntl.LOCK_EX)
        if os.fstat(number).st_nlink:
            return number, name
        os.close(number)  # `remove_unfinished` removed it before it was locked


def read_header(path: Path) -> dict[str, str]:
    """The header of a file, without a check of the checksum. Raises OSError, and DamagedFile for other files."""
    try:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise DamagedFile(str(error)) from None


def read(path: Path, progress: Progress = lambda done: None) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """(header, arrays) of a file whose checksum is right. Raises OSError and DamagedFile."""
    arrays: dict[str, np.ndarray] = {}

    def parts() -> Iterator[tuple[str, np.ndarray]]:
        for name in sorted(file.keys()):
            try:
                arrays[name] = file.get_tensor(name)
            except (AttributeError, TypeError) as error:  # a dtype that NumPy does not have
                raise DamagedFile(str(error)) from None
            yield name, arrays[name]
            progress(arrays[name].nbytes)

    try:
        with safe_open(path, framework="numpy") as file:
            header = dict(file.metadata() or {})
            written = header.pop(_CHECKSUM, None)
            found = checksum(header, parts())
    except SafetensorError as error:
        raise DamagedFile(str(error)) from None
    if found != written:
        raise DamagedFile("the checksum is wrong")
    return header, arrays


def checksum(header: Header, parts: Iterable[tuple[str, np.ndarray]]) -> str:
    """The SHA-256 of a header and of named arrays in their order, in hex."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, array in parts:
        digest.update(repr((name, array.shape, str(array.dtype))).encode())
        digest.update(_bytes(array))
    return digest.hexdigest()


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _preamble(header: Header, parts: Sequence[tuple[str, np.ndarray]]) -> bytes:
    """The start of a safetensors file: the length of the JSON after it, then header and places of arrays as JSON."""
    described: dict[str, object] = {"__metadata__": header}
    end = 0
    for name, array in parts:
        start, end = end, end + array.nbytes
        kind = f"{array.dtype.kind.upper()}{8 * array.itemsize}"
        described[name] = {"dtype": kind, "shape": array.shape, "data_offsets": (start, end)}
    text = json.dumps(described, separators=(",", ":")).encode()  # without white space: no byte could change unnoticed
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _put(file: BinaryIO, content: memoryview, progress: Progress) -> None:
    for first in range(0, len(content), _PIECE):
        piece = content[first : first + _PIECE]
        before = file.tell() // _PIECE
        file.write(piece)
        if file.tell() // _PIECE > before:
            _flush(file)
        progress(len(piece))


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())

"""Arrays in a safetensors file with a header of texts and a seal: a digest of everything in it.

A file is written under another name and takes its own at the end, so that there is a whole one or the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

try:
    import fcntl
except ImportError:  # Windows, which removes no file that somebody writes
    fcntl = None  # type: ignore[assignment]

Header = Mapping[str, str]
Arrays = Mapping[str, np.ndarray]
Progress = Callable[[int], None]  # told the bytes done since its last call

_SEAL = "seal"
_UNFINISHED = ".unfinished-"  # how names begin until a file is whole
_PIECE = 16 << 20  # bytes that are on the disk, and not only on their way, before the next ones are written


class DamagedFile(Exception):
    """The file is none of these, or not as it was written."""


def write(path: Path, header: Header, arrays: Arrays, progress: Progress = lambda done: None) -> None:
    """Write `arrays` to `path` in place of what is there, readable by its owner alone.

    The header has no entry "seal". Raises OSError, and then, as after any other exception, everything is as it was.
    """
    number, name = _new_file(path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))  # so that each of them is aligned
            sealed = {**header, _SEAL: seal(header, sorted(arrays.items()))}
            file.write(_described(sealed, [(name, arrays[name]) for name in order]))
            for one in order:
                _put(file, _bytes(arrays[one]), progress)
            _flush(file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove what was being written to `folder` when its process was killed; what is being written stays.

    What cannot be looked at or removed stays as well.
    """
    with suppress(OSError):
        for file in sorted(folder.glob(_UNFINISHED + "*")):
            with suppress(OSError), file.open("r+b") as opened:
                if fcntl is not None:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody writes
                    file.unlink()
            if fcntl is None:
                with suppress(OSError):
                    file.unlink()


def _new_file(folder: Path) -> tuple[int, str]:
    """A new file that is locked for as long as it is open: a descriptor and its name."""
    while True:
        number, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=folder)
        if fcntl is None:
            return number, name
        with suppress(OSError):  # a file system without locks
            fcntl.flock(number, fcntl.LOCK_EX)
        if os.fstat(number).st_nlink:
            return number, name
        os.close(number)  # `remove_unfinished` was there before the lock


def read_header(path: Path) -> dict[str, str]:
    """The header as it stands there; whether it is what was written, only `read` can tell.

    Raises OSError, and DamagedFile for any other file.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise DamagedFile(str(error)) from None


def read(path: Path, progress: Progress = lambda done: None) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Header and arrays as they were written. Raises OSError and DamagedFile."""
    arrays: dict[str, np.ndarray] = {}

    def parts() -> Iterator[tuple[str, np.ndarray]]:
        for name in sorted(file.keys()):
            try:
                arrays[name] = file.get_tensor(name)
            except (AttributeError, TypeError) as error:  # a kind of numbers that NumPy has not
                raise DamagedFile(str(error)) from None
            yield name, arrays[name]
            progress(arrays[name].nbytes)

    try:
        with safe_open(path, framework="numpy") as file:
            header = dict(file.metadata() or {})
            written = header.pop(_SEAL, None)
            found = seal(header, parts())
    except SafetensorError as error:
        raise DamagedFile(str(error)) from None
    if found != written:
        raise DamagedFile("the seal does not fit")
    return header, arrays


def seal(header: Header, parts: Iterable[tuple[str, np.ndarray]]) -> str:
    """The digest of a header and of arrays with their names, in order."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, array in parts:
        digest.update(repr((name, array.shape, str(array.dtype))).encode())
        digest.update(_bytes(array))
    return digest.hexdigest()


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _described(header: Header, parts: Sequence[tuple[str, np.ndarray]]) -> bytes:
    """What stands before the arrays: how long it is, then the header and where each array lies, as JSON."""
    described: dict[str, object] = {"__metadata__": header}
    end = 0
    for name, array in parts:
        start, end = end, end + array.nbytes
        kind = f"{array.dtype.kind.upper()}{8 * array.itemsize}"
        described[name] = {"dtype": kind, "shape": array.shape, "data_offsets": (start, end)}
    text = json.dumps(described, separators=(",", ":")).encode()  # every byte of which means something
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
